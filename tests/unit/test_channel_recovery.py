"""A coordinator that starts again: what was committed stays, what was under way goes on
or ends, nothing goes backwards."""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.core.members.roster import GroupShape
from replicas.core.versions.recovery import RECOVERY_S
from tests.support.channel_world import SimMember, World, peer_config

WINDOW_S = 2 * RECOVERY_S + 0.6


def world_of(*names: str, world_size: int = 1) -> tuple[World, list[SimMember]]:
    world = World(groups={"rollout": GroupShape(replicas=2, world_size=world_size)})
    sims = [world.join(name, world_size=world_size if name.startswith("rollout") else 1) for name in names]
    return world, sims


def publish(world: World, trainer: SimMember) -> int:
    number = trainer.publish()
    trainer.pack(number)
    return number


def load_all(world: World, *targets: SimMember) -> None:
    for target in targets:
        target.ask()
    world.run()


@pytest.mark.parametrize("keep_log", [True, False])
def test_the_committed_version_is_rebuilt_and_late_joiners_are_caught_up(keep_log: bool) -> None:
    world, (trainer, first, second) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    publish(world, trainer)
    world.run()
    load_all(world, first, second)
    for sim in world.restart(keep_log=keep_log):
        world.rejoin(sim)
    world.run()
    third = world.join("rollout/2/0")
    world.advance(WINDOW_S)
    assert (world.state.commits.latest, world.state.commits.decided) == (1, "digest-1")
    assert third.held == {1}
    third.ask()
    world.run()
    assert third.granted == [1]
    assert [world.state.rounds.of("rollout", replica).loaded for replica in range(3)] == [1, 1, 1]
    number = publish(world, trainer)
    world.advance(1.0)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert (receipt.version, len(receipt.members)) == (2, 3)


def test_nothing_moves_before_the_members_are_back() -> None:
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0")
    publish(world, trainer)
    world.run()
    world.restart()
    world.rejoin(trainer)
    number = publish(world, trainer)
    world.advance(RECOVERY_S - 0.6)
    assert number not in trainer.verdicts
    world.rejoin(target)
    world.advance(2.0)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert [member.name for member in receipt.members] == ["rollout/0/0"]


@pytest.mark.parametrize("keep_log", [True, False])
def test_a_publish_goes_on_under_its_number(keep_log: bool) -> None:
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0")
    publish(world, trainer)
    world.run()
    number = trainer.publish()
    world.up(trainer)
    world.down(trainer)
    trainer.pack(number)
    while world.up(trainer):
        pass
    for sim in world.restart(keep_log=keep_log):
        world.rejoin(sim)
    world.advance(WINDOW_S)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.version == 2
    assert target.held >= {2}


def test_a_publish_that_was_decided_gets_its_receipt() -> None:
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0")
    number = publish(world, trainer)
    world.run(frozen=(trainer,))
    while trainer.outbox or trainer.inbox:
        if world.decisions:
            break
        world.down(trainer)
        world.up(trainer)
        world.run(frozen=(trainer,))
    assert [decision.version for decision in world.decisions] == [1]
    assert number not in trainer.verdicts
    for sim in world.restart():
        world.rejoin(sim)
    world.advance(WINDOW_S)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert (receipt.version, receipt.members) == (1, (target.member,))
    assert trainer.commits == [1]
    assert [decision.version for decision in world.decisions] == [1]


def prepared_by_all(world: World, trainer: SimMember, targets: list[SimMember]) -> None:
    """Every target has all bytes; the source has not said that it is done, so that
    nothing is decided."""
    trainer.pack(trainer.publish(deadline_s=10.0))
    for _ in range(50):
        world.up(trainer)
        if any(type(message).__name__ == "TransferGo" for message in trainer.inbox):
            break
        world.down(trainer)
        world.run(frozen=(trainer,))
    world.run(frozen=(trainer,))
    assert all(1 in target.held for target in targets)
    assert not world.decisions


def test_a_version_that_all_targets_hold_is_committed_when_its_source_is_gone() -> None:
    world, (trainer, *targets) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    prepared_by_all(world, trainer, targets)
    world.restart()
    for target in targets:
        world.rejoin(target)
    world.advance(WINDOW_S)
    assert [decision.version for decision in world.decisions] == [1]
    load_all(world, *targets)
    assert [target.granted for target in targets] == [[1], [1]]


def test_a_version_that_not_all_hold_is_discarded_and_its_number_is_not_used_again() -> None:
    world, (trainer, *targets) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    prepared_by_all(world, trainer, targets)
    targets[1].held.clear()
    world.restart()
    for target in targets:
        world.rejoin(target)
    world.advance(WINDOW_S)
    assert world.decisions == []
    assert targets[0].held == set()
    again = world.join("trainer/0/0")
    number = publish(world, again)
    world.advance(1.0)
    receipt = again.verdicts[number].receipt
    assert receipt is not None
    assert receipt.version == 2


def test_what_its_source_was_told_to_have_failed_is_never_committed() -> None:
    world, (trainer, *targets) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    prepared_by_all(world, trainer, targets)
    world.restart(keep_log=False)
    trainer.open.clear()  # it has had its verdict
    for sim in (trainer, *targets):
        world.rejoin(sim)
    world.advance(WINDOW_S)
    assert world.decisions == []
    assert all(target.held == set() for target in targets)


def test_an_aborted_version_is_never_committed_even_without_its_source() -> None:
    world, (trainer, *targets) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    prepared_by_all(world, trainer, targets)
    world.advance(11.0, frozen=(trainer, *targets))  # the deadline passes, and nobody hears of it
    assert world.aborted == {1}
    world.restart()
    for target in targets:
        world.rejoin(target)
    world.advance(WINDOW_S)
    assert world.decisions == []


def test_a_replica_that_was_loading_stays_in_step() -> None:
    world, (trainer, *ranks) = world_of("trainer/0/0", "rollout/0/0", "rollout/0/1", world_size=2)
    publish(world, trainer)
    world.run()
    ranks[0].ask()
    world.run()
    assert [rank.granted for rank in ranks] == [[1], []]
    sims = world.restart()
    for sim in sims:
        world.rejoin(sim)
    world.advance(WINDOW_S)
    publish(world, trainer)
    world.advance(1.0)
    assert world.state.commits.latest == 2
    ranks[0].ask()
    world.run()
    assert ranks[0].granted == [1], "it must wait for the other rank"
    ranks[1].ask()
    world.run()
    assert ranks[1].granted == [1]
    world.run()
    assert ranks[0].granted == [1, 2]


def test_a_second_restart_changes_nothing() -> None:
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0")
    publish(world, trainer)
    world.run()
    for _ in range(3):
        for sim in world.restart(keep_log=False):
            world.rejoin(sim)
        world.advance(WINDOW_S)
    number = publish(world, trainer)
    world.advance(1.0)
    assert trainer.verdicts[number].receipt is not None
    assert target.held >= {2}
    assert target.commits == [1, 2]


def test_a_member_from_before_that_comes_late_still_counts() -> None:
    world, (trainer, first, second) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    publish(world, trainer)
    world.run()
    world.restart(keep_log=False)
    fresh = world.join("trainer/1/0")
    world.advance(1.0)
    for sim in (first, second):
        world.rejoin(sim)
    world.advance(WINDOW_S)
    number = publish(world, fresh)
    world.advance(1.0)
    receipt = fresh.verdicts[number].receipt
    assert receipt is not None
    assert receipt.version == 2


def test_a_peer_that_died_for_good_does_not_hold_up_the_others_of_a_new_coordinator() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=3)})
    sims = [world.join(f"peer/{index}/0") for index in range(3)]
    for sim in sims:
        sim.post("barrier")
    world.run()
    world.lose(sims[2])
    world.run()
    world.restart()
    for sim in sims[:2]:
        world.rejoin(sim)
    posts = [sim.post("all_reduce") for sim in sims[:2]]
    world.advance(WINDOW_S)
    assert all(sim.ends[post].receipt is not None for sim, post in zip(sims[:2], posts, strict=True))


def test_a_number_that_another_source_used_meanwhile_is_no_receipt_for_the_first() -> None:
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0")
    number = trainer.publish()
    world.up(trainer)
    while world.down(trainer):
        pass
    trainer.pack(number)
    world.restart(keep_log=False)
    other = world.join("trainer/1/0")
    world.members[target.member] = target
    publish(world, other)
    world.advance(1.0)
    assert [decision.version for decision in world.decisions] == [1]
    world.rejoin(trainer)
    world.advance(WINDOW_S)
    error = trainer.verdicts[number].error
    assert error is not None
    assert error.kind == "StaleVersion"


def test_a_number_that_turns_out_to_be_committed_is_not_taken_from_those_who_hold_it() -> None:
    world, (trainer, first) = world_of("trainer/0/0", "rollout/0/0")
    publish(world, trainer)
    world.run()
    world.restart(keep_log=False)
    fresh, slow = world.join("trainer/0/0"), world.join("rollout/1/0")
    slow.stuck = True
    number = fresh.publish(deadline_s=5.0)
    fresh.pack(number)
    world.run()  # it has number 1: nobody who knows better is here
    world.rejoin(first)
    world.advance(6.0)
    assert fresh.verdicts[number].error is not None
    assert not world.aborted
    assert not [message for message in first.seen if isinstance(message, wire.Discard)]
    world.advance(WINDOW_S)
    assert slow.commits == [1]
    assert wire.Discard(1) in slow.seen  # what it was receiving was something else
    first.ask()
    world.advance(1.0)
    assert first.granted == [1]

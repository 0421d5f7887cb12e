"""A coordinator that starts again: what was committed stays, what was under way goes on
or ends, nothing goes backwards."""

from __future__ import annotations

import pytest
import xxhash

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import SyncEnded
from replicas.core.members.roster import GroupShape
from replicas.core.versions.recovery import RECOVERY_S
from tests.support.channel_world import MANIFEST, SimMember, World, channel_config, peer_config

WINDOW_S = 2 * RECOVERY_S + 0.6


def world_of(*names: str, world_size: int = 1) -> tuple[World, list[SimMember]]:
    world = World(groups={"rollout": GroupShape(replicas=2, world_size=world_size)})
    sims = [world.join(name, world_size=world_size if name.startswith("rollout") else 1) for name in names]
    return world, sims


def publish(world: World, trainer: SimMember) -> int:
    number = trainer.publish()
    trainer.pack(number)
    return number


def ends(world: World) -> list[tuple[int, str]]:
    """What was told of publishes, by each coordinator of the world."""
    records = [event.record for event in world.events if isinstance(event, SyncEnded)]
    return [(record.version, record.outcome) for record in records]


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
    assert [world.state.load_rounds.of("rollout", replica).loaded for replica in range(3)] == [1, 1, 1]
    number = publish(world, trainer)
    world.advance(1.0)
    receipt = trainer.receipt(number)
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
    receipt = trainer.receipt(number)
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
    receipt = trainer.receipt(number)
    assert receipt.version == 2
    assert target.held >= {2}


def decided_unheard(world: World, trainer: SimMember, version: int = 1) -> None:
    """It is decided, and all have heard of that but its source."""
    targets = [sim for sim in world.members.values() if sim is not trainer]
    while len(world.decisions) < version:
        others = (world.up(sim) or sim.pull_on() or world.down(sim) for sim in targets)
        assert world.up(trainer) or any(others) or world.down(trainer)
    world.run(frozen=(trainer,))


@pytest.mark.parametrize("keep_log", [True, False])
def test_a_publish_that_was_decided_gets_its_receipt(keep_log: bool) -> None:
    """And its end is told once, by who decided it."""
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0")
    number = publish(world, trainer)
    decided_unheard(world, trainer)
    assert [decision.version for decision in world.decisions] == [1]
    assert number not in trainer.verdicts
    for sim in world.restart(keep_log=keep_log):
        world.rejoin(sim)
    world.advance(WINDOW_S)
    receipt = trainer.receipt(number)
    assert (receipt.version, receipt.members) == (1, (target.member,))
    assert trainer.commits == [1]
    assert [decision.version for decision in world.decisions] == [1]
    assert ends(world) == [(1, "committed")]
    assert world.tally.syncs == {"policy": {"committed": 1}}


def test_a_commit_that_was_recorded_and_not_told_is_told_by_the_next_coordinator() -> None:
    """The one before was killed in between. Its events say so."""
    world, (trainer, _) = world_of("trainer/0/0", "rollout/0/0")
    publish(world, trainer)
    world.run()
    publish(world, trainer)
    decided_unheard(world, trainer, 2)
    assert ends(world) == [(1, "committed"), (2, "committed")]
    world.events.clear()
    del world.tally.commits["policy"][1:]
    sims = world.restart()
    world.expect()
    for sim in sims:
        world.rejoin(sim)
    world.advance(WINDOW_S)
    assert trainer.verdicts[2].receipt is not None
    assert ends(world) == [(2, "committed")]


def test_a_commit_of_long_ago_whose_source_has_not_heard_of_it_is_not_told_as_a_failure() -> None:
    world, (trainer, other, _) = world_of("trainer/0/0", "trainer/1/0", "rollout/0/0")
    publish(world, trainer)
    decided_unheard(world, trainer)
    publish(world, other)
    world.run(frozen=(trainer,))
    sims = world.restart()
    world.expect()
    for sim in sims:
        world.rejoin(sim)
    world.advance(WINDOW_S)
    assert trainer.verdicts.keys() == {1}
    assert ends(world) == [(1, "committed"), (2, "committed")]


def prepared_by_all(world: World, trainer: SimMember, targets: list[SimMember]) -> None:
    """Every target has all bytes, and what they say of it has not been heard, so that
    nothing is decided."""
    trainer.pack(trainer.publish(deadline_s=10.0))
    for target in targets:
        target.stuck = True
    world.run()
    for target in targets:
        target.stuck = False
        target.pull_on()
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
    assert ends(world) == []
    world.rejoin(trainer)
    world.advance(1.0)
    assert trainer.verdicts[1].receipt is not None
    assert ends(world) == [(1, "committed")], "nobody has told it before"


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
    receipt = again.receipt(number)
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


def test_a_load_is_counted_once() -> None:
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0")
    target.loads = False
    publish(world, trainer)
    world.run()
    load_all(world, target)
    target.outbox.append(wire.Loaded(target.unlooked, 0.25))
    world.run()
    for sim in world.restart():
        world.rejoin(sim)
    world.advance(WINDOW_S)
    assert world.state.load_rounds.of("rollout", 0).loaded == 1
    loads = world.tally.loads["policy"]["rollout"]
    assert (sum(loads.counts), loads.total_s) == (1, 0.25)


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
    receipt = fresh.receipt(number)
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
    error = trainer.error(number)
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


def test_a_rank_that_has_had_its_verdict_fails_the_publish_for_the_others() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)))
    ranks = [world.join(f"trainer/0/{rank}", world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.publish()
    world.run()
    world.restart(keep_log=False)
    ranks[1].open.clear()
    for rank in ranks:
        world.rejoin(rank)
    world.advance(WINDOW_S)
    error = ranks[0].error(1)
    assert (error.kind, error.phase) == ("SyncError", "commit")
    assert error.message == (
        "version 1 was not committed before the coordinator restarted: trainer/0/1 knows that it failed"
    )


def test_a_version_that_had_failed_is_not_published_again_by_a_source_that_has_not_heard_of_it() -> None:
    world, (trainer, *targets) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    prepared_by_all(world, trainer, targets)
    world.advance(11.0, frozen=(trainer, *targets))  # the deadline passes, and nobody hears of it
    assert world.aborted == {1}
    world.restart()
    for sim in (trainer, *targets):
        world.rejoin(sim)
    world.advance(WINDOW_S)
    error = trainer.error(1)
    assert (error.kind, error.phase) == ("SyncError", "commit")
    assert world.decisions == []
    assert all(target.held == set() for target in targets)
    assert ends(world) == [(1, "deadline_exceeded")], "by who decided it"


def test_what_failed_to_pack_while_members_came_back_is_told_when_it_has_its_number() -> None:
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0")
    publish(world, trainer)
    world.run()
    for sim in world.restart():
        world.rejoin(sim)
    number = trainer.publish()
    trainer.outbox.append(wire.PackFailed(number, wire.WireError("NoCapacity", "no memory is left")))
    world.run()
    assert number not in trainer.verdicts
    world.advance(WINDOW_S)
    error = trainer.error(number)
    assert (error.kind, error.message, error.version) == ("NoCapacity", "no memory is left", 2)
    assert target.commits == [1]


@pytest.mark.parametrize("answer", ["not here", "other bytes", "no manifest"])
def test_a_holder_that_describes_nothing_of_use_is_passed_over(answer: str) -> None:
    """Its copy is not counted any more: it is sent the version again."""
    world, (trainer, bad, good) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    publish(world, trainer)
    world.run()
    world.restart()
    handle, image = bad.handle, MANIFEST.whole.hash
    unreadable = xxhash.xxh3_128_hexdigest(b"no manifest")
    bad.manifests[unreadable] = b"no manifest"

    def handle_badly(message: wire.FromCoordinator) -> None:
        if not isinstance(message, wire.Describe):
            handle(message)
        elif answer == "not here":
            bad.outbox.append(wire.Described(1, "", "", {}, "cpu"))
        elif answer == "other bytes":
            bad.outbox.append(wire.Described(1, "digest-of-others", image, {}, "cpu"))
        else:
            bad.outbox.append(wire.Described(1, "digest-1", unreadable, {}, "cpu"))

    bad.handle = handle_badly  # type: ignore[method-assign]  # it has lost what it held
    for sim in (bad, good):
        world.rejoin(sim)
    bad.held.clear()
    world.advance(WINDOW_S)
    assert any(isinstance(message, wire.Describe) for message in good.seen)
    assert world.state.commits.committed is not None
    assert bad.held == {1}


def test_a_holder_that_has_computed_no_digest_describes_the_version_that_was_decided() -> None:
    world, (trainer, holder) = world_of("trainer/0/0", "rollout/0/0")
    publish(world, trainer)
    world.run()
    world.restart()
    handle, image = holder.handle, MANIFEST.whole.hash
    holder.manifests[image] = MANIFEST.whole.encode()

    def describe(message: wire.FromCoordinator) -> None:
        if isinstance(message, wire.Describe):
            holder.outbox.append(wire.Described(1, "", image, {}, "cpu"))
        else:
            handle(message)

    holder.handle = describe  # type: ignore[method-assign]  # it mapped the version, and has not read it
    world.rejoin(holder)
    world.advance(WINDOW_S)
    assert world.state.commits.committed is not None
    assert world.state.commits.committed.digest == "digest-1"


def test_a_description_of_a_version_that_is_the_newest_no_more() -> None:
    world, (trainer, slow) = world_of("trainer/0/0", "rollout/0/0")
    publish(world, trainer)
    world.run()
    for sim in world.restart():
        world.rejoin(sim)
    world.run()
    world.advance(RECOVERY_S + 0.5, frozen=(slow,))
    describe = wire.Describe(1)
    slow.inbox.remove(describe)  # it is slow to answer
    publish(world, trainer)
    world.advance(1.0)
    assert slow.commits == [1, 2]
    slow.handle(describe)
    world.run()
    assert world.state.commits.committed is not None
    assert world.state.commits.committed.version == 2


def test_a_newer_version_that_is_learned_while_the_manifest_of_one_is_read() -> None:
    world, (trainer, slow, knows) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    publish(world, trainer)
    world.run()
    world.lose(slow)
    publish(world, trainer)
    world.run()
    world.restart(keep_log=False)
    world.rejoin(slow)
    asks, handle = [], slow.handle

    def handle_slowly(message: wire.FromCoordinator) -> None:
        if isinstance(message, wire.ManifestAsk):
            asks.append(message)
        else:
            handle(message)

    slow.handle = handle_slowly  # type: ignore[method-assign]  # its manifest never comes
    world.advance(WINDOW_S)
    assert len(asks) == 1
    assert (world.state.commits.latest, world.state.commits.committed) == (1, None)
    world.rejoin(knows)
    world.run()
    committed = world.state.commits.committed
    assert committed is not None
    assert (committed.version, committed.digest) == (2, "digest-2")


def test_a_resumed_publish_whose_commit_is_learned_while_it_moves_gets_its_receipt() -> None:
    """And the next one starts: nothing is under way any more."""
    world, (trainer, first) = world_of("trainer/0/0", "rollout/0/0")
    publish(world, trainer)
    while not world.decisions:
        for sim in (trainer, first):
            world.up(sim)
            if not world.decisions:
                world.down(sim)
                sim.pull_on()
    world.run(frozen=(trainer,))
    assert (first.commits, trainer.commits) == ([1], [])
    world.restart(keep_log=False)
    world.rejoin(trainer)
    second = world.join("rollout/1/0")
    world.run()
    world.advance(RECOVERY_S - 0.5)
    world.now += 1.0
    world.state.tick(world.now)
    world._collect()
    assert world.state.commits.main is not None, "nobody who knows of the commit has come back"
    world.rejoin(first)
    world.run(frozen=(first,))
    receipt = trainer.receipt(1)
    assert (receipt.version, receipt.nbytes) == (1, 16)
    world.run()
    assert second.commits == [1]
    number = publish(world, trainer)
    world.advance(1.0)
    receipt = trainer.receipt(number)
    assert (receipt.version, len(receipt.members)) == (2, 2)


def test_other_bytes_under_the_number_that_is_committed_are_thrown_away() -> None:
    world, (trainer, first) = world_of("trainer/0/0", "rollout/0/0")
    number = trainer.publish()
    world.run()
    trainer.pack(number)
    world.restart(keep_log=False)
    for sim in (trainer, first):
        world.rejoin(sim)
    other = world.join(
        "rollout/1/0", resume_term=1, held=(wire.HeldVersion(1, "digest-of-others"),), latest=0, publishes=0
    )
    other.held.add(1)
    other.outbox.append(wire.Resumed())
    world.run()
    world.advance(WINDOW_S)
    receipt = trainer.receipt(number)
    assert (receipt.digest, receipt.members) == ("digest-1", (first.member,))
    assert wire.Discard(1) in other.seen
    assert other.held == {1}, "it was sent what is committed"

"""Targets that do not get ready: the others wait for them once, and no joiner waits for
them at all.

Covers: core/moving/transfer.py, core/versions/catch_up.py.
"""

from __future__ import annotations

import pytest

from replicas.carry.dialler import GREET_S
from replicas.core.members.roster import GroupShape
from replicas.core.moving.stragglers import PATIENCE_S as SLOW_S
from replicas.core.versions.catch_up import MUTE_S, PATIENCE_S
from replicas.core.versions.recovery import RECOVERY_S
from tests.support.channel_world import SimMember, World, channel_config


def world_of(rollouts: int, **config: object) -> tuple[World, SimMember, list[SimMember]]:
    world = World(channel_config(**config), groups={"rollout": GroupShape(replicas=rollouts)})
    trainer = world.join("trainer/0/0")
    return world, trainer, [world.join(f"rollout/{index}/0") for index in range(rollouts)]


def publish(world: World, trainer: SimMember, deadline_s: float = 60.0) -> int:
    number = trainer.publish(deadline_s=deadline_s)
    trainer.pack(number)
    return number


def seconds_to_the_receipt(world: World, trainer: SimMember, deadline_s: float = 60.0) -> tuple[float, tuple[str, ...]]:
    number = publish(world, trainer, deadline_s)
    began = world.now
    while number not in trainer.verdicts:
        world.advance(0.5)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    return world.now - began, receipt.lost


def test_a_target_that_takes_nothing_holds_up_one_version_only() -> None:
    world, trainer, (reader, _) = world_of(2)
    assert seconds_to_the_receipt(world, trainer) == (0.5, ())
    reader.mute = True
    waited, lost = seconds_to_the_receipt(world, trainer)
    assert waited <= SLOW_S + 1.0
    assert lost == ("rollout/0/0",)
    for _ in range(3):
        assert seconds_to_the_receipt(world, trainer) == (0.5, ())
    reader.mute = False
    world.advance(70)  # the offer that it took no notice of ends, and the next one is taken
    assert max(reader.held) == 5
    assert seconds_to_the_receipt(world, trainer) == (0.5, ())
    assert 6 in reader.held


def test_so_does_one_that_would_only_have_to_map_it() -> None:
    """Beside the trainer, where nothing is sent: its messages may be signs of life."""
    world = World(groups={"rollout": GroupShape(replicas=2)})
    trainer = world.join("trainer/0/0", machine="a")
    mute, _ = (world.join(f"rollout/{index}/0", machine="a") for index in range(2))
    assert seconds_to_the_receipt(world, trainer) == (0.5, ())
    mute.mute = True
    waited, lost = seconds_to_the_receipt(world, trainer, deadline_s=10)
    assert 5 <= waited < 7
    assert lost == ("rollout/0/0",)
    for _ in range(3):
        assert seconds_to_the_receipt(world, trainer) == (0.5, ())
    mute.mute = False
    world.advance(70)
    assert max(mute.held) == 5
    assert seconds_to_the_receipt(world, trainer) == (0.5, ())


@pytest.mark.parametrize("deadline_s", [4, 10, 20, 60])
@pytest.mark.parametrize("config", [{}, {"transport": "group"}, {"staging": "device"}], ids=str)
def test_one_on_another_host_that_answers_nothing_costs_half_of_the_deadline(
    deadline_s: int, config: dict[str, str]
) -> None:
    world = World(channel_config(**config), groups={"rollout": GroupShape(replicas=2)})

    def join(name: str, machine: str) -> SimMember:
        return world.join(name, machine=machine, cuda_devices=(f"GPU-{machine}",))

    trainer = join("trainer/0/0", "a")
    mute, good = join("rollout/0/0", "b"), join("rollout/1/0", "a")
    seconds_to_the_receipt(world, trainer)
    join("rollout/2/0", "b")  # a lane is formed anew
    world.advance(1.0)
    mute.mute = True
    waited, lost = seconds_to_the_receipt(world, trainer, deadline_s=deadline_s)
    assert waited <= deadline_s / 2 + 1.0
    assert lost == ("rollout/0/0",)
    assert max(good.held) == 2


def test_nor_does_an_older_version_than_the_newest_wait_for_it() -> None:
    """Its slot may be the one that the next publish needs."""
    world = World(groups={"rollout": GroupShape(replicas=2)})
    trainer = world.join("trainer/0/0", machine="a")
    mute, _ = world.join("rollout/0/0", machine="b"), world.join("rollout/1/0", machine="a")
    seconds_to_the_receipt(world, trainer)
    mute.mute = True
    offered: list[int] = []
    for _ in range(3):
        seconds_to_the_receipt(world, trainer, deadline_s=10)
        world.advance(MUTE_S + 1.0)
        transfer = world.state.commits.catch_ups[0].transfer
        offered.append(transfer.payload.version if transfer is not None else world.state.commits.latest)
    assert offered == [2, 3, 4]
    mute.mute = False
    world.advance(70)
    assert max(mute.held) == 4


@pytest.mark.parametrize(("which", "longest_s"), [(0, 1.0 + GREET_S), (1, 2.0)])
def test_one_whose_connection_has_ended_is_waited_for_a_moment_only(which: int, longest_s: float) -> None:
    """As it is killed on another host: nobody sees its process end, but its connection
    does. Who pulls from it finds that out, too."""
    world, trainer, targets = world_of(2)
    gone = targets[which]
    assert seconds_to_the_receipt(world, trainer) == (0.5, ())
    number = publish(world, trainer)
    world.state.roster.disconnected(gone.member, world.now)
    began = world.now
    while number not in trainer.verdicts:
        world.advance(0.5, frozen=(gone,))
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.lost == (gone.member.name,)
    assert world.now - began <= longest_s
    world.state.roster.connected(gone.member, world.now)
    world.advance(2.0)
    assert 2 in gone.held
    assert seconds_to_the_receipt(world, trainer) == (0.5, ())


@pytest.mark.parametrize("others", [1, 2])
def test_the_mates_of_one_that_froze_get_the_version_without_it(others: int) -> None:
    """It pulls for its host, and another host is done: the host is not slow."""
    world = World(channel_config(), groups={"rollout": GroupShape(replicas=4)})
    trainer = world.join("trainer/0/0", machine="a")
    world.join("rollout/3/0", machine="b")  # first in the chain, it has the version at once
    here = [world.join(f"rollout/{index}/0", machine="c") for index in range(1 + others)]
    assert seconds_to_the_receipt(world, trainer) == (0.5, ())
    number = publish(world, trainer)
    began = world.now
    while number not in trainer.verdicts:
        world.advance(0.25, frozen=(here[0],))
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.lost == (here[0].member.name,)
    assert world.now - began < SLOW_S + 1.0


def test_one_that_has_a_new_connection_at_once_is_not_left_out() -> None:
    world, trainer, (brief, _) = world_of(2)
    number = publish(world, trainer)
    world.state.roster.disconnected(brief.member, world.now)
    world.advance(1.0, frozen=(brief,))
    world.state.roster.connected(brief.member, world.now)
    world.advance(0.5)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.lost == ()


def test_a_joiner_does_not_wait_for_one_that_takes_nothing() -> None:
    world, trainer, (reader, _) = world_of(2)
    seconds_to_the_receipt(world, trainer)
    reader.mute = True
    seconds_to_the_receipt(world, trainer, deadline_s=10)
    world.advance(PATIENCE_S)
    late = world.join("rollout/2/0")
    world.advance(PATIENCE_S + 1)
    assert late.held == {2}


def test_two_joiners_of_whom_one_takes_nothing() -> None:
    world, trainer, _ = world_of(1)
    seconds_to_the_receipt(world, trainer)
    slow, late = world.join("rollout/1/0"), world.join("rollout/2/0")
    slow.mute = True
    world.advance(2 * PATIENCE_S)
    assert late.held == {1}
    slow.mute = False
    world.advance(70)
    assert slow.held == {1}


def test_a_rank_without_a_number_waits_for_one_that_has_it() -> None:
    """Also when it is the first to come back to the new coordinator."""
    for order in ((0, 1), (1, 0)):
        world = World(groups={"trainer": GroupShape(1, 2)})
        ranks = [world.join(f"trainer/0/{rank}", world_size=2) for rank in range(2)]
        target = world.join("rollout/0/0")
        number = ranks[0].publish()
        world.run()
        assert ranks[0].open[number].version == 1
        ranks[1].publish()  # nobody hears of it
        world.restart()
        for index in order:
            world.rejoin(ranks[index])
        world.rejoin(target)
        world.advance(RECOVERY_S + 0.6)
        assert [rank.open[number].version for rank in ranks] == [1, 1]
        ranks[0].pack(number)
        ranks[1].pack(number, manifest=None)
        world.advance(1.0)
        verdicts = [rank.verdicts[number].receipt for rank in ranks]
        assert [receipt.version for receipt in verdicts if receipt is not None] == [1, 1]


def test_one_that_has_missed_a_version_that_is_gone_is_waited_for_again() -> None:
    world, trainer, (reader,) = world_of(1)
    seconds_to_the_receipt(world, trainer)
    number = publish(world, trainer)
    world.advance(8.0, frozen=(reader,))
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.lost == ("rollout/0/0",)
    world.lose(trainer)  # nobody else has the version that it has missed
    again = world.join("trainer/0/0")
    world.advance(1.0)
    assert seconds_to_the_receipt(world, again) == (0.5, ())
    (verdict,) = again.verdicts.values()
    assert verdict.receipt is not None
    assert verdict.receipt.members == (reader.member,)


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_of_two_that_are_caught_up_together_one_does_not_wait_for_the_other(transport: str) -> None:
    world, trainer, (reader,) = world_of(1, transport=transport)
    seconds_to_the_receipt(world, trainer)
    for sim in world.restart():
        world.rejoin(sim)
    slow, late = world.join("rollout/1/0"), world.join("rollout/2/0")
    slow.mute = True
    world.advance(RECOVERY_S + 0.5)
    transfer = world.state.commits.catch_ups[0].transfer
    assert transfer is not None
    assert transfer.asked == {slow.member, late.member}
    world.advance(PATIENCE_S + 1)
    assert (late.held, slow.held, reader.held) == ({1}, set(), {1})

"""Keepers: the newest committed version outlives its source on hosts that are not the coordinator's, and is sent from all."""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.config import Party
from replicas.core.manifest import PartManifest, Piece, TensorSpec
from replicas.core.roster import GroupShape
from tests.support.channel_world import KEEPER, SimMember, World, channel_config

PARTS = [
    PartManifest((TensorSpec("weight", "float32", (4,)),), (), (Piece(0, (2 * rank,), (2,), 0),)) for rank in range(2)
]


def begin(trainer: SimMember) -> int:
    """Publish, and say that it is packed."""
    number = trainer.publish()
    trainer.pack(number)
    trainer.world.run()
    return number


def committed(trainer: SimMember, number: int) -> int:
    """Its version."""
    end = trainer.verdicts[number]
    assert end.receipt is not None, end.error
    assert KEEPER not in {member.name for member in end.receipt.members}
    return end.receipt.version


def late(world: World, machine: str, name: str = "rollout/0/0") -> SimMember:
    """A target that comes when all is over."""
    target = world.join(name, machine=machine)
    target.ask()
    world.run()
    world.advance(10.0)
    return target


def roles(sim: SimMember) -> list[str]:
    return [message.role for message in sim.seen if isinstance(message, wire.TransferOffer)]


def wanted(sim: SimMember) -> int:
    return sum(isinstance(message, wire.KeeperWanted) for message in sim.seen)


@pytest.fixture
def world() -> World:
    return World(machine="a")


@pytest.mark.parametrize("machine", ["b", ""])
def test_a_version_outlives_its_source_on_another_host(world: World, machine: str) -> None:
    trainer = world.join("trainer/0/0", machine="b")
    world.run()
    assert committed(trainer, begin(trainer)) == 1
    world.lose(trainer)
    assert late(world, machine).granted == [1]
    [keeper] = world.keepers
    assert roles(keeper) == (["map"] if machine else ["map", "send"])


def test_one_host_needs_none(world: World) -> None:
    trainers = [world.join(f"trainer/{index}/0", machine=machine) for index, machine in enumerate(("a", ""))]
    world.join("rollout/0/0", machine="b")
    world.advance(60.0)
    assert committed(trainers[0], begin(trainers[0])) == 1
    assert [wanted(trainer) for trainer in trainers] == [0, 0], "one that shares no memory cannot be kept"
    assert not world.keepers


@pytest.mark.parametrize("changes", [{"transport": "group"}, {"staging": "device"}])
def test_where_no_memory_can_be_kept_there_is_none(changes: dict[str, object]) -> None:
    world = World(channel_config(**changes), machine="a")
    trainer = world.join("trainer/0/0", machine="b", cuda_devices=("GPU-1",))
    world.advance(60.0)
    assert wanted(trainer) == 0


def test_the_first_version_waits_for_the_keeper_to_start(world: World) -> None:
    world.starts_keepers = False
    trainer = world.join("trainer/0/0", machine="b")
    world.run()
    number = begin(trainer)
    world.advance(3.0)
    assert number not in trainer.verdicts
    keeper = world.start_keeper()
    world.run()
    assert committed(trainer, number) == 1
    assert keeper.held == {1}


def test_a_slow_keeper_is_waited_for_while_it_can_be_heard(world: World) -> None:
    """As on a machine that is busy: it takes its time to say where it is, and to map."""
    world.starts_keepers = False
    trainer = world.join("trainer/0/0", machine="b")
    world.run()
    number = begin(trainer)
    keeper = world.start_keeper()
    keeper.mute = True
    for _ in range(8):
        world.advance(1.0)
    assert number not in trainer.verdicts
    keeper.mute = False
    [locate] = [message for message in keeper.seen if isinstance(message, wire.Locate)]
    keeper.handle(locate)
    world.run()
    assert committed(trainer, number) == 1
    assert keeper.held == {1}


@pytest.mark.parametrize("target", [False, True])
def test_it_waits_neither_long_nor_before_a_target(world: World, target: bool) -> None:
    world.starts_keepers = False
    trainer = world.join("trainer/0/0", machine="b")
    world.run()
    number = begin(trainer)
    if target:
        assert late(world, "").held == {1}
    else:
        world.advance(21.0)
    assert committed(trainer, number) == 1


def test_a_frozen_keeper_costs_a_moment(world: World) -> None:
    trainer = world.join("trainer/0/0", machine="b")
    world.run()
    [keeper] = world.keepers
    keeper.mute = True
    number = begin(trainer)
    world.advance(1.0, frozen=(keeper,))
    assert number not in trainer.verdicts
    world.advance(3.0, frozen=(keeper,))
    assert committed(trainer, number) == 1
    world.advance(2.0, frozen=(keeper,))
    assert committed(trainer, begin(trainer)) == 2, "it is suspect now"
    world.advance(60.0, frozen=(keeper,))
    assert keeper not in world.keepers
    [other] = world.keepers
    assert other.held == {2}


def test_a_target_that_has_it_is_enough(world: World) -> None:
    trainer = world.join("trainer/0/0", machine="b")
    target = world.join("rollout/0/0", machine="b")
    world.run()
    [keeper] = world.keepers
    keeper.mute = True
    number = begin(trainer)
    assert committed(trainer, number) == 1
    assert target.held == {1}


def test_a_source_that_dies_before_the_commit(world: World) -> None:
    world.starts_keepers = False
    trainer = world.join("trainer/0/0", machine="b")
    world.run()
    begin(trainer)
    world.lose(trainer)
    world.advance(20.0)
    assert not world.decisions
    assert not world.state.commits.publishes.open()


def test_a_source_that_dies_when_the_keeper_has_it(world: World) -> None:
    """The keeper's answer is on its way: the version is lost with its number, and taken back. A moment later it is kept."""
    trainer = world.join("trainer/0/0", machine="b")
    world.run()
    [keeper] = world.keepers
    trainer.pack(trainer.publish())
    while 1 not in keeper.held:
        for sim in (trainer, keeper):
            world.up(sim)
            if 1 not in keeper.held:
                world.down(sim)
    world.lose(trainer)
    world.advance(5.0)
    assert not keeper.held
    assert not world.decisions


def test_one_for_each_host_however_many_sources_there_are(world: World) -> None:
    trainers = [world.join(f"trainer/{index}/0", machine=machine) for index, machine in enumerate("bbc")]
    world.advance(60.0)
    assert sorted(sim.machine for sim in world.keepers) == ["b", "c"]
    assert sum(map(wanted, trainers)) == 2
    second = world.join(KEEPER, machine="b", keeps=True)
    world.run()
    assert len(world.keepers) == 2, second


def test_it_leaves_when_it_has_nothing_to_keep(world: World) -> None:
    first = world.join("trainer/0/0", machine="b")
    world.run()
    committed(first, begin(first))
    world.lose(first)
    world.advance(60.0)
    assert [sim.held for sim in world.keepers] == [{1}]
    second = world.join("trainer/0/0", machine="a", generation=2)
    world.run()
    assert committed(second, begin(second)) == 2
    world.advance(1.0)
    assert not world.keepers


def test_targets_on_its_host_are_no_reason_to_stay(world: World) -> None:
    first = world.join("trainer/0/0", machine="b")
    world.join("rollout/0/0", machine="b")
    world.run()
    committed(first, begin(first))
    world.lose(first)
    second = world.join("trainer/0/0", machine="a", generation=2)
    world.run()
    assert committed(second, begin(second)) == 2
    world.advance(1.0)
    assert not world.keepers


def test_another_member_is_asked_when_none_comes_at_growing_intervals(world: World) -> None:
    world.starts_keepers = False
    trainers = [world.join(f"trainer/{index}/0", machine="b") for index in range(2)]
    world.advance(15.0)
    assert [wanted(one) for one in trainers] == [1, 0]
    world.advance(10.0)
    assert [wanted(one) for one in trainers] == [1, 1]
    world.advance(3600.0)
    assert 10 < sum(map(wanted, trainers)) < 20


def test_one_that_cannot_map_is_replaced_not_too_often(world: World) -> None:
    world.starts_keepers = False
    trainer = world.join("trainer/0/0", machine="b")
    number = 0
    for _ in range(120):
        if world.wanted:
            world.start_keeper().unmappable = True
            world.run()
            number = number or begin(trainer)
        world.advance(1.0)
    assert committed(trainer, number) == 1
    assert not world.keepers
    assert 2 < wanted(trainer) < 12


def test_a_version_that_fails_is_not_kept(world: World) -> None:
    trainer = world.join("trainer/0/0", machine="b")
    target = world.join("rollout/0/0", machine="")
    world.run()
    target.stuck = True
    number = begin(trainer)
    [keeper] = world.keepers
    assert keeper.held == {1}
    world.advance(61.0)
    assert trainer.verdicts[number].error is not None
    assert not keeper.held


@pytest.mark.parametrize("keep_log", [True, False])
def test_it_tells_a_coordinator_that_starts_again(world: World, keep_log: bool) -> None:
    trainer = world.join("trainer/0/0", machine="b")
    world.run()
    committed(trainer, begin(trainer))
    world.lose(trainer)
    [back] = world.restart(keep_log=keep_log)
    world.rejoin(back)
    world.advance(5.0)
    assert late(world, "").granted == [1]


@pytest.mark.parametrize("machines", ["bb", "bc"])
def test_parts_are_put_together_where_all_of_them_are(machines: str) -> None:
    config = channel_config(sources=(Party("trainer", "all"),))
    world = World(config, {"trainer": GroupShape(world_size=2)}, machine="a")
    trainers = [world.join(f"trainer/0/{rank}", world_size=2, machine=machines[rank]) for rank in range(2)]
    world.run()
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number, manifest in zip(trainers, numbers, PARTS, strict=True):
        trainer.pack(number, manifest=manifest)
    world.run()
    assert committed(trainers[0], numbers[0]) == 1
    assert [sim.held for sim in world.keepers] == ([{1}] if machines == "bb" else [set(), set()])
    for trainer in trainers:
        world.lose(trainer)
    assert late(world, "").held == ({1} if machines == "bb" else set())


def test_what_the_coordinator_keeps_is_sent_by_one_that_leaves_again(world: World) -> None:
    trainer = world.join("trainer/0/0", machine="a")
    world.run()
    committed(trainer, begin(trainer))
    world.lose(trainer)
    world.advance(60.0)
    assert not world.keepers
    far = late(world, "b")
    assert far.granted == [1]
    assert not world.keepers
    world.lose(far)
    near = late(world, "a")
    assert roles(near) == ["map"]


def test_parts_that_the_coordinator_keeps_are_put_together_to_be_sent() -> None:
    config = channel_config(sources=(Party("trainer", "all"),))
    world = World(config, {"trainer": GroupShape(world_size=2)}, machine="a")
    trainers = [world.join(f"trainer/0/{rank}", world_size=2, machine="a") for rank in range(2)]
    world.run()
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number, manifest in zip(trainers, numbers, PARTS, strict=True):
        trainer.pack(number, manifest=manifest)
    world.run()
    for trainer in trainers:
        world.lose(trainer)
    assert late(world, "b").granted == [1]


def test_the_end_of_the_run_is_theirs(world: World) -> None:
    trainer = world.join("trainer/0/0", machine="b")
    world.run()
    world.state.end_keepers()
    world.advance(60.0)
    assert not world.keepers
    assert wanted(trainer) == 1

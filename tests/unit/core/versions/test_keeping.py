"""The newest committed version outlives its source: the coordinator keeps its memory on
its own host."""

from __future__ import annotations

import msgspec
import pytest

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import Keep
from replicas.core.base.manifest import PartManifest, Piece, TensorSpec
from replicas.core.members.roster import GroupShape
from tests.support.channel_world import COORDINATOR, SimMember, World, channel_config

PARTS = [
    PartManifest((TensorSpec("weight", "float32", (4,)),), (), (Piece(0, (2 * rank,), (2,), 0),)) for rank in range(2)
]


def publish(world: World, *trainers: SimMember, manifests: list[PartManifest] | None = None) -> int:
    """A committed version; its number."""
    world.run()
    numbers = [trainer.publish() for trainer in trainers]
    for index, (trainer, number) in enumerate(zip(trainers, numbers, strict=True)):
        trainer.pack(number, **({"manifest": manifests[index]} if manifests else {}))
    world.run()
    end = trainers[0].verdicts[numbers[0]]
    assert end.receipt is not None
    return end.receipt.version


def offers(sim: SimMember) -> list[wire.TransferOffer]:
    return [message for message in sim.seen if isinstance(message, wire.TransferOffer)]


def test_a_target_that_joins_after_the_source_has_died_gets_the_version() -> None:
    world = World(machine="a")
    trainer = world.join("trainer/0/0", machine="a")
    assert publish(world, trainer) == 1
    assert world.kept == {trainer.member: 1}
    world.lose(trainer)
    target = world.join("rollout/0/0", machine="a")
    target.ask()
    world.run()
    assert target.granted == [1]
    [offer] = offers(target)
    assert offer.place is not None
    assert (offer.role, offer.place.pid) == ("map", COORDINATOR)


def test_only_the_newest_is_kept() -> None:
    world = World(machine="a")
    trainer = world.join("trainer/0/0", machine="a")
    publish(world, trainer)
    assert publish(world, trainer) == 2
    assert world.kept == {trainer.member: 2}


def test_a_new_source_publishes_on_and_the_kept_one_is_let_go() -> None:
    world = World(machine="a")
    trainer = world.join("trainer/0/0", machine="a")
    publish(world, trainer)
    world.lose(trainer)
    again = world.join("trainer/0/0", machine="a", generation=2)
    assert publish(world, again) == 2
    assert world.kept == {again.member: 2}
    assert not world.state.keeping.stand_ins_with(2)


def test_another_host_gets_it_through_the_first_who_has_mapped_it() -> None:
    world = World(machine="a")
    trainer = world.join("trainer/0/0", machine="a")
    publish(world, trainer)
    world.lose(trainer)
    far = world.join("rollout/0/0", machine="b")
    far.ask()
    world.run()
    world.advance(5.0)
    assert not offers(far), "nobody can send it"
    near = world.join("rollout/1/0", machine="a")
    near.ask()
    world.run()
    world.advance(5.0)
    assert (near.granted, far.granted) == ([1], [1])
    assert [offer.role for offer in offers(near)] == ["map", "serve"]


def test_a_version_in_parts_is_kept_whole() -> None:
    config = channel_config(sources=(ChannelRole("trainer", "all"),))
    world = World(config, {"trainer": GroupShape(world_size=2)}, machine="a")
    trainers = [world.join(f"trainer/0/{rank}", world_size=2, machine="a") for rank in range(2)]
    publish(world, *trainers, manifests=PARTS)
    assert set(world.kept.values()) == {1}
    assert len(world.kept) == 2
    for trainer in trainers:
        world.lose(trainer)
    target = world.join("rollout/0/0", machine="a")
    target.ask()
    world.run()
    assert target.granted == [1]
    [offer] = offers(target)
    assert {place.pid for place in offer.places} == {COORDINATOR}
    assert offer.pulls == ()


def test_a_version_of_which_only_a_part_is_kept_is_lost_with_the_other() -> None:
    config = channel_config(sources=(ChannelRole("trainer", "all"),))
    world = World(config, {"trainer": GroupShape(world_size=2)}, machine="a")
    near, far = (world.join(f"trainer/0/{rank}", world_size=2, machine=where) for rank, where in enumerate("ab"))
    publish(world, near, far, manifests=PARTS)
    world.lose(near)
    target = world.join("rollout/0/0", machine="a")
    world.run()
    state = world.state.roster.get(target.member)
    assert state is not None
    assert target.held == {1}, "the other part was sent, this one copied"
    world.lose(target)
    world.lose(far)
    again = world.join("rollout/0/0", machine="a")
    world.run()
    state = world.state.roster.get(again.member)
    assert state is not None
    assert not world.state.commits.contents.obtainable([state], world.state.commits.latest)


@pytest.mark.parametrize("machine", ["a", ""])
def test_who_may_get_it_later_waits_for_it_to_be_ready(machine: str) -> None:
    """What is kept can be mapped, on its host, and not sent."""
    world = World(machine="a")
    trainer = world.join("trainer/0/0", machine="a")
    publish(world, trainer)
    world.lose(trainer)
    target = world.join("rollout/0/0", machine=machine)
    world.run()
    state = world.state.roster.get(target.member)
    assert state is not None
    assert world.state.commits.contents.obtainable([state], world.state.commits.latest) == bool(machine)


def test_a_coordinator_that_starts_again_keeps_what_members_still_have() -> None:
    world = World(machine="a")
    trainer = world.join("trainer/0/0", machine="a")
    publish(world, trainer)
    trainer.held.add(1)  # in a slot of its own
    [back] = world.restart()
    assert not world.kept
    world.rejoin(back)
    world.advance(5.0)
    assert world.kept == {trainer.member: 1}


class SlowHands(World):
    """A coordinator that has yet to open what it is to keep."""

    opens: tuple[Keep, ...] = ()

    def _keep(self, effect: Keep) -> None:
        self.opens += (effect,)


def test_a_source_that_dies_before_its_memory_is_open_here_has_a_stand_in_all_the_same() -> None:
    world = SlowHands(machine="a")
    trainer = world.join("trainer/0/0", machine="a")
    publish(world, trainer)
    [keep] = world.opens
    world.lose(trainer)
    assert world.state.keeping.stand_ins_with(1) == []
    world.kept[trainer.member] = 1
    world.state.keeping.kept(keep.owner, 1, msgspec.structs.replace(keep.place, pid=COORDINATOR))
    assert [state.member for state in world.state.keeping.stand_ins_with(1)] == [trainer.member]
    target = world.join("rollout/0/0", machine="a")
    target.ask()
    world.run()
    assert target.granted == [1]


def test_memory_that_cannot_be_opened_is_asked_of_the_next_holder() -> None:
    world = SlowHands(machine="a")
    trainer, target = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    publish(world, trainer)
    assert [keep.owner for keep in world.opens] == [trainer.member]
    world.state.keeping.kept(trainer.member, 1, None)
    world.advance(0.5)
    assert [keep.owner for keep in world.opens] == [trainer.member, target.member]
    world.lose(trainer)
    assert world.state.keeping.stand_ins_with(1) == []


def test_memory_of_a_version_that_is_the_newest_no_more_is_not_kept() -> None:
    world = SlowHands(machine="a")
    trainer = world.join("trainer/0/0", machine="a")
    publish(world, trainer)
    publish(world, trainer)
    first, second = world.opens
    for keep in (second, first):  # what was asked for first is opened last
        world.state.keeping.kept(keep.owner, keep.version, keep.place)
    world.lose(trainer)
    assert [dict(state.places) for state in world.state.keeping.stand_ins_with(2)] == [{2: second.place}]

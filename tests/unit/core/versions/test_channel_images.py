"""Versions that come in parts: their digest is that of an image, which exists only when
somebody has put it together."""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.manifest import PartManifest, Piece, TensorSpec
from replicas.core.members.roster import GroupShape
from replicas.core.versions.recovery import RECOVERY_S
from tests.support.channel_world import SimMember, World, channel_config

PARTS = [
    PartManifest((TensorSpec("weight", "float32", (4,)),), (), (Piece(0, (2 * rank,), (2,), 0),)) for rank in range(2)
]


def parts_world() -> tuple[World, list[SimMember]]:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)), {"trainer": GroupShape(world_size=2)})
    trainers = [world.join(f"trainer/0/{rank}", world_size=2, machine="a") for rank in range(2)]
    world.run()
    return world, trainers


def publish(trainers: list[SimMember]) -> int:
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number, part in zip(trainers, numbers, PARTS, strict=True):
        trainer.pack(number, manifest=part)
    return numbers[0]


@pytest.mark.parametrize("machine", ["a", "b"])
def test_a_version_that_nobody_was_there_for_is_there_for_the_first_who_comes(machine: str) -> None:
    world, trainers = parts_world()
    publish(trainers)
    world.run()
    assert (world.state.commits.latest, world.state.commits.decided) == (1, "")
    first = world.join("rollout/0/0", machine=machine)
    second = world.join("rollout/1/0", machine="a")
    world.advance(2.0)
    assert world.state.commits.decided == "digest-1"
    for target in (first, second):
        target.ask()
    world.run()
    assert [target.granted for target in (first, second)] == [[1], [1]]


@pytest.mark.parametrize("machine", ["a", "b"])
def test_what_was_received_under_another_coordinator_is_kept(machine: str) -> None:
    """It had not told anybody of the commit, and had no log."""
    world, trainers = parts_world()
    target = world.join("rollout/0/0", machine=machine)
    world.run()
    number = publish(trainers)
    while 1 not in target.held:
        assert any(world.up(sim) or world.down(sim) or sim.pull_on() for sim in (*trainers, target))
    sims = world.restart(keep_log=False)
    for sim in sims:
        world.rejoin(sim)
    world.run()
    world.advance(2 * RECOVERY_S + 1)
    for trainer in trainers:
        receipt = trainer.receipt(number)
        assert [member.name for member in receipt.members] == ["rollout/0/0"]
    assert world.state.commits.decided == "digest-1"
    assert not any(isinstance(message, wire.Discard) for message in target.seen)
    assert target.received == [1]
    assert target.held == {1}

"""The replica that archives: no publish waits for it, and it gets each version after
the commit, also the last one of a run that ends.

Covers: core/draining.py.
"""

from __future__ import annotations

import pytest

from replicas.config.archive import ArchiveConfig
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import CaughtUp, ReplicaIdle
from tests.support.channel_world import SimMember, World, channel_config

TARGETS = (ChannelRole("rollout", "all"), ChannelRole("policy-archive", "all"))


def started(*, same_host: bool) -> tuple[World, SimMember, SimMember, SimMember]:
    world = World(channel_config(targets=TARGETS, archive=ArchiveConfig(to="s3://bucket")), machine="a")
    trainer, rollout = (world.join(name, machine="a") for name in ("trainer/0/0", "rollout/0/0"))
    machine, address = ("a", "10.0.0.1") if same_host else ("b", "10.0.0.2")
    archiver = world.join("policy-archive/0/0", machine=machine, address=address)
    world.run()
    return world, trainer, rollout, archiver


def publish(world: World, trainer: SimMember, seconds: float = 1.0) -> int:
    number = trainer.publish()
    trainer.pack(number)
    world.advance(seconds)
    return number


@pytest.mark.parametrize("same_host", [True, False])
def test_it_gets_each_version_after_the_commit(same_host: bool) -> None:
    world, trainer, _, archiver = started(same_host=same_host)
    for number in (1, 2, 3):
        publish(world, trainer)
        receipt = trainer.receipt(number)
        assert [str(one) for one in receipt.members] == ["rollout/0/0"]
        assert number in archiver.held
        archiver.ask()
        world.run()
        assert archiver.member in {
            one for event in world.events if isinstance(event, CaughtUp) for one in event.members
        }


@pytest.mark.parametrize("same_host", [True, False])
def test_no_publish_waits_for_one_that_is_frozen(same_host: bool) -> None:
    world, trainer, _, archiver = started(same_host=same_host)
    for number in (1, 2, 3):
        trainer.pack(trainer.publish())
        began = world.now
        world.run(frozen=(archiver,))
        assert trainer.receipt(number).version == number
        assert world.now == began, "the commit waits for nobody"
    world.advance(10.0)
    assert 3 in archiver.held


def test_one_that_drains_is_idle_once_it_has_the_last_version() -> None:
    world, trainer, _, archiver = started(same_host=True)
    publish(world, trainer)
    world.state.set_draining("policy-archive", 0, 1, world.now)
    world.run()
    assert not [one for one in world.events if isinstance(one, ReplicaIdle)]
    assert str(world.state.drains.busy("policy-archive", 0)) == "it archives version 1 of policy"
    archiver.ask()
    world.run()
    assert [one.group for one in world.events if isinstance(one, ReplicaIdle)] == ["policy-archive"]

"""A new coordinator that knows whom to expect waits for these, and for no others."""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.core.base.effects import MemberLost
from replicas.core.members.roster import GroupShape
from replicas.core.versions.recovery import RECOVERY_S
from tests.support.channel_world import SimMember, World

SOON_S = 0.5
"""A step of the virtual time."""


def world_of(*names: str, machine: str = "") -> tuple[World, list[SimMember]]:
    """Members on a channel with a first version."""
    world = World(groups={"rollout": GroupShape(replicas=2)}, machine=machine)
    sims = [world.join(name, machine=machine) for name in names]
    world.run()
    number = sims[0].publish()
    sims[0].pack(number)
    world.run()
    assert [decision.version for decision in world.decisions] == [1]
    return world, sims


def waits(world: World) -> bool:
    """Whether it still waits for members."""
    return world.state.recovery.active


def absent(world: World) -> list[str]:
    return [one.member.name for one in world.events if isinstance(one, MemberLost) and one.reason == "absent"]


def test_once_all_are_back_nothing_is_waited_for() -> None:
    world, sims = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    world.restart()
    world.expect()
    for sim in sims:
        world.rejoin(sim)
    number = sims[0].publish()
    sims[0].pack(number)
    world.advance(SOON_S)
    receipt = sims[0].receipt(number)
    assert (receipt.version, len(receipt.members)) == (2, 2)
    assert absent(world) == []


def test_it_may_be_told_when_they_are_back_already() -> None:
    world, sims = world_of("trainer/0/0", "rollout/0/0")
    for sim in world.restart():
        world.rejoin(sim)
    world.advance(SOON_S)
    assert waits(world)
    world.expect()
    world.advance(SOON_S)
    assert not waits(world)
    assert sims[1].held == {1}


@pytest.mark.parametrize("told", [True, False])
def test_one_that_does_not_come_is_waited_for(told: bool) -> None:
    """Then it is lost; and still welcome."""
    world, (trainer, first, second) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    world.restart()
    if told:
        world.expect()
    for sim in (trainer, first):
        world.rejoin(sim)
    world.advance(RECOVERY_S - SOON_S)
    assert waits(world)
    world.advance(2 * SOON_S)
    assert not waits(world)
    assert absent(world) == (["rollout/1/0"] if told else [])
    world.rejoin(second)
    number = trainer.publish()
    trainer.pack(number)
    world.advance(1.0)
    receipt = trainer.receipt(number)
    assert len(receipt.members) == 2


def test_one_that_is_back_and_has_not_said_what_it_knows_is_waited_for() -> None:
    world, sims = world_of("trainer/0/0", "rollout/0/0")
    world.restart()
    world.expect()
    for sim in sims:
        world.rejoin(sim)
    world.advance(RECOVERY_S + SOON_S, frozen=(sims[1],))
    assert waits(world)
    world.advance(SOON_S)
    assert not waits(world)


def test_one_whose_host_is_not_known_yet_is_waited_for() -> None:
    """Else the next version would move without it."""
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0", machine="a")
    world.restart()
    world.expect()
    for sim in (trainer, target):
        world.rejoin(sim)
    while not isinstance(target.outbox[0], wire.Resumed):
        world.up(target)
    world.up(target)
    world.advance(SOON_S, frozen=(target,))
    assert waits(world)
    world.advance(SOON_S)
    assert not waits(world)


def test_one_whose_replica_has_ended_is_not_waited_for() -> None:
    world, (trainer, first, second) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    world.restart()
    world.expect()
    for sim in (trainer, first):
        world.rejoin(sim)
    world.advance(SOON_S)
    assert waits(world)
    world.state.recovery.stop_expecting("rollout", 1, "exit")
    world.advance(SOON_S)
    assert not waits(world)
    lost = [event for event in world.events if isinstance(event, MemberLost)]
    assert [(event.member, event.reason) for event in lost] == [(second.member, "exit")]


def test_those_who_were_lost_before_are_not_expected() -> None:
    world, (trainer, first, second) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    world.lose(second)
    world.restart()
    world.expect()
    for sim in (trainer, first):
        world.rejoin(sim)
    world.advance(SOON_S)
    assert not waits(world)


def test_those_who_did_not_come_to_one_are_expected_by_the_next_until_they_are_lost() -> None:
    world, sims = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    world.restart()
    world.expect()
    world.rejoin(sims[0])
    away = world.restart()  # within the window
    assert away == [sims[0]]
    world.expect()
    world.rejoin(sims[0])
    world.advance(SOON_S)
    assert waits(world)
    world.advance(RECOVERY_S)
    assert absent(world) == ["rollout/0/0", "rollout/1/0"]
    world.restart()
    world.expect()
    world.rejoin(sims[0])
    world.advance(SOON_S)
    assert not waits(world)


def test_an_expectation_of_nobody_is_none() -> None:
    world, sims = world_of("trainer/0/0", "rollout/0/0")
    world.restart()
    world.state.recovery.expect(())
    for sim in sims:
        world.rejoin(sim)
    world.advance(RECOVERY_S - SOON_S)
    assert waits(world)

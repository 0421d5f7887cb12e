"""A lane is tried once: whatever goes wrong with it, its members pull the version, and
the next publishes do not wait for it again.

Covers: core/moving/attempt.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replicas import messages as wire
from replicas.core.base.effects import MemberLost
from tests.support.channel_world import SimMember, World, channel_config

NAMES = ("trainer/0/0", "rollout/0/0", "rollout/1/0", "rollout/2/0")
TARGETS = list(NAMES[1:])


def lane_world(count: int = 4, *, staging: str = "host") -> tuple[World, SimMember, list[SimMember]]:
    """Members of as many hosts, and versions that go over lanes."""
    world = World(channel_config(staging=staging, transport="group" if staging == "host" else "auto"))
    trainer, *targets = [
        world.join(name, machine=f"{index}", address=f"10.0.0.{index}", cuda_devices=(f"GPU-{index}",))
        for index, name in enumerate(NAMES[:count], 1)
    ]
    world.advance(1.0)
    return world, trainer, targets


def publish(world: World, trainer: SimMember, seconds: float = 1.0) -> int:
    number = trainer.publish()
    trainer.pack(number)
    world.advance(seconds)
    return number


def receipt(trainer: SimMember, number: int) -> wire.ReceiptData:
    end = trainer.verdicts[number]
    assert end.receipt is not None, end.error
    assert min(end.receipt.phases.values()) >= 0.0
    return end.receipt


def members(trainer: SimMember, number: int) -> list[str]:
    return [member.name for member in receipt(trainer, number).members]


def lanes(sim: SimMember) -> int:
    """How many it was asked for."""
    return sum(isinstance(message, wire.LaneForm) for message in sim.seen)


def pulls(sim: SimMember) -> int:
    return sum(isinstance(message, wire.TransferOffer) and message.role == "pull" for message in sim.seen)


def blamed(world: World) -> bool:
    return any(isinstance(event, MemberLost) for event in world.events)


def no_lane_of(world: World, victim: SimMember) -> None:
    """No process group of it works with anyone."""
    for other in world.members.values():
        if other is not victim:
            world.bad_pairs.add(frozenset((victim.member.name, other.member.name)))


def hole(world: World, victim: SimMember) -> None:
    """Over one of its links nothing moves."""
    world.holes.add(frozenset((world.members[min(world.members)].address, victim.address)))


def cut(world: World, victim: SimMember) -> None:
    """Over one of its links no group forms, and its members say so."""
    other = next(sim for sim in world.members.values() if sim is not victim and sim.member.group == "rollout")
    world.cuts.add(frozenset((other.address, victim.address)))


def breaks(world: World, victim: SimMember) -> None:
    victim.breaks = True


def tampering(world: World, victim: SimMember) -> None:
    world.tampering = True


FAULTS: list[Callable[[World, SimMember], None]] = [no_lane_of, hole, cut, breaks, tampering]


@pytest.mark.parametrize("staging", ["host", "device"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_all_have_the_version_all_the_same(fault: Callable[[World, SimMember], None], which: int, staging: str) -> None:
    world, trainer, targets = lane_world(staging=staging)
    fault(world, [trainer, *targets][which])
    number = publish(world, trainer, seconds=20.0)
    assert members(trainer, number) == TARGETS
    assert receipt(trainer, number).lost == ()
    assert receipt(trainer, number).seconds <= 16.0
    assert lanes(trainer) == 1
    assert not blamed(world)
    assert not world.state.lanes or fault is hole, "the one that was left is closed"


def test_the_others_do_not_wait_for_one_that_can_neither() -> None:
    world, trainer, targets = lane_world()
    for other in (trainer, *targets[:2]):
        world.cuts.add(frozenset((other.address, targets[2].address)))
    number = publish(world, trainer)
    assert members(trainer, number) == TARGETS[:2]
    assert receipt(trainer, number).lost == (TARGETS[2],)
    assert TARGETS[2] in receipt(trainer, number).reasons
    world.cuts.clear()
    world.advance(31.0)
    assert 1 in targets[2].held


def test_a_source_that_can_reach_nobody_fails_its_publish_and_targets_keep_the_old_version() -> None:
    world, trainer, targets = lane_world()
    publish(world, trainer)
    for target in targets:
        world.cuts.add(frozenset((trainer.address, target.address)))
    number = publish(world, trainer, seconds=5.0)
    error = trainer.verdicts[number].error
    assert error is not None
    assert "trainer/0/0" in error.message
    assert [target.commits for target in targets] == [[1], [1], [1]]
    world.cuts.clear()
    number = publish(world, trainer)
    assert members(trainer, number) == TARGETS, "it is not kept out for it"


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["host", "device"])
def test_lanes_are_tried_more_and_more_seldom_until_one_works(staging: str) -> None:
    world, trainer, targets = lane_world(staging=staging)
    world.bad_pairs.add(frozenset((targets[0].member.name, targets[1].member.name)))
    for _ in range(100):
        assert members(trainer, publish(world, trainer)) == TARGETS
    assert 3 <= lanes(trainer) <= 8
    world.bad_pairs.clear()
    world.advance(300.0)
    for _ in range(3):
        assert members(trainer, publish(world, trainer)) == TARGETS
    before = lanes(trainer), pulls(targets[0])
    assert members(trainer, publish(world, trainer)) == TARGETS
    assert (lanes(trainer), pulls(targets[0])) == before, "over the lane of the version before"


def test_catch_up_forms_no_lane_and_keeps_no_publish_from_its_own() -> None:
    world, trainer, _ = lane_world(count=3)
    publish(world, trainer)
    late = world.join("rollout/2/0", machine="4", address="10.0.0.4")
    no_lane_of(world, late)
    world.run()
    assert (1 in late.held, lanes(late)) == (True, 0)
    world.lose(late)
    before = pulls(trainer), lanes(trainer)
    number = publish(world, trainer)
    assert members(trainer, number) == TARGETS[:2]
    assert (pulls(trainer), lanes(trainer)) == before


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["host", "device"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_member_that_dies_costs_the_others_nothing_at_any_moment(which: int, staging: str) -> None:
    """Of the lane, or while the version is pulled as the lane did not work."""
    for fault in (None, breaks):
        for steps in range(60):
            world, trainer, targets = lane_world(staging=staging)
            if fault is not None:
                fault(world, targets[0])
            number = trainer.publish()
            trainer.pack(number)
            sims = [trainer, *targets]
            for step in range(steps):
                sim = sims[step % 4]
                _ = world.down(sim), world.up(sim), sim.pull_on()
            world.lose(targets[which])
            world.advance(1.0)
            left = [name for index, name in enumerate(TARGETS) if index != which]
            assert [name for name in members(trainer, number) if name in left] == left
            assert all(1 in target.held for index, target in enumerate(targets) if index != which)


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_a_sender_that_fails_after_all_have_the_version(first: str) -> None:
    """Nothing is moved again, whoever is the first to tell."""
    world, trainer, (target,) = lane_world(count=2)
    trainer.breaks = True
    number = trainer.publish()
    trainer.pack(number)
    quick, slow = (trainer, target) if first == "sender" else (target, trainer)
    while number not in trainer.verdicts:
        while world.down(quick) or world.up(quick) or quick.pull_on():
            pass
        _ = world.down(slow) or world.up(slow) or slow.pull_on()
    assert members(trainer, number) == TARGETS[:1]
    assert lanes(target) == 1
    assert pulls(target) <= 1
    assert not blamed(world)


def test_one_without_a_sign_of_life_is_left_out_though_another_one_says_why_the_lane_failed() -> None:
    world, trainer, (near, far) = lane_world(count=3)
    number = trainer.publish(deadline_s=120.0)
    trainer.pack(number)
    world.run_to(wire.LaneForm)
    [lane] = [message.lane for message in near.inbox if isinstance(message, wire.LaneForm)]
    world.run(frozen=(far,))
    world.now += 15.0
    for sim in (trainer, near):
        world.state.roster.note_heard(sim.member, world.now)
    near.outbox.append(wire.LaneFailed(lane, wire.WireError("SyncError", "connection reset")))
    world.advance(1.0, frozen=(far,))
    assert members(trainer, number) == TARGETS[:1]
    assert receipt(trainer, number).reasons == {TARGETS[1]: "no sign of life"}


@pytest.mark.parametrize("named", [0, 1, 2])
def test_whomever_an_error_names_nobody_is_left_out(named: int) -> None:
    world, trainer, (near, far) = lane_world(count=3)
    number = trainer.publish()
    trainer.pack(number)
    world.run_to(wire.LaneForm)
    lane = next(message.lane for message in far.inbox if isinstance(message, wire.LaneForm))
    names = ((trainer, near, far)[named].member.name,)
    trainer.outbox.append(wire.LaneFailed(lane, wire.WireError("Preflight", "it cannot be reached", members=names)))
    world.advance(1.0)
    assert members(trainer, number) == TARGETS[:2]
    assert lanes(trainer) == 1


def test_one_that_flaps_is_admitted_later_each_time_and_disturbs_nobody() -> None:
    world, trainer, (good,) = lane_world(count=2)
    before = 0
    for round_ in range(12):
        flapper = world.join("rollout/1/0", machine="3", address="10.0.0.3")
        number = trainer.publish()
        trainer.pack(number)
        world.run()
        world.lose(flapper)
        world.run()
        assert trainer.verdicts[number].receipt is not None
        if round_ == 5:
            before = lanes(good)
    assert lanes(good) - before <= 8, "the last ones were not in a group with the others"
    steady = world.join("rollout/1/0", machine="3", address="10.0.0.3")
    world.advance(1.0)
    assert members(trainer, publish(world, trainer)) == TARGETS[:1], "it is not admitted yet"
    world.advance(40.0)
    assert steady.held
    assert members(trainer, publish(world, trainer)) == TARGETS[:2]


def test_one_that_flaps_gets_the_newest_version_at_once() -> None:
    """On a host that has it: after the seventh kill as after the first."""
    world, trainer, _ = lane_world(count=2)
    number = publish(world, trainer)
    for _ in range(7):
        flapper = world.join("rollout/1/0", machine="2", address="10.0.0.2")
        world.advance(0.5)
        assert flapper.held == {number}
        world.lose(flapper)
        world.run()


def test_wrong_digests_at_one_target_leave_that_one_behind() -> None:
    world, trainer, (good, bad) = lane_world(count=3)
    bad.bad_digest = True
    number = publish(world, trainer)
    assert members(trainer, number) == TARGETS[:1]
    assert TARGETS[1] in receipt(trainer, number).reasons
    assert good.commits == bad.commits == [1]


def test_others_of_a_gpu_copy_what_its_leader_received_while_another_host_still_receives() -> None:
    world, trainer, (near, far) = lane_world(count=3, staging="device")
    other = world.join("rollout/2/0", machine="2", address="10.0.0.2", cuda_devices=("GPU-2",))
    world.advance(1.0)
    number = trainer.publish()
    trainer.pack(number)
    far.stuck = True
    world.advance(1.0)
    assert near.held == other.held == {1}
    assert not far.held
    assert number not in trainer.verdicts
    assert [message.role for message in other.seen if isinstance(message, wire.TransferOffer)] == ["map"]


def test_a_version_that_all_refuse_is_committed_only_once_it_is_packed() -> None:
    world, trainer, targets = lane_world(2)
    targets[0].refuse = wire.WireError("NoCapacity", "no memory is left")
    number = trainer.publish()
    trainer.stream(number)
    world.advance(1.0)
    assert number not in trainer.verdicts
    trainer.fill(number)
    world.advance(1.0)
    assert members(trainer, number) == []
    assert receipt(trainer, number).lost == ("rollout/0/0",)

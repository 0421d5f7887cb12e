"""One slow link: the fast go on, whoever is behind it gets every version that it can,
and nobody waits for a deadline.

Covers: core/moving/stragglers.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from tests.support.channel_world import NBYTES, SimMember, World, channel_config

TRAINER, NEAR, FAR = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def three_hosts(kind: type[World] = World, **config: object) -> tuple[World, SimMember, SimMember, SimMember]:
    world = kind(channel_config(**config))
    trainer = join(world, "trainer/0/0", "a", TRAINER)
    near = join(world, "rollout/0/0", "b", NEAR)
    far = join(world, "rollout/1/0", "c", FAR)
    world.advance(1.0)
    return world, trainer, near, far


def join(world: World, name: str, machine: str, address: str) -> SimMember:
    return world.join(name, machine=machine, address=address, cuda_devices=(f"GPU-{machine}",))


def slow_host(world: World, address: str, seconds: float) -> None:
    """All links to it: a version takes so long."""
    for other in (TRAINER, NEAR, FAR):
        if other != address:
            world.rates[frozenset((other, address))] = NBYTES / seconds


def publish(world: World, trainer: SimMember, deadline_s: float = 40.0) -> tuple[float, wire.PublishEnd]:
    number, began = trainer.publish(deadline_s=deadline_s), world.now
    trainer.pack(number)
    while number not in trainer.verdicts:
        world.advance(0.5)
    return world.now - began, trainer.verdicts[number]


def members(end: wire.PublishEnd) -> list[str]:
    assert end.receipt is not None, end.error
    return [member.name for member in end.receipt.members]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [12.0, 64.0])
@pytest.mark.parametrize("slow", [NEAR, FAR])
def test_the_fast_go_on_and_the_slow_are_caught_up_at_their_own_pace(slow: str, seconds: float) -> None:
    world, trainer, near, far = three_hosts()
    publish(world, trainer)
    slow_host(world, slow, seconds)
    fast, late = (near, far) if slow == FAR else (far, near)
    took, end = publish(world, trainer, deadline_s=20.0)
    assert took <= 5.0
    assert members(end) == [fast.member.name]
    assert end.receipt is not None
    assert "slow" in end.receipt.reasons[late.member.name]
    suffered = 0
    for _ in range(100):
        took, end = publish(world, trainer, deadline_s=20.0)
        assert took <= 6.0
        assert fast.member.name in members(end)
        suffered += took > 1.0
        world.advance(4.0)
    assert suffered <= 8, "it is tried again, and more and more seldom"
    assert len(late.received) >= 0.5 * 500 / seconds, "no attempt of its own is cut off by a deadline"
    world.rates.clear()
    world.advance(600.0)
    assert members(publish(world, trainer)[1]) == ["rollout/0/0", "rollout/1/0"]


@pytest.mark.parametrize("seconds", [12.0, 200.0])
@pytest.mark.parametrize("slow", [NEAR, FAR])
def test_nor_do_the_fast_wait_for_the_slow_with_the_first_version_of_all(slow: str, seconds: float) -> None:
    """Nothing is known of any link, and whoever comes first in the chain may be the
    slow one."""
    world, trainer, near, far = three_hosts()
    slow_host(world, slow, seconds)
    took, end = publish(world, trainer)
    assert (near if slow == FAR else far).member.name in members(end)
    assert took <= 7.0


def test_where_all_links_are_slow_one_other_way_is_tried() -> None:
    world, trainer, _, _ = three_hosts()
    slow_host(world, TRAINER, 12.0)
    took, end = publish(world, trainer)
    assert members(end) == ["rollout/0/0", "rollout/1/0"]
    assert took <= 18.0


def test_a_slow_link_between_two_targets_loses_nobody() -> None:
    world, trainer, _, _ = three_hosts()
    publish(world, trainer)
    world.rates[frozenset((NEAR, FAR))] = NBYTES / 200.0
    took, end = publish(world, trainer)
    assert took <= 5.0
    assert members(end) == ["rollout/0/0", "rollout/1/0"]
    took, end = publish(world, trainer)
    assert took <= 1.0, "it goes round it at once"
    assert members(end) == ["rollout/0/0", "rollout/1/0"]


@pytest.mark.parametrize(("staging", "rtt_s"), [("host", 0.6), ("device", 0.2), ("device", 0.6)])
def test_the_far_hold_up_nobody_by_forming_process_groups(staging: str, rtt_s: float) -> None:
    world, trainer, _, far = three_hosts(staging=staging)
    other = join(world, "rollout/2/0", "c", FAR)
    world.advance(1.0)
    world.state.roster.note_heard(other.member, world.now, rtt_s)
    took, end = publish(world, trainer)
    assert took <= 1.0
    if staging == "host" or rtt_s < 0.5:  # who pulls forms none
        assert members(end) == ["rollout/0/0", "rollout/1/0", "rollout/2/0"]
        return
    assert members(end) == ["rollout/0/0"]
    assert end.receipt is not None
    reason = "it is far: a round trip takes 0.6 s"
    assert end.receipt.reasons == {"rollout/1/0": reason, "rollout/2/0": reason}
    world.advance(1.0)
    assert 1 in far.held
    assert 1 in other.held
    assert not any(isinstance(message, wire.LaneForm) for message in far.seen + other.seen)


@pytest.mark.parametrize("staging", ["host", "device"])
def test_those_who_map_it_are_not_far(staging: str) -> None:
    """The trainer's host is far from the coordinator, and a target lies beside the
    trainer."""
    world, trainer, _, _ = three_hosts(staging=staging)
    beside = join(world, "rollout/2/0", "a", TRAINER)
    world.advance(1.0)
    for sim in (trainer, beside):
        world.state.roster.note_heard(sim.member, world.now, 0.6)
    assert members(publish(world, trainer)[1]) == ["rollout/0/0", "rollout/1/0", "rollout/2/0"]


@pytest.mark.parametrize("staging", ["host", "device"])
def test_where_all_are_far_all_are_waited_for(staging: str) -> None:
    world, trainer, near, far = three_hosts(staging=staging)
    for sim in (near, far):
        world.state.roster.note_heard(sim.member, world.now, 0.6)
    _, end = publish(world, trainer)
    assert members(end) == ["rollout/0/0", "rollout/1/0"]
    formed = [message.group.timeout_s for message in far.seen if isinstance(message, wire.LaneForm)]
    assert [deadline_s >= 12.0 for deadline_s in formed] == ([True] if staging == "device" else [])


@pytest.mark.parametrize("staging", ["host", "device"])
def test_one_to_whom_nothing_comes_is_not_slow(staging: str) -> None:
    """Over a link that breaks when the one before it has all."""
    world, trainer, _, far = three_hosts(staging=staging)
    publish(world, trainer)
    world.holes.add(frozenset((NEAR, FAR)))
    took, end = publish(world, trainer)
    assert members(end) == ["rollout/0/0", "rollout/1/0"]
    assert took <= 8.0
    state = world.state.roster.get(far.member)
    assert state is not None
    assert not state.slow


def test_one_that_is_only_a_little_slower_is_waited_for() -> None:
    world, trainer, _, far = three_hosts()
    slow_host(world, FAR, 3.5)
    took, end = publish(world, trainer)
    assert members(end) == ["rollout/0/0", "rollout/1/0"]
    assert took <= 4.5
    assert world.state.roster.get(far.member) is not None


def test_who_must_not_be_dropped_is_waited_for() -> None:
    world, trainer, _, _ = three_hosts(on_lost="raise")
    slow_host(world, FAR, 12.0)
    took, end = publish(world, trainer, deadline_s=20.0)
    assert members(end) == ["rollout/0/0", "rollout/1/0"]
    assert took <= 16.0


@pytest.mark.parametrize("far_away", [False, True])
def test_those_without_whom_it_cannot_be_committed_are_waited_for(far_away: bool) -> None:
    world, trainer, _, far = three_hosts(min_targets=2, staging="device" if far_away else "host")
    if far_away:
        world.state.roster.note_heard(far.member, world.now, 0.6)
    else:
        slow_host(world, FAR, 12.0)
    _, end = publish(world, trainer, deadline_s=30.0)
    assert members(end) == ["rollout/0/0", "rollout/1/0"]


def test_where_all_are_equally_slow_all_are_waited_for() -> None:
    world = World()
    trainer = world.join("trainer/0/0", machine="a", address=TRAINER)
    world.join("rollout/0/0", machine="b", address=NEAR)
    world.advance(1.0)
    slow_host(world, TRAINER, 12.0)
    took, end = publish(world, trainer, deadline_s=20.0)
    assert members(end) == ["rollout/0/0"]
    assert took <= 13.0


def test_the_deadline_names_the_slow() -> None:
    world, trainer, _, _ = three_hosts(on_lost="raise")
    slow_host(world, FAR, 200.0)
    took, end = publish(world, trainer, deadline_s=20.0)
    assert end.error is not None
    assert end.error.members == ("rollout/1/0",)
    assert took <= 21.0


def test_no_host_gets_two_versions_at_once() -> None:
    """Those who are being caught up when a newer version is published that serves them
    all."""
    world, trainer, near, _ = three_hosts()
    publish(world, trainer)
    slow_host(world, FAR, 12.0)
    joined = [world.join(f"rollout/{index}/0", machine="c", address=FAR) for index in (2, 3)]
    world.advance(1.0)
    for _ in range(4):
        took, end = publish(world, trainer, deadline_s=20.0)
        assert took <= 6.0
        assert near.member.name in members(end)
        for sim in joined:
            assert len(version_under_way(sim)) <= 1
        world.advance(1.0)
    world.advance(60.0)
    assert all(max(sim.held) >= 4 for sim in joined)


def test_those_who_map_what_is_on_their_host_hurry_nobody() -> None:
    world, trainer, _, _ = three_hosts()
    world.join("rollout/2/0", machine="a", address=TRAINER)
    world.advance(1.0)
    slow_host(world, NEAR, 8.0)
    slow_host(world, FAR, 8.0)
    took, end = publish(world, trainer)
    assert members(end) == ["rollout/0/0", "rollout/1/0", "rollout/2/0"]
    assert took >= 8.0


def test_who_reaches_only_one_that_pulls_gets_it_from_that_one_meanwhile() -> None:
    world, trainer, near, far = three_hosts()
    world.cuts.add(frozenset((TRAINER, FAR)))
    slow_host(world, NEAR, 11.0)
    took, end = publish(world, trainer, deadline_s=40.0)
    assert members(end) == ["rollout/0/0", "rollout/1/0"]
    assert took <= 12.0
    assert near.held == far.held


def test_the_next_ones_have_time_to_get_ready_also_late() -> None:
    """Those whose turn to map it comes after half of the deadline."""
    world, trainer, near, _ = three_hosts()
    last = join(world, "rollout/2/0", "b", NEAR)
    world.advance(1.0)
    for one, other in ((TRAINER, NEAR), (TRAINER, FAR), (NEAR, FAR)):
        world.rates[frozenset((one, other))] = NBYTES / 19.0
    number = trainer.publish(deadline_s=36.0)
    trainer.pack(number)
    world.advance(18.5)
    assert not near.held
    world.advance(2.0, frozen=(last,))
    assert near.held
    world.advance(1.0)
    assert members(trainer.verdicts[number]) == ["rollout/0/0", "rollout/1/0", "rollout/2/0"]


def test_a_publish_that_serves_a_host_ends_what_is_caught_up_there() -> None:
    """Two of one host come back one after the other: the second one maps the newest
    version when the first one has it."""
    world, trainer, _, first = three_hosts()
    second = world.join("rollout/2/0", machine="c", address=FAR)
    world.advance(1.0)
    publish(world, trainer)
    slow_host(world, FAR, 2.0)

    def publish_without(*gone: SimMember) -> list[str]:
        number = trainer.publish(deadline_s=10.0)
        trainer.pack(number)
        for sim in gone:
            world.state.roster.disconnected(sim.member, world.now)
        while number not in trainer.verdicts:
            world.advance(0.25, frozen=gone)
        for sim in gone:
            world.state.roster.connected(sim.member, world.now)
        return members(trainer.verdicts[number])

    assert publish_without(first, second) == ["rollout/0/0"]
    world.advance(0.5, frozen=(second,))
    assert version_under_way(first) == [2]
    assert publish_without() == ["rollout/0/0"]
    while 2 not in first.held:
        world.advance(0.25)
    world.advance(0.25)
    assert version_under_way(first) + version_under_way(second) == [3], "both lack it, and it comes to their host once"
    assert publish_without(second) == ["rollout/0/0", "rollout/1/0"]
    assert 3 not in first.received + second.received
    world.advance(0.5)
    assert 4 in second.held
    assert 4 not in second.received
    assert members(publish(world, trainer)[1]) == ["rollout/0/0", "rollout/1/0", "rollout/2/0"]


def version_under_way(sim: SimMember) -> list[int]:
    """What it is receiving."""
    return [offer.version for _, offer in sim.pulling.values()]

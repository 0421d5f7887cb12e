"""A lane that is moving and does not move: progress decides, not patience.

Covers: core/operations/lane_progress.py.
"""

from __future__ import annotations

import pytest

from replicas.core.operations.lane_progress import FRESH_S, STILL_S, LaneProgress
from replicas.messages import LaneMoved, OperationGo, TransferOffer
from replicas.messages.identity import Member
from tests.support.channel_world import SimMember, World, channel_config

HERE, THERE = Member("peer", 0, 0), Member("peer", 1, 0)


def said(still_s: float, rtt_s: float = 0.001) -> LaneMoved:
    return LaneMoved("1.1", still_s, rtt_s)


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        (said(STILL_S), said(STILL_S + 1), True),
        (said(STILL_S), said(0.0), False),
        (said(STILL_S), None, False),
        (said(STILL_S, rtt_s=2.0), said(STILL_S), False),
        (said(6.0, rtt_s=2.0), said(STILL_S), True),
    ],
)
def test_it_stands_still_when_all_who_are_awaited_say_so(
    here: LaneMoved, there: LaneMoved | None, expected: bool
) -> None:
    pace = LaneProgress()
    for member, message in ((HERE, here), (THERE, there)):
        if message is not None:
            pace.moved(member, message, 100.0)
    assert pace.stands_still([HERE, THERE], 100.0) == expected
    assert not pace.stands_still([HERE, THERE], 100.1 + FRESH_S), "that was long ago"
    pace.restart()
    assert not pace.stands_still([HERE, THERE], 100.0), "that was about something else"
    assert not pace.stands_still([], 100.0)


def attempts(sim: SimMember) -> int:
    """How often it was to move bytes in a lane."""
    return sum(isinstance(message, OperationGo) for message in sim.seen)


def pulled(sim: SimMember) -> int:
    return sum(isinstance(message, TransferOffer) and message.role == "pull" for message in sim.seen)


def begun() -> tuple[World, SimMember, SimMember, int]:
    """A transfer over a lane in which the target moves nothing."""
    world = World(channel_config(transport="group"))
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    target.stuck = True
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    assert attempts(target) == 1
    return world, trainer, target, number


def test_what_stands_still_in_a_lane_is_pulled() -> None:
    world, trainer, target, number = begun()
    world.advance(STILL_S - 1.0)
    assert pulled(target) == 0
    target.stuck = False
    world.advance(2.0)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert [member.name for member in receipt.members] == ["rollout/0/0"]
    assert receipt.lost == ()
    assert (attempts(target), pulled(target)) == (1, 1)


def test_what_never_moves_fails_long_before_its_deadline() -> None:
    """Neither in a lane nor where it is pulled."""
    for transport in ("auto", "group"):
        world = World(channel_config(transport=transport))
        trainer = world.join("trainer/0/0", machine="a", address="10.0.0.1")
        target = world.join("rollout/0/0", machine="b", address="10.0.0.2")
        world.run()
        world.holes.add(frozenset((trainer.address, target.address)))
        number = trainer.publish()
        trainer.pack(number)
        world.advance(20.0)
        error = trainer.verdicts[number].error
        assert error is not None
        assert "rollout/0/0" in error.members
        assert "trainer/0/0" in error.message


def test_one_that_tells_nothing_has_half_of_the_time() -> None:
    """It is not judged by its silence: its sidecar may be held up."""
    world, trainer, target, number = begun()
    target.quiet = True
    world.advance(29.0)
    assert (attempts(target), pulled(target)) == (1, 0)
    target.stuck = False
    world.advance(3.0)
    assert pulled(target) == 1
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert [member.name for member in receipt.members] == ["rollout/0/0"]

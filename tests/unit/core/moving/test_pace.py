"""A transfer that is moving and does not move: progress decides, not patience.

Covers: core/moving/pace.py.
"""

from __future__ import annotations

import pytest

from replicas.core.moving.pace import FRESH_S, STILL_S, Pace
from replicas.messages import LaneMoved, TransferGo
from replicas.messages.identity import Member
from tests.support.channel_world import SimMember, World

HERE, THERE = Member("peer", 0, 0), Member("peer", 1, 0)


def said(still_s: float, rtt_s: float = 0.001) -> LaneMoved:
    return LaneMoved("1.1", 10, 20, still_s, rtt_s)


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
    pace = Pace()
    for member, message in ((HERE, here), (THERE, there)):
        if message is not None:
            pace.moved(member, message, 100.0)
    assert pace.stands_still([HERE, THERE], 100.0) == expected
    assert not pace.stands_still([HERE, THERE], 100.1 + FRESH_S), "that was long ago"
    pace.begin()
    assert not pace.stands_still([HERE, THERE], 100.0), "that was about something else"
    assert not pace.stands_still([], 100.0)


def attempts(sim: SimMember) -> int:
    return sum(isinstance(message, TransferGo) for message in sim.seen)


def begun(world: World) -> tuple[SimMember, SimMember, int]:
    """A transfer in which the target moves nothing."""
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    target.stuck = True
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    assert attempts(target) == 1
    return trainer, target, number


def test_a_transfer_that_stands_still_is_begun_again_at_once() -> None:
    world = World()
    trainer, target, number = begun(world)
    world.advance(STILL_S - 1.0)
    assert attempts(target) == 1
    target.stuck = False
    world.advance(2.0)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert [member.name for member in receipt.members] == ["rollout/0/0"]
    assert receipt.lost == ()


def test_what_never_moves_fails_long_before_its_deadline() -> None:
    world = World()
    trainer, _, number = begun(world)
    world.advance(15.0)
    error = trainer.verdicts[number].error
    assert error is not None
    assert "no byte has moved for 3" in error.message


def test_one_that_tells_nothing_is_not_judged_by_it() -> None:
    world = World()
    trainer, target, number = begun(world)
    target.quiet = True
    world.advance(20.0)
    assert number not in trainer.verdicts
    assert attempts(target) == 1

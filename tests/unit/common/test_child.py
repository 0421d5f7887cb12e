"""The life of a watched process, step by step; its table is checked with the others.

Covers: common/child.py.
"""

from __future__ import annotations

import math

import pytest

from replicas.common.backoff import Backoff
from replicas.common.child import ChildLife
from replicas.common.table import InvalidStep

AGAIN = Backoff(0.5, 4.0)


def started(**rules: float) -> ChildLife:
    life = ChildLife(AGAIN, steady_s=10.0, look_interval_s=1.0, tries=int(rules.get("tries", 0)))
    life.start(100.0)
    return life


def test_it_is_looked_at_until_it_is_given_up() -> None:
    life = ChildLife(AGAIN, look_interval_s=1.0)
    assert (life.state, life.due, life.on_time(99.0)) == ("waiting", math.inf, "")
    life.start(100.0)
    assert (life.state, life.on_time(100.9), life.on_time(101.0), life.on_time(101.1)) == ("starting", "", "look", "")
    life.ready()
    assert (life.state, life.due) == ("up", 102.0)
    life.give_up()
    assert (life.state, life.due) == ("dying", math.inf)
    with pytest.raises(InvalidStep):
        life.give_up()
    assert not life.ended(103.0)
    assert (life.state, life.on_time(103.4), life.on_time(103.5), life.due) == ("waiting", "", "start", math.inf)
    life.start(103.5)
    assert (life.state, life.starts) == ("starting", 2)


def test_it_is_started_later_each_time_and_soon_again_after_a_steady_life() -> None:
    life, now, delays = started(), 100.0, []
    for lived_s in (0.0, 1.0, 9.0, 10.0, 1.0, 11.0, 0.0):
        now += lived_s
        life.ended(now)
        due = life.due
        delays.append(due - now)
        assert life.on_time(due) == "start"
        life.start(now := due)
    assert delays == [0.5, 1.0, 2.0, 4.0, 4.0, 0.5, 1.0]
    life.ended(now, Backoff(0.0, 0.0))
    assert life.on_time(now) == "start"


def test_it_is_over_after_too_many_starts_in_a_row() -> None:
    life = started(tries=3)
    assert not life.ended(100.0)
    life.start(101.0)
    assert not life.ended(112.0), "it lived"
    life.start(113.0)
    assert not life.ended(113.0)
    life.start(114.0)
    assert life.ended(114.0)
    assert (life.state, life.starts, life.due) == ("over", 3, math.inf)
    life.stop()
    assert life.state == "over"


def test_one_that_is_stopped_is_not_started_again() -> None:
    life = started()
    life.stop()
    assert (life.state, life.due) == ("leaving", math.inf)
    life.ready()  # too late
    assert not life.ended(101.0)
    assert (life.state, life.due) == ("over", math.inf)
    waits = started()
    waits.ended(101.0)
    waits.stop()
    assert (waits.state, waits.on_time(1000.0)) == ("over", "")


def test_one_that_is_due_may_be_started_when_it_is_needed() -> None:
    life = started()
    life.ended(101.0)
    assert life.on_time(101.5) == "start"
    assert (life.due, life.on_time(150.0)) == (math.inf, "")
    life.start(200.0)
    assert life.state == "starting"


@pytest.mark.parametrize("given_up", [False, True])
def test_one_that_others_replace_has_one_start(given_up: bool) -> None:
    life = ChildLife(None)
    life.start(0.0)
    life.ready()
    if given_up:
        life.give_up()
    assert life.ended(100.0)
    assert (life.state, life.due) == ("over", math.inf)

"""A node's life in its tables, and what its silence leads to (core/lives/node_life.py).

Covers: core/lives/node_life.py.
"""

from __future__ import annotations

import pytest

from replicas.common.table import InvalidStep
from replicas.core.lives.lease_times import lost_after_s
from replicas.core.lives.node_life import SILENT_S, DutyEvent, NodeLife


def up(*, leased: bool = True, lease_s: float = 10.0) -> NodeLife:
    life = NodeLife(100.0, leased=leased)
    life.lease_s = lease_s
    assert life.step("hello")
    return life


def test_silence_makes_it_away_and_then_lost_never_at_once() -> None:
    life = up()
    assert life.due_event(100.0 + SILENT_S) == ""
    assert life.due_event(100.0 + lost_after_s(10.0) + 1) == "silent", "lost only by way of away"
    assert life.step("silent")
    assert life.due_event(100.0 + lost_after_s(10.0)) == ""
    assert life.due_event(100.0 + lost_after_s(10.0) + 0.1) == "lease_over"
    assert life.step("lease_over")
    assert life.over
    assert life.due_event(1e9) == ""


def test_what_has_arrived_after_all_brings_it_back_until_it_is_lost() -> None:
    life = up()
    assert not life.heard(101.0), "it was not away"
    life.step("silent")
    assert life.heard(110.0)
    assert (life.state, life.due_event(110.0 + SILENT_S)) == ("up", "")
    life.step("closed")
    life.step("lease_over")
    assert not life.heard(200.0), "only a Hello brings back one that is lost"
    assert life.step("hello")


def test_one_that_is_replaced_when_it_is_silent_is_never_away_for_that() -> None:
    life = up(leased=False)
    assert life.due_event(1e9) == ""
    assert life.step("closed")
    assert life.due_event(1e9) == ""


@pytest.mark.parametrize("how", ["undrain", "anew"])
def test_a_drain_holds_while_it_is_away_until_it_is_undone_or_another_agent_comes(how: DutyEvent) -> None:
    life = up()
    life.ask("drain")
    assert (life.shown, life.takes_replicas) == ("draining", False)
    life.step("closed")
    assert not life.takes_replicas
    life.step("hello")
    assert not life.takes_replicas
    life.ask("release")
    life.ask("drain")
    assert life.duty == "released", "who was told to end is not only drained"
    life.ask(how)
    assert life.takes_replicas


def test_one_that_left_does_not_come_back() -> None:
    life = up()
    life.ask("release")
    life.step("left")
    assert life.over
    assert life.shown == "lost"
    with pytest.raises(InvalidStep, match="a node that is drained cannot take hello"):
        life.step("hello")

"""The phases of a shim: what it does at each input, and when it kills.

Covers: supervisor/shim/phases.py, supervisor/wire/orders.py.
"""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest

from replicas.supervisor.shim.phases import ACTIONS, PHASES, SWEEP_GRACE_S, Action, Input, Phases
from replicas.supervisor.wire.orders import REMAINS_INTERVAL_S


def history(*events: Input) -> tuple[Phases, list[Action]]:
    """What a shim has done after these inputs, a second apart."""
    phases = Phases()
    return phases, [action for at, event in enumerate(events) for action in phases.enter_phase(event, float(at), 9.0)]


END: tuple[Action, ...] = ("end_all", "close_logs")


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        (("main_ended", "output_read"), ["read_output", "report"]),
        (("stop", "main_ended", "output_read"), ["take_inventory", "end_main", "read_output", "report_stop"]),
        (
            ("stop", "stop", "main_ended", "stop", "output_read", "stop"),
            ["take_inventory", "end_main", "read_output", "report_stop"],
        ),
        (("main_ended", "stop", "output_read"), ["read_output", "take_inventory", "report_stop"]),
        (("not_started",), []),
        (("not_started", "main_ended", "stop"), []),  # it was started, but could not be watched
    ],
)
def test_each_way_to_the_end(events: tuple[Input, ...], actions: list[Action]) -> None:
    phases, done = history(*events, "empty", "logs_read")
    assert done == [*actions, *END]
    assert phases.now == "over"


def test_every_action_is_that_of_a_row() -> None:
    assert set(ACTIONS) <= set(PHASES.rows)
    assert set(itertools.chain(*ACTIONS.values())) == set(get_args(Action))


def test_a_stop_may_advance_the_kill_and_not_delay_it() -> None:
    phases = Phases()
    assert phases.kill_at == math.inf
    for at, timeout_s, kill_at in ((10.0, 30.0, 40.0), (11.0, 60.0, 40.0), (12.0, 2.0, 14.0)):
        phases.enter_phase("stop", at, timeout_s)
        assert phases.kill_at == kill_at
    phases.enter_phase("main_ended", 12.5)
    phases.enter_phase("output_read", 12.6)
    assert phases.kill_at == 14.0, "what remains has the time of the main process"
    phases.enter_phase("stop", 12.7, 0.5)
    assert phases.kill_at == 13.2


def test_remains_of_one_that_ended_by_itself_have_a_little_time() -> None:
    phases = Phases()
    phases.enter_phase("main_ended", 1.0)
    assert phases.kill_at == math.inf
    phases.enter_phase("output_read", 2.0)
    assert phases.kill_at == 2.0 + SWEEP_GRACE_S


def test_those_that_do_not_die_are_killed_more_seldom_and_named() -> None:
    phases, at, named = Phases(), 100.0, 0
    intervals = []
    while at < 110.0:
        named += phases.record_kill(at)
        intervals.append(round(phases.kill_at - at, 3))
        at = phases.kill_at
    assert (intervals[0], intervals[-1]) == (0.05, 0.5)
    assert 60 <= intervals.count(0.05) <= 61  # 3 s
    assert named == pytest.approx(9.0 / REMAINS_INTERVAL_S, abs=1)

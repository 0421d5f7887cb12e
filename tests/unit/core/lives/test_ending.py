"""How a generation ends, and what is asked of a replica: every input in every state.

Covers: core/lives/ending.py.
"""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.common.table import InvalidStep, StateMachine, Table
from replicas.core.lives.ending import (
    ASKED,
    ASKED_ACTIONS,
    GENERATION,
    GENERATION_ACTIONS,
    LEAVING,
    UNWANTED,
    Asked,
    AskedAction,
    CourseAction,
    CourseInput,
    CourseState,
    Request,
    request_of,
)
from replicas.core.lives.lifecycle import FREE_REASONS, RestartReason

STOP = ("stopping", "stop_nodes")
LEFT = ("left_behind",)
COURSE: dict[CourseState, dict[CourseInput, tuple[str, ...]]] = {
    "waiting": {"launched": ("running",), "not_launched": STOP, "drain": ("stopping",), "stop": STOP},
    "running": {
        "drain": ("syncing", "finish_sync"),
        "stop": STOP,
        "failed": STOP,
        "ended": ("ended", "limit", "note_end"),
    },
    "syncing": {
        "drain": ("syncing",),
        "sync_over": STOP,
        "stop": STOP,
        "failed": STOP,
        "ended": ("ended", "limit", "note_end"),
    },
    "stopping": {
        "drain": ("stopping",),
        "stop": STOP,
        "failed": ("stopping",),
        "ended": ("ended", "note_end"),
        "give_up": LEFT,
    },
    "ended": {
        "drain": ("ended",),
        "stop": ("ended", "stop_nodes"),
        "failed": ("ended",),
        "ended": ("ended",),
        "lost": ("sweeping", "tell_coordinator"),
        "gone": ("over", "tell_coordinator"),
        "give_up": LEFT,
    },
    "sweeping": {
        "drain": ("sweeping",),
        "stop": ("sweeping", "stop_nodes"),
        "failed": ("sweeping",),
        "ended": ("sweeping",),
        "gone": ("over",),
        "give_up": LEFT,
    },
    "over": {},
    "left_behind": {},
}

END = {"halt": ("halt", "end"), "leave": ("leave", "end"), "end_run": ("end_run", "end")}
FAIL = ("fail", "note_cause", "end")
AGAIN = {"restart": ("restart", "note_cause"), "replace": ("restart", "note_cause")}
REPLICA: dict[Asked, dict[str, tuple[str, ...]]] = {
    "nothing": {"fault": ("fault", "note_cause"), **AGAIN, **END, "fail": FAIL, "done": ("nothing",)},
    "fault": {
        "fault": ("fault", "note_cause"),
        "restart": ("restart", "note_cause"),
        "replace": ("fault",),  # the rules judge it, whatever it does to its group
        **END,
        "fail": FAIL,
        "done": ("nothing",),
    },
    "restart": {
        "fault": ("fault", "note_cause"),
        "restart": ("restart", "note_cause"),
        "replace": ("restart",),
        **END,
        "fail": FAIL,
        "done": ("nothing",),
    },
    "halt": {
        **AGAIN,
        "halt": ("halt",),
        "fail": ("halt",),
        "leave": ("leave",),
        "end_run": ("end_run",),
        "done": ("nothing",),
    },
    "fail": {
        "restart": ("restart", "note_cause"),
        "replace": ("restart",),  # its group's failure is the cause already
        "halt": ("halt",),
        "fail": ("fail",),
        "leave": ("leave",),
        "end_run": ("end_run",),
        "done": ("nothing",),
    },
    "leave": {"halt": ("leave",), "fail": ("leave",), "leave": ("leave",), "end_run": ("end_run",), "done": ("over",)},
    "end_run": {**dict.fromkeys(("halt", "fail", "leave", "end_run"), ("end_run",)), "done": ("over",)},
    "over": {},
}
PAIRS = [
    *(
        (GENERATION, GENERATION_ACTIONS, COURSE, *pair)
        for pair in itertools.product(get_args(CourseState), get_args(CourseInput))
    ),
    *((ASKED, ASKED_ACTIONS, REPLICA, *pair) for pair in itertools.product(get_args(Asked), get_args(Request))),
]


@pytest.mark.parametrize(
    ("table", "actions", "expected", "state", "event"), PAIRS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_input_in_each_state(table: Table[Any, Any], actions: Any, expected: Any, state: str, event: str) -> None:
    machine = StateMachine(table, actions)
    machine.now = state
    if event in expected[state]:
        done = machine.step(event)
        assert (machine.now, *done) == expected[state][event]
    else:
        with pytest.raises(InvalidStep):
            machine.step(event)
        assert machine.now == state


def test_every_action_is_that_of_a_row() -> None:
    assert set(GENERATION_ACTIONS) <= set(GENERATION.rows)
    assert set(itertools.chain(*GENERATION_ACTIONS.values())) == set(get_args(CourseAction))
    assert set(ASKED_ACTIONS) <= set(ASKED.rows)
    assert set(itertools.chain(*ASKED_ACTIONS.values())) == set(get_args(AskedAction))


@given(st.data())
def test_on_each_way_the_end_is_noted_and_told_once(data: st.DataObject) -> None:
    machine, done = StateMachine(GENERATION, GENERATION_ACTIONS), list[str]()
    for _ in range(40):
        if GENERATION.final(machine.now):
            break
        events = sorted(event for state, event in GENERATION.rows if state == machine.now)
        before, taken = machine.now, machine.step(data.draw(st.sampled_from(events)))
        assert before not in ("ended", "sweeping") or machine.now not in ("running", "syncing", "stopping")
        assert before != "stopping" or machine.now != "syncing", "a sync does not begin again"
        done += taken
    counts = [done.count(action) for action in ("finish_sync", "note_end", "tell_coordinator")]
    assert max(counts) <= 1
    if machine.now == "over":
        assert counts[1:] == [1, 1]
        assert done.index("note_end") < done.index("tell_coordinator")


@given(st.lists(st.sampled_from(get_args(Request))))
def test_a_stop_for_good_is_not_taken_back(requests: list[Request]) -> None:
    machine, ends = StateMachine(ASKED, ASKED_ACTIONS), 0
    for request in requests:
        before = machine.now
        if not ASKED.allows(before, request):
            assert before in UNWANTED, "what is asked of a replica that goes on is never refused"
            continue
        ends = (0 if request in ("done", "restart", "replace") else ends) + machine.step(request).count("end")
        assert ends <= 1, "it is ended once for all requests to stop it"
        assert before not in LEAVING or machine.now in LEAVING


def test_what_a_cause_asks_for() -> None:
    asked = {reason: request_of(reason) for reason in get_args(RestartReason)}
    assert {reason for reason, request in asked.items() if request != "fault"} == FREE_REASONS
    assert [reason for reason, request in asked.items() if request == "restart"] == ["requested"]

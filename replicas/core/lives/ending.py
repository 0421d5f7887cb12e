"""Two tables: how a generation ends, and the pending request to a replica.

:data:`GENERATION` is the course of one generation. *Waiting*: none of its processes is
started yet. *Running*. *Syncing*: its end was requested, and it finishes its sync.
*Stopping*: every node was told to stop. *Ended*: every main process is gone, but ranks
may still leave in order, as requested. *Sweeping*: the coordinator was told that the
members are lost, and processes remain. *Over*: no process is left. *Left behind*:
processes remained at the end of the run.

:data:`ASKED` is the pending request. *Nothing*: the replica runs, or ends without a
request. *Fault*: the restart rules judge its end. *Restart*: a new generation follows,
at no cost. *Halt*: it rests as drained. *Fail*: it rests as failed, as its group has.
*Leave*: it is stopped for good. *End run*: likewise, and processes that do not die in
time are left behind. *Over*: it was stopped for good, and has settled. Only a stop for
good cannot be taken back.

Pure: :mod:`replicas.supervisor.fleet.generation_lifecycle` and
:mod:`replicas.supervisor.fleet.replica` carry out the actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from replicas.common.table import Table
from replicas.core.lives.lifecycle import FREE_REASONS, RestartReason

CourseState = Literal["waiting", "running", "syncing", "stopping", "ended", "sweeping", "over", "left_behind"]
CourseInput = Literal[
    "launched", "not_launched", "drain", "sync_over", "stop", "failed", "ended", "lost", "gone", "give_up"
]
"""``launched``: its shims run. ``drain``: end it, after its sync. ``stop``: end it now.
``failed``: a node reports a failure. ``ended``: every node has reported an end.
``lost``: no rank is expected to leave in order. ``gone``: no process is left.
``give_up``: the run is over, and processes do not die."""
CourseAction = Literal["finish_sync", "stop_nodes", "limit", "note_end", "tell_coordinator"]

GENERATION: Table[CourseState, CourseInput] = Table(
    "a generation",
    ("waiting",),
    {
        "waiting": {"running": ("launched",), "stopping": ("not_launched", "drain", "stop")},
        "running": {"syncing": ("drain",), "stopping": ("stop", "failed"), "ended": ("ended",)},
        "syncing": {"syncing": ("drain",), "stopping": ("sync_over", "stop", "failed"), "ended": ("ended",)},
        "stopping": {"stopping": ("drain", "stop", "failed"), "ended": ("ended",), "left_behind": ("give_up",)},
        "ended": {
            "ended": ("drain", "stop", "failed", "ended"),
            "sweeping": ("lost",),
            "over": ("gone",),
            "left_behind": ("give_up",),
        },
        "sweeping": {"sweeping": ("drain", "stop", "failed", "ended"), "over": ("gone",), "left_behind": ("give_up",)},
    },
)
GENERATION_ACTIONS: Mapping[tuple[CourseState, CourseInput], tuple[CourseAction, ...]] = {
    ("waiting", "not_launched"): ("stop_nodes",),
    ("waiting", "stop"): ("stop_nodes",),
    ("running", "drain"): ("finish_sync",),
    ("running", "stop"): ("stop_nodes",),
    ("running", "failed"): ("stop_nodes",),
    ("running", "ended"): ("limit", "note_end"),
    ("syncing", "sync_over"): ("stop_nodes",),
    ("syncing", "stop"): ("stop_nodes",),
    ("syncing", "failed"): ("stop_nodes",),
    ("syncing", "ended"): ("limit", "note_end"),
    ("stopping", "stop"): ("stop_nodes",),
    ("stopping", "ended"): ("note_end",),
    ("ended", "stop"): ("stop_nodes",),
    ("ended", "lost"): ("tell_coordinator",),
    ("ended", "gone"): ("tell_coordinator",),
    ("sweeping", "stop"): ("stop_nodes",),
}

Asked = Literal["nothing", "fault", "restart", "halt", "fail", "leave", "end_run", "over"]
Request = Literal["fault", "restart", "replace", "halt", "fail", "leave", "end_run", "done"]
"""``replace``: restart it for its group, a reload or its node; this does not excuse a
fault. ``done``: its generation has ended, or the replica has settled."""
AskedAction = Literal["note_cause", "end"]
"""``end``: end its generation; without a generation, settle."""

LEAVING: frozenset[Asked] = frozenset({"leave", "end_run", "over"})
UNWANTED: frozenset[Asked] = LEAVING | {"halt", "fail"}
_DONE: Mapping[Asked, tuple[Request, ...]] = {"nothing": ("done",)}
_FOR_GOOD: Mapping[Asked, tuple[Request, ...]] = {"leave": ("leave",), "end_run": ("end_run",)}
_TO_END: Mapping[Asked, tuple[Request, ...]] = {"halt": ("halt",), "fail": ("fail",), **_FOR_GOOD}

ASKED: Table[Asked, Request] = Table(
    "the request to a replica",
    ("nothing",),
    {
        "nothing": {**_DONE, "fault": ("fault",), "restart": ("restart", "replace"), **_TO_END},
        "fault": {**_DONE, "fault": ("fault", "replace"), "restart": ("restart",), **_TO_END},
        "restart": {**_DONE, "fault": ("fault",), "restart": ("restart", "replace"), **_TO_END},
        "halt": {**_DONE, "restart": ("restart", "replace"), "halt": ("halt", "fail"), **_FOR_GOOD},
        "fail": {**_DONE, "restart": ("restart", "replace"), "halt": ("halt",), "fail": ("fail",), **_FOR_GOOD},
        "leave": {"leave": ("halt", "fail", "leave"), "end_run": ("end_run",), "over": ("done",)},
        "end_run": {"end_run": ("halt", "fail", "leave", "end_run"), "over": ("done",)},
    },
)
_CAUSES: Mapping[Asked, tuple[Request, ...]] = {
    "nothing": ("fault", "restart", "replace"),
    "fault": ("fault", "restart"),
    "restart": ("fault", "restart"),
    "halt": ("restart", "replace"),
    "fail": ("restart",),
}
_ENDS: tuple[Asked, ...] = ("nothing", "fault", "restart")
ASKED_ACTIONS: Mapping[tuple[Asked, Request], tuple[AskedAction, ...]] = {
    **{(before, request): ("note_cause",) for before, requests in _CAUSES.items() for request in requests},
    **{(before, request): ("end",) for before in _ENDS for request in ("halt", "leave", "end_run")},
    **{(before, "fail"): ("note_cause", "end") for before in _ENDS},
}


def request_of(reason: RestartReason) -> Request:
    """Return the request (an event of :data:`ASKED`) that a restart for this reason
    makes.

    It is ``restart`` if a person asked: the restart costs no budget, even if the
    replica has just failed. It is ``replace`` if the reason is a reload, its group or
    its node: free as well, unless the replica has just failed. Otherwise it is
    ``fault``: the group's restart rules decide.
    """
    if reason == "requested":
        return "restart"
    return "replace" if reason in FREE_REASONS else "fault"

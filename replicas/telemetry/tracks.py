"""Data types of spans and marks, the tracks that they lie on, and parts of spans. Pure.

:mod:`replicas.telemetry.spans` makes them from events; pages and timelines draw them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from replicas.core.base import effects
from replicas.status import PHASES
from replicas.telemetry import events
from replicas.telemetry.words import subject

_LAST = ("acknowledge", "commit")
MARKS: dict[type, str] = {
    effects.LoadFailed: "load_failed",
    effects.MemberLost: "loss",
    effects.Retried: "retry",
    effects.SidecarReplaced: "retry",
    effects.StepFell: "step",
    effects.StoreChanged: "store",
    effects.VersionDecided: "decision",
    effects.WrongBytes: "wrong_bytes",
    events.ConnectionsRefused: "refused",
    events.Draining: "drain",
    events.EventsLost: "lost_events",
    events.FailedReset: "reset",
    events.HeldUp: "held_up",
    events.LeasesAwaited: "leases",
    events.LeftoverFound: "leftover",
    events.LogLinesDropped: "log",
    events.NodeChanged: "node",
    events.Reloaded: "reload",
    events.ReloadRefused: "reload",
    events.ReplicaExited: "exit",
    events.RestartAsked: "restart",
    events.RunEnded: "end",
    events.RunStarted: "start",
    events.Scaled: "scale",
    events.StacksSaved: "stacks",
    events.StateSetAside: "state",
    events.TokenChanged: "token",
}
"""The kind of the mark of each event that has one."""


class Span(msgspec.Struct, kw_only=True):
    """A period of time on a track (a line of the timeline: a replica, channel, node).

    ``id``: number of the event with which it began (a sync: ended). ``start``, ``end``:
    seconds since 1970; ``end`` is None while it lasts. ``parent``: the ``id`` of the
    span that it belongs to. ``changed``: number of the last event that changed it.
    """

    id: int
    track: str
    kind: str
    name: str
    start: float
    end: float | None = None
    parent: int | None = None
    attributes: dict[str, Any] = {}
    changed: int = 0


class Mark(msgspec.Struct, kw_only=True, frozen=True):
    """An instant on a track. ``tone``: as in :mod:`replicas.telemetry.words`."""

    seq: int
    track: str
    kind: str
    name: str
    at: float
    text: str
    tone: str = ""


class Folded(msgspec.Struct):
    """Spans that are no longer kept: their number, total seconds, and latest end."""

    count: int = 0
    seconds: float = 0.0
    until: float = 0.0


def parts(span: Span) -> Iterator[Span]:
    """Yield the phases and transfers of a sync that has ended, or the load of a
    version, as new spans; nothing for spans of other kinds.

    Only the duration of a phase is known, not its start: phases are laid out one after
    another, and those that ran at the same time overlap.
    """
    if span.kind == "version" and span.attributes["load_s"]:
        load_s, name = span.attributes["load_s"], f"load {span.attributes['version']}"
        yield msgspec.structs.replace(
            span, kind="load", name=name, start=span.start - load_s, end=span.start, attributes=dict(span.attributes)
        )
    if span.kind != "sync" or span.end is None:
        return
    lasted = dict(_phases(span))
    for name, (start, end) in lasted.items():
        yield _part(span, "phase", name, start, end)
    start, end = lasted.get("transfer", (span.start, span.end))
    held = span.attributes.get("held", {})
    for member, givers in span.attributes.get("pulled", {}).items():
        held_s = held.get(replica_of(member))
        until = end if held_s is None else min(span.end, span.start + held_s)
        for holder, nbytes in givers.items():
            about = {"holder": holder, "member": member, "nbytes": nbytes}
            yield _part(span, "transfer", f"{holder} to {member}", min(start, until), until, **about)


def _phases(sync: Span) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield each phase of a sync that has ended as (name, (start, end)), in seconds
    since 1970. Only durations are known: the starts are estimates."""
    seconds: dict[str, float] = sync.attributes.get("phases", {})
    end = sync.end if sync.end is not None else sync.start
    latest, now = end - sum(seconds.get(name, 0.0) for name in _LAST), sync.start
    for name in PHASES:
        if lasts := seconds.get(name, 0.0):
            start = now if name in _LAST else max(sync.start, min(now, latest - lasts))
            now = min(end, start + lasts)
            yield name, (start, now)
    if hold := seconds.get("hold", 0.0):
        start = sync.start + seconds.get("wait", 0.0)
        yield "hold", (start, min(end, start + hold))


def _part(span: Span, kind: str, name: str, start: float, end: float, **about: Any) -> Span:
    """Return a new span that belongs to ``span``, on the same track.

    :param start: in seconds since 1970, as is ``end``. :param about: its attributes.
    """
    return msgspec.structs.replace(span, kind=kind, name=name, start=start, end=end, parent=span.id, attributes=about)


def track_of(event: events.Event) -> str:
    """Return the track (line of the timeline) that an event belongs to, such as
    ``replica rollout/1`` or ``run``."""
    if isinstance(event, events.NodeChanged):
        return f"node {event.node}"
    who = "" if isinstance(event, effects.MemberLost) and event.observes else subject(event)
    if "/" in who:
        return f"replica {who}"
    if who:
        return who if who.startswith("node ") else f"group {who}"
    channel = getattr(event, "channel", "")
    return f"channel {channel}" if channel else "run"


_ORDER = ("run", "channel", "group", "node", "replica")


def order(track: str) -> tuple[int, str, int]:
    """Return a sort key of tracks: run, channels, groups, nodes, replicas by index."""
    kind, _, name = track.partition(" ")
    group, _, index = name.rpartition("/")
    number = int(index) if kind == "replica" and index.isdigit() else 0
    return _ORDER.index(kind), group if kind == "replica" else name, number


def replica_of(member: str) -> str:
    """Return the replica of a member: ``rollout/1`` for ``rollout/1/0``."""
    return "/".join(member.split("/")[:2])

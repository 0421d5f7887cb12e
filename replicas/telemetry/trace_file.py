"""Spans and marks as trace events, which ui.perfetto.dev and chrome://tracing open.

The format is the JSON of Google's "Trace Event Format". Each of our tracks is a
*process* there (``pid``), and each of its kinds of spans a *thread* (``tid``). Slices
of one thread must nest, but our spans may overlap (a version is packed while another
one moves), so overlapping spans get a further thread of the same kind. A node also
shows the generations that ran on it. An arrow leads from a sync to each load of its
version.

Times are microseconds since 1970, as in traces of ``torch.profiler``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from replicas.telemetry.spans import Spans
from replicas.telemetry.tracks import Span, order, parts

Event = dict[str, Any]

_KINDS = (
    "supervisor",
    "unsupervised",
    "node",
    "generation",
    "state",
    "sync",
    "phase",
    "transfer",
    "catch_up",
    "operation",
    "load",
    "version",
    "drain",
)
_MARKS = len(_KINDS)
_LANES = 100
"""Most threads of one kind: ``tid`` is the number of the kind, and the lane."""


def trace_json(found: Spans) -> Iterator[bytes]:
    """Yield the JSON of the trace file of these spans and marks in pieces, with one
    event on each line; write nothing."""
    encode = msgspec.json.Encoder(enc_hook=str).encode
    yield b'{"displayTimeUnit":"ms","otherData":' + encode({"run": found.run}) + b',"traceEvents":[\n'
    before = b""
    for event in trace_events(found):
        yield before + encode(event)
        before = b",\n"
    yield b"\n]}\n"


def trace_events(found: Spans) -> Iterator[Event]:
    """Yield the trace events of these spans and marks: names of tracks, slices (events
    with a duration), arrows, and marks."""
    spans = [one for span in found.spans() for one in (span, *parts(span))]
    spans += [shown for span in spans if span.kind == "generation" for shown in _on_nodes(span)]
    marks = found.marks()
    tracks = sorted({span.track for span in spans} | {mark.track for mark in marks}, key=order)
    numbers = {track: number for number, track in enumerate(tracks, 1)}
    for track, pid in numbers.items():
        yield _meta("process_name", pid, 0, name=track)
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
    slices = list(_slices(spans, numbers, found.at))
    threads = {(event["pid"], event["tid"]): span for span, event in slices}
    for (pid, tid), span in sorted(threads.items(), key=lambda item: item[0]):
        lane, channel = tid % _LANES, span.attributes.get("channel", "")
        yield _meta("thread_name", pid, tid, name=" ".join(filter(None, (span.kind, channel, str(lane or "")))))
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)
    yield from (event for _, event in slices)
    yield from _arrows(slices)
    for mark in marks:
        place = {"pid": numbers[mark.track], "tid": _MARKS * _LANES, "ts": _us(mark.at), "s": "t"}
        yield {"ph": "i", "name": mark.name, "cat": mark.kind, **place, "args": {"text": mark.text, "event": mark.seq}}
    for pid in sorted({numbers[mark.track] for mark in marks}):
        yield _meta("thread_name", pid, _MARKS * _LANES, name="marks")
        yield _meta("thread_sort_index", pid, _MARKS * _LANES, sort_index=-1)


def _on_nodes(life: Span) -> Iterator[Span]:
    """Yield the span ``life``, a generation of a replica, once more for each node that
    it ran on, as a span on the node's track."""
    name = f"{life.track.removeprefix('replica ')} {life.name}"
    for node in dict.fromkeys(life.attributes["nodes"]):
        yield msgspec.structs.replace(life, track=f"node {node}", name=name)


def _slices(spans: Iterable[Span], numbers: dict[str, int], now: float) -> Iterator[tuple[Span, Event]]:
    """Yield each span with its trace event (a "complete" event of the trace format).

    Its ``pid`` is its track, its ``tid`` one of several rows for its kind of span on
    that track: the first row in which an earlier span of the same channel does not
    overlap it.

    :param numbers: ``pid`` of each track. :param now: end of spans that are open, in
        seconds since 1970.
    """
    taken: dict[tuple[str, str], list[tuple[str, int]]] = {}  # the channel and the end of the last span of each thread
    for span in sorted(spans, key=lambda span: span.start):
        start, end = _us(span.start), _us(now if span.end is None else span.end)
        lanes, channel = taken.setdefault((span.track, span.kind), []), span.attributes.get("channel", "")
        free = (number for number, (whose, until) in enumerate(lanes) if whose == channel and until <= start)
        lane = next(free, len(lanes))
        lanes[lane : lane + 1] = [(channel, max(start, end))]
        about = span.attributes | {"event": span.id} | ({"goes_on": True} if span.end is None else {})
        tid = _KINDS.index(span.kind) * _LANES + lane
        place = {"pid": numbers[span.track], "tid": tid, "ts": start, "dur": max(0, end - start)}
        yield span, {"ph": "X", "name": span.name, "cat": span.kind, **place, "args": about}


def _arrows(slices: Iterable[tuple[Span, Event]]) -> Iterator[Event]:
    """Yield two trace events, the ends of an arrow from a sync to a load, for each load
    of a version whose sync is among the slices (spans with their trace events)."""
    syncs = {span.id: event for span, event in slices if span.kind == "sync"}
    loads = [
        one for one in slices if one[0].kind == "load" or (one[0].kind == "version" and not one[0].attributes["load_s"])
    ]
    brought = [(span, event) for span, event in loads if span.parent in syncs]
    for number, (span, event) in enumerate(brought, 1):
        sync = syncs[span.parent or 0]
        last = sync["ts"] + max(0, sync["dur"] - 1)  # a slice does not include its end
        arrow = {"name": "brought", "cat": "version", "id": number}
        yield {"ph": "s", **arrow, "pid": sync["pid"], "tid": sync["tid"], "ts": min(last, event["ts"])}
        yield {"ph": "f", "bp": "e", **arrow, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"]}


def _meta(what: str, pid: int, tid: int, **about: object) -> Event:
    """Return the trace event that names or sorts a process or thread of the trace.

    A process stands for a track (line of our timeline), a thread for a kind of spans.

    :param what: the event's name, such as ``process_name``.
    :param pid: number of the track.
    :param tid: number of the kind of spans. :param about: the event's arguments.
    """
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": about}


def _us(seconds: float) -> int:
    """Return seconds in microseconds."""
    return round(seconds * 1_000_000)

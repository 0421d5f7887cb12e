"""The history on the page: spans, marks and the newest events. Pure.

This part of the document grows. :mod:`replicas.telemetry.spans` keeps a bounded number
of spans and marks for each track; with many tracks the page gets fewer, so that it also
opens fast with 200 replicas.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from replicas.page.document import Tree
from replicas.telemetry.events import Record
from replicas.telemetry.spans import Spans
from replicas.telemetry.tracks import Mark, Span, parts
from replicas.telemetry.words import in_words, routine

EVENTS = 200
"""Events listed of each kind, routine or not: routine ones displace no others."""
WHOLE = 2400
"""Spans or marks of one kind, of all tracks together, in the first document."""
LEAST = 6
REPORT = 20_000
"""Spans of one kind, or marks, that a report keeps of a track; syncs three times."""
_WAYS = 24
"""Pairs of nodes of one sync that are listed, those with most bytes first."""
_DROPPED = {"moved_to", "pulled", "channel", "trace"}
"""Attributes that a viewer gets by a click (the event), or has elsewhere."""


class History:
    """A run's history as the page shows it: spans, marks and newest events.

    :param after: number of the event before the first. :param whole: include all
        details, as for a report, which cannot request more.
    :ivar spans: the spans and marks that it is made of; later events change them.
    """

    def __init__(self, after: int = 0, *, whole: bool = False) -> None:
        """Begin without events.

        :param after: number of the event before the first one that is fed.
        :param whole: include all details, as for a report, which cannot request more.
        """
        self.seq = after
        self._told = after
        self.spans = Spans(REPORT) if whole else Spans()
        self._whole = whole
        self._events: dict[bool, deque[Record]] = {one: deque(maxlen=EVENTS) for one in (False, True)}
        """The newest events, by whether they are routine."""

    def feed(self, records: Iterable[Record]) -> float:
        """Add the next events, in order. Return the CPU seconds that this took."""
        began = time.thread_time()
        for record in records:
            self.spans.feed(record)
            self._events[routine(record.event)].append(record)
            self.seq = record.seq
        return time.thread_time() - began

    def whole(self) -> Tree:
        """Return the whole history, for a new viewer: ``spans``, ``marks`` and
        ``events`` by key, with totals and gaps. The next :meth:`changes` is not
        affected."""
        found: Tree = {"spans": {}, "marks": {}, "events": {}, **self.totals_and_gaps()}
        for section, part in self.parts():
            found[section] |= part
        return found

    def parts(self) -> Iterator[tuple[str, Tree]]:
        """Yield the history in parts: (section, the objects of this part by key).

        Sections are ``spans``, in a part for each track and kind; ``marks``, in a part
        for each track; and ``events``, in one part. The caller merges the parts of a
        section. Keys are those of the page's document, such as ``sync17``. Each part is
        made in about a millisecond. Do not feed events meanwhile.
        """
        most = self._most
        spans: dict[tuple[str, str], list[Span]] = {}
        for span in self.spans.spans():
            spans.setdefault((span.track, span.kind), []).append(span)
        marks: dict[str, deque[Mark]] = {}
        for mark in self.spans.marks():
            marks.setdefault(mark.track, deque(maxlen=most)).append(mark)
        for kept in spans.values():
            older = len(kept) - (most or len(kept))
            yield "spans", {key(span): self._span(span) for at, span in enumerate(kept) if at >= older or not span.end}
        for some in marks.values():
            yield "marks", {_mark_key(mark): _mark(mark) for mark in some}
        yield "events", self._told_events(self._listed())

    def changes(self) -> Tree:
        """Return the merge patch (RFC 7396) of the history since the last call of this
        method, or since the start; empty without new events."""
        if self.seq == self._told:
            return {}
        spans, marks = self.spans.changed(self._told)
        events = [record for record in self._listed() if record.seq > self._told]
        self._told = self.seq
        return {
            "spans": {key(span): self._span(span) for span in spans},
            "marks": {_mark_key(mark): _mark(mark) for mark in marks},
            "events": self._told_events(events),
            **self.totals_and_gaps({span.track for span in spans} | {mark.track for mark in marks}),
        }

    def totals_and_gaps(self, tracks: set[str] | None = None) -> Tree:
        """Return ``totals``, the spans and marks that each track has had by kind;
        ``kept``, how many of a kind the page keeps; ``unknown``, the times without
        events.

        :param tracks: tracks of the totals; None: all.
        """
        totals = {track: kinds for track, kinds in self.spans.totals().items() if tracks is None or track in tracks}
        found: Tree = {"totals": totals} | ({"kept": self._most} if self._most else {})
        return found | ({"unknown": list(self.spans.unknown)} if self.spans.unknown else {})

    @property
    def _most(self) -> int | None:
        """Limit of spans of one kind for a track on the page; None without a limit, as
        for a report."""
        return None if self._whole else max(LEAST, WHOLE // max(1, self.spans.tracks))

    def _listed(self) -> list[Record]:
        """Return the newest 200 routine events and the newest 200 others, by number.

        An event is routine if it tells of ordinary success, such as a commit.
        """
        return sorted((*self._events[False], *self._events[True]), key=lambda record: record.seq)

    def _told_events(self, records: Iterable[Record]) -> Tree:
        """Return events as the document has them, by keys such as ``e17``."""
        return {f"e{record.seq}": _event(record, whole=self._whole) for record in records}

    def _span(self, span: Span) -> Tree:
        """Return a span as the document has it, without empty attributes; a sync also
        with its phases, and with the bytes between nodes."""
        found: Tree = {"id": span.id, "track": span.track, "kind": span.kind, "name": span.name}
        found["start"] = round(span.start, 3)
        if span.end is not None:
            found["end"] = round(span.end, 3)
        dropped: set[str] = set() if self._whole else _DROPPED
        found |= {
            name: value for name, value in span.attributes.items() if name not in dropped and value not in ("", None)
        }
        if span.kind == "version":
            found["channel"] = span.attributes["channel"]
        if span.kind == "sync":
            found["parts"] = [_part(one, span) for one in parts(span) if one.kind == "phase"]
            found["between"] = _ways(found.get("between", {}), None if self._whole else _WAYS)
        return found


def key(span: Span) -> str:
    """Return the span's key in the document, such as ``sync17``.

    It has kind and number: spans of different kinds may begin with the same event,
    whose number they share.
    """
    return f"{span.kind}{span.id}"


def _part(part: Span, span: Span) -> tuple[str, float, float]:
    """Return name, start and end of ``part``, which is a phase of ``span``.

    The times are in seconds from the start of ``span``. A phase that has not ended ends
    when it starts.
    """
    end = part.end if part.end is not None else part.start
    return part.name, round(part.start - span.start, 4), round(end - span.start, 4)


def _ways(between: dict[str, dict[str, int]], most: int | None) -> list[tuple[str, str, int]]:
    """Return (giver, taker, bytes) for each pair of nodes, most bytes first.

    :param between: bytes by giving node and taking node.
    :param most: length of the list; None: all.
    """
    found = [(giver, taker, nbytes) for giver, takers in between.items() for taker, nbytes in takers.items()]
    return sorted(found, key=lambda way: -way[2])[:most]


def _mark_key(mark: Mark) -> str:
    """Return the key of a mark (an instant) in the document, such as ``m17exit``."""
    return f"m{mark.seq}{mark.kind}"


def _mark(mark: Mark) -> Tree:
    """Return a mark as the document has it: its fields, without empty ones."""
    found: Tree = msgspec.to_builtins(mark)
    return {name: value for name, value in found.items() if value != ""} | {"at": round(mark.at, 3)}


def _event(record: Record, *, whole: bool) -> Tree:
    """Return an event as the document has it: in words, with its time and number.

    :param whole: with all fields of the event, too, for a report.
    """
    who, what, tone = in_words(record.event, record.at)
    found: dict[str, Any] = {"seq": record.seq, "at": round(record.at, 3), "who": who, "what": what}
    found["type"] = type(record.event).__name__
    if routine(record.event):
        found["routine"] = True
    if whole:
        found["whole"] = msgspec.to_builtins(record.event, str_keys=True)
    return found | ({"tone": tone} if tone else {})

"""A run's events as spans and marks, which pages and timelines draw. Pure.

Theory of operation
===================

:class:`Spans` is a fold of the events of one run, as the counters are
(:mod:`replicas.telemetry.tally`): a live page feeds it from the event log, a report
from the file, and both show the same. A *span* lies on a *track*::

    run                  supervisor, unsupervised, drain
    channel NAME         sync (its parts: phase, transfer), served, catch_up, operation
    group NAME           drain
    node NAME            node (its states), drain
    replica GROUP/INDEX  generation, state, version (its part: load), drain

A *mark* is an instant: an exit, an order, a loss, wrong bytes. Both have the number of
the event with which they begin, to find that event again. A span also has the number of
the last event that changed it: a page asks for changes since its newest number.

**Parts** of a sync, and the load of a version, follow from the span alone, so they are
not kept: :func:`~replicas.telemetry.tracks.parts` makes them. A version on a replica's
track begins when all ranks have loaded it; its parent is the sync that brought it.

**Several supervisors.** A supervisor that takes over (``resumed``) continues the spans:
open spans stay open until an event ends them. ``ADOPT`` of the same generation
continues that span. If a state does not fit the next event, its end was not recorded:
it ends when that supervisor began, or at the last event before a gap in the numbers,
and has ``unknown_end``. Any other ``RunStarted`` begins another run, and forgets the
previous one.

**Clocks.** Times are those of the events. A clock that was set back is marked, and no
span ends before it begins.

**Missing events.** A log that was rotated, or a page that reads only the newest events,
begins in the middle of the run. :attr:`Spans.unknown` has the times without events: a
viewer must not draw them as idle. A state that began in such a time is known from its
end on (``before``, ``before_since`` of the next state).

**Bounds.** They are for each track; there are as many tracks as the run has had
replicas, nodes, groups and channels. A track keeps the newest ended spans of each kind
(a channel three times as many syncs), all open ones, and as many marks of all kinds
together; older spans and marks are counted in :attr:`Spans.folded`, marks as the kind
``mark``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from replicas.core.base import effects
from replicas.core.lives.lifecycle import ALIVE, RUNNING, Transition
from replicas.status import SyncRecord
from replicas.telemetry import events
from replicas.telemetry.tracks import MARKS, Folded, Mark, Span, order, replica_of, track_of
from replicas.telemetry.words import duration_text, in_words

MOST = 100
"""Spans of one kind, and marks, that a track keeps."""
_SYNCS = 3
CLOCK_STEP_S = 1.0
"""A clock that goes back by less was only slewed."""


class Spans:
    """A run's events as spans (periods) and marks (instants) of a timeline.

    :param most: spans of one kind that a track keeps.
    :ivar seq: number of the newest event. :ivar at: when it happened.
    :ivar folded: spans and marks that are no longer kept, by track and kind.
    :ivar unknown: start and end of each time whose events are missing, in seconds since
        1970; start 0: since the run began.
    """

    def __init__(self, most: int = MOST) -> None:
        """Begin without events; a track (line) keeps ``most`` ended spans of a kind."""
        self._most = most
        self.seq, self.at = 0, 0.0
        self._reset()

    def _reset(self) -> None:
        """Forget the run, with all spans and marks."""
        self.run = ""
        self.folded: dict[tuple[str, str], Folded] = {}
        self._kept: dict[tuple[str, str], deque[Span]] = {}
        self._open: dict[tuple[str, str, str], Span] = {}
        """By track, kind, and a channel for versions."""
        self._marks: dict[str, deque[Mark]] = {}
        self.unknown: deque[tuple[float, float]] = deque(maxlen=self._most)
        self._changes: OrderedDict[tuple[int, str, str, str], Span] = OrderedDict()
        """All spans, ordered by their last change."""
        self._syncs: dict[tuple[str, int], Span] = {}
        self._doubt_at = 0.0
        """Presumed end of a span that does not fit the next event."""

    # ------------------------------------------------------------ results

    def spans(self) -> list[Span]:
        """Return all spans that are kept, by track and start; later events change
        them."""
        kept = [span for one in self._kept.values() for span in one]
        return sorted(kept, key=lambda span: (order(span.track), span.start, span.id))

    @property
    def tracks(self) -> int:
        """Number of tracks (lines of the timeline) that have spans."""
        return len({track for track, _ in self._kept})

    def totals(self) -> dict[str, dict[str, int]]:
        """Return how many spans of each kind, and marks, each track has had: {track:
        {kind: count}}; those that are no longer kept count, too."""
        found: dict[str, dict[str, int]] = {}
        counts = {key: len(kept) for key, kept in self._kept.items()}
        counts |= {(track, "mark"): len(kept) for track, kept in self._marks.items()}
        for (track, kind), count in counts.items():
            found.setdefault(track, {})[kind] = count + self.folded.get((track, kind), Folded()).count
        return found

    def marks(self) -> list[Mark]:
        """Return all marks that are kept, in the order of their events."""
        return sorted((mark for one in self._marks.values() for mark in one), key=lambda mark: mark.seq)

    def changed(self, since: int) -> tuple[list[Span], list[Mark]]:
        """Return the spans and marks that events numbered above ``since`` changed."""
        spans: list[Span] = []
        for span in reversed(self._changes.values()):
            if span.changed <= since:
                break
            spans.append(span)
        marks = (mark for one in self._marks.values() for mark in _newer(one, since))
        return spans[::-1], sorted(marks, key=lambda mark: mark.seq)

    # ------------------------------------------------------------ the fold

    def feed(self, record: events.Record) -> None:
        """Apply the next event to the spans and marks; ignore an event that is not
        newer than the last."""
        if record.seq <= self.seq:
            return
        event, at = record.event, record.at
        if not isinstance(event, events.RunStarted) or event.resumed:
            self._check_order(record)
        if isinstance(event, events.RunStarted):
            self._run_started(record, event)
        self.seq, self.at = record.seq, at
        match event:
            case Transition():
                self._apply_transition(event)
            case events.ReplicaExited():
                self._exited(event)
            case effects.ReplicaLoaded():
                self._loaded(event)
            case effects.SyncEnded(channel, sync):
                self._synced(channel, sync)
            case effects.CaughtUp():
                between = self._between(event.pulled, event.moved_to, "")
                names = [member.name for member in event.members]
                facts = {"version": event.version, "members": names, "pulled": event.pulled, "between": between}
                self._add_ended_span(f"catch-up {event.version}", "catch_up", event.channel, event.seconds, facts)
            case effects.OperationEnded():
                self._add_ended_span(event.kind, "operation", event.channel, event.seconds, {"outcome": event.outcome})
            case effects.VersionDecided():
                self._decided(track_of(event), event.version, event.what)
            case events.NodeChanged():
                self._node_changed(event)
            case events.Draining():
                self._open_span(track_of(event), "drain", event.reason, hurry=event.hurry)
            case events.Drained():
                self._finish(track_of(event), "drain")
            case events.RunEnded():
                self._run_ended(event)
        if (kind := MARKS.get(type(event))) is not None:
            self._mark(track_of(event), kind, event)

    def _run_started(self, record: events.Record, event: events.RunStarted) -> None:
        """End the span of a supervisor that died, and begin that of the one that has
        started; if the event does not continue the run, forget all spans first."""
        before, self.seq = self._open.get(("run", "supervisor", "")), record.seq
        if not event.resumed:
            self._reset()
        elif before is not None:
            before.attributes["died"] = True
            self._finish("run", "supervisor", at=self.at)
            gap = Span(id=record.seq, track="run", kind="unsupervised", name="no supervisor", start=self.at)
            gap.end = max(self.at, record.at)
            self._keep(gap)
        self.run, self.at, self._doubt_at = event.run, record.at, record.at
        self._open_span("run", "supervisor", f"process {event.pid}", version=event.version, resumed=event.resumed)

    def _check_order(self, record: events.Record) -> None:
        """Add a mark if events are missing before this one, by its number, or the clock
        was set back. Add the time of missing events to :attr:`unknown`."""
        missing, before = record.seq - self.seq - 1, self.at
        if missing:
            text = f"{missing} events before this one are not in the log, or of another release"
            self._note(record, "gap", text, "quiet")
            self._doubt_at = before or record.at
            self.unknown.append((before, record.at))
        if record.at < before - CLOCK_STEP_S:
            text = f"the clock was set back by {duration_text(before - record.at)}"
            self._note(record, "clock", text, "warning")

    def _note(self, record: events.Record, kind: str, text: str, tone: str) -> None:
        """Add a mark to the track of the run; ``tone``: its colour, as :mod:`.words`
        has them."""
        self._add(Mark(seq=record.seq, track="run", kind=kind, name=kind, at=record.at, text=text, tone=tone))

    def _apply_transition(self, event: Transition) -> None:
        """Begin, change or end the spans of a replica's state and generation by a
        change of its state."""
        track = track_of(event)
        state, life = self._open.get((track, "state", "")), self._open.get((track, "generation", ""))
        adopted = event.event == "adopt"
        if event.after == "starting" and event.before not in RUNNING:
            life = self._generation(track, event, life, adopted=adopted)
        if state is not None and state.name == event.after and event.before == event.after:
            state.attributes["reason"] = event.reason
            self._touch(state)
        elif not (adopted and state is not None and state.name == "starting"):
            if state is not None and state.name != event.before and not adopted:
                self._close_without_end(track, "state")
                state = None
            about: dict[str, Any] = {"event": str(event.event), "reason": event.reason, "generation": event.generation}
            if state is None and self.unknown and event.before != "pending" and not adopted:
                about |= {"before": event.before, "before_since": self.unknown[-1][1]}
            parent = life.id if life and event.after in ALIVE else None
            self._open_span(track, "state", event.after, parent=parent, ago=event.silent_s or 0.0, **about)
        if life is not None:
            told = {"start_s": event.start_s, "recovery_s": event.recovery_s, "restart_reason": event.restart_reason}
            life.attributes |= {name: value for name, value in told.items() if value is not None}
            self._touch(life)
        if event.after not in ALIVE:
            self._finish(track, "generation")
            self._end_versions(track)

    def _generation(self, track: str, event: Transition, before: Span | None, *, adopted: bool) -> Span:
        """Return the open span of a generation: a new one, or ``before`` if a new
        supervisor has taken over the same generation.

        :param before: the open span of the replica's last known generation, or None.
        :param adopted: whether the event tells of a takeover.
        """
        name = f"generation {event.generation}"
        if before is not None and before.name == name and adopted:
            before.attributes["adopted"] = before.attributes.get("adopted", 0) + 1
            return before
        if before is not None:
            self._close_without_end(track, "generation")
            self._end_versions(track, lost=True)
        more: dict[str, Any] = {"adopted": 1} if adopted else {}
        return self._open_span(track, "generation", name, number=event.generation, nodes=event.nodes, **more)

    def _exited(self, event: events.ReplicaExited) -> None:
        """Store how the ranks of a generation ended, as attributes of its span; end the
        span, and those of its versions. Do nothing if that span is not open."""
        track = track_of(event)
        life = self._open.get((track, "generation", ""))
        if life is not None and life.attributes["number"] == event.generation:
            codes = {str(rank.rank): rank.code for rank in event.ranks}
            life.attributes |= {"outcome": event.outcome, "reason": event.reason, "exit_codes": codes}
            self._finish(track, "generation")
            self._end_versions(track)

    def _loaded(self, event: effects.ReplicaLoaded) -> None:
        """Begin the span of a version that a replica has loaded (for version 0: none);
        end the span of the version that it served on the channel until now."""
        track, channel, version = track_of(event), event.channel, event.version
        serves = self._open.get((track, "version", channel))
        if serves is not None and serves.attributes["version"] == version:
            return  # repeated by a new coordinator
        self._finish(track, "version", channel)
        if not version:
            return
        sync = self._syncs.get((channel, version))
        about: dict[str, Any] = {"channel": channel, "version": version, "load_s": event.load_s}
        parent = sync.id if sync is not None else None
        self._open_span(track, "version", f"version {version}", key=channel, parent=parent, **about)
        if sync is not None and sync.end is not None:
            after_s = max(0.0, self.at - sync.end)
            sync.attributes |= {"loads": sync.attributes.get("loads", 0) + 1}
            sync.attributes |= {"last_loaded": track.removeprefix("replica "), "last_loaded_s": after_s}
            self._touch(sync)

    def _synced(self, channel: str, sync: SyncRecord) -> None:
        """Add the span of a sync (a publish and its transfers), which has just
        ended."""
        facts = {name: value for name, value in msgspec.structs.asdict(sync).items() if value or name == "version"}
        facts["between"] = self._between(sync.pulled, sync.moved_to, sync.publisher)
        span = self._add_ended_span(f"sync {sync.version}", "sync", channel, sync.seconds, facts)
        if sync.outcome == "committed":
            self._syncs[channel, sync.version] = span

    def _decided(self, track: str, version: int, what: effects.What) -> None:
        """Begin the span of a version that is served by this decision (``what``).
        Channels that serve each commit have no such spans."""
        if what == "promoted" or (what == "rolled_back" and (track, "served", "") in self._open):
            self._open_span(track, "served", f"version {version}", version=version)

    def _between(
        self, pulled: Mapping[str, Mapping[str, int]], moved_to: Mapping[str, int], publisher: str
    ) -> dict[str, dict[str, int]]:
        """Return the bytes of a sync as {node they came from: {node they went to:
        number}}. An unknown node is named by its replica.

        :param pulled: bytes by taking member and giving member.
        :param moved_to: bytes by taking replica, if ``pulled`` is empty; ``publisher``
            is the member that gave them, and without it the result is empty.
        """
        found: dict[str, dict[str, int]] = {}
        ways = [(holder, member, nbytes) for member, givers in pulled.items() for holder, nbytes in givers.items()]
        if not pulled and publisher:
            ways = [(publisher, replica, nbytes) for replica, nbytes in moved_to.items()]
        for holder, member, nbytes in ways:
            to, given = self.node_of(member), found.setdefault(self.node_of(holder), {})
            given[to] = given.get(to, 0) + nbytes
        return found

    def node_of(self, member: str) -> str:
        """Return the last nodes of a replica or member, joined by ``+``, or the
        replica's name if they are not known."""
        name = replica_of(member)
        lives = self._kept.get((f"replica {name}", "generation"))
        return "+".join(dict.fromkeys(lives[-1].attributes["nodes"])) or name if lives else name

    def _node_changed(self, event: events.NodeChanged) -> None:
        """Begin the span of a node's new state, if it has changed, and end the last."""
        track = track_of(event)
        known = self._open.get((track, "node", ""))
        if known is None or known.name != event.after:
            self._open_span(track, "node", event.after, reason=event.reason, address=event.address)

    def _run_ended(self, event: events.RunEnded) -> None:
        """Store the exit code in the supervisor's span, and end all open spans."""
        if (own := self._open.get(("run", "supervisor", ""))) is not None:
            own.attributes |= {"exit_code": event.exit_code, "reason": event.reason}
        for key in list(self._open):
            self._finish(*key)

    # ------------------------------------------------------------ what is kept

    def _open_span(
        self, track: str, kind: str, name: str, *, key: str = "", parent: int | None = None, ago: float = 0, **more: Any
    ) -> Span:
        """Begin a span and return it; end the open one of its track, kind and ``key``.

        :param key: tells open spans of one kind apart: the channel of a version.
        :param parent: event number of the span that it belongs to.
        :param ago: how many seconds ago it began. :param more: its attributes.
        """
        start, before = self.at - ago, self._finish(track, kind, key, at=self.at - ago)
        start = max(start, before.start) if before is not None and ago else start
        span = Span(id=self.seq, track=track, kind=kind, name=name, start=start, parent=parent, attributes=more)
        self._open[track, kind, key] = span
        return self._keep(span)

    def _add_ended_span(self, name: str, kind: str, channel: str, seconds: float, about: dict[str, Any]) -> Span:
        """Add and return a span of a channel that lasted ``seconds`` and ends now;
        ``about``: its attributes."""
        track, start = f"channel {channel}", self.at - seconds
        span = Span(id=self.seq, track=track, kind=kind, name=name, start=start, end=self.at, attributes=about)
        return self._keep(span)

    def _finish(self, track: str, kind: str, key: str = "", *, at: float | None = None) -> Span | None:
        """End the open span of this track, kind and ``key`` (as in :meth:`_open_span`)
        at the time ``at`` or now; return the span, or None if there is none."""
        if (span := self._open.pop((track, kind, key), None)) is not None:
            span.end = max(span.start, self.at if at is None else at)
            self._touch(span)
        return span

    def _close_without_end(self, track: str, kind: str, key: str = "") -> None:
        """End a span whose end event is missing, as of the last event before the gap,
        and give it the attribute ``unknown_end``."""
        if (span := self._finish(track, kind, key, at=self._doubt_at)) is not None:
            span.attributes["unknown_end"] = True

    def _end_versions(self, track: str, *, lost: bool = False) -> None:
        """End the open spans of versions of a replica; ``lost``: at an unknown time."""
        for one, kind, channel in [key for key in self._open if key[:2] == (track, "version")]:
            (self._close_without_end if lost else self._finish)(one, kind, channel)

    def _keep(self, span: Span) -> Span:
        """Add and return a span; above the limit of its track and kind, drop the oldest
        that has ended."""
        kept = self._kept.setdefault((span.track, span.kind), deque())
        kept.append(span)
        self._touch(span)
        if len(kept) > self._most * (_SYNCS if span.kind == "sync" else 1):
            oldest = next((one for one in kept if one.end is not None), None)
            if oldest is not None:
                self._fold(kept, oldest)
        return span

    def _fold(self, kept: deque[Span], span: Span) -> None:
        """Drop a span from the spans of its kind, ``kept``, and add its duration to
        :attr:`folded`."""
        kept.remove(span)
        self._changes.pop(_key(span), None)
        self._syncs.pop((span.track.removeprefix("channel "), span.attributes.get("version", 0)), None)
        folded = self.folded.setdefault((span.track, span.kind), Folded())
        end = span.end if span.end is not None else span.start
        folded.count += 1
        folded.seconds += end - span.start
        folded.until = max(folded.until, end)

    def _touch(self, span: Span) -> None:
        """Record that the newest event changed the span, for :meth:`changed`."""
        span.changed = self.seq
        self._changes[_key(span)] = span
        self._changes.move_to_end(_key(span))

    def _mark(self, track: str, kind: str, event: events.Event) -> None:
        """Keep a mark of an event, in words, on this track."""
        _, text, tone = in_words(event, self.at)
        name = event.outcome if isinstance(event, events.ReplicaExited) else kind
        self._add(Mark(seq=self.seq, track=track, kind=kind, name=name, at=self.at, text=text, tone=tone))

    def _add(self, mark: Mark) -> None:
        """Keep a mark; above the limit drop the oldest one of the track."""
        kept = self._marks.setdefault(mark.track, deque())
        kept.append(mark)
        if len(kept) > self._most:
            folded = self.folded.setdefault((mark.track, "mark"), Folded())
            folded.count += 1
            folded.until = kept.popleft().at


def read(records: Iterable[events.Record], most: int = MOST) -> Spans:
    """Fold all records; return the spans of the last run in them. A track (line of the
    timeline) keeps ``most`` ended spans of a kind."""
    found = Spans(most)
    for record in records:
        found.feed(record)
    return found


def _key(span: Span) -> tuple[int, str, str, str]:
    """Return (number, track, kind, name) of a span: its key among the changed ones."""
    return span.id, span.track, span.kind, span.name


def _newer(marks: deque[Mark], since: int) -> Iterator[Mark]:
    """Yield the marks with a number above ``since``, the newest first."""
    for mark in reversed(marks):
        if mark.seq <= since:
            return
        yield mark

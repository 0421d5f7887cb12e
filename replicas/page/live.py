"""Serve the page's document and its changes to all viewers; compute them once.

There is one document (:mod:`replicas.page.document` and :mod:`replicas.page.history`).
A viewer first gets the whole document with its number (:meth:`Live.whole`), then the
changes after that number (:meth:`Live.changes`). While there are viewers, one task
reads the run's state every :data:`INTERVAL_S`, or less often if that takes more than
:data:`SHARE` of the time, and encodes the changes once. A viewer that is behind the
kept changes, or comes from another supervisor, must fetch the document again.
Without viewers there is no task, and after :data:`LINGER_S` the history is freed.
"""

from __future__ import annotations

import asyncio
import gzip
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from replicas import errors
from replicas.common.tasks import cancelled
from replicas.page.document import Tree, difference, document, merge
from replicas.page.history import History
from replicas.status import RunStatus
from replicas.telemetry.events import Record

INTERVAL_S = 0.5
SHARE = 0.03
"""Maximum share of one core for reading the run's state."""
INTERVAL_MAX_S = 5.0
BEAT_S = 5.0
LINGER_S = 15.0
VIEWERS = 32
KEPT = 64
"""Changes kept for viewers that are behind."""
KEPT_NBYTES = 4 << 20
PAST = 20_000
"""Number of past events with which the history begins."""
_AT_ONCE = 256
_GZIP_LEVEL = 5


class Watched(Protocol):
    """The part of a run that the page shows; no method blocks the event loop."""

    def status(self) -> RunStatus:
        """Return the run's present status. Raises UsageError while the supervisor
        starts."""

    def events(self, after: int | None = None) -> AsyncIterator[Record]:
        """Yield events above ``after`` (None: only new ones), then each new one, until
        the run is over."""

    @property
    def last_event(self) -> int:
        """The number of the newest event."""


class Places:
    """Limits the viewers (open streams of the page) to :data:`VIEWERS` places.

    When all are taken, a newcomer replaces the oldest viewer of the address with most
    places, if that address still has as many as the newcomer's afterwards (or two
    addresses would replace each other forever). A viewer with the token replaces one
    without, and never the reverse.
    """

    def __init__(self) -> None:
        """Begin with all places free."""
        self._taken: dict[Callable[[], None], tuple[bool, str]] = {}

    def full(self, address: str, trusted: bool) -> bool:
        """Return True if all places are taken, and a newcomer may replace no viewer.

        :param address: the newcomer's IP address. :param trusted: whether the newcomer
            has shown the token.
        """
        return len(self._taken) >= VIEWERS and self._loser(address, trusted) is None

    @contextmanager
    def take(self, address: str, trusted: bool, end: Callable[[], None]) -> Iterator[None]:
        """Context manager: hold one of the places in the block.

        If all are taken, another viewer loses its place. Call :meth:`full` first: if
        that returns True, no viewer may lose one, and this call would exceed the limit.

        :param address: the viewer's IP address. :param trusted: whether the viewer has
            shown the token.
        :param end: called, on the loop, if a later newcomer takes this place: it must
            end the viewer's stream.
        """
        if len(self._taken) >= VIEWERS and (loser := self._loser(address, trusted)) is not None:
            del self._taken[loser]
            loser()
        self._taken[end] = trusted, address
        try:
            yield
        finally:
            self._taken.pop(end, None)

    def _loser(self, address: str, trusted: bool) -> Callable[[], None] | None:
        """Return which viewer a newcomer replaces, or None if it may replace none.

        The result is the ``end`` that was given to :meth:`take` for that viewer; it is
        not called here.

        :param address: the newcomer's. :param trusted: whether it has shown the token.
        """
        below = any(theirs < trusted for theirs, _ in self._taken.values())
        places = {end: one for end, (theirs, one) in self._taken.items() if theirs == (trusted and not below)}
        counts = Counter(places.values())
        oldest = max(places, key=lambda end: counts[places[end]], default=None)  # the first of equals
        fair = oldest is not None and (below or counts[places[oldest]] > counts[address] + 1)
        return oldest if fair else None


class Live:
    """Keeps the page's document of one run up to date, for all its viewers.

    :param shown: removes from a document the parts that viewers may not see.
    """

    def __init__(
        self,
        source: Watched,
        *,
        shown: Callable[[Tree], Tree] = lambda tree: tree,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Show ``source``; read nothing before a viewer comes. Use on one event loop
        only.

        :param shown: removes from a document the parts that viewers may not see.
        :param now: returns the time of day, in seconds since 1970.
        """
        self._source = source
        self._shown = shown
        self._now = now
        self._id = secrets.token_hex(4)
        self._number = 0
        self._document: Tree = {}
        self._history: History | None = None
        self._kept: deque[tuple[int, bytes]] = deque()
        self._packed: tuple[int, bytes] = (-1, b"")
        self._looked_at = 0.0
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._forgetting: asyncio.TimerHandle | None = None
        self.viewers = 0
        self.places = Places()

    async def whole(self) -> bytes:
        """Return the whole document as it is now, with its number: JSON, compressed by
        gzip.

        Read the run's state first, unless that is recent or a task does so for viewers.
        """
        now = asyncio.get_running_loop().time()
        if self._history is None or (self._looking is None and now - self._looked_at >= INTERVAL_S):
            await self._refresh()
        if self._looking is None:
            self._forget_later()
        async with self._lock:
            if self._packed[0] != self._number:
                number, past, document = self._number, self._past, self._document  # _forget() may clear them meanwhile
                about = {**past.totals_and_gaps(), "number": f"{self._id}.{number}", "now": self._now()}
                data = msgspec.json.encode({**document, **about})[:-1]
                sections: dict[str, list[bytes]] = {"spans": [], "marks": [], "events": []}
                for section, part in past.parts():
                    sections[section] += [msgspec.json.encode(self._shown(part))[1:-1]] if part else []
                    await asyncio.sleep(0)  # a long history must not delay members
                for section, texts in sections.items():
                    data += b',"%s":{%s}' % (section.encode(), b",".join(texts))
                self._packed = number, await asyncio.to_thread(gzip.compress, data + b"}", _GZIP_LEVEL)
            return self._packed[1]

    async def changes(self, after: str) -> AsyncIterator[bytes]:
        """Yield server-sent events: each change of the document after state ``after``.

        The first viewer starts the task that reads the run's state, the last one ends
        it. An event ``beat`` comes after 5 s without changes. After the event ``anew``
        this ends: the viewer must fetch the document again.

        :param after: the ``number`` in the viewer's document, such as ``1f0c9a2e.17``.
        """
        self.viewers += 1
        try:
            yield b"retry: 1000\n\n"
            if self._looking is None:
                self._looking = asyncio.create_task(self._keep_looking(), name="page")
            position = self._position(after)
            while position is not None:
                news = self._news
                for number, data in tuple(self._kept):
                    if number > position:
                        yield b"id: %s.%d\ndata: %s\n\n" % (self._id.encode(), number, data)
                        position = number
                if position != self._number:  # more came, or it was too slow, or the history was freed
                    position = self._position(f"{self._id}.{position}")
                elif not await self._wait_for_change(news):
                    yield b"event: beat\ndata: %.3f\n\n" % self._now()
            yield b"event: anew\ndata: 0\n\n"
        finally:
            self.viewers -= 1
            if not self.viewers and self._looking is not None:
                looking, self._looking = self._looking, None
                self._forget_later()
                await cancelled(looking)

    async def _wait_for_change(self, news: asyncio.Event) -> bool:
        """Wait for a change of the document; return True if there is one, False if none
        came within 5 s. Raise the error that has ended the reading task.

        :param news: set at the next change.
        """
        assert self._looking is not None
        waiting = asyncio.ensure_future(news.wait())
        try:
            await asyncio.wait({waiting, self._looking}, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if self._looking.done():
                self._looking.result()  # raise its error: viewers are disconnected, and the log has it
            return waiting.done()
        finally:
            await cancelled(waiting)

    @property
    def _first(self) -> int:
        """The lowest number of a change that is still kept for viewers."""
        return self._kept[0][0] if self._kept else self._number + 1

    def _position(self, after: str) -> int | None:
        """Return the number of a viewer's document, or None if the viewer must fetch it
        again.

        :param after: ``SOURCE.NUMBER`` as :meth:`whole` gives it.
        """
        source, _, number = after.partition(".")
        if source != self._id or not (number.isascii() and number.isdigit() and len(number) < 12):
            return None
        return int(number) if self._first - 1 <= int(number) <= self._number else None

    async def _keep_looking(self) -> None:
        """Task, while there are viewers: update the document at intervals of 0.5 to 5
        s, and once more when the run's events end."""
        over: asyncio.Task[None] | None = asyncio.create_task(self._wait_for_last_event())
        try:
            while True:
                cost_s = await self._refresh()
                interval_s = min(INTERVAL_MAX_S, max(INTERVAL_S, cost_s / SHARE))
                if over is None:
                    await asyncio.sleep(interval_s)
                elif (await asyncio.wait({over}, timeout=interval_s))[0]:
                    over = None
        finally:
            if over is not None:
                await cancelled(over)

    async def _wait_for_last_event(self) -> None:
        """Wait until the run's stream of events ends, which means that the run is over;
        drop the events."""
        async for _ in self._source.events(self._source.last_event):
            pass

    async def _refresh(self) -> float:
        """Read the run's state, and keep the changes of the document for viewers.

        Return the CPU seconds that this took on the event loop's thread. By these the
        caller chooses the next time, so that reading takes a small share of it.
        """
        async with self._lock:
            if self._forgetting is not None:
                self._forgetting.cancel()
                self._forgetting = None
            self._looked_at = asyncio.get_running_loop().time()
            fresh, read_s = await self._read()
            began = time.thread_time()
            now = self._now()
            try:
                found = self._shown(document(self._source.status(), now))
            except errors.UsageError as error:  # the supervisor is still starting
                found = {"run": {"starting": error.message}}
            patch = difference(self._document, found)
            merge(self._document, patch)
            patch |= self._shown(self._past.changes())
            if fresh:  # viewers of an earlier document must fetch it again
                self._kept.clear()
                self._number += 1
            elif patch:
                self._keep(msgspec.json.encode({**patch, "now": now}))
            return read_s + time.thread_time() - began

    async def _read(self) -> tuple[bool, float]:
        """Add the events since the last call to the history.

        If there is no history, or it lacks too many events, replace it by one of the
        latest 20,000 events.

        :returns: whether the history was replaced, so that viewers must fetch the
            document again; and the CPU seconds that this took.
        """
        last, used_s = self._source.last_event, 0.0
        fresh = self._history is None or last - self._history.seq > PAST
        if fresh:
            self._history = History(max(0, last - PAST))
        if last <= self._past.seq:
            return fresh, used_s
        records = self._source.events(self._past.seq)
        batch: list[Record] = []
        try:
            async for record in records:
                batch.append(record)
                if len(batch) >= _AT_ONCE or record.seq >= last:
                    used_s += self._past.feed(batch)
                    batch.clear()
                    await asyncio.sleep(0)
                if record.seq >= last:
                    break
        finally:
            if (aclose := getattr(records, "aclose", None)) is not None:
                await aclose()
        return fresh, used_s

    @property
    def _past(self) -> History:
        """The history that viewers see; AssertionError before the first :meth:`_read`,
        or once it was freed."""
        assert self._history is not None
        return self._history

    def _keep(self, data: bytes) -> None:
        """Number an encoded change of the document and keep it for viewers, drop the
        oldest changes beyond the limits, and wake the viewers' streams."""
        self._number += 1
        self._kept.append((self._number, data))
        while len(self._kept) > KEPT or (sum(len(one) for _, one in self._kept) > KEPT_NBYTES and len(self._kept) > 1):
            self._kept.popleft()
        self._news.set()
        self._news = asyncio.Event()

    def _forget_later(self) -> None:
        """Start a timer, in place of one that runs, that frees the history and the
        document in 15 s, unless there are viewers then. Call it on the loop."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = asyncio.get_running_loop().call_later(LINGER_S, self._drop_history)

    def _drop_history(self) -> None:
        """Free the history and the document, unless there are viewers; the next viewer
        has them made again from the run's events."""
        self._forgetting = None
        if not self.viewers:
            self._history, self._document = None, {}
            self._kept.clear()
            self._packed = (-1, b"")
            self._number += 1

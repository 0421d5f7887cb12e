"""The event log of a run: a numbered JSONL file with rotation, counters and followers.

``<state_dir>/events.jsonl`` has one line for each record, each written with one call,
so a killed supervisor leaves whole lines. A torn last line (the machine died, the disk
was full) is cut off at the next start. Numbers strictly grow, in the file and over all
supervisors of the run, so any record can be found by bisection. A file that has reached
its maximum size becomes ``events.jsonl.1``, replacing the earlier one.

Followers share one ring of the newest records in memory. A follower that falls behind
the ring reads from the files until it has caught up, so a slow follower costs no memory
and loses only records that were rotated away (visible as a gap in the numbers). A full
disk never stops the run: events are still counted and passed on, the failure is logged
once, and the next written line says how many are missing.

Everything but :func:`read` runs on one event loop, and blocks it for no longer than a
write to the disk.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from replicas.common.decoding import MALFORMED
from replicas.common.logs import Log
from replicas.linux import private
from replicas.telemetry.events import Event, EventsLost, Record, decode, encode
from replicas.telemetry.tally import Tally

log = Log("replicas.telemetry.events")

MAX_NBYTES = 64 << 20
_RING = 1000
_CHUNK_NBYTES = 256 << 10
_WINDOW_NBYTES = 32 << 10
"""Bisection ends at this size; the rest is scanned."""
_SEQ = re.compile(rb'^\{"seq":(\d+),')


class EventLog:
    """All events of a run, as its supervisor sees them. For its event loop's thread.

    :param path: the file; None keeps nothing on disk.
    :param max_nbytes: size at which the file is rotated.
    :param tally: the counters up to the record ``seq``; later records of the file are
        counted at the start.
    :param seq: number of the last record that ``tally`` includes. Default: the counters
        start at zero, without the records of the file.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        max_nbytes: int = MAX_NBYTES,
        tally: Tally | None = None,
        seq: int | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the file, and count its records above ``seq``.

        :param path: the file; None keeps nothing on disk.
        :param max_nbytes: size at which the file is rotated, in bytes.
        :param tally: counters up to the record ``seq``; they are changed from now on.
        :param seq: number of that record; None: count none of the file's records.
        :param now: returns the time of day, in seconds since 1970.
        """
        self.path = path
        self.tally = Tally() if tally is None else tally
        self.seq = seq or 0
        self.on_rotate: Callable[[], object] | None = None
        """Called before a rotation, while the file can still rebuild the counters."""
        self._max_nbytes = max_nbytes
        self._now = now
        self._ring: deque[Record] = deque(maxlen=_RING)
        self._news = asyncio.Event()
        self.finished = self._closed = False
        """True if followers get no later record."""
        self._fd = -1
        self._size = 0
        self._problem = ""
        if path is None:
            return
        self._open(path)
        if seq is None:
            self.seq = _last_seq(path)
            return
        for record in read(path, seq):
            self.tally.count(record.event, record.at)
            self.seq = record.seq

    def emit(self, event: Event) -> Record:
        """Number, count and write one event, pass it to followers; return its record.

        Blocks for a write to the disk. If that fails (a full disk), nothing is raised:
        the failure is logged, and a later event reports how many are missing in the
        file; followers still get this one.
        """
        if self.tally.events_untold:  # the next written line says how many events are missing
            lost = EventsLost(count=self.tally.events_untold, reason=self._problem)
            record, line = self._next(lost)
            if self._write(line):
                log.warning("writing events to %s again; %d are missing there", self.path, lost.count)
                self._pass_on(record)
                self._problem = ""
        record, line = self._next(event)
        self._pass_on(record)
        if not self._write(line):
            self.tally.lost_event()
        return record

    def _next(self, event: Event) -> tuple[Record, bytes]:
        """Return the next record and its line, neither counted nor written yet. Rotate
        the file first if the line does not fit."""
        record = Record(self.seq + 1, self._now(), event)
        line = encode(record) + b"\n"
        self._make_room(len(line))
        return record, line

    def _pass_on(self, record: Record) -> None:
        """Count a record in the tally, add it to the newest records that are kept in
        memory (the oldest of them is dropped), and wake the followers."""
        self.tally.count(record.event, record.at)
        self.seq = record.seq
        self._ring.append(record)
        self._wake()

    def follow(self, after: int | None = None) -> AsyncIterator[Record]:
        """Return an iterator over the records numbered above ``after``, and then over
        new ones as they come, until :meth:`finish` or :meth:`close`.

        :param after: number of the last record that the reader has; 0: from the oldest
            record. None, or a number above the newest: only new records.
        """
        return self._follow(self.seq if after is None else min(after, self.seq))

    async def _follow(self, position: int) -> AsyncIterator[Record]:
        """Yield the records numbered above ``position``, then each new one, until
        :meth:`finish` or :meth:`close`."""
        while True:
            news = self._news
            records = self.after(position)
            for record in records:
                position = record.seq
                yield record
            if records:
                await asyncio.sleep(0)  # reading a long file must not starve other tasks
            elif self.finished:
                return
            else:
                await news.wait()

    def after(self, position: int) -> list[Record]:
        """Return the next records above number ``position``, in order, but not always
        all: a call returns those in memory, or one piece of a file. Call it again with
        the last number until the list is empty. Records whose file has been deleted
        are skipped. Blocks while it reads a file."""
        if position >= self.seq:
            return []
        first = self._ring[0].seq if self._ring else self.seq + 1
        if position + 1 >= first:
            return list(islice(self._ring, position + 1 - first, None))
        written = [] if self.path is None else [record for record in _chunk(self.path, position) if record.seq < first]
        return written or list(self._ring)

    def finish(self) -> None:
        """Have each iteration of :meth:`follow` end after the last record.

        Later events are still counted and written.
        """
        self.finished = True
        self._wake()

    def close(self) -> None:
        """Close the file: later events are counted, but not written. Each iteration of
        :meth:`follow` ends after the last record."""
        self.finished = self._closed = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._wake()

    def _wake(self) -> None:
        """Wake the iterations of :meth:`follow` that wait for a record."""
        self._news.set()
        self._news = asyncio.Event()

    def _open(self, path: Path) -> None:
        """Open or create the file, and cut off a torn last line. A failure is logged
        and not raised: the next write tries again."""
        try:
            self._fd = private.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            end = _end_of_last_line(self._fd)
            if end != os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, end)
            self._size = end
        except OSError as error:
            self._failed(error)

    def _write(self, line: bytes) -> bool:
        """Write a line to the file; open the file first if an earlier opening failed.

        Return False if the line was not written, which is logged; True also if there is
        no path, or the log is closed.
        """
        if self.path is None or self._closed:
            return True
        try:
            if self._fd < 0:
                self._open(self.path)
            if self._fd < 0:
                return False
            if os.write(self._fd, line) != len(line):
                os.ftruncate(self._fd, self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._failed(error)
            return False
        self._size += len(line)
        return True

    def _failed(self, error: OSError) -> None:
        """Log that writing to the file failed, unless the last failure had the same
        reason."""
        words = error.strerror or str(error)
        if words != self._problem:
            self._problem = words
            log.error("continuing without writing events to %s: %s", self.path, words)

    def _make_room(self, nbytes: int) -> None:
        """Start a new file if ``nbytes`` more do not fit; on failure keep the old one.

        Call it before the next event is counted: ``on_rotate`` saves the counters,
        which must not include an event that no file has.
        """
        path = self.path
        if path is None or self._fd < 0 or self._closed or not self._size or self._size + nbytes <= self._max_nbytes:
            return
        if self.on_rotate is not None:
            self.on_rotate()
        beside = path.with_name(f"{path.name}.new")
        fd = -1
        try:
            fd = private.open_file(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            with suppress(FileNotFoundError):  # removed by the user
                private.rename(path, _older(path).name)
            try:
                private.rename(beside, path.name)
            except OSError:
                with suppress(OSError):  # the next rotation copes with the missing name
                    private.rename(_older(path), path.name)
                raise
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._failed(error)
            return
        os.close(self._fd)
        self._fd, self._size = fd, 0


def read(path: Path, after: int = 0) -> Iterator[Record]:
    """Yield the records numbered above ``after``, of the rotated file and then of the
    file, oldest first; none if both are missing. Records of unknown types are left out.
    Blocks."""
    while records := _chunk(path, after):
        yield from records
        after = records[-1].seq


def tail(path: Path, count: int = 200) -> Iterator[Record]:
    """Read and yield about the last ``count`` records of the file and the rotated one,
    oldest first. Blocks."""
    return read(path, max(0, _last_seq(path) - count))


def _opened(path: Path, stack: ExitStack) -> list[BinaryIO]:
    """Open the file and the rotated one for reading, until the end of ``stack``; leave
    out what is missing or another user's."""
    found: list[BinaryIO] = []
    for name in (path, _older(path)):  # this order: a rotation in between shows one file twice, and hides none
        with suppress(OSError):
            found.append(stack.enter_context(os.fdopen(private.open_file(name, os.O_RDONLY), "rb")))
    return found


def _older(path: Path) -> Path:
    """Return the path to which a full file is renamed: ``NAME.1``."""
    return path.with_name(f"{path.name}.1")


def _chunk(path: Path, after: int) -> list[Record]:
    """Read the next records numbered above ``after``, in order, from the rotated file
    or the file; return about 256 KiB of them, or an empty list if there are none."""
    with ExitStack() as stack:
        for file in reversed(_opened(path, stack)):
            file.seek(_offset(file, after))
            while data := _whole_lines(file):
                records = []
                for line in data.splitlines():
                    with suppress(*MALFORMED):
                        records.append(decode(line))
                if records := [record for record in records if record.seq > after]:
                    return records
    return []


def _whole_lines(file: BinaryIO) -> bytes:
    """Read about 256 KiB of whole lines from the file's position, and return them;
    empty if there is no whole line left."""
    data = file.read(_CHUNK_NBYTES)
    if data and not data.endswith(b"\n"):
        data += file.readline()
    return data[: data.rfind(b"\n") + 1]


def _offset(file: BinaryIO, after: int) -> int:
    """Return the offset in bytes of a line from which a scan finds all records above
    number ``after``, and reads about 32 KiB at most before the first of them.

    Reads the file by bisection, and changes its position.
    """
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > _WINDOW_NBYTES:
        middle = (low + high) // 2
        start, seq = _line_from(file, middle, high)
        if seq is None or seq > after:
            high = middle
        else:
            low = start
    return low


def _line_from(file: BinaryIO, offset: int, end: int) -> tuple[int, int | None]:
    """Return (start, record's number) of the first line with a record that starts after
    ``offset`` and before ``end``, or (end, None) if there is none. Moves the file's
    position."""
    file.seek(offset)
    file.readline()
    while (start := file.tell()) < end:
        found = _SEQ.match(file.readline())
        if found is not None:
            return start, int(found[1])
    return end, None


def _last_seq(path: Path) -> int:
    """Return the number of the last record in the file or the rotated one, or 0."""
    with ExitStack() as stack:
        for file in _opened(path, stack):
            file.seek(_offset(file, 1 << 62))
            numbers = [int(found[1]) for line in file if (found := _SEQ.match(line))]
            if numbers:
                return numbers[-1]
    return 0


def _end_of_last_line(fd: int) -> int:
    """Return the offset in bytes after the file's last line break, or 0 without one.

    Reads the file and moves its position; ``fd`` stays open.
    """
    with os.fdopen(os.dup(fd), "rb") as file:
        end = file.seek(_offset(file, 1 << 62))
        while data := _whole_lines(file):
            end += len(data)
    return end

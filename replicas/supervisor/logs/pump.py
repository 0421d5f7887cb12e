"""Log pump: the process that writes the output of a node's processes to log files.

Each rank writes into two pipes of its own, stdout and stderr (its sidecars into the
latter), and torchrun into one. Pipes protect a program from full disks, rotations and
slow terminals. A rank has two, so that half a line on one never ends up in the middle
of a line on the other (the order of lines *between* the two is that of reading, to a
few milliseconds).

The shim makes the pipes and holds both ends of them, so that no writer ever gets
SIGPIPE or notices the death of a pump: the shim
(:mod:`replicas.supervisor.shim.pump_watcher`) forks another one, which ends a torn line
and notes the gap in every log. A killed pump loses at most one read and one line.

The pump is forked, not exec'ed, which saves 3 MiB. It leads a session of its own and
ignores SIGTERM, which systemd sends to every process of a unit. It ends when no writer
is left, or soon after the shim is dead.

One loop waits for pipes, orders and the terminal::

    pipe ──read──► buffer ──fold──► complete lines ─┬─► rank-<r>.log, rotated by size
                                                    ├─► shared tail, for failure reports
                                                    └─► supervisor's stderr, if wanted

* A line is written when it is complete, in one piece, byte for byte as it came
  (:mod:`replicas.supervisor.logs.folding` handles progress bars). Lines of up to 1 MiB
  stay whole. An unfinished line gets an end when its process has ended.
* When the disk is full or fails, lines are dropped, so that their writers run on, and
  counted; the shim gets a message. Writing is retried four times a second, and at the
  end; the first new line of the file says how many are missing.
* The workers of torchrun learn their rank late, so the guard writes it as the first
  line (``RANK_MARK``) into both pipes.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import select
import selectors
import socket
import struct
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from replicas.supervisor.logs.folding import Folder
from replicas.supervisor.logs.log_file import RotatedFile
from replicas.supervisor.logs.tee import Tee
from replicas.supervisor.wire.guard import RANK_MARK
from replicas.supervisor.wire.orders import Message, MessageSocket, plain
from replicas.supervisor.wire.part_state import LogLoss

ALONE_S = 2.0
"""How long the pump runs after the shim's death, in seconds."""
COMM = "replicas-logs"
"""Name of the process, at most 15 bytes."""
LONGEST_NBYTES = 1 << 20
"""Longest line that is kept whole."""
READ_NBYTES = 64 << 10
TAIL_NBYTES = 8192
_TAIL_AT = 24
_GAP = b"replicas: the log pump was killed: a line may be torn here, or missing\n"
_RETRY_S = 0.25
_TELL_INTERVAL_S = 1.0
_SHOW_S = 0.2
_RANK_NDIGITS = 10


def waiting_nbytes(pipe: int) -> int:
    """Return the number of unread bytes in a pipe."""
    count: int = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0]
    return count


def is_pump(pid: int) -> bool:
    """Return True if this process has a log pump's name, which any process can take.

    It may decide the order in which processes are ended, never whether they are.
    """
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().rstrip() == COMM.encode()
    except OSError:
        return False  # it is gone


def _has_ended(pipe: int) -> bool:
    """Return True if the pipe has no writer, and all of it was read. Never waits."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return any(events & select.POLLHUP and not events & select.POLLIN for _, events in poll.poll(0))


class LogSource:
    """The pipes of one log, and in shared memory its reads, rank and last lines.

    The shim and its pumps share that memory; only the pump writes it.

    :param name: name of the file, without ``.log``; empty for ``rank-<r>``, with the
        rank that the guard reports.
    :param pipes: the ends to read from. :param writers: the ends to write to, which
        only the shim has.
    :param shown: True for the log of a rank, which is shown on the terminal if wanted.
    """

    def __init__(
        self, name: str, pipes: tuple[int, ...], writers: tuple[int, ...] = (), *, shown: bool = False
    ) -> None:
        """Map the shared memory, for a shim to inherit to its pumps; read nothing.

        :param name: name of the file, without ``.log``; empty for ``rank-<r>``.
        :param pipes: the ends to read from. :param writers: the ends to write to.
        :param shown: True for the log of a rank.
        """
        self.name = name
        self.pipes = pipes
        self.writers = writers
        self.shown = shown
        self._map = mmap.mmap(-1, _TAIL_AT + TAIL_NBYTES)
        self._numbers = memoryview(self._map)[:_TAIL_AT].cast("Q")  # reads, 1 + rank, length of the tail

    @property
    def reads(self) -> int:
        """Number of reads from the pipes so far, by which the shim sees progress."""
        return self._numbers[0]

    @reads.setter
    def reads(self, count: int) -> None:
        """Set the number of reads; for the pump only."""
        self._numbers[0] = count

    @property
    def rank(self) -> int:
        """Return the log's rank, as its guard reported it; -1 before that."""
        return self._numbers[1] - 1

    @rank.setter
    def rank(self, rank: int) -> None:
        """Set the log's rank, once its guard has reported it; for the pump only."""
        self._numbers[1] = 1 + rank

    @property
    def title(self) -> str:
        """Return the name of the file, or "" until its rank is known."""
        return self.name or (f"rank-{self.rank}" if self.rank >= 0 else "")

    def tail(self) -> bytes:
        """Return the last 8 KiB of the log, also lines that could not be written."""
        return self._map[_TAIL_AT : _TAIL_AT + self._numbers[2]]

    def keep(self, lines: bytes) -> None:
        """Append lines to the tail in shared memory, which keeps the last 8 KiB."""
        tail = (self.tail() + lines)[-TAIL_NBYTES:]
        self._map[_TAIL_AT : _TAIL_AT + len(tail)] = tail
        self._numbers[2] = len(tail)


class OutputLog:
    """One log in the pump: reads its pipes, and writes complete lines to the file."""

    def __init__(self, source: LogSource, folder: Path, max_nbytes: int, keep: int, *, replaces: bool = False) -> None:
        """Create the log's file if its name is known; read nothing yet.

        :param folder: of the file. :param max_nbytes: size at which it is rotated.
        :param keep: number of older parts. :param replaces: True if this pump replaces
            a killed one, which the log then notes.
        """
        self.source = source
        self.trouble = ""
        """Why lines are being dropped; empty if they are not."""
        self._folder = folder
        self._limits = (max_nbytes, keep)
        self._read_nbytes = max(4096, min(READ_NBYTES, max_nbytes // 4))
        self._gap = _GAP if replaces else b""
        self._unread = [b"" for _ in source.pipes]
        self._begun = [bool(source.name) for _ in source.pipes]
        self._folders = [Folder() for _ in source.pipes]
        self._file: RotatedFile | None = None
        self._retry_at = 0.0
        self._lost_lines = self._lost_nbytes = 0
        self.taken = 0
        """Bytes taken by the last read."""
        self.dropped = 0
        """Number of lines that this pump could not write."""
        self.why_dropped = ""
        if source.title:
            self._write(b"", time.monotonic())

    @property
    def due(self) -> float:
        """When :meth:`log_due_lines` must be called; inf for never."""
        retry_at = self._retry_at if self.trouble and self._lost_lines else math.inf
        return min(retry_at, *(folder.due for folder in self._folders))

    def read(self, index: int, now: float) -> bytes | None:
        """Read what one stream has, log its completed lines, and return them.

        :param index: of the stream among the source's pipes.
        :return: b"" if no line was completed; None if the stream has ended.
        """
        pipe = self.source.pipes[index]
        self.taken = 0
        nbytes = waiting_nbytes(pipe)
        if nbytes == 0:
            return None if _has_ended(pipe) else b""
        self.taken = min(nbytes, self._read_nbytes)
        data = self._unread[index] + os.read(pipe, self.taken)
        self.source.reads += 1
        if not self._begun[index]:
            data = self._learn_rank(data, index, now)
        lines, used = self._folders[index].fold(data, now)
        if len(data) - used >= LONGEST_NBYTES:
            lines, used = lines + data[used:] + b"\n", len(data)
        self._unread[index] = data[used:]
        self._begun[index] |= used > 0
        return self._put(lines, now)

    def _learn_rank(self, data: bytes, index: int, now: float) -> bytes:
        """Remove the guard's line, if any, from a stream's start; return the rest.

        The line tells the rank of the log, and with it the name of the file.

        :param index: of the stream among the source's pipes.
        """
        line, end, rest = data.partition(b"\n")
        number = line.removeprefix(RANK_MARK)
        if not (end and line.startswith(RANK_MARK) and number.isdigit() and len(number) < _RANK_NDIGITS):
            return data
        self._begun[index] = True
        if self.source.rank < 0:
            self.source.rank = int(number)
            self.close()  # earlier output stays in a file of its own
            self._file = None
        self._write(b"", now)
        return rest

    def log_due_lines(self, now: float) -> bytes:
        """Write the lines of progress bars that are due, and return them.

        Also try again to write after an error of the disk, if that is due.
        """
        lines = b"".join(self._put(folder.take_due_lines(now), now) for folder in self._folders)
        if self.trouble and now >= self._retry_at:
            self._write(b"", now)
        return lines

    def retry(self, now: float) -> None:
        """Write to the file now if an error of the disk kept lines from it.

        Do not wait for the time of the next try, which follows each error.
        """
        self._retry_at = now
        if self.trouble:
            self._write(b"", now)

    def finish(self, now: float) -> bytes:
        """Log the unfinished lines too, as the input ends; return them."""
        self.retry(now)
        lines = b""
        for index, folder in enumerate(self._folders):
            lines += self._put(folder.finish(self._unread[index]), now)
            self._unread[index] = b""
        return lines

    def close(self) -> None:
        """Close the file of the log, if one is open; the pipes stay open."""
        if self._file is not None:
            self._file.close()

    # ------------------------------------------------------------ the file

    def _put(self, lines: bytes, now: float) -> bytes:
        """Append lines to the file and to the tail in shared memory; return them.

        If the file cannot be written, count them as lost.
        """
        if lines:
            self.source.keep(lines)
            if not self._write(lines, now):
                count = lines.count(b"\n")
                self.dropped += count
                self.why_dropped = self.trouble
                self._lost_lines += count
                self._lost_nbytes += len(lines)
        return lines

    def _write(self, lines: bytes, now: float) -> bool:
        """Append a note about earlier losses, and the lines; return False on failure.

        Creates the file if it is missing. After a failure, do nothing until the next
        try is due.
        """
        if self.trouble and now < self._retry_at:
            return False
        missing = self._gap
        if self._lost_lines:
            what = f"{self._lost_lines} lines ({self._lost_nbytes} bytes) are missing here: {self.trouble}"
            missing += f"replicas: {what}\n".encode()
        if self._file is None:
            path = self._folder / f"{self.source.title or f'unknown-{self.source.pipes[0]}'}.log"
            self._file = RotatedFile(path, *self._limits)
        try:
            self._file.append(missing + lines)
        except OSError as error:
            self.trouble = error.strerror or str(error)
            self._retry_at = now + _RETRY_S
            self._file.close()
            return False
        self.trouble, self._gap = "", b""
        self._lost_lines = self._lost_nbytes = 0
        return True


class Pump:
    """The log pump's loop: reads the output of a part's processes into log files."""

    def __init__(self, logs: list[OutputLog], control: socket.socket, tee: int | None, replica: str) -> None:
        """Register the pipes and the socket with a selector.

        Read nothing before :meth:`run`.

        :param control: socket to the shim: ``drain``, answered with ``drained``, and
            ``dropped``.
        :param tee: descriptor of the terminal; None if lines are not shown there.
        :param replica: name of the replica, which lines on the terminal begin with.
        """
        self._logs = logs
        self._selector = selectors.EpollSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        self._shim = MessageSocket(control, "the shim", self._take, self._selector.unregister)
        self._open: dict[int, tuple[OutputLog, int]] = {}
        self._told = {"file": 0, "tee": 0}
        self._tell_at = self._leave_at = math.inf
        self._tee: Tee | None = None
        self._tee_waits = False
        if tee is not None:
            with contextlib.suppress(OSError):  # the terminal is already gone
                self._tee = Tee(tee, replica)
        for log in logs:
            for index, pipe in enumerate(log.source.pipes):
                self._open[pipe] = (log, index)
                self._selector.register(pipe, selectors.EVENT_READ, pipe)

    def run(self) -> None:
        """Read all pipes into their logs until no writer is left. Blocks.

        Also return 2 s after the shim's death. The logs are complete and closed then.
        """
        while self._open and time.monotonic() < self._leave_at:
            due = min(self._leave_at, self._tell_at, *(log.due for log in self._logs))
            events = self._selector.select(max(0.0, due - time.monotonic()) if due < math.inf else None)
            now = time.monotonic()
            if now >= self._tell_at:
                self._tell_at = math.inf
            for pipe in sorted(key.data for key, _ in events if type(key.data) is int):
                log, index = self._open[pipe]
                lines = log.read(index, now)
                if lines is not None:
                    self._show(log, lines)
                    continue
                self._selector.unregister(pipe)
                del self._open[pipe]
            for log in self._logs:
                if now >= log.due:
                    self._show(log, log.log_due_lines(now))
            self._tell_dropped(now)
            for key, _ in events:
                if key.data is None and not self._shim.read():  # the shim is dead; its processes will end too
                    self._leave_at = time.monotonic() + ALONE_S
                elif key.data is self._tee:
                    self._on_tee(lambda tee: tee.write())
        now = time.monotonic()
        for log in self._logs:
            self._show(log, log.finish(now))
            log.close()
        if self._tee is not None:
            self._on_tee(lambda tee: tee.finish(_SHOW_S))
        self._tell_dropped(now, at_once=True)

    def _take(self, message: Message) -> None:
        """Carry out the shim's order ``drain``: log all output up to now; answer it."""
        if message["type"] == "drain":
            self._drain()
            self._shim.send({"type": "drained", "number": message.get("number")})

    def _drain(self) -> None:
        """Read and log all output that is in the pipes now, and unfinished lines."""
        now = time.monotonic()
        for log in self._logs:
            log.retry(now)
        for pipe, (log, index) in list(self._open.items()):
            todo = waiting_nbytes(pipe)
            while todo > 0 and (lines := log.read(index, now)) is not None:
                self._show(log, lines)
                todo -= log.taken
        for log in self._logs:
            self._show(log, log.finish(now))
        self._tell_dropped(now, at_once=True)

    def _tell_dropped(self, now: float, *, at_once: bool = False) -> None:
        """Send the shim how many more lines were lost, by place and reason.

        At most once a second.

        :param at_once: now in any case, if there are such lines.
        """
        if now < self._tell_at < math.inf and not at_once:
            return
        counting: dict[str, Sequence[OutputLog | Tee]] = {"file": self._logs, "tee": [self._tee] if self._tee else []}
        for where, counters in counting.items():
            new = sum(one.dropped for one in counters) - self._told[where]
            if new > 0:
                self._told[where] += new
                self._tell_at = now + _TELL_INTERVAL_S
                reason = next((one.why_dropped for one in counters if one.why_dropped), "")
                self._shim.send({"type": "dropped", "loss": plain(LogLoss(new, where, reason))})

    def _show(self, log: OutputLog, lines: bytes) -> None:
        """Queue lines for the terminal, if they are of a rank and are shown there."""
        if lines and self._tee is not None and log.source.shown:
            self._on_tee(lambda tee: tee.show(lines, log.source.title.removeprefix("rank-")))

    def _on_tee(self, use: Callable[[Tee], None]) -> None:
        """Call ``use`` with the output to the terminal, if there is one.

        Forget a terminal that is gone; wake the loop for one that has unwritten lines.
        """
        tee = self._tee
        if tee is None:
            return
        try:
            use(tee)
        except OSError:  # e.g. a closed terminal, a pipe without a reader
            self._tee = None
        waits = self._tee is not None and tee.waiting
        if waits != self._tee_waits:
            self._tee_waits = waits
            if waits:
                self._selector.register(tee, selectors.EVENT_WRITE, tee)
            else:
                self._selector.unregister(tee)

"""How the processes of a node ended: crashes, a stopped torchrun, and the exit report.

:func:`exit_report` describes the end of the main process, and names the first process
that crashed before it (:class:`DeathWatch`). The shim is not the parent of these
processes, so it opens a pidfd for each process below it. When the pidfd becomes
readable, it asks the kernel how the process ended: ``/proc`` for a zombie,
``PIDFD_GET_INFO`` for a process that is already reaped (Linux 6.15; on older kernels,
the end of a process that its parent reaps immediately stays unknown).

A stopped torchrun does not notice that one of its ranks has ended
(:class:`StoppedWatch`). Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import math
import os
import re
import selectors
import signal
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from replicas.common.patience import Patience
from replicas.linux.processes import Child, has_zombie, is_below, is_stopped, signal_name, stat_fields
from replicas.supervisor.wire.orders import PartSpec
from replicas.supervisor.wire.part_state import ExitReport, RankExit

RECENT_S = 60.0
"""The report names crashes up to this time before the main process's end, in s."""
STOPPED_S = 5.0
"""How long torchrun may be stopped with a dead rank, in seconds."""
_LOOK_INTERVAL_S = 0.5
_LOOKS = 3
_CRASHES = frozenset(
    (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS)
)
"""Signals of a crash; the others are usual ways to end a process."""
_MAX_WATCHED = 256
_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO
_INFO_NBYTES, _EXIT_AT = 64, 60  # of struct pidfd_info, and of its exit_code
_INFO_EXIT = 1 << 3  # PIDFD_INFO_EXIT


class Death(NamedTuple):
    """A process that has ended.

    :ivar name: its name in ``/proc/PID/comm``.
    :ivar signum: the signal that killed it; 0 for none, or if it is unknown.
    """

    pid: int
    name: str
    signum: int
    at: float

    def __str__(self) -> str:
        """Return words: ``its process 12 (engine) was killed by SIGKILL``."""
        return f"its process {self.pid} ({self.name}) was killed by {signal_name(self.signum)}"


class _PidWatch:
    """Wakes a loop at the ends of processes that need not be children of this one."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        """Begin with no process watched.

        :param selector: the loop's, in which pidfds are registered.
        """
        self._selector = selector
        self._watched: dict[int, int] = {}
        """The pidfds, by pid."""

    def _watch(self, pid: int) -> bool:
        """Open a pidfd of the process, and register it with the loop's selector.

        Return False if that is impossible, for example because the process has ended.
        """
        try:
            pidfd = self._watched[pid] = os.pidfd_open(pid)
        except OSError:  # it has ended, is not visible from here, or there is no descriptor left
            return False
        self._selector.register(pidfd, selectors.EVENT_READ, functools.partial(self._on_end, pid))
        return True

    def _on_end(self, pid: int) -> None:
        """Note the end of a watched process, and close its pidfd."""
        pidfd = self._watched.pop(pid)
        self._selector.unregister(pidfd)
        self._note_end(pid, pidfd)
        os.close(pidfd)

    def _note_end(self, pid: int, pidfd: int) -> None:
        """Record what is to be known of an ended process. Does nothing in this class.

        :param pidfd: of the process, still open; the caller closes it.
        """


class DeathWatch(_PidWatch):
    """Records the ends of those processes in ``pids()`` that are below this one."""

    def __init__(self, selector: selectors.BaseSelector, pids: Callable[[], Iterable[int]]) -> None:
        """Begin with no process watched.

        :param selector: the loop's. :param pids: returns the processes that may be
            watched.
        """
        super().__init__(selector)
        self._pids = pids
        self._names: dict[int, str] = {}
        self._deaths: list[Death] = []

    def watch_new_processes(self) -> None:
        """Begin to watch those of ``pids()`` that are new and below this process.

        To be called again and again; at most 256 processes are watched.
        """
        for pid in self._pids():
            known = pid in self._names or len(self._watched) >= _MAX_WATCHED
            if not known and is_below(pid, os.getpid()) and self._watch(pid):  # skips sidecars
                self._names[pid] = _name_of(pid)

    def _note_end(self, pid: int, pidfd: int) -> None:
        """Record the death of a watched process, with the signal that killed it.

        :param pidfd: of the process, still open; the caller closes it.
        """
        self._deaths.append(Death(pid, self._names.pop(pid), _killed_by(pid, pidfd), time.monotonic()))
        del self._deaths[:-_MAX_WATCHED]

    def first(self, before: Iterable[int]) -> Death | None:
        """Return the first crash of the last 60 s, or None if there was none.

        A crash is an end by SIGKILL, SIGSEGV, SIGABRT or the like.

        :param before: pids. Only deaths before the first end of one of these count.
        """
        since, those = time.monotonic() - RECENT_S, frozenset(before)
        recent = itertools.takewhile(lambda one: one.pid not in those, (d for d in self._deaths if d.at >= since))
        return next((one for one in recent if one.signum in _CRASHES), None)


class EndWatch(_PidWatch):
    """Wakes a loop when processes end that are not children of this one.

    :ivar has_unwatched: True if some could not be watched; the caller polls them.
    """

    has_unwatched = False

    def watch_all(self, look: Callable[[], Iterable[int]]) -> bool:
        """Watch all processes that ``look`` finds. Return True if it finds none.

        Their ends wake the loop. A process that ends before it is watched would not: a
        second look finds that it is gone, or finds the processes that it started.

        :param look: returns the pids of the processes that are there now.
        """
        for _ in range(_LOOKS):
            there = frozenset(look())
            unseen = {pid for pid in there - self._watched.keys() if not self._watch(pid)}
            self.has_unwatched = bool(unseen)
            if not unseen:
                return not there
        return False


def _name_of(pid: int) -> str:
    """Return the name of a process, without characters that are odd in a message.

    Return "?" if it has ended.
    """
    try:
        name = Path(f"/proc/{pid}/comm").read_bytes().decode(errors="replace").strip()
    except OSError:
        return "?"  # it has ended
    return "".join(one if one.isalnum() or one in "._:/-" else "_" for one in name)


def _killed_by(pid: int, pidfd: int) -> int:
    """Return the number of the signal that killed an ended process.

    0 if no signal did, or if that cannot be known.

    :param pidfd: an open pidfd of the process.
    """
    with contextlib.suppress(OSError):
        fields = stat_fields(pid)
        if fields[0] == "Z":
            return int(fields[49]) & 0x7F  # exit_code
    info = bytearray(_INFO_NBYTES)
    struct.pack_into("Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:  # the kernel is too old
        return 0
    known = struct.unpack_from("Q", info, 0)[0] & _INFO_EXIT
    return int(struct.unpack_from("i", info, _EXIT_AT)[0]) & 0x7F if known else 0


class StoppedWatch:
    """Detects a torchrun that is stopped (SIGSTOP) while a child of it is dead."""

    def __init__(self, pid: int) -> None:
        """Watch torchrun's process ``pid``; look at nothing before :meth:`is_stuck`."""
        self._pid = pid
        self._blind = Patience(0.0, _LOOK_INTERVAL_S)
        self.has_dead_rank = False
        """A rank that is not its child, but the shim's, has ended."""
        self.due = math.inf
        """When :meth:`is_stuck` must be called; inf for never."""

    def is_stuck(self, now: float) -> bool:
        """Return True if torchrun was stopped with a dead child for over 5 s.

        :param now: monotonic time; sets when to call this again, :attr:`due`.
        """
        stopped = is_stopped(self._pid)
        self.due = now + _LOOK_INTERVAL_S if stopped else math.inf
        return self._blind.measure_duration(now, stopped and (self.has_dead_rank or has_zombie(self._pid))) > STOPPED_S


def exit_report(
    spec: PartSpec,
    main: Child,
    told: ExitReport | None,
    last_lines: Callable[[str], tuple[str, ...]],
    *,
    stopping: bool,
    first_death: Callable[[Iterable[int]], object] = lambda before: None,
) -> ExitReport:
    """Return the exit report of a part whose main process has ended.

    :param main: the main process, with its exit code: torchrun or the user's program.
    :param told: the launcher's own report, if there is one.
    :param last_lines: returns the last lines of the log ``torchrun``, or ``rank 0``.
    :param stopping: True if its end was ordered.
    :param first_death: returns the first crash before the end of the given processes,
        or an empty value.
    """
    code = main.code
    assert code is not None
    if told is None and spec.launcher == "exec":
        ranks: tuple[RankExit, ...] = (RankExit(rank=0, code=code, pid=main.pid, at=time.time()),) if code else ()
        told = ExitReport("ok" if not code else "stopped" if stopping else "failed", ranks=ranks)
    if told is None and stopping:
        return ExitReport("stopped")
    if told is None:
        ended = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        words = _last(last_lines("torchrun")) if code > 0 else ""
        return ExitReport("lost", text=f"torchrun of node {spec.node} {ended}{': ' if words else ''}{words}")
    if told.outcome == "stopped" and not stopping:
        return ExitReport("lost", text=f"torchrun on node {spec.node} was stopped by a signal from outside")
    ranks = _with_last_words(told.ranks, last_lines)
    if ranks and ranks[0].code >= 0:  # a signal is a cause by itself
        after = first_death({main.pid, *(rank.pid for rank in ranks)}) or ""
        ranks = (ranks[0]._replace(after=str(after)), *ranks[1:])
    return told._replace(ranks=ranks)


def _with_last_words(ranks: tuple[RankExit, ...], last_lines: Callable[[str], tuple[str, ...]]) -> tuple[RankExit, ...]:
    """Return the ranks with a text each, and the last log lines for the first one.

    A text that is missing is the exception or last line in the rank's log. Only the
    first rank keeps its error, unless the lines contain it.

    :param last_lines: returns the last lines of the log ``rank <RANK>``.
    """
    result = []
    for number, rank in enumerate(ranks):
        lines = last_lines(f"rank {rank.rank}")
        # The line that Python's faulthandler prints before the stacks.
        fatal = next((line for line in reversed(lines) if line.startswith("Fatal Python error: ")), "")
        told = bool(rank.error) and _last(rank.error.splitlines()) in lines
        result.append(
            rank._replace(
                # 1: Python's code after an uncaught exception
                text=rank.text or fatal or (_exception(lines) if rank.code == 1 else "") or _last(lines),
                error="" if told or number else rank.error,
                lines=() if number else lines,
            )
        )
    return tuple(result)


_FRAME = re.compile(r'(?P<before>.*)  File "[^"]*", line \d+(?:, in .*)?')
_WARNING = re.compile(r".*:\d+: \w*Warning: .*")


def _exception(lines: tuple[str, ...]) -> str:
    """Return the line of the exception after the last traceback, or "".

    It is the first unindented line after the traceback's last frame. Lines may begin
    with the name of a process (``(EngineCore pid=7)``), and other processes may have
    written lines in between.
    """
    frames = [(at, found) for at, line in enumerate(lines) if (found := _FRAME.fullmatch(line))]
    if not frames:
        return ""
    at, frame = frames[-1]
    behind = (line.removeprefix(frame["before"]) for line in lines[at + 1 :] if line.startswith(frame["before"]))
    return next((line.strip() for line in behind if line and not line[0].isspace()), "")


def _last(lines: tuple[str, ...] | list[str]) -> str:
    """Return the last line that is not a Python warning (those come at exit).

    Return the last line of all if there are only warnings, or "".
    """
    words = [
        line.strip()
        for before, line in itertools.pairwise(("", *lines))
        if line.strip() and not _WARNING.fullmatch(line) and not (_WARNING.fullmatch(before) and line[0].isspace())
    ]
    return words[-1] if words else next((line.strip() for line in reversed(lines) if line.strip()), "")

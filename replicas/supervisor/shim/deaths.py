"""Deaths not reported to the shim: of a rank's child, or below a stopped torchrun.

A process that crashed before the main process ended died first, and is named in the
exit report (:class:`DeathWatch`). The shim is not the parent of these processes, so it
opens a pidfd for each process that it sees below it; when the pidfd becomes readable,
it asks the kernel how the process ended: from ``/proc`` for a zombie, by
``PIDFD_GET_INFO`` for one that was already waited for (Linux 6.15; on older kernels, an
end that the parent noticed at once stays unknown).

A stopped torchrun does not see that one of its ranks has ended
(:class:`StoppedWatch`). Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import selectors
import signal
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from replicas.linux.processes import has_zombie, is_stopped, parents, signal_name, stat_fields

__all__ = ["STOPPED_S", "Death", "DeathWatch", "StoppedWatch"]

RECENT_S = 60.0
"""How long before the main process a process may have died to be named, in seconds."""
STOPPED_S = 5.0
"""How long torchrun may be stopped with a dead rank, in seconds."""
_LOOK_INTERVAL_S = 0.5
_CRASHES = frozenset(
    (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS)
)
"""Signals of a crash; the others are usual ways to end a process."""
_MAX_WATCHED = 256
_GET_INFO = 0xC040FF0B
_INFO_NBYTES, _EXIT_AT = 64, 60
_INFO_EXIT = 1 << 3


class Death(NamedTuple):
    """A process that has ended.

    :ivar name: its name in ``/proc/PID/comm``.
    :ivar signum: the signal that killed it; 0: none, or unknown.
    """

    pid: int
    name: str
    signum: int
    at: float

    def __str__(self) -> str:
        return f"its process {self.pid} ({self.name}) was killed by {signal_name(self.signum)}"


class DeathWatch:
    """Watches the processes ``pids`` of a replica for crashes.

    :param helpers: returns the shim's own, which are ignored with their children.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        pids: Callable[[], Iterable[int]],
        helpers: Callable[[], frozenset[int]],
        now: Callable[[], float],
    ) -> None:
        self._selector = selector
        self._pids = pids
        self._helpers = helpers
        self._now = now
        self._watched: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._deaths: list[Death] = []

    def look(self) -> None:
        """Watch the new processes."""
        helpers = self._helpers()
        for pid in self._pids():
            known = pid in self._names or len(self._watched) >= _MAX_WATCHED
            if not known and helpers.isdisjoint((pid, *parents(pid)[:1])):
                self._watch(pid)

    def _watch(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
            self._names[pid] = _name(pid)
        except OSError:
            return  # it has ended
        self._watched[pid] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(pid))

    def _ended(self, pid: int) -> None:
        pidfd = self._watched.pop(pid)
        self._selector.unregister(pidfd)
        signum = _killed_by(pid, pidfd)
        os.close(pidfd)
        self._deaths.append(Death(pid, self._names.pop(pid), signum, self._now()))
        del self._deaths[:-_MAX_WATCHED]

    def first(self, *, before: Iterable[int]) -> Death | None:
        """The first recent crash before the end of any process in ``before``."""
        since, those = self._now() - RECENT_S, frozenset(before)
        recent = itertools.takewhile(lambda one: one.pid not in those, (d for d in self._deaths if d.at >= since))
        return next((one for one in recent if one.signum in _CRASHES), None)


def _name(pid: int) -> str:
    text = Path(f"/proc/{pid}/comm").read_bytes().decode(errors="replace").strip()
    return "".join(one if one.isalnum() or one in "._:/-" else "_" for one in text)


def _killed_by(pid: int, pidfd: int) -> int:
    """Signal that killed an ended process; 0: none, or unknown."""
    with contextlib.suppress(OSError):
        fields = stat_fields(pid)
        if fields[0] == "Z":
            return int(fields[49]) & 0x7F
    info = bytearray(_INFO_NBYTES)
    struct.pack_into("Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:  # the kernel does not tell
        return 0
    known = struct.unpack_from("Q", info, 0)[0] & _INFO_EXIT
    return int(struct.unpack_from("i", info, _EXIT_AT)[0]) & 0x7F if known else 0


class StoppedWatch:
    """Watches a process: is it stopped (SIGCHLD tells) with a dead child (polled)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._blind_since: float | None = None
        self._look_at: float | None = None

    @property
    def wakes(self) -> list[float]:
        """When :meth:`blind` must be called."""
        return [] if self._look_at is None else [self._look_at]

    def blind(self, now: float) -> bool:
        """True if it has been stopped, with a dead child, for :data:`STOPPED_S`."""
        stopped = is_stopped(self._pid)
        self._look_at = now + _LOOK_INTERVAL_S if stopped else None
        if not stopped or not has_zombie(self._pid):
            self._blind_since = None
            return False
        self._blind_since = now if self._blind_since is None else self._blind_since
        return now - self._blind_since > STOPPED_S

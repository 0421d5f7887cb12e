"""SIGKILL the processes of dead shims until none is left. Standard library only.

A shim ends its own tree. If the shim was killed, its agent sweeps its processes; if
both were, the next agent or supervisor does. All of them use :class:`Sweep`, with
finders of their own. Processes of a shim are found in three ways: by its control group,
by the mark in their environment, and by pid and start time as the shim last reported
them. Only the last way finds a process that was dying before the sweep began.

Two kinds of helpers outlive the other processes for a moment, as they clean up after
them:

* a log pump, which ends on its own when it has read the output of the others;
* Python's resource trackers, which unlink the named shared memory and semaphores of a
  dead program. They have ``TRACKERS_S`` after the last of the others, and
  ``TRACKERS_MAX_S`` in all (:class:`TrackerGrace`, which the shim uses, too).

A process may take long to die of SIGKILL (a driver that frees GPU memory, a file server
that does not answer, a freezer): :meth:`Sweep.run` returns it, to be called again. A
process is signalled through a pidfd, and only while it has the start time with which it
was found.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from replicas.linux import cgroups
from replicas.linux.processes import is_marked, is_resource_tracker, marked, signal_each, start_time
from replicas.supervisor.logs.pump import ALONE_S, is_pump

TRACKERS_S = 0.5
"""How long Python's resource trackers outlive the last of the other processes."""
TRACKERS_MAX_S = 5.0
"""Their longest life after the first SIGKILL, even if other processes fork."""
UNSEEN = 0
"""Stands for a process of unknown pid: its control group is not empty."""
_PUMP_ENDS_S = 0.5
_QUIET_LOOKS = 2
_INTERVAL_S = 0.02

Finder = Callable[[], Mapping[int, int]]
"""Returns living processes: pid, and start time in clock ticks from boot, of each."""


class TrackerGrace:
    """Decides how long a kill of many processes spares Python's resource trackers.

    These unlink the named shared memory of the dead.
    """

    def __init__(self) -> None:
        """Begin without a time limit; the first call of :meth:`spared` sets it."""
        self._until = 0.0
        self._last: float | None = None

    def spared(self, there: Iterable[int], now: float) -> frozenset[int]:
        """Return those of the processes ``there`` to spare: Python's resource trackers.

        They are spared until :data:`TRACKERS_S` after the last other process, and at
        most :data:`TRACKERS_MAX_S` after the first call.

        :param there: all processes to be killed.
        :param now: monotonic time.
        """
        there = frozenset(there)
        trackers = frozenset(pid for pid in there if is_resource_tracker(pid))
        first, self._last = self._last is None, self._last or now + TRACKERS_MAX_S
        if first or there != trackers:  # the others may have died just before the first look
            self._until = min(now + TRACKERS_S, self._last)
        return trackers if now < self._until else frozenset()


class Sweep:
    """Kills the processes of dead shims, over one or more calls of :meth:`run`.

    A process that was found once is killed until it is gone: the kernel frees the
    memory of a dying process, and the environment with it, before it closes the devices
    and notifies the parent.

    :param finders: each returns the processes to be killed that it finds now.
    :param groups: control groups whose processes are all to be killed.
    :param known: pids and start times that the shims last reported.
    """

    def __init__(self, *finders: Finder, groups: Iterable[Path] = (), known: Mapping[int, int] | None = None) -> None:
        """Keep the arguments; kill nothing before :meth:`run` or :meth:`kill_once`.

        :param finders: each returns the processes to be killed that it finds now.
        :param groups: control groups whose processes are all to be killed.
        :param known: start times by pid of processes that the shims last reported.
        """
        self._finders = finders
        self._groups = list(groups)
        self._known = dict(known or {})
        self._pumps_until = time.monotonic() + ALONE_S + _PUMP_ENDS_S
        self._grace = TrackerGrace()

    def run(self, timeout_s: float) -> list[int]:
        """SIGKILL until two looks in a row find no process, or for ``timeout_s``.

        Blocks. May be called again to continue.

        :return: the pids of the processes that are left; :data:`UNSEEN` (0) among them
            stands for some that this user cannot see.
        """
        deadline = time.monotonic() + timeout_s
        quiet = 0
        while True:
            left = self.kill_once()
            quiet = 0 if left else quiet + 1
            if quiet >= _QUIET_LOOKS or (left and time.monotonic() > deadline):
                return sorted(left)
            time.sleep(_INTERVAL_S)  # no SIGCHLD: they are not our children

    def kill_once(self) -> set[int]:
        """SIGKILL all processes found now but the spared ones; return all pids found.

        Those of other users are neither killed nor returned. The set has UNSEEN if
        there are processes that this user cannot see. Spared are log pumps and resource
        trackers, for a moment. Control groups that are empty are removed.
        """
        now = time.monotonic()
        for find in self._finders:
            self._known.update(find())
        known = self._known = {pid: start for pid, start in self._known.items() if start_time(pid) == start}
        inside = {group: cgroups.members(group) for group in self._groups}
        grouped = {pid for pids in inside.values() for pid in pids}
        there = {*known, *grouped}
        spared = self._grace.spared(there, now)
        if now < self._pumps_until:
            spared |= {pid for pid in there if is_pump(pid)}
        for group, pids in inside.items():
            kill_group(group, pids, spared)
        ours = signal_each(known.keys() - spared, signal.SIGKILL, lambda pid: start_time(pid) == known[pid])
        self._groups = [group for group in self._groups if not _remove_if_empty(group)]
        return {*ours, *grouped, *spared} or ({UNSEEN} if self._groups else set())


def finder(look: Callable[[], Iterable[int]], is_one: Callable[[int], bool]) -> Finder:
    """Return a function that finds processes, with their start times.

    :param look: returns pids of candidates.
    :param is_one: returns True if a pid is one of the processes to be found. Called
        after the start time is read, as the pid can be reused meanwhile.
    """

    def find() -> dict[int, int]:
        """Return the start times of the processes that are alive now, by pid."""
        starts = {pid: start_time(pid) for pid in look()}
        return {pid: start for pid, start in starts.items() if start is not None and is_one(pid)}

    return find


def by_mark(nonces: Iterable[str]) -> Finder:
    """Return a function that finds the processes of shims, by their marks.

    :param nonces: the marks, which processes inherit in their environment.
    """
    some = frozenset(nonces)
    return finder(lambda: marked(some), lambda pid: is_marked(pid, some))


def kill_group(group: Path, pids: Iterable[int], spared: frozenset[int]) -> None:
    """SIGKILL the processes ``pids`` of a control group, except the spared ones.

    If none of them is spared, kill all processes of the group.

    :param group: folder of the control group.
    """
    if spared.isdisjoint(pids):
        cgroups.kill(group)  # by the kernel, as a whole: no fork escapes
        return
    signal_each(set(pids) - spared, signal.SIGKILL, lambda pid: pid in cgroups.members(group))


def _remove_if_empty(group: Path) -> bool:
    """Remove the control group if no process is in it.

    Return False if this sweep must kill more there. Return True if it is gone, or
    cannot be removed for another reason.
    """
    try:
        return cgroups.remove(group)
    except OSError:
        return True

"""SIGKILL for what was started under shims that are dead, until nothing of it is left.
Standard library only.

Theory of operation
===================

A shim ends its own tree. When it was killed, the supervisor sweeps what it leaves; when
both were, the janitor does. What belongs to a shim is found in three ways: by its
control group, by the mark in the environment, and by pid and start time as the shim
last told them. The last one alone finds a process that is dying: the kernel takes its
memory, and the environment with it, before its devices are closed and its parent is
told.

Two kinds of helpers outlive the others for a moment, as they clean up behind them:

* a log pump, which ends by itself when it has read what the others wrote;
* Python's resource trackers, which unlink the named shared memory and semaphores of a
  program when it is dead. They have ``TRACKERS_S`` after the last of the others, and
  ``TRACKERS_MAX_S`` in all (:class:`Grace`, of the shim, too).

A process may take long to die of SIGKILL (a driver that frees GPU memory, a file server
that does not answer, a freezer). :meth:`Sweep.run` then names it, and is to be called
again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from replicas.linux import cgroups
from replicas.linux.processes import is_resource_tracker, marked, signal_each, signal_marked, start_time
from replicas.supervisor.logs.pump import ALONE_S, is_pump

__all__ = ["TRACKERS_MAX_S", "TRACKERS_S", "UNSEEN", "Grace", "Sweep", "kill_group", "until_quiet"]

TRACKERS_S = 0.5
"""How long Python's resource trackers outlive the last of the others."""
TRACKERS_MAX_S = 5.0
"""How long they may live at most from the first SIGKILL on: who forks faster than it is
killed does not get more."""
UNSEEN = 0
"""Stands for a process of which no pid is known: its control group is not empty."""
_PUMP_ENDS_S = 0.5
_QUIET_LOOKS = 2
_INTERVAL_S = 0.02


class Grace:
    """Which processes are spared, as they are Python's resource trackers."""

    def __init__(self) -> None:
        self._until = 0.0
        self._last: float | None = None

    def spared(self, there: Iterable[int], now: float) -> frozenset[int]:
        """Those of ``there``, all that is to be killed now, that are to live for a
        moment."""
        there = frozenset(there)
        trackers = frozenset(pid for pid in there if is_resource_tracker(pid))
        first, self._last = self._last is None, self._last or now + TRACKERS_MAX_S
        if first or there != trackers:  # the others may have died just before the first look
            self._until = min(now + TRACKERS_S, self._last)
        return trackers if now < self._until else frozenset()


class Sweep:
    """One sweep, which may take several :meth:`run`.

    :param nonces: marks of the dead shims.
    :param groups: control groups in which they started everything.
    :param known: start times of processes below them, by pid, as the shims last told
        them.
    """

    def __init__(
        self, nonces: Iterable[str], *, groups: Iterable[Path] = (), known: Mapping[int, int] | None = None
    ) -> None:
        self._nonces = frozenset(nonces)
        self._groups = list(groups)
        self._known = dict(known or {})
        self._pumps_until = time.monotonic() + ALONE_S + _PUMP_ENDS_S
        self._grace = Grace()

    def run(self, timeout_s: float) -> list[int]:
        """Kill them until none is seen any more. Blocks.

        :return: those that are still there after ``timeout_s``: pids, or
            :data:`UNSEEN`.
        """
        return sorted(until_quiet(lambda: self._once(time.monotonic()), timeout_s))

    def _once(self, now: float) -> set[int]:
        """One look, and SIGKILL for all that is seen. Returns what is there, but for
        what has become another user's."""
        known = self._known = {pid: start for pid, start in self._known.items() if start_time(pid) == start}
        inside = {group: cgroups.members(group) for group in self._groups}
        grouped = {pid for pids in inside.values() for pid in pids}
        there = {*marked(self._nonces), *known, *grouped}
        spared = self._grace.spared(there, now)
        if now < self._pumps_until:
            spared |= {pid for pid in there if is_pump(pid)}
        for group, pids in inside.items():
            kill_group(group, pids, spared)
        ours = signal_marked(self._nonces, signal.SIGKILL, but=spared)
        ours += signal_each(known.keys() - spared, signal.SIGKILL, lambda pid: start_time(pid) == known[pid])
        self._groups = [group for group in self._groups if not _removed(group)]
        return {*ours, *grouped, *spared} or ({UNSEEN} if self._groups else set())


def until_quiet(look: Callable[[], set[int]], timeout_s: float) -> set[int]:
    """Have ``look`` kill what it sees, until it has seen nothing twice in a row.
    Blocks.

    :param look: one look; returns the pids of what was there.
    :return: what was still there after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    quiet = 0
    while True:
        left = look()
        quiet = 0 if left else quiet + 1
        if quiet >= _QUIET_LOOKS or (left and time.monotonic() > deadline):
            return left
        time.sleep(_INTERVAL_S)  # they are not our children: nothing tells of their end


def kill_group(group: Path, pids: Iterable[int], spared: frozenset[int]) -> None:
    """SIGKILL for a control group with ``pids`` in it; but for ``spared``: nobody
    outruns it unless some of it is."""
    if spared.isdisjoint(pids):
        cgroups.kill(group)
        return
    signal_each(set(pids) - spared, signal.SIGKILL, lambda pid: pid in cgroups.members(group))


def _removed(group: Path) -> bool:
    """Whether the group is gone; also when it cannot be removed although nobody is in
    it (another user's is in it)."""
    try:
        return cgroups.remove(group)
    except OSError:
        return True

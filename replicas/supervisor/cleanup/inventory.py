"""Inventory of a node's processes, and whether they use GPUs.

The shim takes it (:class:`InventoryTimer`) soon after the start, once a minute, and
before it ends its processes, and reports it to the supervisor, because a killed rank
cannot be examined. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replicas.linux.processes import descriptors, start_time
from replicas.supervisor.wire.part_state import Inventory

_FIRST_S = 5.0
_INTERVAL_S = 60.0
_MAX_PROCESSES = 512


def take_inventory(pids: Iterable[int]) -> Inventory:
    """Return pid and start time of each living process, and whether any uses a GPU.

    :param pids: the processes to look at. The result has the first 512 that live.
    """
    gpu = False
    processes: list[tuple[int, int]] = []
    for pid in pids:
        start = start_time(pid)
        if start is None:
            continue
        processes.append((pid, start))
        gpu = gpu or any(one.startswith("/dev/nvidia") and one[11:].isdigit() for one in descriptors(pid))
    return Inventory(gpu, tuple(processes)[:_MAX_PROCESSES])


class InventoryTimer:
    """Takes the inventory (start times, GPU use) of processes ``pids()`` when due.

    :param tell: called with each one that has changed.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], now: float, tell: Callable[[Inventory], None]) -> None:
        """Schedule the first inventory soon after ``now``; take none yet.

        :param pids: returns the processes to look at.
        :param now: time of the caller's steady clock, as in all methods.
        :param tell: called, by the method that takes it, with each inventory that
            differs from the previous one.
        """
        self._pids, self._tell = pids, tell
        self.due = now + _FIRST_S
        """When :meth:`on_time` must be called."""
        self._last = Inventory()

    def on_time(self, now: float) -> None:
        """Take the inventory (pids, GPU use) if due; pass a changed one to ``tell``."""
        if now >= self.due:
            self._note(take_inventory(self._pids()), now)

    def take_final(self, now: float) -> None:
        """Take the inventory (pids, GPU use) now, and add the previous one's pids.

        For the moment before the processes are ended. Call ``tell`` if it has changed.
        """
        found, old = take_inventory(self._pids()), self._last
        processes = dict.fromkeys((*found.processes, *old.processes))
        self._note(Inventory(old.gpu or found.gpu, tuple(processes)[:_MAX_PROCESSES]), now)

    def _note(self, found: Inventory, now: float) -> None:
        """Keep the inventory ``found``, and set when the next is due after ``now``.

        Call ``tell`` if it differs from the previous one.
        """
        self.due = now + _INTERVAL_S
        if found != self._last:
            self._last = found
            self._tell(found)

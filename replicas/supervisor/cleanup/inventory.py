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
    """Return the inventory of these processes; skip those that have ended."""
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
    """Takes the inventory of the processes ``pids()`` when it is due."""

    def __init__(self, pids: Callable[[], Iterable[int]], now: float) -> None:
        self._pids = pids
        self._look_at = now + _FIRST_S
        self._last = Inventory()

    @property
    def wakes(self) -> list[float]:
        return [self._look_at]

    def on_time(self, now: float) -> Inventory | None:
        return self._note(take_inventory(self._pids()), now) if now >= self._look_at else None

    def take_final(self, now: float) -> Inventory | None:
        """Return the inventory joined with the previous one, or None if unchanged."""
        found, old = take_inventory(self._pids()), self._last
        processes = dict.fromkeys((*found.processes, *old.processes))
        return self._note(Inventory(old.gpu or found.gpu, tuple(processes)[:_MAX_PROCESSES]), now)

    def _note(self, found: Inventory, now: float) -> Inventory | None:
        self._look_at = now + _INTERVAL_S
        changed, self._last = found != self._last, found
        return found if changed else None

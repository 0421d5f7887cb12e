"""When a run has recovered from a fault, and what it waited for (invariant I4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set

from tests.chaos.syncs.rig import GUEST, SyncWorld

__all__ = ["Recovery"]


class Recovery:
    """A version whose publish began at ``since`` or later is committed, and served by
    everyone; all peers have met; who had to start again did so; and the run is ready.

    :param restarts: how often each replica must have been started again by now;
        ``maybe``: or once more.
    """

    def __init__(self, world: SyncWorld, since: float, restarts: Mapping[str, int], maybe: Set[str]) -> None:
        self._world = world
        self._since = since
        self._guest = world.guest.pid
        self._restarts = restarts
        self._maybe = maybe
        self.took: dict[str, float] = {}
        """Seconds until each of these was so, in the order in which that was seen."""

    def seen(self) -> bool:
        """Look again."""
        steps: dict[str, Callable[[], bool]] = {
            "committed": self._committed,
            "served": self._served,
            "met": self._met,
            "restarted": self._restarted,
            "ready": lambda: "restarted" in self.took and self._world.page("readyz")[0] == 200,
        }
        for name, step in steps.items():
            if name not in self.took and step():
                self.took[name] = time.monotonic() - self._since
        # What is ready at one moment need not be so when the rest has come.
        return len(self.took) == len(steps) and self._restarted() and self._world.page("readyz")[0] == 200

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.took.items())

    def _committed(self) -> bool:
        lines = self._world.log("trainer-0.0")[-50:]
        return any(line.get("ended", 0) > self._since * 1e6 and "version" in line for line in lines)

    def _served(self) -> bool:
        return all(
            any(
                line.get("stamp", 0) > self._since * 1e6 and (line["pid"] == self._guest or not name.startswith(GUEST))
                for line in lines[-9:]
                if "version" in line
            )
            for name, lines in self._world.targets().items()
        )

    def _met(self) -> bool:
        peers = sorted(self._world.shape.peers)
        lines = self._world.log(f"{peers[0]}.0.outer")[-50:]
        return any(line["at"] > self._since and sorted(line.get("members", ())) == peers for line in lines)

    def _restarted(self) -> bool:
        return all(
            self._restarts[name] <= one.restarts <= self._restarts[name] + (name in self._maybe)
            for name, one in self._world.replicas().items()
        )

"""How busy this machine is: by what factor a process that computes is held up.

Bars of tests that measure real processes are meant for a machine that has time for
them. On one that has not, they are moved by what was measured meanwhile
(:meth:`Load.bar_s`).
"""

from __future__ import annotations

import math
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["Load"]

WORK_S = 0.01
EVERY_S = 0.25


class Load:
    """Measures in a thread for the time of a ``with`` block, with 4 % of a core."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        """When each piece of work ended, and how many times longer it took than it
        should."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def bar_s(self, seconds: float, since: float = 0.0) -> float:
        """So many on a machine that has time. Some part of what takes them is waiting,
        which load does not draw out."""
        return seconds * math.sqrt(self.factor(since))

    def factor(self, since: float = 0.0) -> float:
        """The mean since then (of ``time.monotonic``), at least 1."""
        found = [factor for at, factor in self._samples if at >= since]
        return max(1.0, sum(found) / len(found)) if found else 1.0

    def _measure(self) -> None:
        while not self._over.wait(EVERY_S):
            began, used = time.monotonic(), time.thread_time()
            while time.thread_time() - used < WORK_S:
                pass
            now = time.monotonic()
            self._samples.append((now, (now - began) / WORK_S))

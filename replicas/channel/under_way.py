"""Copies of this process's publishes that a device still has under way, for those who wait for them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

from replicas.weights.accelerator import accelerator
from replicas.weights.packing import DeviceCopies

__all__ = ["CopiesUnderWay"]


class CopiesUnderWay:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: list[DeviceCopies] = []

    def add(self, copies: DeviceCopies) -> None:
        with self._lock:
            self._copies = [*self._copies, copies]
        copies.copied.add_done_callback(lambda _: self._ended(copies))

    def fence(self, stream: object = None) -> None:
        """What is enqueued from now on, on ``stream`` (by default the current one of this thread), waits for all of them."""
        with self._lock:
            copies = self._copies
        gpu = accelerator() if copies else None
        if gpu is not None:
            with gpu.on_stream(stream):
                for one in copies:
                    one.fence()

    def wait(self, timeout_s: float) -> bool:
        """Wait on this thread until all have ended, well or not; False: one of them hangs."""
        until = time.monotonic() + timeout_s
        with self._lock:
            copies = self._copies
        return not wait([one.copied for one in copies], max(0.0, until - time.monotonic())).not_done

    def _ended(self, copies: DeviceCopies) -> None:
        with self._lock:
            self._copies = [one for one in self._copies if one is not copies]

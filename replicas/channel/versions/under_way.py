"""Device copies of this process's publishes that are still under way."""

from __future__ import annotations

import time

from replicas.weights.devices.accelerator import accelerator
from replicas.weights.devices.device_copies import DeviceCopies

__all__ = ["CopiesUnderWay"]


class CopiesUnderWay:
    """Thread-safe, without a lock that an interrupt could leave taken."""

    def __init__(self) -> None:
        self._copies: dict[int, DeviceCopies] = {}

    def add(self, copies: DeviceCopies) -> None:
        self._copies[id(copies)] = copies

    def watch(self, copies: DeviceCopies) -> None:
        """Session thread: forget the copies when they have ended."""
        copies.ended.add(lambda: self._copies.pop(id(copies), None))

    def fence(self, stream: object = None) -> None:
        """Make ``stream`` (default: this thread's current one) wait for all copies."""
        copies = list(self._copies.values())
        gpu = accelerator() if copies else None
        if gpu is not None:
            with gpu.on_stream(stream):
                for one in copies:
                    one.fence()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended, well or not; False: one of them hangs."""
        until = time.monotonic() + timeout_s
        return all(one.ended.wait(until - time.monotonic()) for one in list(self._copies.values()))

"""Copies of this process's publishes that a device still has under way, for those who
wait for them."""

from __future__ import annotations

import time

from replicas.weights.devices.accelerator import accelerator
from replicas.weights.devices.device_copies import DeviceCopies

__all__ = ["CopiesUnderWay"]


class CopiesUnderWay:
    """Thread-safe, without a lock that an interrupt could keep."""

    def __init__(self) -> None:
        self._copies: dict[int, DeviceCopies] = {}

    def add(self, copies: DeviceCopies) -> None:
        self._copies[id(copies)] = copies

    def watch(self, copies: DeviceCopies) -> None:
        """Session thread: forget them when they have ended."""
        copies.ended.add(lambda: self._copies.pop(id(copies), None))

    def fence(self, stream: object = None) -> None:
        """What is enqueued from now on, on ``stream`` (by default the current one of
        this thread), waits for all of them."""
        copies = list(self._copies.values())
        gpu = accelerator() if copies else None
        if gpu is not None:
            with gpu.on_stream(stream):
                for one in copies:
                    one.fence()

    def wait(self, timeout_s: float) -> bool:
        """Wait on this thread until all have ended, well or not; False: one of them
        hangs."""
        until = time.monotonic() + timeout_s
        return all(one.ended.wait(until - time.monotonic()) for one in list(self._copies.values()))

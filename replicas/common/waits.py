"""Locks and waits for threads that may be interrupted at any line.

Theory of operation
===================

Python runs the handlers of signals on the main thread, between any two steps of it.
What a handler raises (Ctrl-C's KeyboardInterrupt, a trainer's own SystemExit) goes
through our code from wherever that is. Hence three rules for code that runs on the
user's threads:

1. *Nothing is owned there.* Slots, jobs and sessions belong to the session thread,
   which no handler ever runs on. A user's thread hands functions over (one step: they
   are queued or not) and waits; what it was given comes back when it says so, when it
   fails, or when nothing of it is left that could say anything
   (:mod:`replicas.channel.versions.leases`).
2. *No lock can be lost.* ``with lock:`` holds that for a lock that is written in C, if
   the interrupt comes where one can; a tracer's exception may come at the line of the
   ``with`` once more, when the block is left, and then the lock stays taken.
   :func:`locked` has no such line. ``Condition``, ``Event`` and
   ``concurrent.futures.Future`` are not used there: their ``__enter__`` is Python, and
   an interrupt between the lock and the block keeps the lock for ever.
3. *A wait leaves nothing behind.* Who waits on a :class:`Latch` sleeps on a lock of its
   own. Nor does it handle exceptions as it goes: one that a tracer raises at the line
   of an ``except`` leaves the handled one, and all frames that this refers to, with the
   thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

__all__ = ["Latch", "locked"]

P = ParamSpec("P")
T = TypeVar("T")


def locked(lock: AbstractContextManager[object], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``function(*args)`` with ``lock`` held, which is released whatever interrupts
    it."""
    # One line: the end of the block has none of its own, at which a tracer could raise
    # before the lock is released.
    with lock: return function(*args, **kwargs)  # fmt: skip  # noqa: E701


class Latch:
    """Set once, from any thread; any number of threads may wait for it, and functions
    be called at it. Nothing blocks."""

    def __init__(self) -> None:
        self.is_set = False
        self._wakers: dict[Callable[[], object], bool] = {}

    def set(self) -> None:
        """Wake all who wait, and call all functions, each once."""
        self.is_set = True
        self._wake()

    def add(self, waker: Callable[[], object]) -> None:
        """Call ``waker`` once when it is set, on whatever thread does that; at once
        when it is."""
        self._wakers[waker] = True
        if self.is_set:  # set() may have looked before it was there
            self._wake()

    def remove(self, waker: Callable[[], object]) -> None:
        """Do not call it any more."""
        self._wakers.pop(waker, None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; False: it was not within ``timeout_s``. None: for
        ever."""
        if self.is_set:
            return True
        asleep = threading.Lock()
        asleep.acquire()
        wake = asleep.release
        self.add(wake)
        try:
            limit = -1.0 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
            return asleep.acquire(timeout=limit) or self.is_set
        finally:
            self.remove(wake)

    def _wake(self) -> None:
        for waker in list(self._wakers):
            if self._wakers.pop(waker, False):  # no other thread has
                waker()

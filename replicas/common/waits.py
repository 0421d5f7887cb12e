"""Locks and waits that stay correct when an exception interrupts a thread anywhere.

Python runs signal handlers on the main thread, between any two of its steps. What a
handler raises (Ctrl-C's KeyboardInterrupt, a trainer's own SystemExit) propagates from
wherever our code is. Hence three rules for code that runs on the user's threads:

1. *User threads own nothing.* Slots, jobs and sessions belong to the session thread, on
   which no handler runs. A user's thread queues functions (one step: they are queued or
   not) and waits. Its slots are returned when it says so, when it fails, or when its
   last reference to them is gone (:mod:`replicas.channel.session.held_versions`).
2. *No lock can be lost.* ``with lock:`` guarantees this for a lock that is written in C
   and for signal handlers. A tracer's exception may also come at the line of the
   ``with`` when the block is left, and the lock then stays locked; :func:`locked` has
   no such line. ``Condition``, ``Event`` and ``concurrent.futures.Future`` are not used
   there: their ``__enter__`` is Python, and an interrupt between the lock and the block
   keeps the lock for ever.
3. *A wait leaves no state.* A thread that waits on a :class:`Latch` sleeps on a lock of
   its own. A wait handles no exceptions either: if a tracer raises at the line of an
   ``except``, the thread keeps the handled exception and all frames that it refers to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def locked(lock: AbstractContextManager[object], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)``, called with ``lock`` held.

    Block until the lock is free. It is released after the call, and after every
    exception, also one of a signal handler or a tracer.
    """
    # One line: the end of a block on a line of its own is where a tracer could raise
    # before the lock is released.
    with lock: return function(*args, **kwargs)  # fmt: skip  # noqa: E701


class Latch:
    """A flag that is set once, from any thread. Setting it never blocks.

    Threads can wait for it; callbacks can be added to it.
    """

    def __init__(self) -> None:
        """Begin with the flag unset and without callbacks."""
        self.is_set = False
        self._wakers: dict[Callable[[], object], bool] = {}

    def set(self) -> None:
        """Set the flag; wake all waiting threads and call all callbacks, each once.

        If a callback raises, the others are called before this raises.
        """
        self.is_set = True
        self.wake()

    def wake(self) -> None:
        """Wake all threads that wait now, and call all callbacks, each once.

        The flag is not set. A waiting thread's :meth:`wait` then returns True, and the
        callbacks are forgotten. A callback's exception is raised after the others were
        called.
        """
        failure: BaseException | None = None
        while self._wakers:
            try:
                self._wake()
            except BaseException as error:  # noqa: BLE001  # raised below
                failure = error
        if failure is not None:
            raise failure

    def add(self, waker: Callable[[], object]) -> None:
        """Have ``waker()`` called once, by the thread that sets or wakes the latch.

        If the flag is set already, it is called here, before this returns. It must not
        block.
        """
        self._wakers[waker] = True
        if self.is_set:  # set() may have run before it was added
            self._wake()

    def remove(self, waker: Callable[[], object]) -> None:
        """Forget ``waker``, a callback of :meth:`add`, so that it is not called.

        Does nothing if it is unknown or was called; does not wait for a call that
        another thread makes now.
        """
        self._wakers.pop(waker, None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until the flag is set, for ``timeout_s`` at most.

        Without ``timeout_s`` there is no limit. Return True if the flag is set, or
        after :meth:`wake`, which does not set it; False after that time.
        """
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
        """Call each callback once, also those that wake waiting threads, and forget it.

        If one raises, this raises, and those not called yet stay.
        """
        for waker in list(self._wakers):
            if self._wakers.pop(waker, False):  # no other thread has called it
                waker()

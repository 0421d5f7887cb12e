"""A thread pool for one copy or hash job, and the number of threads worth starting.

Theory of operation
===================

The caller's thread and the helper threads of a :class:`CopyPool` take tasks from one
queue until it is empty, so no thread waits for a slow one. A pool lives as long as one
job: a thread costs 0.1 ms to start, and idle threads would disturb forks.

Each thread runs torch single-threaded, under :func:`one_thread`. Otherwise OpenMP
divides each copy of more than 32,768 elements among all cores and ends it with a
barrier. While another task uses one core (a digest, a load in another process), each
barrier waits for the preempted thread (measured: 2.5 times slower).
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from replicas.common.waits import Latch, locked

ALONE_NBYTES = 8 << 20
"""The caller's thread copies less than this alone: a helper would not pay."""
MOST_HELPERS = 7  # more threads only wait for memory
OWNER_LOOKED_AT_S = 1.0
"""Interval at which an idle helper checks that its owner still exists."""
PATIENCE = 100
"""Interrupts that :meth:`CopyPool.close` defers while helpers end their tasks."""

_set_omp_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: run torch single-threaded on this thread, in the block.

    Sets OpenMP's number for this thread, as ``torch.set_num_threads`` would change the
    user's threads, too. Has no effect if torch uses another OpenMP library than the one
    found here, or none.
    """
    before = torch.get_num_threads()  # for a new thread, torch sets its number in this call
    if _set_omp_threads is None or before == 1:
        yield
        return
    try:
        _set_omp_threads(1)
        yield
    finally:
        _set_omp_threads(before)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def helpers_for(nbytes: int, sharing: int = 1) -> int:
    """Return how many threads beside the caller's are worth starting for a copy.

    :param nbytes: bytes to copy.
    :param sharing: processes of this host that copy at the same time.
    """
    return max(0, min(cores() // max(1, sharing) - 1, MOST_HELPERS, nbytes // ALONE_NBYTES))


class CopyPool:
    """Runs tasks on the caller's thread and up to ``helpers`` more; close it after use.

    :ivar lock: guards the queue and the state that ``chores`` reads; notify ``changed``
        when that state has changed.
    """

    def __init__(
        self,
        helpers: int,
        chores: Callable[[], Callable[[], None] | None] = lambda: None,
        *,
        owner: object | None = None,
    ) -> None:
        """Start ``helpers`` threads, which wait for tasks.

        :param chores: called with ``lock`` held; returns work that a helper prefers to
            a task, or None.
        :param owner: held by a weak reference; helpers end when it is gone, in case an
            interrupt kept the caller from closing the pool.
        """
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.helpers = 0
        self._chores = chores
        self._owner = None if owner is None else weakref.ref(owner)
        self._queue: deque[Callable[[], None]] = deque()
        self._under_way = 0
        self._waiters: list[Latch] = []
        self._closed = False
        self._error: BaseException | None = None
        self.grow(helpers)

    def grow(self, helpers: int) -> None:
        """Start up to ``helpers`` more threads; fewer if the system allows no more."""
        for _ in range(helpers):
            name = f"replicas-crew-{locked(self.lock, self._count, 1)}"
            try:
                threading.Thread(target=self._help, name=name, daemon=True).start()
            except RuntimeError:  # a limit of processes is reached
                locked(self.lock, self._count, -1)
                return

    def _count(self, more: int) -> int:
        """Add ``more`` (or -1) to the number of helpers; return the sum.

        Needs the lock.
        """
        self.helpers += more
        return self.helpers

    def run(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Run all tasks, on this thread and the helpers, and wait for their ends.

        The first error of a task is raised; tasks that have not begun are then dropped.
        """
        self._queue.extend(tasks)
        locked(self.lock, self.changed.notify_all)
        try:
            with one_thread():
                while (task := self._next()) is not None:
                    task()
        finally:
            self._wait_idle()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Drop tasks that have not begun, wait for running ones, and end the helpers.

        An interrupt that comes meanwhile is raised at the end.
        """
        interrupt: BaseException | None = None
        for _ in range(PATIENCE):
            try:
                self._closed = True
                self._wait_idle()
                break
            except BaseException as error:  # noqa: BLE001  # raised once the helpers have ended, in milliseconds
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _wait_idle(self) -> None:
        """Drop tasks that have not begun, if any, and wait for running ones."""
        self._queue.clear()
        idle = Latch()
        locked(self.lock, self._add_waiter, idle)
        idle.wait()

    def _add_waiter(self, idle: Latch) -> None:
        """Have ``idle`` set once no task waits or runs. Needs the lock."""
        self._waiters.append(idle)
        self.changed.notify_all()
        self._release_waiters()

    def _release_waiters(self) -> None:
        """Wake waiting callers if no task is left or runs. Needs the lock."""
        if not self._under_way and not self._queue:
            waiters, self._waiters = self._waiters, []
            for latch in waiters:
                latch.set()

    def _next(self) -> Callable[[], None] | None:
        """Remove the next task from the queue and return it, or None if it is empty."""
        with suppress(IndexError):
            return self._queue.popleft()
        return None

    # ------------------------------------------------------------ helpers

    def _help(self) -> None:
        """Run chores (what ``chores`` returns), or tasks where there are none.

        A helper thread's function. It ends when the pool is closed, or its owner is
        gone.
        """
        with one_thread():
            while True:
                with self.lock:
                    chore = self._chores()
                    task = self._next() if chore is None else None
                    if chore is None and task is None:
                        if self._closed or (self._owner is not None and self._owner() is None):
                            return
                        self.changed.wait(OWNER_LOOKED_AT_S)
                        continue
                    self._under_way += task is not None
                if chore is not None:
                    chore()
                elif task is not None:
                    self._do(task)

    def _do(self, task: Callable[[], None]) -> None:
        """Run a task on this helper thread; keep its error for :meth:`run` to raise.

        After an error, tasks that have not begun are dropped.
        """
        error: BaseException | None = None
        try:
            task()
        except BaseException as raised:  # noqa: BLE001  # run() raises it on the caller's thread
            error = raised
        with self.lock:
            self._under_way -= 1
            if error is not None:
                self._error = self._error or error
                self._queue.clear()
            self._release_waiters()


def run_all(tasks: Iterable[Callable[[], None]], helpers: int, *, owner: object | None = None) -> None:
    """Run all tasks of one job on this thread and others; return when they are done.

    The first error of a task is raised.

    :param helpers: threads beside this one. :param owner: as for :class:`CopyPool`.
    """
    pool = CopyPool(helpers, owner=owner)
    try:
        pool.run(tasks)
    finally:
        pool.close()

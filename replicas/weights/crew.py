"""A few threads that do one job together with the caller's, and how many of them pay.

Theory of operation
===================

A :class:`Crew` lives as long as one job: a thread costs 0.1 ms to start, nothing is left behind, and a fork meets none of
them. The caller's thread and the helpers take tasks from one queue until it is empty, so that nobody waits for a slow one.

torch's own threads would be in the way. Each copy of more than 32,768 elements is divided among all cores by OpenMP, ends
with a barrier, and its threads spin for a while afterwards: with one core taken by anything else (a digest, another process
that loads) every barrier waits for the thread that was put off (measured: 2.5 times slower). Hence each thread of a crew
works alone, under :func:`one_thread`, which sets OpenMP's number of threads *for this thread only*;
``torch.set_num_threads`` would change it for the user, too.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["ALONE_NBYTES", "Crew", "cores", "helpers_for", "one_thread"]

ALONE_NBYTES = 8 << 20
"""Less than this is done by the caller's thread alone: a helper would cost as much as it saves."""
MOST_HELPERS = 7

_set_omp_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block torch works alone on this thread; other threads, and later ones, keep their number.

    OpenMP keeps the number for each thread, and torch asks OpenMP. Where that is not so (a torch without it, or with another
    OpenMP than the one found), the block changes nothing.
    """
    before = torch.get_num_threads()  # torch sets up the number of a new thread with this call
    if _set_omp_threads is None or before == 1:
        yield
        return
    _set_omp_threads(1)
    try:
        yield
    finally:
        _set_omp_threads(before)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def helpers_for(nbytes: int, sharing: int = 1) -> int:
    """How many threads should help the caller's to copy ``nbytes``.

    :param sharing: how many processes of this machine are known to do such work at the same time.
    """
    return max(0, min(cores() // max(1, sharing) - 1, MOST_HELPERS, nbytes // ALONE_NBYTES))


class Crew:
    """The caller's thread and ``helpers`` more. Close it in the end; helpers end when nothing is left to do.

    :param chores: asked, with ``changed`` held, for something that a helper does rather than a task; None: nothing now.
    :ivar changed: its lock guards the queue and whatever ``chores`` looks at; notify it when that changed.
    """

    def __init__(self, helpers: int, chores: Callable[[], Callable[[], None] | None] = lambda: None) -> None:
        self.changed = threading.Condition()
        self.helpers = 0
        self._chores = chores
        self._queue: deque[Callable[[], None]] = deque()
        self._under_way = 0
        self._closed = False
        self._error: BaseException | None = None
        self.grow(helpers)

    def grow(self, helpers: int) -> None:
        """Take so many more helpers."""
        for _ in range(helpers):
            with self.changed:
                self.helpers += 1
                name = f"replicas-crew-{self.helpers}"
            threading.Thread(target=self._help, name=name, daemon=True).start()

    def run(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Do all tasks; returns when the last has ended. Raises what one of them raised; the others are left out then."""
        with self.changed:
            self._queue.extend(tasks)
            self.changed.notify_all()
        try:
            with one_thread():
                while (task := self._take()) is not None:
                    self._do(task)
        finally:
            self._rest()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """No more tasks. Those under way have ended on return; a chore may still go on."""
        with self.changed:
            self._closed = True
        self._rest()

    def _rest(self) -> None:
        """Forget tasks that nobody has begun (there are some only after a failure) and wait for the others."""
        with self.changed:
            self._queue.clear()
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._under_way)

    def _take(self) -> Callable[[], None] | None:
        with self.changed:
            if not self._queue:
                return None
            self._under_way += 1
            return self._queue.popleft()

    def _do(self, task: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            task()
        except BaseException as raised:  # noqa: BLE001  # run() raises it on the caller's thread
            error = raised
        with self.changed:
            self._under_way -= 1
            if error is not None:
                self._error = self._error or error
                self._queue.clear()
            if not self._under_way and not self._queue:
                self.changed.notify_all()

    def _help(self) -> None:
        with one_thread():
            while True:
                with self.changed:
                    chore = self._chores()
                    task = self._take() if chore is None else None
                    if chore is None and task is None:
                        if self._closed:
                            return
                        self.changed.wait()
                        continue
                if chore is not None:
                    chore()
                elif task is not None:
                    self._do(task)

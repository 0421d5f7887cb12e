"""Work that must not block its caller: a bounded queue, and a thread that drains it.

For calls that may block for ever or raise any exception: writing to a stopped terminal,
a log handler of the user's program. When the queue is full, items are dropped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from replicas.common.waits import Latch, locked

T = TypeVar("T")


class BackgroundQueue(Generic[T]):
    """Calls ``work(item)`` for each item, in order, on a daemon thread of its own."""

    def __init__(
        self, name: str, work: Callable[[T], object], missing: Callable[[int], object], most: int = 1000
    ) -> None:
        """Keep the arguments; start no thread yet.

        :param name: name of the thread, which the first item starts.
        :param work: must not raise.
        :param missing: called on the thread, before the first item after a full queue,
            with the number of items that were dropped; must not raise.
        :param most: number of items that may wait; :meth:`put` drops further ones.
        """
        self._name, self._work, self._missing, self._most = name, work, missing, most
        self._queue: queue.SimpleQueue[tuple[T, int] | Latch] = queue.SimpleQueue()  # a finaliser may interrupt its put
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        self._dropped = 0

    def put(self, item: T) -> None:
        """Queue an item, or drop it if ``most`` items wait; never wait.

        For any thread, and for finalisers. Starts the thread if it does not run yet.
        """
        if self._queue.qsize() >= self._most:
            self._dropped += 1
            return
        dropped = self._dropped
        self._queue.put((item, dropped))
        self._dropped -= dropped
        locked(self._starting, self._start)

    def flush(self, timeout_s: float) -> bool:
        """Block until the thread has handled all items that are queued now.

        If items wait and the thread does not run, start it.

        Return True if no item is left of them; False after ``timeout_s`` seconds, or if
        no thread can start.
        """
        if self._thread is None and self._queue.empty():
            return True
        done = Latch()
        self._queue.put(done)
        locked(self._starting, self._start)
        return self._thread is not None and done.wait(timeout_s)

    def _start(self) -> None:
        """Start the thread unless it runs.

        Raise nothing if the system allows no thread: the items stay queued, and the
        next :meth:`put` or :meth:`flush` tries again.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with contextlib.suppress(
                RuntimeError
            ):  # a limit of threads, or the process ends: the next item tries again
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        """Call ``work`` for each item, for ever.

        The function of the queue's own thread.

        If items were dropped before an item, call ``missing`` with their number first.
        """
        while True:
            found = self._queue.get()
            if isinstance(found, Latch):
                found.set()
                continue
            if found[1]:
                self._missing(found[1])
            self._work(found[0])
            del found  # free the item now: the next may come much later

"""The session thread: one daemon thread in each process, whose asyncio loop carries all channels.

Theory of operation
===================

The user's threads never touch a socket. They hand functions to this loop (:meth:`SessionLoop.call`) and wait, if at all,
on a :class:`~replicas.channel.pending.Pending`. Everything that belongs to the loop is changed on its thread only.

**Fork.** A forked child (a DataLoader worker) inherits the descriptors but not the thread. A session that such a child
kept open would hide the death of the rank. In the child each registered descriptor is therefore replaced by ``/dev/null``:
the connection is given up, while the number stays taken, so that no object that still believes in it can close somebody
else's file. The epoll instance is treated alike: the child's would be the parent's own. The objects themselves are kept
alive in the child, without use, so that no finaliser runs on them.

**Exit.** At interpreter exit the channels that are still open say good-bye, then the loop ends. Functions run by
``atexit`` do so before daemon threads are frozen.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from replicas import errors
from replicas.sidecar.client import Forkserver

__all__ = ["Inherited", "SessionLoop", "session_loop"]

T = TypeVar("T")
logger = logging.getLogger("replicas.channel")

EXIT_TIMEOUT_S = 3.0


class Inherited(Protocol):
    """Something with descriptors of its own."""

    def close_in_child(self) -> None: ...


class SessionLoop:
    """See the module's header. Made by :func:`session_loop` only."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._fds: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forkservers: dict[str, asyncio.Task[Forkserver]] = {}
        self.inherited: set[Inherited] = set()
        """Connections that a forked child must let go of."""
        self.closers: list[Callable[[], None]] = []
        """Called at exit, on the main thread, newest first: the open channels."""
        selector = selectors.DefaultSelector()
        if isinstance(selector, selectors.EpollSelector):
            self.register_fd(selector.fileno())
        self.loop = asyncio.SelectorEventLoop(selector)
        self._thread = threading.Thread(target=self._run, name="replicas-session", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` on the loop soon, in the order of the calls. From any thread; never blocks."""
        self.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run ``coroutine`` on the loop and wait for it, on another thread.

        :raises TimeoutError: it did not end in time; it is cancelled.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise errors.InternalError("the session thread cannot wait for itself")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise
        except BaseException:
            future.cancel()
            raise

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task on the loop's thread. It must handle its own errors: one that does not is logged as a bug."""
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %s failed; please report this", task.get_name(), exc_info=error)

    def register_fd(self, fd: int) -> None:
        """Forked children must not keep ``fd`` open."""
        self._fds.add(fd)

    def unregister_fd(self, fd: int) -> None:
        self._fds.discard(fd)

    async def forkserver(self, name: str | None) -> Forkserver:
        """The forkserver of the shim called ``name``, or this process's own helper; shared, and made when first asked for.

        On the loop's thread. One that has died is replaced by a new one.

        :raises OSError, RuntimeError: it cannot be had.
        """
        key = name or ""
        task = self._forkservers.get(key)
        if task is not None and task.done():
            old = None if task.cancelled() or task.exception() is not None else task.result()
            if old is None or not old.alive:
                task = None
                del self._forkservers[key]
                if old is not None:
                    self.inherited.discard(old)
                    self.spawn(old.aclose(), "forkserver ends")
        if task is None:
            task = self.loop.create_task(self._make_forkserver(name), name=f"forkserver {key or 'helper'}")
            self._forkservers[key] = task
        return await asyncio.shield(task)

    async def _make_forkserver(self, name: str | None) -> Forkserver:
        forkserver = await (Forkserver.connect(name) if name else Forkserver.spawn())
        self.inherited.add(forkserver)
        return forkserver

    def close(self) -> None:
        """Close every channel, the forkservers and the loop. Main thread, at exit."""
        for closer in reversed(list(self.closers)):
            closer()
        try:
            self.run(self._finish(), EXIT_TIMEOUT_S)
        except TimeoutError:
            logger.warning("the session thread did not end in %s s", EXIT_TIMEOUT_S)
        self.call(self.loop.stop)
        self._thread.join(EXIT_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()

    async def _finish(self) -> None:
        for task in self._forkservers.values():
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                await task.result().aclose()
        self._forkservers.clear()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self.loop.shutdown_default_executor()

    def abandon(self) -> None:
        """This is a forked child: let go of every connection of the parent's."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in self._fds:
            os.dup2(null, fd, inheritable=False)
        os.close(null)
        for connection in self.inherited:
            connection.close_in_child()


_lock = threading.Lock()
_current: SessionLoop | None = None
_abandoned: list[SessionLoop] = []


def session_loop() -> SessionLoop:
    """The session loop of this process, started when first asked for."""
    global _current
    with _lock:
        if _current is None:
            _current = SessionLoop()
        return _current


def _after_fork_in_child() -> None:
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.abandon()
        _abandoned.append(_current)
        _current = None


def _at_exit() -> None:
    global _current
    with _lock:
        found, _current = _current, None
    if found is not None and found.pid == os.getpid():
        found.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)

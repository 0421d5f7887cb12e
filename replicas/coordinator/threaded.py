"""Run a coordinator on an event loop in its own thread, for programs that block."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from replicas import errors
from replicas.common.logs import Log
from replicas.common.waits import Latch

T = TypeVar("T", bound=AbstractAsyncContextManager[object])

log = Log("replicas.coordinator")

START_TIMEOUT_S = 120.0
"""Longest time to open the ports and start the store, which has a limit of its own."""
CLOSE_TIMEOUT_S = 30.0


class LoopThread(Generic[T]):
    """Holds ``what``, an async context manager, open on an event loop in a new thread.

    That lasts until :meth:`close`, or the end of the process. As a context manager it
    returns ``what``. The program need not keep a reference. If the loop ends before,
    that is logged immediately, and raised by :meth:`close`.
    """

    def __init__(self, what: T) -> None:
        """Keep ``what``, an async context manager; :meth:`start` starts the thread."""
        self._what = what
        self._pid = os.getpid()
        self._opened, self._over = Latch(), Latch()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._closing: tuple[BaseException | None] | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="replicas-coordinator", daemon=True)

    def __enter__(self) -> T:
        """Start the thread; return ``what`` once it is entered on the thread's loop.

        Blocks, and raises, as :meth:`start` does.
        """
        self.start()
        return self._what

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Leave ``what`` with this error and end the thread, as :meth:`close` does."""
        self.close(error)

    def start(self) -> None:
        """Start the thread with its event loop; wait until ``what`` is entered there.

        :raises errors.WorldError: that took more than 120 s. An error of entering it is
            raised, too.
        """
        atexit.register(self.close)
        try:
            self._thread.start()
            if not self._opened.wait(START_TIMEOUT_S):
                raise errors.WorldError(f"the coordinator has not started within {START_TIMEOUT_S:g} s; see its log")
            if self._over.is_set and self._error is not None:
                raise self._error
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Leave ``what`` on its loop, end the thread, and wait for that, 30 s at most.

        Does nothing when closed, or in a forked child. If an interrupt ends the wait, a
        second call waits again, as does the end of the process.

        :param error: passed to the exit of ``what``; with it, no other error is raised.
        :raises errors.InternalError: the thread does not end in time. An error that has
            ended its loop is raised, too.
        """
        if self._pid != os.getpid() or self._closed:  # a forked child has no such thread
            return
        self._closing = self._closing or (error,)  # a tuple, as error may be None
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
        over = self._thread.ident is None or self._over.wait(CLOSE_TIMEOUT_S)
        if self._over.is_set:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._closed = True  # not before: an interrupt may come at any line
        atexit.unregister(self.close)
        if not over and error is None:
            raise errors.InternalError(f"the coordinator has not ended within {CLOSE_TIMEOUT_S:g} s")
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        """Run the event loop to its end; the thread's function.

        Keep the error that ends it for :meth:`start` or :meth:`close`, and wake both.
        """
        try:
            asyncio.run(self._live())
        except BaseException as error:  # raised by start() or close()
            self._error = error
            if self._opened.is_set:
                text = f"the coordinator's event loop has ended: {type(error).__name__}: {error}"
                self._error = error if isinstance(error, Exception) else errors.InternalError(text)
                log.critical("%s", text, exc_info=error)
        finally:
            self._over.set()  # first: start() reads it when opened is set
            self._opened.set()

    async def _live(self) -> None:
        """Enter ``what``, hold it open until :meth:`close` is called, and leave it.

        Runs on the thread's event loop.
        """
        self._stop = asyncio.Event()
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_exception)  # asyncio's own logger has handlers of the program
        if self._closing is not None:
            return
        await self._what.__aenter__()
        self._opened.set()
        try:
            await self._stop.wait()
        finally:
            error = None if self._closing is None else self._closing[0]
            await self._what.__aexit__(None if error is None else type(error), error, None)


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of a callback or task; the exception handler of the thread's loop.

    :param context: asyncio's description of the error.
    """
    log.error("%s", context.get("message"), exc_info=context.get("exception"))

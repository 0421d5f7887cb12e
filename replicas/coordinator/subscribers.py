"""Functions of the program that are called with each event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from replicas.common.logs import Log
from replicas.core.base.effects import Event

log = Log("replicas.coordinator")


def _end_program(error: BaseException) -> None:
    """Raise ``error``, which ends the event loop that calls this function."""
    raise error


class Subscribers:
    """The functions that are called with each event, in the order of their adding."""

    def __init__(self) -> None:
        """Begin without functions."""
        self._callbacks: list[Callable[[Event], None]] = []
        self._ends = False
        """True if a function has ended the program."""

    def add(self, callback: Callable[[Event], None]) -> None:
        """Have ``callback`` called with each later event, after those added before."""
        self._callbacks.append(callback)

    def emit(self, event: Event) -> None:
        """Call each subscriber with the event, here and now; log what it raises.

        A KeyboardInterrupt or SystemExit of one, on the main thread, ends the program's
        event loop afterwards, once.
        """
        for callback in self._callbacks:
            try:
                callback(event)
            except BaseException as error:  # of the program: the caller's work must be completed
                log.exception("going on after a subscriber of the events failed on %r", event)
                ends = isinstance(error, (KeyboardInterrupt, SystemExit)) and not self._ends
                if ends and threading.current_thread() is threading.main_thread():
                    self._ends = True  # once: the program cleans up after it on this loop
                    asyncio.get_running_loop().call_soon(_end_program, error)

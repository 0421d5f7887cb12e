"""Subscribers: functions of the program that hear of each event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from replicas.common.logs import Log
from replicas.core.base.effects import Event

log = Log("replicas.coordinator")


def _end_program(error: BaseException) -> None:
    """Raise from the event loop, which is the program's, what is to end the program."""
    raise error


class Subscribers:
    """The functions that are called with each event, in the order of their coming."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Event], None]] = []
        self._ends = False
        """True if one of them has ended the program."""

    def add(self, callback: Callable[[Event], None]) -> None:
        self._callbacks.append(callback)

    def emit(self, event: Event) -> None:
        """Call each with the event; what one raises is logged, and harms no other."""
        for callback in self._callbacks:
            try:
                callback(event)
            except BaseException as error:  # of the program: what is under way here must come to its end
                log.exception("a subscriber failed on %r", event)
                ends = isinstance(error, (KeyboardInterrupt, SystemExit)) and not self._ends
                if ends and threading.current_thread() is threading.main_thread():
                    self._ends = True  # once: the program cleans up after it on this loop
                    asyncio.get_running_loop().call_soon(_end_program, error)

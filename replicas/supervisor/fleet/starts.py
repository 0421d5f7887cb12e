"""A few starts at a time: however many replicas are to start, the supervisor goes on
answering, and the machine too.

Starting a process keeps the event loop for some milliseconds, and what was started
keeps a core for more. A turn is over when the program of the replica runs, when it did
not come so far, or after ``TURN_S``: a start that hangs holds up no other.
"""

from __future__ import annotations

import asyncio
import os

__all__ = ["TURN_S", "Starts", "Turn"]

TURN_S = 2.0
_FOR_EACH_CORE = 2


class Turn:
    """One replica's turn, which lasts until :meth:`over`, but no longer than
    ``TURN_S``."""

    def __init__(self, starts: asyncio.Semaphore) -> None:
        self._starts: asyncio.Semaphore | None = starts
        self._end = asyncio.get_running_loop().call_later(TURN_S, self.over)

    def over(self) -> None:
        """Let the next one begin; again, it does nothing."""
        self._end.cancel()
        if self._starts is not None:
            self._starts.release()
            self._starts = None


class Starts:
    """Who may start now.

    :param at_once: so many. Default: two for each core.
    """

    def __init__(self, at_once: int = 0) -> None:
        self._free = asyncio.Semaphore(at_once or _FOR_EACH_CORE * len(os.sched_getaffinity(0)))

    async def turn(self) -> Turn:
        """Wait for one's turn: first come, first served."""
        await self._free.acquire()
        return Turn(self._free)

"""Limit concurrent starts of replicas: supervisor and machine stay responsive.

Starting a process keeps the event loop for some milliseconds, and the new process keeps
a core for more. A turn is over when the replica's program runs, when the start has
failed, or after ``TURN_S``: a start that hangs holds up no other.
"""

from __future__ import annotations

import asyncio
import os

__all__ = ["TURN_S", "Starts", "Turn"]

TURN_S = 2.0
_FOR_EACH_CORE = 2


class Turn:
    """One replica's turn, which lasts until :meth:`over`, or ``TURN_S`` at most."""

    def __init__(self, starts: asyncio.Semaphore) -> None:
        self._starts: asyncio.Semaphore | None = starts
        self._end = asyncio.get_running_loop().call_later(TURN_S, self.over)

    def over(self) -> None:
        """Let the next turn begin; a second call does nothing."""
        self._end.cancel()
        if self._starts is not None:
            self._starts.release()
            self._starts = None


class Starts:
    """Grants turns to start.

    :param at_once: number of concurrent turns. Default: two for each core.
    """

    def __init__(self, at_once: int = 0) -> None:
        self._free = asyncio.Semaphore(at_once or _FOR_EACH_CORE * len(os.sched_getaffinity(0)))

    async def turn(self) -> Turn:
        """Wait for a turn: first come, first served."""
        await self._free.acquire()
        return Turn(self._free)

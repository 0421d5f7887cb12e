"""Virtual time for asyncio: the loop's clock jumps to the next timer as soon as nothing
is left to do.

Only for code that waits on timers, events and futures of the loop. What waits for a
thread or a process waits in real time, and the clock stands still meanwhile.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["VirtualLoop", "history", "virtually"]

T = TypeVar("T")

_REAL_S = 10.0
_HISTORY_S = 5000.0


class _Selector(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None:
            self.loop.clock_s += timeout
            return []
        found = super().select(_REAL_S)
        if not found:
            raise RuntimeError("nothing will ever happen any more")
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock begins at 1,000 s."""

    def __init__(self) -> None:
        self.clock_s = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.clock_s


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def history(story: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs in virtual time, and comes to an end."""

    def test() -> None:
        virtually(asyncio.wait_for(story(), _HISTORY_S))

    test.__doc__ = story.__doc__
    return test

"""Tasks and events of asyncio: bounded waits, and references that keep tasks alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


async def is_set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for the event up to ``timeout_s``, or for ever; return True if it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


async def cancelled(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancel tasks, wait for their ends, and return their results or errors."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def telling(say: Callable[[str], None], text: str, after_s: float = 2.0) -> Iterator[None]:
    """Call ``say`` with ``text``, once, if the block takes longer than ``after_s``."""
    timer = asyncio.get_running_loop().call_later(after_s, say, text)
    try:
        yield
    finally:
        timer.cancel()


def kept(task: asyncio.Task[T], tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Keep a task in ``tasks`` until it ends: the loop has only a weak reference."""
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task

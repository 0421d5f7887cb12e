"""Tasks and events of asyncio: bounded waits, and references that keep tasks alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


async def is_set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for the event up to ``timeout_s`` (None: for ever).

    Return True if it is set. The end of that time returns False; it does not raise.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


async def cancelled(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancel tasks and wait for their ends.

    Return their results or exceptions, in order.
    """
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def say_if_slow(say: Callable[[str], None], text: str, after_s: float = 2.0) -> Iterator[None]:
    """Call ``say`` with ``text``, once, if the block takes longer than ``after_s``."""
    timer = asyncio.get_running_loop().call_later(after_s, say, text)
    try:
        yield
    finally:
        timer.cancel()


def keep_until_done(task: asyncio.Task[T], tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Keep a task in ``tasks`` until it ends; return the task.

    The loop has only a weak reference to it.
    """
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def result_of(task: asyncio.Task[T] | None) -> T | None:
    """Return the result of a task that has succeeded; None before, or if it failed."""
    if task is None or not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()

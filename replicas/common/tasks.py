"""Tasks and events of asyncio: bounded waits, and references that keep tasks alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


async def is_set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until the event is set, for ``timeout_s`` at most (None: without limit).

    Return True if it is set. Return False after that time; raise no TimeoutError.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


async def cancelled(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancel these tasks, and wait without a limit until all have ended.

    Return their results or exceptions (CancelledError, too) in order, and raise none.
    """
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def say_if_slow(say: Callable[[str], None], text: str, after_s: float = 2.0) -> Iterator[None]:
    """Context manager: call ``say(text)`` if the block takes longer than ``after_s``.

    It is called once, by a timer of the running event loop, so the block must await.
    """
    timer = asyncio.get_running_loop().call_later(after_s, say, text)
    try:
        yield
    finally:
        timer.cancel()


def keep_until_done(task: asyncio.Task[T], tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Put a task into ``tasks`` until it ends, as the loop refers to it only weakly.

    Its end removes it there, whatever the result. Return the same task.
    """
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def result_of(task: asyncio.Task[T] | None) -> T | None:
    """Return the result of a task, or None if it has none.

    None also stands for a task that is missing, still runs, failed or was cancelled.
    """
    if task is None or not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()

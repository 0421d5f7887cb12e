"""Run work in a thread, so that a cancellation waits for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


async def finish_in_thread(
    work: Callable[[], T], *, given_up: Callable[[], None] = lambda: None, undo: Callable[[], None] = lambda: None
) -> T:
    """Run ``work`` in a thread, wait for its end, and return its result.

    A cancelled caller still waits until the thread has ended, as the thread must not
    run while the caller cleans up; then CancelledError is raised, and an error of
    ``work`` is dropped. Both callbacks run on the event loop.

    :param given_up: called first on a cancellation, to make ``work`` end early.
    :param undo: called after a cancellation if ``work`` succeeded nevertheless.
    """
    task = asyncio.ensure_future(anyio.to_thread.run_sync(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        given_up()
        with anyio.CancelScope(shield=True):
            await asyncio.wait((task,))
        if task.exception() is None:
            undo()
        raise

"""Refuse calls that would block the event loop on which a coordinator runs.

Such a call waits for an answer that only this loop could give: until its deadline, and
all members of that coordinator wait too.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from replicas import errors

_coordinators: WeakKeyDictionary[asyncio.AbstractEventLoop, set[int]] = WeakKeyDictionary()


def begin(coordinator: object) -> None:
    """Register that ``coordinator`` runs on this thread's loop from now on."""
    _coordinators.setdefault(asyncio.get_running_loop(), set()).add(id(coordinator))


def end(coordinator: object) -> None:
    loop = asyncio.get_running_loop()
    known = _coordinators.get(loop, set())
    known.discard(id(coordinator))
    if not known:
        _coordinators.pop(loop, None)


def require(what: str) -> None:
    """UsageError: no asyncio loop runs ``what``, but, for instance, trio does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        text, hint = f"{what} needs an asyncio event loop", "run it with asyncio.run(), in a thread if need be"
        raise errors.UsageError(text, hint=hint) from None


def must_not_block(what: str, *, awaitable: bool = False) -> None:
    """UsageError: a coordinator runs on this thread's event loop, which would block.

    :param awaitable: whether what would block can be awaited in place of it.
    """
    if not _coordinators:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if loop in _coordinators:
        raise errors.UsageError(
            f"{what} would block the event loop on which the coordinator runs, which it waits for",
            hint=("await it, or " if awaitable else "")
            + "call it in a worker thread: `await asyncio.to_thread(...)`; or run the coordinator by in_thread()",
        )

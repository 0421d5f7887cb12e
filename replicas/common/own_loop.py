"""Refuse calls that would block the event loop on which a coordinator runs.

Such a call waits for an answer that only this loop could give. It would block until its
deadline, and with it all members of that coordinator.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from replicas import errors

_coordinators: WeakKeyDictionary[asyncio.AbstractEventLoop, set[int]] = WeakKeyDictionary()


def register(coordinator: object) -> None:
    """Record that ``coordinator`` runs on this thread's event loop from now on.

    Then :func:`has_coordinator` is true on that loop, and blocking calls are refused
    there.
    """
    _coordinators.setdefault(asyncio.get_running_loop(), set()).add(id(coordinator))


def unregister_loop(coordinator: object) -> None:
    """Undo :func:`register`; call it on the thread of the coordinator's event loop.

    Blocking calls are allowed there again once no coordinator is left.
    """
    loop = asyncio.get_running_loop()
    known = _coordinators.get(loop, set())
    known.discard(id(coordinator))
    if not known:
        _coordinators.pop(loop, None)


def require(what: str) -> None:
    """Raise UsageError if no asyncio loop runs on this thread (trio's does not count).

    :param what: the caller, as a noun for the message: "a coordinator".
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        text, hint = f"{what} needs an asyncio event loop", "run it with asyncio.run(), in a thread if need be"
        raise errors.UsageError(text, hint=hint) from None


def has_coordinator() -> bool:
    """Return True if a coordinator runs on this thread's event loop."""
    try:
        return bool(_coordinators) and asyncio.get_running_loop() in _coordinators
    except RuntimeError:
        return False


def must_not_block(what: str, *, awaitable: bool = False) -> None:
    """Raise UsageError if a coordinator runs on this thread's event loop.

    A blocking call there would wait for an answer that only this loop can give.

    :param what: the call that would block, for the message.
    :param awaitable: the message advises to await the call instead.
    """
    if has_coordinator():
        raise errors.UsageError(
            f"{what} would block the event loop of the coordinator, for which it waits",
            hint=("await it, or " if awaitable else "")
            + "call it in a worker thread: `await asyncio.to_thread(...)`; or run the coordinator by in_thread()",
        )

"""Event loops of this process on which a coordinator runs, and calls that would block
one of them.

Whoever blocks such a loop waits for an answer that only this loop could give: until his
deadline, and with him all members of that coordinator.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from weakref import WeakKeyDictionary

from replicas import errors

__all__ = ["begin", "end", "must_not_block"]

_coordinators: WeakKeyDictionary[asyncio.AbstractEventLoop, Counter[int]] = WeakKeyDictionary()


def begin(coordinator: object) -> None:
    """``coordinator`` runs on this thread's loop from now on."""
    _coordinators.setdefault(asyncio.get_running_loop(), Counter())[id(coordinator)] += 1


def end(coordinator: object) -> None:
    """It does not any more."""
    loop = asyncio.get_running_loop()
    known = _coordinators.get(loop, Counter())
    known.pop(id(coordinator), None)
    if not known:
        _coordinators.pop(loop, None)


def must_not_block(what: str) -> None:
    """Before a call that waits.

    :raises errors.UsageError: it is made on a loop on which a coordinator runs.
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
            hint="await it, or call it in a worker thread (asyncio.to_thread), or run the coordinator in a thread of its own",
        )

"""A set that does not keep its members: like ``weakref.WeakSet``, but no Python runs
when one of them dies.

Objects die on whatever thread lets go of them last, the user's main thread included,
where handlers of signals run. What a handler raises in the callback of a weak
reference, which is Python in ``WeakSet``, Python itself swallows: Ctrl-C is lost. Here
the callback is written in C, and only notes that there is something to forget.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Living"]

T = TypeVar("T")


class Living(Generic[T]):
    """May be used on any thread."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[T]] = {}
        self._dead: deque[weakref.ref[T]] = deque()

    def __iter__(self) -> Iterator[T]:
        """Those that live now, in no order, each once."""
        found = {id(one): one for known in list(self._known.values()) if (one := known()) is not None}
        return iter(found.values())

    def add(self, one: T) -> None:
        """Twice is as good as once."""
        while self._dead:
            self._known.pop(id(self._dead.popleft()), None)
        known = weakref.ref(one, self._dead.append)
        self._known[id(known)] = known

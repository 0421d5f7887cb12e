"""A set of weak references whose callback runs no Python, unlike ``weakref.WeakSet``.

An object dies on the thread that drops the last reference, which may be the user's main
thread, where signal handlers run. ``WeakSet`` has a Python callback: if a handler
raises in it, Python discards the exception and Ctrl-C is lost. Here the callback is
``deque.append``, written in C: it only records which reference is dead, and the next
:meth:`Living.add` removes it.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Living"]

T = TypeVar("T")


class Living(Generic[T]):
    """A set of the live objects that were added; usable on any thread.

    :param in_child: called with each of them in a forked child, for sets that live as
        long as the process.
    """

    def __init__(self, in_child: Callable[[T], object] | None = None) -> None:
        self._known: dict[int, weakref.ref[T]] = {}
        self._dead: deque[weakref.ref[T]] = deque()
        if in_child is not None:
            os.register_at_fork(after_in_child=lambda: [in_child(one) for one in self])

    def __iter__(self) -> Iterator[T]:
        """The live objects, each once, in no order."""
        found = {id(one): one for known in list(self._known.values()) if (one := known()) is not None}
        return iter(found.values())

    def add(self, one: T) -> None:
        """Add an object; adding it twice is harmless."""
        while self._dead:
            self._known.pop(id(self._dead.popleft()), None)
        known = weakref.ref(one, self._dead.append)
        self._known[id(known)] = known

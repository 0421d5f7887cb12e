"""Take back resources lent to the user's threads, even if an interrupt hits them.

A publish that walks the weights, or a slot of ``arena_like``, ends when the user's
thread says so. An interrupt may prevent that at any line, even at the first line of an
``__exit__`` or a ``finally`` (:mod:`replicas.common.waits`). Each therefore has a
:class:`Holder`, to which only frames and objects of the user's own thread refer. When
the last reference is gone, the resource is taken back.

The callback of the weak reference is written in C: it only appends to a deque, so no
signal handler can run in it. The session thread checks the deque once a second, and
whenever it looks for a slot.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable

__all__ = ["Holder", "Leases"]

LOOK_S = 1.0


class Holder:
    """Represents a lent resource; its death takes the resource back."""


class Leases:
    """The leases of one channel. On the session thread."""

    def __init__(self, after: Callable[[float, Callable[[], None]], asyncio.TimerHandle]) -> None:
        self._after = after
        self._lent: dict[int, tuple[weakref.ref[Holder], Callable[[], object]]] = {}
        self._gone: deque[weakref.ref[Holder]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, holder: Holder, take_back: Callable[[], object]) -> weakref.ref[Holder]:
        """Lend; ``take_back`` runs once, when ``holder`` gives back or has died."""
        known = weakref.ref(holder, self._gone.append)
        self._lent[id(known)] = (known, take_back)
        self._look_again()
        return known

    def give_back(self, holder: Holder) -> None:
        """Take it back; does nothing if the lease has ended already."""
        take_back = self._end(holder)
        if take_back is not None:
            take_back()

    def keep(self, holder: Holder) -> bool:
        """End the lease, keep the resource; False: ended before, or not lent here."""
        return self._end(holder) is not None

    def sweep(self) -> None:
        while self._gone:
            lease = self._lent.pop(id(self._gone.popleft()), None)
            if lease is not None:
                lease[1]()

    def _end(self, holder: Holder) -> Callable[[], object] | None:
        found = next((number for number, (known, _) in self._lent.items() if known() is holder), None)
        return None if found is None else self._lent.pop(found)[1]

    def _look_again(self) -> None:
        if self._timer is None and self._lent:
            self._timer = self._after(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self.sweep()
        self._look_again()

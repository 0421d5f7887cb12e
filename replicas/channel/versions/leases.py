"""What users' threads have been lent, and how it comes back whatever interrupts them.

Theory of operation
===================

A publish that is being walked and a slot of ``arena_like`` end when their user says so.
An interrupt may keep him from it at any line, the first one of an ``__exit__`` or of a
``finally`` included (:mod:`replicas.common.waits`). So each of them has a
:class:`Holder`: an object to which nothing but frames and objects of the user's own
thread refer. When the last of these is gone, so is the holder, and what was lent is
taken back.

That is noticed by a weak reference whose callback is written in C: it only appends to a
deque, and no signal's handler can run in it. The session thread looks there once a
second, and whenever somebody waits for a slot.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Holder", "Leases"]

LOOK_S = 1.0


class Holder:
    """Lives as long as anybody can give back what it stands for."""


class _Lease(NamedTuple):
    holder: weakref.ref[Holder]
    take_back: Callable[[], object]


class Leases:
    """Those of one channel. On the session thread.

    :param after: calls a function there after so many seconds.
    """

    def __init__(self, after: Callable[[float, Callable[[], None]], asyncio.TimerHandle]) -> None:
        self._after = after
        self._lent: dict[int, _Lease] = {}
        self._gone: deque[weakref.ref[Holder]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, holder: Holder, take_back: Callable[[], object]) -> weakref.ref[Holder]:
        """``take_back`` is called once, when ``holder`` gives it back, or there is none
        any more."""
        known = weakref.ref(holder, self._gone.append)
        self._lent[id(known)] = _Lease(known, take_back)
        self._look_again()
        return known

    def give_back(self, holder: Holder) -> None:
        """Take it back; nothing happens when it has ended already."""
        lease = self._end(holder)
        if lease is not None:
            lease.take_back()

    def keep(self, holder: Holder) -> bool:
        """It is somebody else's from now on, and does not come back. False: it has
        ended already, or was not lent here."""
        return self._end(holder) is not None

    def sweep(self) -> None:
        """Take back what nobody can give back any more."""
        while self._gone:
            lease = self._lent.pop(id(self._gone.popleft()), None)
            if lease is not None:
                lease.take_back()

    def _end(self, holder: Holder) -> _Lease | None:
        found = next((number for number, lease in self._lent.items() if lease.holder() is holder), None)
        return None if found is None else self._lent.pop(found)

    def _look_again(self) -> None:
        if self._timer is None and self._lent:
            self._timer = self._after(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self.sweep()
        self._look_again()

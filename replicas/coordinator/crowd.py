"""Fair queues of connections by source, so that one source cannot crowd out the others.

Sources are hashed into :data:`SOURCES` queues (stochastic fair queueing) with a secret
salt, so memory and time are bounded for any set of addresses. Service is round robin
over the queues; the connection to evict is the oldest of the longest queue.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["SOURCES", "Crowd"]

SOURCES = 64

One = TypeVar("One", bound=Hashable)


class Crowd(Generic[One]):
    """Connections by source, each queue in order of arrival."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(8)
        self._queues: tuple[OrderedDict[One, None], ...] = tuple(OrderedDict() for _ in range(SOURCES))
        self._where: dict[One, OrderedDict[One, None]] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, one: One) -> bool:
        return one in self._where

    def __iter__(self) -> Iterator[One]:
        return iter(tuple(self._where))

    def add(self, one: One, source: bytes) -> None:
        queue = self._where[one] = self._queue_of(source)
        queue[one] = None

    def _queue_of(self, source: bytes) -> OrderedDict[One, None]:
        return self._queues[hash((self._salt, source)) % SOURCES]

    def discard(self, one: One) -> None:
        queue = self._where.pop(one, None)
        if queue is not None:
            del queue[one]

    def is_mostly(self, source: bytes) -> bool:
        """Whether more than half of all connections are in the queue of this source."""
        return 2 * len(self._queue_of(source)) > len(self._where)

    def pop_excess(self) -> One:
        """Remove the connection to evict; IndexError if there is none."""
        return self._taken(max(self._queues, key=len))

    def pop_next(self) -> One:
        """Remove the next in round-robin order; IndexError if there is none."""
        for step in range(SOURCES):
            queue = self._queues[(self._turn + step) % SOURCES]
            if queue:
                self._turn = (self._turn + step + 1) % SOURCES
                return self._taken(queue)
        raise IndexError("no connection waits")

    def oldest(self) -> Iterator[One]:
        """The oldest of each queue, and the next ones while the caller removes them."""
        for queue in self._queues:
            while queue:
                first = next(iter(queue))
                yield first
                if first in queue:
                    break

    def _taken(self, queue: OrderedDict[One, None]) -> One:
        if not queue:
            raise IndexError("no connection waits")
        one, _ = queue.popitem(last=False)
        del self._where[one]
        return one

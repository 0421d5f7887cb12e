"""Fair queues of connections by source, so that one source cannot crowd out the others.

Sources are hashed into :data:`SOURCES` queues (stochastic fair queueing) with a secret
salt, so memory and time are bounded for any set of addresses. Service is round robin
over the queues; the connection to evict is the oldest of the longest queue.
"""

from __future__ import annotations

import secrets
import socket
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["LOOPBACK", "SOURCES", "Crowd", "source_of"]

SOURCES = 64
LOOPBACK = b"loopback"
_MAPPED = bytes(10) + b"\xff\xff"
_SITE = 8
"""Bytes of an IPv6 address that identify a site, which assigns the others freely."""

One = TypeVar("One", bound=Hashable)


def source_of(host: str) -> bytes:
    """The source of an address. All loopback addresses count as one source."""
    if ":" not in host:
        return LOOPBACK if host.startswith("127.") else host.encode()
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if packed.startswith(_MAPPED):
        return source_of(socket.inet_ntoa(packed[12:]))
    return LOOPBACK if packed == bytes(15) + b"\1" else packed[:_SITE]


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
        """Remove the connection to evict.

        :raises IndexError: there is none.
        """
        longest = max(self._queues, key=len)
        return self._taken(longest)

    def pop_next(self) -> One:
        """Remove the next connection in round-robin order.

        :raises IndexError: there is none.
        """
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

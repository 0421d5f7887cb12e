"""Blocks of 16 MiB: the unit in which bytes are requested, digested and verified.

A version's digest is the digest of its blocks' digests
(:mod:`replicas.weights.copies.digest`). So the blocks' digests, from the publisher,
tell which block is wrong, and thus which holder served it.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

import xxhash

BLOCK_NBYTES = 16 << 20


def combined(blocks: Iterable[bytes]) -> str:
    """Return a version's digest, from the binary xxh3-128 of its blocks."""
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def block_range(number: int, nbytes: int) -> tuple[int, int]:
    """Return the first byte and the end of a block of an image of ``nbytes`` bytes."""
    return number * BLOCK_NBYTES, min(nbytes, (number + 1) * BLOCK_NBYTES)


class BlockQueue:
    """The blocks of an image that are still to be requested. Not thread-safe.

    The lowest goes first, so that the slot holds mostly a prefix, which this host can
    serve to the next one. A failed block comes back before all later blocks.

    :param nbytes: of the image. :param here: blocks that are in the slot already.
    """

    def __init__(self, nbytes: int, here: Iterable[int] = ()) -> None:
        self.nbytes = nbytes
        self.count = -(-nbytes // BLOCK_NBYTES)
        known = frozenset(here)
        self._waiting = [number for number in range(self.count) if number not in known]
        self._left = set(self._waiting)
        self._asked: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether all blocks have arrived."""
        return not self._left

    @property
    def left_nbytes(self) -> int:
        """Bytes of the missing blocks."""
        return sum(end - start for start, end in map(self.range_of, self._left))

    @property
    def waiting(self) -> int:
        """Number of blocks to request, without those under way."""
        return len(self._waiting)

    def next_block(self) -> int | None:
        """Return the next block to request, marked as under way, or None."""
        if not self._waiting:
            return None
        number = heappop(self._waiting)
        self._asked.add(number)
        return number

    def requeue(self, number: int) -> None:
        """Request a block again, which did not arrive or was wrong."""
        if number in self._left and number in self._asked:
            self._asked.discard(number)
            heappush(self._waiting, number)

    def mark_received(self, number: int) -> None:
        """Note that the block has arrived."""
        self._left.discard(number)
        self._asked.discard(number)

    def request_again(self, number: int) -> None:
        """Request a block again, which arrived with wrong bytes."""
        self._left.add(number)
        heappush(self._waiting, number)

    def range_of(self, number: int) -> tuple[int, int]:
        """Return the block's first byte and its end."""
        return block_range(number, self.nbytes)

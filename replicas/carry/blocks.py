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
    """Return a version's digest (hex): the xxh3-128 of its blocks' digests.

    :param blocks: binary xxh3-128 of each of its blocks, in order.
    """
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def block_range(number: int, nbytes: int) -> tuple[int, int]:
    """Return (first byte, end) of block ``number`` in an image of ``nbytes`` bytes.

    An image is the bytes of one version. A block has 16 MiB, the last one what is left.
    """
    return number * BLOCK_NBYTES, min(nbytes, (number + 1) * BLOCK_NBYTES)


class Blocks:
    """Which blocks of a pulled image (a version's bytes) are missing, which have come,
    and from which holder.

    Not thread-safe. The lowest is requested first, so that the slot holds mostly a
    prefix, which this host can serve to the next one. A failed block comes back before
    all later blocks.

    :param nbytes: of the image.
    :ivar digests: binary xxh3-128 of each received block.
    :ivar served_by: name of the holder of each block, also of a wrong one.
    :ivar halves: received bytes of incomplete blocks, by number.
    """

    def __init__(self, nbytes: int) -> None:
        """Begin with all blocks of an image missing, and queued to be requested.

        :param nbytes: size of the image.
        """
        self.nbytes = nbytes
        self.count = -(-nbytes // BLOCK_NBYTES)
        self.digests = [b""] * self.count
        self.served_by = [""] * self.count
        self.halves: dict[int, int] = {}
        self._waiting = list(range(self.count))
        self._left = set(self._waiting)

    @property
    def done(self) -> bool:
        """True if all blocks have arrived."""
        return not self._left

    @property
    def left_nbytes(self) -> int:
        """Bytes that are still to be received."""
        return sum(end - start for start, end in map(self.range_of, self._left)) - sum(self.halves.values())

    @property
    def waiting(self) -> int:
        """Number of blocks to request, without those under way."""
        return len(self._waiting)

    def next_block(self) -> int | None:
        """Remove the lowest block number from the queue of requests, and return it.

        The caller requests the block. Return None if no block is queued; requests may
        be under way even then.
        """
        return heappop(self._waiting) if self._waiting else None

    def requeue(self, number: int) -> None:
        """Queue block ``number`` again, as its request failed.

        Its received bytes count no more. Does nothing else for a block that has arrived
        or is queued.
        """
        self.halves.pop(number, None)
        if number in self._left and number not in self._waiting:
            heappush(self._waiting, number)

    def mark_received(self, number: int, digest: bytes, holder: str) -> None:
        """Record that block ``number`` has arrived, so that it counts as done.

        :param digest: binary xxh3-128 of its bytes. :param holder: name of the sender.
        """
        self.digests[number], self.served_by[number] = digest, holder
        self.halves.pop(number, None)
        self._left.discard(number)

    def request_again(self, number: int) -> None:
        """Count block ``number`` as missing and queue it: its bytes proved wrong.

        Its holder stays in ``served_by``.
        """
        self._left.add(number)
        heappush(self._waiting, number)

    def range_of(self, number: int) -> tuple[int, int]:
        """Return (first byte, end) of block ``number`` in the image."""
        return block_range(number, self.nbytes)

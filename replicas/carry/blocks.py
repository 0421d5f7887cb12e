"""Blocks of 16 MiB: the unit in which bytes are asked for, digested and verified.

The digest of a version is that of the digests of its blocks
(:mod:`replicas.weights.copies.digest`). So the digest of each block, told by the
publisher, says which block is wrong, and who has served it.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

import xxhash

BLOCK_NBYTES = 16 << 20


def combined(blocks: Iterable[bytes]) -> str:
    """The digest of a stream, from the binary xxh3-128 of its blocks."""
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def block_range(number: int, nbytes: int) -> tuple[int, int]:
    """First byte of a block of ``nbytes`` bytes, and the one behind its last."""
    return number * BLOCK_NBYTES, min(nbytes, (number + 1) * BLOCK_NBYTES)


class Asking:
    """Which blocks of an image are still to be asked for. Not thread-safe.

    The lowest goes first, so that what is here is mostly a prefix, which this host can
    serve to the next one. A block that failed comes back, before all later ones.

    :param nbytes: of the image. :param here: blocks that need not be asked for.
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
        """Whether all blocks are here."""
        return not self._left

    @property
    def left_nbytes(self) -> int:
        """Bytes of the blocks that are not here."""
        return sum(end - start for start, end in map(self.range_of, self._left))

    @property
    def waiting(self) -> int:
        """How many blocks wait to be asked for; others may be on their way."""
        return len(self._waiting)

    def take(self) -> int | None:
        """The next block to ask for; None: there is none now."""
        if not self._waiting:
            return None
        number = heappop(self._waiting)
        self._asked.add(number)
        return number

    def give_back(self, number: int) -> None:
        """The block did not come, or was wrong: ask again, once."""
        if number in self._left and number in self._asked:
            self._asked.discard(number)
            heappush(self._waiting, number)

    def landed(self, number: int) -> None:
        """The block is here, and right as far as that is known."""
        self._left.discard(number)
        self._asked.discard(number)

    def wrong(self, number: int) -> None:
        """A block that had landed is wrong: ask for it again."""
        self._left.add(number)
        heappush(self._waiting, number)

    def range_of(self, number: int) -> tuple[int, int]:
        """First byte of the block, and the one behind its last."""
        return block_range(number, self.nbytes)

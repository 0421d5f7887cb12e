"""Receive blocks into the slot of one pull, as bytes or as deltas.

A block is digested while its bytes are in the processor's caches. Each complete chunk
can be served to other hosts at once (:class:`~replicas.carry.image.Image`). A block
with wrong bytes, or with a wrong delta, is requested again, as bytes.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter

import xxhash

from replicas.carry.blocks import Blocks
from replicas.carry.delta import DELTA_NBYTES_MAX, DeltaError, apply_block
from replicas.carry.dialler import HolderConnection, HungUp
from replicas.carry.differences import Deltas
from replicas.carry.image import CHUNK_NBYTES, Image
from replicas.carry.serve import DELTA_FOLLOWS


class Received:
    """The received part of one version. Each connection's thread adds blocks.

    :param memory: the slot's file, mapped for writing.
    :param base: the bytes of a version that holders also have, to apply deltas to.
    :ivar changed: guards all of it; notified at the end of each block.
    :ivar nbytes: network bytes by holder, including wrong ones.
    :ivar landed_nbytes: received bytes of the image, from bytes and deltas.
    :ivar wrong: by holder's name, the wrong bytes that it served, as text.
    :ivar again: how many blocks were requested again.
    """

    def __init__(self, image: Image, memory: mmap.mmap, base: memoryview | None) -> None:
        """Begin with no block received; map and write nothing.

        :param image: the part of the slot that the version fills.
        :param memory: the slot's file, mapped for writing.
        :param base: the bytes of a version that holders also have, to apply deltas to;
            None to request no deltas.
        """
        self.image, self.base = image, base
        self.blocks, self.deltas = Blocks(image.nbytes), Deltas(image.nbytes)
        self.changed = threading.Condition()
        self.nbytes: Counter[str] = Counter()
        self.landed_nbytes = self.again = 0
        self.wrong: dict[str, str] = {}
        self._data = memoryview(memory)[image.offset : image.offset + image.nbytes]

    def release_base(self) -> None:
        """Release the base's memory; call it when no thread of the pull is left."""
        if self.base is not None:
            self.base.release()
            self.base = None

    def receive_block(self, line: HolderConnection, number: int) -> None:
        """Receive block ``number`` over a connection, as bytes or as a delta.

        Blocks. Writes the bytes to the slot, digests them, and counts the block as
        received; one with an invalid delta is queued again instead.

        :param line: the connection, on which the block was requested.
        :raises OSError: the connection broke; the caller queues the block again.
        :raises HungUp: a delta came, but the base was released.
        """
        start, end = self.blocks.range_of(number)
        at, digest, piece = start, xxhash.xxh3_128(), 0
        while at < end:
            self.blocks.halves[number] = at - start
            if not piece:
                piece = line.piece(end - at)
                if piece == DELTA_FOLLOWS:
                    piece = 0
                    if (found := self._receive_delta(line)) and not self._apply(
                        line.holder.name, number, found, digest
                    ):
                        return
                    at = end if found else at
                continue
            here = min(at - at % CHUNK_NBYTES + CHUNK_NBYTES, end)
            nbytes = line.receive(self._data[at : min(here, at + piece)])
            digest.update(self._data[at : at + nbytes])
            at, piece = at + nbytes, piece - nbytes
            self._count(line.holder.name, nbytes, nbytes)
            if at == here:
                self.image.mark_present(max(at - 1, 0) // CHUNK_NBYTES * CHUNK_NBYTES, at)
        with self.changed:
            self.blocks.mark_received(number, digest.digest(), line.holder.name)
            self.changed.notify_all()

    def _receive_delta(self, line: HolderConnection) -> bytes:
        """Receive a block's delta over ``line``, and return it.

        Return b"" if the block's bytes follow instead.

        :raises ConnectionError: the delta is too large, or none was requested.
        :raises OSError: the connection broke.
        """
        nbytes = line.number()
        if self.base is None or nbytes > DELTA_NBYTES_MAX:
            raise ConnectionError("sends more than was asked for")
        found = bytearray(nbytes)
        line.receive_all(memoryview(found))
        return bytes(found)

    def _apply(self, holder: str, number: int, found: bytes, digest: xxhash.xxh3_128) -> bool:
        """Write block ``number`` from its delta; return False if that is not valid.

        A block with a delta that is not valid is queued to be requested again.

        :param holder: name of the sender.
        :param found: the delta.
        :param digest: updated with the block's bytes.
        :raises HungUp: the base, to which the delta is applied, was released.
        """
        if self.base is None:
            raise HungUp
        start, end = self.blocks.range_of(number)
        block = self._data[start:end]
        try:
            apply_block(self.base[start:end], found, block)
        except DeltaError as error:
            with self.changed:
                self.blocks.served_by[number] = holder
                self.wrong[holder] = f"block {number}: {error}"
                self.again += 1
                self.blocks.requeue(number)
            return False
        digest.update(block)
        self.deltas.keep(number, found)
        self._count(holder, len(found), end - start)
        self.image.mark_present(start, end)
        return True

    def _count(self, holder: str, nbytes: int, landed: int) -> None:
        """Add to the counts of received bytes.

        :param holder: name of the sender. :param nbytes: bytes from the network.
        :param landed: bytes of the image that these make.
        """
        with self.changed:
            self.nbytes[holder] += nbytes
            self.landed_nbytes += landed

    def reject_block(self, number: int) -> None:
        """Mark block ``number`` as missing, queue it, and record that its holder served
        wrong bytes. Its delta is forgotten, so it is requested as bytes.

        The caller holds the lock.
        """
        self.image.mark_missing(*self.blocks.range_of(number))
        self.deltas.drop(number)
        self.blocks.request_again(number)
        self.again += 1
        self.wrong[self.blocks.served_by[number]] = f"block {number} is not what was published"

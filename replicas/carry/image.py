"""Which bytes of a version are in its slot, and how threads wait for the others.

A rank that packs fills its slot from the start (:meth:`Image.mark_present` of growing
prefixes); a pull fills it chunk by chunk, in any order. A thread that serves a chunk
waits until that is in the slot, so a host serves a version that it is still receiving,
and hosts form a chain. Thread-safe.
"""

from __future__ import annotations

import threading
import time

CHUNK_NBYTES = 1 << 20
"""Bytes that are received in one call, and forwarded as soon as they are complete."""


class Withdrawn(Exception):
    """The transfer has ended: stop reading and writing the slot."""


class Image:
    """Tells which of a version's bytes are in its slot (memory for one version)
    already, and waits for others.

    The version has ``nbytes`` bytes at ``offset`` of the slot's file ``fd``.

    :param full: all bytes are in the slot.
    :param data: the same bytes mapped, to serve them over TLS.
    """

    def __init__(
        self, fd: int, offset: int, nbytes: int, *, full: bool = False, data: memoryview | None = None
    ) -> None:
        """Keep the arguments; open and map nothing.

        :param fd: descriptor of the slot's file, which the caller keeps open.
        :param offset: the image's first byte in the file. :param nbytes: its size.
        :param full: all bytes are in the slot already; else none is.
        :param data: the same bytes mapped, to serve them over TLS.
        """
        self.fd, self.offset, self.nbytes = fd, offset, nbytes
        self.data = data
        self._here = bytearray(b"\x01" if full else b"\x00") * -(-nbytes // CHUNK_NBYTES)
        self._prefix = nbytes if full else 0
        """Bytes that are in the slot from the start; the flags may show more."""
        self._changed = threading.Condition()
        self._withdrawn = ""

    def mark_present(self, start: int, end: int) -> None:
        """Mark bytes ``start`` to ``end`` as present; wake threads that wait for them.

        A chunk (1 MiB) that they fill only in part is marked only if they continue the
        bytes that are present from the image's first byte on without a gap.
        """
        with self._changed:
            if start <= self._prefix:
                self._prefix = max(self._prefix, end)
            last = len(self._here) if end == self.nbytes else end // CHUNK_NBYTES
            first = -(-start // CHUNK_NBYTES)
            if last > first:
                self._here[first:last] = b"\x01" * (last - first)
            self._changed.notify_all()

    def mark_missing(self, start: int, end: int) -> None:
        """Mark all chunks (1 MiB) with bytes of ``start`` to ``end`` as missing."""
        with self._changed:
            first, last = start // CHUNK_NBYTES, -(-end // CHUNK_NBYTES)
            self._here[first:last] = b"\x00" * (last - first)
            self._prefix = min(self._prefix, start)

    def wait_for_bytes(self, start: int, end: int, timeout_s: float) -> int:
        """Wait for the byte at ``start``; return how many bytes from it on have no gap.

        Bytes from ``end`` on are not counted. Return 0 if the byte at ``start`` did not
        arrive within ``timeout_s``.

        :raises Withdrawn: the transfer has ended.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._withdrawn:
                    raise Withdrawn(self._withdrawn)
                if found := self._count_present(start, end):
                    return found
                if (left := deadline - time.monotonic()) <= 0:
                    return 0
                self._changed.wait(left)

    def _count_present(self, start: int, end: int) -> int:
        """Return how many bytes from ``start`` on, to ``end`` at most, have no gap.

        The caller holds the lock.
        """
        if start < self._prefix:
            return min(end, self._prefix) - start
        gap = self._here.find(b"\x00", start // CHUNK_NBYTES)
        known = self.nbytes if gap < 0 else gap * CHUNK_NBYTES
        return max(0, min(end, known) - start)

    def withdraw(self, why: str) -> None:
        """End all waits for bytes, present and later ones, with :class:`Withdrawn`.

        :param why: text of that exception; a second call keeps the first one.
        """
        with self._changed:
            self._withdrawn = self._withdrawn or why
            self._changed.notify_all()

"""One version's bytes in a slot, as far as they are here: filled, and waited for.

A holder's own slot is filled from its start, while its rank packs (:meth:`Image.fill`
of growing prefixes), or is full. A slot that is pulled is filled chunk by chunk, in any
order. Whoever serves a chunk waits until it is here: so a host serves what it is still
receiving, and hosts form a chain by themselves. Thread-safe.
"""

from __future__ import annotations

import threading
import time

CHUNK_NBYTES = 1 << 20
"""What is received in one go, and forwarded as soon as it has landed."""


class Withdrawn(Exception):
    """Nobody may read or write the slot any more."""


class Image:
    """``nbytes`` bytes at ``offset`` of the file ``fd``, which the image owns.

    :param full: all of it is here.
    :param data: the bytes themselves, from which it is served over TLS.
    """

    def __init__(
        self, fd: int, offset: int, nbytes: int, *, full: bool = False, data: memoryview | None = None
    ) -> None:
        self.fd, self.offset, self.nbytes = fd, offset, nbytes
        self.data = data
        self._here = bytearray(b"\x01" if full else b"\x00") * -(-nbytes // CHUNK_NBYTES)
        self._prefix = nbytes if full else 0
        """So many bytes are here from the start; the flags may know of more."""
        self._changed = threading.Condition()
        self._withdrawn = ""

    def fill(self, start: int, end: int) -> None:
        """Bytes ``start`` to ``end`` are here: whole chunks, or a prefix of all."""
        with self._changed:
            if start <= self._prefix:
                self._prefix = max(self._prefix, end)
            last = len(self._here) if end == self.nbytes else end // CHUNK_NBYTES
            first = -(-start // CHUNK_NBYTES)
            if last > first:
                self._here[first:last] = b"\x01" * (last - first)
            self._changed.notify_all()

    def empty(self, start: int, end: int) -> None:
        """Bytes ``start`` to ``end``, whole chunks, were wrong: they are not here."""
        with self._changed:
            first, last = start // CHUNK_NBYTES, -(-end // CHUNK_NBYTES)
            self._here[first:last] = b"\x00" * (last - first)
            self._prefix = min(self._prefix, start)

    def here(self, start: int, end: int, timeout_s: float) -> int:
        """Wait for a byte at ``start``; return how many are here from it, to ``end``.

        0: none came within ``timeout_s``.

        :raises Withdrawn: the image is not served any more.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (found := self._run(start, end)):
                if self._withdrawn:
                    raise Withdrawn(self._withdrawn)
                if (left := deadline - time.monotonic()) <= 0:
                    return 0
                self._changed.wait(left)
            if self._withdrawn:
                raise Withdrawn(self._withdrawn)
            return found

    def _run(self, start: int, end: int) -> int:
        if start < self._prefix:
            return min(end, self._prefix) - start
        gap = self._here.find(b"\x00", start // CHUNK_NBYTES)
        known = self.nbytes if gap < 0 else gap * CHUNK_NBYTES
        return max(0, min(end, known) - start)

    def withdraw(self, why: str) -> None:
        """Wake all that wait: nothing of it is served any more."""
        with self._changed:
            self._withdrawn = self._withdrawn or why
            self._changed.notify_all()

"""Deltas of an image's blocks against a base, made when they are first asked for.

Who packed a version has the version before in another slot: the delta of a block is
encoded when the first puller asks for it, and kept for the others; before that, where
pullers are far. Who has pulled a version by deltas serves those on. A block without a
delta is sent as bytes.

*Which is cheaper* (:class:`Choice`) depends on the link: over 100 Gbit/s a version is
there before its delta is computed. So a carrier remembers how fast versions came from a
host in both ways, takes the faster one, and tries the other one again so rarely that
the trials cost a few per cent at most.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from replicas.carry import delta
from replicas.carry.blocks import BLOCK_NBYTES, block_range
from replicas.carry.image import Image, Withdrawn

AGAIN = 16
"""After so many pulls the slower way is tried again; it is 3 times slower: 3 times as
many."""
MARGIN = 1.1
"""Bytes are taken instead of deltas where they were this much faster: deltas leave the
link to others."""
VAIN = 2
"""So many more blocks without a delta than with one, and no more are looked for."""
AT_ONCE = max(2, (os.cpu_count() or 1) // 8)
"""Deltas of one image that are made at the same time: the host has other work."""
SHORT_S = 0.1
"""What took less proves nothing, and is fast enough."""
PROOFS = 2
"""So many pulls by deltas are judged by the fastest of them: one may have been slow by
chance."""


class Deltas:
    """The deltas of one image. Thread-safe.

    :param base: the base's bytes, as many as the image has; None: it has none here.
    :param data: the image's bytes.
    :param regions: where elements of which size are (:func:`delta.encode_block`).
    """

    def __init__(
        self,
        nbytes: int,
        base: memoryview | None = None,
        data: memoryview | None = None,
        regions: Sequence[delta.Region] = (),
    ) -> None:
        self._nbytes, self._base, self._data, self._regions = nbytes, base, data, regions
        self._known: dict[int, bytes] = {}
        self._making: set[int] = set()
        self._vain = 0
        """Blocks that had changed throughout, less those that had not."""
        self._changed = threading.Condition()

    def may_have(self, number: int) -> bool:
        """Return True if the block, of which something is here, may have a delta."""
        return number in self._known or (self._base is not None and self._vain < VAIN)

    def of(self, number: int) -> bytes | None:
        """The delta of a block that is here; None: it is to be sent as bytes."""
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._known or (number not in self._making and len(self._making) < AT_ONCE)
            )
            pair = None if number in self._known else self._pair(number)
            if pair is not None:
                self._making.add(number)
        if pair is not None:
            self._make(number, *pair)
        known = self._known.get(number)
        return None if known is None or delta.is_whole(known) else known

    def _pair(self, number: int) -> tuple[memoryview, memoryview] | None:
        """The block in base and image; None: no delta is made of it."""
        if self._base is None or self._data is None or self._vain >= VAIN:
            return None
        block = slice(*block_range(number, self._nbytes))
        return self._base[block], self._data[block]

    def _make(self, number: int, old: memoryview, new: memoryview) -> None:
        found = b""
        try:
            found = delta.encode_block(old, new, self._regions, start=number * BLOCK_NBYTES)
        finally:
            with self._changed:
                self._making.discard(number)
                if found:
                    self._known[number] = found
                    self._vain += 1 if delta.is_whole(found) else -1
                self._changed.notify_all()

    def make_ahead(self, image: Image) -> None:
        """Make all, each once it is here, for pullers that take time to ask."""
        with contextlib.suppress(Withdrawn):
            for end in range(BLOCK_NBYTES, self._nbytes + BLOCK_NBYTES, BLOCK_NBYTES):
                last = min(end, self._nbytes)
                while self._base is not None and not image.here(last - 1, last, 1.0):
                    pass
                self.of(end // BLOCK_NBYTES - 1)

    def keep(self, number: int, found: bytes) -> None:
        """Keep a delta that was received, for the next hosts."""
        with self._changed:
            self._known[number] = found

    def drop(self, number: int) -> None:
        """A block came wrong by its delta."""
        with self._changed:
            self._known.pop(number, None)

    def without_base(self) -> None:
        """Make no more deltas; when this returns, nobody reads the base."""
        with self._changed:
            views, self._base, self._data = (self._base, self._data), None, None
            self._changed.wait_for(lambda: not self._making)
            for view in views:
                if view is not None:
                    view.release()


class Choice:
    """Whether versions from a host come faster by deltas or as bytes."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, bool], tuple[float, ...]] = {}
        self._pulls: dict[str, int] = {}
        """By host: pulls since the slower way was tried."""

    def by_delta(self, host: str) -> bool:
        """Which way to take for the next version from this host."""
        deltas, whole = self._rates.get((host, True), ()), self._rates.get((host, False), ())
        if len(deltas) < PROOFS or not whole:
            return True
        ratio = max(whole) / max(deltas)
        count = self._pulls.get(host, 0) + 1
        again = count >= AGAIN * max(ratio, 1 / ratio)
        self._pulls[host] = 0 if again else count
        return (ratio <= MARGIN) != again

    def took(self, host: str, *, by_delta: bool, nbytes: int, seconds: float) -> None:
        """A version of ``nbytes`` has come."""
        if seconds >= SHORT_S:
            self._rates[host, by_delta] = (*self._rates.get((host, by_delta), ()), nbytes / seconds)[-PROOFS:]

"""Deltas of an image's blocks against a base, made when a puller first asks for them.

A rank that packed a version has the previous version in another slot. The carrier
encodes a block's delta for the first puller, or ahead of time if pullers are far, and
keeps it for the others. A host that pulled a version by deltas serves these deltas. A
block without a delta is sent as bytes.

*Bytes or deltas* (:class:`DeltaChoice`) depends on the link: over 100 Gbit/s a version
arrives before its delta is computed. So a carrier remembers the rate of both ways for
each host, takes the faster one, and retries the slower one so rarely that the trials
cost a few per cent at most.
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
"""Pulls until the slower way is tried again, times how much slower it is."""
MARGIN = 1.1
"""How much faster bytes must be than deltas, which leave more of the link to others."""
VAIN = 2
"""Stop making deltas when this many more blocks had no delta than had one."""
AT_ONCE = max(2, (os.cpu_count() or 1) // 8)
"""Deltas of one image that are made in parallel; the host has other work."""
SHORT_S = 0.1
"""Shorter pulls are fast enough, and not measured."""
PROOFS = 2
"""Pulls whose fastest counts: a single one may have been slow by chance."""


class Deltas:
    """Makes and keeps the deltas of one image's (version's) 16 MiB blocks against a
    base, an older version. Thread-safe.

    :param base: the base's bytes, as many as the image has; None to make no deltas.
    :param data: the image's bytes.
    :param regions: (first byte, end, bytes of an element), as in
        :func:`delta.encode_block`.
    """

    def __init__(
        self,
        nbytes: int,
        base: memoryview | None = None,
        data: memoryview | None = None,
        regions: Sequence[delta.Region] = (),
    ) -> None:
        """Keep the arguments; compute no delta yet.

        :param nbytes: size of the image.
        :param base: bytes of the older version, as many; None to make no deltas.
        :param data: the image's bytes; None to make no deltas.
        :param regions: (first byte, end, bytes of an element), as in
            :func:`delta.encode_block`.
        """
        self._nbytes, self._base, self._data, self._regions = nbytes, base, data, regions
        self._known: dict[int, bytes] = {}
        self._making: set[int] = set()
        self._vain = 0
        """Blocks that changed too much for a delta, minus those that did not."""
        self._changed = threading.Condition()

    def may_have(self, number: int) -> bool:
        """Return True if block ``number`` has a delta, or one may be made.

        False is final, but after True :meth:`get_delta` may still return None.
        """
        return number in self._known or (self._base is not None and self._vain < VAIN)

    def get_delta(self, number: int) -> bytes | None:
        """Return the delta of block ``number``; if there is none yet, make and keep it.

        Returns None if the block's bytes are to be sent instead. Blocks while a delta
        is made, on this or other threads; the block's bytes must be in the slot.
        """
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
        """Return views (base, image) of block ``number``.

        Return None if no delta is to be made: there is no base (any more), or deltas
        of this image do not pay.
        """
        if self._base is None or self._data is None or self._vain >= VAIN:
            return None
        block = slice(*block_range(number, self._nbytes))
        return self._base[block], self._data[block]

    def _make(self, number: int, old: memoryview, new: memoryview) -> None:
        """Encode the delta of block ``number`` and keep it, also one of kind *whole*.

        If that fails, nothing is kept. Threads that wait for the delta are woken.

        :param old: the block's bytes in the base. ``new``: those in the image.
        """
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
        """On a thread of its own: make the deltas of all blocks of ``image``.

        Waits for each block's bytes; ends early when the base is released or the
        transfer withdrawn.
        """
        with contextlib.suppress(Withdrawn):
            for end in range(BLOCK_NBYTES, self._nbytes + BLOCK_NBYTES, BLOCK_NBYTES):
                last = min(end, self._nbytes)
                while self._base is not None and not image.wait_for_bytes(last - 1, last, 1.0):
                    pass
                self.get_delta(end // BLOCK_NBYTES - 1)

    def keep(self, number: int, found: bytes) -> None:
        """Keep ``found``, the delta of block ``number`` that came from another host.

        :meth:`get_delta` returns it from now on, for further hosts.
        """
        with self._changed:
            self._known[number] = found

    def drop(self, number: int) -> None:
        """Forget the delta of block ``number``, as it led to wrong bytes."""
        with self._changed:
            self._known.pop(number, None)

    def release_base(self) -> None:
        """Stop making deltas, block until no thread makes one, and release the views of
        the base and of the image.

        Deltas that exist are still served.
        """
        with self._changed:
            views, self._base, self._data = (self._base, self._data), None, None
            self._changed.wait_for(lambda: not self._making)
            for view in views:
                if view is not None:
                    view.release()


class DeltaChoice:
    """Chooses bytes or deltas for each host, by the rates measured so far."""

    def __init__(self) -> None:
        """Begin without measured rates."""
        self._rates: dict[tuple[str, bool], tuple[float, ...]] = {}
        self._pulls: dict[str, int] = {}
        """By host: pulls since the slower way was last tried."""

    def choose_delta(self, host: str) -> bool:
        """Return True to pull the next version from ``host`` by deltas, not bytes.

        True until both ways have been measured. Counts the call: the slower way is
        tried again after some pulls.
        """
        deltas, whole = self._rates.get((host, True), ()), self._rates.get((host, False), ())
        if len(deltas) < PROOFS or not whole:
            return True
        ratio = max(whole) / max(deltas)
        count = self._pulls.get(host, 0) + 1
        again = count >= AGAIN * max(ratio, 1 / ratio)
        self._pulls[host] = 0 if again else count
        return (ratio <= MARGIN) != again

    def record_pull(self, host: str, *, by_delta: bool, nbytes: int, seconds: float) -> None:
        """Record the rate of a complete pull from ``host``; ignore one below 0.1 s.

        :param by_delta: it used deltas. :param nbytes: size of the version.
        :param seconds: how long it took.
        """
        if seconds >= SHORT_S:
            self._rates[host, by_delta] = (*self._rates.get((host, by_delta), ()), nbytes / seconds)[-PROOFS:]

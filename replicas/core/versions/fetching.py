"""Fetch manifests in windows of pieces, from a member or the coordinator.

A manifest of many tensors has tens of megabytes. It is never sent inside another
message: an offer, or a report of a packed slot, names it by its hash, and the receiver
asks for it with :class:`ManifestAsk` if its :class:`Cache` lacks it, so that neither
side needs to know which manifests the other remembers.

Pieces are small, and a window holds no more of them than the link carries in a moment
(:class:`Fetch` adapts its size): other messages wait for a fraction of a second only,
and no queue grows for a slow member. The pieces are numbered messages of the session: a
broken connection loses none that have arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import xxhash

from replicas.errors import Gone, ManifestMismatch
from replicas.messages import ManifestAsk, ManifestPiece
from replicas.messages.bounds import MANIFEST_NBYTES

PIECE_NBYTES = 64 * 2**10
WINDOW_MIN_NBYTES = 16 * 2**10
WINDOW_MAX_NBYTES = 4 * 2**20
FAST_S = 0.25
SLOW_S = 1.0
"""A window that took less than ``FAST_S`` is doubled, more than ``SLOW_S`` halved."""
CACHE_NBYTES = 2 * MANIFEST_NBYTES  # the present one, and the next

_T = TypeVar("_T")


class Cache(Generic[_T]):
    """Recently used values by hash; bounded in bytes, but always with the newest."""

    def __init__(self, limit_nbytes: int = CACHE_NBYTES) -> None:
        """Start empty.

        :param limit_nbytes: limit of the values' sizes together; the newest is always
            kept.
        """
        self._limit_nbytes = limit_nbytes
        self._nbytes = 0
        self._kept: OrderedDict[str, tuple[_T, int]] = OrderedDict()

    def get(self, key: str) -> _T | None:
        """Return the value of this key, and mark it as used; None if it is not here."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: str, value: _T, nbytes: int) -> None:
        """Store a value as the newest; drop the oldest ones beyond the limit.

        :param nbytes: size of the value, for the limit.
        """
        _, known_nbytes = self._kept.pop(key, (value, 0))  # to the end: it is the newest now
        self._nbytes += nbytes - known_nbytes
        self._kept[key] = value, nbytes
        while self._nbytes > self._limit_nbytes and len(self._kept) > 1:  # the newest stays, however large
            _, (_, freed) = self._kept.popitem(last=False)
            self._nbytes -= freed


def pieces(ask: ManifestAsk, manifest: bytes | None) -> list[ManifestPiece]:
    """Return the pieces of a manifest that answer a request: those of one window.

    Return one empty piece if there is no manifest, or the request is out of its range.

    :param manifest: the encoded manifest that is asked for, or None.
    """
    if manifest is None or not 0 <= ask.offset < len(manifest):
        return [ManifestPiece(ask.manifest_hash, 0, 0, b"")]  # empty: Gone
    end = min(len(manifest), ask.offset + max(1, min(ask.nbytes, WINDOW_MAX_NBYTES)))  # a window of 0 would never end
    return [
        ManifestPiece(ask.manifest_hash, start, len(manifest), manifest[start : min(end, start + PIECE_NBYTES)])
        for start in range(ask.offset, end, PIECE_NBYTES)
    ]


class Fetch:
    """The fetch of one manifest from one member, a window of pieces after the other.

    It sends nothing itself. Times are seconds of a monotonic clock.
    """

    def __init__(self, manifest_hash: str) -> None:
        """Start without bytes; nothing is asked for before :meth:`ask`.

        :param manifest_hash: hash of the manifest that is fetched.
        """
        self.manifest_hash = manifest_hash
        self._data = bytearray()
        self._window_nbytes = PIECE_NBYTES  # small: the link is unknown yet
        self._window_end = 0
        self._asked_at = 0.0

    def ask(self, now: float) -> ManifestAsk:
        """Return the request for the next window of bytes, for the caller to send.

        :param now: when it is sent; the window's size follows from how long it takes.
        """
        self._asked_at = now
        self._window_end = len(self._data) + self._window_nbytes
        return ManifestAsk(self.manifest_hash, len(self._data), self._window_nbytes)

    def add(self, piece: ManifestPiece, now: float) -> bytes | ManifestAsk | None:
        """Add a piece; return the whole manifest, or the next request to send.

        Return None if more pieces of the window must come. A piece that answers an
        earlier request is ignored.

        :raises replicas.errors.ReplicasError: the other side does not have the
            manifest, or it is too large or corrupt: the fetch is of no use then.
        """
        if not piece.data:
            raise Gone(f"manifest {self.manifest_hash} is no longer available", hint="")
        if piece.total_nbytes > MANIFEST_NBYTES:
            text = f"a manifest of {piece.total_nbytes:,} bytes exceeds the limit of {MANIFEST_NBYTES:,}"
            raise ManifestMismatch(text, hint="publish fewer tensors, or shorter names")
        if piece.offset != len(self._data):
            return None  # it answers an earlier request
        self._data += piece.data
        if len(self._data) >= piece.total_nbytes:
            whole = bytes(self._data)
            if xxhash.xxh3_128_hexdigest(whole) != self.manifest_hash:
                raise ManifestMismatch(
                    f"the bytes received for manifest {self.manifest_hash} do not match its hash", hint=""
                )
            return whole
        if len(self._data) < self._window_end:
            return None
        took_s = now - self._asked_at
        if took_s < FAST_S:
            self._window_nbytes = min(WINDOW_MAX_NBYTES, 2 * self._window_nbytes)
        elif took_s > SLOW_S:
            self._window_nbytes = max(WINDOW_MIN_NBYTES, self._window_nbytes // 2)
        return self.ask(now)

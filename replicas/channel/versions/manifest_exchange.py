"""Manifests of one channel: sent to others, and fetched once for all waiters.

ManifestAsk -> ManifestPiece, ... -> the cache; through the coordinator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from replicas import errors
from replicas import messages as wire
from replicas.channel.session.hub import Hub, Part
from replicas.core.base.manifest import Manifest
from replicas.core.versions.fetching import Cache, Fetch, pieces

DECODED_NBYTES = 16 * 2**20
"""Limit on the encoded size of manifests that are also kept decoded, in bytes."""


class ManifestExchange(Part):
    """Manifests of one channel.

    :param published: returns the encoded manifest of an open publish here, or None.
    """

    def __init__(self, hub: Hub, published: Callable[[str], bytes | None]) -> None:
        self._hub = hub
        self._published = published
        self._encoded: Cache[bytes] = Cache()
        self._decoded: Cache[Manifest] = Cache(DECODED_NBYTES)
        self._fetches: dict[str, tuple[Fetch, asyncio.Future[bytes]]] = {}

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {wire.ManifestAsk: self._asked, wire.ManifestPiece: self._piece}

    def new_term(self) -> None:
        """End all fetches: the old coordinator's answers will not come."""
        self.fail_all(self._hub.error(errors.Gone, "there is a new coordinator", hint=""))

    def fail_all(self, error: errors.ReplicasError) -> None:
        for manifest_hash in list(self._fetches):
            self._end(manifest_hash, error)

    async def get(self, manifest_hash: str) -> bytes:
        """Return the encoded manifest, kept here or fetched from the coordinator.

        All callers share one fetch, which continues when no caller waits any longer,
        because the version will be offered again.
        """
        known = self._own(manifest_hash)
        if known is not None:
            return known
        if manifest_hash not in self._fetches:
            fetch, coming = Fetch(manifest_hash), self._hub.loop.loop.create_future()
            coming.add_done_callback(_seen)
            self._fetches[manifest_hash] = fetch, coming
            self._hub.send(fetch.ask(time.monotonic()))
        return await asyncio.shield(self._fetches[manifest_hash][1])

    async def decoded(self, manifest_hash: str) -> Manifest:
        known = self._decoded.get(manifest_hash)
        if known is None:
            encoded = await self.get(manifest_hash)
            known = await asyncio.to_thread(Manifest.decode, encoded)
            self._decoded.put(manifest_hash, known, len(encoded))
        return known

    def _own(self, manifest_hash: str) -> bytes | None:
        """Return the encoded manifest if it is known here, else None."""
        known = self._encoded.get(manifest_hash)
        if known is None:
            images = self._hub.held_versions.arena.images().values()
            held = next((image for image in images if image.hash == manifest_hash), None)
            known = held.encode() if held is not None else self._published(manifest_hash)
            if known is not None:
                self._encoded.put(manifest_hash, known, len(known))
        return known

    def _asked(self, ask: wire.ManifestAsk) -> None:
        for piece in pieces(ask, self._own(ask.manifest_hash)):
            self._hub.send(piece)

    def _piece(self, piece: wire.ManifestPiece) -> None:
        if piece.manifest_hash not in self._fetches:
            return
        try:
            answer = self._fetches[piece.manifest_hash][0].add(piece, time.monotonic())
        except errors.ReplicasError as error:
            self._end(piece.manifest_hash, error)
            return
        if isinstance(answer, bytes):
            self._encoded.put(piece.manifest_hash, answer, len(answer))
            self._end(piece.manifest_hash, answer)
        elif answer is not None:
            self._hub.send(answer)

    def _end(self, manifest_hash: str, outcome: bytes | errors.ReplicasError) -> None:
        _, coming = self._fetches.pop(manifest_hash)
        if isinstance(outcome, bytes):
            coming.set_result(outcome)
        else:
            coming.set_exception(outcome)


def _seen(coming: asyncio.Future[bytes]) -> None:
    """Mark the error as retrieved: there may be no waiter."""
    if not coming.cancelled():
        coming.exception()

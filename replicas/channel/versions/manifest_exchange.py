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
from replicas.channel.session.pending import Promise
from replicas.core.base.manifest import Manifest
from replicas.core.versions.fetching import Cache, Fetch, pieces

DECODED_NBYTES = 16 * 2**20
"""Limit on the encoded size of manifests that are also kept decoded, in bytes."""


class ManifestExchange(Part):
    """Gets and sends the manifests (names, dtypes, shapes) of one channel's versions.

    :param published: returns the encoded manifest of an open publish here, or None.
    """

    def __init__(self, hub: Hub, published: Callable[[str], bytes | None]) -> None:
        """Start without manifests.

        :param published: called with the hash of a manifest, on the session thread;
            returns the encoded manifest if an open publish here has it, or None.
        """
        self._hub = hub
        self._published = published
        self._encoded: Cache[bytes] = Cache()
        self._decoded: Cache[Manifest] = Cache(DECODED_NBYTES)
        self._fetches: dict[str, tuple[Fetch, Promise[bytes]]] = {}

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {wire.ManifestAsk: self._asked, wire.ManifestPiece: self._piece}

    def new_term(self) -> None:
        """Fail all fetches with Gone: the old coordinator's answers will not come."""
        self.fail_all(self._hub.error(errors.Gone, "the coordinator was restarted meanwhile", hint=""))

    def fail_all(self, error: errors.ReplicasError) -> None:
        """Fail all fetches under way with ``error``."""
        for manifest_hash in list(self._fetches):
            self._fetches.pop(manifest_hash)[1].fail(error)

    async def get(self, manifest_hash: str) -> bytes:
        """Return the encoded manifest of this hash: the known one, or a fetched one.

        A manifest lists names, shapes and dtypes of a version. It is fetched through
        the coordinator. All callers share one fetch, which continues when no caller
        waits any longer, because the version will be offered again.

        :raises replicas.errors.ReplicasError: no member has it, or the session ended.
        """
        known = self._own(manifest_hash)
        if known is not None:
            return known
        if manifest_hash not in self._fetches:
            fetch = Fetch(manifest_hash)
            self._fetches[manifest_hash] = fetch, self._hub.pending("a manifest")
            self._hub.send(fetch.ask(time.monotonic()))
        return await self._fetches[manifest_hash][1]

    async def decoded(self, manifest_hash: str) -> Manifest:
        """Return the manifest of this hash, fetched if need be; decode it on a thread.

        Small ones are kept decoded.

        :raises replicas.errors.ReplicasError: no member has it, or the session ended.
        """
        known = self._decoded.get(manifest_hash)
        if known is None:
            encoded = await self.get(manifest_hash)
            known = await asyncio.to_thread(Manifest.decode, encoded)
            self._decoded.put(manifest_hash, known, len(encoded))
        return known

    def _own(self, manifest_hash: str) -> bytes | None:
        """Return the encoded manifest if it is here, else None; fetch nothing.

        It may be in the cache, of a version held, or of an open publish; cache it then.
        """
        known = self._encoded.get(manifest_hash)
        if known is None:
            images = self._hub.held_versions.arena.images().values()
            held = next((image for image in images if image.hash == manifest_hash), None)
            known = held.encode() if held is not None else self._published(manifest_hash)
            if known is not None:
                self._encoded.put(manifest_hash, known, len(known))
        return known

    def _asked(self, ask: wire.ManifestAsk) -> None:
        """Send the pieces that the coordinator asks for; an empty one if unknown."""
        for piece in pieces(ask, self._own(ask.manifest_hash)):
            self._hub.send(piece)

    def _piece(self, piece: wire.ManifestPiece) -> None:
        """Add a received piece to its fetch; ask for the next, or end the fetch.

        At the end keep the manifest and resolve the waits, or fail them if it cannot be
        had. Ignore a piece without a fetch.
        """
        if piece.manifest_hash not in self._fetches:
            return
        try:
            answer = self._fetches[piece.manifest_hash][0].add(piece, time.monotonic())
        except errors.ReplicasError as error:
            self._fetches.pop(piece.manifest_hash)[1].fail(error)
            return
        if isinstance(answer, bytes):
            self._encoded.put(piece.manifest_hash, answer, len(answer))
            self._fetches.pop(piece.manifest_hash)[1].resolve(answer)
        elif answer is not None:
            self._hub.send(answer)

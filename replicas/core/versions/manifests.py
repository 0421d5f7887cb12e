"""The manifests that members announce, and the channel's current one.

A model keeps its tensors from version to version, and one manifest of 100,000 tensors
takes half a second to decode, join and hash. So that is done off the event loop
(:class:`~replicas.core.effects.Read`), and the result is reused for equal manifests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from replicas import errors
from replicas.core.effects import Effect, Read, Send
from replicas.core.moving.payload import Payload
from replicas.core.versions.fetching import Cache, Fetch
from replicas.core.versions.manifest import Manifest, PartManifest, check_size, difference, merge_parts
from replicas.core.versions.publishes import Publish
from replicas.messages import ManifestPiece, Meta
from replicas.messages.identity import Member

__all__ = ["Joined", "Manifests", "read"]

JOINED_NBYTES = 32 * 2**20
"""Limit of the cache of decoded manifests, counted by their encoded size."""


class Joined(NamedTuple):
    """The manifest joined from those of all ranks."""

    manifest: Manifest
    encoded: bytes


def read(effect: Read) -> Joined:
    """Run a :class:`~replicas.core.effects.Read`: all slow work on manifests is here.

    :raises replicas.errors.ManifestMismatch: they are malformed, do not fit each other,
        or are too large together.
    """
    if effect.whole:
        encoded = effect.encoded[0]
        manifest = Manifest.decode(encoded)
    else:
        manifest = merge_parts([PartManifest.decode_only(part) for part in effect.encoded])
        encoded = manifest.encode()
    check_size(manifest)
    _ = manifest.hash, manifest.data_nbytes  # computed here, cached in it
    return Joined(manifest, encoded)


class Manifests:
    """The manifests of one channel.

    :ivar current: that of its newest commit.
    """

    def __init__(self, channel: str, out: list[Effect]) -> None:
        self._channel = channel
        self._out = out
        self._encoded: Cache[bytes] = Cache()
        self._fetches: dict[Member, Fetch] = {}
        self._joined: Cache[Joined] = Cache(JOINED_NBYTES)
        self._being_read: set[str] = set()
        self._failed: dict[str, errors.ReplicasError] = {}
        self.current: Manifest | None = None

    # ------------------------------------------------------------ fetching

    def get(self, manifest_hash: str) -> bytes | None:
        """Return the encoded manifest if it is known here."""
        return self._encoded.get(manifest_hash)

    def fetch(self, member: Member, manifest_hash: str, now: float) -> None:
        """Ask the member for the manifest, unless another fetch from it is under way.

        When that one has ended, the callers that still wait ask again.
        """
        if member not in self._fetches:
            self._fetches[member] = fetch = Fetch(manifest_hash)
            self._out.append(Send(member, fetch.ask(now)))

    def add(self, member: Member, piece: ManifestPiece, now: float) -> bool:
        """Add a piece; return whether it completed a manifest.

        :raises replicas.errors.ReplicasError: the member cannot provide it.
        """
        fetch = self._fetches.get(member)
        if fetch is None or fetch.manifest_hash != piece.manifest_hash:
            return False
        try:
            answer = fetch.add(piece, now)
        except errors.ReplicasError:
            del self._fetches[member]
            raise
        if isinstance(answer, bytes):
            del self._fetches[member]
            self._encoded.put(piece.manifest_hash, answer, len(answer))
            return True
        if answer is not None:
            self._out.append(Send(member, answer))
        return False

    def lost(self, member: Member) -> None:
        self._fetches.pop(member, None)

    # ------------------------------------------------------------ joining

    def joined(self, key: str, encoded: Sequence[bytes], *, whole: bool = False) -> Joined | None:
        """Return the joined manifest; None while it is being read.

        :raises replicas.errors.ManifestMismatch: they cannot be joined.
        """
        if key in self._failed:
            raise self._failed.pop(key)
        found = self._joined.get(key)
        if found is None and key not in self._being_read:
            self._being_read.add(key)
            self._out.append(Read(key, tuple(encoded), whole))
        return found

    def read(self, effect: Read, found: Joined | errors.ReplicasError) -> None:
        """Take the result of a Read effect."""
        self._being_read.discard(effect.key)
        if isinstance(found, Joined):
            self._joined.put(effect.key, found, len(found.encoded))
        else:
            self._failed[effect.key] = found

    def payload(self, publish: Publish) -> Payload | None:
        """Return the publish's payload; None while its manifests are being joined.

        :raises errors.ManifestMismatch: the parts do not fit each other, or the
            channel's manifest.
        """
        carriers = publish.carriers
        if not carriers:
            raise errors.InternalError(f"publish {publish.number} of {publish.replica_name} has no bytes")
        key = "+".join(publish.packed[one].manifest_hash for one in carriers)
        joined = self.joined(key, [publish.manifests[one] for one in carriers])
        if joined is None:
            return None
        manifest = joined.manifest
        if not publish.new_manifest:
            self._check(manifest, publish.version)
        return Payload(
            version=publish.version,
            manifest_hash=manifest.hash,
            manifest=manifest,
            encoded=joined.encoded,
            nbytes=manifest.data_nbytes,
            device="cuda" if any(packed.device == "cuda" for packed in publish.packed.values()) else "cpu",
            meta=cast("Meta", publish.meta),
            part_owners=() if manifest.parts is None else tuple(carriers),
            digest=publish.packed[carriers[0]].digest if manifest.parts is None else "",
            filling=next((one for one in carriers if publish.packed[one].streaming), None),
            part_digests={one: publish.packed[one].digest for one in carriers} if manifest.parts is not None else {},
        )

    def _check(self, manifest: Manifest, version: int) -> None:
        if self.current is None or manifest.hash == self.current.hash:
            return
        text = difference(self.current, manifest)
        if text:
            raise errors.ManifestMismatch(
                f"the tensors of version {version} do not fit the manifest of channel {self._channel!r}: {text}",
                channel=self._channel,
                version=version,
            )

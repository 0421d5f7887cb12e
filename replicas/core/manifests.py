"""The manifests that members announce, and the one that the channel has.

A model keeps its tensors from version to version, and a manifest of 100,000 tensors takes half a second to decode, join and
hash: what was made of the same uploads the last time is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from replicas import errors
from replicas.core.identity import Member
from replicas.core.manifest import Manifest, PartManifest, difference, merge_parts
from replicas.core.payload import Payload
from replicas.core.publishes import Publish
from replicas.messages import Meta, UploadManifest

__all__ = ["Manifests"]

KEPT_NBYTES = 64 * 2**20
"""Of one member's manifests: beyond it only the newest is kept (nobody has so many)."""


class _Joined(NamedTuple):
    """What was made of these uploads."""

    uploads: tuple[bytes, ...]
    manifest: Manifest
    encoded: bytes


class Manifests:
    """Of one channel. ``current``: that of its newest commit."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._uploads: dict[Member, dict[str, bytes]] = {}
        self.current: Manifest | None = None
        self._joined: _Joined | None = None

    def upload(self, member: Member, message: UploadManifest) -> None:
        """Keep it for the member's session."""
        kept = self._uploads.setdefault(member, {})
        kept.pop(message.manifest_hash, None)
        kept[message.manifest_hash] = message.manifest
        while len(kept) > 1 and sum(map(len, kept.values())) > KEPT_NBYTES:
            del kept[next(iter(kept))]

    def lost(self, member: Member) -> None:
        self._uploads.pop(member, None)

    def prepare(self, publish: Publish) -> tuple[Payload, Sequence[Member]]:
        """Join what the ranks packed into one payload; also the members that have its bytes.

        :raises errors.ManifestMismatch: the parts do not fit each other, or the channel's manifest.
        """
        carriers = sorted(member for member, packed in publish.packed.items() if packed.manifest_hash)
        if not carriers:
            raise errors.InternalError(f"publish {publish.number} of {publish.replica_name} has no bytes")
        uploads = [self._uploads.get(one, {}).get(publish.packed[one].manifest_hash) for one in carriers]
        if None in uploads:
            raise errors.InternalError("a manifest was announced and never sent")
        joined = self._join(tuple(cast("list[bytes]", uploads)))
        manifest = joined.manifest
        if not publish.new_manifest:
            self._check(manifest, publish.version)
        payload = Payload(
            version=publish.version,
            manifest_hash=manifest.hash,
            manifest=joined.encoded,
            nbytes=manifest.data_nbytes,
            device="cuda" if any(packed.device == "cuda" for packed in publish.packed.values()) else "cpu",
            meta=cast("Meta", publish.meta),
            part_owners=() if manifest.parts is None else tuple(carriers),
            digest=publish.packed[carriers[0]].digest if manifest.parts is None else "",
            filling=next((one for one in carriers if publish.packed[one].streaming), None),
            part_digests={one: publish.packed[one].digest for one in carriers} if manifest.parts is not None else {},
        )
        return payload, carriers

    def _join(self, uploads: tuple[bytes, ...]) -> _Joined:
        if self._joined is None or self._joined.uploads != uploads:
            manifest = merge_parts([PartManifest.decode(upload) for upload in uploads])
            self._joined = _Joined(uploads, manifest, manifest.encode())
        return self._joined

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

    def committed(self, payload: Payload) -> Manifest:
        """This is the channel's manifest from now on."""
        joined = self._joined
        known = joined is not None and joined.encoded == payload.manifest
        self.current = joined.manifest if joined and known else Manifest.decode(payload.manifest)
        return self.current

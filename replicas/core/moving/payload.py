"""The bytes of one version, as a transfer carries them."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.core.versions.manifest import Manifest
from replicas.messages import Meta
from replicas.messages.identity import Member

__all__ = ["Payload"]


@dataclass(slots=True)
class Payload:
    """One version's bytes.

    :ivar encoded: its manifest, as it is sent.
    :ivar digest: empty until a member with the whole image has computed it.
    :ivar filling: the member still filling its slot with it while it is already sent.
    """

    version: int
    manifest_hash: str
    manifest: Manifest
    encoded: bytes
    nbytes: int
    device: str
    meta: Meta
    digest: str = ""
    part_owners: tuple[Member, ...] = ()
    filling: Member | None = None

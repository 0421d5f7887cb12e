"""What a transfer carries, and what it needs of its channel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from replicas.core.effects import Effect
from replicas.core.keeping import Keeping
from replicas.core.lanes import Lane, Lanes
from replicas.core.links import Links
from replicas.core.manifest import Manifest
from replicas.core.roster import Roster
from replicas.messages import Backend, Meta
from replicas.messages.identity import Member

__all__ = ["Payload", "TransferContext"]


@dataclass(slots=True)
class Payload:
    """One version's bytes. ``encoded``: its manifest, as it is sent. ``digest`` is empty until somebody with the whole image
    has computed it.

    ``filling``: who still fills its slot with it, while it is sent already.
    """

    version: int
    manifest_hash: str
    manifest: Manifest
    encoded: bytes
    nbytes: int
    device: str
    meta: Meta
    digest: str = ""
    part_digests: dict[Member, str] = field(default_factory=dict)
    part_owners: tuple[Member, ...] = ()
    filling: Member | None = None


class TransferContext(Protocol):
    """What a transfer needs of its channel."""

    roster: Roster
    lanes: Lanes
    keeping: Keeping
    links: Links
    out: list[Effect]

    def next_id(self) -> int: ...

    def idle_lane(self, members: tuple[Member, ...], backend: Backend) -> Lane | None: ...

    def retried(self, reason: str) -> None: ...

    def others_wait(self, now: float) -> bool: ...

    def quarantine(self, member: Member, why: str, now: float) -> None: ...

    def slow(self, member: Member, now: float) -> None: ...

    def apart(self, member: Member) -> None: ...

"""What the coordinator sends to a member."""

from __future__ import annotations

from typing import Literal

import msgspec

from replicas.messages.identity import Member
from replicas.messages.values import (
    Backend,
    Beacon,
    ChannelSettings,
    ManifestAsk,
    ManifestPiece,
    Meta,
    ReceiptData,
    Segment,
    SlotPlace,
    WireError,
)

__all__ = [
    "Ack",
    "Assigned",
    "Commit",
    "Describe",
    "Discard",
    "FromCoordinator",
    "LaneAhead",
    "LaneDrop",
    "LaneForm",
    "Locate",
    "OperationEnd",
    "OperationGo",
    "OperationSettled",
    "PublishAdmitted",
    "PublishEnd",
    "ReceiveGrant",
    "Refused",
    "Released",
    "TransferCancel",
    "TransferGo",
    "TransferOffer",
    "View",
    "WatchEnd",
    "Welcome",
]


class _FromCoordinator(msgspec.Struct, frozen=True, tag=True):
    pass


class Welcome(_FromCoordinator, frozen=True):
    """Answer to Hello. ``address``: the IP address by which the coordinator sees this
    member.

    ``publishes``: how many publishes the replica has made, so that a rank that joins
    again counts on from there.
    """

    term: int
    settings: ChannelSettings
    received: int
    epoch: int
    address: str
    latest: int = 0
    publishes: int = 0


class Refused(_FromCoordinator, frozen=True):
    """The session is over: Hello was not acceptable, or the member was fenced later. Do
    not reconnect."""

    error: WireError


class Ack(_FromCoordinator, frozen=True):
    """Carries only the frame's ack."""


class Locate(_FromCoordinator, frozen=True):
    """Find out on whose machine you are; answered by ``Located``."""

    beacons: tuple[Beacon, ...]


class View(_FromCoordinator, frozen=True):
    """A new epoch. ``since`` 0: of these members; else ``members`` are those who have
    come since that epoch, which you know, and ``left`` those who have gone.

    ``heartbeat_interval_s``: how often to send heartbeats from now on; 0: as before.
    """

    epoch: int
    members: tuple[Member, ...]
    since: int = 0
    left: tuple[Member, ...] = ()
    heartbeat_interval_s: float = 0.0


class PublishAdmitted(_FromCoordinator, frozen=True):
    publish: int
    version: int


class PublishEnd(_FromCoordinator, frozen=True):
    """The verdict: exactly one of ``receipt`` and ``error``."""

    publish: int
    receipt: ReceiptData | None = None
    error: WireError | None = None


class LaneForm(_FromCoordinator, frozen=True):
    """Form a process group: ``prefix`` is a fresh key prefix on the store; ``rank`` of
    ``size`` is yours.

    ``addresses``: IP address of each rank, in order (yours is the one to bind);
    ``names``: of the members, for messages. ``probe``: nothing will be sent in it; move
    a few bytes each way before you say that it has formed. ``secret``: of the lane's
    members, by which they know what they wrote into the store.
    """

    lane: str
    prefix: str
    store_host: str
    store_port: int
    rank: int
    size: int
    backend: Backend
    addresses: tuple[str, ...]
    deadline_s: float
    names: tuple[str, ...] = ()
    probe: bool = False
    secret: bytes = b""


class LaneAhead(_FromCoordinator, frozen=True):
    """The channel has members on more than one host: lanes will be formed, so have a
    sidecar ready."""


class LaneDrop(_FromCoordinator, frozen=True):
    """Kill the lane's sidecar."""

    lane: str


class TransferOffer(_FromCoordinator, frozen=True):
    """Get ready to send or to receive ``version``, or map it at once. Ask for its
    manifest if you lack it.

    A sender of mode ``"parts"`` sends its own publish slot, one of mode ``"image"`` a
    whole version that it holds. A mapper opens ``place`` and answers ``TransferDone``
    at once. ``digest``: of the image's data (or of the sender's part), where it is
    known. ``streaming``: the sender's slot is still being filled by its own rank.
    ``sharing``: how many members of the receiver's host get the version together, and
    will mostly load it at the same time.
    """

    transfer: int
    version: int
    role: Literal["send", "receive", "map"]
    mode: Literal["image", "parts"]
    manifest_hash: str
    meta: Meta
    deadline_s: float
    digest: str = ""
    place: SlotPlace | None = None
    streaming: bool = False
    sharing: int = 1


class TransferGo(_FromCoordinator, frozen=True):
    """Move the bytes. ``routes``: for each part (one for mode ``"image"``) the lane
    ranks that it goes through, its owner first; those that are not named take no part
    in it, and an empty route is a part that all have otherwise.

    ``places``: parts that lie on the receiver's own host, which it copies from there.
    An empty ``lane``: all of them do.
    """

    transfer: int
    lane: str
    routes: tuple[tuple[int, ...], ...]
    deadline_s: float
    places: tuple[SlotPlace, ...] = ()


class Released(_FromCoordinator, frozen=True):
    """No member of your host that can be heard has ``version`` any more: its memory
    need not be waited for."""

    version: int


class TransferCancel(_FromCoordinator, frozen=True):
    """Forget this transfer; a half-filled slot becomes free (once its sidecar is
    gone)."""

    transfer: int


class Commit(_FromCoordinator, frozen=True):
    """``version`` is decided."""

    version: int
    digest: str
    manifest_hash: str


class Discard(_FromCoordinator, frozen=True):
    """``version`` will never be committed: free its slot."""

    version: int


class Assigned(_FromCoordinator, frozen=True):
    """Another rank of your replica was granted ``version``: keep it until you have
    loaded it."""

    version: int


class ReceiveGrant(_FromCoordinator, frozen=True):
    ask: int
    version: int


class WatchEnd(_FromCoordinator, frozen=True):
    watch: int
    version: int


class OperationGo(_FromCoordinator, frozen=True):
    """Run it, or run it again over those that are left (``attempt`` > 1), on the inputs
    as they were posted.

    ``participants`` and ``segments`` (what each one posted) are in the order of lane
    ranks. ``places``: index of each participant among those of the first attempt, by
    which ``scatter`` and ``reduce_scatter`` find a participant's segment.
    """

    post: int
    operation: int
    lane: str
    participants: tuple[Member, ...]
    lane_ranks: tuple[int, ...]
    segments: tuple[tuple[Segment, ...], ...]
    root: int
    deadline_s: float
    ref: str = ""
    attempt: int = 1
    places: tuple[int, ...] = ()


class OperationSettled(_FromCoordinator, frozen=True):
    """What became of the operation ``ref``, which ended here with its outcome
    unknown."""

    ref: str
    applied: bool


class Describe(_FromCoordinator, frozen=True):
    """Say what you know of ``version``; answered by ``Described``."""

    version: int


class OperationEnd(_FromCoordinator, frozen=True):
    post: int
    receipt: ReceiptData | None = None
    error: WireError | None = None


FromCoordinator = (
    Welcome
    | Refused
    | Ack
    | Locate
    | View
    | PublishAdmitted
    | PublishEnd
    | LaneAhead
    | LaneForm
    | LaneDrop
    | TransferOffer
    | TransferGo
    | TransferCancel
    | Released
    | Commit
    | Discard
    | Assigned
    | ReceiveGrant
    | WatchEnd
    | OperationGo
    | OperationEnd
    | OperationSettled
    | Describe
    | ManifestAsk
    | ManifestPiece
)

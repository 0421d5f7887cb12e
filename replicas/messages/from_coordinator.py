"""Messages from the coordinator to a member."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, Union

import msgspec

from replicas.messages.carried import (
    Beacon,
    ChannelSettings,
    GroupSpec,
    ManifestAsk,
    ManifestPiece,
    Meta,
    PartPull,
    ReceiptData,
    Segment,
    SlotPlace,
    WireError,
)
from replicas.messages.identity import Member
from replicas.messages.version_orders import Steered


class _FromCoordinator(msgspec.Struct, frozen=True, tag=True):
    pass


class Welcome(_FromCoordinator, frozen=True):
    """Answer to Hello.

    :ivar replica: index of the member's replica.
    :ivar address: the member's IP address as seen by the coordinator.
    :ivar publishes: number of publishes of the replica so far; a rank that rejoins
        continues with it.
    """

    term: int
    settings: ChannelSettings
    received: int
    epoch: int
    address: str
    replica: int
    latest: int = 0
    publishes: int = 0


class Refused(_FromCoordinator, frozen=True):
    """The session is over: Hello refused, or the member fenced. Do not reconnect."""

    error: WireError


class Ack(_FromCoordinator, frozen=True):
    """An empty message for the frame's ack."""


class Locate(_FromCoordinator, frozen=True):
    """Find the beacon that is on your host; answered by ``Located``."""

    beacons: tuple[Beacon, ...]


class View(_FromCoordinator, frozen=True):
    """A new epoch.

    :ivar since: 0 if ``members`` are all members. Otherwise an epoch that the receiver
        knows, since which ``members`` have joined and ``left`` have gone.
    :ivar heartbeat_interval_s: interval of heartbeats from now on; 0 if unchanged.
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
    """Form the process group of a lane."""

    lane: str
    group: GroupSpec


class LaneAhead(_FromCoordinator, frozen=True):
    """The channel now has members on several hosts: get a sidecar ready for lanes."""


class LaneDrop(_FromCoordinator, frozen=True):
    """Kill the lane's sidecar."""

    lane: str


class TransferOffer(_FromCoordinator, frozen=True):
    """Get ready to send or receive ``version``, or map, serve or pull it now.

    A member that lacks the manifest asks for it. A sender or receiver answers
    ``TransferReady`` when its slot is full, or reserved; the bytes are moved by an
    operation (:class:`OperationGo`), after which it answers ``TransferDone``. A mapper
    opens ``place`` and answers ``TransferDone``. A server lets all members that know
    ``secret`` pull its ``part`` (-1 for the whole version), until the transfer is
    cancelled. A puller gets each of ``pulls`` from the first holder that works, serves
    its own bytes meanwhile, and copies parts at ``places``, which are on its host. It
    answers ``TransferReady`` when it begins. A repeated offer means that the pulled
    bytes were wrong: pull the wrong ones again.

    :ivar digest: digest of the image's data (or of the sender's part), if known.
    :ivar streaming: True while the sender's own rank still fills the slot.
    :ivar base: a version that server and puller hold with the same digest, so that
        blocks may be sent as deltas to it; 0 for none.
    :ivar sharing: number of members on the receiver's host that get the version
        together, and will probably load it at the same time.
    """

    transfer: int
    version: int
    role: Literal["send", "receive", "map", "serve", "pull"]
    mode: Literal["image", "parts"]
    manifest_hash: str
    meta: Meta
    deadline_s: float
    digest: str = ""
    place: SlotPlace | None = None
    streaming: bool = False
    sharing: int = 1
    secret: bytes = b""
    pulls: tuple[PartPull, ...] = ()
    places: tuple[SlotPlace, ...] = ()
    part: int = -1
    base: int = 0


class Released(_FromCoordinator, frozen=True):
    """All readers of ``version`` on your host are gone or silent: wait for none."""

    version: int


class TransferCancel(_FromCoordinator, frozen=True):
    """Forget this transfer; a half-filled slot is freed once its sidecar is gone."""

    transfer: int


class Commit(_FromCoordinator, frozen=True):
    """``version`` is committed.

    ``content``: the version whose bytes it has; 0: its own.
    """

    version: int
    digest: str
    content: int = 0


class Labels(_FromCoordinator, frozen=True):
    """The version of each label, and the contents (``kept``) that must not be evicted.

    It replaces what was told before.
    """

    labels: dict[str, int]
    kept: tuple[int, ...]


class VersionAnswer(_FromCoordinator, frozen=True):
    """Answer to ``VersionAsk``: exactly one of ``decided`` and ``error``."""

    ask: int
    decided: Steered | None = None
    error: WireError | None = None


class Discard(_FromCoordinator, frozen=True):
    """``version`` will never be committed: free its slot."""

    version: int


class Assigned(_FromCoordinator, frozen=True):
    """Another rank of your replica was granted ``version``: keep it until loaded."""

    version: int


class ReceiveGrant(_FromCoordinator, frozen=True):
    ask: int
    version: int


class LoadDecided(_FromCoordinator, frozen=True):
    """Load ``version`` now, as all targets do; with an ``error``, do not load it."""

    version: int
    error: WireError | None = None


class WatchEnd(_FromCoordinator, frozen=True):
    """All live target replicas have loaded ``version``, or none will.

    ``failed`` has the reason, by name, of each that keeps an older version.
    """

    watch: int
    version: int
    failed: dict[str, str] = {}


class OperationGo(_FromCoordinator, frozen=True):
    """Run the operation, or rerun it on the posted inputs with the participants left.

    :ivar transfer: number of the transfer whose slot of this member is broadcast, or
        filled, in place of posted tensors; 0 for a posted operation.

    :ivar attempt: above 1 for a rerun.
    :ivar participants: in the order of lane ranks, as are ``segments``.
    :ivar places: index of each participant in the first attempt, by which ``scatter``
        and ``reduce_scatter`` find its segment.
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
    transfer: int = 0


class OperationSettled(_FromCoordinator, frozen=True):
    """The outcome of the operation ``ref``, which was unknown to this member."""

    ref: str
    applied: bool


class Describe(_FromCoordinator, frozen=True):
    """Report what you hold of ``version``; answered by ``Described``."""

    version: int


class OperationEnd(_FromCoordinator, frozen=True):
    post: int
    receipt: ReceiptData | None = None
    error: WireError | None = None


if TYPE_CHECKING:
    FromCoordinator: TypeAlias = _FromCoordinator | ManifestAsk | ManifestPiece
else:  # msgspec decodes to a closed set of types: those above
    FromCoordinator = Union[(*_FromCoordinator.__subclasses__(), ManifestAsk, ManifestPiece)]

"""Messages from a member to the coordinator."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from replicas.messages.carried import (
    Beacon,
    HeldVersion,
    ManifestAsk,
    ManifestPiece,
    Meta,
    OperationKind,
    ReduceOp,
    Segment,
    SlotPlace,
    WireError,
)
from replicas.messages.identity import Member, ProcessIdentity

__all__ = [
    "Bye",
    "CanLoad",
    "CarrierUp",
    "Described",
    "Dropped",
    "Filled",
    "FromMember",
    "Heartbeat",
    "Hello",
    "LaneFailed",
    "LaneFormed",
    "LaneMoved",
    "LoadFailed",
    "Loaded",
    "Located",
    "OperationDone",
    "OperationFailed",
    "OperationPost",
    "PackFailed",
    "Packed",
    "Progress",
    "PublishBegin",
    "ReceiveAsk",
    "ReceiveCancel",
    "Resumed",
    "TransferDone",
    "TransferFailed",
    "TransferMoved",
    "TransferReady",
    "WatchLoaded",
]


class _FromMember(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_FromMember, frozen=True):
    """First message of a session.

    ``resume_term``: 0 for a new join, else the term whose session continues. ``epoch``,
    ``latest`` (with its digest), ``assigned`` and ``publishes``: the member's
    knowledge, for a coordinator of another term. ``nccl_env``: the process's NCCL_*
    variables. ``nccl_version``: empty without NCCL. ``lent``: versions that this member
    no longer holds, but whose memory others may still have mapped. ``any_replica``: the
    coordinator chooses the index of its replica. ``proof``: that the process runs under
    a shim of this generation (:func:`~replicas.messages.identity.proof_of`); empty:
    others have started it. ``adopted``, ``unadopted``: the newest version that it knows
    adopted, and the newest that it knows rejected, or has refused.
    """

    protocol: int
    run: str
    channel: str
    group: str
    replica: int
    rank: int
    world_size: int
    incarnation: str
    generation: int
    process: ProcessIdentity
    observe: bool = False
    info: dict[str, str] = {}
    torch_version: str = ""
    nccl_version: str = ""
    nccl_env: dict[str, str] = {}
    cuda_devices: tuple[str, ...] = ()
    resume_term: int = 0
    received: int = 0
    held: tuple[HeldVersion, ...] = ()
    loaded: int = 0
    epoch: int = 0
    latest: int = 0
    latest_digest: str = ""
    assigned: int = 0
    publishes: int = 0
    beacon: Beacon | None = None
    lent: tuple[int, ...] = ()
    any_replica: bool = False
    proof: str = ""
    adopted: int = 0
    unadopted: int = 0

    @property
    def member(self) -> Member:
        return Member(self.group, self.replica, self.rank, self.incarnation)


class Located(_FromMember, frozen=True):
    """Answer to ``Locate``: index of the first beacon that was verified, or -1."""

    found: int


class Resumed(_FromMember, frozen=True):
    """All unfinished work of this member has been announced to the new coordinator."""


class Described(_FromMember, frozen=True):
    """Answer to ``Describe``: a complete version that this member holds.

    An empty ``manifest_hash``: it holds it no longer.
    """

    version: int
    digest: str
    manifest_hash: str
    meta: Meta
    device: str


class Heartbeat(_FromMember, frozen=True):
    """Sign of life, every ``heartbeat_interval_s``; also carries the ack."""


class Progress(_FromMember, frozen=True):
    """The user's step counter has changed."""

    step: int


class Bye(_FromMember, frozen=True):
    """The member leaves in good order."""

    reason: str = ""


class PublishBegin(_FromMember, frozen=True):
    """A publish begins.

    ``resumed``: it began under another coordinator, which gave it the number
    ``version``.
    """

    publish: int
    version: int | None
    deadline_s: float
    meta: Meta = {}
    new_manifest: bool = False
    resumed: bool = False


class Packed(_FromMember, frozen=True):
    """The slot is filled, and stays pinned until the verdict.

    ``streaming``: it is still being filled, and its filled beginning may be sent
    already; :class:`Filled` follows with the values not known yet. ``manifest_hash``:
    empty on a rank that carries no bytes (leader mode, not the leader). ``digest``: of
    the packed bytes (an image's data, or a part), ready ``digest_s`` after the copy.
    ``place``: of the slot. ``hold_s``: time for which the copy held the caller's CUDA
    stream, 0 without a GPU. ``meta``: where it was not known when the publish began;
    the leader's counts.
    """

    publish: int
    manifest_hash: str
    nbytes: int
    device: str
    wait_s: float
    pack_s: float
    digest: str = ""
    place: SlotPlace | None = None
    digest_s: float = 0.0
    streaming: bool = False
    hold_s: float = 0.0
    meta: Meta | None = None


class Filled(_FromMember, frozen=True):
    """The slot of a streaming publish is full."""

    publish: int
    pack_s: float
    digest: str
    digest_s: float
    place: SlotPlace
    hold_s: float = 0.0


class PackFailed(_FromMember, frozen=True):
    publish: int
    error: WireError


class LaneFormed(_FromMember, frozen=True):
    lane: str
    seconds: float


class LaneFailed(_FromMember, frozen=True):
    """The lane's sidecar or process group failed, while forming or later.

    ``links``: pairs of addresses between which its members could not connect.
    """

    lane: str
    error: WireError
    links: tuple[tuple[str, str], ...] = ()


class LaneMoved(_FromMember, frozen=True):
    """Progress of the own sidecar in a lane's current request, about once a second.

    ``sent`` and ``received``: bytes so far. ``still_s``: time without any bytes moved
    while waiting for the network. ``rtt_s``: longest round trip to another member.
    ``held_up``: addresses to which bytes wait because the network takes them too slowly
    or not at all.
    """

    lane: str
    sent: int
    received: int
    still_s: float
    rtt_s: float = 0.0
    held_up: tuple[str, ...] = ()


class TransferReady(_FromMember, frozen=True):
    """The slot is pinned, or reserved."""

    transfer: int


class TransferDone(_FromMember, frozen=True):
    """This member's part of the transfer (send, receive or map) is done.

    ``image_digest``: of the whole image's data (senders of an image and every receiver;
    else empty). ``part_digests``: by number of the part, of each one sent or received
    over the lane (mode ``"parts"``). ``place``: of the version in this member's memory
    now. ``received``: bytes by holder, of a version that was pulled. ``wrong``: those
    that served wrong bytes, and which. ``holders``: as in :class:`TransferFailed`.
    """

    transfer: int
    image_digest: str
    part_digests: dict[int, str]
    transfer_s: float
    verify_s: float
    place: SlotPlace | None = None
    received: dict[str, int] = {}
    holders: dict[str, str] = {}
    wrong: dict[str, str] = {}


class TransferMoved(_FromMember, frozen=True):
    """Progress of a pull, about once a second: bytes of the version so far."""

    transfer: int
    received: int


class TransferFailed(_FromMember, frozen=True):
    """``holders``: those from whom nothing, or little, gets here, and why, by name."""

    transfer: int
    error: WireError
    holders: dict[str, str] = {}


class CarrierUp(_FromMember, frozen=True):
    """This member's carrier listens at its address. ``port`` 0: it has none now.

    ``certificate_hash``: SHA-256 of the certificate that it shows, in hexadecimal.
    """

    port: int
    certificate_hash: str = ""


class Dropped(_FromMember, frozen=True):
    """The slot of this version was reused for another one."""

    version: int


class ReceiveAsk(_FromMember, frozen=True):
    """Ask for a committed version newer than ``after``.

    With a bound, ``after`` may be less than the version that the rank serves: it asks
    for that one again, if there is no newer one.

    ``at_least``: minimum of the version's number or, with a ``key``, of the number of
    that name in its publisher's ``meta``.
    """

    ask: int
    after: int
    at_least: int | float = 0
    key: str = ""


class ReceiveCancel(_FromMember, frozen=True):
    ask: int


class Loaded(_FromMember, frozen=True):
    version: int
    load_s: float


class LoadFailed(_FromMember, frozen=True):
    """A load has failed, and this member may hold a part of the version only.

    ``kept``: it has loaded nothing of it, and goes on with the version that it has.
    """

    version: int
    error: WireError
    kept: bool = False


class CanLoad(_FromMember, frozen=True):
    """This rank can load a version that it was granted; answered by ``LoadDecided``.

    ``whole``: it has checked for all ranks of its replica.
    """

    version: int
    whole: bool = False


class WatchLoaded(_FromMember, frozen=True):
    """Ask to be told when every live target replica has loaded ``version`` or newer.

    It replaces this member's earlier watch.
    """

    watch: int
    version: int


class OperationPost(_FromMember, frozen=True):
    """A member posts an operation.

    ``root``: name of the root, source or destination (``group/replica`` or
    ``group/replica/rank``), or empty. ``segments``: of ``recv`` empty to accept any; of
    ``scatter`` the root's inputs, one for each participant, and on the others the
    output or empty. ``applied``: refs of the newest operations whose results this
    member wrote; ``unsettled``: refs of those that ended here with an unknown outcome.
    """

    post: int
    kind: OperationKind
    segments: tuple[Segment, ...]
    deadline_s: float
    reduce_op: ReduceOp = "sum"
    root: str = ""
    step: int | None = None
    device: str = "cpu"
    applied: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()


class OperationDone(_FromMember, frozen=True):
    operation: int
    seconds: float


class OperationFailed(_FromMember, frozen=True):
    operation: int
    error: WireError


FromMember: TypeAlias = (
    Hello
    | Located
    | Resumed
    | Described
    | Heartbeat
    | Progress
    | Bye
    | ManifestAsk
    | ManifestPiece
    | PublishBegin
    | Packed
    | Filled
    | PackFailed
    | LaneFormed
    | LaneFailed
    | LaneMoved
    | TransferReady
    | TransferDone
    | TransferFailed
    | TransferMoved
    | CarrierUp
    | Dropped
    | ReceiveAsk
    | ReceiveCancel
    | Loaded
    | LoadFailed
    | CanLoad
    | WatchLoaded
    | OperationPost
    | OperationDone
    | OperationFailed
)

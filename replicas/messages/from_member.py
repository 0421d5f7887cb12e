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

    :ivar resume_term: 0 for a new join, else the term whose session continues.
    :ivar epoch: knowledge for a coordinator of another term, as are ``latest`` (with
        its digest), ``assigned`` and ``publishes``.
    :ivar nccl_env: the process's NCCL_* variables.
    :ivar nccl_version: empty without NCCL.
    :ivar lent: versions that this member no longer holds, but whose memory others may
        still have mapped.
    :ivar any_replica: True if the coordinator chooses the index of its replica.
    :ivar proof: proves that the process runs under a shim of this generation
        (:func:`~replicas.messages.identity.proof_of`); empty without a shim.
    :ivar adopted: the newest version that it knows adopted; ``unadopted``: the newest
        that it knows rejected, or has refused.
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

    ``manifest_hash`` is empty if the member no longer holds it.
    """

    version: int
    digest: str
    manifest_hash: str
    meta: Meta
    device: str


class Heartbeat(_FromMember, frozen=True):
    """Heartbeat, every ``heartbeat_interval_s``; also brings the ack."""


class Progress(_FromMember, frozen=True):
    """The user's step counter has changed."""

    step: int


class Bye(_FromMember, frozen=True):
    """The member leaves in order."""

    reason: str = ""


class PublishBegin(_FromMember, frozen=True):
    """A publish begins.

    ``resumed`` is True if it began under another coordinator, which gave it the number
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

    :ivar streaming: True while it is still being filled. Its filled beginning may be
        sent; :class:`Filled` follows with the missing values.
    :ivar manifest_hash: empty on a rank without bytes (leader mode, not the leader).
    :ivar digest: digest of the packed bytes (an image's data, or a part), ready
        ``digest_s`` after the copy.
    :ivar place: place of the slot.
    :ivar hold_s: time for which the copy blocked the caller's CUDA stream, 0 without a
        GPU.
    :ivar meta: set if it was not known when the publish began; the leader's counts.
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

    ``links`` has pairs of addresses between which its members could not connect.
    """

    lane: str
    error: WireError
    links: tuple[tuple[str, str], ...] = ()


class LaneMoved(_FromMember, frozen=True):
    """Progress of the own sidecar in a lane's current request, about once a second.

    :ivar sent: bytes so far, as is ``received``.
    :ivar still_s: time without a moved byte while waiting for the network.
    :ivar rtt_s: longest round trip to another member.
    :ivar held_up: addresses to which bytes wait for a slow or broken network.
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

    :ivar image_digest: digest of the whole image's data (from senders of an image and
        every receiver; else empty).
    :ivar part_digests: digests of the parts sent or received over the lane (mode
        ``"parts"``), by number of the part.
    :ivar place: place of the version in this member's memory now.
    :ivar received: bytes by holder, of a version that was pulled.
    :ivar wrong: the wrong bytes, by holder that served them.
    :ivar holders: as in :class:`TransferFailed`.
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
    """The transfer failed; ``holders`` has reasons by name of slow or dead holders."""

    transfer: int
    error: WireError
    holders: dict[str, str] = {}


class CarrierUp(_FromMember, frozen=True):
    """This member's carrier listens at its address; ``port`` is 0 if it has ended.

    ``certificate_hash`` is the SHA-256 of the carrier's certificate, in hexadecimal.
    """

    port: int
    certificate_hash: str = ""


class Dropped(_FromMember, frozen=True):
    """The slot of this version was reused for another one."""

    version: int


class ReceiveAsk(_FromMember, frozen=True):
    """Ask for a committed version newer than ``after``.

    With a bound, ``after`` may be less than the version that the rank serves, which is
    then granted again if there is no newer one.

    ``at_least`` is the minimum of the version's number or, with a ``key``, of that
    number in its publisher's ``meta``.
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
    """A load has failed, and this member may hold only a part of the version.

    ``kept`` is True if it has loaded no part of it, and keeps its present version.
    """

    version: int
    error: WireError
    kept: bool = False


class CanLoad(_FromMember, frozen=True):
    """This rank can load a version that it was granted; answered by ``LoadDecided``.

    ``whole`` is True if it has checked for all ranks of its replica.
    """

    version: int
    whole: bool = False


class WatchLoaded(_FromMember, frozen=True):
    """Ask for ``WatchEnd`` when every live target replica has loaded ``version``.

    A newer version counts, too. It replaces this member's earlier watch.
    """

    watch: int
    version: int


class OperationPost(_FromMember, frozen=True):
    """A member posts an operation.

    :ivar root: name of the root, source or destination (``group/replica`` or
        ``group/replica/rank``), or empty.
    :ivar segments: for ``recv``, empty accepts any; for ``scatter``, the root's inputs,
        one for each participant, and on other members the output or empty.
    :ivar applied: refs of the newest operations whose results this member wrote.
    :ivar unsettled: refs of operations that ended here with an unknown outcome.
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

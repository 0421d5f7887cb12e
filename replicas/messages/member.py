"""What a member sends to the coordinator."""

from __future__ import annotations

import msgspec

from replicas.messages.identity import ProcessIdentity
from replicas.messages.values import (
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

__all__ = [
    "Bye",
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
    "TransferReady",
    "WatchLoaded",
]


class _FromMember(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_FromMember, frozen=True):
    """First message of a session. ``resume_term`` 0: a new join; else the term whose
    session goes on.

    ``epoch``, ``latest`` (with its digest), ``assigned`` and ``publishes``: what the
    member knows, for a coordinator of another term. ``nccl_env``: the NCCL_* variables
    of the process. ``nccl_version`` is empty where there is none. ``lent``: versions
    that are no longer held here, and whose memory others may still have mapped.
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


class Located(_FromMember, frozen=True):
    """Answer to :class:`Locate`: index of the first beacon that could be opened and had
    its nonce; -1: none."""

    found: int


class Resumed(_FromMember, frozen=True):
    """Everything that is under way here has been announced to the new coordinator."""


class Described(_FromMember, frozen=True):
    """Answer to :class:`Describe`: a whole version that is held here. An empty
    ``manifest_hash``: it is not any more."""

    version: int
    digest: str
    manifest_hash: str
    meta: Meta
    device: str


class Heartbeat(_FromMember, frozen=True):
    """Sign of life, every ``heartbeat_interval_s``; also carries the ack."""


class Progress(_FromMember, frozen=True):
    """The user's own step counter moved."""

    step: int


class Bye(_FromMember, frozen=True):
    """The member leaves in good order."""

    reason: str = ""


class PublishBegin(_FromMember, frozen=True):
    """``resumed``: begun under another coordinator, which had given it the number
    ``version``."""

    publish: int
    version: int | None
    deadline_s: float
    meta: Meta = {}
    new_manifest: bool = False
    resumed: bool = False


class Packed(_FromMember, frozen=True):
    """The slot is filled, and stays pinned until the verdict. ``streaming``: it is
    being filled, and may be sent meanwhile as far as it is there; :class:`Filled`
    follows, with what is not known yet.

    ``manifest_hash`` is empty on a rank that carries no bytes (leader mode, not the
    leader); ``digest``: of what was packed (the data of an image, or a part), ready
    ``digest_s`` after the copy; ``place``: where it lies; ``hold_s``: how long the
    caller's CUDA stream was held by the copy, 0 without a GPU; ``meta``: where it was
    not known when the publish began (that of the leader counts).
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
    """The slot of a publish that was told to be streaming is full."""

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
    """The lane's sidecar or its group failed, while forming or later.

    ``links``: pairs of addresses between which its members could not connect.
    """

    lane: str
    error: WireError
    links: tuple[tuple[str, str], ...] = ()


class LaneMoved(_FromMember, frozen=True):
    """What the own sidecar has moved in a lane for the request that it works on, about
    once a second.

    ``sent`` and ``received``: bytes so far. ``still_s``: for so long nothing has moved,
    though the network was waited for. ``rtt_s``: the longest round trip to another
    member. ``held_up``: addresses to which bytes are under way that the network does
    not take, or not as fast as they are there.
    """

    lane: str
    sent: int
    received: int
    still_s: float
    rtt_s: float = 0.0
    held_up: tuple[str, ...] = ()


class TransferReady(_FromMember, frozen=True):
    """The slot is there: pinned, or reserved."""

    transfer: int


class TransferDone(_FromMember, frozen=True):
    """A sender's, a receiver's or a mapper's part is done.

    ``image_digest``: of the whole image's data (senders of an image and every receiver;
    else empty). ``part_digests``: by number of the part, of each one sent or received
    over the lane (mode ``"parts"``). ``place``: where the version lies here now.
    """

    transfer: int
    image_digest: str
    part_digests: dict[int, str]
    transfer_s: float
    verify_s: float
    place: SlotPlace | None = None


class TransferFailed(_FromMember, frozen=True):
    transfer: int
    error: WireError


class Dropped(_FromMember, frozen=True):
    """The slot of this version was given to another one."""

    version: int


class ReceiveAsk(_FromMember, frozen=True):
    """Grant me a committed version newer than ``after`` (and than the replica's loaded
    one).

    ``at_least``: its number, or with a ``key`` the number by that name in its
    publisher's ``meta``, is that or more.
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
    version: int
    error: WireError


class WatchLoaded(_FromMember, frozen=True):
    """Tell me when every live target replica has loaded ``version`` or a newer one. It
    takes the place of the one before."""

    watch: int
    version: int


class OperationPost(_FromMember, frozen=True):
    """``root``: name of the root, source or destination (``group/replica`` or
    ``group/replica/rank``), or empty.

    ``segments`` of ``recv`` may be empty (take what the sender sends); of ``scatter``
    they are the root's input, one segment a participant, and on the others the one
    output or empty. ``applied``: refs of the newest operations whose results were
    written here; ``unsettled``: refs of those that ended here with their outcome
    unknown.
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


FromMember = (
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
    | Dropped
    | ReceiveAsk
    | ReceiveCancel
    | Loaded
    | LoadFailed
    | WatchLoaded
    | OperationPost
    | OperationDone
    | OperationFailed
)

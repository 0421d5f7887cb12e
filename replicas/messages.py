"""The messages of a session between one member and the coordinator.

Theory of operation
===================

A session is one WebSocket. Each binary frame is one :class:`Frame`, MessagePack by msgspec with a closed set of types:
nothing read from a socket can make anything but these structs (invariant I7). A member opens with :class:`Hello` in the
first frame; the coordinator answers :class:`Welcome` or :class:`Refused`.

**Order and resumption.** Every later message has a sequence number in its direction, from 1, and each frame carries
``ack``, the highest number that its sender has received. A side keeps what is not yet acknowledged; after a reconnect
(same incarnation, same ``term``) both sides say in Hello and Welcome how far they got and resend the rest, so that a
message is handled exactly once, in order. :class:`Heartbeat` has number 0 and is never resent.

**Weights.** On each rank of a source replica a publish is numbered by ``publish`` (1, 2, ... since the replica first
published). :class:`PublishBegin` → :class:`PublishAdmitted` (the version's number) → the rank fills its slot →
:class:`Packed` or :class:`PackFailed` → ... → :class:`PublishEnd`, the same verdict for all ranks of the replica.
In between the coordinator moves the version with *transfers*:

* :class:`LaneForm` to each member of a lane → :class:`LaneFormed` or :class:`LaneFailed`. A lane is one process group,
  owned by one sidecar of each of its members; :class:`LaneDrop` kills that sidecar.
* :class:`TransferOffer` to senders and receivers → :class:`TransferReady` (the slot is there: pinned or reserved) or
  :class:`TransferFailed`. When all are ready and the lane has formed: :class:`TransferGo` → :class:`TransferDone` with
  the digests, or :class:`TransferFailed`. :class:`TransferCancel` withdraws it at any time.
* When every live target verified the version: :class:`Commit`, to everyone. :class:`Discard` takes a number back.

**Receiving.** :class:`ReceiveAsk` → :class:`ReceiveGrant` with a committed version, the same for all ranks of the replica;
the other ranks get :class:`Assigned`, so that they keep the slot. Then :class:`Loaded` or :class:`LoadFailed`.

**Operations** (collectives between peers). :class:`OperationPost` (``post`` numbers a member's own operations) → when
everyone concerned has posted, :class:`OperationGo` → sidecars run it → :class:`OperationDone` or
:class:`OperationFailed` → :class:`OperationEnd`, the common verdict; only then are the caller's tensors written.

Durations are ``*_s`` in seconds, always remaining time and never a clock reading: no two clocks are compared.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from replicas import errors
from replicas.core.identity import Member, ProcessIdentity

__all__ = [
    "PROTOCOL",
    "Assigned",
    "Backend",
    "Bye",
    "ChannelSettings",
    "Commit",
    "Discard",
    "Dropped",
    "FromCoordinator",
    "FromMember",
    "Heartbeat",
    "HeldVersion",
    "Hello",
    "LaneDrop",
    "LaneFailed",
    "LaneForm",
    "LaneFormed",
    "LoadFailed",
    "Loaded",
    "MemberFrame",
    "OperationDone",
    "OperationEnd",
    "OperationFailed",
    "OperationGo",
    "OperationKind",
    "OperationPost",
    "PackFailed",
    "Packed",
    "Progress",
    "PublishAdmitted",
    "PublishBegin",
    "PublishEnd",
    "ReceiptData",
    "ReceiveAsk",
    "ReceiveCancel",
    "ReceiveGrant",
    "Refused",
    "Segment",
    "ServerFrame",
    "TransferCancel",
    "TransferDone",
    "TransferFailed",
    "TransferGo",
    "TransferOffer",
    "TransferReady",
    "UploadManifest",
    "View",
    "WatchEnd",
    "WatchLoaded",
    "Welcome",
    "WireError",
    "decode_member_frame",
    "decode_server_frame",
    "encode",
]

PROTOCOL = 1
"""Number of this protocol; a Hello with another one is refused."""

Backend = Literal["gloo", "nccl"]
Ranks = Literal["leader", "each", "all"]
OperationKind = Literal[
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "send",
    "recv",
    "barrier",
]
ReduceOp = Literal["sum", "mean", "min", "max"]
Scalar = None | bool | int | float | str
Meta = dict[str, Scalar | list[Scalar] | dict[str, Scalar]]
"""User data that travels with a version: scalars, and lists and dicts of scalars."""


class WireError(msgspec.Struct, frozen=True):
    """An error of :mod:`replicas.errors` as data."""

    kind: str
    message: str
    channel: str | None = None
    version: int | None = None
    phase: str | None = None
    members: tuple[str, ...] = ()
    hint: str = ""
    unanimous: bool = False

    @classmethod
    def of(cls, error: errors.ReplicasError) -> WireError:
        return cls(
            kind=type(error).__name__,
            message=error.message,
            channel=error.channel,
            version=error.version,
            phase=error.phase,
            members=error.members,
            hint=error.hint,
            unanimous=error.unanimous,
        )

    def exception(self) -> errors.ReplicasError:
        return errors.error_class(self.kind)(
            self.message,
            channel=self.channel,
            version=self.version,
            phase=self.phase,
            members=self.members,
            hint=self.hint,
            unanimous=self.unanimous,
        )


class HeldVersion(msgspec.Struct, frozen=True):
    """A complete, verified version in a slot of a member."""

    version: int
    digest: str


class ChannelSettings(msgspec.Struct, frozen=True):
    """What a member must know of its channel's config."""

    role: Literal["source", "target", "both", "peer", "observer"]
    deadline_s: float
    slots: int
    source_ranks: Literal["leader", "all"]
    peer_ranks: Ranks
    backend: Literal["auto", "gloo", "nccl"]
    heartbeat_interval_s: float


class ReceiptData(msgspec.Struct, frozen=True):
    """The outcome of a successful publish or operation. ``phases``: seconds by phase."""

    epoch: int
    members: tuple[Member, ...]
    lost: tuple[str, ...]
    nbytes: int
    seconds: float
    phases: dict[str, float]
    version: int = 0


class Segment(msgspec.Struct, frozen=True):
    """One tensor of an operation. ``dtype`` is torch's name without ``torch.``."""

    dtype: str
    shape: tuple[int, ...]


# ---------------------------------------------------------------- from a member


class _FromMember(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_FromMember, frozen=True):
    """First message of a session. ``resume_term`` 0: a new join; else the term whose session goes on."""

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
    cuda_devices: tuple[str, ...] = ()
    resume_term: int = 0
    received: int = 0
    held: tuple[HeldVersion, ...] = ()
    loaded: int = 0


class Heartbeat(_FromMember, frozen=True):
    """Sign of life, every ``heartbeat_interval_s``; also carries the ack."""


class Progress(_FromMember, frozen=True):
    """The user's own step counter moved."""

    step: int


class Bye(_FromMember, frozen=True):
    """The member leaves in good order."""

    reason: str = ""


class UploadManifest(_FromMember, frozen=True):
    """``manifest`` is :meth:`replicas.core.manifest.PartManifest.encode`; once for each hash and session."""

    manifest_hash: str
    manifest: bytes


class PublishBegin(_FromMember, frozen=True):
    publish: int
    version: int | None
    deadline_s: float
    meta: Meta = {}
    new_manifest: bool = False


class Packed(_FromMember, frozen=True):
    """The slot is filled. ``manifest_hash`` is empty on a rank that carries no bytes (leader mode, not the leader)."""

    publish: int
    manifest_hash: str
    nbytes: int
    device: str
    wait_s: float
    pack_s: float


class PackFailed(_FromMember, frozen=True):
    publish: int
    error: WireError


class LaneFormed(_FromMember, frozen=True):
    lane: str
    seconds: float


class LaneFailed(_FromMember, frozen=True):
    """The lane's sidecar or its group failed, while forming or later."""

    lane: str
    error: WireError


class TransferReady(_FromMember, frozen=True):
    transfer: int


class TransferDone(_FromMember, frozen=True):
    """A sender's or a receiver's part is done.

    ``image_digest``: of the whole image's data (senders of an image and every receiver; else empty).
    ``part_digests``: by owner's lane rank, of each part sent or received (mode ``"parts"``).
    """

    transfer: int
    image_digest: str
    part_digests: dict[int, str]
    transfer_s: float
    verify_s: float


class TransferFailed(_FromMember, frozen=True):
    transfer: int
    error: WireError


class Dropped(_FromMember, frozen=True):
    """The slot of this version was given to another one."""

    version: int


class ReceiveAsk(_FromMember, frozen=True):
    """Grant me a committed version newer than ``after`` (and than the replica's loaded one)."""

    ask: int
    after: int


class ReceiveCancel(_FromMember, frozen=True):
    ask: int


class Loaded(_FromMember, frozen=True):
    version: int
    load_s: float


class LoadFailed(_FromMember, frozen=True):
    version: int
    error: WireError


class WatchLoaded(_FromMember, frozen=True):
    """Tell me when every live target replica has loaded ``version`` or a newer one."""

    watch: int
    version: int


class OperationPost(_FromMember, frozen=True):
    """``root``: name of the root, source or destination (``group/replica`` or ``group/replica/rank``), or empty.

    ``segments`` of ``recv`` may be empty (take what the sender sends); of ``scatter`` they are the root's input, one
    segment a participant, and on the others the one output or empty.
    """

    post: int
    kind: OperationKind
    segments: tuple[Segment, ...]
    deadline_s: float
    reduce_op: ReduceOp = "sum"
    root: str = ""
    step: int | None = None
    device: str = "cpu"


class OperationDone(_FromMember, frozen=True):
    operation: int
    seconds: float


class OperationFailed(_FromMember, frozen=True):
    operation: int
    error: WireError


FromMember = (
    Hello
    | Heartbeat
    | Progress
    | Bye
    | UploadManifest
    | PublishBegin
    | Packed
    | PackFailed
    | LaneFormed
    | LaneFailed
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


# ---------------------------------------------------------------- from the coordinator


class _FromCoordinator(msgspec.Struct, frozen=True, tag=True):
    pass


class Welcome(_FromCoordinator, frozen=True):
    """Answer to Hello. ``address``: the IP address by which the coordinator sees this member.

    ``publishes``: how many publishes the replica has made, so that a rank that joins again counts on from there.
    """

    term: int
    settings: ChannelSettings
    received: int
    epoch: int
    address: str
    latest: int = 0
    publishes: int = 0


class Refused(_FromCoordinator, frozen=True):
    """The session is over: Hello was not acceptable, or the member was fenced later. Do not reconnect."""

    error: WireError


class Ack(_FromCoordinator, frozen=True):
    """Carries only the frame's ack."""


class View(_FromCoordinator, frozen=True):
    """A new epoch."""

    epoch: int
    members: tuple[Member, ...]


class PublishAdmitted(_FromCoordinator, frozen=True):
    publish: int
    version: int


class PublishEnd(_FromCoordinator, frozen=True):
    """The verdict: exactly one of ``receipt`` and ``error``."""

    publish: int
    receipt: ReceiptData | None = None
    error: WireError | None = None


class LaneForm(_FromCoordinator, frozen=True):
    """Form a process group: ``prefix`` is a fresh key prefix on the store; ``rank`` of ``size`` is yours.

    ``addresses``: IP address of each rank, in order (yours is the one to bind).
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


class LaneDrop(_FromCoordinator, frozen=True):
    """Kill the lane's sidecar."""

    lane: str


class TransferOffer(_FromCoordinator, frozen=True):
    """Get ready to send or to receive ``version``. ``manifest``: the bytes, or None when you have had this hash.

    A sender of mode ``"parts"`` sends its own publish slot, one of mode ``"image"`` a whole version that it holds.
    """

    transfer: int
    version: int
    role: Literal["send", "receive"]
    mode: Literal["image", "parts"]
    manifest_hash: str
    manifest: bytes | None
    meta: Meta
    deadline_s: float


class TransferGo(_FromCoordinator, frozen=True):
    """Move the bytes. ``owners``: lane rank of each part's sender, in order (one for mode ``"image"``).

    An empty ``lane`` means that nobody needs the bytes: a sender then only computes its digests (in its own process).
    """

    transfer: int
    lane: str
    owners: tuple[int, ...]
    deadline_s: float


class TransferCancel(_FromCoordinator, frozen=True):
    """Forget this transfer; a half-filled slot becomes free (once its sidecar is gone)."""

    transfer: int


class Commit(_FromCoordinator, frozen=True):
    version: int
    digest: str
    manifest_hash: str


class Discard(_FromCoordinator, frozen=True):
    """``version`` will never be committed: free its slot."""

    version: int


class Assigned(_FromCoordinator, frozen=True):
    """Another rank of your replica was granted ``version``: keep it until you have loaded it."""

    version: int


class ReceiveGrant(_FromCoordinator, frozen=True):
    ask: int
    version: int


class WatchEnd(_FromCoordinator, frozen=True):
    watch: int
    version: int


class OperationGo(_FromCoordinator, frozen=True):
    """Run it. ``participants`` and ``segments`` (what each one posted) are in the order of lane ranks."""

    post: int
    operation: int
    lane: str
    participants: tuple[Member, ...]
    lane_ranks: tuple[int, ...]
    segments: tuple[tuple[Segment, ...], ...]
    root: int
    deadline_s: float


class OperationEnd(_FromCoordinator, frozen=True):
    post: int
    receipt: ReceiptData | None = None
    error: WireError | None = None


FromCoordinator = (
    Welcome
    | Refused
    | Ack
    | View
    | PublishAdmitted
    | PublishEnd
    | LaneForm
    | LaneDrop
    | TransferOffer
    | TransferGo
    | TransferCancel
    | Commit
    | Discard
    | Assigned
    | ReceiveGrant
    | WatchEnd
    | OperationGo
    | OperationEnd
)


class MemberFrame(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    ack: int
    body: FromMember


class ServerFrame(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    ack: int
    body: FromCoordinator


_encoder = msgspec.msgpack.Encoder()
_member_decoder = msgspec.msgpack.Decoder(MemberFrame)
_server_decoder = msgspec.msgpack.Decoder(ServerFrame)


def encode(frame: MemberFrame | ServerFrame) -> bytes:
    return _encoder.encode(frame)


def decode_member_frame(data: bytes) -> MemberFrame:
    """:raises msgspec.DecodeError: (also its subclass ValidationError) for anything but a frame."""
    return _member_decoder.decode(data)


def decode_server_frame(data: bytes) -> ServerFrame:
    """:raises msgspec.DecodeError: (also its subclass ValidationError) for anything but a frame."""
    return _server_decoder.decode(data)

"""The messages of a session between one member and the coordinator.

Theory of operation
===================

A session is one WebSocket. Each binary frame is one :class:`Frame`, MessagePack by
msgspec with a closed set of types: nothing read from a socket can make anything but
these structs (invariant I7). A member opens with :class:`Hello` in the first frame; the
coordinator answers :class:`Welcome` or :class:`Refused`.

**Order and resumption.** Every later message has a sequence number in its direction,
from 1, and each frame carries ``ack``, the highest number that its sender has received.
A side keeps what is not yet acknowledged; after a reconnect (same incarnation, same
``term``) both sides say in Hello and Welcome how far they got and resend the rest, so
that a message is handled exactly once, in order. :class:`Heartbeat` has number 0 and is
never resent.

**Weights.** On each rank of a source replica a publish is numbered by ``publish`` (1,
2, ... since the replica first published). :class:`PublishBegin` →
:class:`PublishAdmitted` (the version's number) → the rank fills its slot →
:class:`Packed` or :class:`PackFailed` → ... → :class:`PublishEnd`, the same verdict for
all ranks of the replica. In between the coordinator moves the version with *transfers*:

* :class:`LaneForm` to each member of a lane → :class:`LaneFormed` or
  :class:`LaneFailed`. A lane is one process group, owned by one sidecar of each of its
  members; :class:`LaneDrop` kills that sidecar. While bytes move in it, each member
  tells about once a second how many have (:class:`LaneMoved`).
* :class:`TransferOffer` to senders and receivers → :class:`TransferReady` (the slot is
  there: pinned or reserved) or :class:`TransferFailed`. When all are ready and the lane
  has formed: :class:`TransferGo` → :class:`TransferDone` with the digests, or
  :class:`TransferFailed`. :class:`TransferCancel` withdraws it at any time.
* On one host nothing is sent: an offer with the role ``map`` names the place of a
  holder's slot → the others open it there, lock it, see that it is still that version →
  :class:`TransferDone`, or :class:`TransferFailed`. :class:`Released` tells the owner
  of memory that no member uses it for that version any more.
* Where there are several hosts, a publish whose weights are all at hand is sent while
  it is packed: ``Packed(streaming)`` as soon as its slot is there, :class:`Filled` when
  it is full. Only then is it mapped, compared and committed.
* Where all members are on one host nobody has a sidecar; :class:`LaneAhead` says that
  this has changed.
* Who is on which host: a newcomer tries to open the beacons that :class:`Locate` names
  → :class:`Located`.
* Manifests are named by their hash. Who lacks one, asks (:class:`ManifestAsk` →
  :class:`ManifestPiece`, one or more): a member for what it was offered, the
  coordinator for what was packed, or described
  (:mod:`replicas.core.versions.fetching`).
* When every live target verified the version: :class:`Commit`, to everyone.
  :class:`Discard` takes a number back.

**Receiving.** :class:`ReceiveAsk` → :class:`ReceiveGrant` with a committed version, the
same for all ranks of the replica; the other ranks get :class:`Assigned`, so that they
keep the slot. Then :class:`Loaded` or :class:`LoadFailed`.

**Operations** (collectives between peers). :class:`OperationPost` (``post`` numbers a
member's own operations) → when everyone concerned has posted, :class:`OperationGo` →
sidecars run it → :class:`OperationDone` or :class:`OperationFailed` →
:class:`OperationEnd`, the common verdict; only then are the caller's tensors written.

**A new coordinator** (another term; its sessions and queues are gone, the decision log
may be). The member says in Hello what it knows: ``epoch``, ``latest``, what it holds,
what it serves, what it was assigned. After the Welcome it announces again what is under
way there: a publish that had a number already with ``PublishBegin(resumed=True)`` and
that number (and :class:`Packed`, if it was packed), asks and watches; then
:class:`Resumed`. The coordinator asks a holder for the manifest of the newest committed
version (:class:`Describe` → :class:`Described`). So a publish outlives its coordinator.

**Operations whose outcome is unknown.** Each operation that ran has a ``ref``, unique
over terms. A member that must end one by itself after it had said *done* names it in
``unsettled`` of its next post, and each post names in ``applied`` the last ones whose
results were written. When the domain's next collective is complete, the coordinator
tells those in doubt what became of theirs (:class:`OperationSettled`) before the Go:
applied if anybody applied it, else nobody ever will.

Durations are ``*_s`` in seconds, always remaining time and never a clock reading: no
two clocks are compared.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from replicas.messages.coordinator import (
    Ack,
    Assigned,
    Commit,
    Describe,
    Discard,
    FromCoordinator,
    LaneAhead,
    LaneDrop,
    LaneForm,
    Locate,
    OperationEnd,
    OperationGo,
    OperationSettled,
    PublishAdmitted,
    PublishEnd,
    ReceiveGrant,
    Refused,
    Released,
    TransferCancel,
    TransferGo,
    TransferOffer,
    View,
    WatchEnd,
    Welcome,
)
from replicas.messages.member import (
    Bye,
    Described,
    Dropped,
    Filled,
    FromMember,
    Heartbeat,
    Hello,
    LaneFailed,
    LaneFormed,
    LaneMoved,
    Loaded,
    LoadFailed,
    Located,
    OperationDone,
    OperationFailed,
    OperationPost,
    Packed,
    PackFailed,
    Progress,
    PublishBegin,
    ReceiveAsk,
    ReceiveCancel,
    Resumed,
    TransferDone,
    TransferFailed,
    TransferReady,
    WatchLoaded,
)
from replicas.messages.values import (
    Backend,
    Beacon,
    ChannelSettings,
    HeldVersion,
    ManifestAsk,
    ManifestPiece,
    Meta,
    OperationKind,
    Ranks,
    ReceiptData,
    ReduceOp,
    Segment,
    SlotPlace,
    WireError,
)

__all__ = [
    "PROTOCOL",
    "Ack",
    "Assigned",
    "Backend",
    "Beacon",
    "Bye",
    "ChannelSettings",
    "Commit",
    "Describe",
    "Described",
    "Discard",
    "Dropped",
    "Filled",
    "FromCoordinator",
    "FromMember",
    "Heartbeat",
    "HeldVersion",
    "Hello",
    "LaneAhead",
    "LaneDrop",
    "LaneFailed",
    "LaneForm",
    "LaneFormed",
    "LaneMoved",
    "LoadFailed",
    "Loaded",
    "Locate",
    "Located",
    "ManifestAsk",
    "ManifestPiece",
    "MemberFrame",
    "Meta",
    "OperationDone",
    "OperationEnd",
    "OperationFailed",
    "OperationGo",
    "OperationKind",
    "OperationPost",
    "OperationSettled",
    "PackFailed",
    "Packed",
    "Progress",
    "PublishAdmitted",
    "PublishBegin",
    "PublishEnd",
    "Ranks",
    "ReceiptData",
    "ReceiveAsk",
    "ReceiveCancel",
    "ReceiveGrant",
    "ReduceOp",
    "Refused",
    "Released",
    "Resumed",
    "Segment",
    "ServerFrame",
    "SlotPlace",
    "TransferCancel",
    "TransferDone",
    "TransferFailed",
    "TransferGo",
    "TransferOffer",
    "TransferReady",
    "View",
    "WatchEnd",
    "WatchLoaded",
    "Welcome",
    "WireError",
    "decode_member_frame",
    "decode_server_frame",
    "encode",
    "encode_body",
    "encode_frame",
]

PROTOCOL = 6
"""Number of this protocol; a Hello with another one is refused."""


class MemberFrame(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    ack: int
    body: FromMember


class ServerFrame(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    ack: int
    body: FromCoordinator


class _EncodedFrame(msgspec.Struct, frozen=True, array_like=True):
    """A :class:`MemberFrame` or :class:`ServerFrame` whose body has been encoded
    before."""

    seq: int
    ack: int
    body: msgspec.Raw


Frame = TypeVar("Frame", MemberFrame, ServerFrame)

_encoder = msgspec.msgpack.Encoder()
_member_decoder = msgspec.msgpack.Decoder(MemberFrame)
_server_decoder = msgspec.msgpack.Decoder(ServerFrame)


def encode(frame: MemberFrame | ServerFrame) -> bytes:
    return _encoder.encode(frame)


def encode_body(body: FromCoordinator | FromMember) -> bytes:
    """A message without its frame: what is sent to many, or again, is encoded once."""
    return _encoder.encode(body)


def encode_frame(seq: int, ack: int, body: bytes) -> bytes:
    """The frame of a message that :func:`encode_body` has encoded."""
    return _encoder.encode(_EncodedFrame(seq, ack, msgspec.Raw(body)))


def decode_member_frame(data: bytes) -> MemberFrame:
    """:raises msgspec.DecodeError: (also its subclass ValidationError) for anything but
    a frame."""
    return _decode(_member_decoder, data)


def decode_server_frame(data: bytes) -> ServerFrame:
    """:raises msgspec.DecodeError: (also its subclass ValidationError) for anything but
    a frame."""
    return _decode(_server_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[Frame], data: bytes) -> Frame:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these two through as they are
        raise msgspec.DecodeError(str(error)) from error

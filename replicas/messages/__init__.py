"""The session protocol between one member and the coordinator: messages and frames.

A session is one WebSocket. Each binary frame is one :class:`MemberFrame` or
:class:`ServerFrame`, MessagePack by msgspec with a closed set of types: bytes read from
a socket can only become these structs (invariant I7). A member opens with
:class:`Hello` in the first frame; the coordinator answers :class:`Welcome` or
:class:`Refused`.

**Order and resumption.** Every later message has a sequence number in its direction,
from 1, and each frame carries ``ack``, the highest number that its sender has received.
A side keeps its unacknowledged messages. After a reconnect (same incarnation, same
``term``) both sides say in Hello and Welcome what they have received and resend the
rest, so each message is handled exactly once, in order. :class:`Heartbeat` has number 0
and is never resent.

**Weights.** On each rank of a source replica a publish is numbered by ``publish`` (1,
2, ... since the replica first published). :class:`PublishBegin` →
:class:`PublishAdmitted` (the version's number) → the rank fills its slot →
:class:`Packed` or :class:`PackFailed` → ... → :class:`PublishEnd`, the same verdict for
all ranks of the replica. In between the coordinator moves the version with *transfers*:

* Pulled: an offer with the role ``serve`` to a holder, and with ``pull`` to a leader →
  :class:`TransferReady` (the slot is reserved) → :class:`TransferMoved` while bytes
  come → :class:`TransferDone` with the digest, or :class:`TransferFailed`.
  :class:`TransferCancel` withdraws a transfer at any time.
* Broadcast: an offer with the role ``send`` or ``receive`` → :class:`TransferReady`
  (the slot is full, or reserved). When all are ready, an operation without posts runs
  on the slots (see below): its :class:`OperationGo` names the transfer. Each member
  answers it, and then with :class:`TransferDone` or :class:`TransferFailed`.
* On one host no bytes are sent. An offer with the role ``map`` names the place of a
  holder's slot → the others open the slot, lock it, check that it still has that
  version → :class:`TransferDone` or :class:`TransferFailed`. :class:`Released` tells
  the owner of memory that no member uses it for that version.
* With several hosts, a publish whose weights are all available is pulled while it is
  packed: ``Packed(streaming)`` as soon as its slot is reserved, :class:`Filled` when it
  is full. Only then is it mapped, compared and committed.
* While all members are on one host no member has a sidecar; :class:`LaneAhead`
  announces that this has changed.
* Hosts are found by beacons: a newcomer tries to open the beacons that :class:`Locate`
  names → :class:`Located`.
* Manifests are named by their hash. A side asks for a manifest that it lacks
  (:class:`ManifestAsk` → :class:`ManifestPiece`, one or more): a member after an offer,
  the coordinator after ``Packed`` or ``Described``
  (:mod:`replicas.core.versions.fetching`).
* When every live target has verified the version: :class:`Commit`, to all members; to
  targets when they may load it (:mod:`replicas.core.versions.serving`).
  :class:`Discard` withdraws a version's number.

**What is served.** :class:`VersionAsk` → :class:`VersionAnswer`. :class:`Labels` tells
members what to keep. A :class:`Commit` may name older ``content``: its bytes.

**Receiving.** :class:`ReceiveAsk` → :class:`ReceiveGrant` with a committed version, the
same for all ranks of the replica; the other ranks get :class:`Assigned`, so that they
keep the slot. Then :class:`Loaded` or :class:`LoadFailed`. On a channel with
``adopt_together`` :class:`CanLoad` → :class:`LoadDecided` come before the load: the
same decision for all targets (:mod:`replicas.core.versions.lockstep`).

**Operations** (collectives between peers). :class:`OperationPost` (``post`` numbers a
member's own operations) → when all participants have posted and have a lane,
:class:`OperationGo` → sidecars run it → :class:`OperationDone` or
:class:`OperationFailed` → :class:`OperationEnd`, the common verdict; only then are the
caller's tensors written. A lane is one process group, with one sidecar for each of its
members: :class:`LaneForm` to each → :class:`LaneFormed` or :class:`LaneFailed`;
:class:`LaneDrop` kills the receiver's sidecar. While bytes move in it, each member
reports progress about once a second (:class:`LaneMoved`).

**A new coordinator** has another term. Sessions and queues of the old coordinator are
lost, the decision log may be. In Hello the member sends its knowledge: ``epoch``,
``latest``, the versions that it holds, serves, was assigned and knows adopted. After
the Welcome it announces its unfinished work again: a publish that already had a number
with ``PublishBegin(resumed=True)`` and that number (and :class:`Packed`, if it was
packed), asks and watches; then :class:`Resumed`. The coordinator asks a holder for the
manifest of the newest committed version (:class:`Describe` → :class:`Described`). So a
publish outlives its coordinator.

**Operations with an unknown outcome.** Each operation that ran has a ``ref``, unique
over terms. A member that must end an operation without a verdict, after it has sent
:class:`OperationDone`, names it in ``unsettled`` of its next post; each post names in
``applied`` the last operations whose results were written. When the domain's next
collective is complete, the coordinator sends these members the outcome
(:class:`OperationSettled`) before the Go: applied if any member applied it; otherwise
no member ever will.

Durations are ``*_s`` in seconds, always remaining time and never a clock reading: no
two clocks are compared.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from replicas.common.decoding import decoded
from replicas.messages.bounds import NAME_LENGTH
from replicas.messages.carried import *  # noqa: F403  # the names that these modules define
from replicas.messages.from_coordinator import *  # noqa: F403
from replicas.messages.from_coordinator import FromCoordinator
from replicas.messages.from_member import *  # noqa: F403
from replicas.messages.from_member import FromMember
from replicas.messages.hello import *  # noqa: F403

PROTOCOL = 12
"""Version of this protocol; a Hello with another one is refused."""


class MemberFrame(msgspec.Struct, frozen=True, array_like=True):
    """A member's message with its number, and the highest number received (``ack``)."""

    seq: int
    ack: int
    body: FromMember


class ServerFrame(msgspec.Struct, frozen=True, array_like=True):
    """A coordinator's message with its number, and the highest number received."""

    seq: int
    ack: int
    body: FromCoordinator


class _Tagged(msgspec.Struct):
    """A message of which only the name is decoded."""

    type: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH)]


_encoder = msgspec.msgpack.Encoder()
_member_decoder = msgspec.msgpack.Decoder(MemberFrame)
_server_decoder = msgspec.msgpack.Decoder(ServerFrame)
_tag_decoder = msgspec.msgpack.Decoder(tuple[int, int, _Tagged])


def encode(frame: MemberFrame | ServerFrame) -> bytes:
    """Return a frame (a message with its two numbers) as MessagePack.

    The limits of :mod:`replicas.messages.bounds` are not checked here: the receiver
    checks a member's frame.
    """
    return _encoder.encode(frame)


def encode_body(body: FromCoordinator | FromMember) -> bytes:
    """Return a message as MessagePack, without a frame, for :func:`encode_frame`.

    So a message for many receivers, or one that is sent again, is encoded only once.
    """
    return _encoder.encode(body)


def encode_frame(seq: int, ack: int, body: bytes) -> bytes:
    """Return the frame of a message that :func:`encode_body` has encoded.

    :param seq: number of the message; 0 for one that is never resent.
    :param ack: the highest number that the sender has received.
    :param body: the encoded message.
    """
    return _encoder.encode((seq, ack, msgspec.Raw(body)))


def decode_member_frame(data: bytes) -> MemberFrame:
    """Decode a member's frame, and check that its values are within their limits.

    :raises msgspec.DecodeError: the frame is malformed, or a value is out of range; the
        text names the message, the field and the limit.
    """
    try:
        return decoded(_member_decoder, data)
    except msgspec.DecodeError as error:
        raise msgspec.DecodeError(f"{_name_of(data)}{error}") from error


def _name_of(data: bytes) -> str:
    """Return the name of the message in an encoded frame and ": ", to begin an error
    text.

    Return "" if there is no name; the frame may be malformed. It never raises.
    """
    try:
        return f"{decoded(_tag_decoder, data)[2].type}: "
    except msgspec.DecodeError:
        return ""


def decode_server_frame(data: bytes) -> ServerFrame:
    """Decode a frame from the coordinator, which is trusted to keep to the limits.

    :raises msgspec.DecodeError: the frame is malformed.
    """
    return decoded(_server_decoder, data)

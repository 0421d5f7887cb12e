"""Messages from a member to the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias, Union

import msgspec

from replicas.messages.bounds import (
    INTEGER_MAX,
    MANY,
    VERSION_MAX,
    Digest,
    Finite,
    Number,
    Remaining,
    Seconds,
    Signed,
    Text,
)
from replicas.messages.carried import (
    ManifestAsk,
    ManifestPiece,
    Meta,
    OperationKind,
    ReduceOp,
    Segment,
    SlotPlace,
    WireError,
)
from replicas.messages.hello import Hello
from replicas.messages.version_orders import VersionOrder

_HOLDERS = 64
"""Limit of holders in a message; a member is given fewer."""
_Texts = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MANY)]
_Holders = Annotated[dict[Text, Text], msgspec.Meta(max_length=_HOLDERS)]


class _FromMember(msgspec.Struct, frozen=True, tag=True):
    pass


class Located(_FromMember, frozen=True):
    """Answer to ``Locate``: index of the first beacon that was verified, or -1."""

    found: Signed


class Resumed(_FromMember, frozen=True):
    """All unfinished work of this member has been announced to the new coordinator."""


class Described(_FromMember, frozen=True):
    """Answer to ``Describe``: a complete version that this member holds.

    ``manifest_hash`` is empty if the member no longer holds it.
    """

    version: Number
    digest: Digest
    manifest_hash: Digest
    meta: Meta
    device: Text


class Heartbeat(_FromMember, frozen=True):
    """Heartbeat, every ``heartbeat_interval_s``; also brings the ack."""


class Progress(_FromMember, frozen=True):
    """The user's step counter has changed."""

    step: Signed


class Bye(_FromMember, frozen=True):
    """The member leaves in order."""

    reason: Text = ""


class PublishBegin(_FromMember, frozen=True):
    """A publish begins.

    ``resumed`` is True if it began under another coordinator, which gave it the number
    ``version``.
    """

    publish: Number
    version: Annotated[int, msgspec.Meta(ge=-INTEGER_MAX, le=2 * VERSION_MAX)] | None
    deadline_s: Remaining
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

    publish: Number
    manifest_hash: Digest
    device: Text
    wait_s: Seconds
    pack_s: Seconds
    digest: Digest = ""
    place: SlotPlace | None = None
    digest_s: Seconds = 0.0
    streaming: bool = False
    hold_s: Seconds = 0.0
    meta: Meta | None = None


class Filled(_FromMember, frozen=True):
    """The slot of a streaming publish is full."""

    publish: Number
    pack_s: Seconds
    digest: Digest
    digest_s: Seconds
    place: SlotPlace
    hold_s: Seconds = 0.0


class PackFailed(_FromMember, frozen=True):
    """The weights could not be packed into a slot: the publish has failed here."""

    publish: Number
    error: WireError


class LaneFormed(_FromMember, frozen=True):
    """This member's sidecar has joined the lane's process group."""

    lane: Text


class LaneFailed(_FromMember, frozen=True):
    """The lane's sidecar or process group failed, while forming or later.

    ``links`` has pairs of addresses between which its members could not connect.
    """

    lane: Text
    error: WireError
    links: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=MANY)] = ()


class LaneMoved(_FromMember, frozen=True):
    """Progress of the own sidecar in a lane's current request, about once a second.

    :ivar still_s: time without a moved byte while waiting for the network.
    :ivar rtt_s: longest round trip to another member.
    :ivar held_up: addresses to which bytes wait for a slow or broken network.
    """

    lane: Text
    still_s: Seconds
    rtt_s: Seconds = 0.0
    held_up: _Texts = ()


class TransferReady(_FromMember, frozen=True):
    """The slot is pinned, or reserved."""

    transfer: Number


class TransferDone(_FromMember, frozen=True):
    """This member's part of the transfer (send, receive or map) is done.

    :ivar image_digest: digest of the whole image's data (from senders of an image and
        every receiver; else empty).
    :ivar place: place of the version in this member's memory now.
    :ivar received: bytes by holder, of a version that was pulled.
    :ivar wrong: the wrong bytes, by holder that served them.
    :ivar holders: as in :class:`TransferFailed`.
    """

    transfer: Number
    image_digest: Digest
    transfer_s: Seconds
    verify_s: Seconds
    place: SlotPlace | None = None
    received: Annotated[dict[Text, Number], msgspec.Meta(max_length=_HOLDERS)] = {}
    holders: _Holders = {}
    wrong: _Holders = {}


class TransferMoved(_FromMember, frozen=True):
    """Progress of a pull, about once a second: bytes of the version so far."""

    transfer: Number
    received: Number


class TransferFailed(_FromMember, frozen=True):
    """The transfer failed; ``holders`` has reasons by name of slow or dead holders."""

    transfer: Number
    error: WireError
    holders: _Holders = {}


class CarrierUp(_FromMember, frozen=True):
    """This member's carrier listens at its address; ``port`` is 0 if it has ended.

    ``certificate_hash`` is the SHA-256 of the carrier's certificate, in hexadecimal.
    """

    port: Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
    certificate_hash: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""


class Dropped(_FromMember, frozen=True):
    """The slot of this version was reused for another one."""

    version: Number


class ReceiveAsk(_FromMember, frozen=True):
    """Ask for a committed version newer than ``after``.

    With a bound, ``after`` may be less than the version that the rank serves, which is
    then granted again if there is no newer one.

    ``at_least`` is the minimum of the version's number or, with a ``key``, of that
    number in its publisher's ``meta``.
    """

    ask: Number
    after: Signed
    at_least: int | Finite = 0
    key: Text = ""


class ReceiveCancel(_FromMember, frozen=True):
    """The rank no longer waits for an answer to its ask of this number."""

    ask: Number


class Loaded(_FromMember, frozen=True):
    """The rank serves ``version`` now; the load took ``load_s``."""

    version: Number
    load_s: Seconds


class LoadFailed(_FromMember, frozen=True):
    """A load has failed, and this member may hold only a part of the version.

    ``kept`` is True if it has loaded no part of it, and keeps its present version.
    """

    version: Number
    error: WireError
    kept: bool = False


class CanLoad(_FromMember, frozen=True):
    """This rank can load a version that it was granted; answered by ``LoadDecided``.

    ``whole`` is True if it has checked for all ranks of its replica.
    """

    version: Number
    whole: bool = False


class VersionAsk(_FromMember, frozen=True):
    """Carry out an order about versions; answered by ``VersionAnswer``."""

    ask: Number
    order: VersionOrder


class WatchLoaded(_FromMember, frozen=True):
    """Ask for ``WatchEnd`` when every live target replica has loaded ``version``.

    A newer version counts, too. It replaces this member's earlier watch.
    """

    watch: Number
    version: Signed


class OperationPost(_FromMember, frozen=True):
    """A member posts an operation.

    :ivar root: name of the root, source or destination (``group/replica`` or
        ``group/replica/rank``), or empty.
    :ivar segments: for ``recv``, empty accepts any; for ``scatter``, the root's inputs,
        one for each participant, and on other members the output or empty.
    :ivar applied: refs of the newest operations whose results this member wrote.
    :ivar unsettled: refs of operations that ended here with an unknown outcome.
    """

    post: Number
    kind: OperationKind
    segments: tuple[Segment, ...]
    deadline_s: Remaining
    reduce_op: ReduceOp = "sum"
    root: Text = ""
    step: Signed | None = None
    device: Text = "cpu"
    applied: _Texts = ()
    unsettled: _Texts = ()


class OperationDone(_FromMember, frozen=True):
    """The operation has run on this member; its results await the common verdict."""

    operation: Number


class OperationFailed(_FromMember, frozen=True):
    """This member's attempt at the operation has failed."""

    operation: Number
    error: WireError


if TYPE_CHECKING:
    FromMember: TypeAlias = _FromMember | Hello | ManifestAsk | ManifestPiece
else:  # msgspec decodes to a closed set of types: those above
    FromMember = Union[(*_FromMember.__subclasses__(), Hello, ManifestAsk, ManifestPiece)]

"""Value types that several messages use."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from replicas import errors
from replicas.common.foreign import lines, one_line
from replicas.messages.bounds import INFO_LENGTH, INTEGER_MAX, MANY, TEXT_LENGTH, Digest, ErrorText, Number, text_of
from replicas.messages.identity import Member

Backend = Literal["gloo", "nccl"]
Ranks = Literal["leader", "each", "all"]
OperationKind = Literal[
    "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "send", "recv", "barrier"
]
ReduceOp = Literal["sum", "mean", "min", "max"]
Scalar = None | bool | int | float | str
Meta = dict[str, Scalar | list[Scalar] | dict[str, Scalar]]
"""User data of a version: scalars, and lists and dicts of scalars."""
_MEMBERS = 128
"""Maximum number of members that an error names."""
_DIMENSIONS = 64  # more than any model's tensors have


class WireError(msgspec.Struct, frozen=True):
    """An error of :mod:`replicas.errors` as data, its texts bounded and sanitised."""

    kind: ErrorText
    message: ErrorText
    channel: ErrorText | None = None
    version: Number | None = None
    phase: ErrorText | None = None
    members: Annotated[tuple[ErrorText, ...], msgspec.Meta(max_length=MANY)] = ()
    hint: ErrorText = ""
    unanimous: bool = False

    def __post_init__(self) -> None:
        """Sanitise the texts in place, after construction or decoding: the sender may
        be hostile. Unprintable characters are removed or escaped."""
        for name in ("kind", "message", "channel", "phase", "hint"):
            text = getattr(self, name)
            if text is not None and not text.isprintable():
                msgspec.structs.force_setattr(self, name, (lines if name in ("message", "hint") else one_line)(text))
        if not all(map(str.isprintable, self.members)):
            msgspec.structs.force_setattr(self, "members", tuple(map(one_line, self.members)))

    @classmethod
    def of(cls, error: errors.ReplicasError) -> WireError:
        """Return ``error`` as data for a message, its texts and names cut to their
        limits."""
        version = error.version
        return cls(
            kind=errors.kind_of(error),
            message=text_of(error.message, TEXT_LENGTH),
            channel=None if error.channel is None else text_of(error.channel, INFO_LENGTH),
            version=version if type(version) is int and 0 <= version <= INTEGER_MAX else None,
            phase=None if error.phase is None else text_of(error.phase, INFO_LENGTH),
            members=tuple(text_of(name, INFO_LENGTH) for name in error.members[:_MEMBERS]),
            hint=text_of(error.hint, INFO_LENGTH),
            unanimous=error.unanimous is True,
        )

    def exception(self) -> errors.ReplicasError:
        """Return (do not raise) the exception that this describes, of its class in
        ``errors``.

        It is an InternalError for a kind that this release does not know.
        """
        about = msgspec.structs.asdict(self)
        return errors.error_class(about.pop("kind"))(about.pop("message"), **about)


class GroupSpec(msgspec.Struct, frozen=True):
    """A process group to form.

    :param prefix: new key prefix on the store, the same for all ranks and never reused.
    :param rank: of this sidecar in the group of ``size``.
    :param address: IP address to bind.
    :param timeout_s: limit in seconds to form the group; then the sidecar is killed.
    :param device: UUID of the only GPU to use, for NCCL and for buffers, which the
        member sets; if empty, NCCL uses the current GPU.
    :param names: of the members by rank, for messages; if empty, their rank numbers.
    :param addresses: of the members by rank; if empty, all have ``address``.
    :param nccl_env: NCCL_* variables to use (NCCL only), which the member sets, or None
        for the forkserver's.
    :param secret: shared by the members; signs their values in the store.
    """

    prefix: str
    store_host: str
    store_port: int
    rank: int
    size: int
    backend: Backend
    address: str
    timeout_s: float
    device: str = ""
    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    nccl_env: dict[str, str] | None = None
    secret: bytes = b""

    def name(self, rank: int) -> str:
        """Return the name of the member with this rank, or ``rank N`` if it has
        none."""
        return self.names[rank] if rank < len(self.names) else f"rank {rank}"


class Beacon(msgspec.Struct, frozen=True):
    """A small memory by which other processes find out whether they are on this host.

    They open ``/proc/PID/fd/FD`` and read the nonce.

    :ivar uid: effective user of the process; another user cannot open its memory.
    :ivar door: the socket, with its secret, that sends the descriptor to processes of
        other pid namespaces; may be empty.
    """

    pid: Number
    fd: Number
    nonce: Digest
    uid: Number
    door: Digest = ""


class SlotPlace(msgspec.Struct, frozen=True):
    """A version's memory in a member's process, opened as ``/proc/PID/fd/FD``.

    :ivar inode: inode that ``fstat`` must report; ``nbytes``: its size.
    :ivar serial: number of times the memory has been filled, which excludes that it has
        another version now.
    :ivar part: number of the part in it, of a version with several parts.
    :ivar device: UUID of the GPU that has the bytes; the file then says how to open
        them. Empty if the file has the bytes.
    :ivar door: socket of the process, as in its beacon.
    """

    pid: Number
    fd: Number
    inode: Number
    nbytes: Number
    serial: Number
    part: Number = 0
    device: Digest = ""
    door: Digest = ""


class HolderAddress(msgspec.Struct, frozen=True):
    """Address at which the carrier of a member serves a version.

    :ivar name: name of the member.
    :ivar certificate_hash: SHA-256 of the carrier's certificate, in hexadecimal; empty
        if it does not speak TLS.
    """

    name: str
    host: str
    port: int
    certificate_hash: str = ""


class PartPull(msgspec.Struct, frozen=True):
    """The holders of a part of a version, in order of preference.

    :ivar part: its number; -1 for the whole version.
    :ivar digest: digest of the part, if known; empty for the whole version.
    """

    part: int
    holders: tuple[HolderAddress, ...]
    digest: str = ""


class HeldVersion(msgspec.Struct, frozen=True):
    """A complete version in a member's slot.

    ``digest`` is empty if it was never computed (a source's own slot).
    """

    version: Number
    digest: Digest
    place: SlotPlace | None = None


class ManifestAsk(msgspec.Struct, frozen=True, tag=True):
    """Ask the other side for ``nbytes`` of a manifest from ``offset`` on.

    Manifests are sent in pieces (:mod:`replicas.core.versions.fetching`).
    """

    manifest_hash: Digest
    offset: Number
    nbytes: Number


class ManifestPiece(msgspec.Struct, frozen=True, tag=True):
    """Answer to :class:`ManifestAsk`: the data at ``offset`` of a manifest.

    ``total_nbytes`` is the size of the manifest; ``data`` is empty if the sender does
    not have it.
    """

    manifest_hash: Digest
    offset: Number
    total_nbytes: Number
    data: bytes


class ChannelSettings(msgspec.Struct, frozen=True):
    """The part of its channel's config that a member needs."""

    role: Literal["source", "target", "both", "peer", "observer"]
    deadline_s: float
    slots: int
    source_ranks: Literal["leader", "all"]
    peer_ranks: Ranks
    heartbeat_interval_s: float
    staging: Literal["host", "device"] = "host"
    pulls: bool = False
    """True if versions come to this host through a carrier, not over lanes."""
    encrypt: bool = False
    """True if carriers use TLS, and no version is sent over a process group."""
    carry_port: int = 0
    """The first port at which a carrier may listen; 0 for any port."""
    adopt_together: bool = False
    """True if a version is loaded only when all targets can load it."""


class ReceiptData(msgspec.Struct, frozen=True):
    """The outcome of a successful publish or operation.

    :ivar phases: seconds by phase.
    :ivar reasons: why each of ``lost`` was lost or left behind, in one line.
    :ivar staging: memory of the channel's slots; empty for an operation.
    :ivar digest: digest of the version's image; empty if it is not known yet.
    :ivar not_loaded: why replicas failed to load a version since the previous receipt,
        by name.
    :ivar wire_nbytes: bytes sent over the network.
    """

    epoch: int
    members: tuple[Member, ...]
    lost: tuple[str, ...]
    nbytes: int
    seconds: float
    phases: dict[str, float]
    version: int = 0
    reasons: dict[str, str] = {}
    staging: Literal["", "host", "device"] = ""
    digest: str = ""
    not_loaded: dict[str, str] = {}
    wire_nbytes: int = 0


class Segment(msgspec.Struct, frozen=True):
    """One tensor of an operation. ``dtype`` is torch's name without ``torch.``."""

    dtype: Digest
    shape: Annotated[tuple[Number, ...], msgspec.Meta(max_length=_DIMENSIONS)]

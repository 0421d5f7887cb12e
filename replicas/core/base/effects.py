"""Effects: actions that the state machines ask of the engine, as ordered values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

from replicas.core.base.ledger import Decision
from replicas.errors import ReplicasError
from replicas.messages import FromCoordinator, PublishEnd, ReceiptData, SlotPlace
from replicas.messages.identity import Member
from replicas.messages.version_orders import Steered
from replicas.status import SyncRecord


class _OnChannel(msgspec.Struct, frozen=True):
    """Base of the events of one channel."""

    channel: str


class MemberJoined(_OnChannel, frozen=True, tag=True):
    """A rank has joined a channel."""

    member: Member


LOSS_WORDS = {
    "exited": "its process ended",
    "lease": "no heartbeat came within heartbeat_timeout",
    "left": "it closed the channel",
    "absent": "it has not reconnected to the restarted coordinator",
    "fenced": "another process has joined under its name",
    "replaced": "a newer process of this rank has joined",
    "overflow": "it does not read its messages",
}
"""What the reasons of a :class:`MemberLost` mean, for people; others are texts."""


class MemberLost(_OnChannel, frozen=True, tag=True):
    """A member has left a channel, died, or lost its lease.

    ``reason``: ``exited``, ``lease``, ``left`` (in order), ``fenced``, ``replaced``,
    ``overflow``, ``absent`` (it did not come back to a new coordinator), or a text.
    ``observes``: the member was an observer (which may use the name of a rank), so no
    replica is affected.
    """

    member: Member
    reason: str
    observes: bool = False


class EpochStarted(_OnChannel, frozen=True, tag=True):
    """A channel has a new membership: these members, until the next epoch."""

    epoch: int
    members: tuple[Member, ...]


class SyncEnded(_OnChannel, frozen=True, tag=True):
    """A publish has ended: committed, or failed with the error named in the record.

    Emitted once, by the coordinator that decided it.
    """

    record: SyncRecord


class CaughtUp(_OnChannel, frozen=True, tag=True):
    """Members that had missed a version have received it.

    ``moved_nbytes``: bytes sent over the network for that. ``moved_to``: the same by
    replica (``group/replica``). ``pulled``: the same by the member that pulled and the
    member that served. ``seconds``: how long it took.
    """

    version: int
    members: tuple[Member, ...]
    moved_nbytes: int
    moved_to: dict[str, int] = {}
    pulled: dict[str, dict[str, int]] = {}
    seconds: float = 0.0


class WrongBytes(_OnChannel, frozen=True, tag=True):
    """A member has pulled wrong bytes, and asked for them again.

    ``holder``: name of the member that served them. ``reason``: which bytes.
    """

    version: int
    member: Member
    holder: str
    reason: str


class Retried(_OnChannel, frozen=True, tag=True):
    """A transfer or an operation starts another attempt.

    ``reason``: ``lost``, ``frozen``, ``failed``, ``refused`` or ``store``. ``why``: why
    a process group was abandoned, as text.
    """

    reason: str
    why: str = ""


class SidecarReplaced(_OnChannel, frozen=True, tag=True):
    """Sidecars of one lane, ``count`` of them, were killed and will be replaced."""

    reason: str
    count: int


class ReplicaLoaded(_OnChannel, frozen=True, tag=True):
    """All ranks of a replica have loaded ``version``; 0 if their versions differ.

    ``load_s``: how long the slowest rank had the update open, in seconds. It is 0 if
    the ranks had loaded the version before this coordinator started.
    """

    group: str
    replica: int
    version: int
    load_s: float = 0.0


class LoadFailed(_OnChannel, frozen=True, tag=True):
    """A replica failed to load ``version``.

    ``kept``: it refused the version before loading any of it, and still serves its old
    one.
    """

    group: str
    replica: int
    version: int
    reason: str
    kept: bool = False


class ReplicaIdle(_OnChannel, frozen=True, tag=True):
    """A draining replica has finished its work in progress on this channel."""

    group: str
    replica: int
    generation: int


class OperationEnded(_OnChannel, frozen=True, tag=True):
    """A collective between peers has ended.

    ``kind``: its name, such as ``all_reduce``. ``outcome``: ``ok``, or the name of an
    error. ``error``: text of the error.
    """

    kind: str
    outcome: str
    seconds: float
    error: str = ""


class StepFell(_OnChannel, frozen=True, tag=True):
    """A committed version has a lower ``meta["step"]`` than an earlier one.

    That happens when a trainer restarts without its checkpoint. Emitted once, until the
    steps have reached ``before`` again.
    """

    version: int
    step: int | float
    before: int | float


What = Literal["promoted", "rejected", "rolled_back", "held", "released", "labelled", "scored"]


class VersionDecided(_OnChannel, frozen=True, tag=True):
    """A decision about what is served, kept or said of ``version``.

    ``what``: ``promoted``; ``rejected``; ``rolled_back`` (it has the content of version
    ``value``); ``held`` (for ``value`` seconds, 0: while its holder lives) and
    ``released``, with the ``name`` of the lease; ``labelled`` (``value`` 0: no longer);
    ``scored``: ``name`` is ``value``.
    """

    version: int
    what: What
    name: str = ""
    value: float = 0.0
    why: str = ""


class StoreChanged(_OnChannel, frozen=True, tag=True):
    """The rendezvous store answers again (``up``), or no longer answers."""

    up: bool


Event = (
    MemberJoined
    | MemberLost
    | EpochStarted
    | SyncEnded
    | StepFell
    | CaughtUp
    | WrongBytes
    | Retried
    | SidecarReplaced
    | ReplicaLoaded
    | LoadFailed
    | ReplicaIdle
    | OperationEnded
    | VersionDecided
    | StoreChanged
)


class Send(msgspec.Struct, frozen=True):
    """Send a member a message of its session."""

    member: Member
    message: FromCoordinator


class SweepStore(msgspec.Struct, frozen=True):
    """Delete the store's keys under this prefix now, and again later for stragglers."""

    prefix: str


class ReplaceStore(msgspec.Struct, frozen=True):
    """End the store at this address, to which a non-member wrote, and start another."""

    host: str
    port: int


class Keep(msgspec.Struct, frozen=True):
    """Open ``owner``'s memory with ``version`` in this process, and hold it.

    The engine answers with the place at which this process holds it.
    """

    channel: str
    owner: Member
    place: SlotPlace
    version: int


class Reply(msgspec.Struct, frozen=True):
    """Call ``tell`` with the outcome of an order that did not come from a member."""

    tell: Callable[[Steered | ReplicasError], None]
    outcome: Steered | ReplicasError


class LetGo(msgspec.Struct, frozen=True):
    """Close the memory held for that member."""

    channel: str
    owner: Member


class Read(msgspec.Struct, frozen=True):
    """Decode and join these manifests (:func:`replicas.core.versions.manifests.read`).

    It runs off the event loop, as many tensors take seconds. ``key`` identifies the
    result. ``whole``: there is only one manifest, already complete.
    """

    key: str
    encoded: tuple[bytes, ...]
    whole: bool


Effect = Send | Decision | Reply | SweepStore | ReplaceStore | Keep | LetGo | Read | Event


def with_commit(effects: Iterable[Effect], version: int, seconds: float) -> Iterator[Effect]:
    """Yield all effects; add the time of the disk write to those that report a commit.

    These are the publish's :class:`SyncEnded` record and the receipts that its ranks
    are sent: both get ``seconds`` more, also as phase ``commit``.

    :param version: the version whose commit was recorded.
    :param seconds: how long it took until the commit was on disk.
    """

    def longer(ended: ReceiptData | SyncRecord) -> Any:
        """Return a copy of ``ended`` (a receipt or a record of a publish) that took
        ``seconds`` longer, with ``seconds`` as the time of its phase ``commit``."""
        phases = ended.phases | {"commit": seconds}
        return msgspec.structs.replace(ended, seconds=ended.seconds + seconds, phases=phases)

    for effect in effects:
        match effect:
            case SyncEnded(record=SyncRecord(version=found, outcome="committed") as record) if found == version:
                yield msgspec.structs.replace(effect, record=longer(record))
            case Send(message=PublishEnd(receipt=ReceiptData(version=found) as receipt) as end) if found == version:
                yield Send(effect.member, msgspec.structs.replace(end, receipt=longer(receipt)))
            case _:
                yield effect

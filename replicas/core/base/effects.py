"""Effects: actions that the state machines ask of the shell, as ordered values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from replicas.messages import FromCoordinator, PublishEnd, ReceiptData, SlotPlace
from replicas.messages.identity import Member
from replicas.status import SyncRecord


class _OnChannel(msgspec.Struct, frozen=True):
    """What happens on one channel."""

    channel: str


class MemberJoined(_OnChannel, frozen=True, tag=True):
    """A rank has joined a channel."""

    member: Member


class MemberQuarantined(_OnChannel, frozen=True, tag=True):
    """A member is excluded from process groups, because no group with it works.

    It is served alone, and released once that has worked.
    """

    member: Member
    reason: str


class MemberLost(_OnChannel, frozen=True, tag=True):
    """A member has left a channel, died, or lost its lease.

    ``reason``: ``absent`` if it did not come back to a new coordinator in time.
    ``observes``: it was an observer, which may use the name of a rank without being
    one; no replica is affected.
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

    Told once, by the coordinator that decided it.
    """

    record: SyncRecord


class CaughtUp(_OnChannel, frozen=True, tag=True):
    """Members that had missed a version have it now.

    ``moved_nbytes``: bytes that were sent over the network for it, and ``moved_to``: of
    them to each replica (``group/replica``). ``pulled``: of them, by the member that
    pulled and the one that served them. ``seconds``: how long it took.
    """

    version: int
    members: tuple[Member, ...]
    moved_nbytes: int
    moved_to: dict[str, int] = {}
    pulled: dict[str, dict[str, int]] = {}
    seconds: float = 0.0


class WrongBytes(_OnChannel, frozen=True, tag=True):
    """A member has pulled bytes that are not the published ones, and asked again.

    ``holder``: name of the member that served them. ``reason``: which bytes.
    """

    version: int
    member: Member
    holder: str
    reason: str


class Retried(_OnChannel, frozen=True, tag=True):
    """A transfer starts another attempt.

    ``reason``: ``lost``, ``frozen``, ``failed``, ``refused`` or ``store``. ``why``:
    what is known of a process group that was left.
    """

    reason: str
    why: str = ""


class SidecarReplaced(_OnChannel, frozen=True, tag=True):
    """Sidecars of one lane, ``count`` of them, were killed and will be replaced."""

    reason: str
    count: int


class ReplicaLoaded(_OnChannel, frozen=True, tag=True):
    """All ranks of a replica have loaded ``version``; 0: they differ.

    ``load_s``: how long the slowest of them had the update open, in seconds; 0: not
    known, as they had loaded it when a new coordinator began, which tells it again.
    """

    group: str
    replica: int
    version: int
    load_s: float = 0.0


class LoadFailed(_OnChannel, frozen=True, tag=True):
    """A replica failed to load ``version``.

    ``kept``: it refused the version before anything of it was loaded, and goes on with
    the one that it has.
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
    error.
    """

    kind: str
    outcome: str
    seconds: float


class StepFell(_OnChannel, frozen=True, tag=True):
    """A committed version has a lower ``meta["step"]`` than an earlier one.

    A trainer that restarts without its checkpoint does that. Told once, until the steps
    have reached ``before`` again.
    """

    version: int
    step: int | float
    before: int | float


class StoreChanged(_OnChannel, frozen=True, tag=True):
    """The rendezvous store answers again (``up``), or no longer answers."""

    up: bool


Event = (
    MemberJoined
    | MemberLost
    | MemberQuarantined
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
    | StoreChanged
)


class CommitDecision(msgspec.Struct, frozen=True):
    """One line of the decision log; as an effect: durable before any later effect.

    ``abort``: the version was under way, and will never be committed.
    """

    kind: Literal["commit", "abort"]
    channel: str
    version: int
    digest: str
    epoch: int
    term: int


class Past(msgspec.Struct, frozen=True):
    """What the decision log says of a channel when a coordinator starts.

    :param decided: number and digest of the newest commit; (0, ""): none.
    :param aborted: later numbers that failed.
    :param epoch: the last one that members of an earlier coordinator may have seen.
    """

    decided: tuple[int, str] = (0, "")
    aborted: frozenset[int] = frozenset()
    epoch: int = 0

    @property
    def floor(self) -> int:
        """The newest version number that was ever decided."""
        return max(self.decided[0], *self.aborted, 0)


class Send(msgspec.Struct, frozen=True):
    member: Member
    message: FromCoordinator


class SweepStore(msgspec.Struct, frozen=True):
    """Delete the store's keys under this prefix now, and again later for stragglers."""

    prefix: str


class ReplaceStore(msgspec.Struct, frozen=True):
    """End the store that listens there and start another: a non-member wrote to it."""

    host: str
    port: int


class Keep(msgspec.Struct, frozen=True):
    """Hold the memory of ``owner`` with ``version``, and answer at once.

    The answer is the place where it can be opened in this process.
    """

    channel: str
    owner: Member
    place: SlotPlace
    version: int


class LetGo(msgspec.Struct, frozen=True):
    """Stop holding that memory."""

    channel: str
    owner: Member


class Read(msgspec.Struct, frozen=True):
    """Decode and join these manifests (:func:`replicas.core.versions.manifests.read`).

    It runs off the event loop, as many tensors take seconds. ``key`` names the result
    when it is handed in. ``whole``: there is one manifest, already complete.
    """

    key: str
    encoded: tuple[bytes, ...]
    whole: bool


Effect = Send | CommitDecision | SweepStore | ReplaceStore | Keep | LetGo | Read | Event


def with_commit(effects: Iterable[Effect], version: int, seconds: float) -> Iterator[Effect]:
    """Add to the effects that follow a decision how long its record took."""

    def longer(ended: ReceiptData | SyncRecord) -> Any:
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

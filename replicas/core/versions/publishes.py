"""Publishes: from the ranks' calls of ``publish`` to one verdict for all of them.

A publish is identified by (group, replica, number); the number counts the replica's
publishes. The first rank that begins it fixes the version. It is *packing* until every
contributing rank (the leader, or all of them) has filled its slot; then it is queued,
in the order of packing. It ends in exactly one verdict, which every rank of the replica
gets, also a rank that begins late. The states are those of
:data:`replicas.core.base.membership.PUBLISH`. A publish that was begun under another
coordinator is announced as *resumed*, with the version number that it had there.

All ranks of one life of a replica count from the same number, whenever they join: also
a rank that joins when the others have published and left. It gets their verdicts, the
last :data:`KEPT_VERDICTS` of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from replicas import errors
from replicas.core.base.membership import PUBLISH, PublishState
from replicas.core.members.member_state import Life
from replicas.core.members.roster import Roster
from replicas.core.moving.attempt import Payload
from replicas.core.moving.transfer import Transfer
from replicas.core.versions.steps import number_in
from replicas.messages import Filled, Packed, PublishBegin, ReceiptData, WireError
from replicas.messages.bounds import REASON_LENGTH, text_of, texts_of
from replicas.messages.identity import Member, ProcessIdentity
from replicas.status import PHASES, SyncRecord

KEPT_VERDICTS = 16  # a rank that joins late may be this many publishes behind the others
OPEN_MAX = 256
"""Publishes of one replica without a verdict."""
SLOWEST = 16
"""Replicas of which a record gives the seconds: the limit bounds the event."""
_TRACE_LENGTH = 128
ALL_NEEDED = (
    'with on_lost = "raise" each target is needed: publish again when these answer again or have left the channel'
)
MATE_NEEDED = "publish again when this rank has rejoined"
TOO_FEW = "start or wait for more target replicas, or lower min_targets"


@dataclass(slots=True, eq=False)
class Publish:
    """One publish: a version that the ranks of a source replica publish together."""

    group: str
    replica: int
    asked: PublishBegin
    """The message of the first rank that began it."""
    version: int
    meta: dict[str, object]
    began_at: float
    deadline: float
    state: PublishState = "packing"
    begun: dict[Member, float] = field(default_factory=dict)
    """When each rank began it."""
    packed: dict[Member, Packed] = field(default_factory=dict)
    manifests: dict[Member, bytes] = field(default_factory=dict)
    """Encoded manifests of the ranks that have packed bytes; until the verdict."""
    packed_at: float = 0.0
    moving_at: float = 0.0
    filled_at: float = 0.0
    """Time at which the last slot that was sent while being packed was full."""
    awaited: set[Member] = field(default_factory=set)
    """Targets without an answer at the last tick."""
    lost: dict[str, str] = field(default_factory=dict)
    """Reasons by name of the lost member."""
    transfer: Transfer | None = None
    payload: Payload | None = None
    receipt: ReceiptData | None = None
    error: WireError | None = None
    held: dict[Member, float] = field(default_factory=dict)
    """Seconds from the begin of the publish until each member had the version."""

    @property
    def over(self) -> bool:
        """True if the publish has its verdict."""
        return PUBLISH.final(self.state)

    @property
    def carriers(self) -> list[Member]:
        """Ranks that have packed bytes for the publish, in order."""
        # a rank without a manifest takes part, but has no bytes
        return sorted(member for member, packed in self.packed.items() if packed.manifest_hash)

    def phases(self, now: float, failed_in: str = "") -> dict[str, float]:
        """Return the seconds that each phase took until ``now``, in order.

        The engine sets ``commit`` later. Time that no rank has measured counts as
        ``pack`` until the slots are full, and then as ``acknowledge``; if the publish
        failed, as the phase ``failed_in``. With a GPU also ``hold``: how long the
        source's streams were held.
        """

        def longest(phase: str) -> float:
            """Return the most seconds that any rank took for the phase."""
            return max((getattr(packed, f"{phase}_s") for packed in self.packed.values()), default=0.0)

        transfer, moving_at = self.transfer, self.moving_at or now
        late = [self.begun[member] for member in self.carriers if member in self.begun]
        parts = max(late, default=self.began_at) - self.began_at, *map(longest, ("wait", "pack", "digest"))
        phases = dict(zip(("begin", "wait", "pack", "verify"), parts, strict=True))
        phases["queue"] = max(0.0, moving_at - self.packed_at) if self.packed_at else 0.0
        last = "pack" if self.packed_at or failed_in not in phases else failed_in
        phases[last] += max(0.0, (self.packed_at or now) - self.began_at - sum(parts))
        if transfer is not None:
            filling_s = max(0.0, self.filled_at - moving_at)
            map_s, verify_s = transfer.seconds["map"], transfer.seconds["verify"]
            moved_s = max(filling_s, transfer.seconds["form"] + transfer.seconds["transfer"] + verify_s)
            phases = transfer.seconds | phases | {"verify": phases["verify"] + verify_s}
            phases["pack"] = max(phases["pack"], filling_s)
            last = failed_in if failed_in in phases else "acknowledge"
            phases[last] = phases.get(last, 0.0) + max(0.0, now - moving_at - moved_s - map_s)
        phases = {"acknowledge": 0.0} | phases | {"commit": 0.0}
        phases = {name: phases[name] for name in PHASES if name in phases}
        return phases | ({"hold": hold_s} if (hold_s := longest("hold")) else {})

    def note_holders(self, now: float) -> None:
        """Record when each member that has the version now got it, for the phases."""
        if self.transfer is not None:
            for member in self.transfer.verified - self.held.keys():
                self.held[member] = now - self.began_at

    def receipt_of(
        self, members: Iterable[Member], lost: dict[str, str], roster: Roster, digest: str, now: float
    ) -> ReceiptData:
        """Return the receipt of the committed publish.

        Move the reasons of failed loads from the roster's history into the receipt.

        :param members: those that hold the version.
        :param lost: why targets lack it, by name.
        :param digest: of the version.
        """
        return ReceiptData(
            epoch=roster.epoch,
            members=tuple(sorted(members)),
            lost=tuple(lost),
            reasons=texts_of(lost),
            nbytes=self.payload.nbytes if self.payload is not None else 0,
            wire_nbytes=sum(self.transfer.moved_to.values()) if self.transfer is not None else 0,
            seconds=now - self.began_at,
            phases=self.phases(now),
            version=self.version,
            staging=roster.config.staging,
            digest=digest,
            not_loaded=texts_of(roster.history.take_unloaded()),
        )

    def record(self, outcome: str, now: float, *, moved: bool) -> SyncRecord:
        """Return the record of the publish's end, for events and the status.

        :param outcome: ``committed``, or the name of an error.
        :param moved: include the bytes that its transfer sent.
        """
        self.note_holders(now)
        transfer, receipt, seconds = self.transfer if moved else None, self.receipt, now - self.began_at
        phases = receipt.phases if receipt is not None else self.phases(now, (self.error and self.error.phase) or "")
        held = {member: self.held.get(member, seconds) for member in self.awaited} or self.held
        replicas: dict[str, float] = {}
        for member, held_s in self.held.items():
            replicas[member.replica_name] = max(held_s, replicas.get(member.replica_name, 0.0))
        slowest = sorted(replicas.items(), key=lambda item: -item[1])[:SLOWEST]
        trace = self.meta.get("traceparent")
        return SyncRecord(
            version=self.version,
            outcome=outcome,
            seconds=seconds,
            nbytes=self.payload.nbytes if self.payload is not None else 0,
            moved_nbytes=sum(transfer.moved_to.values()) if transfer is not None else 0,
            moved_to=dict(transfer.moved_to) if transfer is not None else {},
            pulled=dict(transfer.pulled) if transfer is not None else {},
            phases=phases,
            members=len(receipt.members) if receipt is not None else 0,
            lost=tuple(self.lost),
            publisher=f"{self.group}/{self.replica}",
            held={name: round(held_s, 6) for name, held_s in slowest},
            slowest=max(held, key=held.__getitem__).name if held else "",
            reasons=texts_of(self.lost),
            error=text_of(self.error.message, REASON_LENGTH) if self.error is not None else "",
            step=number_in(self.meta, "step"),
            trace=trace if isinstance(trace, str) and len(trace) <= _TRACE_LENGTH else "",
        )


class Publishes:
    """All publishes of a channel: numbering, agreement of ranks, the queue.

    :param all_ranks: all ranks of a replica have bytes, not only its leader.
    """

    def __init__(self, channel: str, floor: int, *, all_ranks: bool = False) -> None:
        """Start without publishes.

        :param floor: the newest version number that was ever used.
        :param all_ranks: all ranks of a replica have bytes, not only its leader.
        """
        self._channel, self._all_ranks = channel, all_ranks
        self.numbered = floor
        """The newest version number ever given out."""
        self._known: OrderedDict[tuple[str, int, int], Publish] = OrderedDict()
        self._made: dict[tuple[str, int], int] = {}
        self._counts: dict[Member, tuple[Life, ProcessIdentity, int]] = {}
        """Life and process of each member, and the number that it has reached."""
        self._forgotten: dict[tuple[str, int], int] = {}
        """The newest number of each replica whose verdict is forgotten."""
        self.queue: list[Publish] = []
        self.moving: Publish | None = None

    def count(self, group: str, replica: int) -> int:
        """Return the number of the replica's newest publish; 0 without any."""
        return self._made.get((group, replica), 0)

    def joined(self, member: Member, process: ProcessIdentity, life: Life) -> None:
        """Set the number from which a rank that joins counts its publishes.

        Ranks join one after another, and the first may publish, and leave, before the
        last has joined: all of them count from the replica's number at the beginning of
        their life. A process that has left, and joins again, continues its own count.
        Another process of a rank that was there before starts with the publish for
        which the others wait, or else with their next one.

        :param process: identity of the rank's process.
        :param life: the life of the replica that the rank belongs to.
        """
        replica = (member.group, member.replica)
        if life.published < 0:
            life.published = self.count(*replica)
        number = life.published
        if member.rank in life.counts:
            before = life.counts[member.rank]
            packing = [p for p in self.without_verdict() if (p.group, p.replica) == replica and p.state == "packing"]
            waiting = [p.asked.publish for p in packing if member.rank not in {m.rank for m in p.begun}]
            if before is not None and before[0] == process:
                number = before[1]
            else:
                # its next publish is then the one that the others wait for
                number = min(waiting) - 1 if waiting else self.count(*replica)
        self._counts[member] = life, process, number
        life.counts[member.rank] = None

    def came_back(self, member: Member, made: int) -> None:
        """Take over the count of a rank that comes from another coordinator.

        :param made: number of its last publish there.
        """
        life, process, _ = self._counts[member]
        life.published = max(life.published, made)
        self._counts[member] = life, process, made
        self._made[member.group, member.replica] = max(made, self.count(member.group, member.replica))

    def last_number(self, member: Member) -> int:
        """Return the number of the member's last publish; 0 if it is unknown."""
        return self._counts[member][2] if member in self._counts else 0

    def left(self, member: Member, *, in_order: bool) -> None:
        """Forget the count of a member that is gone.

        :param in_order: keep the count in its life, as it may come back.
        """
        known = self._counts.pop(member, None)
        if in_order and known is not None:
            life, process, number = known
            life.counts[member.rank] = process, number

    def get(self, member: Member, number: int) -> Publish | None:
        """Return the publish with this number of the member's replica, or None."""
        return self._known.get((member.group, member.replica, number))

    def without_verdict(self) -> list[Publish]:
        """Return the publishes that have no verdict yet, oldest first; change none."""
        return [publish for publish in self._known.values() if not publish.over]

    def take_number(self) -> int:
        """Use up the next version number, for a version without a publish.

        Return it.
        """
        self.numbered += 1
        return self.numbered

    def begin_publish(self, member: Member, message: PublishBegin, now: float) -> Publish:
        """Begin a publish of a rank, or join the one that another rank has begun.

        The first rank fixes the version's number. After an error the rank has not
        joined, and a publish of others stays as it was; the rank's count of publishes
        includes it.

        :raises errors.StaleVersion: its number is not newer than those before.
        :raises errors.RanksDisagree: ranks ask for other versions, or are at other
            steps.
        :raises errors.Busy: too many publishes of the replica have no verdict.
        :raises errors.Gone: it ended long ago, and its verdict is forgotten.
        """
        publish = self.get(member, message.publish)
        replica = (member.group, member.replica)
        life, process, made = self._counts[member]
        # a resumed publish may be older than the count
        self._counts[member] = life, process, max(made, message.publish)
        if publish is None and message.publish <= self._forgotten.get(replica, 0):
            raise errors.Gone(
                f"publish number {message.publish} of {member.replica_name} ended long ago, as {member} joined too late",
                channel=self._channel,
                members=[member.name],
                hint=f"join before the other ranks of the replica have published {KEPT_VERDICTS} more versions",
            )
        if publish is None and len([p for p in self.without_verdict() if (p.group, p.replica) == replica]) >= OPEN_MAX:
            raise errors.Busy(
                f"{OPEN_MAX} publishes of {member.replica_name} have not ended yet",
                channel=self._channel,
                hint="wait for the results of some before the next publish",
            )
        if publish is None:
            version = self.numbered + 1 if message.version is None else message.version
            if version <= self.numbered and not message.resumed:  # a resumed publish got its number before
                raise errors.StaleVersion(
                    f"version {version} is not newer than version {self.numbered} of channel {self._channel!r}",
                    channel=self._channel,
                    version=version,
                )
            self.numbered = max(self.numbered, version)
            publish = Publish(*replica, message, version, dict(message.meta), now, now + message.deadline_s)
            self._known[(*replica, message.publish)] = publish
            self._made[replica] = max(message.publish, self.count(*replica))
            over = [key for key, known in self._known.items() if known.over and key[:2] == replica]
            for key in over[:-KEPT_VERDICTS]:  # keep the last of each replica, however often others publish
                del self._known[key]
                self._forgotten[replica] = max(self._forgotten.get(replica, 0), key[2])
        elif not self._agrees(publish, message):
            raise errors.RanksDisagree(
                f"ranks of {member.replica_name} publish different versions: {member} version {message.version}, "
                f"another rank version {publish.asked.version}",
                channel=self._channel,
                version=publish.version,
            )
        steps = number_in(message.meta, "step"), number_in(publish.asked.meta, "step")
        if None not in steps and len({*steps}) > 1:  # a new process may have resumed from another step
            raise errors.RanksDisagree(
                f"ranks of {member.replica_name} publish different steps: {member} step {steps[0]}, "
                f"another rank step {steps[1]}",
                channel=self._channel,
                version=publish.version,
            )
        publish.begun.setdefault(member, now)
        return publish

    @staticmethod
    def _agrees(publish: Publish, message: PublishBegin) -> bool:
        """Return True if a rank's message begins the same publish as the first rank's.

        A resumed publish names the version that it got, not the one that it asked for.
        """
        if publish.asked.resumed or message.resumed:
            return message.version == publish.version or (message.version is None and not message.resumed)
        return message.version == publish.asked.version

    def unpacked(self, publish: Publish, world: int) -> list[int]:
        """Return the ranks of the replica that have yet to fill their slots, in order.

        :param world: number of the replica's ranks.
        """
        ranks = range(world if self._all_ranks else 1)
        return sorted({*ranks} - {member.rank for member in publish.packed})

    def packed(self, member: Member, message: Packed, world: int, now: float) -> None:
        """Record that a rank has filled its slot.

        After the last rank, queue the publish. A report about a publish that is not
        packing (it has failed, say) is ignored.

        :param world: number of the replica's ranks.
        """
        publish = self.get(member, message.publish)
        if publish is None or publish.state != "packing":  # it failed while this rank packed
            return
        publish.packed[member] = message
        if message.meta is not None and member.rank == 0:  # known late, and only the leader's counts
            publish.meta = dict(message.meta)
        if not self.unpacked(publish, world):
            publish.state = PUBLISH.next(publish.state, "packed_by_all")
            publish.packed_at = now
            self.queue.append(publish)

    def filled(self, member: Member, message: Filled, now: float) -> Publish | None:
        """Record that a rank has filled its slot, of which bytes were sent before that.

        Such a rank is *streaming*. Return its publish; return None, and do nothing, if
        the publish is over or the rank was not streaming.
        """
        publish = self.get(member, message.publish)
        packed = publish.packed.get(member) if publish is not None else None
        if publish is None or packed is None or publish.over or not packed.streaming:
            return None
        publish.filled_at = now
        publish.packed[member] = msgspec.structs.replace(packed, **msgspec.structs.asdict(message), streaming=False)
        return publish

    def start_moving(self, publish: Publish, now: float) -> None:
        """Take the publish from the queue, as :attr:`moving`; start no transfer."""
        self.queue.remove(publish)
        publish.state = PUBLISH.next(publish.state, "turn")
        publish.moving_at = now
        self.moving = publish

    def end(self, publish: Publish, *, committed: bool) -> None:
        """Give the publish its final state, and take it out of the queue; send nothing.

        Free its manifests and ``meta``.

        :param committed: its version is committed; False: the publish has failed.
        """
        publish.manifests.clear()  # the payload has the joined manifest
        publish.meta, publish.asked = {}, msgspec.structs.replace(publish.asked, meta={})  # up to 1 MiB each
        publish.state = PUBLISH.next(publish.state, "decided" if committed else "fail")
        if publish in self.queue:
            self.queue.remove(publish)
        if self.moving is publish:
            self.moving = None

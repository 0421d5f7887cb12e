"""One attempt of a transfer: its plan, its tasks and messages, and the version.

A leader (:mod:`replicas.core.moving.paths`) pulls a version through its carrier, from
the first of its holders that works (:mod:`replicas.carry.pull`). The two ends need no
handshake: the leader is told the addresses of the holders and a secret, and each holder
is told to serve; a carrier that is asked too early lets the request wait. A member
serves from its *serve* or *pull* offer on until its cancel: so every member of an
attempt is told when the attempt is over, also members that are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from replicas import errors
from replicas.core.base.manifest import Manifest
from replicas.core.base.membership import DELIVERY, DeliveryEvent, DeliveryState
from replicas.core.members.roster import Roster
from replicas.core.moving.channel_context import BroadcastEnd, ChannelContext
from replicas.core.moving.paths import IMAGE, TransferPlan
from replicas.core.moving.task import OPEN, Task, Way
from replicas.messages import HolderAddress, Meta, PartPull, SlotPlace, TransferCancel, TransferOffer
from replicas.messages.identity import Member

STILL_S = 5.0
"""A pull stands still if no byte has moved for so many seconds."""


@dataclass(slots=True)
class Payload:
    """One version's bytes.

    :ivar encoded: its manifest, as it is sent.
    :ivar digest: empty until a member with the whole image has computed it.
    :ivar part_digests: of the parts, in order; empty where they are not known.
    :ivar filling: the member that sends the version while still filling its own slot.
    """

    version: int
    manifest_hash: str
    manifest: Manifest
    encoded: bytes
    nbytes: int
    device: str
    meta: Meta
    digest: str = ""
    part_owners: tuple[Member, ...] = ()
    part_digests: tuple[str, ...] = ()
    filling: Member | None = None


class Attempt:
    """One attempt to move a version: a task for each member that takes part.

    :ivar number: part of each of its messages; replies to an earlier attempt are
        ignored.
    :ivar offered_at: time of the last offer to a member that maps.
    :ivar stop_broadcast: cancels its broadcast, while one runs.
    """

    def __init__(
        self,
        context: ChannelContext,
        payload: Payload,
        plan: TransferPlan,
        number: int = 0,
        deadline: float = 0.0,
        now: float = 0.0,
    ) -> None:
        """Prepare the attempt; it sends nothing before :meth:`send_offers`.

        :param payload: the version to move.
        :param plan: which member gets the version from which.
        :param number: unique number of the attempt; 0 for one that is never sent.
        :param deadline: until when members may take part, by the clock of ``now``.
        :param now: when it begins, by a monotonic clock.
        """
        self.plan, self.number, self.began_at, self.offered_at = plan, number, now, now
        self.tasks: dict[Member, Task] = {}
        self._in: dict[DeliveryState, dict[Member, Task]] = {state: {} for state in DELIVERY.states}
        self.stop_broadcast: Callable[[str], None] | None = None
        self._context, self._payload, self._deadline = context, payload, deadline
        self._servers = plan.servers
        self._base = _newest_base(context.roster, plan, payload.version)
        self._waiting = Counter(map(context.roster.host, plan.waiting))
        """By host: how many members wait until another member there has the version."""
        self._secret = context.pull_secret(number)
        self._closed = False

    # ------------------------------------------------------------ tasks

    def of(self, *states: DeliveryState) -> list[Task]:
        """Return the tasks (one for each member that takes part) in these states."""
        return [one for state in states for one in self._in[state].values()]

    def step(self, one: Task, event: DeliveryEvent) -> None:
        """Change the state of task ``one`` by the table ``DELIVERY``.

        :raises replicas.common.table.InvalidStep: ``event`` cannot happen in its state.
        """
        after = DELIVERY.next(one.state, event)
        self._in[one.state].pop(one.member, None)
        self._in[after][one.member] = one
        one.state = after

    def under_way(self, member: Member, number: int) -> Task | None:
        """Return a member's task if it was offered and has not ended, or None.

        :param number: of the attempt that the member's message is about; if that is
            another attempt, the result is None.
        """
        one = self.tasks.get(member) if number == self.number else None
        return one if one is not None and one.state in ("offered", "taking") else None

    @property
    def any_open(self) -> bool:
        """True if a task has not ended: the attempt waits for its member."""
        return any(self._in[state] for state in OPEN)

    @property
    def concerned(self) -> frozenset[Member]:
        """All members of the attempt: those that get the version, and that serve it."""
        return frozenset((*self._servers, *self.tasks))

    @property
    def unready(self) -> set[Member]:
        """Members that must reserve a slot, or map, and have not answered."""
        return {one.member for one in self.of("due", "offered") if one.reply is None}

    @property
    def is_preparing(self) -> bool:
        """True if its broadcast waits until all members have their slots ready."""
        return any(one.in_group for one in self.of("offered"))

    @property
    def waits_for_slots(self) -> bool:
        """True if the attempt waits only for members without a reserved slot."""
        pulls = [one.state for one in self.of(*OPEN, "came") if one.way == "pull"]
        return self.is_preparing or set(pulls) == {"offered"}

    def is_moving(self, now: float) -> bool:
        """Return True if bytes move: a broadcast runs, or a pull moved within 5 s."""
        return self.stop_broadcast is not None or any(
            one.way == "pull" and now - one.moved_at < STILL_S for one in self.of("offered", "taking")
        )

    # ------------------------------------------------------------ offers

    def send_offers(self, now: float) -> None:
        """Queue the message that gives each member its role, and make its task.

        Pulls are offered once their holders listen (:meth:`offer_pulls`).
        """
        plan, filling = self.plan, self._payload.filling
        readers = Counter(plan.maps.values())
        lent = {lender: self._map_offer(lender, now, sharing) for lender, sharing in readers.items()}
        for member, lender in plan.maps.items():
            self._offer(Task(member, "map", lenders=frozenset((lender,))), lent[lender])
        for member in plan.broadcast:
            role: Way = "send" if member == plan.broadcast[0] else "receive"
            offer = self._message(role, now, sharing=self._sharing(member), streaming=member == filling)
            self._offer(Task(member, role, {IMAGE: plan.broadcast[:1]}), offer)
        for member in self._servers:
            more = {"secret": self._secret, "streaming": member == filling, "base": self._base_of(member)}
            self._context.send(member, self._message("serve", now, part=plan.part_of(member), **more))
        for member, pulls in plan.pulls.items():
            lenders = frozenset(plan.owners[part] for part in plan.local.get(member, ()))
            self.tasks[member] = self._in["due"][member] = Task(member, "pull", pulls, lenders)
        self.offer_pulls(now)

    def offer_pulls(self, now: float) -> None:
        """Queue the offer of each pull (task in state ``due``) that can begin now.

        A pull can begin once a holder listens for each of its parts. Tasks that cannot
        begin yet keep their state: call again.
        """
        payload, digests = self._payload, dict(enumerate(self._payload.part_digests))
        for one in self.of("due"):
            # a rank may have no piece of any tensor: its part is empty
            wanted = {part: of for part, of in one.pulls.items() if part < 0 or payload.manifest.part_nbytes(part)}
            pulls = [PartPull(part, self._listening(of, now), digests.get(part, "")) for part, of in wanted.items()]
            if all(pull.holders for pull in pulls):
                message = self._message(
                    "pull",
                    now,
                    secret=self._secret,
                    pulls=tuple(pulls),
                    places=tuple(map(self._part, self.plan.local.get(one.member, ()))),
                    sharing=self._sharing(one.member),
                    base=self._base_of(one.member),
                )
                one.moved_at, one.judged = now, self.plan.mode == "parts" or bool(payload.digest)
                self._offer(one, message)

    def offer_map(self, member: Member, lender: Member, now: float) -> None:
        """Queue an offer to a member that waited to map the version from another of its
        host.

        :param member: gets a task.
        :param lender: the member whose slot has the version now.
        """
        self.offered_at = now
        self._offer(Task(member, "map", lenders=frozenset((lender,))), self._map_offer(lender, now))

    def start_broadcast(self, deadline: float, on_end: BroadcastEnd, now: float) -> None:
        """Start the broadcast between the slots of its members, which must all be
        ready.

        It runs on; this call does not wait for it.

        :param deadline: of the broadcast, by the clock of ``now``.
        :param on_end: called once, as ``on_end(error, form_s, now)``; ``error`` is None
            after a success, ``form_s`` the seconds to form the process group.
        """
        on_device = self._context.config.staging == "device" or self._payload.device == "cuda"
        members, device = self.plan.broadcast, "cuda" if on_device else "cpu"
        self.stop_broadcast = self._context.broadcast(self.number, members, device, deadline, on_end, now)

    def _offer(self, one: Task, message: TransferOffer) -> None:
        """Enter a member's task as offered, and queue the message to the member."""
        self.tasks[one.member] = one
        self.step(one, "holder_up")
        self._context.send(one.member, message)

    def _map_offer(self, lender: Member, now: float, sharing: int = 1) -> TransferOffer:
        """Return the offer to map the slot of ``lender``; send nothing.

        :param sharing: how many members of that host map it.
        """
        return self._message("map", now, place=self._place(lender), sharing=sharing)

    def _message(self, role: Way, now: float, **more: Any) -> TransferOffer:
        """Return an offer of this attempt; send nothing.

        :param role: what the receiver is to do: map, pull, receive, send or serve.
        :param more: the offer's other fields.
        """
        payload = self._payload
        mode: Literal["image", "parts"] = "image" if role == "map" else self.plan.mode
        return TransferOffer(
            transfer=self.number,
            version=payload.version,
            role=role,
            mode=mode,
            manifest_hash=payload.manifest_hash,
            meta=payload.meta,
            deadline_s=max(0.0, self._deadline - now),
            digest=payload.digest if mode == "image" else "",  # of a part, only the bytes taken are digested
            **more,
        )

    def _sharing(self, leader: Member) -> int:
        """Return how many members of the leader's host will have its slot.

        The leader is the member that gets the version for its host; the others wait to
        map it.
        """
        return 1 + self._waiting[self._context.roster.host(leader)]

    def _base_of(self, member: Member) -> int:
        """Return the version that a member holds as the base of deltas; 0 for none.

        Only differences from it are then sent to the member.
        """
        version, digest = self._base
        state = self._context.roster.get(member)
        return version if state is not None and version and state.held.get(version) == digest else 0

    def _listening(self, holders: Iterable[Member], now: float) -> tuple[HolderAddress, ...]:
        """Return the addresses of the holders' carriers (their servers for pulls).

        Holders without one, or that are silent, are left out.
        """
        context = self._context
        return tuple(
            HolderAddress(state.member.name, state.address, state.carrier_port, state.certificate_hash)
            for state in context.roster.states(holders)
            if state.carrier_port
            and (state.certificate_hash or not context.config.encrypt)
            and not context.roster.is_suspect(state, now)
        )

    def _place(self, member: Member) -> SlotPlace | None:
        """Return where the version is in the memory of a member or, if that is lost, in
        memory that the coordinator keeps of it.

        Return None if that is unknown.
        """
        state = self._context.keeping.member_or_stand_in(member)
        return state.places.get(self._payload.version) if state is not None else None

    def _part(self, number: int) -> SlotPlace:
        """Return where the part of this number is in its owner's memory.

        :raises errors.InternalError: the owner's slot is not known.
        """
        place = self._place(self.plan.owners[number])
        if place is None:
            raise errors.InternalError(f"part {number} of version {self._payload.version} has no known slot")
        return msgspec.structs.replace(place, part=number)

    # ------------------------------------------------------------ ends

    def unservable(self, refused: Collection[Member]) -> list[Task]:
        """Return pulls that have not begun and that no present holder will ever serve.

        They are not failed here.

        :param refused: holders that will not serve. Members that pull serve, too.
        """
        servers, version = self._context.roster.states(self._servers), self._payload.version
        able = {state.member for state in servers if version in state.held or version in state.parts}
        able = able.difference(refused).union(one.member for one in self.of("taking", "came", "held"))
        hoping = [one for one in self.of("due", "offered") if one.way == "pull"]
        while found := [one for one in hoping if all(able.intersection(holders) for holders in one.pulls.values())]:
            able |= {one.member for one in found}
            hoping = [one for one in hoping if one not in found]
        return hoping

    def give_up(self, members: Iterable[Member]) -> None:
        """End these members' open tasks as failed, and queue a cancel of their offers.

        Tasks that have ended, as held or failed, stay as they are.
        """
        tasks = [one for one in map(self.tasks.get, sorted(members)) if one is not None]
        self._cancel(one.member for one in tasks if one.state in ("offered", "taking"))
        for one in tasks:
            if one.state not in ("held", "failed"):
                self.step(one, "gave_up")

    def close(self, reason: str = "failed") -> None:
        """Queue the withdrawal of the attempt to all its members, and cancel its
        broadcast.

        The tasks keep their states, and the broadcast's ``on_end`` is not called. A
        second call does nothing.

        :param reason: label, for metrics, of why the broadcast's process group is
            closed.
        """
        if self._closed:
            return
        self._closed = True
        # who has pulled serves
        told = [
            one
            for one in self.tasks.values()
            if one.state in ("offered", "taking") or (one.way == "pull" and one.reply)
        ]
        self._cancel((*self._servers, *(one.member for one in told)))
        if self.stop_broadcast is not None:
            self.stop_broadcast(reason)

    def _cancel(self, members: Iterable[Member]) -> None:
        """Queue a TransferCancel to those of the members that are in the roster."""
        cancel = TransferCancel(self.number)
        for state in self._context.roster.states(members):
            self._context.send(state.member, cancel)


def _newest_base(roster: Roster, plan: TransferPlan, version: int) -> tuple[int, str]:
    """Return (number, digest) of the newest version that can be the base of deltas.

    That is one older than ``version``, held by the first holder and a puller; (0, "")
    if there is none.

    :param plan: names holders and pullers.
    :param version: the one to be moved.
    """
    first = roster.states(plan.servers[:1]) if plan.mode == "image" else []
    theirs = {item for state in roster.states(plan.pulls) for item in state.held.items()}
    held = (item for state in first for item in theirs & state.held.items())
    return max(((v, digest) for v, digest in held if digest and v < version), default=(0, ""))

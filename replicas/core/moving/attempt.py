"""One attempt of a transfer: its plan, its messages and replies, and the version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import msgspec

from replicas import errors
from replicas.core.base.effects import Send
from replicas.core.base.manifest import Manifest
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.moving.lanes import Lane
from replicas.core.moving.paths import TransferPlan
from replicas.messages import Meta, SlotPlace, TransferCancel, TransferDone, TransferGo, TransferOffer
from replicas.messages.identity import Member


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


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt.

    :ivar number: part of each of its messages; replies to an earlier attempt are
        ignored.
    :ivar offered_at: time of the last offer to a member.
    :ivar mapping: members that map or pull, and have neither finished nor failed.
    :ivar concerned: all its members.
    """

    context: ChannelContext
    payload: Payload
    plan: TransferPlan
    number: int = 0
    began_at: float = 0.0
    ready: set[Member] = field(default_factory=set)
    done: dict[Member, TransferDone] = field(default_factory=dict)
    offered_at: float = field(init=False)
    mapping: set[Member] = field(init=False)
    concerned: frozenset[Member] = field(init=False)
    waiting: Counter[int] = field(init=False)
    """By host: how many members wait until another member there has the version."""

    def __post_init__(self) -> None:
        self.offered_at = self.began_at
        self.mapping, self.concerned = {*self.plan.maps, *self.plan.pulls}, frozenset(self.plan.concerned)
        self.waiting = Counter(map(self.context.roster.host, self.plan.waiting))

    @property
    def movers(self) -> tuple[Member, ...]:
        """Members that move bytes together: if one fails, all fail."""
        return (*self.plan.senders, *self.plan.receivers)

    @property
    def all_ready(self) -> bool:
        return self.ready.issuperset(self.movers)

    @property
    def all_done(self) -> bool:
        return len(self.done) == len(self.movers)

    @property
    def at_work(self) -> list[Member]:
        """Members of its lane that have not reported that they are done."""
        return [member for member in self.plan.lane if member not in self.done]

    @property
    def needed(self) -> set[Member]:
        """Members that must not be lost: movers, and lenders that are being read."""
        lenders = {lender for member, lender in self.plan.maps.items() if member in self.mapping}
        parts = {self.plan.owners[part] for parts in self.plan.local.values() for part in parts}
        return {*self.movers, *lenders, *parts}

    def send_offers(self, remaining_s: float) -> None:
        """Send each member its role. Equal messages are one object, encoded once."""
        plan, roster = self.plan, self.context.roster
        readers = Counter(plan.maps.values())

        @cache
        def offer(role: Literal["send", "map"], place: SlotPlace | None, sharing: int) -> TransferOffer:
            streaming = role == "send" and self.payload.filling is not None
            return self.offer_of(role, remaining_s, place=place, sharing=sharing, streaming=streaming)

        offers = [(member, offer("send", None, 1)) for member in plan.senders]
        offers += [
            (member, self.offer_of("receive", remaining_s, sharing=1 + self.waiting[roster.host(member)]))
            for member in plan.receivers
        ]
        offers += [(member, offer("map", self._place(giver), readers[giver])) for member, giver in plan.maps.items()]
        self.context.out.extend(Send(member, message) for member, message in offers if member in roster)

    def offer_map(self, member: Member, lender: Member, remaining_s: float, now: float) -> None:
        """Offer a waiting member the memory of a member that now has the version."""
        self.offered_at = now
        self.plan.maps[member] = lender
        self.mapping.add(member)
        self.concerned |= {member}
        offer = self.offer_of("map", remaining_s, place=self._place(lender))
        self.context.send(member, msgspec.structs.replace(offer, mode="image", digest=self.payload.digest))

    def offer_of(
        self, role: Literal["send", "receive", "map", "serve", "pull"], deadline_s: float, **more: Any
    ) -> TransferOffer:
        payload = self.payload
        return TransferOffer(
            transfer=self.number,
            version=payload.version,
            role=role,
            mode=self.plan.mode,
            manifest_hash=payload.manifest_hash,
            meta=payload.meta,
            deadline_s=deadline_s,
            digest=payload.digest if self.plan.mode == "image" else "",  # of a part, only the bytes taken are digested
            **more,
        )

    def send_go(self, go: TransferGo, lane: Lane | None) -> None:
        """Send the movers, all ready now, the order to move the bytes."""
        for member in self.movers:
            places = self.local_places(member)
            own = msgspec.structs.replace(go, places=places) if places else go
            if lane is not None and member not in lane.ranks:
                own = msgspec.structs.replace(own, lane="", routes=())
            self.context.send(member, own)

    def withdraw(self, members: Iterable[Member]) -> None:
        """Send these members a cancel, and stop waiting for those that map."""
        cancel, roster = TransferCancel(self.number), self.context.roster
        members = sorted(members)
        self.mapping.difference_update(members)
        self.context.out.extend(Send(member, cancel) for member in members if member in roster)

    def _place(self, member: Member) -> SlotPlace | None:
        state = self.context.keeping.lender(member)
        return state.places.get(self.payload.version) if state is not None else None

    def local_places(self, member: Member) -> tuple[SlotPlace, ...]:
        """Return the slots of the parts that this member copies on its own host."""
        return tuple(self._part(number) for number in self.plan.local.get(member, ()))

    def _part(self, number: int) -> SlotPlace:
        place = self._place(self.plan.owners[number])
        if place is None:
            raise errors.InternalError(f"part {number} of version {self.payload.version} has no known slot")
        return msgspec.structs.replace(place, part=number)

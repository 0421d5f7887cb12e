"""Deliveries: one version to the hosts that pull it, as a table for each of them.

Theory of operation
===================

A leader (:mod:`replicas.core.moving.paths`) pulls a version through its carrier, from
the first of its holders that works (:mod:`replicas.carry.pull`). Nothing is agreed
before: it is told who serves the version and by which secret, and the holder is told to
serve it; a carrier that is asked a moment too early waits for that. So each delivery
goes its own way::

    due ──its holder listens──▶ offered ──slot reserved──▶ taking ──▶ came ──▶ held
     ▲                             └──────────── failed ◀─────┘ no holder left   │
     └───────────────────────────────── wrong bytes ─────────────────────────────┘

*Came*: all bytes are there, and their digest is told; *held*: it is that of the
version, which may be known only later, as the publisher digests while it sends. What
came and is wrong is offered once more with the digest: the carrier finds out which
blocks are wrong, and asks for those elsewhere. What failed is offered again in the next
attempt, perhaps from another holder.

A member serves from its *serve* or *pull* offer on until its cancel: so every member of
an attempt is told when that is over, also those that are done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replicas.core.base.effects import Send
from replicas.core.base.membership import DELIVERY, DeliveryEvent, DeliveryState
from replicas.core.moving.attempt import Attempt
from replicas.core.moving.paths import Pulls
from replicas.messages import HolderAddress, PartPull, TransferCancel, TransferDone
from replicas.messages.identity import Member

STILL_S = 5.0
"""A delivery of which no byte moved for so long stands still."""


@dataclass(slots=True, eq=False)
class Delivery:
    """The version on its way to one host.

    :ivar received: bytes so far. :ivar moved_at: when that grew.
    :ivar told_at: when it last said so. :ivar rates: bytes a second before the last two
        times.
    """

    member: Member
    pulls: Pulls
    state: DeliveryState = "due"
    received: int = 0
    moved_at: float = 0.0
    told_at: float = 0.0
    rates: tuple[float, float] = (0.0, 0.0)
    reply: TransferDone | None = None
    judged: bool = False
    """The carrier knew the digest of what it pulls."""

    @property
    def holders(self) -> frozenset[Member]:
        """Return all from whom any part may come."""
        return frozenset(holder for holders in self.pulls.values() for holder in holders)

    def step(self, event: DeliveryEvent) -> None:
        self.state = DELIVERY.next(self.state, event)

    def rate(self) -> float:
        """Return its bytes a second lately; 0: unknown, as it began, or stood still.

        It may be on its way to a better holder.
        """
        return max(self.rates) if all(self.rates) else 0.0


class Deliveries:
    """The deliveries of one attempt."""

    def __init__(self, attempt: Attempt, deadline: float) -> None:
        self._attempt, self._deadline = attempt, deadline
        self._all = {member: Delivery(member, pulls) for member, pulls in attempt.plan.pulls.items()}
        self._served = attempt.plan.servers
        self._base = _newest_base(attempt)
        self._closed = False
        self._silent: set[Member] = set()
        """Holders that said that they cannot serve it."""

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, member: Member) -> bool:
        return member in self._all

    def of(self, *states: DeliveryState) -> list[Delivery]:
        return [one for one in self._all.values() if one.state in states]

    def get(self, member: Member) -> Delivery | None:
        return self._all.get(member)

    # ------------------------------------------------------------ messages

    def begin(self, now: float) -> None:
        """Have the holders serve, and offer what can be pulled at once."""
        attempt, ground = self._attempt, self._attempt.ground
        streams = attempt.payload.filling
        for member in self._served:
            part, streaming = attempt.plan.part_of(member), member == streams
            more = {"secret": self._secret, "streaming": streaming, "part": part, "base": self._base_of(member)}
            message = attempt.offer_of("serve", self._left_s(now), **more)
            ground.out.append(Send(member, message))
        self.offer_due(now)

    def offer_due(self, now: float) -> None:
        """Offer the deliveries of which holders listen now, one for each part."""
        attempt, ground = self._attempt, self._attempt.ground
        for one in self.of("due"):
            pulls = {part: self._listening(holders) for part, holders in one.pulls.items()}
            if all(pulls.values()):
                sharing = 1 + attempt.waiting[ground.roster.host(one.member)]
                digests = attempt.payload.part_digests
                message = attempt.offer_of(
                    "pull",
                    self._left_s(now),
                    secret=self._secret,
                    pulls=tuple(
                        PartPull(part, holders, digests[part] if 0 <= part < len(digests) else "")
                        for part, holders in pulls.items()
                    ),
                    places=attempt.local_places(one.member),
                    sharing=sharing,
                    base=self._base_of(one.member),
                )
                one.step("holder_up")
                one.moved_at, one.judged = now, attempt.plan.mode == "parts" or bool(attempt.payload.digest)
                ground.out.append(Send(one.member, message))

    def _base_of(self, member: Member) -> int:
        """Return the version to which this member makes, or takes, deltas; 0: none."""
        version, digest = self._base
        state = self._attempt.ground.roster.get(member)
        return version if state is not None and version and state.held.get(version) == digest else 0

    def _listening(self, holders: Iterable[Member]) -> tuple[HolderAddress, ...]:
        ground = self._attempt.ground
        return tuple(
            HolderAddress(state.member.name, state.address, state.carrier_port, state.certificate_hash)
            for state in ground.roster.states(holders)
            if state.carrier_port and (state.certificate_hash or not ground.config.encrypt)
        )

    def began(self, member: Member, now: float) -> None:
        one = self._all.get(member)
        if one is not None and one.state == "offered":
            one.step("began")
            one.moved_at = one.told_at = now

    def moved(self, member: Member, received: int, now: float) -> None:
        one = self._all.get(member)
        if one is None:
            return
        one.rates = one.rates[1], max(0, received - one.received) / max(0.05, now - one.told_at)
        one.told_at = now
        if received > one.received:
            one.received, one.moved_at = received, now

    def came(self, member: Member, reply: TransferDone, now: float) -> None:
        one = self._all[member]
        if one.state in ("offered", "taking"):
            one.step("all_here")
            one.reply, one.moved_at = reply, now

    def gave_up(self, member: Member) -> None:
        one = self._all[member]
        if one.state not in ("held", "failed"):
            one.step("gave_up")

    def hopeless(self) -> list[Delivery]:
        """Return deliveries due from holders none of which will ever listen."""
        roster, version = self._attempt.ground.roster, self._attempt.payload.version
        holders = (state for one in self.of("due") for state in roster.states(one.holders))
        alive = {state.member for state in holders if version in state.held or version in state.parts}
        alive |= {one.member for one in self.of("offered", "taking", "came", "held")}
        hoping = self.of("due")

        def hopes(one: Delivery) -> bool:
            return all(alive.intersection(holders) - self._silent for holders in one.pulls.values())

        while found := [one for one in hoping if hopes(one)]:
            alive |= {one.member for one in found}
            hoping = [one for one in hoping if one not in found]
        return hoping

    def cannot_serve(self, member: Member) -> None:
        """A holder will not listen in this attempt."""
        self._silent.add(member)

    def gets_on(self, now: float) -> bool:
        """Return whether a byte has moved lately."""
        return any(now - one.moved_at < STILL_S for one in self.of("offered", "taking"))

    def close(self) -> None:
        """Nothing of this attempt is served or pulled any more."""
        if self._closed:
            return
        self._closed = True
        ground, cancel = self._attempt.ground, TransferCancel(self._attempt.number)
        taken = [one.member for one in self._all.values() if one.reply or one.state not in ("due", "failed")]
        told: Iterable[Member] = (*self._served, *taken)
        ground.out.extend(Send(member, cancel) for member in told if member in ground.roster)

    def _left_s(self, now: float) -> float:
        return max(0.0, self._deadline - now)

    @property
    def _secret(self) -> bytes:
        return self._attempt.ground.lanes.pull_secret(self._attempt.number)


def _newest_base(attempt: Attempt) -> tuple[int, str]:
    """Return the newest version, with its digest, that the first holder still has, as
    one of those that pull does: who has missed a version takes a delta to an older one.
    """
    first = attempt.plan.servers[0] if attempt.plan.mode == "image" and attempt.plan.servers else None
    state = attempt.ground.roster.get(first) if first is not None else None
    theirs = {item for one in attempt.ground.roster.states(attempt.plan.pulls) for item in one.held.items()}
    held = theirs & state.held.items() if state is not None else ()
    return max(((v, digest) for v, digest in held if digest and v < attempt.payload.version), default=(0, ""))

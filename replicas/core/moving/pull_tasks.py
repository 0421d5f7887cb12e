"""Pull tasks: one version to the hosts that pull it, as a table for each host.

Theory of operation
===================

A leader (:mod:`replicas.core.moving.paths`) pulls a version through its carrier, from
the first of its holders that works (:mod:`replicas.carry.pull`). The two ends need no
handshake: the leader is told the addresses of the holders and a secret, and each holder
is told to serve; a carrier that is asked too early lets the request wait. So each
delivery takes its own course::

    due ──its holder listens──▶ offered ──slot reserved──▶ taking ──▶ came ──▶ held
     ▲                             └──────────── failed ◀─────┘ no holder left   │
     └───────────────────────────────── wrong bytes ─────────────────────────────┘

*Came*: all bytes have arrived, and their digest was reported. *Held*: it is the digest
of the version, which may be known only later, as the publisher digests while it sends.
If it is another digest, the delivery is offered once more with the right one: the
carrier finds out which blocks are wrong, and asks another holder for those. A failed
delivery is offered again in the next attempt, perhaps from another holder.

A member serves from its *serve* or *pull* offer on until its cancel: so every member of
an attempt is told when the attempt is over, also members that are done.
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
"""A delivery stands still if no byte has moved for so many seconds."""


@dataclass(slots=True, eq=False)
class PullTask:
    """The version on its way to one host.

    :ivar received: bytes so far. :ivar moved_at: when that grew.
    :ivar told_at: time of the last report. :ivar rates: bytes a second before each of
        the last two reports.
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
    """Whether the offer named the digest, so that the carrier compares it."""

    @property
    def holders(self) -> frozenset[Member]:
        """Return all members from which any part may come."""
        return frozenset(holder for holders in self.pulls.values() for holder in holders)

    def step(self, event: DeliveryEvent) -> None:
        self.state = DELIVERY.next(self.state, event)

    def rate(self) -> float:
        """Return its recent bytes a second; 0 if unknown.

        A delivery that has just begun or stood still may be switching to a better
        holder.
        """
        return max(self.rates) if all(self.rates) else 0.0


class PullTasks:
    """The deliveries of one attempt."""

    def __init__(self, attempt: Attempt, deadline: float) -> None:
        self._attempt, self._deadline = attempt, deadline
        self._all = {member: PullTask(member, pulls) for member, pulls in attempt.plan.pulls.items()}
        self._served = attempt.plan.servers
        self._base = _newest_base(attempt)
        self._closed = False
        self._silent: set[Member] = set()
        """Holders that reported that they cannot serve the version."""

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, member: Member) -> bool:
        return member in self._all

    def of(self, *states: DeliveryState) -> list[PullTask]:
        return [one for one in self._all.values() if one.state in states]

    def get(self, member: Member) -> PullTask | None:
        return self._all.get(member)

    # ------------------------------------------------------------ messages

    def start_serving(self, now: float) -> None:
        """Send the serve offers, and offer each delivery whose holders listen."""
        attempt, context = self._attempt, self._attempt.context
        streams = attempt.payload.filling
        for member in self._served:
            part, streaming = attempt.plan.part_of(member), member == streams
            more = {"secret": self._secret, "streaming": streaming, "part": part, "base": self._base_of(member)}
            message = attempt.offer_of("serve", self._left_s(now), **more)
            context.out.append(Send(member, message))
        self.offer_due(now)

    def offer_due(self, now: float) -> None:
        """Offer the due deliveries that have a listening holder for each part."""
        attempt, context = self._attempt, self._attempt.context
        for one in self.of("due"):
            pulls = {part: self._listening(holders, now) for part, holders in one.pulls.items()}
            if all(pulls.values()):
                sharing = 1 + attempt.waiting[context.roster.host(one.member)]
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
                context.out.append(Send(one.member, message))

    def _base_of(self, member: Member) -> int:
        """Return the base version of this member's deltas; 0 if it uses none."""
        version, digest = self._base
        state = self._attempt.context.roster.get(member)
        return version if state is not None and version and state.held.get(version) == digest else 0

    def _listening(self, holders: Iterable[Member], now: float) -> tuple[HolderAddress, ...]:
        """Return the addresses of the holders that listen and are not silent."""
        context = self._attempt.context
        return tuple(
            HolderAddress(state.member.name, state.address, state.carrier_port, state.certificate_hash)
            for state in context.roster.states(holders)
            if state.carrier_port
            and (state.certificate_hash or not context.config.encrypt)
            and not context.roster.suspect(state, now)
        )

    def note_began(self, member: Member, now: float) -> None:
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

    def note_arrived(self, member: Member, reply: TransferDone, now: float) -> None:
        one = self._all[member]
        if one.state in ("offered", "taking"):
            one.step("all_here")
            one.reply, one.moved_at = reply, now

    def mark_failed(self, member: Member) -> None:
        one = self._all[member]
        if one.state not in ("held", "failed"):
            one.step("gave_up")

    def unservable(self) -> list[PullTask]:
        """Return deliveries that have not begun, and of which no holder will serve."""
        roster, version = self._attempt.context.roster, self._attempt.payload.version
        hoping = self.of("due", "offered")
        holders = (state for one in hoping for state in roster.states(one.holders))
        alive = {state.member for state in holders if version in state.held or version in state.parts}
        alive |= {one.member for one in self.of("taking", "came", "held")}

        def hopes(one: PullTask) -> bool:
            return all(alive.intersection(holders) - self._silent for holders in one.pulls.values())

        while found := [one for one in hoping if hopes(one)]:
            alive |= {one.member for one in found}
            hoping = [one for one in hoping if one not in found]
        return hoping

    def cannot_serve(self, member: Member) -> None:
        """Note that a holder will not serve in this attempt."""
        self._silent.add(member)

    def gets_on(self, now: float) -> bool:
        """Return whether a byte has moved in the last seconds."""
        return any(now - one.moved_at < STILL_S for one in self.of("offered", "taking"))

    def close(self) -> None:
        """Cancel the attempt at all members that serve or pull; safe to repeat."""
        if self._closed:
            return
        self._closed = True
        context, cancel = self._attempt.context, TransferCancel(self._attempt.number)
        taken = [one.member for one in self._all.values() if one.reply or one.state not in ("due", "failed")]
        told: Iterable[Member] = (*self._served, *taken)
        context.out.extend(Send(member, cancel) for member in told if member in context.roster)

    def _left_s(self, now: float) -> float:
        return max(0.0, self._deadline - now)

    @property
    def _secret(self) -> bytes:
        return self._attempt.context.lanes.pull_secret(self._attempt.number)


def _newest_base(attempt: Attempt) -> tuple[int, str]:
    """Return the newest older version that the first holder and a puller both hold.

    It is the base of deltas, with its digest; (0, "") if there is none.
    """
    first = attempt.plan.servers[0] if attempt.plan.mode == "image" and attempt.plan.servers else None
    state = attempt.context.roster.get(first) if first is not None else None
    theirs = {item for one in attempt.context.roster.states(attempt.plan.pulls) for item in one.held.items()}
    held = theirs & state.held.items() if state is not None else ()
    return max(((v, digest) for v, digest in held if digest and v < attempt.payload.version), default=(0, ""))

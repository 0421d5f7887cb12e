"""One transfer: moving one version from its holders to the members that need it.

Theory of operation
===================

A transfer knows the version, the members that need it and those that can give it (a
holder of the whole image, or all source ranks with a part each). It runs in *attempts*
(:mod:`replicas.core.moving.attempt`), each with a plan of its own
(:mod:`replicas.core.moving.paths`)::

    offering ──slots ready, lane formed──▶ moving ──all done, digests equal──┐
        │                                     │                              ▼
        │        loss, refusal, failure,      │            complete, or the plan's
        ├────── suspicion, wrong digest ──────┘            next step
        ▼
    next attempt over the members that are left

Members that map need nothing from the others: they are offered the slot at once, answer
when they have mapped it, and delay no other member. A member that cannot map at all
becomes a host of its own, and is sent the bytes. With ``staging = "device"`` members
copy the memory they have opened into their own, as a view does not outlive the process
that lent it: the copy is checked by its digest, and is one more holder's slot.

Receivers that verified the version keep it, and may give it in the next attempt.

*A lane is tried once* (between GPUs, or with ``transport = "group"``). If it fails, for
whatever reason, the members that are left pull the version through host memory
(:mod:`replicas.core.moving.pull_tasks`), so that the others need not wait until the
faulty member or link is found. The next publishes pull as well: lanes are tried at
growing intervals until one works.

The transfer decides nothing about versions: its owner (a publish, or catch-up) is told
``complete`` or ``failed`` and reads ``verified``. Deadlines are the owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import msgspec

from replicas import errors
from replicas.common.sizes import size_text
from replicas.core.base.effects import WrongBytes
from replicas.core.base.membership import TRANSFER, TransferState
from replicas.core.members.preflight import sends_by_group
from replicas.core.moving.attempt import Attempt, Payload
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.moving.lanes import Lane, form_timeout
from replicas.core.moving.paths import TransferPlan, Works, plan
from replicas.core.moving.pull_tasks import PullTask, PullTasks
from replicas.core.moving.stragglers import PATIENCE, PATIENCE_S, Stragglers
from replicas.messages import Backend, TransferDone, TransferGo
from replicas.messages.bounds import REASON_LENGTH, text_of
from replicas.messages.identity import Member

LONGEST_S = 3600.0
"""Longest catch-up in seconds, provided that bytes move."""
MAP_TRIES = 2
"""Failed attempts to map after which a member is sent the bytes instead."""
MEASURED_S = 1.2
"""Seconds after which the rate of a delivery predicts its end.

They count from the begin of the attempt (a puller with a slow holder has found a better
one by then, :mod:`replicas.carry.pull`), and from the end of the first delivery, which
no longer shares the links.
"""
PULL_TRIES = 3
"""Failed deliveries after which a host is left to catch-up."""
FAR = 3.0
"""A host is left out if its rate predicts that it needs this many times too long."""


class Transfer:
    """One transfer.

    :param on_end: called once as ``on_end(transfer, error, now)``; ``error`` is None if
        the transfer is complete.
    """

    def __init__(
        self,
        context: ChannelContext,
        payload: Payload,
        needers: Sequence[Member],
        *,
        kind: Literal["main", "catch_up"],
        deadline: float,
        on_end: Callable[[Transfer, errors.ReplicasError | None, float], None],
        avoid: Member | None = None,
        tries: int = PULL_TRIES,
    ) -> None:
        self._context = context
        self.payload = payload
        self.needers = set(needers)
        self.kind, self.deadline = kind, deadline
        self._on_end, self._avoid, self._tries = on_end, avoid, tries
        self.state: TransferState = "offering"
        self.attempt = Attempt(context, payload, TransferPlan("image"))
        self.pull_tasks = PullTasks(self.attempt, deadline)
        self.attempts = 0
        self.lane: Lane | None = None
        self.verified: set[Member] = set()
        self.refused: dict[Member, errors.ReplicasError] = {}
        self.why: dict[Member, str] = {}
        """Reasons why members were left out."""
        self.stragglers = Stragglers(context, self)
        self._copies = context.roster.config.staging == "device"
        """Whether members that map copy the memory that they open."""
        self.form_s = self.map_s = self.transfer_s = self.verify_s = 0.0
        self.asked = frozenset(needers)
        """Members that needed it at the start."""
        self.sent_to: set[Member] = set()
        """Members that got it over a lane."""
        self.moved_to: dict[str, int] = {}
        """Right bytes that reached each replica over the network."""
        self.pulled: dict[str, dict[str, int]] = {}
        """The same bytes, by the member that pulled and the member that served them."""
        self._doubtful: set[Member] = set()
        """Holders that served wrong bytes."""
        self._others_at: float | None = None
        self._patience_s = 0.0
        self._asked_first: frozenset[Member] = frozenset()
        self._answered: set[Member] = set()
        self._misses: dict[Member, int] = {}
        self._by_lane = sends_by_group(context.roster.config)

    # ------------------------------------------------------------ attempts

    @property
    def over(self) -> bool:
        return self.state in ("complete", "failed")

    @property
    def plan(self) -> TransferPlan:
        return self.attempt.plan

    @property
    def awaited_members(self) -> set[Member]:
        """Members for which the attempt, or the transfer, still waits."""
        attempt = self.attempt
        if self.state == "offering" and not attempt.all_ready:
            return (set(attempt.movers) - attempt.ready) | attempt.mapping
        return self.needers - self.verified

    @property
    def drops(self) -> bool:
        """Whether slow members may be left out."""
        return self.kind == "main" and self._context.roster.config.on_lost == "drop"

    def is_moving(self, now: float) -> bool:
        """Return whether bytes move."""
        if self.state != "moving":
            return False
        return self.pull_tasks.gets_on(now) or (
            self.lane is not None and self.lane.progress.gets_on(self.attempt.at_work, now)
        )

    @property
    def unready(self) -> set[Member]:
        """Members that must reserve a slot, or map, and have not answered."""
        return self.awaited_members if self.state == "offering" else self.attempt.mapping - self.attempt.ready

    @property
    def waits_for_slots(self) -> bool:
        """Whether the transfer waits only for members without a reserved slot."""
        if self.state == "offering":
            return self.lane is None or self.lane.state == "formed"
        return {one.state for one in self.pull_tasks.of("due", "offered", "taking", "came")} == {"offered"}

    @property
    def left_out(self) -> dict[str, str]:
        """Targets in the roster that were left out, with the reasons."""
        states = self._context.roster.states(self.asked & self.why.keys())
        left = [state for state in states if self.payload.version not in state.held and not state.draining]
        return {state.member.name: self.why[state.member] for state in left}

    @property
    def never_answered(self) -> set[Member]:
        """Unready members that were asked at the start, and have never answered."""
        return (self.unready & self._asked_first) - self._answered

    @property
    def is_unanswered(self) -> bool:
        """Whether no member that needs the version has answered or read."""
        return self.needers <= self.never_answered - self._readers

    @property
    def _readers(self) -> set[Member]:
        """Members of the current attempt that have asked for its manifest."""
        states = self._context.roster.states(self.attempt.concerned)
        wanted = self.payload.manifest_hash
        return {state.member for state in states if state.reading is not None and state.reading.manifest_hash == wanted}

    def slow_readers(self, until: float) -> set[Member]:
        """Return members that will not have read the manifest by ``until``."""
        attempt = self.attempt
        waited = attempt.mapping | (set() if self.state == "moving" else set(attempt.movers) - attempt.ready)
        states = self._context.roster.states(waited & self._readers & self.needers)
        return {s.member for s in states if s.reading is not None and s.reading.ends_at > until}

    def start(self, now: float) -> None:
        """Start an attempt over the members that still need the version."""
        context = self._context
        version = self.payload.version
        self.needers = {state.member for state in context.roster.states(self.needers) if version not in state.held}
        self._by_lane &= not context.lanes.is_resting(now)
        if self._by_lane:
            self.stragglers.exclude_far(now)
        found = self._plan(now)
        if found is None:
            self._end(self._no_holder(), now)
            return
        if self.needers and not found.concerned and self.payload.filling is None:
            self._leave_unreached()
            self._end(None if self.verified else self._refusal(), now)
            return
        if self.attempts:
            self.state = TRANSFER.next(self.state, "again")
        self.attempts += 1
        self.pull_tasks.close()
        self.attempt = Attempt(context, self.payload, found, next(context.ids), now)
        if self.attempts == 1:
            self._asked_first = self.attempt.concerned
        self.pull_tasks = PullTasks(self.attempt, self.deadline if self.kind == "main" else now + LONGEST_S)
        remaining = max(0.0, self.deadline - now)
        self.attempt.send_offers(remaining)
        self.pull_tasks.start_serving(now)
        if found.lane:
            self._open_lane(found.lane, remaining, now)
        self._go_if_ready(now)

    def _plan(self, now: float) -> TransferPlan | None:
        """Plan from holders of the image, or from the owners of all parts.

        Catch-up prefers targets as holders, to leave trainers alone.
        """
        version, roster = self.payload.version, self._context.roster
        kept = self._context.keeping.of(version)
        holders = [s for s in roster if version in s.held and s.member not in self.refused]
        targets_first = self.kind == "catch_up"
        holders.sort(
            key=lambda s: (
                s.member in self._doubtful,
                s.member == self._avoid,
                roster.suspect(s, now),
                s.is_source if targets_first else not s.is_source,
                s.member,
            )
        )
        if not {s.member for s in holders} <= self._doubtful:
            holders = [s for s in holders if s.member not in self._doubtful]
        holders += [s for s in kept if version in s.held]
        states = list(map(self._context.keeping.lender, self.payload.part_owners))
        owners = [s for s in states if s is not None and version in s.parts and s.member not in self.refused]
        if len(owners) < len(states):
            owners = []
        needers = roster.states(self.needers)
        lost = {state.member for state in kept}
        links = self._context.links
        ways: list[Works | None] = [None]
        if links:
            ways = [partial(links.works, now=now)]
            if self.kind == "catch_up" or not self.verified:  # else a doubtful link would hold up the others
                ways.append(None)
        for works in ways:
            filling = self.payload.filling
            found = plan(version, needers, holders, owners, filling, lost, works, pulls=not self._by_lane)
            if found is None or found.concerned:
                break
        return found

    def _leave_unreached(self) -> None:
        """Leave out members that no holder reaches; catch-up serves them later."""
        for member in sorted(self.needers):
            state = self._context.roster.get(member)
            known = self._context.links.why(state) if state is not None else ""
            hint = "open all TCP ports between these machines, in both directions"
            text = f"no holder reaches {member}: {known}"
            self._refuse(member, errors.Preflight(text, phase="form", members=[member.name], hint=hint))

    def _open_lane(self, members: tuple[Member, ...], remaining: float, now: float) -> None:
        """Reuse the kept lane of these members, or form a new lane."""
        context = self._context
        states = context.roster.states(members)
        backend = self._backend(members)
        kept = self.lane or context.lanes.take_kept(members, backend, self)
        if kept is not None and (kept.members, kept.backend, kept.state) != (members, backend, "formed"):
            self.close_lane()
            kept = None
        timeout_s = form_timeout(remaining, max(state.rtt_s for state in states))
        self.lane = kept or context.lanes.open(states, backend, self, now, timeout_s)

    def _backend(self, members: Iterable[Member]) -> Backend:
        on_device = self._copies or self.payload.device == "cuda"
        return self._context.lanes.backend(self._context.roster.states(members), on_device=on_device)

    def _go_if_ready(self, now: float) -> None:
        if self.state != "offering" or not self.attempt.all_ready:
            return
        lane = self.lane if self.plan.lane else None
        if self.plan.lane and (lane is None or lane.state != "formed"):
            return
        self.state = TRANSFER.next(self.state, "all_ready")
        left_s = max(0.0, self.deadline - now)
        go = TransferGo(self.attempt.number, "", (), left_s if self.kind == "main" else max(left_s, LONGEST_S))
        if lane is not None:
            lane.progress.restart()
            self.form_s += lane.formed_s if lane.opened_at >= self.attempt.began_at else 0.0
            routes = tuple(tuple(lane.ranks[member] for member in route) for route in self.plan.routes)
            go = msgspec.structs.replace(go, lane=lane.name, routes=routes)
        self.attempt.send_go(go, lane)
        self._end_attempt_if_done(now)

    # ------------------------------------------------------------ messages of members

    def ready(self, member: Member, transfer: int, now: float) -> None:
        attempt = self.attempt
        if transfer == attempt.number and self.state == "offering" and member in attempt.concerned:
            attempt.ready.add(member)
            self._answered.add(member)
            self._go_if_ready(now)
        elif transfer == attempt.number and member in self.pull_tasks:
            attempt.ready.add(member)
            self._answered.add(member)
            self.pull_tasks.note_began(member, now)

    def lane_formed(self, lane: Lane, now: float) -> None:
        self._go_if_ready(now)

    def done(self, member: Member, reply: TransferDone, now: float) -> None:
        attempt = self.attempt
        if reply.transfer != attempt.number or member not in attempt.concerned:
            return
        if member in self.pull_tasks:
            self._pulled(member, reply, now)
            return
        mapped = member in attempt.mapping
        if mapped or self.state == "moving":
            self.verify_s = max(self.verify_s, reply.verify_s)
        if mapped:
            self.map_s = max(self.map_s, reply.transfer_s)
            if self._copies and self.payload.digest and reply.image_digest != self.payload.digest:
                error = errors.SyncError(f"digests differ at {member}", phase="verify", members=[member.name])
                self._map_failed(member, error)
            else:
                attempt.mapping.discard(member)
                self.record_holders({member: reply}, lent=self._copies)
        elif self.state == "moving":
            attempt.done[member] = reply
            self.transfer_s = max(self.transfer_s, reply.transfer_s)
        self._end_attempt_if_done(now)

    # ------------------------------------------------------------ deliveries

    def carrier_up(self, now: float) -> None:
        """Offer deliveries that waited for a carrier: one listens now."""
        self.pull_tasks.offer_due(now)

    def moved(self, member: Member, transfer: int, received: int, now: float) -> None:
        if transfer == self.attempt.number:
            self.pull_tasks.moved(member, received, now)

    def _pulled(self, member: Member, reply: TransferDone, now: float) -> None:
        if member not in self.attempt.mapping:
            return  # it was left out meanwhile
        self.transfer_s = max(self.transfer_s, reply.transfer_s)
        self.attempt.mapping.discard(member)
        self.pull_tasks.note_arrived(member, reply, now)
        if self._others_at is None:
            self._others_at, self._patience_s = now, max(PATIENCE_S, PATIENCE * (now - self.attempt.began_at))
        self._doubt_links(member, reply.holders, now)
        for holder, why in reply.wrong.items():
            self._context.emit(WrongBytes(self._context.config.name, self.payload.version, member, holder, why))
        self._settle_deliveries(now)
        self._end_attempt_if_done(now)

    def _settle_deliveries(self, now: float) -> None:
        """Keep deliveries with right bytes, once the version's digest is known."""
        payload, roster = self.payload, self._context.roster
        for one in self.pull_tasks.of("came") if payload.filling is None else ():
            reply = one.reply
            assert reply is not None
            payload.digest = payload.digest or reply.image_digest
            if reply.image_digest != payload.digest:
                self._request_wrong_blocks(one, now)
                continue
            one.step("right")
            self.sent_to.add(one.member)
            good = [holder for holder in one.holders if holder.name in reply.received.keys() - reply.holders.keys()]
            self._context.links.clear_doubt((roster.address(holder), roster.address(one.member)) for holder in good)
            self._keep_received({one.member: reply})
            waiting = [state for state in roster.states(self.needers) if state.member not in self.attempt.concerned]
            for state in waiting:
                if state.host == roster.host(one.member):
                    self.attempt.offer_map(state.member, one.member, max(0.0, self.deadline - now), now)

    def _request_wrong_blocks(self, one: PullTask, now: float) -> None:
        """Have a puller find its wrong blocks and pull those again."""
        if one.judged:
            gave = {holder for holder in one.holders if one.reply is not None and holder.name in one.reply.received}
            self._doubtful |= gave
            text = f"digests differ at {one.member}, which pulled from {', '.join(map(str, sorted(gave)))}"
            self._delivery_failed(one.member, errors.SyncError(text, phase="verify", members=[one.member.name]))
            return
        one.step("wrong")
        self.attempt.mapping.add(one.member)
        self.pull_tasks.offer_due(now)

    def _delivery_failed(self, member: Member, error: errors.ReplicasError) -> None:
        """Leave the delivery to the next attempt; after many, to catch-up."""
        self.pull_tasks.mark_failed(member)
        self.attempt.mapping.discard(member)
        self._misses[member] = self._misses.get(member, 0) + 1
        if isinstance(error, errors.NoCapacity | errors.Busy | errors.InternalError) or (
            self._misses[member] >= self._tries
        ):
            self._refuse(member, error)

    def _doubt_links(self, member: Member, holders: Mapping[str, str], now: float) -> None:
        """Avoid the links to holders that could not be pulled from, where possible.

        A holder that had nothing to give, as it pulls itself, may have a good link.
        """
        roster = self._context.roster
        given = {one for givers in self.plan.pulls.get(member, {}).values() for one in givers}
        given -= {one.member for one in self.pull_tasks.of("due", "offered", "taking", "failed")}
        known = {one.member.name: one.address for one in roster.states(given)}
        for name, why in holders.items():
            if name in known:
                self._context.links.doubt([(roster.address(member), known[name])], why, now)

    def _exclude_late_hosts(self, now: float) -> None:
        """Leave out hosts for which the others would have to wait too long."""
        began_at, host = self.attempt.began_at, self._context.roster.host
        late = self.pull_tasks.of("due", "offered", "taking")
        if self._others_at is None or not late or not self.drops:
            return
        others_at, until = self._others_at, max(self._others_at, began_at) + self._patience_s
        why: dict[Member, str] = {}
        for one in late:
            rate = one.rate() if now - max(began_at, others_at) > MEASURED_S else 0.0
            left_s = (self.payload.nbytes - one.received) / rate if rate else 0.0
            if now > until or now + left_s > until + FAR * self._patience_s:
                why[one.member] = f"it is slow: {size_text(rate)}/s, and others have had it for {now - others_at:.1f} s"
        hosts = set(map(host, why))
        why |= {m: "its host is slow" for m in self.needers if m not in why and host(m) in hosts}
        if self.stragglers.exclude_slow(why, now):
            self.attempt.withdraw(why)
            for member in why:
                if member in self.pull_tasks:
                    self.pull_tasks.mark_failed(member)
            self._end_attempt_if_done(now)

    # ------------------------------------------------------------ the end of an attempt

    def _end_attempt_if_done(self, now: float) -> None:
        """If all are done, keep members with right digests, and go on or end."""
        if self.state != "moving" or self.attempt.mapping or not self.attempt.all_done:
            return
        if self.payload.filling is not None:
            return  # its digest is not known yet, and it cannot be mapped
        wrong = self._compare()
        if wrong:
            names = sorted(str(member) for member in wrong)
            error = errors.SyncError(f"digests differ at {', '.join(names)}", phase="verify", members=names)
            self._abandon_lane(error.message, now)
        elif self.needers:
            self.start(now)
        else:
            self._end(self._refusal() if self._missed_required_targets else None, now)

    def _compare(self) -> set[Member]:
        """Keep receivers with the right digests; return the others."""
        payload, receivers, done = self.payload, self.plan.receivers, self.attempt.done
        good = set(receivers)
        if self.plan.mode == "parts":
            for part, route in enumerate(self.plan.routes):
                sent = done[route[0]].part_digests.get(part, "") if route else ""
                good -= {member for member in route[1:] if done[member].part_digests.get(part) != sent}
            images = {done[member].image_digest for member in good}
            if not payload.digest and len(images) == 1:
                payload.digest = images.pop()
        elif receivers:
            sender = self.plan.senders[0]
            digest = done[sender].image_digest or payload.digest  # a sender that streamed reported it before
            payload.digest = payload.digest or digest
            if digest != payload.digest:
                self._forget_held(sender)
                good = set()
        good = {member for member in good if done[member].image_digest == payload.digest}
        self.sent_to |= good
        self._keep_received({member: done[member] for member in good})
        if self._context.links:
            self._context.links.clear_doubt(
                pair for route in self.plan.routes for pair in pairwise(map(self._context.roster.address, route))
            )
        return self.needers & set(receivers)

    def record_holders(self, replies: Mapping[Member, TransferDone], *, lent: bool) -> None:
        """Record that these members hold the version; ``lent``: in their own memory."""
        version = self.payload.version
        for state in self._context.roster.states(replies):
            member, reply = state.member, replies[state.member]
            state.held[version] = self.payload.digest or reply.image_digest
            if reply.place is not None:
                state.places[version] = reply.place
                if lent:
                    state.lent.add(version)
            self.verified.add(member)
            self.needers.discard(member)

    @property
    def moved_nbytes(self) -> int:
        return sum(self.moved_to.values())

    def _keep_received(self, replies: Mapping[Member, TransferDone]) -> None:
        """Record receivers, and count their bytes without locally copied parts."""
        for member, reply in replies.items():
            if reply.received:
                self.pulled[member.name] = dict(reply.received)
            owners = [self._context.keeping.lender(self.plan.owners[part]) for part in self.plan.local.get(member, ())]
            places = [owner.places.get(self.payload.version) for owner in owners if owner is not None]
            nbytes = self.payload.nbytes - sum(place.nbytes for place in places if place is not None)
            nbytes = sum(reply.received.values()) or nbytes
            self.moved_to[member.replica_name] = self.moved_to.get(member.replica_name, 0) + nbytes
        self.record_holders(replies, lent=True)

    def filled(self, now: float) -> None:
        """Go on after the publisher has filled its slot: the digest is known now."""
        self._settle_deliveries(now)
        self._end_attempt_if_done(now)

    def member_failed(
        self,
        member: Member,
        transfer: int,
        error: errors.ReplicasError,
        now: float,
        holders: Mapping[str, str] | None = None,
    ) -> None:
        """Handle a member's report that it cannot go on with this attempt.

        :param holders: holders that it could not pull from, by name, and why.
        """
        if transfer != self.attempt.number or self.over or member not in self.attempt.concerned:
            return
        if member in self.plan.servers:  # members that pull from it fail, and find another holder
            self.refused[member] = error
            self.pull_tasks.cannot_serve(member)
            if isinstance(error, errors.Gone):
                self._forget_held(member)
            self._fail_unservable()
            self._end_attempt_if_done(now)
        elif member in self.attempt.mapping:
            self._doubt_links(member, holders or {}, now)
            failed = self._delivery_failed if member in self.pull_tasks else self._map_failed
            failed(member, error)
            self._end_attempt_if_done(now)
        elif self.state == "offering":
            if member not in self.needers:
                self._forget_held(member)
            self._refuse(member, error)
            self.retry("refused", now)
        else:
            self._failed_with(error, {member} & self.needers, now)

    def _failed_with(self, error: errors.ReplicasError, members: set[Member], now: float) -> None:
        """Retry after a failed move; exclude members that ran out of memory."""
        if not (isinstance(error, errors.NoCapacity) and members):
            self._abandon_lane(error.message, now)
            return
        for member in members:
            self._refuse(member, error)
        self.retry("refused", now)

    def _map_failed(self, member: Member, error: errors.ReplicasError) -> None:
        """Retry a member that could not map in the next attempt.

        A member that has no memory, slot or descriptor left is refused instead.
        """
        self.attempt.mapping.discard(member)
        self._misses[member] = self._misses.get(member, 0) + 1
        if isinstance(error, errors.NoCapacity | errors.Busy | errors.InternalError):
            self._refuse(member, error)
        elif not isinstance(error, errors.Gone) or self._misses[member] >= MAP_TRIES:
            for state in self._context.roster.states([member]):
                self._context.hosts.apart(state)

    def _refuse(self, member: Member, error: errors.ReplicasError) -> None:
        """Leave this member out, and keep the error as the reason."""
        self.refused[member], self.why[member] = error, text_of(error.message, REASON_LENGTH)
        self.needers.discard(member)

    def _forget_held(self, member: Member) -> None:
        for state in self._context.roster.states([member]):
            state.drop_version(self.payload.version)

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        if self.over or not self.plan.lane:
            self.close_lane("failed")
        else:
            self._failed_with(error, {member for member in self.needers if member.name in error.members}, now)

    def lane_void(self, lane: Lane, now: float) -> None:
        self._abandon_lane("its store was replaced", now)

    def _abandon_lane(self, why: str, now: float) -> None:
        """Abandon the lane, and pull the missing bytes; ``why`` is for the event."""
        self._by_lane = False
        if self.kind == "main":
            self._context.lanes.note_abandoned(now)
        self.retry("failed", now, why)

    # ------------------------------------------------------ failures

    def retry(self, reason: str, now: float, why: str = "") -> None:
        """Withdraw the attempt; start another if any member still needs the version."""
        if self.state == "moving":
            self._keep_done()
        self.cancel(reason)
        ends = self.verified or self.kind == "catch_up" or self.refused
        if not self.needers and ends and not self._all_lack_memory:
            self._end(None if self.verified and not self._missed_required_targets else self._refusal(), now)
            return
        self._context.emit_retried(reason, why)
        self.start(now)

    # ------------------------------------------------------------ losses and deadlines

    def lost(self, member: Member, now: float) -> None:
        """Handle the loss of a member, which is already out of the roster."""
        self.needers.discard(member)
        self.verified.discard(member)
        if member == self.payload.filling:
            self.payload.filling = None
            told = {one.reply.image_digest for one in self.pull_tasks.of("came") if one.reply is not None}
            if len(told) == 1:  # it had reported no digest, and all that got all of it agree
                self._settle_deliveries(now)
        elif member not in self.attempt.concerned | self.plan.lenders:
            return
        if self.pull_tasks:
            self._on_loss_during_pulls(member)
            self._end_attempt_if_done(now)
        elif member in self.attempt.needed or not self.attempt.concerned:
            self._by_lane &= self.state != "moving"
            self.retry("lost", now)
        else:
            self.attempt.mapping.discard(member)
            self._end_attempt_if_done(now)

    def _on_loss_during_pulls(self, member: Member) -> None:
        """Withdraw offers to map the lost member's memory; fail its deliveries."""
        mappers = {one for one, lender in self.plan.maps.items() if lender == member}
        self.attempt.withdraw(mappers & self.attempt.mapping)
        self.attempt.mapping.discard(member)
        if member in self.pull_tasks:
            self.pull_tasks.mark_failed(member)
        self._fail_unservable()

    def _fail_unservable(self) -> None:
        """Fail deliveries of which every holder is gone or cannot serve."""
        for one in self.pull_tasks.unservable():
            self.attempt.withdraw({one.member} if one.state == "offered" else ())
            self._delivery_failed(one.member, errors.PeersLost("no holder serves it", phase="transfer"))

    def exclude(self, members: set[Member], now: float, *, reason: str, why: str) -> None:
        """Go on without these members; they stay members, and are caught up later."""
        for member in members:
            self.needers.discard(member)
            self.why[member] = why
            if member in self.plan.givers:
                self.refused[member] = errors.PeersLost(f"{member} does not answer", members=[member.name])
                self.pull_tasks.cannot_serve(member)
        if members & self.attempt.needed and not self.pull_tasks:
            self._by_lane &= self.state != "moving"
            self.retry(reason, now)
            return
        self.attempt.withdraw(members & self.attempt.mapping)
        for member in members:
            if member in self.pull_tasks:
                self.pull_tasks.mark_failed(member)
        self._fail_unservable()
        self._context.emit_retried(reason)
        self._end_attempt_if_done(now)

    def tick(self, now: float) -> None:
        """Replace an attempt with a silent member, or an attempt that stands still."""
        if self.over:
            return
        servers = set(self.plan.servers) - self.refused.keys()
        frozen = self._suspects({*self.attempt.movers, *self.attempt.mapping} | servers, now)
        if frozen and not self._would_lose_version(frozen, now):
            self.exclude(frozen, now, reason="frozen", why="no sign of life")
            return
        if self.pull_tasks:
            self.pull_tasks.offer_due(now)
            self._exclude_late_hosts(now)
            return
        if (why := self.stragglers.tick(now)) and self._by_lane:
            self._abandon_lane(why, now)

    def _would_lose_version(self, silent: set[Member], now: float) -> bool:
        """Return True if excluding ``silent`` would lose the version.

        False if another publish or a join waits: the version may be lost then.
        """
        givers, context = silent & set(self.plan.givers), self._context
        if not givers or self.kind != "main" or context.others_wait(now):
            return False
        version = self.payload.version
        others = any(version in s.held and s.member not in silent | self.refused.keys() for s in context.roster)
        return not others and not context.keeping.of(version)

    def _suspects(self, members: Iterable[Member], now: float) -> set[Member]:
        roster = self._context.roster
        return {state.member for state in roster.states(members) if roster.suspect(state, now)}

    def cancel(self, reason: str = "failed") -> None:
        """Withdraw the current attempt, and kill its lane: bytes may have moved."""
        attempt, pulling = self.attempt, set(self.plan.pulls)
        attempt.withdraw({one for one in attempt.movers if one not in attempt.done} | (attempt.mapping - pulling))
        attempt.mapping -= pulling
        self.pull_tasks.close()
        if self.plan.lane and not attempt.all_done:
            self.close_lane(reason)

    def close_lane(self, reason: str = "") -> None:
        """:param reason: why the lane must be replaced; empty if its work was done."""
        lane, self.lane = self.lane, None
        if lane is not None:
            self._context.lanes.close(lane, reason)

    def _keep_done(self) -> None:
        """Keep receivers of a failed lane that have the right bytes."""
        senders = (self.attempt.done.get(member) for member in self.plan.senders[:1])
        known = [reply.image_digest for reply in senders if reply is not None]
        self.payload.digest = self.payload.digest or next(iter(known), "")
        done, wanted = self.attempt.done, self.payload.digest
        received = self.needers & set(self.plan.receivers) & done.keys()
        self._keep_received(
            {member: done[member] for member in received if wanted and done[member].image_digest == wanted}
        )

    # ------------------------------------------------------------ ends

    @property
    def _all_lack_memory(self) -> bool:
        """Whether all targets lack memory, and count as lost.

        False if the version must not do without targets: it lies on the publisher's
        GPU.
        """
        short = all(isinstance(error, errors.NoCapacity | errors.InternalError) for error in self.refused.values())
        drops = self.drops and not (self._copies or self._context.roster.config.min_targets or self.verified)
        return drops and short and set() < self.refused.keys() <= self.asked

    @property
    def _missed_required_targets(self) -> bool:
        """Whether the version did not reach targets that it must reach."""
        if not self.refused.keys() & self.asked - self.verified:
            return False
        every = self.kind == "main" and self._context.roster.config.on_lost == "raise"
        return every or not (self.verified or self._all_lack_memory)

    def _refusal(self) -> errors.ReplicasError:
        for member, error in self.refused.items():
            error.members = error.members or (member.name,)
            if member.name not in error.message:
                error.message = f"{member}: {error.message}"
            return error
        return errors.PeersLost("no member still needs it", version=self.payload.version, phase="transfer")

    def _no_holder(self) -> errors.ReplicasError:
        refused = next((error for member, error in self.refused.items() if member in self.plan.givers), None)
        if refused is not None:
            return refused
        gone = [one.name for one in self.payload.part_owners or self.plan.givers if one not in self._context.roster]
        text = f"version {self.payload.version} was lost: no member that held all of it is left"
        return errors.PeersLost(text, phase="transfer", members=gone, hint="publish again")

    def _end(self, error: errors.ReplicasError | None, now: float) -> None:
        self.pull_tasks.close()
        self.state = TRANSFER.next(self.state, "done" if error is None else "fail")
        self._on_end(self, error, now)

    def stop(self, *, complete: bool) -> None:
        """Withdraw the transfer, and end it without calling ``on_end``."""
        if not self.over:
            self.cancel()
            self.state = TRANSFER.next(self.state, "done" if complete else "fail")

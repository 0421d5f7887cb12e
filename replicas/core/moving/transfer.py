"""One transfer: moving one version from its holders to the members that need it.

Theory of operation
===================

A transfer knows the version, the members that need it and those that can give it (a
holder of the whole image, or all source ranks with a part each). It runs in *attempts*
(:mod:`replicas.core.moving.attempt`), each with a plan of its own
(:mod:`replicas.core.moving.paths`) and a task for each of its members
(:mod:`replicas.core.moving.task`)::

    plan ──▶ tasks: each member maps, pulls, or takes part in a broadcast
     ▲          │                        │
     │          │ all tasks have ended   │ a loss, refusal or failure in the broadcast
     │          ▼                        │
     └── members still need it ◀─────────┘
                │ none does
                ▼
             complete, or failed

A task that fails, or that has lost its holder, does not end the attempt: the other
tasks go on, and its member is in the next one.

Members that map need nothing from the others: they are offered the slot at once, answer
when they have mapped it, and delay no other member. A member that cannot map at all
becomes a host of its own, and is sent the bytes. With ``staging = "device"`` members
copy the memory they have opened into their own, as a view does not outlive the process
that lent it: the copy is checked by its digest, and is one more holder's slot.
Receivers that verified the version keep it, and may give it in the next attempt.

If the channel sends by process group (``transport = "group"``, or slots on GPUs), the
version is broadcast once to the leaders of all hosts, as an operation of its own
(:mod:`replicas.core.operations.running`). If that fails, for whatever reason, the
members that are left pull the version through host memory, and the next publishes do,
too: groups are tried again at growing intervals until one works. Catch-up always pulls.

The transfer decides nothing about versions: its owner (a publish, or catch-up) is told
``complete`` or ``failed`` and reads ``verified``. Deadlines are the owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from replicas import errors
from replicas.core.base.effects import WrongBytes
from replicas.core.base.membership import TRANSFER, TransferState
from replicas.core.members.preflight import sends_by_group
from replicas.core.moving.attempt import Attempt, Payload
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.moving.paths import TransferPlan, Works, all_work, plan
from replicas.core.moving.stragglers import Stragglers
from replicas.core.moving.task import OPEN, Task
from replicas.messages import TransferDone
from replicas.messages.bounds import REASON_LENGTH, text_of
from replicas.messages.identity import Member

LONGEST_S = 3600.0
"""Longest catch-up in seconds, provided that bytes move."""
MAP_TRIES = 2
"""Failed attempts to map after which a member is sent the bytes instead."""
PULL_TRIES = 3
"""Failed tries to pull after which a host is left to catch-up."""
_NO_ROOM = errors.NoCapacity | errors.Busy | errors.InternalError


class Transfer:
    """The moving of one version to the members that need it, in attempts.

    :param on_end: called once as ``on_end(transfer, error, now)``; ``error`` is None if
        the transfer is complete.
    :ivar verified: members that got the version.
    :ivar refused: members that could not go on, with their errors.
    :ivar why: reasons why members were left out.
    :ivar asked: members that needed it at the start.
    :ivar seconds: by phase: the longest that any member took.
    :ivar moved_to: right bytes that reached each replica over the network. ``pulled``:
        the same bytes, by the member that pulled and the member that served them.
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
        """Prepare a transfer, which :meth:`start` begins. ``needers``: members to get
        the version. ``kind``: of a publish (``main``) or a catch-up. ``deadline``:
        when it should have ended. ``on_end``: as in the class. ``avoid``: the holder
        to use last. ``tries``: failed pulls after which a member is left out."""
        self._context, self._roster = context, context.roster
        self.payload = payload
        self.needers, self.asked = set(needers), frozenset(needers)
        self.kind, self.deadline = kind, deadline
        self._on_end, self._avoid, self._tries = on_end, avoid, tries
        self.state: TransferState = "moving"
        self.attempt = Attempt(context, payload, TransferPlan("image"))
        self.verified: set[Member] = set()
        self.refused: dict[Member, errors.ReplicasError] = {}
        self.why: dict[Member, str] = {}
        self._stragglers = Stragglers(context.roster, payload.version, payload.nbytes)
        self._copies = context.config.staging == "device"
        """Whether members that map copy the memory that they open."""
        self.seconds = dict.fromkeys(("form", "map", "transfer", "verify"), 0.0)
        self.moved_to: dict[str, int] = {}
        self.pulled: dict[str, dict[str, int]] = {}
        self._doubtful: set[Member] = set()
        """Holders that served wrong bytes."""
        self._unanswered: set[Member] = set()
        """Members of the first attempt that have never answered."""
        self._misses: dict[Member, int] = {}
        self._by_group = kind == "main" and sends_by_group(context.config)

    # ------------------------------------------------------------ who is waited for

    @property
    def over(self) -> bool:
        """True if the transfer is complete or failed."""
        return TRANSFER.final(self.state)

    @property
    def _drops(self) -> bool:
        """True if slow members may be left out, so that the others can go on."""
        return self.kind == "main" and self._context.config.on_lost == "drop"

    @property
    def awaited_members(self) -> set[Member]:
        """Members that the transfer waits for: those not ready for its broadcast while
        one is prepared; otherwise all that need the version."""
        return self.attempt.unready if self.attempt.is_preparing else set(self.needers)

    @property
    def left_out(self) -> dict[str, str]:
        """Names of targets that were left out and lack the version, with reasons."""
        states = self._roster.states(self.asked & self.why.keys())
        left = [state for state in states if self.payload.version not in state.held and not state.draining]
        return {state.member.name: self.why[state.member] for state in left}

    @property
    def never_answered(self) -> set[Member]:
        """Unready members that were asked at the start, and have never answered."""
        return self.attempt.unready & self._unanswered

    @property
    def is_unanswered(self) -> bool:
        """True if no member that needs the version answers, or reads its manifest."""
        return self.needers <= self.never_answered - self._reading_until.keys()

    def slow_readers(self, until: float) -> set[Member]:
        """Return members that will not have read the manifest by ``until``."""
        return {member for member, ends_at in self._reading_until.items() if ends_at > until}

    @property
    def _reading_until(self) -> dict[Member, float]:
        """When each unready member that reads the manifest will have all of it."""
        states, wanted = self._roster.states(self.attempt.unready & self.needers), self.payload.manifest_hash
        found = ((state.member, state.reading) for state in states)
        return {member: one.ends_at for member, one in found if one is not None and one.manifest_hash == wanted}

    # ------------------------------------------------------------ attempts

    def start(self, now: float) -> None:
        """Start an attempt in place of the last: queue offers to members that need the
        version, and to givers. End the transfer if none of them can be served."""
        context, payload = self._context, self.payload
        self.needers = {one.member for one in self._roster.states(self.needers) if payload.version not in one.held}
        self._by_group = self._by_group and not context.group_doubt.holds(now)
        if self._by_group:
            self._leave_slow(self._stragglers.far(self.needers), now)
        found = self._plan(now)
        if found is None:
            self._end(self._no_holder(), now)
            return
        if self.needers and not found.serves_any and payload.filling is None:
            self._leave_unreached()
            self._end(None if self.verified else self._refusal(), now)
            return
        self.attempt.close()
        first = not self.attempt.number
        if not first:
            self.state = TRANSFER.next(self.state, "again")
        until = self.deadline if self.kind == "main" else now + LONGEST_S
        self.attempt = Attempt(context, payload, found, next(context.ids), until, now)
        self.attempt.send_offers(now)
        if first:
            self._unanswered = set(self.attempt.concerned)
        self._end_attempt_if_done(now)

    def _plan(self, now: float) -> TransferPlan | None:
        """Return the next attempt's plan, from holders of the image (in catch-up
        targets first) or of parts; None if no complete source is left."""
        payload, roster, keeping, links = self.payload, self._roster, self._context.keeping, self._context.links
        version, main = payload.version, self.kind == "main"
        kept = keeping.stand_ins_with(version)
        holders = [s for s in roster if version in s.held and s.member not in self.refused]
        holders = [s for s in holders if s.member not in self._doubtful] or holders
        holders.sort(key=lambda s: (s.member == self._avoid, roster.is_suspect(s, now), s.is_source != main, s.member))
        holders += [s for s in kept if version in s.held]
        known = map(keeping.member_or_stand_in, payload.part_owners)
        owners = [s for s in known if s is not None and version in s.parts and s.member not in self.refused]
        if len(owners) < len(payload.part_owners):
            owners = []
        lost, needers = {state.member for state in kept}, roster.states(self.needers)
        ways: list[Works] = [partial(links.works, now=now), all_work] if links else [all_work]
        for works in ways:
            found = plan(version, needers, holders, owners, payload.filling, lost, works, by_group=self._by_group)
            if found is None or found.serves_any or (main and self.verified):
                break  # the others have it: a link in doubt would hold them up
        return found

    def _leave_unreached(self) -> None:
        """Leave out the members that need the version, as no holder reaches them."""
        hint = "open all TCP ports between these machines, in both directions"
        for state in self._roster.states(sorted(self.needers)):
            text = f"no holder reaches {state.member}: {self._context.links.why(state)}"
            self._refuse(state.member, errors.Preflight(text, phase="form", hint=hint))

    def _retry(self, reason: str, now: float, why: str = "") -> None:
        """Withdraw the attempt; emit an event of ``reason``, with the text ``why``, if
        members need the version. Start another, or end the transfer if none is due."""
        self.attempt.close(reason)
        if self.needers:
            self._context.emit_retried(reason, why)
        self._go_on(now)

    def _end_attempt_if_done(self, now: float) -> None:
        """If the attempt has no open task, start another one or end the transfer."""
        attempt = self.attempt
        if self.over or attempt.any_open or self.payload.filling is not None:
            return
        wrong = sorted(str(one.member) for one in attempt.of("came", "failed") if one.way == "receive")
        if wrong:
            self._abandon_group(f"digests differ at {', '.join(wrong)}", now)
        else:
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Start another attempt if members need the version, else end the transfer."""
        if self.needers or self.payload.filling is not None:
            self.start(now)
        else:
            self._end(self._refusal() if self._missed_required_targets else None, now)

    # ------------------------------------------------------------ messages of members

    def ready(self, member: Member, transfer: int, now: float) -> None:
        """Record a member's report that its slot is ready for attempt ``transfer``, or
        that its pull begins; ignore past attempts. The last starts the broadcast."""
        attempt, one = self.attempt, self.attempt.under_way(member, transfer)
        if one is None or one.state == "taking":
            return
        self._unanswered.discard(member)
        one.moved_at = one.told_at = now
        attempt.step(one, "began")
        if one.in_group and not attempt.is_preparing:
            left_s = self.deadline - now  # with time left to pull
            attempt.start_broadcast(now + (left_s / 2 if self._drops else left_s), self._broadcast_ended, now)

    def done(self, member: Member, reply: TransferDone, now: float) -> None:
        """Record a member's report that it has mapped or pulled the version, or ended
        its broadcast. Keep its times, doubt links that failed, compare its digest."""
        attempt, one = self.attempt, self.attempt.under_way(member, reply.transfer)
        if one is None or (one.in_group and attempt.is_preparing):
            return
        one.reply, one.moved_at = reply, now
        attempt.step(one, "all_here")
        for phase, took_s in (
            ("map" if one.way == "map" else "transfer", reply.transfer_s),
            ("verify", reply.verify_s),
        ):
            self.seconds[phase] = max(self.seconds[phase], took_s)
        if one.way == "pull":
            self._stragglers.note_pulled(attempt.began_at, now)
            self._doubt_links(one, reply.holders, now)
        for holder, why in reply.wrong.items():
            self._context.emit(WrongBytes(self._context.config.name, self.payload.version, member, holder, why))
        self.settle(now)

    def member_failed(
        self,
        member: Member,
        transfer: int,
        error: errors.ReplicasError,
        now: float,
        holders: Mapping[str, str] | None = None,
    ) -> None:
        """On a member's report that it cannot go on with attempt ``transfer``, fail its
        task, or retry. ``holders``: those it could not pull from, by name, and why."""
        attempt, one = self.attempt, self.attempt.under_way(member, transfer)
        if transfer == attempt.number and member in attempt.plan.servers:
            self._refuse(member, error)  # members that pull from it fail, and find another holder
            self._fail_unservable()
        elif one is not None and not one.in_group:
            self._doubt_links(one, holders or {}, now)
            self._task_failed(one, error)
        elif one is not None and attempt.is_preparing:
            self._refuse(member, error)
            self._retry("refused", now)
        elif one is not None:
            self._abandon_group(error.message, now)
        self._end_attempt_if_done(now)

    def _doubt_links(self, one: Task, why: Mapping[str, str], now: float) -> None:
        """Avoid the links between a task's member and the holders in ``why`` (name and
        reason) for a while; not those to holders that are still pulling themselves."""
        pulling = {other.member for other in self.attempt.of(*OPEN, "failed")}
        for state in self._roster.states(one.holders - pulling):
            if (reason := why.get(state.member.name)) is not None:
                self._context.links.doubt([(self._roster.address(one.member), state.address)], reason, now)

    # ------------------------------------------------------------ what has come

    def settle(self, now: float) -> None:
        """Compare digests of members with all bytes, once the publisher's slot is full:
        count them as holders, or fail their tasks. End the attempt if it is done."""
        payload, attempt = self.payload, self.attempt
        came = sorted(attempt.of("came"), key=lambda one: one.way == "receive")  # the digest is that of the sender
        for one in came if payload.filling is None else ():
            assert one.reply is not None
            digest = one.reply.image_digest
            if one.way == "receive" and not payload.digest:
                continue
            payload.digest = payload.digest or digest
            if one.way == "send":
                attempt.step(one, "right")
                if digest != payload.digest:
                    self._forget_held(one.member)
            elif digest == payload.digest or (one.way == "map" and not self._copies):
                self._keep(one, one.reply, now)
            elif one.way == "pull" and not one.judged:  # it finds the wrong blocks, and pulls those again
                attempt.step(one, "wrong")
                attempt.offer_pulls(now)
            else:
                text = f"digests differ at {one.member}"
                if one.way == "pull":
                    self._doubtful |= one.givers
                    text += f", which pulled from {', '.join(map(str, sorted(one.givers)))}"
                self._task_failed(one, errors.SyncError(text, phase="verify"))
        self._end_attempt_if_done(now)

    def _keep(self, one: Task, reply: TransferDone, now: float) -> None:
        """Record that a task's member has the version; offer its slot to members of its
        host that wait to map it. ``reply``: the member's report."""
        member, version, roster = one.member, self.payload.version, self._roster
        self.attempt.step(one, "right")
        for state in roster.states([member]):
            state.held[version] = self.payload.digest or reply.image_digest
            if reply.place is not None:
                state.places[version] = reply.place
                state.lent |= {version} if one.way != "map" or self._copies else set()
        self.verified.add(member)
        self.needers.discard(member)
        if one.way == "map":
            return
        if reply.received:
            self.pulled[member.name] = dict(reply.received)
        nbytes = sum(reply.received.values()) if one.way == "pull" else self.payload.nbytes
        self.moved_to[member.replica_name] = self.moved_to.get(member.replica_name, 0) + nbytes
        good = [holder for holder in one.givers if holder.name not in reply.holders]
        self._context.links.clear_doubt((roster.address(holder), roster.address(member)) for holder in good)
        for state in roster.states(self.needers):
            if state.host == roster.host(member) and state.member not in self.attempt.tasks:
                self.attempt.offer_map(state.member, member, now)

    # ------------------------------------------------------------ failures

    def _task_failed(self, one: Task, error: errors.ReplicasError) -> None:
        """Fail a member's task; leave the member out if it lacks memory, or pulled too
        often in vain. If it cannot map memory, the next attempt sends it the bytes."""
        member = one.member
        if one.state != "failed":
            self.attempt.step(one, "gave_up")
        self._misses[member] = misses = self._misses.get(member, 0) + 1
        if isinstance(error, _NO_ROOM) or (one.way != "map" and misses >= self._tries):
            self._refuse(member, error)
        elif one.way == "map" and (not isinstance(error, errors.Gone) or misses >= MAP_TRIES):
            for state in self._roster.states([member]):
                self._context.hosts.make_own_host(state)

    def _broadcast_ended(self, error: errors.ReplicasError | None, form_s: float, now: float) -> None:
        """Handle the end of the broadcast: with an error, pull the version instead.
        ``form_s``: the time to form its group."""
        self.attempt.stop_broadcast = None
        self.seconds["form"] += form_s
        if error is None:
            self._context.group_doubt.note_worked()
        else:
            self._abandon_group(error.message, now)

    def _abandon_group(self, why: str, now: float) -> None:
        """Use no process group for a while: pull the missing bytes, as the next
        publishes do. ``why``: text for the event."""
        self._by_group = False
        self._context.group_doubt.note_failed(why, now)
        self._retry("failed", now, why)

    def _refuse(self, member: Member, error: errors.ReplicasError) -> None:
        """Leave this member out for ``error``, to which its name is added. If that is
        ``Gone``, the member no longer counts as a holder."""
        self.refused[member], self.why[member] = error, text_of(error.message, REASON_LENGTH)
        self.needers.discard(member)
        error.members = error.members or (member.name,)
        if member.name not in error.message:
            error.message = f"{member}: {error.message}"
        if isinstance(error, errors.Gone):
            self._forget_held(member)

    def _forget_held(self, member: Member) -> None:
        """Record that the member does not hold the version, without telling it."""
        for state in self._roster.states([member]):
            state.drop_version(self.payload.version)

    # ------------------------------------------------------------ losses and deadlines

    def lost(self, member: Member, now: float) -> None:
        """Go on without a lost member, already out of the roster: others give the
        version in its place, or the tasks that read from it fail."""
        self.needers.discard(member)
        self.verified.discard(member)
        if member == self.payload.filling:
            self.payload.filling = None
            came = self.attempt.of("came")
            if len({one.reply.image_digest for one in came if one.reply is not None}) == 1:
                self.settle(now)  # it had reported no digest, and all that got all of it agree
        self._go_without({member}, "lost", now)

    def exclude(self, members: set[Member], now: float, *, reason: str, why: str) -> None:
        """Go on without these members; they stay members, and are caught up later.
        ``reason``: label of the event of another attempt; ``why``: text for people."""
        for member in members:
            self.needers.discard(member)
            self.why[member] = why
            if member in self.attempt.plan.givers:
                self.refused[member] = errors.PeersLost(f"{member} does not answer", members=[member.name])
        self._go_without(members, reason, now)

    def _go_without(self, members: set[Member], reason: str, now: float) -> None:
        """End the tasks of these members, and those that read their memory; start
        another attempt, for ``reason``, if one took part in the broadcast."""
        attempt = self.attempt
        if any(one.in_group and one.member in members for one in attempt.of(*OPEN)):
            self._by_group = self._by_group and attempt.is_preparing
            self._retry(reason, now)
            return
        readers = {one.member for one in attempt.of("due", "offered") if not members.isdisjoint(one.lenders)}
        attempt.give_up(members | readers)
        self._fail_unservable()
        if reason != "lost" or readers:
            self._context.emit_retried(reason)
        self._end_attempt_if_done(now)

    def _fail_unservable(self) -> None:
        """Fail pulls of which every holder is gone or cannot serve."""
        for one in self.attempt.unservable(self.refused.keys()):
            self.attempt.give_up([one.member])
            self._task_failed(one, errors.PeersLost("no holder serves it", phase="transfer"))

    def tick(self, now: float) -> None:
        """Leave out silent members and late hosts; offer pulls that are due."""
        if self.over:
            return
        attempt, roster = self.attempt, self._roster
        waited = {*attempt.plan.servers, *(one.member for one in attempt.of(*OPEN))} - self.refused.keys()
        frozen = {state.member for state in roster.states(waited) if roster.is_suspect(state, now)}
        if frozen and not self._would_lose_version(frozen, now):
            self.exclude(frozen, now, reason="frozen", why="no sign of life")
            return
        attempt.offer_pulls(now)
        late = [one for one in attempt.of(*OPEN) if one.way == "pull"]
        slow = self._stragglers.slow(late, self.needers, attempt.began_at, now)
        silent = {s.member for s in roster.states(one.member for one in late) if roster.is_silent(s, now)} & slow.keys()
        if silent and self._drops and self._stragglers.suffice((self.needers | self.verified) - silent):
            # others of their hosts, which are not slow, pull in their place
            self.exclude(silent, now, reason="frozen", why="no sign of life")
        elif self._leave_slow(slow, now):
            attempt.give_up(slow)
            self._end_attempt_if_done(now)

    def _leave_slow(self, late: Mapping[Member, str], now: float) -> bool:
        """Leave these members to a catch-up of their own. Return False if none was
        left, as the others could not go on alone. ``late``: with the reasons."""
        others = (self.needers | self.verified) - late.keys()
        if not self._drops or not self._stragglers.mark_slow(late, others, now):
            return False
        self.why |= late
        self.needers -= late.keys()
        return True

    def _would_lose_version(self, silent: set[Member], now: float) -> bool:
        """Return True if excluding ``silent`` would lose the version. False also if
        another publish or a join waits: the version may be lost then."""
        context, version = self._context, self.payload.version
        if silent.isdisjoint(self.attempt.plan.givers) or self.kind != "main" or context.others_wait(now):
            return False
        others = any(version in s.held and s.member not in silent | self.refused.keys() for s in self._roster)
        return not others and not context.keeping.stand_ins_with(version)

    # ------------------------------------------------------------ ends

    @property
    def _all_lack_memory(self) -> bool:
        """True if all targets were left out for lack of memory, and the commit may do
        without them. It may not if the bytes are on the publisher's GPU only."""
        short = all(isinstance(error, errors.NoCapacity | errors.InternalError) for error in self.refused.values())
        drops = self._drops and not (self._copies or self._roster.config.min_targets or self.verified)
        return drops and short and set() < self.refused.keys() <= self.asked

    @property
    def _missed_required_targets(self) -> bool:
        """True if the version did not reach targets that it must reach."""
        if not self.refused.keys() & self.asked - self.verified:
            return False
        every = self.kind == "main" and self._roster.config.on_lost == "raise"
        return every or not (self.verified or self._all_lack_memory)

    def _refusal(self) -> errors.ReplicasError:
        """Return the error of the first member that was left out, or PeersLost."""
        lost = errors.PeersLost("no member still needs it", version=self.payload.version, phase="transfer")
        return next(iter(self.refused.values()), lost)

    def _no_holder(self) -> errors.ReplicasError:
        """Return the error for a version without a complete holder."""
        version, owners, givers = self.payload.version, self.payload.part_owners, self.attempt.plan.givers
        gone = [one.name for one in owners or givers if one not in self._roster]
        text = f"version {version} was lost: no member that held all of it is left"
        lost = errors.PeersLost(text, phase="transfer", members=gone, hint="publish again")
        return next((error for member, error in self.refused.items() if member in givers), lost)

    def _end(self, error: errors.ReplicasError | None, now: float) -> None:
        """End the transfer, failed if there is an ``error``; call ``on_end``."""
        self.stop(complete=error is None)
        self._on_end(self, error, now)

    def stop(self, *, complete: bool) -> None:
        """Unless over, withdraw all offers; end, complete or failed; no ``on_end``."""
        if not self.over:
            self.attempt.close()
            self.state = TRANSFER.next(self.state, "done" if complete else "fail")

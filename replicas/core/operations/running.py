"""Operations between peers: run due ones, retry, and give one verdict to all.

Theory of operation
===================

:mod:`replicas.core.operations.matching` matches posts. A due operation runs in a lane
of its members, in *attempts*. Each attempt has a number of its own, so that late
answers to an earlier one are dropped, and starts from the posted inputs: results are
written only after the common verdict, which makes a retry safe. A retry never uses the
same
lane. ::

    due ──▶ forming ──▶ running ──▶ done: all members write
              ▲  │         │
              │  │   again │          failed (from any): no member writes anything
              │  └─▶ probing
              └──────┴─────┘

**A member is lost** before it has reported *done*: with ``on_lost = "drop"`` the others
run the operation again without it, unless it is the root, or one of a pair; with
``"raise"`` the operation ends in ``PeersLost``. The others need nothing more from a
member that has reported *done*. The same holds for members that are quarantined, and
(with ``"drop"``) for members that are silent for longer than the suspicion time: these
become *behind*, get ``Gone`` for the operation, and stay members.

**A lane fails** while all members are alive: its operations run again once, in a new
lane. An operation that fails twice, or once in a way that would repeat (members that
have worked together can no longer reach each other, or no byte moves:
:mod:`replicas.core.moving.lane_progress`), is *stuck*. It waits while pairs of its
members are probed, and the fewest members that explain the bad pairs are quarantined:
of the two ends of one bad link the less important one, never the root, and rather a
member that has not worked before. Then the operation runs again over the others;
without a culprit it runs once more. After
:data:`~replicas.core.moving.lanes.MAX_PROBES` probes it ends with the error. **A member
refuses** (a tensor that does not fit, no memory), or members that never worked cannot
reach each other: a retry cannot help, and all get that error. Operations that share a
lane with one that failed, or ended too late, are retried without counting a failure.

**A pair** (``send`` and ``recv``) is a broadcast between two members that needs both.
It runs in any lane that has formed with both; else in a lane of the two, independent of
other members and their links. There is no culprit to find: its failure is the verdict
of the two.

**Lanes** are kept for the next operations. An idle lane is closed if it has members
that are not live, or if a larger formed lane has all of its members.

All participants get the same verdict. Members that were left out have had theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from replicas import errors
from replicas.core.base.effects import OperationEnded
from replicas.core.members.member_state import MemberState
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.moving.lanes import MAX_PROBES, Lane, Probe, form_timeout
from replicas.core.operations.matching import Matching
from replicas.core.operations.operation import Faults, Operation, Post
from replicas.messages import Backend, OperationEnd, ReceiptData, WireError
from replicas.messages.identity import Member

LATE_S = 1.0
"""Sidecars end a process group at its deadline; the coordinator this much later."""
TRIAL_PAIRS = 8
"""Number of other members in a trial, evenly spread."""
TRIAL_MIN_S = 1.0
TRIAL_MAX_S = 30.0
TRIAL_PART = 0.1
"""Interval between trials, as a part of the time since the quarantine."""


class Operations:
    def __init__(self, context: ChannelContext) -> None:
        self._context, self._roster = context, context.roster
        self.matching = Matching(
            context, self.reply, lambda ref: any(operation.ref == ref for operation in self.running)
        )
        self._running: dict[int, Operation] = {}
        self._vanished: dict[Member, str] = {}
        self.faults = Faults(context.roster)

    @property
    def running(self) -> tuple[Operation, ...]:
        return tuple(self._running.values())

    @property
    def running_collective(self) -> bool:
        return any(not operation.pairwise for operation in self.running)

    # ------------------------------------------------------------ starting

    def advance(self, now: float) -> None:
        """Start due operations, and send Go where a lane has formed."""
        for due in self.matching.due(now, collective_runs=self.running_collective):
            due.number = number = next(self._context.ids)
            due.ref = f"{self._context.term}.{number}"  # unique across coordinators, too
            due.started_at = due.attempt_at = now
            due.step("begin")
            self._running[number] = due
        for operation in self.running:
            self._run(operation, now)

    def _run(self, operation: Operation, now: float) -> None:
        """Get a lane for the attempt, and send Go once it has formed."""
        if operation.state != "forming":
            return
        if operation.lane is None:
            operation.lane = self._lane_for(operation, now)
            if operation.lane.opened_at == now:  # a new lane may replace others
                self._close_idle_lanes()
        lane = operation.lane
        if lane.state != "formed":
            return
        operation.step("go")
        operation.ran_at = now
        lane.progress.restart()  # no byte could move before
        for post in operation.posts:
            self._context.send(post.member, operation.go(post, lane, now))

    def _lane_for(self, operation: Operation, now: float) -> Lane:
        """Return a lane of the participants, for a pair also a formed larger one."""
        lanes, roster, members = self._context.lanes, self._roster, operation.participants
        wanted = roster.states(members)
        backend = self._backend(operation, wanted)
        there = {state.member for state in roster.live}
        for lane in reversed(lanes.of(self)):
            formed = operation.pairwise and lane.state == "formed"
            within = formed and set(members) <= set(lane.members) <= there  # a lane with a lost member is about to fail
            if lane.backend == backend and (lane.members == members or within):
                return lane
        # the deadline may have passed since the last tick
        timeout_s = form_timeout(max(0.001, operation.deadline - now))
        return lanes.open(wanted, backend, self, now, timeout_s, grace_s=LATE_S)

    def _close_idle_lanes(self) -> None:
        """Close lanes that are neither in use nor wanted for later."""
        lanes = self._context.lanes.of(self)
        live = {state.member for state in self._roster.live}
        busy = [operation.lane for operation in self.running]
        for lane in [lane for lane in lanes if lane not in busy]:
            members = set(lane.members)
            larger = any(other.state == "formed" and members < set(other.members) for other in lanes)
            if larger or not members <= live:
                self._context.lanes.close(lane)

    def _backend(self, operation: Operation, states: Sequence[MemberState]) -> Backend:
        # NCCL takes no tensors in host memory
        on_device = all(post.message.device == "cuda" for post in operation.posts)
        return self._context.lanes.backend(states, on_device=on_device)

    # ------------------------------------------------------------ answers

    def done(self, member: Member, number: int, now: float) -> None:
        if operation := self._attempt(member, number):
            operation.done.add(member)
            if len(operation.done) == len(operation.posts):  # posts of the current participants
                self._finish(operation, None, now)

    def failed(self, member: Member, number: int, error: errors.ReplicasError, now: float) -> None:
        if operation := self._attempt(member, number):
            self._handle_failure(operation.lane, [operation], error, now)

    def _attempt(self, member: Member, number: int) -> Operation | None:
        """Return the operation with this current attempt, or None for a past one."""
        operation = self._running.get(number)
        known = operation is not None and operation.state == "running" and member in operation.participants
        return operation if known else None

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        self._handle_failure(lane, [op for op in self.running if op.lane is lane], error, now)

    def lane_formed(self, lane: Lane, now: float) -> None:
        """Do nothing: :meth:`advance` runs the operations of a formed lane."""

    def lane_void(self, lane: Lane, now: float) -> None:
        self.close_lane(lane, "store", now)

    def _handle_failure(
        self,
        lane: Lane | None,
        blamed: Sequence[Operation],
        error: errors.ReplicasError,
        now: float,
        final: bool = False,
    ) -> None:
        """Handle a dead lane; ``blamed`` operations may have been the cause.

        ``final``: another attempt would fail in the same way.
        """
        # Count before the lane is closed: closing starts the operations again, and
        # clears the count if a member was lost.
        for operation in blamed:
            operation.failures += 1
            operation.problem = error.message
        if lane is not None:
            self.close_lane(lane, "failed", now)
        for operation in [op for op in blamed if not op.ended]:
            verdict, last = self.faults.judge_failure(operation, lane, error, now, final=final)
            if verdict == "stuck" and self._probe(operation, error, now):
                operation.step("stuck")
            elif verdict != "again":
                self._end(operation, last, now)

    def _probe(self, operation: Operation, error: errors.ReplicasError, now: float) -> bool:
        """Start to probe pairs for the culprit; return False if that cannot help."""
        few = operation.pairwise or len(operation.participants) < 2
        # for a bug here no member is at fault
        if isinstance(error, errors.InternalError) or few or operation.probes >= MAX_PROBES:
            return False
        if operation.probe is not None:
            operation.probe.abandon()
        operation.probes += 1
        members = self.faults.order_by_importance(operation)  # of the two ends of a bad link, the later is blamed
        backend = self._backend(operation, self._roster.states(operation.participants))
        operation.probe = Probe(self._context.lanes, members, backend, now, partial(self._probed, operation))
        return not operation.probe.over

    def _probed(self, operation: Operation, culprits: Mapping[Member, str] | None, now: float) -> None:
        for member, why in (culprits or {}).items():
            self._context.quarantine(member, why, now)
        self.resume(operation)  # also without a culprit: the link may have healed

    def resume(self, operation: Operation) -> None:
        """Reset the failures of an operation, and run it again if it was stuck."""
        operation.failures = 0
        if operation.state == "probing":
            operation.step("again")

    # ------------------------------------------------------------ retries

    def close_lane(self, lane: Lane, reason: str, now: float) -> None:
        """Close a dead lane, and start its operations again in another one."""
        self._context.lanes.close(lane, reason)
        concerned = [operation for operation in self.running if operation.lane is lane]
        if concerned:
            self._context.emit_retried(reason)
        for operation in concerned:
            self._restart_attempt(operation, now)

    def _restart_attempt(self, operation: Operation, now: float) -> None:
        """Start another attempt, with a new number, over the remaining members."""
        del self._running[operation.number]
        operation.number = next(self._context.ids)  # answers to the old number are dropped from now on
        self._running[operation.number] = operation
        operation.attempt += operation.state == "running"  # an attempt counts from its Go
        operation.step("again")
        operation.lane, operation.attempt_at = None, now
        operation.done.clear()
        for member in operation.participants:
            state = self._roster.get(member)
            if not operation.ended and (state is None or not state.live):  # an earlier member may have ended it
                why = state.note if state is not None else self._vanished.get(member, "it was lost")
                self._leave_out(operation, member, why, now)

    def _leave_out(self, operation: Operation, member: Member, why: str, now: float) -> None:
        """Leave out a participant, and send it Gone; or end the operation."""
        if self._roster.config.on_lost == "raise" or not operation.can_do_without(member):
            # only the root has its data
            error = operation.error(errors.PeersLost, f"cannot end without {member}: {why}", members=[member.name])
            self._end(operation, error, now)
            return
        operation.left_out[member.name] = why
        self.resume(operation)  # the member may have caused the failures
        post = next(post for post in operation.posts if post.member == member)
        operation.posts = tuple(kept for kept in operation.posts if kept is not post)
        self.matching.end(post)
        gone = errors.Gone(
            f"the others ended the {operation.kind} without {member} ({why})",
            phase=operation.phase,
            members=[member.name],
            hint="resynchronise this peer; its next call is matched with the others' next call",
        )
        self.reply(post, gone)

    # ------------------------------------------------------------ ends

    def _end(self, operation: Operation, error: errors.ReplicasError, now: float) -> None:
        """End an operation with an error, and close its lane, which may be half used.

        Other operations in that lane start again.
        """
        lane = operation.lane
        self._finish(operation, error, now)  # first: closing the lane restarts all operations still in it
        if lane is not None:
            self.close_lane(lane, "failed" if not isinstance(error, errors.PeersLost) else "lost", now)

    def _finish(self, operation: Operation, error: errors.ReplicasError | None, now: float) -> None:
        del self._running[operation.number]
        operation.step("done_by_all" if error is None else "fail")
        if operation.probe is not None:
            operation.probe.abandon()
        self.matching.record_verdict(operation.ref, error is None)
        seconds = now - operation.posted_at
        receipt = operation.receipt(self._roster.epoch, now) if error is None else None
        for post in operation.posts:
            self.matching.end(post)
        if error is None and not operation.pairwise:
            self.matching.record_step(operation.domain, operation.posts[0].message.step)
            self.faults.succeeded(operation)
        for post in operation.posts:
            self.reply(post, error, receipt)
        outcome = "ok" if error is None else type(error).__name__
        self._context.emit(OperationEnded(self._roster.config.name, operation.kind, outcome, seconds))
        if not self._running:
            self._vanished.clear()  # needed only for running operations

    def reply(self, post: Post, error: errors.ReplicasError | None = None, receipt: ReceiptData | None = None) -> None:
        if post.member in self._roster:
            wire = WireError.of(error) if error is not None else None
            self._context.send(post.member, OperationEnd(post.message.post, receipt, wire))

    # ------------------------------------------------------------ losses and deadlines

    def lost(self, member: Member, why: str, now: float) -> None:
        """Remove a lost member (already out of the roster); ``why`` as short text."""
        if self._running:
            self._vanished[member] = why
        self.faults.lost(member)
        self.leave_out_of_all(member, why, now, reason="lost")
        self.matching.lost(member, why)

    def leave_out_of_all(self, member: Member, why: str, now: float, *, reason: str = "failed") -> None:
        """Leave out a lost, behind or quarantined member; restart its operations."""
        for operation in self.running:
            if member in operation.awaited and not operation.ended:  # no more is needed after its done
                lane = operation.lane
                self._leave_out(operation, member, why, now)
                if lane is not None:
                    self.close_lane(lane, reason, now)
        for lane in {op.lane.name: op.lane for op in self.running if op.lane is not None}.values():
            if member in lane.members and lane.state == "forming":  # a formed lane works without it
                self.close_lane(lane, reason, now)

    def _mark_behind(self, state: MemberState, now: float) -> None:
        """Mark a silent member, which may return, as behind, and leave it out."""
        why = f"silent for {now - state.last_seen:.0f} s"
        self._roster.leave_behind(state, why)
        self.leave_out_of_all(state.member, why, now, reason="frozen")

    def tick(self, now: float) -> None:
        """Check deadlines, silent members and stalled lanes; close idle lanes."""
        for operation in self.running:
            if not operation.ended and now > operation.deadline:
                self._end(operation, operation.overdue(), now)
        self._leave_silent(now)
        for operation in self.running:
            if operation.state == "running" and operation.lane is not None:
                self._fail_stalled(operation, operation.lane, now)
        self.matching.tick(now)
        self._close_idle_lanes()

    def _fail_stalled(self, operation: Operation, lane: Lane, now: float) -> None:
        """Fail an operation whose bytes have stopped while all members are alive."""
        awaited = operation.awaited
        if lane.progress.stands_still(awaited, now):
            names = ", ".join(member.name for member in awaited)
            ways = sorted(f"{member.name} to {address}" for member, address in lane.progress.held_up())
            held_up = f"; held up: {', '.join(ways)}" if ways else ""
            text = f"no byte has moved for {lane.progress.still_s():.1f} s between {names}{held_up}"
            self._handle_failure(lane, [operation], errors.SyncError(text, phase="transfer"), now, final=True)

    def _leave_silent(self, now: float) -> None:
        """Leave out silent members that a collective waits for."""
        if self._roster.config.on_lost == "raise":
            return
        busy = {operation.domain for operation in self.running if not operation.pairwise}
        for late in self.matching.silent_blockers(busy, now):
            self._mark_behind(late, now)
        for operation in self.running:
            if operation.ended or operation.pairwise:
                continue
            awaited = self._roster.states(operation.awaited)
            silent = [state for state in awaited if state.live and self._roster.suspect(state, now)]
            heard = len(operation.posts) - len(silent)
            if heard and all(operation.can_do_without(state.member) for state in silent):
                for state in silent:
                    self._mark_behind(state, now)


class Trials:
    """Tests of quarantined peers, independent of the operations of the others.

    A quarantined peer is not readmitted for a test, as the others would pay for each
    failure. It is tested in pairs with each of them, and released when all pairs work.
    Trials come at growing intervals: a part of the time since the quarantine. A trial
    without a result is repeated without a pause.
    """

    def __init__(self, context: ChannelContext, pairing: Matching) -> None:
        self._context = context
        self._pairing = pairing
        self._since: dict[Member, float] = {}
        """Time of the quarantine of each peer."""
        self._trials: dict[Member, Probe] = {}

    def update_trials(self, now: float) -> None:
        """Start due trials, and forget peers that have left quarantine."""
        roster = self._context.roster
        here = {s.member: s for s in roster.apart.values() if s.standing == "quarantined"}
        for member in [member for member in self._since if member not in here]:
            del self._since[member]
            if member in self._trials:
                self._trials.pop(member).abandon()
        for member, state in here.items():
            self._since.setdefault(member, now)
            if member not in self._trials and roster.admissible(state, now):
                self._try(state, now)

    def _try(self, state: MemberState, now: float) -> None:
        live = self._pairing.live(self._pairing.domain_of(state.member))
        # a silent member would fail the trial
        live = [other for other in live if not self._context.roster.suspect(other, now)]
        # every k-th of them, rounded up: at most TRIAL_PAIRS
        tried = [*live[:: -(-len(live) // TRIAL_PAIRS) or 1], state]
        members = [one.member for one in tried]
        pairs = [(other, state.member) for other in members[:-1]]
        backend = self._context.lanes.backend(tried, on_device=False)
        trial = Probe(self._context.lanes, members, backend, now, partial(self._finish_trial, state), pairs=pairs)
        if not trial.over:
            self._trials[state.member] = trial

    def _finish_trial(self, state: MemberState, culprits: Mapping[Member, str] | None, now: float) -> None:
        self._trials.pop(state.member, None)
        if culprits:
            state.note = next(iter(culprits.values()))
            state.not_before = now + min(TRIAL_MAX_S, max(TRIAL_MIN_S, TRIAL_PART * (now - self._since[state.member])))
        elif culprits is not None:  # None: the trial had no result
            self._context.roster.release(state)

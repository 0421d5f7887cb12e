"""Operations between peers: run due ones, retry, and give one verdict to all.

Theory of operation
===================

:mod:`replicas.core.operations.matching` matches posts. A due operation runs in a lane
of its members, in *attempts*. Each attempt has a number of its own, so that late
answers to an earlier one are dropped, and starts from the posted inputs: results are
written only after the common verdict, which makes a retry safe. A retry never uses the
same lane. ::

    due ──▶ forming ──▶ running ──▶ done: all members write
              ▲  │ again   │
              └──┴─────────┘          failed (from any): no member writes anything

**A member is lost** before it has reported *done*: with ``on_lost = "drop"`` the others
run the operation again without it, unless it is the root, or one of a pair; with
``"raise"`` the operation ends in ``PeersLost``. The others need nothing more from a
member that has reported *done*. With ``"drop"`` the same holds for members that are
silent for longer than the suspicion time: these become *behind*, get ``Gone`` for the
operation, and stay members.

**A lane fails** while all members are alive: two of them cannot reach each other, or no
byte moves (:mod:`replicas.core.operations.lane_progress`). Its operations run again
once, in a new lane, whose members first connect to each other
(:mod:`replicas.sidecar.meeting`), so that a broken link has the names of its ends. An
operation that fails twice ends with an error that names these; nobody is left out,
because it takes more than one operation to tell which end is at fault. A lane that does
not form in time is tried again until the operation's deadline: a forkserver may be
starting on a busy machine. **A member refuses** (a tensor that does not fit, no
memory), or members that never worked cannot reach each other: a retry cannot help, and
all get that error. Operations that share a lane with one that failed, or ended too
late, are retried without counting a failure.

**A pair** (``send`` and ``recv``) is a broadcast between two members that needs both.
It runs in any lane that has formed with both; else in a lane of the two, independent of
other members and their links.

**A version** is broadcast once, among the members of one attempt of a transfer: at the
first failure, loss or delay, also of the store, it ends, and its transfer is told.

**Lanes** are kept for the next operations. An idle lane is closed if it has members
that are not live, or if a larger formed lane has all of its members.

All participants get the same verdict. Members that were left out have had theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from replicas import errors
from replicas.core.base.effects import OperationEnded
from replicas.core.members.member_state import MemberState
from replicas.core.members.preflight import nccl_works
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.operations.lanes import Lane, Lanes, form_timeout
from replicas.core.operations.matching import Matching
from replicas.core.operations.operation import LINK_HINT, Operation, Post, missed
from replicas.messages import Backend, OperationEnd, OperationPost, ReceiptData, WireError
from replicas.messages.bounds import REASON_LENGTH, text_of
from replicas.messages.identity import Member


class Operations:
    """The operations of one channel from their start to their verdict."""

    def __init__(self, context: ChannelContext, lanes: Lanes) -> None:
        """Start without operations; lanes are the process groups that they use."""
        self._context, self._roster, self._lanes = context, context.roster, lanes
        self.matching = Matching(
            context, self.reply, lambda ref: any(operation.ref == ref for operation in self.running)
        )
        self._running: dict[int, Operation] = {}
        self._vanished: dict[Member, str] = {}
        self._worked = False
        """True once a collective has succeeded: its members could reach each other."""

    @property
    def running(self) -> tuple[Operation, ...]:
        """The operations that have started and have no verdict yet."""
        return tuple(self._running.values())

    @property
    def running_collective(self) -> bool:
        """True if a collective of peers runs; pairs and versions do not count."""
        return any(not (operation.pairwise or operation.transfer) for operation in self.running)

    # ------------------------------------------------------------ starting

    def advance(self, now: float) -> None:
        """Start due operations, and queue Go for those whose lane has formed."""
        for due in self.matching.due(now, collective_runs=self.running_collective):
            self._begin(due, now)
        for operation in self.running:
            self._run(operation, now)

    def _begin(self, operation: Operation, now: float) -> None:
        """Give an operation its number and name, and enter it as running."""
        operation.number = number = next(self._context.ids)
        operation.ref = f"{self._context.term}.{number}"  # unique across coordinators, too
        operation.started_at = operation.attempt_at = now
        operation.step("begin")
        self._running[number] = operation

    def broadcast(
        self,
        transfer: int,
        members: tuple[Member, ...],
        device: str,
        deadline: float,
        on_end: Callable[[errors.ReplicasError | None, float, float], None],
        now: float,
    ) -> Callable[[str], None]:
        """Broadcast a version; the members' offers take the place of posts.

        Return the function that cancels it:
        :data:`replicas.core.moving.channel_context.Broadcast`.

        :param transfer: number of the attempt of the transfer.
        :param members: the holder of the version, then its receivers.
        :param device: type of the slots' device, such as ``cuda``.
        :param on_end: called as ``on_end(error or None, form_s, now)`` unless
            cancelled.
        """
        name = members[0].name
        call = OperationPost(0, "broadcast", (), deadline - now, root=name, device=device)
        posts = tuple(Post(member, call, now, deadline, started=True) for member in members)
        channel = self._roster.config.name
        operation = Operation("broadcast", posts, posts[0], -1, members, channel, transfer=transfer, on_end=on_end)
        self._begin(operation, now)
        return partial(self._cancel, operation)

    def _cancel(self, operation: Operation, reason: str) -> None:
        """End a version's broadcast; its ``on_end`` is not called.

        Close its lane with ``reason``. Do nothing if it has ended.
        """
        if not operation.ended:
            del self._running[operation.number]
            operation.step("fail")
            if operation.lane is not None:
                self._lanes.close(operation.lane, reason)

    def _run(self, operation: Operation, now: float) -> None:
        """Give a forming operation a lane; if that has formed, queue Go to all."""
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
        """Return a lane (process group) of the participants; open one if there is none.

        A ``send`` with its ``recv`` also takes a larger lane that has formed.
        """
        lanes, roster, members = self._lanes, self._roster, operation.participants
        wanted = roster.states(members)
        backend = self._backend(operation, wanted)
        there = {state.member for state in roster.live}
        for lane in reversed(list(lanes)):
            formed = operation.pairwise and lane.state == "formed"
            within = formed and set(members) <= set(lane.members) <= there  # a lane with a lost member is about to fail
            if lane.backend == backend and (lane.members == members or within):
                return lane
        # the deadline may have passed since the last tick
        timeout_s = form_timeout(max(0.001, operation.deadline - now), max(state.rtt_s for state in wanted))
        return lanes.open(wanted, backend, now, timeout_s)

    def _close_idle_lanes(self) -> None:
        """Close lanes that no operation uses or is likely to use."""
        lanes = list(self._lanes)
        live = {state.member for state in self._roster.live}
        busy = [operation.lane for operation in self.running]
        for lane in [lane for lane in lanes if lane not in busy]:
            members = set(lane.members)
            # the broadcasts of versions need one, of the present leaders
            former = not self._context.config.peers and lane is not lanes[-1]
            larger = any(other.state == "formed" and members < set(other.members) for other in lanes)
            if former or larger or not members <= live:
                self._lanes.close(lane)

    def _backend(self, operation: Operation, states: Sequence[MemberState]) -> Backend:
        """Return the configured backend, or else ``nccl`` if it works, or ``gloo``."""
        config = self._roster.config
        if config.backend == "gloo" or (config.backend == "nccl" and (config.peers or config.staging != "device")):
            return config.backend
        on_device = all(post.message.device == "cuda" for post in operation.posts)  # NCCL takes no others
        return "nccl" if on_device and nccl_works([state.hello for state in states]) else "gloo"

    # ------------------------------------------------------------ answers

    def done(self, member: Member, number: int, now: float) -> None:
        """Record a member's report of success; after the last, send all the verdict.

        :param number: of the attempt; a past one is ignored.
        """
        if operation := self._attempt(member, number):
            operation.done.add(member)
            if len(operation.done) == len(operation.posts):  # posts of the current participants
                self._finish(operation, None, now)

    def failed(self, member: Member, number: int, error: errors.ReplicasError, now: float) -> None:
        """Retry or end the operation whose attempt a member reports as failed.

        :param number: of the attempt; a past one is ignored.
        """
        if operation := self._attempt(member, number):
            self._handle_failure(operation.lane, [operation], error, now)

    def _attempt(self, member: Member, number: int) -> Operation | None:
        """Return the running operation whose present attempt has this number. Return
        None for a past attempt, or if the member does not take part."""
        operation = self._running.get(number)
        known = operation is not None and operation.state == "running" and member in operation.participants
        return operation if known else None

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        """Retry or end all operations of a lane that failed, and close the lane."""
        worked = self._worked or any(state.from_before for state in self._roster)
        if isinstance(error, errors.Preflight) and worked:  # a link has broken: the config is not at fault
            error = errors.SyncError(error.message, phase=error.phase, members=error.members, hint=error.hint)
        self._handle_failure(lane, [op for op in self.running if op.lane is lane], error, now)

    def lane_void(self, lane: Lane, now: float) -> None:
        """Replace a lane whose store has ended; its operations start again.

        A broadcast of a version ends: it is tried once.
        """
        gone = errors.SyncError("the rendezvous store of its process group has ended", phase="form")
        self._end_broadcasts([op for op in self.running if op.lane is lane], gone, now)
        self.close_lane(lane, "store", now)

    def check_lanes(self, now: float) -> None:
        """End lanes that have not formed in time; retry or end their operations."""
        for lane in self._lanes.overdue(now):
            if self._lanes.waits_for_store(lane):
                self.lane_void(lane, now)
            else:
                self.lane_failed(lane, lane.overdue_error(), now)

    def store_moved(self, now: float) -> None:
        """Replace the lanes that were forming over the store before this one."""
        for lane in self._lanes.store_moved():
            self.lane_void(lane, now)

    def _end_broadcasts(self, failed: Sequence[Operation], error: errors.ReplicasError, now: float) -> None:
        """End those of the operations that broadcast a version: these run once only."""
        for operation in failed:
            if operation.transfer:
                self._end(operation, error, now)

    def _handle_failure(
        self, lane: Lane | None, blamed: Sequence[Operation], error: errors.ReplicasError, now: float
    ) -> None:
        """Close the lane (None: there is none yet), and retry or end its operations.

        :param blamed: those that may be the cause: each is counted a failure, and the
            second one ends it.
        """
        # Count before the lane is closed: closing starts the operations again, and
        # clears the count if a member was lost.
        for operation in blamed:
            operation.failures += not isinstance(error, errors.DeadlineExceeded)  # slow to form: nothing is broken
            operation.problem = error.message
        self._end_broadcasts(blamed, error, now)
        if lane is not None:
            self.close_lane(lane, "failed", now)
        for operation in [op for op in blamed if not op.ended]:
            last = operation.final_error(error, now)
            if last is not None:
                self._end(operation, last, now)

    # ------------------------------------------------------------ retries

    def close_lane(self, lane: Lane, reason: str, now: float) -> None:
        """Close a lane, and start its operations again in another one. ``reason``:
        label for the events of the retry."""
        self._lanes.close(lane, reason)
        concerned = [operation for operation in self.running if operation.lane is lane]
        if concerned:
            self._context.emit_retried(reason)
        for operation in concerned:
            self._restart_attempt(operation, now)

    def _restart_attempt(self, operation: Operation, now: float) -> None:
        """Start another attempt, with a new number, over the remaining members.

        Leave out participants that are lost or behind, which may end the operation.
        """
        del self._running[operation.number]
        operation.number = next(self._context.ids)  # answers to the old number are dropped from now on
        self._running[operation.number] = operation
        operation.attempt += operation.state == "running"  # an attempt counts from its Go
        operation.step("again")
        operation.lane, operation.attempt_at, operation.ran_at = None, now, 0.0
        operation.done.clear()
        for member in operation.participants:
            state = self._roster.get(member)
            if not operation.ended and (state is None or not state.live):  # an earlier member may have ended it
                why = state.note if state is not None else self._vanished.get(member, "it was lost")
                self._leave_out(operation, member, why, now)

    def _leave_out(self, operation: Operation, member: Member, why: str, now: float) -> None:
        """Leave out a participant, and send it Gone; or end the operation.

        It ends if that member is needed, or with ``on_lost = "raise"``.
        """
        if self._roster.config.on_lost == "raise" or not operation.can_do_without(member):
            # only the root has its data
            error = operation.error(errors.PeersLost, f"cannot end without {member} ({why})", members=[member.name])
            self._end(operation, error, now)
            return
        operation.left_out[member.name] = why
        operation.failures = 0  # the member may have caused them
        post = next(post for post in operation.posts if post.member == member)
        operation.posts = tuple(kept for kept in operation.posts if kept is not post)
        self.matching.end(post)
        text = f"the others ended the {operation.kind} without {member} ({why})"
        self.reply(post, missed(text, member, operation.phase))

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
        """Forget the operation; send all the verdict, or call a broadcast's ``on_end``.

        :param error: of a failure; None: a success, for which each gets a receipt.
        """
        del self._running[operation.number]
        operation.step("done_by_all" if error is None else "fail")
        if operation.on_end is not None:
            operation.on_end(error, operation.ran_at - operation.attempt_at if operation.ran_at else 0.0, now)
            return
        self.matching.record_verdict(operation.ref, error is None)
        seconds = now - operation.posted_at
        receipt = operation.receipt(self._roster.epoch, now) if error is None else None
        for post in operation.posts:
            self.matching.end(post)
        if error is None and not operation.pairwise:
            self.matching.record_step(operation.domain, operation.posts[0].message.step)
            self._worked |= len(operation.posts) > 1
        for post in operation.posts:
            self.reply(post, error, receipt)
        outcome, why = "ok", ""
        if error is not None:
            outcome, why = type(error).__name__, text_of(error.message, REASON_LENGTH)
        self._context.emit(OperationEnded(self._roster.config.name, operation.kind, outcome, seconds, why))
        if not self._running:
            self._vanished.clear()  # needed only for running operations

    def reply(self, post: Post, error: errors.ReplicasError | None = None, receipt: ReceiptData | None = None) -> None:
        """Queue a post's verdict, an error or a receipt, to its member if present."""
        if post.member in self._roster:
            wire = WireError.of(error) if error is not None else None
            self._context.send(post.member, OperationEnd(post.message.post, receipt, wire))

    # ------------------------------------------------------------ losses and deadlines

    def lost(self, member: Member, why: str, now: float) -> None:
        """Restart or end operations that wait for a lost member, which is out of the
        roster already; remove its posts. ``why``: how it was lost, as short text."""
        if self._running:
            self._vanished[member] = why
        self.leave_out_of_all(member, why, now, reason="lost")
        self.matching.lost(member, why)

    def leave_out_of_all(self, member: Member, why: str, now: float, *, reason: str) -> None:
        """Leave out a lost or behind member: operations that wait for it restart, or
        end if they need it. ``why``: for people. ``reason``: label for the events."""
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
        """Take a silent member out of the epoch and its operations; it may return."""
        why = f"silent for {now - state.last_seen:.0f} s"
        self._roster.leave_behind(state, why)
        self.leave_out_of_all(state.member, why, now, reason="frozen")

    def tick(self, now: float) -> None:
        """End what is late, leave out silent members, close stalled and idle lanes."""
        for operation in self.running:
            if not operation.ended and now > operation.deadline:
                self._end(operation, operation.overdue_error(), now)
        self._leave_silent(now)
        for operation in self.running:
            if operation.state == "running" and operation.lane is not None:
                self._fail_stalled(operation, operation.lane, now)
        self.matching.tick(now)
        self._close_idle_lanes()

    def _fail_stalled(self, operation: Operation, lane: Lane, now: float) -> None:
        """If no byte moves for an operation, close its lane, and retry or end it."""
        awaited = operation.awaited
        if not lane.progress.stands_still(awaited, now):
            return
        text = f"no byte has moved for {lane.progress.still_s():.1f} s between {', '.join(m.name for m in awaited)}"
        ends: set[Member] = set()
        for member, address in sorted(lane.progress.held_up()):
            others = [other for other in lane.members if other != member and self._roster.address(other) == address]
            ends.update((member, *others))
            where = f"{', '.join(other.name for other in others)} at {address}" if others else address
            text += f"; bytes from {member.name} to {where} wait"
        names = [member.name for member in sorted(ends or awaited)]
        error = errors.SyncError(text, phase="transfer", members=names, hint=LINK_HINT)
        self._handle_failure(lane, [operation], error, now)

    def _leave_silent(self, now: float) -> None:
        """With ``on_lost = "drop"`` leave out silent members that others wait for."""
        if self._roster.config.on_lost == "raise":
            return
        busy = {operation.domain for operation in self.running if not operation.pairwise}
        for late in self.matching.silent_blockers(busy, now):
            self._mark_behind(late, now)
        for operation in self.running:
            if operation.ended or operation.pairwise:
                continue
            awaited = self._roster.states(operation.awaited)
            silent = [state for state in awaited if state.live and self._roster.is_suspect(state, now)]
            heard = len(operation.posts) - len(silent)
            if heard and all(operation.can_do_without(state.member) for state in silent):
                for state in silent:
                    self._mark_behind(state, now)

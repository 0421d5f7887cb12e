"""Run operations between peers on copies of the caller's tensors.

Theory of operation
===================

The call copies the inputs into a scratch buffer (on the caller's thread and stream;
with ``staging = "device"`` into one on the GPU if the tensors are there) and posts.
When all participants have posted, the coordinator sends Go and the lane's sidecar runs
the operation on the scratch memory. Only the common verdict (OperationEnd) decides: on
success a worker thread writes the results into the caller's tensors, and then the
Pending resolves; on any failure the caller's tensors are unchanged (invariant I3).

**Attempts.** After a loss or a failure the coordinator sends Go again, to the remaining
members, for another lane. A sidecar only reads the inputs, and each attempt has outputs
of its own: so an attempt starts from the inputs as posted, even if the sidecar of the
previous attempt is still running. The requests of one lane go to its sidecar in the
order of their Go, one at a time, as on every other member.

**Memory.** Inputs return to the pool when the operation is over and no attempt runs;
outputs when their attempt is neither running nor wanted. An attempt runs until its
sidecar has answered or is known to be dead.

**Outcome unknown.** Without a verdict the member ends an operation shortly after its
deadline, or when there is a new coordinator. If the member had reported *done*, the
operation ends with OutcomeUnknown, and the next posts name it as unsettled. A late
verdict, or OperationSettled, brings the outcome
(:mod:`replicas.channel.operations.results`). While results are uncollected, the next
collective is refused once, here or by the coordinator.

**A new coordinator** knows no operation. All end, except those that were posted while
there was no session: no coordinator has seen them, so they are posted again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from replicas import errors
from replicas import messages as wire
from replicas.channel.operations.results import Job, OperationAttempt, OperationCall, Unknown
from replicas.channel.operations.scratch import Scratch, write_segments
from replicas.channel.session.hub import GRACE_S, Hub, Part, as_wire_error
from replicas.channel.session.pending import Promise, Receipt
from replicas.channel.session.sidecar_lanes import SidecarLane, SidecarLanes, index_in
from replicas.common.logs import Log
from replicas.core.base.manifest import segment_layout
from replicas.messages.bounds import text_of
from replicas.sidecar.rank_side.sidecar_handle import SidecarFailed

logger = Log("replicas.channel")

APPLIED = 16
"""Number of newest refs that a post names as applied; more than a member has open."""


class RankOperations(Part):
    """Runs this member's collectives: sends each call to the coordinator, and runs it.

    A sidecar process runs it when all peers have called; then its Pending ends.

    :param broadcast: called with each Go that broadcasts a version.
    """

    def __init__(self, hub: Hub, lanes: SidecarLanes, broadcast: Callable[[wire.OperationGo], None]) -> None:
        """Start without operations.

        :param lanes: the process groups that run them.
        :param broadcast: called on the session thread with each Go that broadcasts a
            version, which is no operation of the user's.
        """
        self._hub = hub
        self._broadcast = broadcast
        self._lanes = lanes
        self._scratches = {"": Scratch(f"replicas-{hub.name}")}
        self._posts = 0
        self._jobs: dict[int, Job] = {}
        self._applied: deque[str] = deque(maxlen=APPLIED)
        self._unknown = Unknown(hub, self._applied.append, self._release)

    # ------------------------------------------------------------ caller's thread

    def start(self, operation: OperationCall, deadline_s: float) -> Promise[Receipt]:
        """Caller's thread: copy the inputs, and have the operation posted.

        Posted means: sent to the coordinator, which matches it with the peers' calls.
        Does not wait for them. If it raises, nothing was posted.

        :param deadline_s: seconds for the whole operation.
        :raises replicas.errors.Gone: an earlier operation of unknown outcome succeeded.
        :raises replicas.errors.NoCapacity: there is no memory for the copy.
        """
        if operation.kind not in ("send", "recv"):
            self._unknown.check_collected()
        job = Job(operation, deadline_s, self._hub.pending(operation.kind))
        if operation.inputs:
            segments, scratch = operation.segments, self._scratch(operation)
            job.inputs = scratch.take_buffer(segment_layout(segments)[1])
            try:
                write_segments(job.inputs, segments, operation.inputs, operation.gpu)
            except BaseException:
                scratch.give(job.inputs)
                raise
        operation.order_after_stream()
        self._hub.call(self._post, job)
        return job.pending

    def _scratch(self, operation: OperationCall) -> Scratch:
        """Return the pool of buffers for an operation's copies; make it if missing.

        Its buffers are on the GPU that holds the channel's slots (``staging =
        "device"``) if the tensors of ``operation`` are on a GPU, else in host memory.
        """
        device = self._hub.device if operation.gpu else ""
        return self._scratches.setdefault(device, Scratch(f"replicas-{self._hub.name}", device))

    def open_jobs(self) -> list[Promise[Receipt]]:
        """Any thread: return the Pendings that have not ended, for close()."""
        return [job.pending for job in list(self._jobs.values()) if not job.pending.done()]

    # ------------------------------------------------------------ session thread

    def close(self) -> None:
        """Drop results that no caller waited for, and free the idle buffers.

        A later wait for such results raises Gone; buffers in use are freed when
        returned.
        """
        self._unknown.close()
        for scratch in list(self._scratches.values()):
            scratch.close()

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {
            wire.OperationGo: self._start_attempt,
            wire.OperationEnd: self._ended,
            wire.OperationSettled: self._unknown.settled,
        }

    def new_term(self) -> None:
        """Handle a restarted coordinator: fail the operations that the old one knew.

        They fail with Disconnected, or with OutcomeUnknown if this rank has reported
        that its part is done. Operations that were posted after the connection was lost
        are sent to the new coordinator.
        """
        # no coordinator has seen these
        unsent = [job for job in self._jobs.values() if job.outage and job.outage == self._hub.down_since]
        for job in [job for job in self._jobs.values() if job not in unsent]:
            text = f"the coordinator was restarted during the {job.operation.kind}"
            lost = f"{text}, which did not happen on this peer"
            error = self._hub.error(errors.Disconnected, lost, phase="wait", hint="call it again")
            self._end_without_verdict(job, error, text)
        for job in unsent:
            self._send(job)

    def fail_all(self, error: errors.ReplicasError) -> None:
        """End all open operations with ``error``.

        An operation that has ended, also as OutcomeUnknown, keeps its outcome.
        """
        for job in list(self._jobs.values()):
            self._end(job, error)

    def _post(self, job: Job) -> None:
        """Session thread: number the operation, start its timer, send OperationPost.

        Ends it instead if the session is over.
        """
        hub = self._hub
        if hub.over is not None:
            self._end(job, hub.over)
            return
        self._posts += 1
        job.post = self._posts
        self._jobs[job.post] = job
        job.timer = hub.after(job.deadline + GRACE_S - time.monotonic(), self._overdue, job)
        if not hub.session.connected:
            job.outage = hub.down_since
        self._send(job)

    def _send(self, job: Job) -> None:
        """Send the job's OperationPost, which describes the call, to the coordinator.

        If the message is too large, fail the job with UsageError instead.
        """
        operation = job.operation
        job.unsettled = self._unknown.refs
        message = wire.OperationPost(
            post=job.post,
            kind=operation.kind,
            segments=operation.segments,
            deadline_s=max(0.0, job.deadline - time.monotonic()),
            reduce_op=operation.reduce_op,
            root=operation.root,
            step=operation.step,
            device=operation.device,
            applied=tuple(self._applied),
            unsettled=job.unsettled,
        )
        try:
            self._hub.send(message)
        except errors.UsageError as error:  # more tensors than one message can describe
            self._end(job, error)

    def _start_attempt(self, go: wire.OperationGo) -> None:
        """Handle the coordinator's Go: start an attempt on the lane that it names.

        A Go that broadcasts a version is passed to ``broadcast``. If the call has ended
        here, or the attempt is not a newer one, send OperationFailed instead.
        """
        if go.transfer:
            self._broadcast(go)
            return
        job, member = self._jobs.get(go.post), self._hub.member
        earlier = job.attempt if job is not None else None
        if job is None or (earlier is not None and go.attempt <= earlier.go.attempt):
            text = f"the call number {go.post} of {member} has ended on that peer"
            error = self._hub.error(errors.Gone, text, phase="go", members=[member.name], hint="call it again")
            self._hub.send(wire.OperationFailed(go.operation, wire.WireError.of(error)))
            return
        job.said_done = False
        job.running += 1
        job.attempt = attempt = OperationAttempt(go, index_in(go, member))
        if earlier is not None and not earlier.running:
            self._give_outputs(job, earlier)
        self._hub.spawn(self._run(job, attempt), f"operation {go.operation}")

    async def _run(self, job: Job, attempt: OperationAttempt) -> None:
        """Run one attempt, send OperationDone or OperationFailed, and free its buffers.

        Waits for its turn on the lane (process group). After a failure kill the lane's
        sidecar; if it does not die, keep the buffers, which it may still use.
        """
        hub, lane, operation = self._hub, None, attempt.go.operation
        answer: wire.OperationDone | wire.OperationFailed
        try:
            lane = self._lanes.get(attempt.go.lane)
            async with lane.turn:
                wanted = job.attempt is attempt and not job.over  # a newer Go, or the end, may have come first
                if wanted:
                    await self._collective(lane, job, attempt)
            answer = wire.OperationDone(operation)
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            job.spoiled = True
            answer = wire.OperationFailed(operation, self._as_wire(error))
        if not job.over and job.attempt is attempt:
            job.said_done = isinstance(answer, wire.OperationDone)
            hub.send(answer)
        if isinstance(answer, wire.OperationFailed) and lane is not None and not await lane.gone():
            logger.warning("channel %s: keeping memory of a %s: a helper did not die", hub.name, job.operation.kind)
            return
        attempt.running = False
        job.running -= 1
        if job.attempt is not attempt:
            self._give_outputs(job, attempt)
        self._release(job)

    async def _collective(self, lane: SidecarLane, job: Job, attempt: OperationAttempt) -> None:
        """Get an output buffer, and wait until the lane's sidecar has run the attempt.

        A lane is a process group; the caller holds its turn.
        """
        go, operation = attempt.go, job.operation
        outputs = operation.output_segments(go, attempt.me)
        nbytes = segment_layout(outputs)[1] if outputs else 0
        if nbytes:
            scratch = self._scratch(operation)
            # a new buffer takes long to allocate
            attempt.outputs = scratch.take_idle(nbytes) or await asyncio.to_thread(scratch.take_buffer, nbytes)
        left = msgspec.structs.replace(go, deadline_s=attempt.deadline - time.monotonic())
        await lane.run(left, operation.kind, operation.reduce_op, job.inputs, attempt.outputs)

    def _as_wire(self, error: BaseException) -> wire.WireError:
        """Convert an attempt's error to the form in which OperationFailed has it.

        If the sidecar refused the operation before any byte moved, make it a
        UsageError, since a retry cannot help.
        """
        if isinstance(error, SidecarFailed) and not error.over:  # refused before any bytes moved: a retry cannot help
            error = errors.UsageError(str(error), channel=self._hub.name, phase="transfer")
        return as_wire_error(error, channel=self._hub.name, phase="transfer")

    def _ended(self, message: wire.OperationEnd) -> None:
        """Handle the verdict: write the results and resolve the job, or fail it.

        Many bytes are written by a worker thread. A verdict on a job that has ended
        here with OutcomeUnknown replaces that; on another ended job it is ignored.
        """
        job = self._jobs.get(message.post)
        if job is None:
            self._unknown.late_verdict(message.post, message.receipt, message.error)
            return
        if message.receipt is None:
            if message.error is None:
                raise errors.InternalError("OperationEnd without a verdict", channel=self._hub.name)
            if message.error.kind == "Gone":
                self._unknown.mark_told(job.unsettled)
            self._end(job, message.error.exception())
            return
        self._remove_job(job)
        if job.ref:
            self._applied.append(job.ref)
        if job.attempt is None or job.operation.quick:
            self._end(job, self._write(job, message.receipt))
        else:
            self._hub.spawn(self._finish(job, message.receipt), f"result of {job.operation.kind}")

    async def _finish(self, job: Job, data: wire.ReceiptData) -> None:
        """Write a successful job's results into the caller's tensors, on a worker
        thread.

        Then resolve the job with its receipt, or fail it if the write failed.

        :param data: the receipt's data from the coordinator.
        """
        try:
            outcome = await asyncio.to_thread(self._write, job, data)
        except BaseException as error:  # no thread could be started, or the loop ends
            outcome = self._cannot_write(job, error)
            raise
        finally:
            self._end(job, outcome)

    def _write(self, job: Job, data: wire.ReceiptData) -> Receipt | errors.ReplicasError:
        """Any thread: write the results into the caller's tensors, and return the
        receipt.

        Return the error if that fails; it raises none.

        :param data: the receipt's data from the coordinator.
        """
        attempt = job.attempt
        try:
            if attempt is None:
                return Receipt.of(data)
            return job.operation.finish(data, attempt.go, attempt.me, attempt.outputs)
        except BaseException as error:  # noqa: BLE001  # a tensor's own code may raise too; any error is the outcome
            return self._cannot_write(job, error)

    def _cannot_write(self, job: Job, error: BaseException) -> errors.ReplicasError:
        """Return (do not raise) the error of a job whose results were not written.

        :param error: what the write raised.
        """
        found = as_wire_error(error, channel=self._hub.name, phase="write").exception()
        if isinstance(found, errors.InternalError) and not isinstance(error, errors.InternalError):
            text = f"cannot write the results of the {job.operation.kind}: {type(error).__name__}: {text_of(error)}"
            found = self._hub.error(errors.UsageError, text, phase="write", hint="pass plain tensors")
        return found

    def _overdue(self, job: Job) -> None:
        """End a job whose verdict has not come within 5 s after its deadline.

        It fails with DeadlineExceeded or Disconnected, or with OutcomeUnknown if this
        rank has reported that its part is done.
        """
        error = self._hub.overdue_error(f"the {job.operation.kind}", job.deadline_s)
        self._end_without_verdict(job, error, error.message)

    def _end_without_verdict(self, job: Job, error: errors.ReplicasError, text: str) -> None:
        """End a job with ``error``, or with OutcomeUnknown if it may have succeeded.

        In that case keep its results for a later verdict.

        :param text: of the OutcomeUnknown.
        """
        if job.said_done:
            self._unknown.keep(job)
            error = self._hub.error(errors.OutcomeUnknown, text, phase="commit")
        self._end(job, error)

    def _remove_job(self, job: Job) -> None:
        """Remove the job from the open ones, and cancel its timer."""
        self._jobs.pop(job.post, None)
        if job.timer is not None:
            job.timer.cancel()

    def _end(self, job: Job, outcome: Receipt | errors.ReplicasError) -> None:
        """Remove the job, resolve or fail its Pending, and release its buffers.

        A failure that no caller waits for is raised at a later publish, or at close.
        """
        self._remove_job(job)
        job.over = True
        if isinstance(outcome, Receipt):
            job.pending.resolve(outcome)
        elif job.pending.fail(outcome):
            self._hub.failures.note(job.pending)
        self._release(job)

    def _release(self, job: Job) -> None:
        """Return a job's buffers to the pool, if it is over and no attempt uses them.

        Outputs that are kept for a later verdict stay.
        """
        if not job.over or job.running:
            return
        scratch = self._scratch(job.operation)
        inputs, job.inputs = job.inputs, None
        scratch.give(inputs, spoiled=job.spoiled)
        if job.attempt is not None and not job.kept:
            self._give_outputs(job, job.attempt)

    def _give_outputs(self, job: Job, attempt: OperationAttempt) -> None:
        """Return the output buffer of ``attempt``, if any, to the pool of buffers."""
        outputs, attempt.outputs = attempt.outputs, None
        self._scratch(job.operation).give(outputs, spoiled=job.spoiled)

"""Operations: collectives between peers, on copies of the caller's tensors.

Theory of operation
===================

The call copies the inputs into a scratch buffer (on the caller's thread and stream) and posts. When everyone concerned has
posted, the coordinator says Go and the lane's sidecar runs it on the scratch memory. Only the common verdict (OperationEnd)
decides: on success the results are written into the caller's tensors, by a worker thread, and then the Pending resolves;
on any failure the caller's tensors are as they were (invariant I3).

Scratch memory goes back to the pool when both ends have let go of it: the verdict is in, and the sidecar has answered or
is dead. After a failure the lane ends, because a collective that timed out may still be running inside.

An operation ends by itself a little after its deadline, when no verdict came: with OutcomeUnknown once this member has
said that its part is done, for the others may have been told that it succeeded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from replicas import errors
from replicas.channel.hub import GRACE_S, Hub, as_wire_error
from replicas.channel.lanes import Lane, Lanes
from replicas.channel.pending import Pending, Receipt
from replicas.channel.results import Operation
from replicas.channel.scratch import Scratch, write_segments
from replicas.core.manifest import segment_layout
from replicas.messages import OperationDone, OperationEnd, OperationFailed, OperationGo, OperationPost, ReceiptData
from replicas.sidecar.client import CollectiveSpec
from replicas.weights.arena import Buffer

__all__ = ["Operations"]

logger = logging.getLogger("replicas.channel")


class _Job:
    def __init__(self, operation: Operation, deadline_s: float, channel: str) -> None:
        self.operation = operation
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self.pending: Pending[Receipt] = Pending(f"{operation.kind} on {channel}")
        self.post = 0
        self.inputs: Buffer | None = None
        self.outputs: Buffer | None = None
        self.go: OperationGo | None = None
        self.running = False
        self.said_done = False
        self.over = False
        self.timer: asyncio.TimerHandle | None = None


class Operations:
    """The operations of one channel in this process."""

    def __init__(self, hub: Hub, lanes: Lanes) -> None:
        self._hub = hub
        self._lanes = lanes
        self._scratch = Scratch(f"replicas-{hub.name}")
        self._posts = 0
        self._jobs: dict[int, _Job] = {}

    # ------------------------------------------------------------ caller's thread

    def start(self, operation: Operation, deadline_s: float) -> Pending[Receipt]:
        """Copy the inputs and post.

        :raises replicas.errors.NoCapacity: there is no memory for the copy; nothing was posted.
        """
        job = _Job(operation, deadline_s, self._hub.name)
        if operation.inputs:
            segments = operation.segments
            job.inputs = self._scratch.take(segment_layout(segments)[1])
            try:
                write_segments(job.inputs, segments, operation.inputs)
            except BaseException:
                self._scratch.give(job.inputs)
                raise
        self._hub.call(self._post, job)
        return job.pending

    def open_jobs(self) -> list[Pending[Receipt]]:
        """Operations that have not ended, for close(); from any thread."""
        return [job.pending for job in list(self._jobs.values()) if not job.pending.done()]

    def close(self) -> None:
        self._scratch.close()

    # ------------------------------------------------------------ session thread

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {OperationGo: self._go, OperationEnd: self._ended}

    def new_term(self) -> None:
        for job in list(self._jobs.values()):
            what = job.operation.kind
            if job.said_done:
                self._fail(job, self._unknown(f"the coordinator was replaced during the {what}"))
            else:
                self._fail(job, self._hub.error(errors.Disconnected, f"the coordinator was replaced during the {what}"))
        self._posts = 0

    def fail_all(self, error: errors.ReplicasError) -> None:
        for job in list(self._jobs.values()):
            self._fail(job, error)

    def _unknown(self, text: str) -> errors.ReplicasError:
        return self._hub.error(errors.OutcomeUnknown, text, phase="commit")

    def _post(self, job: _Job) -> None:
        hub, operation = self._hub, job.operation
        if hub.over is not None:
            self._fail(job, hub.over)
            return
        self._posts += 1
        job.post = self._posts
        self._jobs[job.post] = job
        left = job.deadline - time.monotonic()
        job.timer = hub.after(left + GRACE_S, self._overdue, job)
        hub.send(
            OperationPost(
                post=job.post,
                kind=operation.kind,
                segments=operation.segments,
                deadline_s=max(0.0, left),
                reduce_op=operation.reduce_op,
                root=operation.root,
                step=operation.step,
                device=operation.device,
            )
        )

    def _go(self, go: OperationGo) -> None:
        job = self._jobs.get(go.post)
        if job is None or job.go is not None:
            error = errors.Gone(f"post {go.post} of {self._hub.member} has ended", channel=self._hub.name)
            self._hub.send(OperationFailed(go.operation, as_wire_error(error, channel=self._hub.name, phase="go")))
            return
        job.go = go
        job.running = True
        self._hub.spawn(self._run(job, go), f"operation {go.operation}")

    async def _run(self, job: _Job, go: OperationGo) -> None:
        lane: Lane | None = None
        try:
            me = [(m.group, m.replica, m.rank) for m in go.participants].index(self._identity())
            seconds = 0.0
            outputs = job.operation.output_segments(go, me)
            if outputs:
                job.outputs = await asyncio.to_thread(self._scratch.take, segment_layout(outputs)[1])
            if go.lane:
                lane = self._lanes.get(go.lane)
                seconds = await self._collective(lane, job, go, me)
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            if not job.over:
                wire = as_wire_error(error, channel=self._hub.name, phase="transfer")
                self._hub.send(OperationFailed(go.operation, wire))
            if lane is not None and not await lane.gone():
                logger.warning(
                    "%s: memory of a %s is kept: its sidecar did not die", self._hub.name, job.operation.kind
                )
                return
            job.running = False
            self._release(job)
            return
        job.running = False
        if job.over:
            self._release(job)
            return
        job.said_done = True
        self._hub.send(OperationDone(go.operation, seconds))

    async def _collective(self, lane: Lane, job: _Job, go: OperationGo, me: int) -> float:
        if lane.sidecar is None:
            raise self._hub.error(errors.Gone, f"lane {go.lane} is gone", hint="")
        spec = CollectiveSpec(
            operation=go.operation,
            kind=job.operation.kind,
            reduce_op=job.operation.reduce_op,
            lane_ranks=go.lane_ranks,
            segments=go.segments,
            me=me,
            root=go.root,
            timeout_s=go.deadline_s,
        )
        return await lane.sidecar.collective(spec, job.inputs, job.outputs)

    def _identity(self) -> tuple[str, int, int]:
        member = self._hub.member
        return member.group, member.replica, member.rank

    # ------------------------------------------------------------ ends

    def _ended(self, message: OperationEnd) -> None:
        job = self._jobs.get(message.post)
        if job is None:
            return
        if message.receipt is None:
            error = message.error
            if error is None:
                raise errors.InternalError("OperationEnd without a verdict", channel=self._hub.name)
            self._fail(job, error.exception())
            return
        self._forget(job)
        self._hub.spawn(self._finish(job, message.receipt), f"result of {job.operation.kind}")

    async def _finish(self, job: _Job, data: ReceiptData) -> None:
        """The verdict is success: write the caller's tensors, then tell."""
        go = job.go
        try:
            if go is None:
                receipt = Receipt.of(data)
            else:
                me = [(m.group, m.replica, m.rank) for m in go.participants].index(self._identity())
                receipt = await asyncio.to_thread(job.operation.finish, data, go, me, job.inputs, job.outputs)
        except (OSError, RuntimeError, ValueError, errors.ReplicasError) as error:
            wire = as_wire_error(error, channel=self._hub.name, phase="write")
            self._end(job, wire.exception())
        else:
            job.over = True
            job.pending._resolve(receipt)
        self._release(job)

    def _overdue(self, job: _Job) -> None:
        error = self._hub.no_answer(f"the {job.operation.kind}", job.deadline_s)
        self._fail(job, self._unknown(error.message) if job.said_done else error)

    def _forget(self, job: _Job) -> None:
        self._jobs.pop(job.post, None)
        if job.timer is not None:
            job.timer.cancel()

    def _fail(self, job: _Job, error: errors.ReplicasError) -> None:
        self._forget(job)
        self._end(job, error)
        self._release(job)

    def _end(self, job: _Job, error: errors.ReplicasError) -> None:
        job.over = True
        if job.pending._fail(error):
            self._hub.note_failure(job.pending)

    def _release(self, job: _Job) -> None:
        """Give the memory back once the verdict is in and no sidecar uses it."""
        if job.over and not job.running:
            inputs, job.inputs = job.inputs, None
            outputs, job.outputs = job.outputs, None
            self._scratch.give(inputs)
            self._scratch.give(outputs)

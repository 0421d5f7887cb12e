"""Calls of operations: inputs, attempts, results, and unknown outcomes.

An operation that this member reported as *done* and had to end without a verdict may
have succeeded on the other members. The outputs of the last few such operations are
kept. If an operation turns out to have succeeded, the next thread that waits for it
writes its results. Until then it is *uncollected*, and the next collective raises once,
so that the caller decides whether to continue without the results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from math import prod

import msgspec
import torch

from replicas import errors
from replicas.channel.operations.scratch import call_point, copy_out, gpu_of, read_segments, segments_of
from replicas.channel.session.hub import Hub
from replicas.channel.session.pending import Promise, Receipt
from replicas.core.base.dtypes import item_nbytes
from replicas.messages import OperationGo, OperationKind, OperationSettled, ReceiptData, ReduceOp, Segment, WireError
from replicas.messages.identity import Member
from replicas.weights.copies.accelerator import Event, device_of
from replicas.weights.copies.tensors import dtype_name
from replicas.weights.memory.buffers import Buffer

KEPT_RESULTS = 4
"""Number of operations of unknown outcome whose outputs are kept: the newest."""
QUICK_NBYTES = 1 << 20
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GATHERING = ("all_gather", "gather")
_WITHOUT_RESULTS = (("broadcast", True), ("reduce", False), ("gather", False))
"""Kinds of operation, and whether a member is the root, where it gets nothing."""


@dataclass(frozen=True, eq=False)
class OperationCall:
    """One call of a collective, send or recv, with the caller's tensors.

    :param inputs: tensors whose values are sent; empty where this member sends none.
    :param targets: the caller's tensors to write on success; None for new tensors.
    :param called: events behind the work queued on the caller's stream at the call, if
        tensors are on a GPU.
    """

    kind: OperationKind
    inputs: tuple[torch.Tensor, ...] = ()
    targets: tuple[torch.Tensor, ...] | None = None
    reduce_op: ReduceOp = "sum"
    root: str = ""
    step: int | None = None
    called: list[Event] = field(default_factory=list)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Dtypes and shapes, for messages: of ``inputs``; if empty, of ``targets``."""
        return segments_of(self.inputs or self.targets or ())

    @cached_property
    def device(self) -> str:
        """Device type of the tensors, such as ``cuda``, or ``cpu``."""
        if self.gpu:
            return device_of(self.gpu).kind
        tensors = (*self.inputs, *(self.targets or ()))
        return next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")

    @cached_property
    def gpu(self) -> str:
        """UUID of the GPU that holds the tensors; empty for host memory."""
        return gpu_of((*self.inputs, *(self.targets or ())))

    def written(self, member: Member, *, each: bool) -> tuple[torch.Tensor, ...]:
        """Return the caller's tensors that are written on ``member`` if it succeeds.

        They are empty for a member that gets no result, such as the source of a
        broadcast.

        :param each: True if the channel's peers have ``ranks = "each"``. Then a root
            that is given as ``group/replica``, without a rank, is the rank of that
            replica with the number of ``member``; otherwise it is rank 0.
        """
        names = {member.name, member.replica_name if each or not member.rank else ""}
        if (self.kind, self.root in names) in _WITHOUT_RESULTS:
            return ()
        return self.inputs if self.kind in _IN_PLACE else self.targets or ()

    def order_after_stream(self) -> None:
        """Caller's thread: have results written only behind its stream's queued work.

        Records an event in :attr:`called`, which the copy of the results awaits. Does
        nothing for host tensors.
        """
        if self.gpu:
            self.called.append(call_point(self.gpu))

    @property
    def quick(self) -> bool:
        """True if the session thread may write the results: few bytes, on the CPU."""
        small = self.kind in ("barrier", *_IN_PLACE) and self.device == "cpu" and _nbytes(self.segments) <= QUICK_NBYTES
        return small and all(type(one) in _PLAIN for one in self.inputs)  # subclasses may run any code

    def output_segments(self, go: OperationGo, me: int) -> tuple[Segment, ...]:
        """Return dtypes and shapes of the buffer into which the sidecar writes.

        A reduction runs in place on a copy of the inputs, and the buffer has their
        layout. For other kinds it is that of the results; () without any.

        :param go: the coordinator's start message, with all participants' segments.
        :param me: index of this member among the participants.
        :raises replicas.errors.RanksDisagree: the caller's tensors do not fit.
        """
        self._targets(go, self._result_segments(go, me))
        if self.kind in ("all_reduce", "reduce", "reduce_scatter"):  # reduced in place, in a copy of the inputs
            return go.segments[me]
        return self._result_segments(go, me)

    def _result_segments(self, go: OperationGo, me: int) -> tuple[Segment, ...]:
        """Return dtypes and shapes of participant ``me``'s results, () for none.

        :param go: the coordinator's start message, with all participants' segments.
        """
        if (self.kind, me == go.root) in _WITHOUT_RESULTS:
            return ()
        match self.kind:
            case "all_reduce" | "reduce":
                return go.segments[me]
            case "broadcast" | "recv":
                return go.segments[go.root]
            case "all_gather" | "gather":
                return tuple(segment for segments in go.segments for segment in segments)
            case "scatter":
                return (go.segments[go.root][_place(go, me)],)
            case "reduce_scatter":
                return (go.segments[me][_place(go, me)],)
            case _:
                return ()

    def _targets(self, go: OperationGo, found: Sequence[Segment]) -> tuple[torch.Tensor, ...] | None:
        """Return the caller's tensors to write; None if new tensors are to be made.

        :param go: the coordinator's start message, with all participants' segments.
            Tensors that the caller gave for members lost since the call are left out.
        :param found: dtypes and shapes of the results.
        :raises replicas.errors.RanksDisagree: the caller's tensors do not fit them.
        """
        if self.kind in _IN_PLACE:
            return self.inputs
        if self.targets is None or not found:
            return None
        targets = self.targets
        counts = {len(segments) for segments in go.segments}
        if self.kind in _GATHERING and len(targets) > len(found) and len(counts) == 1:
            each = counts.pop()  # targets for lost members, too: take those of the remaining ones
            places = (_place(go, participant) for participant in range(len(go.participants)))
            targets = tuple(tensor for place in places for tensor in targets[place * each : (place + 1) * each])
        given = [(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in targets]
        coming = [(segment.dtype, segment.shape) for segment in found]
        if given != coming:
            text = f"{self.kind}: the tensors given here are {_text(given)}, the others send {_text(coming)}"
            hint = "pass tensors of the shapes and dtypes that are sent, or none to get new tensors"
            raise errors.RanksDisagree(text, hint=hint)
        return targets

    def finish(self, data: ReceiptData, go: OperationGo, me: int, outputs: Buffer | None) -> Receipt:
        """Any thread: write the results into the caller's tensors, or into new ones.

        Waits for the copies, also on a GPU.

        :param data: the receipt's data from the coordinator.
        :param go: the coordinator's start message of the attempt that succeeded.
        :param me: this member's index among the participants.
        :param outputs: buffer with the results; None without results.
        :returns: the receipt, with the tensors.
        :raises replicas.errors.UsageError: a tensor was changed since the call.
        """
        found = self._result_segments(go, me)
        data = msgspec.structs.replace(data, nbytes=_nbytes(self.segments or found))
        if not found or outputs is None:
            return Receipt.of(data)
        results = read_segments(outputs, self.output_segments(go, me))
        if self.kind == "reduce_scatter":
            results = (results[_place(go, me)],)
        targets = self._targets(go, found)
        if targets is None:
            tensors = self._made(results, outputs)
        else:
            copy_out(self.gpu, targets, results, outputs, self.called)
            tensors = targets
        if self.kind in _IN_PLACE:
            return Receipt.of(data)
        if self.kind not in _GATHERING:
            return Receipt.of(data, tensors=tensors)
        rest = iter(tensors)
        pieces = (tuple(islice(rest, len(segments))) for segments in go.segments)
        return Receipt.of(data, outputs=dict(zip(go.participants, pieces, strict=True)))

    def _made(self, results: Sequence[torch.Tensor], source: Buffer) -> tuple[torch.Tensor, ...]:
        """Return new tensors with the results, copied from the buffer ``source``."""
        device = self.inputs[0].device if self.inputs else torch.device("cpu")
        made = tuple(torch.empty(result.shape, dtype=result.dtype, device=device) for result in results)
        # the allocator may reuse memory of a freed tensor that its stream still uses
        after = (*self.called, call_point(self.gpu)) if self.gpu else ()
        copy_out(self.gpu, made, results, source, after)
        return made


def _place(go: OperationGo, participant: int) -> int:
    """Return a participant's index among the participants of the first attempt.

    Members lost since then do not change it.

    :param participant: its index in ``go``, which starts a later attempt.
    """
    return go.places[participant] if go.places else participant


def _nbytes(segments: Sequence[Segment]) -> int:
    """Return the bytes of all segments together."""
    return sum(prod(segment.shape) * item_nbytes(segment.dtype) for segment in segments)


def _text(specs: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Return dtypes and shapes as a text, or ``none`` without any."""
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in specs) or "none"


@dataclass(eq=False, repr=False)
class OperationAttempt:
    """One attempt to run a collective, which the coordinator's Go message starts.

    :ivar go: that message. ``me``: this member's index among its participants.
    :ivar outputs: buffer that gets the results.
    :ivar running: True until the sidecar has answered, or is dead.
    :ivar deadline: of this attempt, by ``time.monotonic()``.
    """

    go: OperationGo
    me: int
    outputs: Buffer | None = None
    running: bool = True

    def __post_init__(self) -> None:
        """Start the clock of the attempt's deadline."""
        self.deadline = time.monotonic() + self.go.deadline_s


@dataclass(eq=False, repr=False)
class Job:
    """One collective of this member, from its call to its outcome, over all attempts.

    :ivar post: its number among this member's operations.
    :ivar unsettled: refs of unknown outcomes that its post named.
    :ivar inputs: copy of the caller's tensors.
    :ivar running: attempts that still use the buffers.
    :ivar deadline: by ``time.monotonic()``.
    """

    operation: OperationCall
    deadline_s: float
    pending: Promise[Receipt]
    post: int = 0
    outage: float = 0.0  # id of the session outage in which it was posted
    unsettled: tuple[str, ...] = ()
    inputs: Buffer | None = None
    attempt: OperationAttempt | None = None
    running: int = 0
    said_done: bool = False
    over: bool = False
    kept: bool = False  # its outcome is unknown, or its results are not collected
    told: bool = False  # the caller knows that there are results to collect
    spoiled: bool = False  # an attempt ended with its sidecar
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        """Start the clock of the operation's deadline."""
        self.began = time.monotonic()
        self.deadline = self.began + self.deadline_s

    @property
    def ref(self) -> str:
        """The coordinator's id of the operation, unique over restarts, or "".

        It is empty until the coordinator has started the operation.
        """
        return self.attempt.go.ref if self.attempt is not None else ""


class Unknown:
    """Keeps the collectives of one channel whose outcome is unknown, and their outputs.

    For the session thread only, except :meth:`check_collected`.

    :param applied: called with the ref of each operation that did succeed.
    :param release: called with each job that is no longer kept.
    """

    def __init__(self, hub: Hub, applied: Callable[[str], None], release: Callable[[Job], None]) -> None:
        """Start without operations.

        :param applied: called with the ref (the coordinator's id) of each kept
            operation that has succeeded after all.
        :param release: called with each job that is not kept now, so that its buffers
            are freed. Both are called on the session thread.
        """
        self._hub = hub
        self._applied = applied
        self._release = release
        self._kept: tuple[Job, ...] = ()

    @property
    def refs(self) -> tuple[str, ...]:
        """The coordinator's ids of the operations whose outcome is still unknown."""
        return tuple(job.ref for job in self._kept if job.ref and job.pending.unknown)  # without a ref no Go has come

    def check_collected(self) -> None:
        """Caller's thread: raise Gone if an earlier collective has succeeded after all.

        Its outcome had been unknown, and no caller has waited again for its results.
        Raises once per collective.
        """
        for job in self._kept:
            if job.pending.uncollected and not job.told:
                job.told = True
                raise self._hub.error(
                    errors.Gone,
                    f"an earlier {job.operation.kind} (operation {job.ref}) of unknown outcome has succeeded, "
                    "and its results have not been written here",
                    phase="commit",
                    members=[self._hub.member.name],
                    hint="wait for its Pending again, which has the results, or resynchronise this peer; "
                    "then call again",
                )

    def keep(self, job: Job) -> None:
        """Keep the outputs of a job of unknown outcome, for a later verdict.

        Beyond 4 jobs, drop the oldest: a later wait for the oldest raises Gone if it is
        known to have succeeded, else OutcomeUnknown for good.
        """
        job.kept = True
        self._kept = (*self._kept, job)
        if len(self._kept) > KEPT_RESULTS:
            oldest = self._kept[0]
            text = f"the results of operation {oldest.ref} were dropped for those of {KEPT_RESULTS} newer ones"
            oldest.pending.abandon(self._hub.error(errors.Gone, text, phase="commit"))
            self._let_go(oldest)

    def close(self) -> None:
        """Drop the kept jobs and their outputs, and have their buffers released.

        A later wait raises Gone for a job that is known to have succeeded, and
        OutcomeUnknown for any other.
        """
        error = self._hub.error(errors.Gone, "the channel was closed before anyone waited for the results", hint="")
        for job in self._kept:
            job.pending.abandon(error)
            self._let_go(job)

    def mark_told(self, refs: tuple[str, ...]) -> None:
        """Record that the caller knows of results to collect: no later call raises Gone
        for them.

        :param refs: the coordinator's ids of the operations; unknown ones are ignored.
        """
        for job in self._kept:
            job.told = job.told or job.ref in refs

    def late_verdict(self, post: int, receipt: ReceiptData | None, error: WireError | None) -> None:
        """Take the verdict on the kept operation of number ``post``, if there is one.

        The next wait for the operation then writes its results, or raises the error.

        :param receipt: of a success, else None.
        :param error: of a failure, else None.
        """
        for job in self._kept:
            if job.post == post:
                self._apply_outcome(job, receipt, error)

    def settled(self, message: OperationSettled) -> None:
        """Handle a new coordinator's answer on whether a kept operation happened.

        The next wait for it then writes its results, or raises SyncError. Does nothing
        for an operation that is not kept.
        """
        job = next((job for job in self._kept if job.ref == message.ref), None)
        if job is None or job.attempt is None:
            return
        if message.applied:
            seconds = time.monotonic() - job.began
            receipt = ReceiptData(self._hub.epoch, job.attempt.go.participants, (), 0, seconds, {})
            self._apply_outcome(job, receipt, None)
        else:
            text = f"the {job.operation.kind} did not happen: the coordinator was lost before it had decided"
            error = self._hub.error(errors.SyncError, text, phase="commit", hint="call it again")
            self._apply_outcome(job, None, WireError.of(error))

    def _apply_outcome(self, job: Job, receipt: ReceiptData | None, error: WireError | None) -> None:
        """Have the next wait for the job write its results, or raise ``error``.

        An outcome that is known already stays. After a failure the job is no longer
        kept.

        :param receipt: of a success, else None.
        :param error: of a failure, else None.
        """
        if job.attempt is not None and receipt is not None:
            if job.pending.settle_by(partial(self._collect, job, job.attempt, receipt)):
                self._applied(job.ref)
        elif error is not None:
            job.pending.replace_unknown(error.exception())
            self._let_go(job)

    def _collect(self, job: Job, attempt: OperationAttempt, data: ReceiptData) -> Receipt:
        """Write a kept operation's results into the caller's tensors.

        Runs on the thread that waits again, and then has the job's buffers released.

        :param attempt: the attempt that succeeded, with its buffer of outputs.
        :param data: the receipt's data from the coordinator.
        :returns: the receipt, with the tensors.
        """
        receipt = job.operation.finish(data, attempt.go, attempt.me, attempt.outputs)
        self._hub.call(self._let_go, job)
        return receipt

    def _let_go(self, job: Job) -> None:
        """Remove the job from the kept ones, and call ``release`` with it."""
        self._kept = tuple(kept for kept in self._kept if kept is not job)
        job.kept = False
        self._release(job)

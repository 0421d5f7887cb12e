"""Operation calls of this rank, their attempts, and those of unknown outcome.

An operation that this member reported as *done* and had to end without a verdict may
have succeeded on the other members. The outputs of the last few such operations are
kept. If one turns out to have succeeded, the thread that waits for it again writes its
results. Until then it is *uncollected*, and the next collective raises once, so that
the caller decides whether to go on without the results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from replicas import errors
from replicas.channel.hub import Hub
from replicas.channel.operations.results import OperationCall
from replicas.channel.pending import Pending, Receipt
from replicas.messages import OperationGo, OperationSettled, ReceiptData, WireError
from replicas.weights.memory.arena import Buffer

__all__ = ["KEPT_RESULTS", "Attempt", "Job", "Unknown"]

KEPT_RESULTS = 4
"""Operations of unknown outcome whose outputs are kept; the oldest is dropped first."""


@dataclass(eq=False, repr=False)
class Attempt:
    """One Go of the coordinator. ``me``: this member's index among the participants."""

    go: OperationGo
    me: int
    outputs: Buffer | None = None
    running: bool = True

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.go.deadline_s


@dataclass(eq=False, repr=False)
class Job:
    operation: OperationCall
    deadline_s: float
    pending: Pending[Receipt]
    post: int = 0
    outage: float = 0.0  # id of the session outage in which it was posted
    unsettled: tuple[str, ...] = ()
    inputs: Buffer | None = None
    attempt: Attempt | None = None
    running: int = 0
    said_done: bool = False
    over: bool = False
    kept: bool = False  # its outcome is unknown, or its results are not collected
    told: bool = False  # the caller knows that there are results to collect
    spoiled: bool = False  # an attempt ended with its sidecar
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + self.deadline_s

    @property
    def ref(self) -> str:
        return self.attempt.go.ref if self.attempt is not None else ""


class Unknown:
    """Operations of one channel whose outcome is unknown.

    On the session thread, except :meth:`check_collected`. ``applied`` is called with
    the ref of one that did succeed, ``release`` with a job that is no longer kept.
    """

    def __init__(self, hub: Hub, applied: Callable[[str], None], release: Callable[[Job], None]) -> None:
        self._hub = hub
        self._applied = applied
        self._release = release
        self._kept: tuple[Job, ...] = ()

    @property
    def refs(self) -> tuple[str, ...]:
        return tuple(job.ref for job in self._kept if job.ref and job.pending._unknown)

    def check_collected(self) -> None:
        """On the caller's thread: raise Gone, once each, for uncollected results."""
        for job in self._kept:
            if job.pending._uncollected and not job.told:
                job.told = True
                raise self._hub.error(
                    errors.Gone,
                    f"an earlier {job.operation.kind} (operation {job.ref}), whose outcome was unknown, did succeed, "
                    "and its results have not been written here",
                    phase="commit",
                    members=[self._hub.member.name],
                    hint="wait for its Pending again: its results are kept; or bring this peer to the present state; "
                    "then call again",
                )

    def keep(self, job: Job) -> None:
        """Keep the outputs of an operation that ends without a verdict."""
        job.kept = True
        self._kept = (*self._kept, job)
        if len(self._kept) > KEPT_RESULTS:
            oldest = self._kept[0]
            text = f"the results of operation {oldest.ref} are no longer kept: {KEPT_RESULTS} newer ones are"
            oldest.pending._abandon(self._hub.error(errors.Gone, text, phase="commit"))
            self._let_go(oldest)

    def close(self) -> None:
        error = self._hub.error(errors.Gone, "the channel was closed before the results were waited for", hint="")
        for job in self._kept:
            job.pending._abandon(error)
            self._let_go(job)

    def heard(self, refs: tuple[str, ...]) -> None:
        """Note that the caller has been told that these operations succeeded."""
        for job in self._kept:
            job.told = job.told or job.ref in refs

    def late_verdict(self, post: int, receipt: ReceiptData | None, error: WireError | None) -> None:
        for job in self._kept:
            if job.post == post:
                self._settle(job, receipt, error)

    def settled(self, message: OperationSettled) -> None:
        job = next((job for job in self._kept if job.ref == message.ref), None)
        if job is None or job.attempt is None:
            return
        if message.applied:
            seconds = time.monotonic() - job.began
            receipt = ReceiptData(self._hub.epoch, job.attempt.go.participants, (), 0, seconds, {})
            self._settle(job, receipt, None)
        else:
            text = f"the {job.operation.kind} did not happen: its coordinator was lost before it had told anyone"
            error = self._hub.error(errors.SyncError, text, phase="commit", hint="call it again")
            self._settle(job, None, WireError.of(error))

    def _settle(self, job: Job, receipt: ReceiptData | None, error: WireError | None) -> None:
        if job.attempt is not None and receipt is not None:
            if job.pending._settle_by(partial(self._collect, job, job.attempt, receipt)):
                self._applied(job.ref)
        elif error is not None:
            job.pending._settle(error.exception())
            self._let_go(job)

    def _collect(self, job: Job, attempt: Attempt, data: ReceiptData) -> Receipt:
        """Write the results, on the thread that waits again."""
        receipt = job.operation.finish(data, attempt.go, attempt.me, attempt.outputs)
        self._hub.call(self._let_go, job)
        return receipt

    def _let_go(self, job: Job) -> None:
        self._kept = tuple(kept for kept in self._kept if kept is not job)
        job.kept = False
        self._release(job)

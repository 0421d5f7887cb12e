"""State of one operation call on this rank, and of its attempts."""

from __future__ import annotations

import asyncio
import time

from replicas.channel.operations.results import OperationCall
from replicas.channel.pending import Pending, Receipt
from replicas.messages import OperationGo
from replicas.weights.memory.arena import Buffer

__all__ = ["Attempt", "Job"]


class Attempt:
    """One Go of the coordinator. ``me``: this member's index among the participants."""

    def __init__(self, go: OperationGo, me: int) -> None:
        self.go = go
        self.me = me
        self.deadline = time.monotonic() + go.deadline_s
        self.outputs: Buffer | None = None
        self.running = True


class Job:
    """One call of an operation.

    - ``outage``: id of the session outage in which it was posted; 0: none.
    - ``kept``: its outcome is unknown, or its results are not collected yet.
    - ``told``: the caller has been told that there are results to collect.
    - ``spoiled``: an attempt ended with its sidecar.
    """

    def __init__(self, operation: OperationCall, deadline_s: float, channel: str) -> None:
        self.operation = operation
        self.deadline_s = deadline_s
        self.began = time.monotonic()
        self.deadline = self.began + deadline_s
        self.pending: Pending[Receipt] = Pending(f"{operation.kind} on {channel}")
        self.post = 0
        self.outage = 0.0
        self.unsettled: tuple[str, ...] = ()
        self.inputs: Buffer | None = None
        self.attempt: Attempt | None = None
        self.running = 0
        self.said_done = False
        self.over = False
        self.kept = False
        self.told = False
        self.spoiled = False
        self.timer: asyncio.TimerHandle | None = None

    @property
    def ref(self) -> str:
        return self.attempt.go.ref if self.attempt is not None else ""

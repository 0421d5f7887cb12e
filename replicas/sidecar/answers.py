"""What a request to a sidecar ends with: errors, and turns of free lanes, which are answered without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from replicas import errors
from replicas.sidecar import wire
from replicas.weights.arena import Buffer

__all__ = ["Answer", "Done", "SidecarDied", "SidecarFailed", "Turn", "failure"]


class SidecarFailed(RuntimeError):
    """The sidecar said why it could not do it.

    :ivar over: its group is of no use any more, and it exits by itself; else the request was refused and nothing moved.
    :ivar kind: name of a class of :mod:`replicas.errors`, or empty. :ivar members: those concerned. :ivar hint: the remedy.
    """

    def __init__(
        self, message: str, *, over: bool = True, kind: str = "", members: tuple[str, ...] = (), hint: str = ""
    ) -> None:
        super().__init__(message)
        self.over = over
        self.kind = kind
        self.members = members
        self.hint = hint

    def as_error(self, **fields: Any) -> errors.ReplicasError:
        """The same as an error of the library. ``fields``: channel, phase, version."""
        kind = errors.error_class(self.kind) if self.kind else errors.SyncError
        return kind(str(self), members=self.members, hint=self.hint or None, **fields)


class SidecarDied(RuntimeError):
    """The sidecar, or the forkserver, is gone (killed at a deadline too)."""


def failure(reply: wire.Failed) -> SidecarFailed:
    """The reply as an error."""
    return SidecarFailed(reply.error, over=reply.over, kind=reply.kind, members=reply.members, hint=reply.hint)


@dataclass(frozen=True)
class Turn:
    """Of a free lane. ``ledger``: where the sidecar notes the turn when it is ready; ``mark``: of what is asked for."""

    ledger: Buffer
    number: int
    mark: int

    @property
    def ready(self) -> bool:
        """Whether the sidecar had its result; certain once it is dead."""
        return int(self.ledger.tensor()[:8].view(torch.int64)[0]) >= self.number


Done = Callable[[float | Exception], None]


class Answer:
    """Waits for the reply to a turn, as a future would."""

    def __init__(self, done: Done, timer: asyncio.TimerHandle) -> None:
        self._done: Done | None = done
        self._timer = timer

    def done(self) -> bool:
        return self._done is None

    def set_result(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Collected):
            self._end(reply.seconds)
        elif isinstance(reply, wire.Failed):
            self._end(failure(reply))
        else:
            self._end(SidecarFailed(f"a turn was answered with {type(reply).__name__}"))

    def set_exception(self, error: Exception) -> None:
        self._end(error)

    def _end(self, outcome: float | Exception) -> None:
        done, self._done = self._done, None
        self._timer.cancel()
        if done is not None:
            done(outcome)

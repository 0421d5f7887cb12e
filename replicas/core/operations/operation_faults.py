"""Decide what follows when an operation fails while all its members are alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from replicas import errors
from replicas.core.members.roster import Roster
from replicas.core.moving.lanes import Lane
from replicas.core.operations.operation import Operation
from replicas.messages.identity import Member

__all__ = ["ATTEMPT_MIN_S", "Faults", "OperationVerdict"]

ATTEMPT_MIN_S = 0.2
"""With less time than this left, a failed attempt is the last one."""


@dataclass(frozen=True, slots=True)
class OperationVerdict:
    """What follows a failure.

    :ivar kind: ``again``: another lane; ``apart``: a lane of the pair's own; ``stuck``:
        find the culprit, or end with ``error``; ``end``: end with ``error`` at once.
    """

    kind: Literal["again", "apart", "stuck", "end"]
    error: errors.ReplicasError


class Faults:
    """Faults of the operations of one channel, and which members ever worked in one."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._proven: set[Member] = set()

    def succeeded(self, operation: Operation) -> None:
        if not operation.pairwise and len(operation.posts) > 1:
            self._proven.update(operation.participants)

    def lost(self, member: Member) -> None:
        self._proven.discard(member)

    def by_weight(self, operation: Operation) -> list[Member]:
        """Return the participants: root first, then proven members, then the rest."""
        root = operation.participants[operation.root] if operation.root >= 0 else None
        return sorted(operation.participants, key=lambda member: (member != root, not self._has_worked(member)))

    def _has_worked(self, member: Member) -> bool:
        """Return whether it has (or, under another coordinator, may have) worked."""
        state = self._roster.get(member)
        return member in self._proven or (state is not None and state.from_before)

    def verdict(
        self, operation: Operation, lane: Lane | None, error: errors.ReplicasError, now: float, *, final: bool = False
    ) -> OperationVerdict:
        """Judge a failure in ``lane``, which is counted already.

        ``final``: another attempt with the same group would fail in the same way.
        """
        refused = isinstance(error, (errors.UsageError, errors.WorldError)) or error.phase == "go"
        parted = lane is not None and isinstance(error, errors.Preflight) and self._parted(operation, lane, error)
        if operation.pairwise and lane is not None and len(lane.members) > 2 and (parted or not refused):
            return OperationVerdict("apart", error)
        if refused and not parted:
            return OperationVerdict("end", error)
        if operation.deadline - now < ATTEMPT_MIN_S:
            text = f"did not end by its deadline: {error.message}"
            members = error.members or None
            late = operation.error(errors.DeadlineExceeded, text, members=members, phase=error.phase)
            return OperationVerdict("end", late)
        if parted:
            return OperationVerdict("stuck", error)
        if operation.failures > 1 or (final and not operation.pairwise):
            return OperationVerdict("stuck", self._repeated(operation, error))
        return OperationVerdict("again", error)

    def _parted(self, operation: Operation, lane: Lane, error: errors.ReplicasError) -> bool:
        """Return whether members of the lane cannot reach each other any more.

        A group that never worked is an error of set-up instead.
        """
        if {member.name for member in lane.members}.isdisjoint(error.members):
            return False
        if operation.pairwise:
            return len(lane.members) > 2
        return self._roster.config.on_lost != "raise" and sum(map(self._has_worked, lane.members)) > 1

    @staticmethod
    def _repeated(operation: Operation, error: errors.ReplicasError) -> errors.ReplicasError:
        times = "twice" if operation.failures > 1 else "and was not tried again,"
        text = f"failed {times} with all its members alive: {error.message}"
        kind = errors.InternalError if isinstance(error, errors.InternalError) else errors.SyncError
        return operation.error(kind, text, phase=error.phase, hint=error.hint)

"""What may be told of the commits of a channel: that whose decision is on disk.

The state machine is ahead of the disk: it decides, and goes on as if the decision were
recorded, for all that it says of it lies behind the record in the order of its effects.
What is asked for at any moment (a newcomer's Welcome, a status page, a metric,
readiness) does not wait in that order, and is answered from here.
"""

from __future__ import annotations

from replicas.core.effects import CommitDecision
from replicas.status import SyncRecord

__all__ = ["Told"]


class Told:
    """Of one channel; the shell says what it has recorded, and how the publishes ended
    that it has told of.

    :ivar latest: number of the newest commit. :ivar digest: of it; empty: it was not
        known at the commit.
    :ivar syncs: publishes that have ended, by outcome. :ivar last: the last of them.
    """

    def __init__(self, latest: int, digest: str) -> None:
        self.latest = latest
        self.digest = digest
        self.syncs: dict[str, int] = {}
        self.nbytes = 0
        self.last: SyncRecord | None = None

    def recorded(self, decision: CommitDecision) -> None:
        """It is on disk."""
        if decision.kind == "commit":
            self.latest, self.digest = decision.version, decision.digest

    def ended(self, record: SyncRecord) -> None:
        """A publish has its verdict."""
        self.last = record
        self.syncs[record.outcome] = self.syncs.get(record.outcome, 0) + 1
        self.nbytes += record.moved_nbytes

"""The part of a channel's state that may be shown: commits that are on disk.

The state machine is ahead of the disk: it decides, and goes on as if the decision were
recorded. That is safe for its messages, which follow the record in the order of
effects. Answers outside that order (a newcomer's Welcome, a status page, a metric,
readiness) come from here.
"""

from __future__ import annotations

from replicas.core.effects import CommitDecision
from replicas.status import SyncRecord

__all__ = ["Told"]


class Told:
    """The durable state of one channel, as the shell reports it.

    :ivar latest: number of the newest recorded commit.
    :ivar digest: its digest; empty: unknown at the commit.
    :ivar syncs: ended publishes by outcome.
    :ivar nbytes: bytes that they moved.
    :ivar last: the last of them.
    """

    def __init__(self, latest: int, digest: str) -> None:
        self.latest = latest
        self.digest = digest
        self.syncs: dict[str, int] = {}
        self.nbytes = 0
        self.last: SyncRecord | None = None

    def recorded(self, decision: CommitDecision) -> None:
        """The decision is on disk."""
        if decision.kind == "commit":
            self.latest, self.digest = decision.version, decision.digest

    def ended(self, record: SyncRecord) -> None:
        """A publish has its verdict."""
        self.last = record
        self.syncs[record.outcome] = self.syncs.get(record.outcome, 0) + 1
        self.nbytes += record.moved_nbytes

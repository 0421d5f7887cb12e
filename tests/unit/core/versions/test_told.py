"""What may be told of commits follows the disk, not the state machine."""

from __future__ import annotations

from replicas.core.base.effects import CommitDecision
from replicas.core.versions.recovery import Told
from replicas.status import SyncRecord


def test_a_commit_is_the_newest_and_an_abort_changes_nothing() -> None:
    told = Told(3, "old")
    told.recorded(CommitDecision("commit", "policy", 4, "new", epoch=1, term=1))
    told.recorded(CommitDecision("abort", "policy", 5, "", epoch=1, term=1))
    assert (told.latest, told.digest) == (4, "new")


def test_ends_are_counted_by_outcome() -> None:
    told = Told(0, "")
    for version, outcome in enumerate(("committed", "failed", "committed"), 1):
        told.ended(SyncRecord(version=version, outcome=outcome, seconds=1.0, nbytes=100, moved_nbytes=10))
    assert told.syncs == {"committed": 2, "failed": 1}
    assert told.nbytes == 30
    assert told.last is not None
    assert told.last.version == 3

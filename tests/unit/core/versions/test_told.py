"""What may be told of commits follows the disk, not the state machine.

Covers: core/versions/recovery.py.
"""

from __future__ import annotations

from replicas.core.base.ledger import Decision, Ledger
from replicas.core.versions.recovery import RecordedState


def test_a_commit_is_the_newest_and_an_abort_changes_nothing() -> None:
    told = RecordedState(Ledger())
    told.recorded(Decision("commit", "policy", 3, "old"))
    told.recorded(Decision("commit", "policy", 4, "new", epoch=1, term=1))
    told.recorded(Decision("abort", "policy", 5, "", epoch=1, term=1))
    assert (told.latest, told.digest) == (4, "new")

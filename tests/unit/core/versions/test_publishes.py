"""Numbers and verdicts of the publishes of several source replicas.

Covers: core/versions/publishes.py.
"""

from __future__ import annotations

import pytest

from replicas import errors
from replicas import messages as wire
from replicas.core.members.member_state import Life
from replicas.core.versions.publishes import KEPT_VERDICTS, OPEN_MAX, Publish, Publishes
from replicas.messages.identity import Member, ProcessIdentity


class Sources:
    """Replicas of two ranks each."""

    def __init__(self, replicas: int = 2) -> None:
        self.publishes = Publishes("policy", 0, all_ranks=True)
        self.lives: dict[int, Life] = {}
        for replica in range(replicas):
            for rank in range(2):
                self.join(self.rank(replica, rank))

    @staticmethod
    def rank(replica: int, rank: int, incarnation: str = "a") -> Member:
        return Member("trainer", replica, rank, incarnation)

    def join(self, member: Member, process: int = 1) -> int:
        """The number of its first publish."""
        life = self.lives.setdefault(member.replica, Life(1))
        self.publishes.joined(member, ProcessIdentity(process, 1, "boot", 1), life)
        return self.publishes.last_number(member) + 1

    def begin(self, member: Member, number: int) -> Publish:
        return self.publishes.begin_publish(member, wire.PublishBegin(number, None, 60.0), 0.0)

    def publish(self, replica: int, number: int) -> Publish:
        """By both of its ranks, to its verdict."""
        for rank in range(2):
            publish = self.begin(self.rank(replica, rank), number)
        self.publishes.end(publish, committed=False)
        return publish


def test_a_rank_that_joins_again_counts_on_however_often_others_have_published() -> None:
    sources = Sources()
    sources.publish(0, 1)
    for number in range(1, KEPT_VERDICTS + 3):
        sources.publish(1, number)
    again = sources.rank(0, 1, "b")
    sources.publishes.left(sources.rank(0, 1), in_order=False)
    assert sources.join(again) == 2
    first = sources.begin(sources.rank(0, 0), 2)
    assert sources.begin(again, 2) is first


def test_a_rank_that_begins_late_gets_its_own_verdict_however_often_others_have_published() -> None:
    sources = Sources()
    early = sources.begin(sources.rank(0, 0), 1)
    sources.publishes.end(early, committed=False)
    for number in range(1, KEPT_VERDICTS + 3):
        sources.publish(1, number)
    sources.begin(sources.rank(0, 0), 2)
    assert sources.begin(sources.rank(0, 1), 1) is early


def test_each_replica_leaves_so_many_verdicts_behind() -> None:
    sources = Sources()
    for number in range(1, 101):
        sources.publish(0, number)
    assert len(sources.publishes._known) <= KEPT_VERDICTS + 1
    assert sources.publishes.count("trainer", 0) == 100


def test_who_was_a_member_under_another_coordinator_goes_on_with_its_number() -> None:
    sources = Sources(0)
    for rank in range(2):
        member = sources.rank(0, rank)
        sources.join(member)
        sources.publishes.came_back(member, 7)
    sources.publishes.left(sources.rank(0, 1), in_order=False)
    assert sources.join(sources.rank(0, 1, "b")) == 8


def test_a_process_that_left_and_joins_again_goes_on_with_its_own_count() -> None:
    sources = Sources()
    sources.publish(0, 1)
    sources.publishes.left(sources.rank(0, 1), in_order=True)
    early = sources.begin(sources.rank(0, 0), 2)
    sources.publishes.end(early, committed=False)
    again = sources.rank(0, 1, "b")
    assert sources.join(again) == 2
    assert sources.begin(again, 2) is early
    sources.publishes.left(again, in_order=True)
    assert sources.join(sources.rank(0, 1, "c"), process=2) == 3, "another process begins with the others' next one"


def test_a_lost_rank_that_joins_again_begins_behind_what_had_begun_before() -> None:
    sources = Sources()
    sources.publishes.end(sources.begin(sources.rank(0, 0), 1), committed=False)  # failed, as rank 1 was lost
    sources.publishes.left(sources.rank(0, 1), in_order=False)
    assert sources.join(sources.rank(0, 1, "b"), process=2) == 2
    sources.publishes.left(sources.rank(0, 1, "b"), in_order=False)
    waits = sources.begin(sources.rank(0, 0), 2)
    third = sources.rank(0, 1, "c")
    assert sources.join(third, process=3) == 2
    assert sources.begin(third, 2) is waits


def test_ranks_that_name_different_steps_make_no_version() -> None:
    sources = Sources(1)
    first = sources.publishes.begin_publish(sources.rank(0, 0), wire.PublishBegin(1, None, 60.0, {"step": 3}), 0.0)
    other = sources.rank(0, 1)
    with pytest.raises(errors.RanksDisagree, match="step 2, another rank step 3"):
        sources.publishes.begin_publish(other, wire.PublishBegin(1, None, 60.0, {"step": 2}), 0.0)
    assert sources.publishes.begin_publish(other, wire.PublishBegin(1, None, 60.0, {"step": 3.0}), 0.0) is first
    assert sources.publishes.begin_publish(other, wire.PublishBegin(1, None, 60.0), 0.0) is first, "it does not say"


def test_a_rank_that_is_further_behind_than_verdicts_are_kept_is_told_at_once() -> None:
    sources = Sources(0)
    sources.join(sources.rank(0, 0))
    for number in range(1, KEPT_VERDICTS + 3):
        sources.publishes.end(sources.begin(sources.rank(0, 0), number), committed=False)
    late = sources.rank(0, 1)
    assert sources.join(late) == 1
    with pytest.raises(errors.Gone, match=r"publish number 1 of trainer/0"):
        sources.begin(late, 1)
    assert sources.begin(late, KEPT_VERDICTS).over


def test_what_is_known_only_when_the_weights_were_walked_is_what_the_leader_says() -> None:
    sources = Sources(1)
    for rank in (1, 0):
        publish = sources.begin(sources.rank(0, rank), 1)
    assert publish.meta == {}
    for rank in (0, 1):
        packed = wire.Packed(1, f"hash {rank}", "cpu", 0.0, 0.0, meta={"norm": rank + 0.5})
        sources.publishes.packed(sources.rank(0, rank), packed, 2, 0.0)
    assert publish.state == "queued"
    assert publish.meta == {"norm": 0.5}


def test_a_replica_has_so_many_publishes_without_a_verdict() -> None:
    sources = Sources(1)
    for number in range(1, OPEN_MAX + 1):
        sources.begin(sources.rank(0, 0), number)
    with pytest.raises(errors.Busy, match=r"256 publishes of trainer/0"):
        sources.begin(sources.rank(0, 0), OPEN_MAX + 1)
    assert sources.begin(sources.rank(0, 1), OPEN_MAX).version == OPEN_MAX


def test_what_a_publisher_said_is_not_kept_beyond_the_verdict() -> None:
    sources = Sources(1)
    publish = sources.publishes.begin_publish(
        sources.rank(0, 0), wire.PublishBegin(1, None, 60.0, {"text": "x" * 1000}), 0.0
    )
    assert publish.meta
    sources.publishes.end(publish, committed=False)
    assert publish.meta == publish.asked.meta == {}

"""How long no sign of life is no reason to worry, as the interval of heartbeats
changes.

Covers: core/members/heartbeats.py.
"""

from __future__ import annotations

from replicas.core.members.heartbeats import HEARTBEAT_MAX_S, HEARTBEAT_S, MISSED_BEATS, SLACK_S, Heartbeats


def patience(interval_s: float) -> float:
    return MISSED_BEATS * interval_s + SLACK_S


def test_many_members_send_them_less_often_and_within_their_lease() -> None:
    assert Heartbeats.interval_s(300, 30.0) == HEARTBEAT_S
    assert Heartbeats.interval_s(301, 30.0) == 2.0
    assert Heartbeats.interval_s(5000, 30.0) == HEARTBEAT_MAX_S
    assert Heartbeats.interval_s(5000, 6.0) == 1.5


def test_a_longer_interval_counts_at_once_also_of_one_member() -> None:
    beats = Heartbeats()
    beats.note_sent_to_one(2.0)
    assert beats.patience_s == patience(2.0)
    beats.note_sent_to_all(3.0, 10.0)
    assert beats.patience_s == patience(3.0)
    beats.tick(3.0, 1000.0)
    assert beats.patience_s == patience(3.0)


def test_a_shorter_interval_counts_when_all_have_heard_it() -> None:
    beats = Heartbeats()
    beats.note_sent_to_all(3.0, 0.0)
    beats.note_sent_to_all(1.0, 10.0)
    beats.note_sent_to_all(1.0, 15.0)  # the deadline is that of the first time
    beats.tick(1.0, 16.0)
    assert beats.patience_s == patience(3.0)
    beats.tick(1.0, 16.1)
    assert beats.patience_s == patience(1.0)


def test_a_longer_interval_takes_a_shorter_one_back() -> None:
    beats = Heartbeats()
    beats.note_sent_to_all(2.0, 0.0)
    beats.note_sent_to_all(1.0, 0.0)
    beats.note_sent_to_all(3.0, 1.0)
    beats.tick(3.0, 100.0)
    assert beats.patience_s == patience(3.0)

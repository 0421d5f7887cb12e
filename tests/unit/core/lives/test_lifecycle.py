"""The table of a replica's life: scripted histories, and properties over every path.

Covers: core/lives/lifecycle.py.
"""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.common.table import InvalidStep
from replicas.core.lives.lifecycle import ALIVE, REPLICA, SETTLED, Lifecycle, ReplicaEvent, after_exit
from replicas.status import ReplicaState

STATES: tuple[ReplicaState, ...] = get_args(ReplicaState)
GONE = {ReplicaEvent.FINISHED, ReplicaEvent.RETRY, ReplicaEvent.GIVE_UP, ReplicaEvent.STOPPED}


def history(life: Lifecycle, *events: ReplicaEvent) -> list[ReplicaState]:
    return [life.apply(event, now=float(index)).after for index, event in enumerate(events)]


def test_a_life_without_trouble() -> None:
    life = Lifecycle("trainer", 0, now=0.0)
    assert history(life, ReplicaEvent.START, ReplicaEvent.READY, ReplicaEvent.FINISHED) == [
        "starting",
        "ready",
        "finished",
    ]
    assert (life.name, life.generation, life.restarts, life.settled) == ("trainer/0", 1, {}, True)


def test_a_killed_replica_comes_back_as_the_next_generation() -> None:
    life = Lifecycle("rollout", 1, now=0.0)
    life.apply(ReplicaEvent.START, now=10.0)
    assert life.apply(ReplicaEvent.READY, now=12.0).start_s == 2.0
    life.apply(ReplicaEvent.RETRY, now=20.0, reason="rank 0 was killed by SIGKILL", restart_reason="signal")
    assert (life.state, life.reason, life.alive) == ("backoff", "rank 0 was killed by SIGKILL", False)
    assert life.state_age_s(21.0) == 1.0
    life.apply(ReplicaEvent.BACKOFF_ELAPSED, now=21.0)
    back = life.apply(ReplicaEvent.READY, now=24.0)
    assert (back.generation, back.start_s, back.recovery_s) == (2, 3.0, 4.0)
    assert (life.restarts, life.reason) == ({"signal": 1}, "")


def test_a_hung_replica_is_ended_before_its_next_generation_starts() -> None:
    life = Lifecycle("rollout", 0, now=0.0)
    seen = history(
        life,
        ReplicaEvent.START,
        ReplicaEvent.READY,
        ReplicaEvent.HEARTBEAT_TIMEOUT,
        ReplicaEvent.RETRY,
        ReplicaEvent.BACKOFF_ELAPSED,
    )
    assert seen == ["starting", "ready", "draining", "backoff", "starting"]


def test_losing_readiness_alone_is_neither_a_start_nor_a_recovery() -> None:
    life = Lifecycle("rollout", 0, now=0.0)
    history(life, ReplicaEvent.START, ReplicaEvent.READY, ReplicaEvent.UNREADY)
    again = life.apply(ReplicaEvent.READY, now=9.0)
    assert (again.start_s, again.recovery_s, life.generation) == (None, None, 1)


def test_a_silence_has_an_age_since_the_last_heartbeat() -> None:
    life = Lifecycle("rollout", 0, now=0.0)
    history(life, ReplicaEvent.START, ReplicaEvent.READY)
    silent = life.apply(ReplicaEvent.SILENT, now=10.0, reason="no heartbeat from rank 0", seconds=4.0)
    assert (silent.before, silent.after, silent.silent_s) == ("ready", "silent", 4.0)
    assert (life.state_age_s(11.0), life.alive) == (5.0, True)
    back = life.apply(ReplicaEvent.READY, now=12.0)
    assert (back.silent_s, back.recovery_s, life.reason) == (None, None, "")
    life.apply(ReplicaEvent.SILENT, now=20.0, seconds=4.0)
    life.apply(ReplicaEvent.HEARTBEAT_TIMEOUT, now=26.0)
    retry = life.apply(ReplicaEvent.RETRY, now=27.0, restart_reason="heartbeat_timeout", seconds=1.5)
    assert (retry.silent_s, retry.resume_s) == (None, 1.5)
    life.apply(ReplicaEvent.BACKOFF_ELAPSED, now=29.0)
    assert life.apply(ReplicaEvent.READY, now=31.0).recovery_s == 15.0, "it was lost when it fell silent"


def test_a_settled_replica_can_be_asked_back() -> None:
    life = Lifecycle("rollout", 0, now=0.0)
    assert history(
        life, ReplicaEvent.START, ReplicaEvent.GIVE_UP, ReplicaEvent.STOP, ReplicaEvent.RESTART, ReplicaEvent.START
    )[1:] == ["failed", "failed", "pending", "starting"]
    assert life.generation == 2


def test_an_impossible_event_raises_and_changes_nothing() -> None:
    life = Lifecycle("rollout", 0, now=0.0)
    with pytest.raises(InvalidStep) as caught:
        life.apply(ReplicaEvent.READY, now=1.0)
    assert (
        caught.value.message
        == "a replica that is pending cannot take ready; possible: start, adopt, stop, group_failed, restart"
    )
    assert (life.state, life.since) == ("pending", 0.0)


@pytest.mark.parametrize(
    ("ok", "policy", "granted", "requested", "event"),
    [
        (True, "on-failure", False, False, ReplicaEvent.FINISHED),
        (False, "on-failure", True, False, ReplicaEvent.RETRY),
        (False, "on-failure", False, False, ReplicaEvent.GIVE_UP),
        (True, "always", True, False, ReplicaEvent.RETRY),
        (True, "always", False, False, ReplicaEvent.GIVE_UP),
        (False, "never", False, False, ReplicaEvent.GIVE_UP),
        (True, "never", False, False, ReplicaEvent.FINISHED),
        (False, "never", False, True, ReplicaEvent.RETRY),
    ],
)
def test_what_an_exit_leads_to(ok: bool, policy: str, granted: bool, requested: bool, event: ReplicaEvent) -> None:
    found = after_exit(ok=ok, policy=policy, granted=granted, requested=requested)  # type: ignore[arg-type]  # pytest's parameters are plain strings
    assert found is event


def test_processes_that_end_lead_out_of_every_living_state() -> None:
    for state in ALIVE:
        assert REPLICA.allows(state, ReplicaEvent.RETRY)
        assert REPLICA.allows(state, ReplicaEvent.GIVE_UP)
        assert REPLICA.allows(state, ReplicaEvent.STOP)
    for state in STATES:
        for event in GONE - {ReplicaEvent.GIVE_UP}:
            if REPLICA.allows(state, event):
                assert state in ALIVE
                assert REPLICA.next(state, event) not in ALIVE


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(ReplicaEvent), max_size=40))
def test_no_history_starts_a_generation_while_another_one_lives(events: list[ReplicaEvent]) -> None:
    life = Lifecycle("rollout", 0, now=0.0)
    for now, event in enumerate(events):
        was_alive, generation = life.alive, life.generation
        if not REPLICA.allows(life.state, event):
            continue
        step = life.apply(event, now=float(now))
        if life.generation != generation:
            assert not was_alive
            assert life.generation == generation + 1
        if step.before in SETTLED:
            assert event in (ReplicaEvent.RESTART, ReplicaEvent.RESET, ReplicaEvent.STOP)
        assert life.state in STATES


def test_a_pause_of_the_supervisor_is_no_part_of_a_start() -> None:
    life = Lifecycle("rollout", 0, now=0.0)
    life.apply(ReplicaEvent.START, now=0.0)
    life.launched(1.0)
    life.skip_pause(50.0)
    step = life.apply(ReplicaEvent.READY, now=53.0)
    assert step.after == "ready"

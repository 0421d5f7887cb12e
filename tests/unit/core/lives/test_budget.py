"""The restart budget: a window that slides, delays that grow, and never one restart too
many.

Covers: core/lives/restarts.py.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.config.structs import RestartConfig
from replicas.core.lives.restarts import Restarts, wants_restart


def delays(config: RestartConfig, *, seed: int = 0, count: int = 6) -> list[float | None]:
    budget = Restarts(config, rng=random.Random(seed))
    return [budget.spend_restart(0, now=float(now)) for now in range(count)]


def test_delays_double_up_to_the_maximum_with_jitter_on_top() -> None:
    config = RestartConfig(max_restarts=8, initial_delay_s=0.5, max_delay_s=5.0)
    found = delays(config, count=8)
    assert None not in found
    for attempt, delay in enumerate(found):
        base = min(0.5 * 2**attempt, 5.0)
        assert delay is not None
        assert base <= delay <= min(base + 0.5, 5.0)


def test_one_seed_gives_the_same_delays() -> None:
    config = RestartConfig()
    assert delays(config, seed=7) == delays(config, seed=7)
    assert delays(config, seed=7) != delays(config, seed=8)


def test_a_spent_budget_refuses_until_the_window_has_passed() -> None:
    budget = Restarts(RestartConfig(max_restarts=2, window_s=10.0), rng=random.Random(0))
    assert budget.remaining_ratio(0.0) == 1.0
    assert budget.spend_restart(0, now=0.0) is not None
    assert budget.remaining_ratio(0.0) == 0.5
    assert budget.spend_restart(1, now=5.0) is not None
    assert budget.spend_restart(0, now=9.0) is None
    assert budget.remaining(9.0) == 0
    assert budget.spend_restart(0, now=10.0) is not None
    assert budget.spend_restart(0, now=14.0) is None


def test_the_budget_is_the_groups_but_the_delay_the_replicas() -> None:
    budget = Restarts(RestartConfig(max_restarts=5), rng=random.Random(0))
    for _ in range(3):
        budget.spend_restart(0, now=0.0)
    first = budget.spend_restart(1, now=0.0)
    assert first is not None
    assert 1.0 <= first <= 2.0
    assert budget.remaining(0.0) == 1


def test_a_replica_that_ran_well_for_a_window_starts_over() -> None:
    budget = Restarts(RestartConfig(window_s=10.0), rng=random.Random(0))
    for now in (0.0, 1.0, 2.0):
        budget.spend_restart(0, now=now)
    late = budget.spend_restart(0, now=100.0)
    assert late is not None
    assert late <= 2.0


def test_no_budget_and_no_delay() -> None:
    assert delays(RestartConfig(max_restarts=0), count=1) == [None]
    assert Restarts(RestartConfig(max_restarts=0)).remaining_ratio(0.0) == 1.0
    assert delays(RestartConfig(initial_delay_s=0.0, max_delay_s=0.0), count=3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("policy", "ok", "wanted"),
    [
        ("always", True, True),
        ("always", False, True),
        ("on-failure", True, False),
        ("on-failure", False, True),
        ("never", True, False),
        ("never", False, False),
    ],
)
def test_the_policy(policy: str, ok: bool, wanted: bool) -> None:
    config = RestartConfig(policy=policy)  # type: ignore[arg-type]  # pytest's parameters are plain strings
    assert wants_restart(config, ok=ok) is wanted


@settings(max_examples=25, deadline=None)
@given(
    gaps=st.lists(st.floats(min_value=0.0, max_value=30.0), max_size=40),
    most=st.integers(min_value=0, max_value=5),
    window_s=st.floats(min_value=0.1, max_value=60.0),
)
def test_no_window_ever_holds_more_than_the_budget(gaps: list[float], most: int, window_s: float) -> None:
    config = RestartConfig(max_restarts=most, window_s=window_s, initial_delay_s=0.1, max_delay_s=2.0)
    budget, now, granted = Restarts(config, rng=random.Random(1)), 0.0, list[float]()
    for gap in gaps:
        now += gap
        delay = budget.spend_restart(0, now=now)
        if delay is not None:
            granted.append(now)
            assert 0.0 <= delay <= config.max_delay_s
    for start in granted:
        assert sum(1 for time in granted if start <= time and time - window_s < start) <= max(most, 0)

"""Who is killed last, and how long that takes at most."""

from __future__ import annotations

import pytest

from replicas.supervisor.cleanup import sweeping
from replicas.supervisor.cleanup.sweeping import TRACKERS_MAX_S, TRACKERS_S, Grace

TRACKERS = {7, 8}


@pytest.fixture
def grace(monkeypatch: pytest.MonkeyPatch) -> Grace:
    monkeypatch.setattr(sweeping, "is_resource_tracker", TRACKERS.__contains__)
    return Grace()


def test_trackers_live_until_a_moment_after_the_last_of_the_others(grace: Grace) -> None:
    assert grace.spared([1, 2, 7, 8], 100.0) == TRACKERS
    assert grace.spared([1, 7], 102.0) == {7}
    assert grace.spared([7], 102.0 + TRACKERS_S * 0.9) == {7}
    assert grace.spared([7], 102.0 + TRACKERS_S) == frozenset()


def test_who_forks_faster_than_it_is_killed_gains_no_time_for_them(grace: Grace) -> None:
    assert grace.spared([1, 7], 100.0) == {7}
    assert grace.spared([2, 7], 100.0 + TRACKERS_MAX_S * 0.9) == {7}
    assert grace.spared([3, 7], 100.0 + TRACKERS_MAX_S) == frozenset()


def test_trackers_alone_have_their_moment_too(grace: Grace) -> None:
    """The others may have died just before."""
    assert grace.spared([7], 100.0) == {7}
    assert grace.spared([7], 100.0 + TRACKERS_S) == frozenset()

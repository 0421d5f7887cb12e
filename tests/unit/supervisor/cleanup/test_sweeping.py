"""Who is killed last, and how long that takes at most.

Covers: supervisor/cleanup/sweeping.py, supervisor/state/leftovers.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from replicas.linux import cgroups
from replicas.supervisor.cleanup import sweeping
from replicas.supervisor.cleanup.sweeping import TRACKERS_MAX_S, TRACKERS_S, Sweep, TrackerGrace, finder
from replicas.supervisor.state import leftovers
from replicas.supervisor.state.run_state import Saved, ShimRecord, machine

TRACKERS = {7, 8}


@pytest.fixture
def grace(monkeypatch: pytest.MonkeyPatch) -> TrackerGrace:
    monkeypatch.setattr(sweeping, "is_resource_tracker", TRACKERS.__contains__)
    return TrackerGrace()


def test_trackers_live_until_a_moment_after_the_last_of_the_others(grace: TrackerGrace) -> None:
    assert grace.spared([1, 2, 7, 8], 100.0) == TRACKERS
    assert grace.spared([1, 7], 102.0) == {7}
    assert grace.spared([7], 102.0 + TRACKERS_S * 0.9) == {7}
    assert grace.spared([7], 102.0 + TRACKERS_S) == frozenset()


def test_who_forks_faster_than_it_is_killed_gains_no_time_for_them(grace: TrackerGrace) -> None:
    assert grace.spared([1, 7], 100.0) == {7}
    assert grace.spared([2, 7], 100.0 + TRACKERS_MAX_S * 0.9) == {7}
    assert grace.spared([3, 7], 100.0 + TRACKERS_MAX_S) == frozenset()


def test_trackers_alone_have_their_moment_too(grace: TrackerGrace) -> None:
    """The others may have died just before."""
    assert grace.spared([7], 100.0) == {7}
    assert grace.spared([7], 100.0 + TRACKERS_S) == frozenset()


@pytest.mark.parametrize(("scope", "found"), [(machine(), [os.getppid()]), ("another boot/4026531836", [])])
def test_control_groups_of_another_machine_are_left_alone(
    scope: str, found: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the same name here is another one."""
    monkeypatch.setattr(cgroups, "members", lambda group: [os.getpid(), *found])
    monkeypatch.setattr(leftovers, "parents", lambda pid: [])
    shims = (ShimRecord(nonce="x" * 32, group="a", replica=0, generation=1, cgroup=str(tmp_path)),)
    saved = Saved(run="r", machine=scope, shims=shims)
    assert [one.pid for one in leftovers.find(saved, "") if one.how == "cgroup"] == found
    left: list[Path] = []
    monkeypatch.setattr(cgroups, "members", lambda group: [])
    monkeypatch.setattr(cgroups, "leave", lambda group, *, run: left.append(group))
    leftovers.sweep(saved, "", 0.1)
    assert left == ([tmp_path] if found else [])


def test_what_was_found_once_is_killed_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a dying process is empty: no mark finds it any more."""
    starts = {1: 10, 2: 20}
    tries: list[list[int]] = []

    def kill(pids: Iterable[int], signum: int, still: Callable[[int], bool]) -> list[int]:
        tries.append([pid for pid in pids if still(pid)])
        return tries[-1]

    monkeypatch.setattr(sweeping, "start_time", starts.get)
    monkeypatch.setattr(sweeping, "signal_each", kill)
    looks = iter([{1: 10}, {2: 20}])
    sweep = Sweep(lambda: next(looks, {}), known={3: 30})
    assert [sweep.kill_once() for _ in range(3)] == [{1}, {1, 2}, {1, 2}]
    starts[1] = 11  # the pid is another process's
    assert sweep.kill_once() == {2}
    starts.clear()
    assert sweep.run(5.0) == []
    assert tries[:4] == [[1], [1, 2], [1, 2], [2]]


def test_a_pid_that_is_reused_while_it_is_looked_for_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "start_time", {1: 10, 2: 20}.get)
    assert finder(lambda: [1, 2, 3], lambda pid: pid == 2)() == {2: 20}

"""How long a shim goes on without its agent, and what its agent tells it of that.

Covers: supervisor/shim/lease.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from replicas.common.patience import Silence
from replicas.core.lives.lease_times import FROZEN_S, LAST_S, local_patience_s
from replicas.supervisor.agent.shim_process import ShimProcess
from replicas.supervisor.shim.lease import ShimLease
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.part_state import UNKNOWN


def ends_at(lease: ShimLease, now: float = 0.0) -> float:
    """When a shim that is not paused ends."""
    while not lease.has_expired(now):
        assert lease.due > now
        now = lease.due
    return now


def test_a_lease_ends_at_its_time_even_if_the_shim_was_paused() -> None:
    assert ends_at(ShimLease(0.0, until=5.0)) == 5.0
    assert ShimLease(0.0, until=5.0).has_expired(60.0)
    lease = ShimLease(0.0, until=5.0)
    lease.pinged(4.9, until=15.0)
    assert ends_at(lease) == 15.0
    assert not lease.has_expired(15.1), "it is said once"


def test_without_a_lease_and_patience_a_shim_goes_on() -> None:
    lease = ShimLease(0.0, until=5.0, patience_s=5.0)
    lease.pinged(4.0)
    assert lease.due == float("inf")
    assert not lease.has_expired(1e9)


def test_a_patience_ends_some_seconds_after_its_time_without_a_ping() -> None:
    lease = ShimLease(0.0, patience_s=20.0)
    assert ends_at(lease) == 20.0 + LAST_S
    lease = ShimLease(0.0, patience_s=20.0)
    assert not lease.has_expired(20.0)
    lease.pinged(20.5, patience_s=20.0)
    assert ends_at(lease) == 40.5 + LAST_S


@pytest.mark.parametrize("wakes_at", [20.0, 21.5, 600.0])
def test_a_machine_that_was_paused_for_longer_than_the_patience_goes_on(wakes_at: float) -> None:
    """Whichever of its processes runs first."""
    lease = ShimLease(0.0, patience_s=20.0)
    assert not lease.has_expired(wakes_at)
    lease.pinged(wakes_at + 0.1, patience_s=20.0)
    assert ends_at(lease) == wakes_at + 20.1 + LAST_S


def test_a_pause_within_the_last_seconds_is_none_of_them() -> None:
    lease = ShimLease(0.0, patience_s=20.0)
    assert not lease.has_expired(20.0)
    assert not lease.has_expired(600.0)
    assert ends_at(lease) == 600.0 + LAST_S


def test_a_living_supervisor_replaces_a_frozen_agent_before_its_shims_end() -> None:
    assert local_patience_s(0.0) > FROZEN_S + LAST_S
    assert local_patience_s(120.0) == 120.0


class Told(ShimProcess):
    """Keeps what its shim is told; ``reads``: whether that is taken."""

    def __init__(self) -> None:
        self.state, self._finishing, self._told_until = UNKNOWN, False, None
        self._answered_at, self._silence = 0.0, Silence(1.0)
        self.told: list[orders.Message] = []
        self.reads = True
        self._control: Any = SimpleNamespace(send=self._take)

    def _take(self, message: orders.Message) -> bool:
        self.told += [message] if self.reads else []
        return self.reads

    def looks(self, now: float, until: float | None = None, patience_s: float = 0.0) -> list[dict[str, Any]]:
        self.told = []
        self.check_shim(now, until, patience_s)
        return [{key: value for key, value in one.items() if key != "type" and value} for one in self.told]

    def answers(self, now: float) -> None:
        self._silence.answered()
        self._answered_at = now


def test_each_ping_says_how_long_the_shim_may_go_on() -> None:
    node = Told()
    assert node.looks(1.0, patience_s=20.0) == [{"patience_s": 20.0}]
    node.answers(1.0)
    assert node.looks(1.5, patience_s=20.0) == [], "an answer is a second old at most"
    assert node.looks(2.0, patience_s=20.0) == [{"patience_s": 20.0}]
    assert node.looks(3.0, 9.0, patience_s=20.0) == [{"until": 9.0, "patience_s": 20.0}]
    assert node.looks(4.0, 9.0) == [{"until": 9.0}], "a lease is told at each look, answered or not"


def test_the_end_of_a_lease_that_is_lifted_is_told_at_once() -> None:
    """On the supervisor's machine, when another supervisor takes the agent."""
    node = Told()
    assert node.looks(1.0, 2.0) == [{"until": 2.0}]
    node.answers(1.1)
    node.reads = False
    assert node.looks(1.2) == [], "the socket is full"
    node.reads = True
    assert cast("list[Any]", node.looks(1.3)) == [{}]
    assert node.looks(1.4) == []

"""The interval of heartbeats, and how long a member may miss them.

Members send heartbeats every second; beyond :data:`BEATS_PER_S` members of a channel
less often, at most every :data:`HEARTBEAT_MAX_S`, so that the coordinator's load stays
small. Each member learns the interval from its Welcome, and again from the View of a
new epoch. It may not have read that yet: a shorter interval is expected only after a
while.
"""

from __future__ import annotations

__all__ = ["Heartbeats"]

HEARTBEAT_S = 1.0
HEARTBEAT_MAX_S = 3.0
BEATS_PER_S = 300
LEASE_BEATS = 4
"""Number of heartbeats that a member can send within its lease."""
MISSED_BEATS = 3
SLACK_S = 0.5
"""After the missed heartbeats and this, transfers no longer wait for a member."""


class Heartbeats:
    """The heartbeats of one channel."""

    def __init__(self) -> None:
        self._slowest_s = HEARTBEAT_S
        """The longest interval at which any member may still send its heartbeats."""
        self._slow_until = 0.0

    @staticmethod
    def interval_s(members: int, lease_s: float) -> float:
        """Return the interval for ``members`` whose shortest lease is ``lease_s``."""
        longest_s = max(HEARTBEAT_S, min(HEARTBEAT_MAX_S, lease_s / LEASE_BEATS))
        return min(longest_s, HEARTBEAT_S * max(1, -(-members // BEATS_PER_S)))

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which a member has missed three heartbeats."""
        return MISSED_BEATS * self._slowest_s + SLACK_S

    def told_one(self, interval_s: float) -> None:
        """Note the interval that one member was told."""
        self._slowest_s = max(self._slowest_s, interval_s)

    def told_all(self, interval_s: float, now: float) -> None:
        """Note the interval that all members were told."""
        if interval_s >= self._slowest_s:
            self._slowest_s, self._slow_until = interval_s, 0.0
        elif not self._slow_until:
            self._slow_until = now + 2 * self._slowest_s

    def tick(self, interval_s: float, now: float) -> None:
        """Expect ``interval_s``, the current one, once all must have learnt it."""
        if self._slow_until and now > self._slow_until:
            self._slowest_s, self._slow_until = interval_s, 0.0

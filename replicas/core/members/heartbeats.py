"""Heartbeats: their interval, and how much silence is tolerated.

Members send heartbeats every second; beyond :data:`BEATS_PER_S` members of a channel
less often, at most every :data:`HEARTBEAT_MAX_S`, so that the coordinator's load stays
small. Each member learns the interval from its Welcome, and again from the View of a
new epoch. It may not have read that yet: a shorter interval is expected only after a
while.

When no member has been heard for :data:`QUIET_S`, the coordinator's own host is cut
off, and no member is blamed: the time does not count for members on other hosts,
neither for suspicion nor for leases, up to :data:`DEAF_MAX_S`. When the link is back,
members come back one by one, as TCP waits longer the longer the link was gone: those
not heard yet have as much time again, up to :data:`GRACE_MAX_S`, in which the first to
come back does not make them silent.
"""

from __future__ import annotations

HEARTBEAT_S = 1.0
HEARTBEAT_MAX_S = 3.0  # so that three missed ones are noticed within 10 s
BEATS_PER_S = 300
LEASE_BEATS = 4
"""Number of heartbeats that a member can send within its lease."""
MISSED_BEATS = 3
SLACK_S = 0.5
"""After the missed heartbeats and this, transfers no longer wait for a member."""
QUIET_S = 2.0
"""Longer than the heartbeat interval of a few members; many are heard all the time."""
GRACE_MAX_S = 10.0
DEAF_MAX_S = 120.0
"""The rest of a longer silence counts: maybe no member is left."""


class Heartbeats:
    def __init__(self) -> None:
        self._slowest_s = HEARTBEAT_S
        """The longest interval at which any member may still send its heartbeats."""
        self._slow_until = 0.0

    @staticmethod
    def interval_s(members: int, lease_s: float) -> float:
        """Return the interval for ``members`` whose shortest lease is ``lease_s``."""
        # never less than 1 s, however short the lease
        longest_s = max(HEARTBEAT_S, min(HEARTBEAT_MAX_S, lease_s / LEASE_BEATS))
        return min(longest_s, HEARTBEAT_S * max(1, -(-members // BEATS_PER_S)))

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which a member has missed three heartbeats."""
        return MISSED_BEATS * self._slowest_s + SLACK_S

    def told_one(self, interval_s: float) -> None:
        self._slowest_s = max(self._slowest_s, interval_s)

    def told_all(self, interval_s: float, now: float) -> None:
        if interval_s >= self._slowest_s:  # a slower pace is allowed at once
            self._slowest_s, self._slow_until = interval_s, 0.0
        elif not self._slow_until:
            self._slow_until = now + 2 * self._slowest_s  # a View may take a whole interval until it is read

    def tick(self, interval_s: float, now: float) -> None:
        """Expect ``interval_s``, the current one, once all must have learnt it."""
        if self._slow_until and now > self._slow_until:
            self._slowest_s, self._slow_until = interval_s, 0.0


class SilenceOfAll:
    """Silence of all members of a coordinator. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._heard_at = 0.0
        self._counted_to = 0.0

    def heard(self, now: float) -> float:
        """Note that a member was heard; return the seconds of grace for the others.

        0: there was no silence.
        """
        silence_s = now - self._heard_at
        deaf = self._counted_to > self._heard_at > 0.0  # some of this silence was not counted
        self._heard_at = self._counted_to = now
        return min(silence_s, GRACE_MAX_S) if deaf else 0.0

    def nobody(self) -> None:
        """Note that no member is there who could be heard: that is no silence."""
        self._heard_at = 0.0

    def passed(self, now: float) -> float:
        """Return the newly passed seconds by which no member is to be judged."""
        silence_s = now - self._heard_at
        if not self._heard_at or not QUIET_S < silence_s <= DEAF_MAX_S:  # 0: no member is there
            return 0.0
        since, self._counted_to = max(self._heard_at, self._counted_to), now  # each second is passed on once
        return now - since

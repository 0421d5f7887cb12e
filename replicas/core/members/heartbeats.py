"""The interval of heartbeats, and how much silence is tolerated.

Members send heartbeats every second; beyond :data:`BEATS_PER_S` members of a channel
less often, at most every :data:`HEARTBEAT_MAX_S`, so that the coordinator's load stays
small. Each member learns the interval from its Welcome, and again from the View of each
new epoch. It may read that View late, so a shorter interval is expected only later.

When no member has been heard for :data:`QUIET_S`, the coordinator's own host has lost
its network. That time, up to :data:`DEAF_MAX_S`, does not count as silence of members
on other hosts, neither for suspicion nor for leases. When the link is back, members
reconnect one by one, because TCP retries later the longer the link was down. So the
first one does not end the patience with the others: they get as much time again, up to
:data:`GRACE_MAX_S`.
"""

from __future__ import annotations

HEARTBEAT_S = 1.0
HEARTBEAT_MAX_S = 3.0  # so that three missed ones are noticed within 10 s
BEATS_PER_S = 300
LEASE_BEATS = 4
"""Number of heartbeats that a member can send within its lease."""
MISSED_BEATS = 3
SLACK_S = 0.5
"""Added to the missed heartbeats before transfers stop waiting for a member."""
QUIET_S = 2.0
"""Longer than the heartbeat interval of a few members; many are heard all the time."""
GRACE_MAX_S = 10.0
DEAF_MAX_S = 120.0
"""The part of a silence beyond this counts: there may be no members left."""


class Heartbeats:
    """The slowest heartbeat interval that any member of a channel may still use."""

    def __init__(self) -> None:
        """Start with an interval of one second."""
        self._slowest_s = HEARTBEAT_S
        self._slow_until = 0.0

    @staticmethod
    def interval_s(members: int, lease_s: float) -> float:
        """Return the seconds between a member's heartbeats, from 1 to 3, for a
        channel's size.

        :param members: how many members the channel has; many send less often.
        :param lease_s: the shortest lease of a member. Four heartbeats fit in it,
            unless it is below 4 s.
        """
        # never less than 1 s, however short the lease
        longest_s = max(HEARTBEAT_S, min(HEARTBEAT_MAX_S, lease_s / LEASE_BEATS))
        return min(longest_s, HEARTBEAT_S * max(1, -(-members // BEATS_PER_S)))

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which a member counts as suspect: three heartbeats
        missed.

        That is three times the slowest interval that a member may still use, and 0.5 s.
        """
        return MISSED_BEATS * self._slowest_s + SLACK_S

    @property
    def silent_s(self) -> float:
        """Seconds of silence after which a member has missed a heartbeat: the slowest
        interval that it may still use, and 0.5 s."""
        return self._slowest_s + SLACK_S

    def note_sent_to_one(self, interval_s: float) -> None:
        """Record the interval that one member was sent, in its Welcome.

        A longer one is tolerated of all members from now on; a shorter one changes
        nothing.
        """
        self._slowest_s = max(self._slowest_s, interval_s)

    def note_sent_to_all(self, interval_s: float, now: float) -> None:
        """Record the interval that all members were sent, in a View (a new epoch).

        A longer one is tolerated now. A shorter one is expected only when every member
        has had the time to read the View, two intervals later (:meth:`tick`).
        """
        if interval_s >= self._slowest_s:  # a slower pace is allowed at once
            self._slowest_s, self._slow_until = interval_s, 0.0
        elif not self._slow_until:
            self._slow_until = now + 2 * self._slowest_s  # a View may take a whole interval until it is read

    def tick(self, interval_s: float, now: float) -> None:
        """Tolerate only ``interval_s`` from now on, once members can have read of it.

        Until then the slower interval, which they may still use, stays tolerated. Do
        nothing if no shorter interval was sent. Call it regularly.
        """
        if self._slow_until and now > self._slow_until:
            self._slowest_s, self._slow_until = interval_s, 0.0


class ChannelSilence:
    """Detects a silence of all members, caused by the coordinator's own network.

    Times are of one monotonic clock.
    """

    def __init__(self) -> None:
        """Start as if no member had been heard yet."""
        self._heard_at = 0.0
        self._counted_to = 0.0

    def end_silence(self, now: float) -> float:
        """Record that a member was heard now, which ends a silence of all members.

        Return how many seconds the caller must add to the leases of the other members,
        so that these can reconnect: the length of the silence, at most 10. Return 0
        unless :meth:`take_uncounted_s` has excused a part of the silence.
        """
        silence_s = now - self._heard_at
        deaf = self._counted_to > self._heard_at > 0.0  # some of this silence was not counted
        self._heard_at = self._counted_to = now
        return min(silence_s, GRACE_MAX_S) if deaf else 0.0

    def note_no_members(self) -> None:
        """Record that there are no members, so that silence is not excused until one is
        heard."""
        self._heard_at = 0.0

    def take_uncounted_s(self, now: float) -> float:
        """Return the seconds by which the caller must extend all members' leases now.

        If no member has been heard for 2 s to two minutes, the coordinator's own
        network is at fault: return the part of that silence that no earlier call has
        returned. Otherwise return 0.
        """
        silence_s = now - self._heard_at
        if not self._heard_at or not QUIET_S < silence_s <= DEAF_MAX_S:  # 0: no member is there
            return 0.0
        since, self._counted_to = max(self._heard_at, self._counted_to), now  # each second is passed on once
        return now - since

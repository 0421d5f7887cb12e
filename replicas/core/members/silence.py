"""Detect that the coordinator's own host is cut off, so that no member is blamed.

When no member has been heard for :data:`QUIET_S`, the time does not count for members
on other hosts: neither for suspicion nor for leases, up to :data:`DEAF_MAX_S`. When the
link is back, members come back one by one, as TCP waits longer the longer the link was
gone: those not heard yet have as much time again, up to :data:`GRACE_MAX_S`, in which
the first to come back does not make them silent.
"""

from __future__ import annotations

__all__ = ["Silence"]

QUIET_S = 2.0
"""Longer than the heartbeat interval of a few members; many are heard all the time."""
GRACE_MAX_S = 10.0
DEAF_MAX_S = 120.0
"""The rest of a longer silence counts: maybe no member is left."""


class Silence:
    """Silence of all members of a coordinator. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._heard_at = 0.0
        self._counted_to = 0.0

    def heard(self, now: float) -> float:
        """Note that a member was heard; return the seconds of grace for the others.

        0: there was no silence.
        """
        silence_s = now - self._heard_at
        deaf = self._counted_to > self._heard_at > 0.0
        self._heard_at = self._counted_to = now
        return min(silence_s, GRACE_MAX_S) if deaf else 0.0

    def passed(self, now: float) -> float:
        """Return the newly passed seconds by which no member is to be judged."""
        silence_s = now - self._heard_at
        if not self._heard_at or not QUIET_S < silence_s <= DEAF_MAX_S:
            return 0.0
        since, self._counted_to = max(self._heard_at, self._counted_to), now
        return now - since

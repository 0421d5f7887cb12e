"""Times in which the coordinator heard nobody at all: its own host was cut off, and no
member is to be judged by that.

When nobody has been heard for :data:`QUIET_S`, the time does not count for members on
other hosts: neither for suspicion nor for leases, up to :data:`DEAF_MAX_S`. When the
link is back, members come back one by one, as TCP waits longer the longer the link was
gone: those that have yet to be heard have as much time again, up to
:data:`GRACE_MAX_S`, in which the first one to come does not take them for silent.
"""

from __future__ import annotations

__all__ = ["Silence"]

QUIET_S = 2.0
"""Longer than from one heartbeat to the next, of a few members; of many, somebody is
heard all the time."""
GRACE_MAX_S = 10.0
DEAF_MAX_S = 120.0
"""Of a longer silence the rest counts: maybe nobody is left."""


class Silence:
    """Of all members of a coordinator together. Times are readings of one monotonic
    clock."""

    def __init__(self) -> None:
        self._heard_at = 0.0
        self._counted_to = 0.0

    def heard(self, now: float) -> float:
        """Somebody was heard. Returns the grace of those that have yet to be, in
        seconds; 0: there was no silence."""
        silence_s = now - self._heard_at
        deaf = self._counted_to > self._heard_at > 0.0
        self._heard_at = self._counted_to = now
        return min(silence_s, GRACE_MAX_S) if deaf else 0.0

    def passed(self, now: float) -> float:
        """Time passes. Returns how much of it, since the last call that returned any,
        does not count."""
        silence_s = now - self._heard_at
        if not self._heard_at or not QUIET_S < silence_s <= DEAF_MAX_S:
            return 0.0
        since, self._counted_to = max(self._heard_at, self._counted_to), now
        return now - since

"""How long a shim runs without its agent. Pure: times are of one steady clock.

Two limits apply. The *lease* is a time that the agent names: the replica may then be
started elsewhere, so the shim ends, for whatever reason pings are missing. The
*patience* is a duration: the agent of the supervisor's own machine has no lease, but a
frozen agent must not keep its shims for ever. No replica is started elsewhere in that
case, so a shim that was paused, perhaps with its whole machine, gives its agent
:data:`~replicas.core.lives.lease_times.LAST_S` more to ping. Standard library only.
"""

from __future__ import annotations

import math

from replicas.common.patience import PauseClock
from replicas.core.lives.lease_times import LAST_S


class ShimLease:
    """Decides when the shim ends for lack of pings.

    :param until: end of the lease; 0 for no lease.
    :param patience_s: longest time without a ping, in seconds; 0 for no limit.
    """

    def __init__(self, now: float, until: float = 0.0, patience_s: float = 0.0) -> None:
        """Begin as if a ping with these limits had just arrived.

        :param now: time of the monotonic clock, as all times here.
        :param until: end of the lease; 0 for no lease.
        :param patience_s: longest time without a ping, in seconds; 0 for no limit.
        """
        self.pinged(now, until, patience_s)

    def pinged(self, now: float, until: float = 0.0, patience_s: float = 0.0) -> None:
        """Replace both limits by those of a ping that has arrived.

        :param until: end of the lease; 0 for no lease.
        :param patience_s: longest time until the next ping, in seconds; 0 for no limit.
        """
        self._until = until or math.inf
        self._clock = PauseClock(now + patience_s if patience_s else math.inf)
        self._last = False

    @property
    def due(self) -> float:
        """When :meth:`has_expired` must be called; inf for never."""
        return min(self._until, self._clock.due)

    def has_expired(self, now: float) -> bool:
        """Return True, once, when the shim must end for lack of pings.

        A shim that was paused past its patience gets ``LAST_S`` more for a ping.
        """
        if now < self.due:
            return False
        if now < self._until and (not self._last or self._clock.measure_pause(now)):
            self._last, self._clock.due = True, now + LAST_S
            return False
        self._until = self._clock.due = math.inf
        return True

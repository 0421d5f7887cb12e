"""How long a shim goes on without its agent. Pure: times are of one steady clock.

Two clocks run. The *lease* is a time that the agent names: at that time the replica may
be started elsewhere, so the shim ends, whatever has kept it from being pinged. The
*patience* is a duration: the agent of the supervisor's own machine has no lease, but
one that is frozen must not keep its shims for ever. Nothing is started elsewhere in
that case, so a shim that was paused, perhaps with its whole machine, gives its agent
:data:`~replicas.core.lives.lease_times.LAST_S` more to ping. Standard library only.
"""

from __future__ import annotations

import math

from replicas.common.patience import PauseClock
from replicas.core.lives.lease_times import LAST_S


class ShimLease:
    """When the shim ends by itself.

    :param until: end of the lease; 0: there is none.
    :param patience_s: how long it may hear no ping, in seconds; 0: without limit.
    """

    def __init__(self, now: float, until: float = 0.0, patience_s: float = 0.0) -> None:
        self.pinged(now, until, patience_s)

    def pinged(self, now: float, until: float = 0.0, patience_s: float = 0.0) -> None:
        """Take what a ping says, in place of what was said before."""
        self._until = until or math.inf
        self._clock = PauseClock(now + patience_s if patience_s else math.inf)
        self._last = False

    @property
    def wakes(self) -> float:
        """When :meth:`over` has something to say."""
        return min(self._until, self._clock.due)

    def over(self, now: float) -> bool:
        """Return True, once, when the shim is to end."""
        if now < self.wakes:
            return False
        if now < self._until and (not self._last or self._clock.look(now)):
            self._last, self._clock.due = True, now + LAST_S
            return False
        self._until = self._clock.due = math.inf
        return True

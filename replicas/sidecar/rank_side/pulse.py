"""When to ask a sidecar for a sign of life, and when its silence is long enough.

Theory of operation
===================

A sidecar answers a ping on a thread of its own, within two tenths of a second, whatever
its main thread is stuck in. One that does not answer is stopped (SIGSTOP, a frozen
cgroup), or starved beyond use: it is killed and replaced.

``SILENCE_S``: a thread that needs microseconds of CPU gets them within some 100 ms even
on a machine that has ten busy processes for each core, and no call that the sidecar
makes keeps Python's lock for so long (torch's, gloo's and xxhash's release it; memory
is pre-faulted in small steps). Two seconds are far above that, and far below any
deadline; a wrong verdict costs one lane, which is built again. It is still never judged
after this process itself was late, for then the answer may lie unread: it gets the
whole time again.

No clock and no I/O here: the owner calls :meth:`Pulse.look` every
:meth:`Pulse.interval_s`.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["IDLE_S", "INTERVAL_S", "SILENCE_S", "Pulse"]

INTERVAL_S = 0.5
"""Between two looks while a request or a ping is under way."""
IDLE_S = 5.0
"""Between two pings of a sidecar that has nothing to do."""
SILENCE_S = 2.0
"""A ping that is unanswered for so long: the sidecar is frozen."""
LATE_S = 0.25
"""A look that comes so much later than it should: this process did not run in
between."""
_ROUNDING_S = 0.01


class Pulse:
    """The signs of life of one sidecar. ``now``: seconds of any steady clock."""

    def __init__(self, now: float) -> None:
        self._asked_at: float | None = None
        self._due = now

    @property
    def asked(self) -> bool:
        """Whether a ping is under way."""
        return self._asked_at is not None

    def interval_s(self, now: float, *, busy: bool) -> float:
        """How long until the next look, which is then due."""
        delay = INTERVAL_S if busy or self.asked else IDLE_S
        self._due = now + delay
        return delay

    def look(self, now: float) -> Literal["ping", "wait", "frozen"]:
        """What to do: send a ping (which counts as sent from now on), wait, or give the
        sidecar up."""
        if self._asked_at is None:
            self._asked_at = now
            return "ping"
        if now - self._due > LATE_S:
            self._asked_at = now
        return "frozen" if now - self._asked_at >= SILENCE_S - _ROUNDING_S else "wait"

    def answered(self) -> None:
        self._asked_at = None

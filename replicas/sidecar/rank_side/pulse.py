"""Liveness of a sidecar: when to ping it, and when its silence means that it is frozen.

Theory of operation
===================

A sidecar answers a ping on a separate thread, within 0.2 s, whatever its main thread is
stuck in. One that does not answer is stopped (SIGSTOP, a frozen cgroup), or starved
beyond use: it is killed and replaced.

``SILENCE_S``: a thread that needs microseconds of CPU gets them within some 100 ms even
on a machine with ten busy processes for each core, and no call of the sidecar holds the
GIL for that long. Two seconds are far above that, and far below any deadline; a wrong
verdict costs one lane, which is built again. There is no verdict after this process
itself was late: the answer may lie unread, so the sidecar gets the whole time again.

This module has no clock and no I/O: the owner calls :meth:`Pulse.look` every
:meth:`Pulse.interval_s`.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["IDLE_S", "INTERVAL_S", "SILENCE_S", "Pulse"]

INTERVAL_S = 0.5
"""Between two looks while a request or a ping is pending, in seconds."""
IDLE_S = 5.0
"""Between two pings of an idle sidecar, in seconds."""
SILENCE_S = 2.0
"""A ping unanswered for this many seconds means that the sidecar is frozen."""
LATE_S = 0.25
"""A look that is later than this, in seconds, means that this process was stalled."""
_ROUNDING_S = 0.01


class Pulse:
    """Signs of life of one sidecar. ``now``: seconds of any steady clock."""

    def __init__(self, now: float) -> None:
        self._asked_at: float | None = None
        self._due = now

    @property
    def asked(self) -> bool:
        """True while a ping is pending."""
        return self._asked_at is not None

    def interval_s(self, now: float, *, busy: bool) -> float:
        """Return the delay until the next look, and note when it is due."""
        delay = INTERVAL_S if busy or self.asked else IDLE_S
        self._due = now + delay
        return delay

    def look(self, now: float) -> Literal["ping", "wait", "frozen"]:
        """Decide: send a ping (it counts as sent now), wait, or give the sidecar up."""
        if self._asked_at is None:
            self._asked_at = now
            return "ping"
        if now - self._due > LATE_S:
            self._asked_at = now
        return "frozen" if now - self._asked_at >= SILENCE_S - _ROUNDING_S else "wait"

    def answered(self) -> None:
        self._asked_at = None

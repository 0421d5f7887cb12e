"""Timers that do not count time in which this process was paused.

A process that was stopped, starved or moved to another machine checks too late:
messages may be unread, and the watched process may have been paused, too. So time in
which the observer did not run does not count as a timeout. The rule: a look more than
``slack_s`` after it was due means a pause. Then a :class:`Patience` or :class:`Silence`
starts again, and an owner of many deadlines extends them by the length that
:meth:`PauseClock.pause_at` returns. Times are of any one steady clock, in seconds.
Standard library only.
"""

from __future__ import annotations

PAUSE_S = 1.0
"""A look later than this, in seconds, means a pause: a busy machine is not so late."""


class PauseClock:
    """Detects, by a late look, that this process was paused.

    :ivar due: when the next look must come; the owner sets it.
    """

    def __init__(self, due: float, slack_s: float = PAUSE_S) -> None:
        self.due = due
        self._slack_s = slack_s

    def pause_at(self, now: float) -> float:
        """Return the length of the pause that this look ends, or 0."""
        late_s = now - self.due
        return late_s if late_s > self._slack_s else 0.0


class Patience:
    """Measures for how long a condition has been true at every look."""

    def __init__(self, now: float, interval_s: float) -> None:
        self._clock = PauseClock(now + interval_s)
        self._interval_s = interval_s
        self._since: float | None = None

    def update_duration(self, now: float, so: bool) -> float:
        """Record the condition at this look; return how long it has been true."""
        if self._since is None or not so or self._clock.pause_at(now):
            self._since = now if so else None
        self._clock.due = now + self._interval_s
        return 0.0 if self._since is None else now - self._since


class Silence:
    """Measures for how long a question to another process has had no answer.

    :param due: when the first look must come; its owner then sets ``due`` for the next.
    """

    def __init__(self, due: float, slack_s: float = PAUSE_S) -> None:
        self._clock = PauseClock(due, slack_s)
        self._asked_at: float | None = None

    @property
    def asked(self) -> bool:
        """Return True while a question has no answer."""
        return self._asked_at is not None

    @property
    def due(self) -> float:
        return self._clock.due

    @due.setter
    def due(self, due: float) -> None:
        self._clock.due = due

    def ask(self, now: float) -> None:
        """Record that a question was sent. The first unanswered question counts."""
        if self._asked_at is None:
            self._asked_at = now

    def answered(self) -> None:
        self._asked_at = None

    def lasts(self, now: float) -> float:
        """Look; return for how many seconds the answer is missing, 0 if none is due."""
        if self._clock.pause_at(now) and self._asked_at is not None:
            self._asked_at = now
        return 0.0 if self._asked_at is None else now - self._asked_at

"""Timers that do not count time in which this process was paused.

A process that was stopped, starved or moved to another machine looks late at what it
watches: signs of life may lie unread, and the watched process was perhaps paused with
it. So nobody is judged by time in which this process did not run. There is one rule: a
look that comes more than ``slack_s`` after it was due means a pause. Then a
:class:`Patience` or :class:`Silence` begins anew, and an owner of many deadlines
extends them by what :meth:`PauseClock.look` returns. Times are of any one steady clock,
in seconds. Standard library only.
"""

from __future__ import annotations

PAUSE_S = 1.0
"""A look later than this, in seconds, means a pause: a busy machine is not so late."""


class PauseClock:
    """Notices, by a late look, a pause of this process. ``due``: of the next look."""

    def __init__(self, due: float, slack_s: float = PAUSE_S) -> None:
        self.due = due
        self._slack_s = slack_s

    def look(self, now: float) -> float:
        """Return the length of the pause that this look ends; 0: there was none."""
        late_s = now - self.due
        return late_s if late_s > self._slack_s else 0.0


class Patience:
    """Measures for how long each look of ours has found something to be so."""

    def __init__(self, now: float, interval_s: float) -> None:
        self._clock = PauseClock(now + interval_s)
        self._interval_s = interval_s
        self._since: float | None = None

    def lasts(self, now: float, so: bool) -> float:
        """Note what this look has found; return for how long it has been so."""
        if self._since is None or not so or self._clock.look(now):
            self._since = now if so else None
        self._clock.due = now + self._interval_s
        return 0.0 if self._since is None else now - self._since


class Silence:
    """Measures for how long a question to another process has had no answer.

    :param due: of the first look; then its owner sets ``due``, of the next one.
    """

    def __init__(self, due: float, slack_s: float = PAUSE_S) -> None:
        self._clock = PauseClock(due, slack_s)
        self._asked_at: float | None = None

    @property
    def asked(self) -> bool:
        """True while a question has no answer."""
        return self._asked_at is not None

    @property
    def due(self) -> float:
        return self._clock.due

    @due.setter
    def due(self, due: float) -> None:
        self._clock.due = due

    def ask(self, now: float) -> None:
        """Note that a question was sent; the first one counts until it is answered."""
        if self._asked_at is None:
            self._asked_at = now

    def answered(self) -> None:
        self._asked_at = None

    def lasts(self, now: float) -> float:
        """Look; return for how many seconds no answer has come; 0: none is due."""
        if self._clock.look(now) and self._asked_at is not None:
            self._asked_at = now
        return 0.0 if self._asked_at is None else now - self._asked_at

"""Timers that do not count time in which this process was paused.

A process that was stopped, starved or moved to another machine checks too late:
messages may be unread, and the watched process may have been paused, too. So time in
which the observer did not run does not count as a timeout. The rule: a look more than
``slack_s`` after it was due means a pause. Then a :class:`Patience` or :class:`Silence`
starts again, and an owner of many deadlines extends them by the length that
:meth:`PauseClock.measure_pause` returns. Times are of any one steady clock, in seconds.
Standard library only.
"""

from __future__ import annotations

PAUSE_S = 1.0
"""A look later than this, in seconds, means a pause: a busy machine is not so late."""


class PauseClock:
    """Detects that this process was paused: a regular check (*look*) came too late.

    :ivar due: when the next look must come, in seconds of the owner's steady clock; the
        owner sets it.
    """

    def __init__(self, due: float, slack_s: float = PAUSE_S) -> None:
        """Store when the first look is due, by the caller's steady clock.

        :param slack_s: a look later than :attr:`due` by more than these seconds means
            that this process was paused.
        """
        self.due = due
        self._slack_s = slack_s

    def measure_pause(self, now: float) -> float:
        """Return for how many seconds this process was paused before this look.

        That is the time since :attr:`due`, if it is more than ``slack_s``, else 0. This
        method does not change :attr:`due`.

        :param now: the present time, by the caller's steady clock.
        """
        late_s = now - self.due
        return late_s if late_s > self._slack_s else 0.0


class Patience(PauseClock):
    """Measures for how long a condition has been true at every regular check (*look*).

    :param interval_s: seconds between two looks; a look more than :data:`PAUSE_S` late
        begins again at 0.
    """

    def __init__(self, now: float, interval_s: float) -> None:
        """Begin at ``now``, a time of the caller's steady clock, without a duration.

        :param interval_s: seconds between two looks; the first is due one interval
            after ``now``.
        """
        super().__init__(now + interval_s)
        self._interval_s = interval_s
        self._since: float | None = None

    def measure_duration(self, now: float, so: bool) -> float:
        """Record whether the condition holds at this look; return for how many seconds
        it has held at every look.

        Return 0 if the condition does not hold now, or if this process was paused
        before this look. The next look is due one interval after ``now``.

        :param now: the present time, by the caller's steady clock.
        :param so: True if the condition holds.
        """
        if self._since is None or not so or self.measure_pause(now):
            self._since = now if so else None
        self.due = now + self._interval_s
        return 0.0 if self._since is None else now - self._since


class Silence(PauseClock):
    """Measures for how long a question to another process has had no answer."""

    def __init__(self, due: float, slack_s: float = PAUSE_S) -> None:
        """Begin without a question.

        :param due: time of the first :meth:`measure_silence`, by the caller's steady
            clock.
        :param slack_s: a call of it later than :attr:`due` by more than these seconds
            means that this process was paused.
        """
        super().__init__(due, slack_s)
        self._asked_at: float | None = None

    @property
    def asked(self) -> bool:
        """True if a question was sent and has no answer yet."""
        return self._asked_at is not None

    def ask(self, now: float) -> None:
        """Record that the owner sends a question to the other process, at ``now``.

        Ignored while an earlier question is unanswered. Nothing is sent here.
        """
        if self._asked_at is None:
            self._asked_at = now

    def answered(self) -> None:
        """Record that the question was answered.

        The silence is 0 until the next question.
        """
        self._asked_at = None

    def measure_silence(self, now: float) -> float:
        """Return the seconds since the unanswered question, or 0 if none is open.

        If this call comes later than :attr:`due` and the slack, this process was
        paused, and counting begins again at 0. :attr:`due` is not changed.

        :param now: the present time, by the caller's steady clock.
        """
        if self.measure_pause(now) and self._asked_at is not None:
            self._asked_at = now
        return 0.0 if self._asked_at is None else now - self._asked_at

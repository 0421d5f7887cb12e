"""The lifecycle of a watched child process: started, given up, and started again.

*Waiting* for its start, at a set time or until it is needed. *Starting* until it
reports that it is ready, then *up*; its owner checks it in both. *Dying* after SIGKILL,
because it stalled. After its end, or a failed start, each further start waits longer,
unless the process had lived for a while; after too many in a row, it is *over*.
*Leaving* until its end, if it must not be started again. A sidecar has only one start.

Pure: :class:`ChildLife` gets the time as an argument and does no I/O. The owner starts,
checks and kills the process, reports events, and carries out the steps that
:meth:`ChildLife.on_time` returns. Standard library only, for loops of any kind.
"""

from __future__ import annotations

import math
from typing import Literal

from replicas.common.backoff import Backoff
from replicas.common.table import Table

ChildState = Literal["waiting", "starting", "up", "dying", "leaving", "over"]
ChildEvent = Literal["start", "ready", "give_up", "ended", "too_often", "stop"]

CHILD: Table[ChildState, ChildEvent] = Table(
    "a watched process",
    ("waiting",),
    {
        "waiting": {"starting": ("start",), "over": ("too_often", "stop")},
        "starting": {"up": ("ready",), "dying": ("give_up",), "waiting": ("ended",), "leaving": ("stop",)},
        "up": {"dying": ("give_up",), "waiting": ("ended",), "leaving": ("stop",)},
        "dying": {"waiting": ("ended",), "leaving": ("stop",)},
        "leaving": {"over": ("ended",)},
    },
)


class ChildLife:
    """State of one watched child process, and the time of its next check or start.

    It records what its owner does, and touches no process. The states and steps are
    those of :data:`CHILD`. Times: seconds of any one steady clock.

    :ivar starts: starts in a row, each after a process that ended too soon.
    :ivar due: when :meth:`on_time` must be called; inf for never.
    """

    def __init__(
        self, again: Backoff | None, *, steady_s: float = 60.0, tries: int = 0, look_interval_s: float | None = None
    ) -> None:
        """Begin in the state "waiting", with no start scheduled.

        :param again: delay of the next start, by the number of starts in a row; None:
            the process is started only once.
        :param steady_s: the start after a process that lived longer counts as the first
            of a new row.
        :param tries: starts in a row after which no further one comes (state "over"); 0
            for no limit.
        :param look_interval_s: seconds between two checks ("looks") of the running
            process by its owner; None for no checks.
        """
        self.state: ChildState = "waiting"
        self.starts = 0
        self._again, self._steady_s, self._tries = again, steady_s, tries
        self._look_interval_s = look_interval_s
        self._began = 0.0
        self.due = math.inf

    def on_time(self, now: float) -> Literal["", "look", "start"]:
        """Return the step that the owner must carry out now, or "" if none is due.

        ``"start"`` means to start the process, and to record that by :meth:`start`;
        ``"look"`` means to check that it still works. The next look is scheduled here,
        if the owner wants looks. Each step is returned once.

        :param now: seconds of the owner's steady clock.
        """
        if now < self.due:
            return ""
        self.due = math.inf
        if self.state == "waiting":
            return "start"
        self._look_again(now)
        return "look"

    def start(self, now: float) -> None:
        """Record that the owner starts the process now; enter the state "starting".

        Schedule the first look. A start that fails must be recorded by :meth:`ended`,
        too.

        :raises InvalidStep: the state is not "waiting".
        """
        self._step("start")
        self.starts += 1
        self._began, self.due = now, math.inf
        self._look_again(now)

    def ready(self) -> None:
        """Record that the process has reported that it is ready: "starting" turns "up".

        Ignored in any other state.
        """
        if self.state == "starting":
            self._step("ready")

    def give_up(self) -> None:
        """Record that the owner kills the process, because it stalled.

        The state is "dying" then, and no look is due. The owner records the end of the
        process by :meth:`ended`.

        :raises InvalidStep: the process neither starts nor is up.
        """
        self._step("give_up")
        self.due = math.inf

    def ended(self, now: float, again: Backoff | None = None) -> bool:
        """Record the end of the process, or its failed start; schedule the next start.

        Return True if no start is left, so that the process is never started again
        (state "over"); False if a start is scheduled, or after :meth:`stop`.

        :param now: seconds of the owner's steady clock.
        :param again: delays for this one time, in place of those of the constructor.
        :raises InvalidStep: no start was recorded before.
        """
        self.due = math.inf
        if now - self._began > self._steady_s:
            self.starts = 1
        self._step("ended")
        again = again or self._again
        if self.state == "waiting" and (again is None or self.starts == self._tries):
            self._step("too_often")
            return True
        if self.state == "waiting" and again is not None:
            self.due = now + again.after(self.starts - 1)
        return False

    def stop(self) -> None:
        """Record that the process must not be started again.

        It is not killed: if it runs, the state is "leaving" until :meth:`ended`, else
        "over" at once. Nothing is due any more.
        """
        self.due = math.inf
        if CHILD.allows(self.state, "stop"):
            self._step("stop")

    def _look_again(self, now: float) -> None:
        """Schedule the next look one interval after ``now``, if the owner wants any."""
        if self._look_interval_s is not None:
            self.due = now + self._look_interval_s

    def _step(self, event: ChildEvent) -> None:
        """Enter the state to which ``event`` leads in :data:`CHILD`.

        :raises InvalidStep: it leads to none; the state stays.
        """
        self.state = CHILD.next(self.state, event)

"""The life of a child process that is watched: started, given up, and started again.

*Waiting* for its start, at a set time or until it is needed. *Starting* until it says
that it is ready, then *up*; its owner looks at it in both. One that stalls is *dying*:
it was sent SIGKILL. After its end, or a start that failed, the next start waits longer
each time, unless the process had lived for a while; too many in a row, and it is
*over*. One that is not to be started again is *leaving* until it ends. A sidecar, which
others replace, has one start.

Pure: :class:`ChildLife` gets the time as an argument and does nothing itself. The owner
starts, asks and kills the process, tells what has happened, and does what
:meth:`ChildLife.on_time` says is due. Standard library only, for loops of any kind.
"""

from __future__ import annotations

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
    """One child's place in :data:`CHILD`, and when to look at it or start it again.

    :param again: delay of the next start, by the number of starts in a row; None: there
        is none.
    :param steady_s: the end of one that lived longer is the first of a row.
    :param tries: starts in a row after which it is over; 0: never.
    :ivar starts: number of starts in this row.
    """

    def __init__(
        self, again: Backoff | None, *, steady_s: float = 60.0, tries: int = 0, look_interval_s: float | None = None
    ) -> None:
        self.state: ChildState = "waiting"
        self.starts = 0
        self._again, self._steady_s, self._tries = again, steady_s, tries
        self._look_interval_s = look_interval_s
        self._began = 0.0
        self._due: float | None = None

    @property
    def wakes(self) -> list[float]:
        """When :meth:`on_time` has something to do."""
        return [] if self._due is None else [self._due]

    def on_time(self, now: float) -> Literal["", "look", "start"]:
        """Return what is due."""
        if self._due is None or now < self._due:
            return ""
        self._due = None
        if self.state == "waiting":
            return "start"
        self._look_again(now)
        return "look"

    def start(self, now: float) -> None:
        """Note that it is being started; a start that fails is an end."""
        self._step("start")
        self.starts += 1
        self._began, self._due = now, None
        self._look_again(now)

    def ready(self) -> None:
        """Note that it is ready, which may come too late."""
        if self.state == "starting":
            self._step("ready")

    def give_up(self) -> None:
        """Note that it is being killed."""
        self._step("give_up")
        self._due = None

    def ended(self, now: float, again: Backoff | None = None) -> bool:
        """Record the exit; return True once the restart limit is reached.

        :param again: delays in place of the usual ones.
        """
        self._due = None
        if now - self._began > self._steady_s:
            self.starts = 1
        self._step("ended")
        again = again or self._again
        if self.state == "waiting" and (again is None or self.starts == self._tries):
            self._step("too_often")
            return True
        if self.state == "waiting" and again is not None:
            self._due = now + again.after(self.starts - 1)
        return False

    def stop(self) -> None:
        """Never start it again; it may still run."""
        self._due = None
        if CHILD.allows(self.state, "stop"):
            self._step("stop")

    def _look_again(self, now: float) -> None:
        if self._look_interval_s is not None:
            self._due = now + self._look_interval_s

    def _step(self, event: ChildEvent) -> None:
        self.state = CHILD.next(self.state, event)

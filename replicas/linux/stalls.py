"""Detect a child process that is stopped or idle, as opposed to slow.

Standard library only. A process that loads a large library from a slow disk uses CPU
time and faults pages in all the time; one that was stopped (SIGSTOP) has the state T.
"""

from __future__ import annotations

from replicas.common.patience import Patience
from replicas.linux.processes import stat_fields

LOOK_INTERVAL_S = 0.5
STOPPED_S = 3.0
"""Give up a process stopped for longer; a tool may stop it briefly to look at it."""
STARTING_S = 20.0
"""Give up a starting process that used no CPU time and no memory for this long."""


def work_of(pid: int) -> tuple[str, ...]:
    """State letter, minor and major faults, user and system time; X: unreadable."""
    try:
        fields = stat_fields(pid)
    except (PermissionError, ProcessLookupError):
        return ("X",)
    return (fields[0], fields[7], fields[9], fields[11], fields[12])


class StallWatch:
    """Watch one of our child processes, not reaped. ``now``: of any steady clock."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self._seen: tuple[str, ...] = ()
        self._stopped, self._idle = (Patience(now, LOOK_INTERVAL_S) for _ in range(2))

    def look(self, now: float, *, starting: bool) -> str:
        """Return why to give it up, or ""; ``starting``: it must not be idle."""
        state, *done = work_of(self.pid)
        seen, self._seen = self._seen, tuple(done)
        idle_s = self._idle.lasts(now, starting and state != "X" and seen == self._seen)
        if self._stopped.lasts(now, state == "T") >= STOPPED_S:
            return f"was stopped for {STOPPED_S:g} s"
        return f"did nothing for {STARTING_S:g} s" if idle_s >= STARTING_S else ""

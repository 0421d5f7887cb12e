"""Detect a child process that is stopped or idle, as opposed to slow.

Standard library only. A process that loads a large library from a slow disk always uses
CPU time and has page faults; a stopped process (SIGSTOP) has the state T.
"""

from __future__ import annotations

from replicas.common.patience import Patience
from replicas.linux.processes import stat_fields

LOOK_INTERVAL_S = 0.5
STOPPED_S = 3.0
"""Give up a process stopped for longer; a debugger may stop it briefly."""
STARTING_S = 20.0
"""Give up a starting process that used no CPU time and no memory for this long."""


def work_of(pid: int) -> tuple[str, ...]:
    """Return state letter, minor and major faults, user and system time, or ("X",)."""
    try:
        fields = stat_fields(pid)
    except (PermissionError, ProcessLookupError):
        return ("X",)
    return (fields[0], fields[7], fields[9], fields[11], fields[12])


class StallWatch:
    """Watch an unreaped child process. ``now`` is of any steady clock."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self._seen: tuple[str, ...] = ()
        self._stopped, self._idle = (Patience(now, LOOK_INTERVAL_S) for _ in range(2))

    def reason_to_give_up(self, now: float, *, starting: bool) -> str:
        """Return why to give it up, or "". It must not be idle while ``starting``."""
        state, *done = work_of(self.pid)
        seen, self._seen = self._seen, tuple(done)
        idle_s = self._idle.update_duration(now, starting and state != "X" and seen == self._seen)
        if self._stopped.update_duration(now, state == "T") >= STOPPED_S:
            return f"was stopped for {STOPPED_S:g} s"
        return f"did nothing for {STARTING_S:g} s" if idle_s >= STARTING_S else ""

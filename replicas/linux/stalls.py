"""Detect a child process that is stopped or idle, as opposed to slow.

Standard library only. A process that loads a large library from a slow disk uses CPU
time and faults pages in all the time; one that was stopped (SIGSTOP) has the state T.
"""

from __future__ import annotations

from replicas.linux.processes import stat_fields

__all__ = ["LOOK_INTERVAL_S", "STARTING_S", "STOPPED_S", "StallWatch"]

LOOK_INTERVAL_S = 0.5
STOPPED_S = 3.0
"""Give up a process stopped for longer; a tool may stop it briefly to look at it."""
STARTING_S = 20.0
"""Give up a starting process that used no CPU time and no memory for this long."""
_LATE_S = 1.0


class StallWatch:
    """Watch one of our child processes, not reaped. ``now``: of any steady clock."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self._seen: tuple[str, ...] = ()
        self._stopped_since: float | None = None
        self._idle_since = self._looked_at = now

    def look(self, now: float, *, starting: bool) -> str:
        """Return why to give it up, or ""; ``starting``: it must not be idle."""
        if now - self._looked_at > LOOK_INTERVAL_S + _LATE_S:  # this process was paused too
            self._stopped_since, self._idle_since = None, now
        self._looked_at = now
        state, *done = self._stat()
        if tuple(done) != self._seen or not starting or state == "X":
            self._seen, self._idle_since = tuple(done), now
        if state != "T":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        if self._stopped_since is not None and now - self._stopped_since >= STOPPED_S:
            return f"was stopped for {STOPPED_S:g} s"
        if now - self._idle_since >= STARTING_S:
            return f"did nothing for {STARTING_S:g} s"
        return ""

    def _stat(self) -> tuple[str, ...]:
        """State letter, minor and major faults, user and system time; X: unreadable."""
        try:
            fields = stat_fields(self.pid)
        except (PermissionError, ProcessLookupError):
            return ("X",)
        return (fields[0], fields[7], fields[9], fields[11], fields[12])

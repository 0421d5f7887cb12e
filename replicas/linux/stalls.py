"""Telling a process that is stopped, or does nothing at all, from one that is only
slow. Standard library only.

``/proc/PID/stat`` has the state of a process and what it has done so far: CPU time and
page faults. One that loads a large library from a slow disk does something all the
time; one that was stopped (SIGSTOP) says so and does nothing.
"""

from __future__ import annotations

from replicas.linux.processes import stat_fields

__all__ = ["LOOK_INTERVAL_S", "STARTING_S", "STOPPED_S", "StallWatch"]

LOOK_INTERVAL_S = 0.5
STOPPED_S = 3.0
"""A process that was stopped for so long is given up: long enough for a tool that stops
it to look at it."""
STARTING_S = 20.0
"""One that should be starting, and used neither CPU time nor memory for so long, is
given up."""
_LATE_S = 1.0


class StallWatch:
    """Looks at one process of ours, which must not have been reaped. ``now``: seconds
    of any steady clock."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self._seen: tuple[str, ...] = ()
        self._stopped_since: float | None = None
        self._idle_since = self._looked_at = now

    def look(self, now: float, *, starting: bool) -> str:
        """Why it should be given up, or nothing; call it every ``LOOK_INTERVAL_S``.

        ``starting``: it has something to do, so that it is not allowed to be idle.
        """
        if now - self._looked_at > LOOK_INTERVAL_S + _LATE_S:  # this process did not run itself
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
        """State letter, minor and major page faults, CPU time in user and system mode;
        only X when it cannot be seen."""
        try:
            fields = stat_fields(self.pid)
        except (PermissionError, ProcessLookupError):
            return ("X",)
        return (fields[0], fields[7], fields[9], fields[11], fields[12])

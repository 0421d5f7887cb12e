"""Detect a child process that is stopped or idle, as opposed to slow.

Standard library only. A process that loads a large library from a slow disk always uses
CPU time and has page faults; a stopped process (SIGSTOP) has the state T.
"""

from __future__ import annotations

from replicas.common.patience import Patience
from replicas.common.reason import Reason
from replicas.linux.processes import stat_fields

LOOK_INTERVAL_S = 0.5
STOPPED_S = 3.0
"""Give up a process stopped for longer; a debugger may stop it briefly."""
IDLE_S = 20.0
"""Give up an awaited process that used no CPU time and no memory for this long."""


def _work_of(pid: int) -> tuple[str, ...]:
    """Return the state letter of a process, and four counters that grow while it works.

    The counters, as texts of ``/proc/PID/stat``, are its minor and major page faults,
    and its user and system time. Return ``("X",)`` if the process is gone.
    """
    try:
        fields = stat_fields(pid)
    except (PermissionError, ProcessLookupError):
        return ("X",)
    return (fields[0], fields[7], fields[9], fields[11], fields[12])


class StallWatch:
    """Finds whether an unreaped child process is stopped or idle. It signals nothing.

    ``now`` is in seconds of any steady clock.
    """

    def __init__(self, pid: int, now: float) -> None:
        """Begin to watch process ``pid``; read nothing, start nothing.

        :param now: the present time in seconds of any steady clock. The caller calls
            :meth:`reason_to_give_up` from now on, every ``LOOK_INTERVAL_S``.
        """
        self.pid = pid
        self._seen: tuple[str, ...] = ()
        self._stopped, self._idle = (Patience(now, LOOK_INTERVAL_S) for _ in range(2))

    def reason_to_give_up(self, now: float, *, awaited: bool) -> Reason | None:
        """Read the child's state once; return why the caller should kill it, or None.

        The reason is that the child was stopped (as by SIGSTOP) for ``STOPPED_S``. This
        method sends no signal.

        :param now: the present time, by the clock of the constructor's ``now``. A time
            without calls, as while this process was suspended, does not count.
        :param awaited: True if others wait for the child: then also give it up if it
            did no work for ``IDLE_S``.
        """
        state, *done = _work_of(self.pid)
        seen, self._seen = self._seen, tuple(done)
        idle_s = self._idle.measure_duration(now, awaited and state != "X" and seen == self._seen)
        if self._stopped.measure_duration(now, state == "T") >= STOPPED_S:
            return f"was stopped for {STOPPED_S:g} s"
        return f"did nothing for {IDLE_S:g} s" if idle_s >= IDLE_S else None

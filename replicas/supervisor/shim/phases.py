"""The phases of a shim, as a table of inputs and actions.

*Running*: the main process (torchrun's launcher, or the program itself) runs.
*Stopping*: its end was requested, by an order, a signal or the supervisor's death.
*Ended* (without a request) or *stopped*: the log pump still reads its last output, for
the exit report. *Sweeping*: the report is sent, and the remaining processes are being
ended. *Closing*: only the log pump is left; its input is closed, and it ends.

:attr:`Phases.kill_at` is the time of SIGKILL to the whole tree, repeated from then on.
The first stop sets it, and later stops can only advance it: processes that remain after
the main process have the time of that stop, or else ``SWEEP_GRACE_S``. Pure: times are
arguments, of any steady clock. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from replicas.common.table import StateMachine, Table
from replicas.supervisor.wire.orders import REMAINS_INTERVAL_S

SWEEP_GRACE_S = 1.0
"""Time from SIGTERM to SIGKILL for processes left by a main process that ended."""
_INTERVAL_S = 0.05
_STEADY_S = 3.0
_LATE_INTERVAL_S = 0.5
"""Interval of SIGKILLs to processes that die slowly, in seconds. The end of a child
wakes the shim in any case."""

Phase = Literal["running", "stopping", "ended", "stopped", "sweeping", "closing", "over"]
Input = Literal["stop", "main_ended", "output_read", "not_started", "empty", "logs_read"]
Action = Literal["take_inventory", "end_main", "read_output", "report", "report_stop", "end_all", "close_logs"]

PHASES: Table[Phase, Input] = Table(
    "a shim",
    ("running",),
    {
        "running": {"stopping": ("stop",), "ended": ("main_ended",), "sweeping": ("not_started",)},
        "stopping": {"stopping": ("stop",), "stopped": ("main_ended",)},
        "ended": {"stopped": ("stop",), "sweeping": ("output_read",)},
        "stopped": {"stopped": ("stop",), "sweeping": ("output_read",)},
        "sweeping": {"sweeping": ("stop", "main_ended"), "closing": ("empty",)},
        "closing": {"closing": ("stop", "main_ended"), "over": ("logs_read",)},
    },
)
ACTIONS: Mapping[tuple[Phase, Input], tuple[Action, ...]] = {
    ("running", "stop"): ("take_inventory", "end_main"),
    ("running", "main_ended"): ("read_output",),
    ("running", "not_started"): ("end_all",),
    ("stopping", "main_ended"): ("read_output",),
    ("ended", "stop"): ("take_inventory",),
    ("ended", "output_read"): ("report", "end_all"),
    ("stopped", "output_read"): ("report_stop", "end_all"),
    ("sweeping", "empty"): ("close_logs",),
}


class Phases(StateMachine[Phase, Input, Action]):
    """The phase of one shim, such as ``stopping``, and the time of its next SIGKILL."""

    def __init__(self) -> None:
        """Begin in the first phase, with no SIGKILL due."""
        super().__init__(PHASES, ACTIONS)
        self.kill_at = math.inf
        self._killing_since: float | None = None
        self._name_at = 0.0

    def enter_phase(self, event: Input, at: float, timeout_s: float = SWEEP_GRACE_S) -> tuple[Action, ...]:
        """Enter the next phase; return the actions that the caller must carry out.

        :param event: the input, an event of the table.
        :param at: its time. A stop sets the time of SIGKILL, or makes it earlier.
        :param timeout_s: time from SIGTERM to SIGKILL.
        :raises replicas.common.table.InvalidStep: the table does not allow it now.
        """
        actions = self.step(event)
        if event == "stop" or (self.now == "sweeping" and self.kill_at == math.inf):
            self.kill_at = min(self.kill_at, at + timeout_s)
        return actions

    def record_kill(self, at: float) -> bool:
        """Record that SIGKILL was sent to all at this time, ``at``; schedule the next.

        Return True if it is time to report the processes that are still there.
        """
        if self._killing_since is None:
            self._killing_since, self._name_at = at, at + REMAINS_INTERVAL_S
        steady = at - self._killing_since < _STEADY_S
        self.kill_at = at + (_INTERVAL_S if steady else _LATE_INTERVAL_S)
        if at < self._name_at:
            return False
        self._name_at = at + REMAINS_INTERVAL_S
        return True

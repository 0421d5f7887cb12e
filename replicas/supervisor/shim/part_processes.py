"""The processes of a part: which they are, and how they are ended.

They are in the part's control group, or below the shim where there is none. Sidecars
are children of the node's forkserver: they are in the group, or have the shim's mark.
The log pump is not one of them. Standard library only.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from replicas.linux import cgroups
from replicas.linux.processes import command_line, descendants, marked, own_children, signal_marked, signal_own
from replicas.supervisor.cleanup.sweeping import TrackerGrace, kill_group
from replicas.supervisor.shim.deaths import EndWatch
from replicas.supervisor.wire.orders import PartSpec
from replicas.supervisor.wire.part_state import Remains

_LOOK_AGAIN_S = 0.05
_MAX_REMAINS = 16


class PartProcesses:
    """Finds and ends the processes of a part (a replica's on this node), for its shim.

    :param pump: returns the pid of the log pump, or 0.
    """

    def __init__(self, spec: PartSpec, selector: selectors.BaseSelector, pump: Callable[[], int]) -> None:
        """Keep what identifies the part's processes; look at none yet.

        :param selector: the loop's, to be woken by the ends of processes.
        :param pump: returns the pid of the log pump, or 0.
        """
        self._nonce, self._pump = spec.nonce, pump
        self._cgroup = Path(spec.cgroup) if spec.cgroup else None
        self._others = EndWatch(selector)
        self._grace = TrackerGrace()
        self._childless = False
        self._killing_since = 0.0

    @property
    def due(self) -> float:
        """When :meth:`are_gone` must be called; inf for never."""
        return time.monotonic() + _LOOK_AGAIN_S if self._others.has_unwatched else math.inf

    def find(self) -> list[int]:
        """Return pids of the processes in the control group, if there is one.

        Without a group: of those below this process, without the log pump.
        """
        if self._cgroup is not None:
            return cgroups.members(self._cgroup)
        return [pid for pid in descendants(os.getpid()) if pid != self._pump()]

    def find_with_sidecars(self) -> set[int]:
        """Return the pids of all processes of the part, without the log pump.

        Includes sidecars (helper processes of ranks), which the node's forkserver
        starts.
        """
        return {*self.find(), *(() if self._cgroup is not None else marked(self._nonce))} - {self._pump()}

    def reap(self) -> Iterator[tuple[int, int]]:
        """Reap all ended children; yield pid and exit code of each. Never waits."""
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                yield found[0], os.waitstatus_to_exitcode(found[1])
        except ChildProcessError:
            self._childless = True
        else:
            self._childless = False

    def end(self) -> None:
        """Send SIGTERM to all processes below this one but the log pump.

        All get it at once, as the death of one can make the others fail. Does not wait.
        """
        signal_own(signal.SIGTERM, but=frozenset({self._pump()}))

    def kill(self, now: float) -> list[int]:
        """Send SIGKILL to all processes of the part, resource trackers last.

        Does not wait; to be repeated until :meth:`are_gone`.

        :param now: monotonic time.
        :return: pids of the processes that were there.
        """
        self._killing_since = self._killing_since or time.time()
        spared = frozenset({self._pump()}) | self._grace.spared(self.find(), now)
        if self._cgroup is not None:
            kill_group(self._cgroup, cgroups.members(self._cgroup), spared)
        left = signal_own(signal.SIGKILL, but=spared)
        if self._only_pump_is_child():  # remaining processes are children of the forkserver
            left += signal_marked(self._nonce, signal.SIGKILL, but=spared)
        return left

    def describe_remains(self, left: list[int]) -> Remains:
        """Return processes that SIGKILL has not ended yet, with their commands.

        :param left: their pids; the first 16 are described.
        """
        named = tuple((pid, command_line(pid)) for pid in left[:_MAX_REMAINS])
        return Remains(since=self._killing_since, processes=named)

    def are_gone(self) -> bool:
        """Return True if no process of the part is left but the log pump.

        If some are left, have the loop woken when one of them ends. To be called while
        the part is being killed, and none of its processes starts another.
        """
        return self._only_pump_is_child() and self._others.watch_all(self._find_sidecars)

    def _find_sidecars(self) -> set[int]:
        """Return pids of processes of the part that may not be below this one.

        Those are sidecars: the node's forkserver starts them.
        """
        inside = cgroups.members(self._cgroup) if self._cgroup is not None else ()
        return {*inside, *marked(self._nonce)} - {self._pump()}

    def _only_pump_is_child(self) -> bool:
        """Return True if this process has no child but the log pump."""
        return self._childless or set(own_children()) <= {self._pump()}

    def leave_group(self, *, run: bool) -> None:
        """Remove the part's control group.

        :param run: also remove that of the whole run, if it is empty.
        """
        if self._cgroup is not None:
            cgroups.leave(self._cgroup, run=run)

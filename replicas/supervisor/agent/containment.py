"""Start shims in control groups of their own.

:class:`Containment` starts shims for the agent, each in a control group for its part
and generation, which exists before the shim starts anything: no process of it is lost,
whichever is killed next. Where control groups cannot be made, processes are found by
descent and by their mark.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from replicas.common.logs import Log
from replicas.linux.cgroups import LIMITS, RunCgroups, find_own
from replicas.supervisor.agent.shim_process import ShimProcess
from replicas.supervisor.wire.orders import PartSpec

log = Log("replicas.agent")


class Containment:
    """The control groups of a run on this node, removed by :meth:`close`.

    :param root: the control group below which they are made; None: this process's own.
    :param lock: descriptor of a lock that shims keep held, if any.
    :param limited: limits of memory and processes will be asked for.
    """

    def __init__(self, run: str, *, root: Path | None = None, lock: int | None = None, limited: bool = False) -> None:
        self._lock = lock
        self._cgroups: RunCgroups | None = None
        self.refused = ""
        """Why memory and processes cannot be limited; empty: they can."""
        try:
            self._cgroups = RunCgroups.make(run, root or find_own(), limited=limited)
        except OSError as error:
            self.refused = error.strerror or str(error)
            log.info("no control groups: %s", self.refused)
        if limited and self._cgroups is not None and (missing := ", ".join(sorted(set(LIMITS) - self._cgroups.limits))):
            self.refused = f"{missing} cannot be handed on by the control group of this process"

    def _place(self, spec: PartSpec, memory_nbytes: int | None, max_processes: int | None) -> PartSpec:
        limited = memory_nbytes is not None or max_processes is not None
        if self._cgroups is None:
            if limited:
                raise OSError(f"limits of memory and processes need control groups: {self.refused}")
            return spec
        name = f"{spec.group}.{spec.replica}.{spec.generation}"
        try:
            path = self._cgroups.add(name, spec.node, memory_nbytes=memory_nbytes, max_processes=max_processes)
        except OSError as error:
            if limited:
                raise
            log.warning("no control group for %s: %s", name, error)
            return spec
        return spec._replace(cgroup=str(path))

    def start(
        self,
        spec: PartSpec,
        changed: Callable[[], None],
        *,
        memory_nbytes: int | None = None,
        max_processes: int | None = None,
    ) -> ShimProcess:
        """Start a shim.

        :raises OSError: the shim, or its control group, cannot be made.
        """
        return ShimProcess(self._place(spec, memory_nbytes, max_processes), changed, self._lock)

    def close(self) -> None:
        """Remove the run's control group, unless processes are still in it."""
        if self._cgroups is not None:
            self._cgroups.close()
            self._cgroups = None

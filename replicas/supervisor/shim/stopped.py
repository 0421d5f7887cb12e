"""A torchrun that is stopped does not see that a rank of it has ended, and nobody else
is told. Standard library only."""

from __future__ import annotations

from replicas.linux.processes import has_zombie, is_stopped

__all__ = ["STOPPED_S", "StoppedWatch"]

STOPPED_S = 5.0
"""How long it may be stopped with a dead rank."""
_LOOK_INTERVAL_S = 0.5


class StoppedWatch:
    """Looks at one process. A stop and a continuation of a child come with SIGCHLD; its
    dead children must be asked for."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._blind_since: float | None = None
        self._look_at: float | None = None

    @property
    def wakes(self) -> list[float]:
        """When to look again."""
        return [] if self._look_at is None else [self._look_at]

    def blind(self, now: float) -> bool:
        """Whether it has been stopped, with a child that is dead, for
        :data:`STOPPED_S`."""
        stopped = is_stopped(self._pid)
        self._look_at = now + _LOOK_INTERVAL_S if stopped else None
        if not stopped or not has_zombie(self._pid):
            self._blind_since = None
            return False
        self._blind_since = now if self._blind_since is None else self._blind_since
        return now - self._blind_since > STOPPED_S

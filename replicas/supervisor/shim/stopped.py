"""Detect a stopped torchrun, which does not see that one of its ranks has ended.

No other process is told of that end. Standard library only.
"""

from __future__ import annotations

from replicas.linux.processes import has_zombie, is_stopped

__all__ = ["STOPPED_S", "StoppedWatch"]

STOPPED_S = 5.0
"""How long torchrun may be stopped with a dead rank, in seconds."""
_LOOK_INTERVAL_S = 0.5


class StoppedWatch:
    """Watches one process for being stopped with a dead child.

    The stop and continuation of a child come with SIGCHLD; its dead children must be
    polled.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._blind_since: float | None = None
        self._look_at: float | None = None

    @property
    def wakes(self) -> list[float]:
        """When :meth:`blind` must be called."""
        return [] if self._look_at is None else [self._look_at]

    def blind(self, now: float) -> bool:
        """True if it has been stopped, with a dead child, for :data:`STOPPED_S`."""
        stopped = is_stopped(self._pid)
        self._look_at = now + _LOOK_INTERVAL_S if stopped else None
        if not stopped or not has_zombie(self._pid):
            self._blind_since = None
            return False
        self._blind_since = now if self._blind_since is None else self._blind_since
        return now - self._blind_since > STOPPED_S

"""Judge a generation's health: the coordinator's view of it against its timeouts.

The clock is the caller's. A :class:`Health` lives as long as one generation.
"""

from __future__ import annotations

from typing import NamedTuple

from replicas.config.structs import HealthConfig
from replicas.core.lives.lifecycle import ReplicaEvent
from replicas.supervisor.fleet.causes import Cause
from replicas.supervisor.fleet.environment import Readiness

__all__ = ["Health", "Sick"]


class Sick(NamedTuple):
    """Why a generation must be ended."""

    event: ReplicaEvent
    cause: Cause


class Health:
    """The health of one generation.

    :ivar view: the coordinator's last view of it.
    :ivar was_ready: it has been ready.
    """

    def __init__(self) -> None:
        self.view: Readiness | None = None
        self.was_ready = False
        self._left = False
        self._unready_at = 0.0

    def became_ready(self) -> None:
        self.was_ready = True
        self._left = False

    def became_unready(self, now: float) -> None:
        self._unready_at = now

    def member_left(self) -> None:
        """Note that a rank has left in order, and is not expected back."""
        self._left = True

    def forgive(self, pause_s: float) -> None:
        """Extend the deadlines by a pause of this process."""
        self._unready_at += pause_s

    def judge(self, config: HealthConfig, *, ready: bool, starting_s: float, now: float) -> Sick | None:
        """What is wrong with it by its last :attr:`view`; None: nothing."""
        view = self.view
        if not ready and not self.was_ready and starting_s > config.start_timeout_s:
            why = f": {view.reason}" if view is not None and view.reason else ""
            text = f"not ready within {config.start_timeout_s:g} s{why}"
            return Sick(ReplicaEvent.START_TIMEOUT, Cause("start_timeout", text))
        if view is None:
            return None
        if view.heartbeat_age_s is not None and view.heartbeat_age_s > config.heartbeat_timeout_s:
            text = f"no heartbeat for {config.heartbeat_timeout_s:g} s"
            return Sick(ReplicaEvent.HEARTBEAT_TIMEOUT, Cause("heartbeat_timeout", text))
        if view.progressed_s is not None and view.progressed_s > config.progress_timeout_s:
            text = f"no progress for {config.progress_timeout_s:g} s"
            return Sick(ReplicaEvent.PROGRESS_TIMEOUT, Cause("progress_timeout", text))
        if view.partial:
            return Sick(ReplicaEvent.LOAD_TIMEOUT, Cause("load_timeout", "it loaded a version only in part"))
        if self._overdue(view, ready) and now - self._unready_at > config.load_deadline_s:
            text = f"not ready again within {config.load_deadline_s:g} s: {view.reason}"
            return Sick(ReplicaEvent.LOAD_TIMEOUT, Cause("load_timeout", text))
        return None

    def _overdue(self, view: Readiness, ready: bool) -> bool:
        """Whether it was ready and must become so again.

        Not when ranks have left, unless others wait for them.
        """
        return not ready and self.was_ready and (not self._left or view.stranded)

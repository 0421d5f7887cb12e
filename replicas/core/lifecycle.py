"""The life of one replica, as a table.

Theory of operation
===================

A replica is in one of the seven states of :data:`replicas.status.ReplicaState`. Two kinds of events move it. Those of
its *processes* (``READY``, ``UNREADY``, the timeouts) say what was seen. Those of its *end* (``FINISHED``, ``RETRY``,
``GIVE_UP``, ``STOPPED``) are given only when the last process of the generation is gone, so that no two generations of
one replica ever run at once; :func:`after_exit` picks the one. An event that the table lacks raises
:class:`InvalidTransition`: a bug of the caller, never a surprise of the world (a caller that may be late asks
:func:`allows` first).

::

    pending ──START──► starting ◄──UNREADY── ready          starting, ready ──timeout, RESTART, STOP──► draining
       ▲                  │  └─────READY──────►│            draining ──RETRY──► backoff   ──STOPPED──► finished
       │                  ├──────FINISHED──────┴─► finished
       │                  ├──────RETRY─────────┴─► backoff ──BACKOFF_ELAPSED──► starting (next generation)
       │                  └──────GIVE_UP───────┴─► failed
       └──RESTART── backoff, failed, finished               pending, backoff ──STOP──► finished

``starting`` is also the state of a running replica that lost readiness; its generation tells a first start from that.
No clock is read here: times are arguments, in seconds of any one monotonic clock.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from replicas.errors import InternalError
from replicas.status import ReplicaState

__all__ = [
    "ALIVE",
    "SETTLED",
    "Event",
    "InvalidTransition",
    "Lifecycle",
    "RestartReason",
    "Transition",
    "after_exit",
    "allows",
    "next_state",
]


class Event(enum.Enum):
    """What can happen to a replica."""

    START = "start"  # its processes are being started for the first time
    READY = "ready"
    UNREADY = "unready"  # it runs, but is not ready any more
    START_TIMEOUT = "start_timeout"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    PROGRESS_TIMEOUT = "progress_timeout"
    LOAD_TIMEOUT = "load_timeout"  # it did not load a committed version in time, or only in part
    RESTART = "restart"  # someone asks for a new generation
    STOP = "stop"  # someone asks for its end
    FINISHED = "finished"  # gone: done by itself, and not to be started again
    RETRY = "retry"  # gone: a new generation follows after a delay
    GIVE_UP = "give_up"  # gone: the restart policy or the budget allows no other generation
    STOPPED = "stopped"  # gone: as asked
    BACKOFF_ELAPSED = "backoff_elapsed"


RestartReason = Literal[
    "exit", "signal", "start_timeout", "heartbeat_timeout", "progress_timeout", "load_timeout", "requested", "lost"
]
"""Why a generation was replaced: the label ``reason`` of ``replicas_restarts_total``. ``lost``: its shim died."""

ALIVE: frozenset[ReplicaState] = frozenset({"starting", "ready", "draining"})
"""States in which processes of the replica may exist."""

SETTLED: frozenset[ReplicaState] = frozenset({"failed", "finished"})
"""States that nothing leaves by itself."""

_RUNNING: dict[Event, ReplicaState] = {
    Event.HEARTBEAT_TIMEOUT: "draining",
    Event.PROGRESS_TIMEOUT: "draining",
    Event.LOAD_TIMEOUT: "draining",
    Event.RESTART: "draining",
    Event.STOP: "draining",
    Event.FINISHED: "finished",
    Event.RETRY: "backoff",
    Event.GIVE_UP: "failed",
}

_TABLE: dict[ReplicaState, dict[Event, ReplicaState]] = {
    "pending": {Event.START: "starting", Event.STOP: "finished", Event.RESTART: "pending"},
    "starting": {**_RUNNING, Event.READY: "ready", Event.START_TIMEOUT: "draining"},
    "ready": {**_RUNNING, Event.UNREADY: "starting"},
    "draining": {
        Event.STOP: "draining",
        Event.RESTART: "draining",
        Event.STOPPED: "finished",
        Event.RETRY: "backoff",
        Event.GIVE_UP: "failed",
    },
    "backoff": {
        Event.BACKOFF_ELAPSED: "starting",
        Event.STOP: "finished",
        Event.RESTART: "pending",
        Event.GIVE_UP: "failed",
    },
    "failed": {Event.RESTART: "pending", Event.STOP: "failed"},
    "finished": {Event.RESTART: "pending", Event.STOP: "finished"},
}


class InvalidTransition(InternalError):
    """An event that cannot happen in the replica's state."""


def next_state(state: ReplicaState, event: Event) -> ReplicaState:
    """The state after ``event``.

    :raises InvalidTransition: when the table has no such row.
    """
    after = _TABLE[state].get(event)
    if after is None:
        possible = ", ".join(known.value for known in _TABLE[state])
        raise InvalidTransition(f"a replica that is {state} cannot take {event.value}; possible: {possible}")
    return after


def allows(state: ReplicaState, event: Event) -> bool:
    """Whether the table has a row for ``event`` in ``state``."""
    return event in _TABLE[state]


def after_exit(
    *,
    ok: bool,
    stopping: bool,
    policy: Literal["always", "on-failure", "never"],
    granted: bool,
    requested: bool = False,
) -> Event:
    """The event for a generation whose last process is gone.

    :param ok: every rank exited with code 0, by itself.
    :param stopping: its end was asked for (stop, scale-down, drain of the run).
    :param policy: the group's restart policy.
    :param granted: the budget allowed a restart (ask it only when :func:`wants_restart` of ``core.budget`` says so).
    :param requested: someone asked for a restart, which neither the policy nor the budget can refuse.
    """
    if stopping:
        return Event.STOPPED
    if requested:
        return Event.RETRY
    if ok and policy != "always":
        return Event.FINISHED
    return Event.RETRY if granted and policy != "never" else Event.GIVE_UP


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a replica's life.

    ``start_s``: seconds from the start of this generation to its first readiness, on the transition that ends them.
    ``recovery_s``: seconds since the replica was last ready, when a later generation becomes ready; else None.
    """

    group: str
    replica: int
    generation: int
    event: Event
    before: ReplicaState
    after: ReplicaState
    reason: str
    start_s: float | None = None
    recovery_s: float | None = None


class Lifecycle:
    """A replica's state with what its status shows of it.

    :param group: name of its group.
    :param replica: its index, from 0.
    :param now: time of creation, in seconds of the clock that all later calls use.
    """

    def __init__(self, group: str, replica: int, *, now: float) -> None:
        self.group = group
        self.replica = replica
        self.state: ReplicaState = "pending"
        self.reason = ""
        self.generation = 0
        self.since = now
        self.restarts: dict[str, int] = {}
        self._started_at = now
        self._lost_at: float | None = None
        self._first_ready = True

    @property
    def name(self) -> str:
        """``group/replica``."""
        return f"{self.group}/{self.replica}"

    @property
    def alive(self) -> bool:
        """Whether processes of it may exist."""
        return self.state in ALIVE

    @property
    def settled(self) -> bool:
        """Whether it stays as it is unless someone asks."""
        return self.state in SETTLED

    def state_age_s(self, now: float) -> float:
        """Seconds in the present state."""
        return max(0.0, now - self.since)

    def starting_s(self, now: float) -> float:
        """Seconds since this generation was started."""
        return max(0.0, now - self._started_at)

    def forgive(self, pause_s: float) -> None:
        """The supervisor itself did not run for ``pause_s``: a start did not take that long."""
        self._started_at += pause_s

    def apply(
        self, event: Event, *, now: float, reason: str = "", restart_reason: RestartReason | None = None
    ) -> Transition:
        """Take one step.

        :param reason: one line for people; kept until the next step that has one (readiness clears it).
        :param restart_reason: with ``RETRY``, the bounded reason that is counted in :attr:`restarts`.
        :raises InvalidTransition: when ``event`` cannot happen now; nothing has changed.
        """
        before = self.state
        after = next_state(before, event)
        start_s = recovery_s = None
        if event in (Event.START, Event.BACKOFF_ELAPSED):
            self.generation += 1
            self._started_at = now
            self._first_ready = True
        elif event is Event.READY:
            start_s, recovery_s = self._became_ready(now)
        elif event is Event.RETRY:
            counted = restart_reason or "exit"
            self.restarts[counted] = self.restarts.get(counted, 0) + 1
        if before == "ready" and after != "ready":
            self._lost_at = now
        if after != before:
            self.since = now
        self.state = after
        if reason or event in (Event.READY, Event.FINISHED):
            self.reason = reason
        return Transition(
            group=self.group,
            replica=self.replica,
            generation=self.generation,
            event=event,
            before=before,
            after=after,
            reason=self.reason,
            start_s=start_s,
            recovery_s=recovery_s,
        )

    def _became_ready(self, now: float) -> tuple[float | None, float | None]:
        lost_at, self._lost_at = self._lost_at, None
        if not self._first_ready:
            return None, None
        self._first_ready = False
        return max(0.0, now - self._started_at), None if lost_at is None else max(0.0, now - lost_at)

"""The life cycle of one replica, as a transition table.

:data:`REPLICA` has the transitions between the states of
:data:`replicas.status.ReplicaState` (diagram in docs/protocol.md). Events of its
*processes* (``READY``, ``UNREADY``, the timeouts) are observations. Those of its *end*
(``FINISHED``, ``RETRY``, ``GIVE_UP``, ``STOPPED``) are given only when the last process
of the generation is gone, so that no two generations of one replica ever run at once;
:func:`after_exit` picks the event.

``starting`` is also the state of a running replica that lost readiness. ``silent``: a
rank is frozen or cut off; the replica becomes ready again when the rank is heard, or
ends by a timeout. ``draining``: the replica is being ended, for any reason. It may
finish its sync first if its end was requested, but not after a fault. It stays draining
while one of its processes does not die, which does not count as a failure.
``finished``: done. ``drained``: stopped on request. ``failed``: it may not be started
again, or its group has failed. A replica of a program that others start is never
restarted from here: after ``LEFT`` it is pending until its program joins again. Times
are arguments, in seconds of any one monotonic clock.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from replicas.common.table import Table
from replicas.status import ReplicaState


class ReplicaEvent(enum.StrEnum):
    """An event of a replica."""

    START = "start"  # its processes are being started for the first time
    ADOPT = "adopt"  # an earlier supervisor started its processes, and they still run
    READY = "ready"
    UNREADY = "unready"  # it runs, but is no longer ready
    SILENT = "silent"  # no message comes from one of its ranks or nodes
    START_TIMEOUT = "start_timeout"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    PROGRESS_TIMEOUT = "progress_timeout"
    LOAD_TIMEOUT = "load_timeout"  # it did not load a committed version in time
    LOAD_FAILED = "load_failed"  # a part of a version may be in its memory
    RESTART = "restart"  # a new generation was requested
    HELD_UP = "held_up"  # its programs have ended, or were killed, but one of its processes takes long to die
    STOP = "stop"  # its end was requested
    GROUP_FAILED = "group_failed"  # another replica has failed, and its group with it
    RESET = "reset"  # an operator says that the cause of its failure is fixed
    FINISHED = "finished"  # gone: done, and not to be started again
    RETRY = "retry"  # gone: a new generation follows after a delay
    GIVE_UP = "give_up"  # gone: the restart policy or the budget allows no other generation
    STOPPED = "stopped"  # gone: on request
    LEFT = "left"  # gone: the program was started by others, who may start it again
    BACKOFF_ELAPSED = "backoff_elapsed"


RestartReason = Literal[
    "exit",
    "signal",
    "start_timeout",
    "heartbeat_timeout",
    "progress_timeout",
    "load_timeout",
    "load_failed",
    "lost",
    "requested",
    "group",
    "reload",
    "node",
]
"""Why a generation was replaced: the label ``reason`` of ``replicas_restarts_total``.

``lost``: its shim died. ``group``: another replica of its group failed, which restarts
as a whole. ``reload``: its config changed. ``node``: its node was lost, its agent died,
or the node is drained.
"""

FREE_REASONS: frozenset[RestartReason] = frozenset({"requested", "group", "reload", "node"})
"""Restarts that no policy or budget refuses, and that spend none of the budget."""

RUNNING: frozenset[ReplicaState] = frozenset({"starting", "ready", "silent"})
"""States of a replica that is not being ended."""

ALIVE: frozenset[ReplicaState] = RUNNING | {"draining"}
"""States in which processes of the replica may exist."""

SETTLED: frozenset[ReplicaState] = frozenset({"failed", "finished", "drained"})
"""States that end only on request."""

_Why = RestartReason | None
_E = ReplicaEvent
_UNHEALTHY = (_E.HEARTBEAT_TIMEOUT, _E.PROGRESS_TIMEOUT, _E.LOAD_TIMEOUT, _E.LOAD_FAILED)
_TO_END = (*_UNHEALTHY, _E.HELD_UP, _E.RESTART, _E.STOP, _E.GROUP_FAILED)
_GONE: dict[ReplicaState, tuple[ReplicaEvent, ...]] = {
    "finished": (_E.FINISHED,),
    "backoff": (_E.RETRY,),
    "failed": (_E.GIVE_UP,),
    "pending": (_E.LEFT,),
}

REPLICA: Table[ReplicaState, ReplicaEvent] = Table(
    "a replica",
    ("pending",),
    {
        "pending": {
            "starting": (_E.START, _E.ADOPT),
            "drained": (_E.STOP,),
            "failed": (_E.GROUP_FAILED,),
            "pending": (_E.RESTART,),
        },
        "starting": {"ready": (_E.READY,), "silent": (_E.SILENT,), "draining": (_E.START_TIMEOUT, *_TO_END), **_GONE},
        "ready": {"starting": (_E.UNREADY,), "silent": (_E.SILENT,), "draining": _TO_END, **_GONE},
        "silent": {"ready": (_E.READY,), "starting": (_E.UNREADY,), "draining": (_E.START_TIMEOUT, *_TO_END), **_GONE},
        "draining": {"draining": (_E.HELD_UP, _E.RESTART, _E.STOP, _E.GROUP_FAILED), "drained": (_E.STOPPED,), **_GONE},
        "backoff": {
            "starting": (_E.BACKOFF_ELAPSED,),
            "drained": (_E.STOP,),
            "failed": (_E.GROUP_FAILED,),
            "pending": (_E.RESTART, _E.RESET),
        },
        "failed": {"pending": (_E.RESTART, _E.RESET), "failed": (_E.STOP,)},
        "drained": {"pending": (_E.RESTART,), "drained": (_E.STOP,)},
        "finished": {"pending": (_E.RESTART,), "finished": (_E.STOP,)},
    },
)


def after_exit(
    *, ok: bool, policy: Literal["always", "on-failure", "never"], granted: bool, requested: bool = False
) -> ReplicaEvent:
    """Return the event for a replica of which the last process of a generation has
    ended.

    That is RETRY (another generation follows), FINISHED or GIVE_UP. It is not for an
    end by ``STOP``, whose event is ``STOPPED``. It changes nothing.

    :param ok: every rank exited with code 0, without a request.
    :param policy: the group's restart policy.
    :param granted: :class:`~replicas.core.lives.restarts.Restarts` allow a restart.
    :param requested: the end was asked for, by a restart of :data:`FREE_REASONS`: such
        a restart is always granted.
    """
    if requested:
        return ReplicaEvent.RETRY
    if ok and policy != "always":
        return ReplicaEvent.FINISHED
    return ReplicaEvent.RETRY if granted and policy != "never" else ReplicaEvent.GIVE_UP


class Transition(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A replica has changed its state.

    ``restart_reason``: with ``RETRY``, the reason counted in
    ``replicas_restarts_total``. ``start_s``: on the first readiness of a generation,
    seconds since its processes were started. ``recovery_s``: when a later generation
    becomes ready, seconds since the replica was last ready. ``nodes``: the node of each
    of its parts, when it starts or is adopted. ``silent_s``: with ``SILENT``, seconds
    since its last message, when the state began. ``resume_s``: with ``RETRY``, seconds
    until the next generation starts.
    """

    group: str
    replica: int
    generation: int
    event: ReplicaEvent
    before: ReplicaState
    after: ReplicaState
    reason: str
    restart_reason: RestartReason | None = None
    start_s: float | None = None
    recovery_s: float | None = None
    nodes: tuple[str, ...] = ()
    silent_s: float | None = None
    resume_s: float | None = None


class Lifecycle:
    """A replica's state, with the times and counters that its status shows."""

    def __init__(self, group: str, replica: int, *, now: float) -> None:
        """Start as ``pending``, before the first generation; start no process.

        :param group: name of the replica's group.
        :param replica: index of the replica in the group.
        :param now: the time, by any one monotonic clock, of which all later times are.
        """
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
        """Name of the replica, as ``group/replica``."""
        return f"{self.group}/{self.replica}"

    @property
    def alive(self) -> bool:
        """True if processes of the replica may exist."""
        return self.state in ALIVE

    @property
    def settled(self) -> bool:
        """True if the replica is failed, finished or drained: only a request can start
        it."""
        return self.state in SETTLED

    def state_age_s(self, now: float) -> float:
        """Return for how many seconds the replica has been in its present state."""
        return max(0.0, now - self.since)

    def starting_s(self, now: float) -> float:
        """Return how many seconds ago the present processes were started or adopted."""
        return max(0.0, now - self._started_at)

    def restore(self, state: Literal["finished", "failed"], reason: str) -> None:
        """Set the state and its reason, as an earlier supervisor has saved them.

        The table is not asked, and times and counters stay as they are.

        :param reason: one line for people.
        """
        self.state, self.reason = state, reason

    def launched(self, now: float) -> None:
        """Let :meth:`starting_s` count from ``now``, when the processes are really
        started."""
        self._started_at = now

    def skip_pause(self, pause_s: float) -> None:
        """Do not count ``pause_s`` seconds, in which the supervisor was suspended, in
        :meth:`starting_s`."""
        self._started_at += pause_s

    def apply(
        self, event: ReplicaEvent, *, now: float, reason: str = "", restart_reason: _Why = None, seconds: float = 0.0
    ) -> Transition:
        """Change the state by the table :data:`REPLICA`, and return the transition to
        report.

        Update the numbers of generations and restarts, and the times. Start and end
        nothing.

        :param now: when the event happened.
        :param reason: one line for people, kept until the next step that has a reason
            or makes the replica ready.
        :param restart_reason: with ``RETRY``, the reason counted in :attr:`restarts`.
        :param seconds: with ``SILENT``, since its last message; with ``RETRY``, until
            the next generation starts.
        :raises replicas.common.table.InvalidStep: ``event`` cannot happen now, and
            nothing has changed.
        """
        before = self.state
        after = REPLICA.next(before, event)
        start_s: float | None = None
        recovery_s: float | None = None
        counted: RestartReason | None = None
        if event in (ReplicaEvent.START, ReplicaEvent.BACKOFF_ELAPSED):
            self.generation += 1
            self._started_at = now
            self._first_ready = True
        elif event is ReplicaEvent.ADOPT:
            self._started_at, self._first_ready = now, False  # how long it took to start is unknown here
        elif event is ReplicaEvent.READY:
            if self._first_ready:
                start_s = max(0.0, now - self._started_at)
                # later readiness of a generation does not count as a recovery
                recovery_s = None if self._lost_at is None else max(0.0, now - self._lost_at)
            self._first_ready, self._lost_at = False, None
        elif event is ReplicaEvent.RETRY:
            counted = restart_reason or "exit"
            self.restarts[counted] = self.restarts.get(counted, 0) + 1
        since = now - seconds if event is ReplicaEvent.SILENT else now
        if before == "ready" and after != "ready":
            self._lost_at = since
        if after != before:
            self.since = since
        self.state = after
        if reason or event in (ReplicaEvent.READY, ReplicaEvent.FINISHED, ReplicaEvent.RESET):
            self.reason = reason
        return Transition(
            group=self.group,
            replica=self.replica,
            generation=self.generation,
            event=event,
            before=before,
            after=after,
            reason=self.reason,
            restart_reason=counted,
            start_s=start_s,
            recovery_s=recovery_s,
            silent_s=seconds if event is ReplicaEvent.SILENT else None,
            resume_s=seconds if event is ReplicaEvent.RETRY else None,
        )

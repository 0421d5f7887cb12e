"""Events of a run as typed structs, the one source of event logs and counters.

The code that makes something happen reports it once, as one of the structs below
(:data:`Event`). :class:`replicas.telemetry.event_log.EventLog` numbers it, writes it as
a line of JSON, counts it (:mod:`replicas.telemetry.tally`) and passes it on. Fields are
only ever added, with a default. Times are seconds since 1970 (``at``) or durations
(``*_s``).
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from replicas.core.base.effects import Event as ChannelEvent
from replicas.core.lives.lifecycle import Transition


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A supervisor has started the run.

    ``resumed``: the previous supervisor died; its counters and budgets are continued.
    """

    run: str
    pid: int
    version: str
    resumed: bool = False


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run is over, and no process of it is left.

    Without this event the supervisor of a run has died, or has detached.
    """

    exit_code: int
    reason: str = ""


DrainReason = Literal["requested", "preempted", "over", "scaled", "reloaded", "restart", "node"]


class Draining(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A drain has begun.

    ``target``: a group, a replica (``group/index``), ``node NAME``, or empty for the
    whole run. ``hurry``: its processes are killed at once.
    """

    target: str
    reason: DrainReason = "requested"
    hurry: bool = False


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A drain is over: no process of ``target`` is left.

    ``target``: as in ``Draining``.
    """

    target: str
    seconds: float


class Scaled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The number of replicas of a group has changed."""

    group: str
    before: int
    after: int


class RestartAsked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An operator or a program has requested a restart.

    ``target``: a group or a replica (``group/index``). ``rolling``: a few at a time.
    """

    target: str
    rolling: bool = False


class FailedReset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Failed replicas start again.

    ``groups``: groups whose restart budget was partly spent and is full again.
    """

    replicas: tuple[str, ...]
    groups: tuple[str, ...] = ()


class Reloaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The config was read again and is in use; the fields name the changed groups."""

    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class ReloadRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The config was read again and refused; nothing has changed."""

    problems: tuple[str, ...]


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one rank.

    ``code``: its exit code; negative: minus the signal that killed it. ``text``: its
    last words. The rank that failed first also has ``lines``, the last ones of its log,
    and ``error``, the traceback that torchelastic wrote, if those lines lack it.
    """

    rank: int
    code: int
    pid: int = 0
    text: str = ""
    lines: tuple[str, ...] = ()
    error: str = ""


class _OfGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the events of one generation of a replica."""

    group: str
    replica: int
    generation: int


class ReplicaExited(_OfGeneration, frozen=True, kw_only=True, tag=True):
    """The programs of one generation of a replica have ended.

    ``ranks``: the ranks that failed, in the order of their failures.
    """

    outcome: Literal["ok", "failed", "stopped", "lost"]
    reason: str = ""
    ranks: tuple[RankEnd, ...] = ()


class HeldUp(_OfGeneration, frozen=True, kw_only=True, tag=True):
    """A replica's start waits for a remnant of its old generation.

    ``what``: GPU memory, or a process that does not die: then ``pid`` names it, and
    ``since`` is when it was killed (seconds since 1970). ``gave_up``: the replica no
    longer waits.
    """

    what: str
    holder: str = ""
    gave_up: bool = False
    pid: int = 0
    since: float = 0.0


class StacksSaved(_OfGeneration, frozen=True, kw_only=True, tag=True):
    """The stacks of a replica's ranks were written to their logs.

    ``reason``: why they were requested.
    """

    reason: str
    path: str = ""


class LogLinesDropped(_OfGeneration, frozen=True, kw_only=True, tag=True):
    """Lines of output are missing from a log.

    ``where``: ``file`` (a full disk, for example) or ``tee`` (a terminal that does not
    keep up).
    """

    count: int
    where: Literal["file", "tee"] = "file"
    reason: str = ""


How = Literal["record", "cgroup", "mark", "identity", "token"]
"""How a leftover was found.

By a shim's record, the shim's control group, its mark, or the state folder's id
(``identity``). Events of earlier versions have ``token`` (the token file's path), too.
"""


class LeftoverFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process that a dead supervisor left behind was found.

    ``how``: by which evidence. ``swept``: it is gone now.
    """

    pid: int
    start_time: int
    command: str
    how: How
    group: str = ""
    replica: int = -1
    generation: int = 0
    swept: bool = True


class NodeChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A node of the run has joined, is away, or is lost.

    ``before``, ``after``: states of a node, as in its status; ``drained``: its agent
    has left after a drain.
    """

    node: str
    before: str
    after: str
    reason: str = ""
    address: str = ""


TokenChange = Literal["made", "rotated", "revoked"]


class TokenChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The valid join tokens of a role have changed. No event has a token itself.

    ``change``: the run began with a new token (``made``), a new one is valid beside the
    previous one (``rotated``), or the previous one is no longer valid (``revoked``).
    """

    role: Literal["member", "operator"]
    change: TokenChange


class StateSetAside(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A state file could not be read and was moved to ``path``.

    Restart budgets and counters start at zero.
    """

    path: str
    reason: str


class LeasesAwaited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Starts wait, as no state file says which processes an earlier supervisor left.

    They wait until the agents of ``nodes`` have joined and reported their processes, at
    most for ``seconds``, when their leases are over; an empty name: the node is
    unknown.
    """

    nodes: tuple[str, ...]
    seconds: float


class ConnectionsRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The control port refused connections and messages since the last such event.

    ``count``: number of them.
    """

    reason: str
    count: int


class EventsLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Events before this one could not be written to disk; ``count``: how many.

    Metrics counted them, and followers saw them.
    """

    count: int
    reason: str


Event = (
    ChannelEvent
    | Transition
    | RunStarted
    | RunEnded
    | Draining
    | Drained
    | Scaled
    | RestartAsked
    | FailedReset
    | Reloaded
    | ReloadRefused
    | ReplicaExited
    | HeldUp
    | StacksSaved
    | LogLinesDropped
    | LeasesAwaited
    | LeftoverFound
    | NodeChanged
    | TokenChanged
    | StateSetAside
    | ConnectionsRefused
    | EventsLost
)


TYPES = tuple(sorted(kind.__name__ for kind in get_args(Event)))
"""The names of all types of events."""


class Record(msgspec.Struct, frozen=True):
    """One event with the time of day and its number.

    Numbers strictly grow over all supervisors of a run.
    """

    seq: int
    at: float
    event: Event


encode = msgspec.json.Encoder().encode
"""Encode a record as one line of JSON, without the line break."""
decode = msgspec.json.Decoder(Record).decode
"""Decode a line; msgspec.DecodeError if this version does not know the record."""

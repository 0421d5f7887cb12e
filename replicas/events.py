"""What happens in a run, as typed values: the one stream from which logs for machines and all counters are made.

Whoever makes something happen says it once, as one of the structs below (:data:`Event`); :class:`replicas.event_log.EventLog`
numbers it, writes it down as a line of JSON, counts it (:mod:`replicas.tally`) and passes it on. Fields are only ever
added, with a default. Times are seconds since 1970 (``at``) or durations (``*_s``).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from replicas.core.effects import Event as ChannelEvent
from replicas.core.lifecycle import Transition

__all__ = [
    "ChannelEvent",
    "ConnectionsRefused",
    "Drained",
    "Draining",
    "Event",
    "EventsLost",
    "FailedReset",
    "HeldUp",
    "How",
    "LeftoverFound",
    "LogLinesDropped",
    "RankEnd",
    "Record",
    "ReloadRefused",
    "Reloaded",
    "ReplicaExited",
    "RestartAsked",
    "RunEnded",
    "RunStarted",
    "Scaled",
    "StacksSaved",
    "StateSetAside",
    "Transition",
    "decode",
    "encode",
]


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A supervisor has taken the run. ``resumed``: the one before died, and its counters and budgets go on."""

    run: str
    pid: int
    version: str
    resumed: bool = False


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No process of the run is left. A run without it was ended by the death of its supervisor."""

    exit_code: int
    reason: str = ""


class Draining(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``target``: a group, a replica (``group/index``), or empty for the whole run."""

    target: str
    reason: Literal["requested", "preempted", "over", "scaled", "reloaded", "restart"] = "requested"
    hurry: bool = False


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    target: str
    seconds: float


class Scaled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    group: str
    before: int
    after: int


class RestartAsked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``target``: a group or a replica. ``rolling``: a few at a time."""

    target: str
    rolling: bool = False


class FailedReset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Replicas that had failed begin anew. ``groups``: those that have a full budget again, of which something was spent."""

    replicas: tuple[str, ...]
    groups: tuple[str, ...] = ()


class Reloaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A config was read anew and is in use: names of the groups that it changed."""

    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class ReloadRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A config was read anew and changes nothing."""

    problems: tuple[str, ...]


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """``code``: exit code; negative: minus the signal that killed it. ``text``: its last words.

    The rank that failed first also has ``lines``, the last ones of its log, and ``error``, the traceback that torchelastic
    wrote, where those lines do not have it.
    """

    rank: int
    code: int
    pid: int = 0
    text: str = ""
    lines: tuple[str, ...] = ()
    error: str = ""


class ReplicaExited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The programs of a generation have ended. ``ranks``: those that failed, the first to fail first."""

    group: str
    replica: int
    generation: int
    outcome: Literal["ok", "failed", "stopped", "lost"]
    reason: str = ""
    ranks: tuple[RankEnd, ...] = ()


class HeldUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A replica waits for something that its old generation had (a port, a segment, GPU memory), or for the end of a process
    of it, with its ``pid``, that was killed at ``since`` (seconds since 1970). ``gave_up``: it is waited for no longer.
    """

    group: str
    replica: int
    generation: int
    what: str
    holder: str = ""
    gave_up: bool = False
    pid: int = 0
    since: float = 0.0


class StacksSaved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the ranks of a replica were doing is in their logs. ``reason``: why it was asked."""

    group: str
    replica: int
    generation: int
    reason: str
    path: str = ""


class LogLinesDropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``where``: ``file`` (such as a full disk) or ``tee`` (a terminal that does not keep up)."""

    group: str
    replica: int
    generation: int
    count: int
    where: Literal["file", "tee"] = "file"
    reason: str = ""


How = Literal["record", "cgroup", "mark", "identity", "token"]
"""By what a leftover was found: a shim's record, the control group of one, its mark, the id of the state folder. Earlier
versions went by the path of the token file, and their events say so."""


class LeftoverFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process of a dead supervisor's run. ``swept`` False: it is still there."""

    pid: int
    start_time: int
    command: str
    how: How
    group: str = ""
    replica: int = -1
    generation: int = 0
    swept: bool = True


class StateSetAside(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A state file could not be understood, and was moved to ``path``: budgets and counters begin anew."""

    path: str
    reason: str


class ConnectionsRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """So many connections and messages were turned away at the control port since the last such event."""

    reason: str
    count: int


class EventsLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The disk did not take ``count`` events before this one. They were counted and told all the same."""

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
    | LeftoverFound
    | StateSetAside
    | ConnectionsRefused
    | EventsLost
)


class Record(msgspec.Struct, frozen=True):
    """One event with its number, which strictly grows over all supervisors of a run, and the time of day."""

    seq: int
    at: float
    event: Event


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """The record as one line of JSON, without its end."""
    return _encoder.encode(record)


def decode(line: bytes) -> Record:
    """:raises msgspec.DecodeError: it is not a record of this version."""
    return _decoder.decode(line)

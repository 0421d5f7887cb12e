"""The status of a run: the JSON of ``GET /status``, also the source of all metrics.

``replicas status --json`` prints it. Ages and durations are in seconds, sizes in bytes.
Fields are only ever added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

__all__ = [
    "ChannelStatus",
    "GroupStatus",
    "MemberStatus",
    "NodeStatus",
    "OnFailure",
    "PublishStatus",
    "ReplicaState",
    "ReplicaStatus",
    "RunStatus",
    "StoreStatus",
    "SyncRecord",
]

OnFailure = Literal["run", "group", "replica"]
"""The end after a replica's final failure: of the run, its group, or it alone."""

ReplicaState = Literal["pending", "starting", "ready", "silent", "draining", "backoff", "failed", "finished", "drained"]
"""State of a replica.

``silent``: no message has come from a rank, or from its node, since ``state_age_s``.
``finished``: its program is done. ``drained``: it was stopped before, by an operator or
with the run.
"""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    ``reason``: why it is not ready, how it last ended, or that it is ready without any
    version. ``pid``: of its main program; ``pids``: of its ranks on channels, by rank,
    each on its own node. ``versions``: the loaded version by channel (targets only).
    ``cycles``: failed generations in a row that reached no new step or version; 0 once
    the present one has. ``nodes``: the node of each of its parts. ``step``: the newest
    that its program reported. By channel: ``lag_s``, for how long a version has been
    committed that it has not loaded; ``open_s``, for how long it has had an update
    open; ``slots``, how many versions a rank holds; ``received_nbytes``, bytes sent to
    it. ``lived_s``: since the start of its processes. ``left_s``: until its state ends
    at the latest, by a restart, a start timeout, or SIGKILL; None if it has no such
    end.
    """

    name: str
    group: str
    replica: int
    state: ReplicaState
    generation: int
    reason: str = ""
    pid: int | None = None
    restarts: int = 0
    state_age_s: float = 0.0
    heartbeat_age_s: float | None = None
    versions: dict[str, int] = {}
    last_exit: str = ""
    cycles: int = 0
    nodes: tuple[str, ...] = ()
    pids: dict[int, int] = {}
    step: int | None = None
    lag_s: dict[str, float] = {}
    open_s: dict[str, float] = {}
    slots: dict[str, int] = {}
    received_nbytes: dict[str, int] = {}
    lived_s: float = 0.0
    left_s: float | None = None


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One group.

    ``size``: the expected number of replicas. An external group may have more; programs
    that start them may take it as a hint. ``restarts``: restarts so far by reason.
    ``restart_budget_remaining_ratio``: the share of the restart budget that is left,
    from 1 to 0. ``no_progress_remaining_ratio``: the share that every replica has left
    of ``no_progress_cycles`` generations in a row without progress (0: no such rule),
    from 1 to 0. ``on_failure``: scope of the end when one of them is spent.
    ``min_ready``: the number of ready replicas that makes the group ready; None: all.
    """

    name: str
    launcher: str
    world_size: int
    replicas: tuple[ReplicaStatus, ...]
    size: int = 0
    restarts: dict[str, int] = {}
    restart_budget_remaining_ratio: float = 1.0
    no_progress_cycles: int = 0
    no_progress_remaining_ratio: float = 1.0
    on_failure: OnFailure = "run"
    min_ready: int | None = None


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One member of a channel.

    ``note``: why it is behind. ``host``: number of its host on the
    channel; members with the same number share memory. 0 if it is not known yet.
    """

    name: str
    state: Literal["joining", "live", "behind", "observing", "gone"]
    note: str = ""
    role: str
    host: int = 0
    loaded: int = 0
    held: tuple[int, ...] = ()
    heartbeat_age_s: float = 0.0
    info: dict[str, str] = {}


WAIT_S = 2.0
"""A wait of more seconds is named in the log and the headline."""
PHASES = ("begin", "wait", "pack", "queue", "form", "map", "transfer", "verify", "acknowledge", "commit")
"""Phases of a publish in the order in which they begin."""


class SyncRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished publish.

    ``outcome``: ``committed``, or the name of an error in snake case. ``nbytes``: size
    of the version. ``moved_nbytes``: bytes sent to members over the network for it;
    bytes mapped on one host are not sent. ``moved_to``: the same by replica
    (``group/replica``). ``pulled``: the same by the member that pulled and the member
    that served. ``lost``: members that did not get the version, and ``reasons`` why.
    ``phases``: seconds by phase. ``publisher``: the replica that published. ``held``:
    seconds until all ranks of a replica held the version, of the slowest replicas
    alone, the slowest first. ``slowest``: the last target that the publish waited for,
    until that held the version or was left out. ``error``: why it failed. ``step``:
    ``meta["step"]``. ``trace``: the W3C ``traceparent`` of the caller of ``publish``.
    """

    version: int
    outcome: str
    seconds: float
    nbytes: int
    moved_nbytes: int = 0
    moved_to: dict[str, int] = {}
    pulled: dict[str, dict[str, int]] = {}
    phases: dict[str, float] = {}
    members: int = 0
    lost: tuple[str, ...] = ()
    publisher: str = ""
    held: dict[str, float] = {}
    slowest: str = ""
    reasons: dict[str, str] = {}
    error: str = ""
    step: float | None = None
    trace: str = ""


class PublishStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One publish that is under way.

    ``state``: it is ``packing`` on its ranks, ``queued`` behind another version, or
    ``moving`` to its targets. ``seconds``: since it began; ``left_s``: until its
    deadline. ``waits_for``: the members that it waits for, up to 16 of them;
    ``waiting``: how many there are. ``kept``: the version that they keep in the memory
    of the publisher, which has no slot free; 0: it waits for something else.
    """

    version: int
    publisher: str
    state: Literal["packing", "queued", "moving"]
    seconds: float
    waits_for: tuple[str, ...] = ()
    waiting: int = 0
    left_s: float = 0.0
    kept: int = 0

    @property
    def waits(self) -> str:
        """The members that the publish waits for, as the text after "waits ", such as
        "for rollout/0/0 and 2 more to release version 5"; empty if it waits for
        none."""
        more = f" and {self.waiting - 1} more" if self.waiting > 1 else ""
        kept = f" to release version {self.kept}" if self.kept else ""
        return f"for {self.waits_for[0]}{more}{kept}" if self.waits_for else ""


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A lease, which keeps a version.

    ``until``: its end in seconds since 1970; 0: it has none. ``holder``: the member
    that asked for it, with whose loss it ends; empty: a person did.
    """

    name: str
    version: int
    until: float = 0.0
    holder: str = ""


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One committed version.

    ``step``: its ``meta["step"]``. ``at``: when it was committed, in seconds since
    1970; 0: unknown. ``content_of``: the older version whose bytes it has; 0: its own.
    ``rejected``: why it is never served. ``scores``: means of the reports. ``held``:
    number of members that have its bytes; ``serving``: replicas that serve it.
    """

    number: int
    step: float | None = None
    at: float = 0.0
    nbytes: int = 0
    digest: str = ""
    content_of: int = 0
    labels: tuple[str, ...] = ()
    leases: tuple[LeaseStatus, ...] = ()
    rejected: str = ""
    scores: dict[str, float] = {}
    held: int = 0
    serving: tuple[str, ...] = ()


class ChannelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One channel.

    ``syncs``, ``operations``: publishes and collectives so far by outcome. ``retries``:
    repeated transfers by reason. ``bytes_total``: bytes sent to members so far.
    ``wrong_total``: how often so far a holder served wrong bytes. ``step``:
    ``meta["step"]`` of the newest version, if its publisher gave one. ``step_before``:
    the higher step of an earlier version; None if steps have grown. ``committed_at``:
    when the newest version was committed, in seconds since 1970; None if unknown.
    ``version_nbytes``: its size. ``slots``: slots of each member. ``served``: how many
    ready replicas serve each version. ``mixed_since``: since when they have served
    different ones, as ``committed_at``; None if they serve one, or none.
    ``adopt_together``: as in the config. ``sources``, ``targets``, ``peers``: groups
    that have these roles. ``under_way``: publishes that have not ended.
    ``archive``: the group that archives its versions, of whose replica ``versions`` has
    the one that was archived last; "": none.
    ``follow``: as in the config; ``current``: the version that targets load;
    ``versions``: those that are known, the newest first;
    ``canary``: replicas that load the candidate; ``canary_share``: the share of the
    requests that they are to get, from 0 to 1; 0: as many as others.
    ``disk_problem``: why a decision cannot be written to disk, and waits. ``waits``:
    the text after "waits ..." for all its publishes and joins; ``left_s``: for at most
    so many seconds.
    """

    name: str
    epoch: int
    committed_version: int
    digest: str
    members: tuple[MemberStatus, ...]
    syncs: dict[str, int] = {}
    retries: dict[str, int] = {}
    bytes_total: int = 0
    wrong_total: int = 0
    operations: dict[str, int] = {}
    last_sync: SyncRecord | None = None
    step: float | None = None
    step_before: float | None = None
    committed_at: float | None = None
    version_nbytes: int = 0
    slots: int = 0
    served: dict[int, int] = {}
    mixed_since: float | None = None
    adopt_together: bool = False
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    under_way: tuple[PublishStatus, ...] = ()
    archive: str = ""
    follow: str = "newest"
    current: int = 0
    versions: tuple[VersionStatus, ...] = ()
    canary: tuple[str, ...] = ()
    canary_share: float = 0.0
    disk_problem: str = ""
    waits: str = ""
    left_s: float | None = None


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The rendezvous store."""

    up: bool
    host: str
    port: int
    keys: int = 0


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, or a share of one, on which replicas run.

    ``state``: ``up``; ``draining``, up but for no new replicas; ``away``, its agent is
    not connected; ``lost``, its replicas start elsewhere. ``local``: the supervisor's
    own. ``replicas``: names of those that have a part there. ``heard_age_s``: since the
    last message of its agent.
    """

    name: str
    state: Literal["up", "draining", "away", "lost"]
    local: bool = False
    address: str = ""
    labels: Mapping[str, str] = {}
    gpus: int = 0
    gpus_free: int = 0
    cpus: int = 0
    memory_nbytes: int = 0
    replicas: tuple[str, ...] = ()
    heard_age_s: float = 0.0
    release: str = ""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run.

    ``refused``: connections and messages that the control port refused, by reason.
    ``exit_code``: once it is over, and for as long as its supervisor still answers;
    ``ended_by``: why it is over. ``newest_event``: number of its newest event.
    ``adopt_s``: for how long its replicas run without a supervisor; 0: not at all.
    """

    run: str
    version: str
    endpoint: str
    pid: int
    uptime_s: float
    ready: bool
    draining: bool = False
    store: StoreStatus
    groups: tuple[GroupStatus, ...] = ()
    channels: tuple[ChannelStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    event_loop_lag_s: float = 0.0
    sidecar_replacements: dict[str, int] = {}
    refused: dict[str, int] = {}
    state_dir: str = ""
    exit_code: int | None = None
    ended_by: str = ""
    newest_event: int = 0
    adopt_s: float = 0.0

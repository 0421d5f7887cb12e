"""The config of a run as frozen structs, which are also the schema of its TOML file.

The structs have resolved values (durations in seconds, defaults filled in, names
checked). A documented field is a key of the file, by its type
(:mod:`replicas.config.tables`); a ``ClassVar`` is a key from which other fields are
resolved. Docstrings say what a key sets and when to set it; the reference quotes them.
:func:`replicas.config.file.load` reads a file and :func:`replicas.config.file.parse` a
mapping.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from replicas.config import values as forms
from replicas.config.archive import ArchiveConfig
from replicas.config.canary import CanaryConfig
from replicas.config.dependency import Dependency, dependencies
from replicas.config.job import SlurmConfig
from replicas.config.tables import AsKey
from replicas.config.values import Form
from replicas.messages.bounds import LEASE_MIN_S, REPLICAS_MAX
from replicas.status import OnFailure

_Count = Annotated[int, forms.whole(1)]
_Duration = Annotated[float, forms.duration()]
_DurationOr0 = Annotated[float, forms.duration(zero=True)]
_File = Annotated[Path, forms.path("file")]
_Folder = Annotated[Path, forms.folder]
_Name = Annotated[str, forms.name]
_Natural = Annotated[int, forms.whole(0)]
_LogSize = Annotated[int, forms.size(4096)]
_ROLES = 'list of group names, or of { group = "NAME", ranks = "..." }'


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[_Name, AsKey(stand_in="unnamed")]
    """The name of the run, in its state folder, metrics and logs."""
    stop_when: Annotated[tuple[str, ...], forms.names] = ()
    """The run is over when these groups have finished; without any, when all groups
    have. Set it when the other groups, such as rollouts, serve until they are stopped.
    """
    state_dir: Annotated[_Folder, AsKey(default='".replicas/NAME" beside the config file')]
    """The folder of the run's logs, lock, token, events and decision log. Set it when
    the folder of the config file is read-only, shared or slow.
    """
    events_max_nbytes: Annotated[_LogSize, AsKey(name="events_max_size")] = 64 << 20
    """The file of events is rotated at this size."""
    adopt_s: _DurationOr0 = 0.0
    """Time for which replicas run on without a supervisor, until a new one takes them
    over; 0 ends them with it. Set it to upgrade or replace the supervisor while the run
    continues.
    """


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    local: Annotated[bool, forms.flag] = True
    """The supervisor's own machine is a node on which replicas run. Set false where
    agents are started on each machine, this one included, or on others only.
    """
    labels: Annotated[dict[str, str], forms.labels] = {}
    """Labels of the supervisor's own machine as a node, for groups.NAME.placement."""
    min_nodes: _Natural = 0
    """Number of nodes, this machine among them, that must have joined before the first
    replicas start. Set it when several agents are started with the run, so that the
    first one does not get all replicas.
    """
    join_timeout_s: _Duration = 900.0
    """The run fails when fewer than min_nodes nodes are joined for this time while
    replicas wait for them. Raise it when machines come later, such as from a queue.
    """
    lease_s: Annotated[float, AsKey(name="lease"), forms.duration(2.0)] = 10.0
    """A node that is silent for this time is lost: its agent ends the replicas there,
    and then they start elsewhere. Raise it if your network can be interrupted for
    longer.
    """
    carry_port: Annotated[int, forms.port] = 0
    """Machines pull weights from each other at this port, or at one of the 63 after it
    if several processes of a machine serve them; 0 for any free port. Set it when a
    firewall opens fixed ports, best below 32768.
    """


class LogsConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_nbytes: Annotated[_LogSize, AsKey(name="max_size")] = 64 << 20
    """The log of a rank is rotated at this size."""
    keep: _Natural = 3
    """Number of rotated files kept of each rank's log."""
    keep_generations: _Count = 10
    """Number of a replica's generations whose logs are kept, the present one included.
    """
    tee: Literal["auto", "always", "never"] = "auto"
    """The lines of all ranks go to the supervisor's stderr, too ("auto": when it is a
    terminal). Set "always" if a collector, such as journald or Kubernetes, reads the
    supervisor's output.
    """


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    bind: Annotated[str, forms.address] = "127.0.0.1"
    """Address or host name at which the rendezvous store listens. Members of a process
    group connect to it here. Set it when a channel forms groups (peers, ``transport =
    "group"``, slots on GPUs) and ranks run on other machines.
    """
    port: Annotated[int, forms.port] = 0
    """The store listens on this port; 0 for any free port. Set it when a firewall opens
    fixed ports.
    """


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True):
    listen: ClassVar[Annotated[str, forms.listen, AsKey(default='"127.0.0.1:9477", or a free port if that is in use')]]
    """Address for the sessions of members, the HTTP API and the metrics; port 0 for any
    free port. Set the host when ranks run on other machines, the port when other
    programs, such as a Prometheus, must know it.
    """
    host: str = "127.0.0.1"
    port: int | None = None
    tls: Literal["auto", "on", "off"] = "auto"
    """The control port speaks TLS; "auto": unless it is on loopback. Set "off" when the
    network itself encrypts and authenticates, such as a mesh.
    """
    certificate: Annotated[_File | None, AsKey(default="none: each state folder has one of its own")] = None
    """The certificate of the control port for TLS, in PEM, with its intermediate ones.
    Set it when members should verify the port by a CA, not by its key.
    """
    key: Annotated[_File | None, AsKey(default="none: it is in the file of certificate")] = None
    """The key of certificate, in PEM, without a password."""
    token_file: Annotated[_File | None, AsKey(default="none: each run makes a token of its own")] = None
    """The member token is read from this file. Set it when external programs need the
    token before the supervisor has started, such as from a Kubernetes Secret
    (`replicas token --make`).
    """
    operator_token_file: Annotated[_File | None, AsKey(default="none: each run makes a token of its own")] = None
    """The operator token is read from this file. Set it when other users than the run's
    give orders over TCP, and need the token before the supervisor has started.
    """
    socket: Annotated[_File | None, AsKey(default='"control.sock" in the state folder')] = None
    """The Unix socket on which the commands of the same user reach the run, of at most
    107 bytes.
    """

    @property
    def token_files(self) -> dict[Literal["member", "operator"], Path]:
        """The files of tokens that the config names, by role; a role without one is
        left out."""
        found: dict[Literal["member", "operator"], Path] = {}
        if self.token_file is not None:
            found["member"] = self.token_file
        if self.operator_token_file is not None:
            found["operator"] = self.operator_token_file
        return found


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True):
    policy: Literal["always", "on-failure", "never"] = "on-failure"
    """A replica that ends is started again always, after a failure, or never. With
    "always" its group never counts as finished.
    """
    max_restarts: _Natural = 5
    """Number of restarts of the group within window; a failure beyond them is final."""
    window_s: _Duration = 600.0
    """Time for which a restart counts; a replica that ran as long begins with
    initial_delay again.
    """
    initial_delay_s: _DurationOr0 = 1.0
    """Delay of a replica's first restart; each further one within window waits twice as
    long.
    """
    max_delay_s: _DurationOr0 = 60.0
    """Longest delay of a restart."""
    strategy: Literal["replica", "group"] = "replica"
    """A failure restarts the replica that failed, or all replicas of its group. Set
    "group" when the replicas of the group depend on each other's state.
    """
    no_progress_cycles: _Natural = 3
    """Number of failures in a row without a new step or version that make a failure
    final; 0 disables this. Raise it when a replica may fail often before its first
    step; set 0 when the budget alone should decide.
    """


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True):
    start_timeout_s: _Duration = 300.0
    """A replica that is not ready within this time of its start is restarted. Raise it
    when loading a model, or compiling it, takes longer.
    """
    heartbeat_timeout_s: Annotated[float, forms.duration(LEASE_MIN_S)] = 30.0
    """A replica is restarted when a member of it sends no heartbeat for this time."""
    progress_timeout_s: _Duration = 900.0
    """A replica that makes no progress for this time, while it should, is restarted.
    Raise it when one step takes longer.
    """
    load_deadline_s: _Duration = 300.0
    """Restart a replica that stopped being ready and has not become ready again within
    this time.
    """


class ResourcesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Resources and limits of a group's processes; None sets no limit."""

    gpus: Annotated[_Natural | None, AsKey(default="all GPUs; none in a run in which another group asks for some")] = (
        None
    )
    """Number of GPUs of each rank, given by CUDA_VISIBLE_DEVICES, none to two ranks.
    Set it for every group that uses GPUs when several share a machine.
    """
    cpu_threads: _Count | None = None
    """Number of compute threads of each rank, set as OMP_NUM_THREADS. If agents may
    join, a node must have as many CPUs for each of nproc_per_node ranks.
    """
    memory_nbytes: Annotated[int | None, forms.size(1 << 20), AsKey(default="no limit", name="memory")] = None
    """Host memory that a replica may use, limited by a control group. Set it when one
    replica's leak must not end the others.
    """
    max_processes: Annotated[_Count | None, AsKey(default="no limit")] = None
    """Number of processes and threads of a replica, limited by a control group."""


class PlacementConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of nodes for the replicas of a group."""

    labels: Annotated[dict[str, str], forms.labels] = {}
    """Replicas run only on nodes that have all these labels."""
    spread: Annotated[bool, forms.flag] = False
    """Replicas are spread over the nodes, so that the loss of a node ends few of them;
    otherwise they are packed, so that large replicas find room.
    """
    per_node: Annotated[_Count | None, AsKey(default="any number")] = None
    """Most replicas of the group, or nodes of them with nnodes, on one machine. Set it
    when each needs a whole machine that no number of GPUs implies.
    """


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A group; ``env`` includes the variables of ``env_file``. ``added``: by a key of a
    channel; then no run waits for its end."""

    name: str
    added: bool = False
    replicas: Annotated[int, forms.whole(1, REPLICAS_MAX)] = 1
    """Number of replicas of the group."""
    nproc_per_node: _Count = 1
    """Number of ranks of a replica on each of its nodes."""
    nnodes: _Count = 1
    """Number of nodes of a replica, each a process tree of its own; 1 with launcher =
    "exec".
    """
    command: Annotated[
        tuple[str, ...], forms.command, AsKey(default='required, except with launcher = "external"')
    ] = ()
    """A rank's program and its arguments: a ".py" file, "-m" and a module, or an
    executable.
    """
    launcher: Literal["torchrun", "exec", "external"] = "torchrun"
    """Whether torchrun starts the ranks of a replica, the program is executed once, as
    it is, or others start it ("external"). Set "exec" for a program that is one process
    or starts its own, such as an inference server; "external" where Kubernetes, Ray or
    a script starts and restarts the programs, which are then only counted, shown and
    made ready when they join.
    """
    preload: Annotated[tuple[str, ...], forms.modules] = ()
    """Modules that a process of the node loads once, from which the group's processes
    are forked. Set it when loading them is what a restart waits for.
    """
    depends_on: Annotated[tuple[Dependency, ...], dependencies] = ()
    """The group starts when each replica of these groups is ready or finished, or with
    :finished has finished. Set "GROUP:finished" for a group that prepares data or
    weights.
    """
    restart: RestartConfig = RestartConfig()
    """When a replica that has ended is started again."""
    health: HealthConfig = HealthConfig()
    """When a living replica counts as stuck."""
    resources: ResourcesConfig = ResourcesConfig()
    """Resources and limits of the group's processes."""
    placement: PlacementConfig = PlacementConfig()
    """The nodes for its replicas, if agents offer several."""
    env: Annotated[dict[str, str], forms.environment] = {}
    """Environment variables of the group's processes, over those of env_file."""
    env_file: _File | None = None
    """A file of NAME=value lines with environment variables. Set it for secrets, which
    a config should not have.
    """
    cwd: Annotated[_Folder, AsKey(default="the folder of the config file")]
    """The working folder of the group's processes."""
    drain_timeout_s: _DurationOr0 = 30.0
    """Time in which a replica that is being ended may finish its sync before SIGTERM.
    Set 0 to send SIGTERM immediately.
    """
    stop_timeout_s: _Duration = 10.0
    """Time from SIGTERM to SIGKILL of a replica that is being ended. Raise it when it
    saves a checkpoint then: a run at whose end a replica was killed exits with 4.
    """
    max_unavailable: _Count = 1
    """Number of replicas that a rolling restart ends at a time, at most."""
    on_failure: Annotated[
        OnFailure, AsKey(default='"run"; "replica" for a group that is only a target of channels')
    ] = "run"
    """What ends when a replica of the group has failed for good: the run, the group, or
    the replica alone. Set it when a replica is more, or less, important than the
    default says.
    """
    min_ready: Annotated[
        _Natural | None, AsKey(default='all, for ready; to run on: 1 for a target with on_failure = "replica", else 0')
    ] = None
    """Number of ready replicas that make the group ready; when fewer are left, the run
    ends. Set it when the run is useful with some replicas missing; 0 when it is useful
    without the group.
    """

    @property
    def world_size(self) -> int:
        """Number of ranks of a replica, on all its nodes."""
        return self.nproc_per_node * self.nnodes

    @property
    def external(self) -> bool:
        """Return True if programs outside the run start and restart its ranks."""
        return self.launcher == "external"


class ChannelRole(msgspec.Struct, frozen=True):
    """A group's role in a channel.

    ``ranks``: the ranks that transfer bytes, the same for all peers of a channel.
    """

    group: _Name
    """The group."""
    ranks: Literal["leader", "each", "all"]
    """The ranks of it that transfer bytes."""


def _parties(ranks: str) -> Form:
    """Return a form that accepts any value: groups are read later, when the key
    ``ranks`` of the channel is known.

    :param ranks: the allowed ranks in words, for the reference.
    """
    return Form(lambda _, value: value, _ROLES, ranks)


class ChannelConfig(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sources: Annotated[tuple[ChannelRole, ...], _parties('ranks "leader" (default) or "all"')] = ()
    """The groups that publish versions. ``ranks``: rank 0 of a replica publishes the
    whole ("leader"), or each rank its part ("all"). Or { archive = "URL", key = "...",
    env_file = "..." }: a replica of the group NAME-from-archive publishes its versions.
    """
    targets: Annotated[tuple[ChannelRole, ...], _parties('ranks "leader" or "all" (default)')] = ()
    """The groups that receive versions. ``ranks``: rank 0 of a replica loads them, or
    all ranks do.
    """
    peers: Annotated[tuple[ChannelRole, ...], _parties('ranks "leader" (default), "each" or "all"')] = ()
    """The groups that run collectives with each other, in place of sources and targets.
    ``ranks``: rank 0 of each replica takes part ("leader"), all ranks of all replicas
    do ("all"), or ranks of equal number among themselves ("each"). Set it for an outer
    optimizer, or other collectives across replicas.
    """
    ranks: ClassVar[Annotated[Literal["leader", "each", "all"], AsKey(default='"leader"')]]
    """The ranks that take part, for all peers without ``ranks``. Set it for a channel
    with peers.
    """
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """The process groups of the channel use this backend ("auto": NCCL where all
    members have it, else Gloo). Set "nccl" when a fallback to Gloo should be an error.
    """
    transport: Literal["auto", "tcp", "group"] = "auto"
    """Weights go through mapped memory within a host, and between hosts over TCP, from
    host to host; with slots on GPUs through a process group where one works ("auto"),
    or never ("tcp"). Or all through process groups first ("group"): set it when
    processes of one host must not read each other's memory.
    """
    deadline_s: _Duration = 60.0
    """Longest time of a sync or an operation, unless the call sets another. Raise it
    when the network needs longer for the weights.
    """
    on_lost: Literal["drop", "raise"] = "drop"
    """When a target is lost during a sync, the version commits over those left, or the
    publish fails. Set "raise" when every target must have every version.
    """
    slots: _Count = 2
    """Number of versions that each rank has memory for; with sources at least 2. Raise
    it when a slow target should keep its version while newer ones come.
    """
    min_targets: _Natural = 0
    """Number of target replicas that a version waits for, and that must hold it to
    commit. Set 1 when a version must outlive its source.
    """
    adopt_together: Annotated[bool, forms.flag] = False
    """Targets load a version when all of them hold it and have reported that they can
    load it; if one refuses it, none does. A target that is silent until the deadline is
    not waited for, and not ready until it has loaded it. Set it when requests must not
    be answered by two versions for longer than a load takes.
    """
    follow: Literal["newest", "promoted"] = "newest"
    """Targets load each committed version, or those that are promoted: by an order, or
    by the rules of canary. Set "promoted" when somebody should decide what is served;
    with slots of at least 3.
    """
    canary: CanaryConfig | None = None
    """The replicas that load a candidate first, with follow = "promoted"."""
    archive: ArchiveConfig | None = None
    """Object storage for the versions, for readers that can dial nobody."""
    encrypt: Annotated[bool, forms.flag] = False
    """Weights are sent between hosts by TLS 1.3, never over a process group; within a
    host other users cannot read them. Set it when others can listen on the network.
    """
    staging: Literal["host", "device"] = "host"
    """The slots are in host memory, or on each rank's own GPU. Set "device" when there
    is GPU memory for them and the way through the host is too slow.
    """

    @property
    def groups(self) -> frozenset[str]:
        """Names of the groups that are a source, a target or a peer of the channel."""
        return frozenset(role.group for role in (*self.sources, *self.targets, *self.peers))


class Config(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: Annotated[
        int,
        forms.schema_version,
        AsKey(stand_in=forms.SCHEMA_VERSION, missing=f"begin the file with schema_version = {forms.SCHEMA_VERSION}"),
    ]
    """The version of this schema: 1."""
    run: RunConfig
    """The run itself."""
    store: StoreConfig = StoreConfig()
    """The store of rendezvous."""
    control: ControlConfig = ControlConfig()
    """The addresses of the run, and access to them."""
    logs: LogsConfig = LogsConfig()
    """The logs of ranks."""
    slurm: SlurmConfig = SlurmConfig()
    """The job that "replicas slurm" makes of the run; used by that command only."""
    cluster: ClusterConfig = ClusterConfig()
    """The machines on which replicas run."""
    groups: dict[str, GroupConfig]
    """The groups, by name."""
    channels: dict[str, ChannelConfig] = {}
    """The channels, by name."""
    source: Path | None = None

"""The config of a run: frozen structs, and their strict TOML form.

The structs are the resolved form (durations in seconds, defaults filled in, names checked).
:func:`load` reads a file and :func:`parse` a mapping; both report every problem at once in one
:class:`replicas.errors.BadConfig`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from replicas.status import OnFailure

__all__ = [
    "ChannelConfig",
    "Config",
    "ControlConfig",
    "Dependency",
    "GroupConfig",
    "HealthConfig",
    "LogsConfig",
    "Party",
    "ResourcesConfig",
    "RestartConfig",
    "RunConfig",
    "StoreConfig",
]


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``state_dir``: absolute folder for logs, lock, token file, events and decision log of this run.

    ``events_max_nbytes``: size at which the file of events is rotated.
    """

    name: str
    stop_when: tuple[str, ...] = ()
    state_dir: Path
    events_max_nbytes: int = 64 << 20


class LogsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``max_nbytes``: size at which a rank's log is rotated; ``keep``: how many rotated files of a rank are kept;
    ``keep_generations``: of how many generations of a replica, the present one included.

    ``tee``: whether the lines of all ranks go to the supervisor's stderr too (``"auto"``: when that is a terminal).
    """

    max_nbytes: int = 64 << 20
    keep: int = 3
    keep_generations: int = 10
    tee: Literal["auto", "always", "never"] = "auto"


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    bind: str = "127.0.0.1"
    port: int = 0


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``socket``: absolute path of the Unix socket for commands. None: ``control.sock`` in the state folder
    (where that path is too long for a socket, it is reached through a descriptor of its folder).
    """

    host: str = "127.0.0.1"
    port: int = 9477
    socket: Path | None = None


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``strategy``: what is restarted when a replica fails, that replica or all of its group.

    ``no_progress_cycles``: so many restarts in a row without a new step or version are a failure; 0: no such rule.
    """

    policy: Literal["always", "on-failure", "never"] = "on-failure"
    max_restarts: int = 5
    window_s: float = 600.0
    initial_delay_s: float = 1.0
    max_delay_s: float = 60.0
    strategy: Literal["replica", "group"] = "replica"
    no_progress_cycles: int = 3


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True):
    start_timeout_s: float = 300.0
    heartbeat_timeout_s: float = 30.0
    progress_timeout_s: float = 900.0
    load_deadline_s: float = 300.0


class ResourcesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a group's processes get, and may use at most; None: no limit, and nothing is set.

    ``gpus`` None in a run in which another group asks for GPUs means 0: no GPU is seen by two of them.

    ``gpus`` and ``cpu_threads`` are for each rank; ``memory_nbytes`` and ``max_processes`` for each replica.
    """

    gpus: int | None = None
    cpu_threads: int | None = None
    memory_nbytes: int | None = None
    max_processes: int | None = None


class Dependency(msgspec.Struct, frozen=True):
    """A group that must be there first: each of its replicas ready (or finished), or each of them finished."""

    group: str
    condition: Literal["ready", "finished"] = "ready"

    def __str__(self) -> str:
        return self.group if self.condition == "ready" else f"{self.group}:{self.condition}"


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``cwd``: absolute working folder (default: the folder of the config file).

    ``env``: variables for its processes, those of ``env_file`` included (which ``env`` in the config file overrides).
    ``drain_timeout_s``: how long a replica that is being ended may finish its sync before SIGTERM; ``stop_timeout_s``: how
    long it has from SIGTERM to SIGKILL. ``max_unavailable``: replicas that a rolling restart ends at a time.

    ``on_failure``: what ends when a replica of it has failed for good: the run, the group, or the replica alone. (In TOML a
    group that is nothing but a target has ``"replica"`` by default.) ``min_ready``: so many ready replicas are enough for the
    group to be ready, and when fewer than that are left, the run ends; None: all for the one, none for the other.
    """

    name: str
    replicas: int = 1
    nproc_per_node: int = 1
    nnodes: int = 1
    command: tuple[str, ...]
    launcher: Literal["torchrun", "exec"] = "torchrun"
    depends_on: tuple[Dependency, ...] = ()
    restart: RestartConfig = RestartConfig()
    health: HealthConfig = HealthConfig()
    resources: ResourcesConfig = ResourcesConfig()
    env: dict[str, str] = {}
    env_file: Path | None = None
    cwd: Path
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0
    max_unavailable: int = 1
    on_failure: OnFailure = "run"
    min_ready: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.nproc_per_node * self.nnodes


class Party(msgspec.Struct, frozen=True):
    """A group's part in a channel. ``ranks``: which ranks carry bytes (peers of a channel all have the same)."""

    group: str
    ranks: Literal["leader", "each", "all"]


class ChannelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sources default to ``ranks = "leader"``, targets to ``"all"``, peers to ``"leader"``.

    ``min_targets``: a version waits, up to its deadline, until so many target replicas are there, and commits only when so
    many hold it. ``on_lost``: whether a version commits over those that are left (``"drop"``) or fails (``"raise"``) when a
    target is lost while it is sent. ``staging``: where the slots are, in host memory or on each rank's own GPU.
    """

    name: str
    sources: tuple[Party, ...] = ()
    targets: tuple[Party, ...] = ()
    peers: tuple[Party, ...] = ()
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    transport: Literal["auto", "group"] = "auto"
    deadline_s: float = 60.0
    on_lost: Literal["drop", "raise"] = "drop"
    slots: int = 2
    min_targets: int = 0
    staging: Literal["host", "device"] = "host"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int
    run: RunConfig
    store: StoreConfig = StoreConfig()
    control: ControlConfig = ControlConfig()
    logs: LogsConfig = LogsConfig()
    groups: dict[str, GroupConfig]
    channels: dict[str, ChannelConfig] = {}
    source: Path | None = None

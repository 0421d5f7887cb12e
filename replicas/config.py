"""The config of a run: frozen structs, and their strict TOML form.

The structs are the resolved form (durations in seconds, defaults filled in, names checked).
:func:`load` reads a file and :func:`parse` a mapping; both report every problem at once in one
:class:`replicas.errors.BadConfig`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

__all__ = [
    "ChannelConfig",
    "Config",
    "ControlConfig",
    "GroupConfig",
    "HealthConfig",
    "Party",
    "RestartConfig",
    "RunConfig",
    "StoreConfig",
]


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``state_dir``: absolute folder for logs, lock, token file and decision log of this run."""

    name: str
    stop_when: tuple[str, ...] = ()
    state_dir: Path


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    bind: str = "127.0.0.1"
    port: int = 0


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 9477


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True):
    policy: Literal["always", "on-failure", "never"] = "on-failure"
    max_restarts: int = 5
    window_s: float = 600.0
    initial_delay_s: float = 1.0
    max_delay_s: float = 60.0


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True):
    start_timeout_s: float = 300.0
    heartbeat_timeout_s: float = 30.0
    progress_timeout_s: float = 900.0
    load_deadline_s: float = 300.0


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``cwd``: absolute working folder (default: the folder of the config file)."""

    name: str
    replicas: int = 1
    nproc_per_node: int = 1
    nnodes: int = 1
    command: tuple[str, ...]
    launcher: Literal["torchrun", "exec"] = "torchrun"
    depends_on: tuple[str, ...] = ()
    restart: RestartConfig = RestartConfig()
    health: HealthConfig = HealthConfig()
    env: dict[str, str] = {}
    cwd: Path
    stop_timeout_s: float = 10.0

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
    target is lost while it is sent.
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


class Config(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int
    run: RunConfig
    store: StoreConfig = StoreConfig()
    control: ControlConfig = ControlConfig()
    groups: dict[str, GroupConfig]
    channels: dict[str, ChannelConfig] = {}
    source: Path | None = None

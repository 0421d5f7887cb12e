"""Read a run's config, strictly: :func:`load` a TOML file, :func:`parse` a mapping.

Every problem is found in one pass and reported at once, in the order of the file, as
one :class:`replicas.errors.BadConfig`, which names the nearest known key for an unknown
one. The structs in :mod:`replicas.config.structs` define the keys and their defaults.
Programs, folders and files that a group names are checked before anything is started.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict, replace

from replicas.common.foreign import visible
from replicas.config import channel_checks
from replicas.config import tables as config_tables
from replicas.config import text as config_text
from replicas.config.archive import with_groups
from replicas.config.structs import (
    ChannelConfig,
    Config,
    ControlConfig,
    GroupConfig,
    HealthConfig,
    RestartConfig,
    RunConfig,
)
from replicas.config.tables import in_order_of
from replicas.config.values import Place, nearest, no_text
from replicas.errors import BadConfig, UsageError
from replicas.messages.bounds import CONTROL_PORT, RANKS_MAX, encodable, shown

_LONGEST_SOCKET_PATH = 107
_LONGEST_STRING = (128 << 10) - 1
_TOO_LONG = "is longer than the 128 KiB that Linux allows; put it into a file"
_RESERVED_ENV = ("REPLICA_ID", "REPLICA_NUM")
_EXTERNAL = ("name", "launcher", "replicas", "nproc_per_node", "nnodes", "health", "drain_timeout_s", "min_ready")
"""Fields that an external group may set; others would have no effect."""


def read(config: Config | Path | str | Mapping[str, Any]) -> Config:
    """Return a config from a :class:`Config`, the path of its file, or a mapping.

    :raises BadConfig: with every problem. :raises UsageError: another type is given.
    """
    if isinstance(config, Config):
        return _absolute(config)
    if isinstance(config, Path | str):
        return load(config)
    if not isinstance(config, Mapping):
        raise UsageError(f"config must be a Config, the path of its file or a mapping, not {shown(config)}")
    return parse(config)


def _absolute(config: Config) -> Config:
    """Return a copy with absolute folders; BadConfig if one's name is not UTF-8."""
    groups = {name: replace(group, cwd=group.cwd.absolute()) for name, group in config.groups.items()}
    state_dir, door = config.run.state_dir.absolute(), config.control.socket
    door = None if door is None else door.absolute()
    paths = [state_dir, *(() if door is None else (door,)), *(group.cwd for group in groups.values())]
    if odd := [one for one in dict.fromkeys(paths) if not encodable(str(one))]:
        raise BadConfig([no_text(one) for one in odd])
    run, control = replace(config.run, state_dir=state_dir), replace(config.control, socket=door)
    return replace(config, run=run, control=control, groups=groups)


def load(path: Path | str) -> Config:
    """Read and check a config file.

    Relative folders in it are relative to its own folder, with symbolic links resolved.
    The path itself keeps its links, so that a reload follows them again.

    :raises BadConfig: with every problem; also if the file is missing or not TOML.
    """
    path = Path(path)
    source = visible(str(path))
    try:
        text = config_text.read(path)
        mapping = config_text.decode(text)
    except OSError as error:
        raise BadConfig([f"the file cannot be read: {error.strerror}"], source=source) from error
    except ValueError as error:
        raise BadConfig([visible(str(error))], source=source) from error
    path = config_text.absolute(path)
    return _parse(place_of(path), mapping, source, path, config_text.Lines(text, mapping))


def place_of(path: Path) -> Place:
    """Return the root :class:`Place` of a file: values are relative to its folder."""
    path = config_text.absolute(path)
    return Place(path.parent.resolve(), home=config_text.state_home(path))


def default_state_dir(place: Place, name: str) -> Path:
    """Return the path of run ``name``'s default state folder; do not create it."""
    return (place.home or place.base) / ".replicas" / name


def parse(mapping: Mapping[str, Any], *, base: Path | None = None) -> Config:
    """Read a config from a mapping of the file's form.

    :param base: base of relative folders (default: the working folder).
    :raises BadConfig: with every problem found.
    """
    try:
        place = Place(Path.cwd() if base is None else base.resolve())
    except FileNotFoundError as error:
        raise BadConfig(["the current folder, to which relative folders are relative, was removed"]) from error
    return _parse(place, mapping)


def channels_from(
    channels: Mapping[str, ChannelConfig | Mapping[str, Any]], replicas: Mapping[str, int]
) -> dict[str, ChannelConfig]:
    """Read and check channels by name: ``[channels.NAME]`` tables or ChannelConfigs.

    :param replicas: number of replicas of each known group; groups may be missing.
    :raises BadConfig: with every problem found.
    """
    place, tables = Place(Path()), channels
    if isinstance(channels, Mapping):
        tables = {name: _as_table(one) if isinstance(one, ChannelConfig) else one for name, one in channels.items()}
    found = config_tables.each(place, tables, ChannelConfig, _BUILDS)
    for channel in found.values() if found is not UNSET else ():
        channel_checks.slots(place.at(channel.name), channel, replicas)
    if place.problems:
        raise BadConfig(in_order_of(tables, place.problems), source="channels")
    read: dict[str, ChannelConfig] = found
    return read


def _as_table(channel: ChannelConfig) -> Mapping[str, Any]:
    """Return a resolved channel as the table that a file would have."""
    table = {name: getattr(channel, name) for name in channel.__struct_fields__ if name not in ("name", "deadline_s")}
    for role in ("sources", "targets", "peers"):
        table[role] = [{"group": party.group, "ranks": party.ranks} for party in table[role]]
    for name in ("canary", "archive"):
        if (inner := table.pop(name)) is not None:
            keys = {key: value for key, value in asdict(inner).items() if value not in (None, "")}
            table[name] = {key.removesuffix("_s"): value for key, value in keys.items()}
    return table | {"deadline": channel.deadline_s}


def _parse(
    place: Place,
    mapping: Mapping[str, Any],
    source: str = "config",
    path: Path | None = None,
    lines: config_text.Lines | None = None,
) -> Config:
    """Return the config of ``mapping`` at the root ``place``; raise BadConfig with all
    problems. ``source``: name for errors; ``path``: file; ``lines``: lines of keys."""
    if config_text.is_too_deep(mapping):
        raise BadConfig([config_text.TOO_DEEP], source=source)
    if odd := [one for one in {place.base, place.home or place.base} if not encodable(str(one))]:
        raise BadConfig([no_text(one) for one in odd], source=source)
    whole, made = mapping, frozenset[str]()
    run = config_tables.read(Place(place.base, home=place.home), mapping.get("run"), RunConfig, _BUILDS)
    if run is not UNSET:
        whole, made = with_groups(place, mapping, run.state_dir)
    config = config_tables.read(place, whole, Config, _BUILDS)
    if config is not UNSET:
        _cross_check(place, config, whole)
    if place.problems or config is UNSET:
        raise BadConfig(in_order_of(mapping, place.problems, lines), source=source)
    groups = {name: replace(group, added=name in made) for name, group in _with_on_failure(config, whole).items()}
    checked: Config = replace(config, groups=groups, source=path)
    return checked


def _with_on_failure(config: Config, mapping: Mapping[str, Any]) -> dict[str, GroupConfig]:
    """Return the groups; set ``on_failure`` to "replica" where ``mapping`` (the file's
    content) does not set it and the group is only a target of channels."""
    sending = {party.group for one in config.channels.values() for party in (*one.sources, *one.peers)}
    receiving = {party.group for one in config.channels.values() for party in one.targets} - sending
    return {
        name: replace(group, on_failure="replica")
        if name in receiving and "on_failure" not in mapping["groups"][name]
        else group
        for name, group in config.groups.items()
    }


# ---------------------------------------------------------------- the tables


def _build_run(place: Place, fields: dict[str, Any]) -> RunConfig:
    """Return ``run`` made of ``fields`` (values by name); add a missing state_dir."""
    fields.setdefault("state_dir", default_state_dir(place, fields["name"]))
    return RunConfig(**fields)


def _build_control(place: Place, fields: dict[str, Any]) -> ControlConfig:
    """Make ``control`` of ``fields`` (values by name); add problems to ``place``."""
    if "listen" in fields:
        fields["host"], fields["port"] = fields.pop("listen")
    control = ControlConfig(**fields)
    if control.socket is not None and len(os.fsencode(control.socket)) > _LONGEST_SOCKET_PATH:
        place.at("socket").problem(
            f"{control.socket} is longer than the {_LONGEST_SOCKET_PATH} bytes of a socket's path"
        )
    for name in ("certificate", "key", "token_file", "operator_token_file"):
        path = getattr(control, name)
        if path is not None and not os.path.isfile(path):  # noqa: PTH113  # as for groups.cwd
            place.at(name).problem(f'"{path}" does not exist')
    if control.certificate is not None and control.tls == "off":
        place.at("certificate").problem('has no effect with tls = "off"; remove one of the two')
    if control.key is not None and control.certificate is None:
        place.at("key").problem("has no effect without certificate; name that, too")
    return control


def _build_restart(place: Place, fields: dict[str, Any]) -> RestartConfig:
    """Make ``restart`` of ``fields`` (values by name); add a problem of its delays."""
    restart = RestartConfig(**fields)
    if restart.initial_delay_s > restart.max_delay_s:
        place.at("initial_delay").problem(
            f"{restart.initial_delay_s:g} s is longer than max_delay, {restart.max_delay_s:g} s"
        )
    return restart


def _build_group(place: Place, fields: dict[str, Any]) -> GroupConfig:
    """Make a group of ``fields`` (values by name); add problems to ``place``."""
    for variable, value in fields.get("env", {}).items():
        if _is_reserved(variable):
            place.at("env", variable).problem("is set for each rank by the supervisor; remove it")
        elif not variable or "=" in variable or "\0" in variable + value:
            place.at("env", variable).problem("is not a usable environment variable")
    if "env_file" in fields:
        fields["env"] = {**_read_environment(place.at("env_file"), fields["env_file"]), **fields.get("env", {})}
    for variable, value in fields.get("env", {}).items():
        if len(os.fsencode(f"{variable}={value}")) > _LONGEST_STRING:
            place.at("env", variable).problem(_TOO_LONG)
    if any(len(os.fsencode(word)) > _LONGEST_STRING for word in fields.get("command", ())):
        place.at("command").problem(f"a word {_TOO_LONG}")
    group = GroupConfig(**{"cwd": place.base, **fields, "name": place.path[-1]})
    for key, variable in (("gpus", "CUDA_VISIBLE_DEVICES"), ("cpu_threads", "OMP_NUM_THREADS")):
        if getattr(group.resources, key) is not None and variable in group.env:
            place.at("resources", key).problem(f"sets {variable}, which env (or env_file) sets too; remove one of them")
    if group.launcher == "exec" and group.nnodes > 1:
        place.at("nnodes").problem('launcher = "exec" starts one program for each replica; leave nnodes at 1')
    if (group.min_ready or 0) > group.replicas:
        place.at("min_ready").problem(f"{group.min_ready} is more than the {group.replicas} replicas of the group")
    if group.external:
        _check_external(place, group, fields)
    elif not os.path.isdir(group.cwd):  # noqa: PTH112  # Path.is_dir raises where the system denies access
        place.at("cwd").problem(f'folder "{group.cwd}" does not exist')
    elif group.command:
        _check_command(place.at("command"), group)
    elif all(path != place.at("command").path for path, _ in place.problems):
        place.at("command").problem("missing; this key is required")
    return group


def _check_external(place: Place, group: GroupConfig, fields: Mapping[str, Any]) -> None:
    """Add a problem to ``place`` for each key without effect on an external group:
    those of ``fields`` (the keys that are set), and of its table ``health``."""
    health = [
        ("health", name)
        for name in HealthConfig.__struct_fields__
        if name != "heartbeat_timeout_s" and getattr(group.health, name) != getattr(HealthConfig(), name)
    ]
    for path in [*((name,) for name in fields if name not in _EXTERNAL), *health]:
        key = path[-1].removesuffix("_s")
        place.at(*path[:-1], key).problem(
            'has no effect on programs that others start (launcher = "external"); remove it'
        )


def _is_reserved(variable: str) -> bool:
    """Return True for a variable that the supervisor sets for each rank."""
    return variable in _RESERVED_ENV or variable.startswith("REPLICAS_")


def _read_environment(place: Place, path: Path) -> dict[str, str]:
    """Return the variables of a file, {} if unreadable; add problems to ``place``."""
    try:
        variables = config_text.parse_env(config_text.read(path))
    except OSError as error:
        place.problem(f'"{path}" cannot be read: {error.strerror}')
        return {}
    except ValueError as error:
        place.problem(f'"{path}"{"," if isinstance(error, config_text.BadLine) else ""} {error}')
        return {}
    for variable in filter(_is_reserved, variables):
        place.problem(f'"{path}": {variable} is set for each rank by the supervisor; remove it')
    return variables


def _check_command(place: Place, group: GroupConfig) -> None:
    """Add a problem to ``place`` if the program of the command cannot be executed."""
    program = group.command[0]
    if program == "-m":
        return
    if " " in program and not os.path.isfile(group.cwd / program) and shutil.which(program) is None:  # noqa: PTH113
        words = ", ".join(f'"{word}"' for word in [*program.split(), *group.command[1:]])
        place.problem(f'"{program}" does not exist; write each argument as a separate word: command = [{words}]')
        return
    is_path = program.endswith(".py") or "/" in program
    if is_path and not os.path.isfile(group.cwd / program):  # noqa: PTH113  # as above
        where = "" if Path(program).is_absolute() else f" in {group.cwd}"
        place.problem(f'"{program}" does not exist{where}')
    elif not program.endswith(".py") and (
        shutil.which(str(group.cwd / program) if is_path else program, path=group.env.get("PATH")) is None
    ):
        place.problem(
            f'"{program}" is not executable; run chmod +x on it'
            if is_path
            else f'"{program}" is not on PATH; install it, or give its path'
        )


def _build_channel(place: Place, fields: dict[str, Any]) -> ChannelConfig:
    """Make a channel of ``fields`` (values by name); add problems to ``place``."""
    ranks = fields.pop("ranks", None)
    for role, default, allowed in (
        ("sources", "leader", ("leader", "all")),
        ("targets", "all", ("leader", "all")),
        ("peers", ranks or "leader", ("leader", "each", "all")),
    ):
        fields[role] = channel_checks.parties(place.at(role), fields.get(role, ()), default, allowed)
    if ranks is not None and not fields["peers"]:
        place.at("ranks").problem('is for channels with peers; write sources = [{ group = "...", ranks = "all" }]')
    channel = ChannelConfig(**fields, name=place.path[-1])
    channel_checks.check(place, channel)
    return channel


_BUILDS: config_tables.Builds = {
    RunConfig: _build_run,
    ControlConfig: _build_control,
    RestartConfig: _build_restart,
    GroupConfig: _build_group,
    ChannelConfig: _build_channel,
}


# ---------------------------------------------------------------- checks across tables


def _cross_check(place: Place, config: Config, mapping: Mapping[str, Any]) -> None:
    """Add problems across tables to ``place``: unknown groups, cycles, GPUs, ports.
    ``mapping``: the file's content, which also names the groups that have problems."""
    groups = config.groups.values()
    known = [str(group) for group in mapping["groups"]]  # including those with problems
    if not known:
        place.at("groups").problem("is empty; define at least one group")
    stop_when = place.at("run", "stop_when")
    _check_names(stop_when, config.run.stop_when, known)
    _check_finishing(stop_when, config.run.stop_when, config)
    for group in groups:
        depends_on = place.at("groups", group.name, "depends_on")
        _check_names(depends_on, [one.group for one in group.depends_on], known)
        _check_finishing(depends_on, [one.group for one in group.depends_on if one.condition == "finished"], config)
    _check_cycles(place, config)
    on_channels = frozenset[str]().union(*(one.groups for one in config.channels.values()))
    for group in groups:
        if group.external and group.name not in on_channels:
            place.at("groups", group.name).problem(
                "has no channel, and external programs are visible only on channels; remove it"
            )
    ranks = sum(group.replicas * group.world_size for group in groups)
    if ranks > RANKS_MAX:
        place.at("groups").problem(f"ask for {ranks:,} ranks in all, above the limit of {RANKS_MAX:,}")
    asking = next((group.name for group in groups if group.resources.gpus), None)
    for group in groups:
        if asking is not None and "CUDA_VISIBLE_DEVICES" in group.env and group.resources.gpus is None:
            place.at("groups", group.name, "env").problem(
                f'sets CUDA_VISIBLE_DEVICES while group "{asking}" asks for resources.gpus; let both ask, '
                "so that no GPU is assigned twice"
            )
    for channel in config.channels.values():
        here = place.at("channels", channel.name)
        for role in ("sources", "targets", "peers"):
            _check_names(here.at(role), list(dict.fromkeys(party.group for party in getattr(channel, role))), known)
        channel_checks.slots(here, channel, {group.name: group.replicas for group in groups if not group.external})
        if channel.staging == "device":
            channel_checks.device_staging(here.at("staging"), channel, config)
    listens = CONTROL_PORT if config.control.port is None else config.control.port
    fixed = {listens: "control.listen"} if listens else {}
    for table, key, port in (
        ("store", "port", config.store.port),
        ("cluster", "carry_port", config.cluster.carry_port),
    ):
        if port in fixed:
            place.at(table, key).problem(f"{port} is the port of {fixed[port]}, too; use 0 or another port")
        elif port:
            fixed[port] = table


def _check_names(place: Place, names: Sequence[str], known: list[str]) -> None:
    """Add a problem to ``place`` for each of ``names`` not ``known``, or repeated."""
    for index, group in enumerate(names):
        if group not in known:
            place.problem(f'there is no group "{group}"{nearest(group, known)}')
        elif group in names[:index]:
            place.problem(f'group "{group}" is listed twice')


def _check_finishing(place: Place, names: Sequence[str], config: Config) -> None:
    """Add a problem to ``place`` for each of ``names`` that can never be finished."""
    for name in names:
        if name in config.groups and config.groups[name].external:
            place.problem(f'group "{name}" is external, so it is unknown when it has finished')
        elif name in config.groups and config.groups[name].restart.policy == "always":
            place.problem(f'group "{name}" has restart policy "always", so it never finishes')


def _check_cycles(place: Place, config: Config) -> None:
    """Add a problem to ``place`` for each circle of groups that wait for each other."""
    done: set[str] = set()

    def visit(group: str, path: tuple[str, ...]) -> None:
        """Visit ``group`` and all groups that it waits for; add a problem for a circle.
        ``path``: the groups, each waiting for the next, that led to ``group``."""
        if group in path:
            circle = " -> ".join((*path[path.index(group) :], group))
            place.at("groups", path[-1], "depends_on").problem(f"groups wait for each other in a circle: {circle}")
        elif group not in done and group in config.groups:
            for dependency in config.groups[group].depends_on:
                visit(dependency.group, (*path, group))
            done.add(group)

    for group in config.groups:
        visit(group, ())

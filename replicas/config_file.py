"""The strict TOML form of a run's config: :func:`load` a file, :func:`parse` a mapping.

Every problem is found in one pass and reported at once, in the order of the file, as one
:class:`replicas.errors.BadConfig`. An unknown key is an error that names the nearest known one.
Defaults are those of the structs in :mod:`replicas.config`.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import UNSET, Meta

from replicas.config import (
    ChannelConfig,
    Config,
    ControlConfig,
    GroupConfig,
    HealthConfig,
    Party,
    RestartConfig,
    RunConfig,
    StoreConfig,
)
from replicas.config_values import (
    Key,
    Place,
    address,
    duration,
    each,
    folder,
    in_order_of,
    listen,
    name,
    nearest,
    one_of,
    plain,
    show,
    table,
)
from replicas.errors import BadConfig

__all__ = ["SCHEMA_VERSION", "channel_from", "load", "parse"]

SCHEMA_VERSION = 1
"""The only ``schema_version`` that this version reads."""

_RESERVED_ENV = ("REPLICA_ID", "REPLICA_NUM")


def load(path: Path | str) -> Config:
    """Read a config file. Relative folders in it are relative to its own folder.

    :raises BadConfig: with every problem found, also when the file cannot be read or is no TOML.
    """
    path = Path(path)
    try:
        mapping = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig([f"cannot be read: {error.strerror}"], source=str(path)) from error
    except UnicodeDecodeError as error:
        raise BadConfig([f"is not UTF-8 text: {error.reason} at byte {error.start}"], source=str(path)) from error
    except tomllib.TOMLDecodeError as error:
        raise BadConfig([f"is not valid TOML: {error}"], source=str(path)) from error
    absolute = path.resolve()
    return _parse(mapping, base=absolute.parent, source=str(path), path=absolute)


def parse(mapping: Mapping[str, Any], *, base: Path | None = None, source: str = "config") -> Config:
    """Read a config from a mapping of the file's form.

    :param base: folder that relative folders are relative to (default: the current one).
    :param source: what to call it in errors.
    :raises BadConfig: with every problem found.
    """
    return _parse(mapping, base=Path.cwd() if base is None else base.resolve(), source=source, path=None)


def channel_from(channel: str, mapping: Mapping[str, Any], *, source: str = "channels") -> ChannelConfig:
    """Read one channel from a mapping of the form of a ``[channels.NAME]`` table; groups need not be known.

    :raises BadConfig: with every problem found.
    """
    place = Place(Path.cwd())
    result = _channels(place, {channel: mapping})
    if place.problems:
        raise BadConfig(in_order_of({channel: mapping}, place.problems), source=source)
    found: ChannelConfig = result[channel]
    return found


def _parse(mapping: Mapping[str, Any], *, base: Path, source: str, path: Path | None) -> Config:
    place = Place(base)
    if "schema_version" not in mapping:
        place.at("schema_version").problem(f"missing; begin the file with schema_version = {SCHEMA_VERSION}")
    config = _config(place, mapping)
    if config is not UNSET:
        _cross_check(place, config, mapping)
    if place.problems or config is UNSET:
        raise BadConfig(in_order_of(mapping, place.problems), source=source)
    checked: Config = Config(**{**_fields(config), "source": path})
    return checked


def _fields(struct: Any) -> dict[str, Any]:
    return {field: getattr(struct, field) for field in struct.__struct_fields__}


# ---------------------------------------------------------------- the tables

_count = plain(Annotated[int, Meta(ge=1)], "a whole number of at least 1")
_natural = plain(Annotated[int, Meta(ge=0)], "a whole number of at least 0")
_port = plain(Annotated[int, Meta(ge=0, le=65535)], "a port from 0 to 65535")
_names = plain(tuple[str, ...], "a list of group names")
_environment = plain(dict[str, str], "a table of strings")
_positive = duration()


def _schema_version(place: Place, value: object) -> Any:
    if value == SCHEMA_VERSION and type(value) is int:
        return value
    place.problem(f"expected {SCHEMA_VERSION}, the only version that this release reads, got {show(value)}")
    return SCHEMA_VERSION  # so that the rest is checked too


def _command(place: Place, value: object) -> Any:
    words = plain(tuple[str, ...], 'a list of strings such as ["train.py", "--steps", "200"]')(place, value)
    if words is UNSET:
        return words
    if not words or not words[0]:
        return place.problem("is empty; name a program")
    if words[0] == "-m" and len(words) == 1:
        return place.problem('the name of a module must follow "-m"')
    if any("\0" in word for word in words):
        return place.problem("contains a NUL character")
    return words


def _build_run(place: Place, fields: dict[str, Any]) -> RunConfig:
    fields.setdefault("state_dir", place.base / ".replicas" / fields["name"])
    return RunConfig(**fields)


def _build_control(_: Place, fields: dict[str, Any]) -> ControlConfig:
    if "listen" not in fields:
        return ControlConfig()
    host, port = fields["listen"]
    return ControlConfig(host=host, port=port)


def _build_restart(place: Place, fields: dict[str, Any]) -> RestartConfig:
    restart = RestartConfig(**fields)
    if restart.initial_delay_s > restart.max_delay_s:
        place.at("initial_delay").problem(
            f"{restart.initial_delay_s:g} s is longer than max_delay, {restart.max_delay_s:g} s"
        )
    return restart


def _build_group(place: Place, fields: dict[str, Any]) -> GroupConfig:
    group = GroupConfig(**{"cwd": place.base, **fields, "name": place.path[-1]})
    for variable in group.env:
        if variable in _RESERVED_ENV or variable.startswith("REPLICAS_"):
            place.at("env", variable).problem("is set for each rank by the supervisor; remove it")
        elif not variable or "=" in variable or "\0" in variable + group.env[variable]:
            place.at("env", variable).problem("is not a usable environment variable")
    if group.launcher == "exec" and group.nnodes > 1:
        place.at("nnodes").problem('launcher = "exec" starts one program for each replica; leave nnodes at 1')
    if not _is(group.cwd.is_dir):
        place.at("cwd").problem(f'folder "{group.cwd}" does not exist')
    elif group.command:
        _check_command(place.at("command"), group)
    return group


def _check_command(place: Place, group: GroupConfig) -> None:
    program = group.command[0]
    if program == "-m":
        return
    is_path = program.endswith(".py") or "/" in program
    if is_path:
        where = "" if Path(program).is_absolute() else f" in {group.cwd}"
        if not _is((group.cwd / program).is_file):
            place.problem(f'"{program}" does not exist{where}')
            return
    search = group.env.get("PATH")
    if (
        not program.endswith(".py")
        and shutil.which(str(group.cwd / program) if is_path else program, path=search) is None
    ):
        place.problem(
            f'"{program}" is not executable; run chmod +x on it'
            if is_path
            else f'"{program}" is not on PATH; install it, or give its path'
        )


def _is(test: Callable[[], bool]) -> bool:
    """A test of a path; what the system does not even let us look at counts as not there."""
    try:
        return test()
    except OSError:
        return False


class _RawParty(NamedTuple):
    group: str
    ranks: str | None = None


def _parties(place: Place, value: object) -> Any:
    if not isinstance(value, list | tuple):
        return place.problem(f"expected a list of group names, got {show(value)}")
    parties: list[_RawParty] = []
    for item in value:
        party = _RawParty(item) if isinstance(item, str) else _party(place, item)
        if party is UNSET:
            continue
        if any(party.group == other.group for other in parties):
            place.problem(f'group "{party.group}" is listed twice')
        parties.append(party)
    return tuple(parties)


def _build_channel(place: Place, fields: dict[str, Any]) -> ChannelConfig:
    ranks = fields.pop("ranks", None)
    if ranks is not None and not fields.get("peers"):
        place.at("ranks").problem('is for channels with peers; write sources = [{ group = "...", ranks = "all" }]')
    for role, default, allowed in (
        ("sources", "leader", ("leader", "all")),
        ("targets", "all", ("leader", "all")),
        ("peers", ranks or "leader", ("leader", "each", "all")),
    ):
        fields[role] = tuple(_resolve(place.at(role), fields.get(role, ()), default, allowed))
    channel = ChannelConfig(**fields, name=place.path[-1])
    _check_roles(place, channel)
    return channel


def _resolve(place: Place, parties: tuple[_RawParty, ...], default: str, allowed: tuple[str, ...]) -> Iterator[Party]:
    for group, ranks in parties:
        if ranks is not None and ranks not in allowed:
            listed = " or ".join(f'"{word}"' for word in allowed)
            place.problem(f'ranks of group "{group}": expected {listed}, got "{ranks}"')
        yield Party(group, ranks or default)  # type: ignore[arg-type]  # checked here and by the reader of `ranks`


def _check_roles(place: Place, channel: ChannelConfig) -> None:
    if channel.peers and (channel.sources or channel.targets):
        others = {party.group for party in (*channel.sources, *channel.targets)}
        both = next((party.group for party in channel.peers if party.group in others), None)
        if both is not None:
            place.at("peers").problem(
                f'group "{both}" cannot be a peer and a source or target; give it another channel'
            )
        else:
            place.at("peers").problem("a channel has either peers or sources and targets; make two channels of it")
    elif not channel.peers and not channel.sources and not place.has_problems():
        place.problem("needs sources (and targets), or peers")
    if len({party.ranks for party in channel.peers}) > 1:
        place.at("peers").problem("all peers of a channel must have the same ranks")


_party = table(
    {"group": Key(name, required=True), "ranks": Key(one_of("leader", "each", "all"))}, lambda _, f: _RawParty(**f)
)
_run = table(
    {"name": Key(name, required=True, stand_in="unnamed"), "stop_when": Key(_names), "state_dir": Key(folder)},
    _build_run,
)
_store = table({"bind": Key(address), "port": Key(_port)}, lambda _, fields: StoreConfig(**fields))
_control = table({"listen": Key(listen)}, _build_control)
_restart = table(
    {
        "policy": Key(one_of("always", "on-failure", "never")),
        "max_restarts": Key(_natural),
        "window": Key(_positive, "window_s"),
        "initial_delay": Key(duration(zero=True), "initial_delay_s"),
        "max_delay": Key(duration(zero=True), "max_delay_s"),
    },
    _build_restart,
)
_health = table(
    {
        "start_timeout": Key(_positive, "start_timeout_s"),
        "heartbeat_timeout": Key(_positive, "heartbeat_timeout_s"),
        "progress_timeout": Key(_positive, "progress_timeout_s"),
        "load_deadline": Key(_positive, "load_deadline_s"),
    },
    lambda _, fields: HealthConfig(**fields),
)
_groups = each(
    table(
        {
            "replicas": Key(_count),
            "nproc_per_node": Key(_count),
            "nnodes": Key(_count),
            "command": Key(_command, required=True, stand_in=()),
            "launcher": Key(one_of("torchrun", "exec")),
            "depends_on": Key(_names),
            "restart": Key(_restart),
            "health": Key(_health),
            "env": Key(_environment),
            "cwd": Key(folder),
            "stop_timeout": Key(_positive, "stop_timeout_s"),
        },
        _build_group,
    )
)
_channels = each(
    table(
        {
            "sources": Key(_parties),
            "targets": Key(_parties),
            "peers": Key(_parties),
            "ranks": Key(one_of("leader", "each", "all")),
            "backend": Key(one_of("auto", "gloo", "nccl")),
            "transport": Key(one_of("auto", "group")),
            "deadline": Key(_positive, "deadline_s"),
            "on_lost": Key(one_of("drop", "raise")),
            "slots": Key(_count),
            "min_targets": Key(_natural),
        },
        _build_channel,
    )
)
_config = table(
    {
        "schema_version": Key(_schema_version),
        "run": Key(_run, required=True),
        "store": Key(_store),
        "control": Key(_control),
        "groups": Key(_groups, required=True),
        "channels": Key(_channels),
    },
    lambda _, fields: Config(**{"schema_version": SCHEMA_VERSION, **fields}),
)


# ---------------------------------------------------------------- checks across tables


def _cross_check(place: Place, config: Config, mapping: Mapping[str, Any]) -> None:
    known = [str(group) for group in mapping["groups"]]  # those with problems of their own included
    if not known:
        place.at("groups").problem("is empty; define at least one group")
    _check_names(place.at("run", "stop_when"), config.run.stop_when, known)
    for stopper in config.run.stop_when:
        group = config.groups.get(stopper)
        if group is not None and group.restart.policy == "always":
            place.at("run", "stop_when").problem(f'group "{stopper}" has restart policy "always", so it never finishes')
    for group in config.groups.values():
        _check_names(place.at("groups", group.name, "depends_on"), group.depends_on, known)
    _check_cycles(place, config)
    for channel in config.channels.values():
        _check_channel(place.at("channels", channel.name), channel, config, known)
    if config.store.port and config.store.port == config.control.port:
        place.at("store", "port").problem(
            f"{config.store.port} is the port of control.listen too; use 0 or another one"
        )


def _check_names(place: Place, names: tuple[str, ...], known: list[str]) -> None:
    for index, group in enumerate(names):
        if group not in known:
            place.problem(f'there is no group "{group}"{nearest(group, known)}')
        elif group in names[:index]:
            place.problem(f'group "{group}" is listed twice')


def _check_cycles(place: Place, config: Config) -> None:
    done: set[str] = set()

    def visit(group: str, path: tuple[str, ...]) -> None:
        if group in path:
            circle = " -> ".join((*path[path.index(group) :], group))
            place.at("groups", path[-1], "depends_on").problem(f"groups wait for each other in a circle: {circle}")
        elif group not in done and group in config.groups:
            for other in config.groups[group].depends_on:
                visit(other, (*path, group))
            done.add(group)

    for group in config.groups:
        visit(group, ())


def _check_channel(place: Place, channel: ChannelConfig, config: Config, known: list[str]) -> None:
    for role in ("sources", "targets", "peers"):
        _check_names(place.at(role), tuple(dict.fromkeys(party.group for party in getattr(channel, role))), known)
    targets = [config.groups.get(party.group) for party in channel.targets]
    count = sum(group.replicas for group in targets if group is not None)
    if channel.min_targets > count and None not in targets:
        place.at("min_targets").problem(f"{channel.min_targets} is more than the {count} replicas of the target groups")

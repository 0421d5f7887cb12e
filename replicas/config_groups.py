"""The strict TOML form of a group: its command, what it depends on, its limits and its environment.

The files that it names (programs, folders, environment files) are looked at here too, so that ``replicas check`` finds what
is missing before anything is started.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from msgspec import UNSET, Meta

from replicas import config_text, env_file
from replicas.config import Dependency, GroupConfig, HealthConfig, ResourcesConfig, RestartConfig
from replicas.config_values import (
    NAMED_MAX,
    Key,
    Place,
    Reader,
    duration,
    each,
    file,
    folder,
    one_of,
    plain,
    show,
    size,
    table,
)
from replicas.messages.bounds import RANKS_MAX, REPLICAS_MAX
from replicas.status import OnFailure

__all__ = ["count", "groups", "names", "natural"]


def _whole(least: int, most: int = RANKS_MAX) -> Reader:
    number = plain(Annotated[int, Meta(ge=least)], f"a whole number of at least {least}")

    def read(place: Place, value: object) -> Any:
        found = number(place, value)
        if found is not UNSET and found > most:
            return place.problem(f"expected at most {most:,}, got {show(value)}")
        return found

    return read


count: Reader = _whole(1)
natural: Reader = _whole(0)
_positive = duration()
_strings = plain(tuple[str, ...], "a list of group names")


def names(place: Place, value: object) -> Any:
    """A list of group names."""
    found = _strings(place, value)
    if found is not UNSET and len(found) > NAMED_MAX:
        return place.problem(f"expected at most {NAMED_MAX} group names, got {len(found):,}")
    return found


_RESERVED_ENV = ("REPLICA_ID", "REPLICA_NUM")
_CONDITIONS = ("ready", "finished")


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


def _environment(place: Place, value: object) -> Any:
    """A table of strings. Its values may be secrets: no problem quotes one."""
    if not isinstance(value, Mapping):
        return place.problem('expected a table of strings such as { NAME = "value" }')
    for variable, text in value.items():
        if not isinstance(text, str):
            place.at(str(variable)).problem("expected a string; put its value in quotes")
    return {str(variable): text for variable, text in value.items() if isinstance(text, str)}


def _dependencies(place: Place, value: object) -> Any:
    words = names(place, value)
    if words is UNSET:
        return words
    dependencies = []
    for word in words:
        group, colon, condition = word.partition(":")
        if colon and condition not in _CONDITIONS:
            place.problem(f'expected "{group}:ready" or "{group}:finished", got {show(word)}')
        else:
            dependencies.append(Dependency(group, condition or "ready"))
    return tuple(dependencies)


def _build_restart(place: Place, fields: dict[str, Any]) -> RestartConfig:
    restart = RestartConfig(**fields)
    if restart.initial_delay_s > restart.max_delay_s:
        place.at("initial_delay").problem(
            f"{restart.initial_delay_s:g} s is longer than max_delay, {restart.max_delay_s:g} s"
        )
    return restart


def _build_group(place: Place, fields: dict[str, Any]) -> GroupConfig:
    _check_environment(place.at("env"), fields.get("env", {}))
    if "env_file" in fields:
        fields["env"] = {**_read_environment(place.at("env_file"), fields["env_file"]), **fields.get("env", {})}
    group = GroupConfig(**{"cwd": place.base, **fields, "name": place.path[-1]})
    _check_resources(place, group)
    if group.launcher == "exec" and group.nnodes > 1:
        place.at("nnodes").problem('launcher = "exec" starts one program for each replica; leave nnodes at 1')
    if (group.min_ready or 0) > group.replicas:
        place.at("min_ready").problem(f"{group.min_ready} is more than the {group.replicas} replicas of the group")
    if not _is(group.cwd.is_dir):
        place.at("cwd").problem(f'folder "{group.cwd}" does not exist')
    elif group.command:
        _check_command(place.at("command"), group)
    return group


def _check_environment(place: Place, env: Mapping[str, str]) -> None:
    for variable, value in env.items():
        if _is_reserved(variable):
            place.at(variable).problem("is set for each rank by the supervisor; remove it")
        elif not variable or "=" in variable or "\0" in variable + value:
            place.at(variable).problem("is not a usable environment variable")


def _is_reserved(variable: str) -> bool:
    return variable in _RESERVED_ENV or variable.startswith("REPLICAS_")


def _read_environment(place: Place, path: Path) -> dict[str, str]:
    try:
        variables = env_file.parse(config_text.read(path))
    except OSError as error:
        place.problem(f'"{path}" cannot be read: {error.strerror}')
        return {}
    except env_file.BadLine as error:
        place.problem(f'"{path}", {error}')
        return {}
    except ValueError as error:
        place.problem(f'"{path}" {error}')
        return {}
    for variable in filter(_is_reserved, variables):
        place.problem(f'"{path}": {variable} is set for each rank by the supervisor; remove it')
    return variables


def _check_resources(place: Place, group: GroupConfig) -> None:
    for key, wanted, variable in (
        ("gpus", group.resources.gpus, "CUDA_VISIBLE_DEVICES"),
        ("cpu_threads", group.resources.cpu_threads, "OMP_NUM_THREADS"),
    ):
        if wanted is not None and variable in group.env:
            place.at("resources", key).problem(f"sets {variable}, which env (or env_file) sets too; remove one of them")


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


_restart = table(
    {
        "policy": Key(one_of("always", "on-failure", "never")),
        "max_restarts": Key(natural),
        "window": Key(_positive, "window_s"),
        "initial_delay": Key(duration(zero=True), "initial_delay_s"),
        "max_delay": Key(duration(zero=True), "max_delay_s"),
        "strategy": Key(one_of("replica", "group")),
        "no_progress_cycles": Key(natural),
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
_resources = table(
    {
        "gpus": Key(natural),
        "cpu_threads": Key(count),
        "memory": Key(size(1 << 20), "memory_nbytes"),
        "max_processes": Key(count),
    },
    lambda _, fields: ResourcesConfig(**fields),
)
groups: Reader = each(
    table(
        {
            "replicas": Key(_whole(1, REPLICAS_MAX)),
            "nproc_per_node": Key(count),
            "nnodes": Key(count),
            "command": Key(_command, required=True, stand_in=()),
            "launcher": Key(one_of("torchrun", "exec")),
            "depends_on": Key(_dependencies),
            "restart": Key(_restart),
            "health": Key(_health),
            "resources": Key(_resources),
            "env": Key(_environment),
            "env_file": Key(file),
            "cwd": Key(folder),
            "drain_timeout": Key(duration(zero=True), "drain_timeout_s"),
            "stop_timeout": Key(_positive, "stop_timeout_s"),
            "max_unavailable": Key(count),
            "on_failure": Key(one_of(*get_args(OnFailure))),
            "min_ready": Key(natural),
        },
        _build_group,
    )
)
"""``[groups]``: each table a :class:`~replicas.config.GroupConfig`, by name."""

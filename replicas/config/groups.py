"""Checks of a group's keys: its command, delays, resources and environment.

The files that it names (programs, folders, environment files) are checked here too, so
that ``replicas check`` finds missing ones before anything is started.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replicas.config import env_file
from replicas.config import text as config_text
from replicas.config.structs import GroupConfig, RestartConfig
from replicas.config.values import Place

__all__ = ["build_group", "build_restart"]

_RESERVED_ENV = ("REPLICA_ID", "REPLICA_NUM")


def build_restart(place: Place, fields: dict[str, Any]) -> RestartConfig:
    restart = RestartConfig(**fields)
    if restart.initial_delay_s > restart.max_delay_s:
        place.at("initial_delay").problem(
            f"{restart.initial_delay_s:g} s is longer than max_delay, {restart.max_delay_s:g} s"
        )
    return restart


def build_group(place: Place, fields: dict[str, Any]) -> GroupConfig:
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
    """Test a path; False also where the system denies access."""
    try:
        return test()
    except OSError:
        return False

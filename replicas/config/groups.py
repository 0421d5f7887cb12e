"""Checks of a group's keys: its command, delays, resources and environment.

The files that it names (programs, folders, environment files) are checked here too, so
that ``replicas check`` finds missing ones before anything is started.

An environment file is read as systemd, Docker and shells do. A line is empty, a comment
(``#``), or ``NAME=value`` with an optional ``export`` before it. A value in single
quotes is literal; in double quotes ``\\n``, ``\\t``, ``\\"``, ``\\\\`` and ``\\$`` are
escapes. Without quotes it ends at a blank and a ``#`` (``COLOR=#fff`` has no comment)
or at the end of the line, without surrounding blanks. The last line of a name wins.
``$NAME`` is not expanded.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicas.config import text as config_text
from replicas.config.structs import GroupConfig, RestartConfig
from replicas.config.values import Place

__all__ = ["BadLine", "build_group", "build_restart", "parse_env"]

_RESERVED_ENV = ("REPLICA_ID", "REPLICA_NUM")
_LINE = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=(.*)", re.DOTALL)
_SINGLE = re.compile(r"'([^']*)'\s*(?:#.*)?")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_ESCAPE = re.compile(r"\\(.)")
_COMMENT = re.compile(r"\s+#.*")
_ESCAPES = {"n": "\n", "t": "\t"}


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
    if not os.path.isdir(group.cwd):  # noqa: PTH112  # Path.is_dir raises where the system denies access
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
        variables = parse_env(config_text.read(path))
    except OSError as error:
        place.problem(f'"{path}" cannot be read: {error.strerror}')
        return {}
    except ValueError as error:
        place.problem(f'"{path}"{"," if isinstance(error, BadLine) else ""} {error}')
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


class BadLine(ValueError):
    """A line is no ``NAME=value``. Not quoted in the text: it may hold a secret."""


def parse_env(text: str) -> dict[str, str]:
    """Return the variables of an environment file.

    :raises BadLine: at the first malformed line.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise BadLine(f"line {number}: expected NAME=value")
        if "\0" in line:
            raise BadLine(f"line {number}: contains a NUL character")
        variables[match[1]] = _value(match[2], number)
    return variables


def _value(text: str, number: int) -> str:
    quoted = text.lstrip()
    if not quoted.startswith(("'", '"')):
        return _COMMENT.sub("", text).strip()
    match = (_SINGLE if quoted[0] == "'" else _DOUBLE).fullmatch(quoted)
    if match is None:
        raise BadLine(f"line {number}: the value begins with a quote that does not end it")
    return match[1] if quoted[0] == "'" else _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), match[1])

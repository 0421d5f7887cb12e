"""The page of commands, from the command line itself."""

from __future__ import annotations

from typing import Any

import typer.main

from replicas.cli.main import app
from tests.support.reference.text import bullets, markdown

__all__ = ["body", "commands"]


def commands() -> dict[str, Any]:
    """Every command by its name, in the order of ``replicas --help``."""
    group: Any = typer.main.get_command(app)
    found: dict[str, Any] = group.commands
    return found


def body() -> str:
    intro = markdown(
        """``replicas COMMAND ...``. Every command has ``-h`` and ``--help``; ``replicas
        --version`` prints the version; ``replicas --services`` prints the folder with alert
        rules, Grafana board and unit files; ``replicas --install-completion`` teaches the
        shell the commands, groups and replicas. Exit codes: `exit-codes.md`. ``python -m
        replicas.supervisor CONFIG`` is ``replicas run CONFIG``."""
    )
    return "\n\n".join([intro, *(_entry(name, command) for name, command in commands().items())])


def _entry(name: str, command: Any) -> str:
    parts = [f"## `replicas {name}`", markdown(command.help), bullets(map(_parameter, command.params))]
    return "\n\n".join(filter(None, parts))


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        words = f"`{parameter.metavar or parameter.name.upper()}`"
        return _said(words if parameter.required else f"{words} (optional)", parameter)
    flag = getattr(parameter, "is_flag", False)
    value = "" if flag else f" {parameter.metavar or 'N'}"
    names = ", ".join(f"`{name}{value}`" for name in (*parameter.opts, *parameter.secondary_opts))
    given = parameter.default not in (None, "") and not flag
    return _said(f"{names} (default: `{parameter.default}`)" if given else names, parameter)


def _said(words: str, parameter: Any) -> str:
    text = getattr(parameter, "help", "") or ""
    return f"{words}: {text}" if text else words

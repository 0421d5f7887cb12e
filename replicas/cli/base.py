"""Shared by all commands: app, options, exit codes, output of answers and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from replicas.cli.find_run import RunAddress
from replicas.cli.screen import Screen, complain
from replicas.common.foreign import ascii_controls, one_line
from replicas.control.exit_codes import BAD_CONFIG, BUG, INTERRUPTED, UNAVAILABLE, USAGE
from replicas.errors import BadConfig, Disconnected, ReplicasError, SyncError, UsageError, WorldError

__all__ = [
    "ConfigArgument",
    "ConfigOption",
    "EndpointOption",
    "GroupArgument",
    "Json",
    "OptionalTarget",
    "TargetArgument",
    "TokenFileOption",
    "app",
    "checked_target",
    "exit_code_of",
    "exit_codes",
    "json_text",
    "patience",
    "place_of",
    "show",
]

app = typer.Typer(
    name="replicas",
    help="Keep one set of weights in step across many separate torchrun jobs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# ------------------------------------------------------------ completion


def _complete_target(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Groups and replicas of the run named so far; no completions on any error."""
    try:
        place = RunAddress(context.params.get("config"), context.params.get("endpoint"))
        found = _targets(place)
    except (ReplicasError, OSError):
        return []
    return [(name, what) for name, what in found if name.startswith(incomplete)]


def _targets(place: RunAddress) -> list[tuple[str, str]]:
    try:
        status = place.status(timeout_s=2.0)
    except Disconnected:
        groups = place.config.groups.values() if place.config is not None else ()
        return [(group.name, f"group of {group.replicas}") for group in groups]
    found = [(group.name, f"group of {len(group.replicas)}") for group in status.groups]
    return found + [(one.name, one.state) for group in status.groups for one in group.replicas]


def _complete_group(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return [(name, what) for name, what in _complete_target(context, incomplete) if "/" not in name]


# ------------------------------------------------------------ options

ConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="The run's TOML file. Default: the run below this folder.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="CONFIG", help="The run's TOML file. Default: the run below this folder."),
]
EndpointOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="The run's control port, in place of CONFIG; or unix:PATH.")
]
TokenFileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with the run's token, where --endpoint is a HOST:PORT.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="A group, or GROUP/INDEX.", autocompletion=_complete_target)
]
OptionalTarget = Annotated[
    str | None, typer.Argument(metavar="TARGET", help="A group, or GROUP/INDEX.", autocompletion=_complete_target)
]
GroupArgument = Annotated[
    str, typer.Argument(metavar="GROUP", help="The name of a group.", autocompletion=_complete_group)
]


def place_of(
    config: Path | None, other: Path | None = None, endpoint: str | None = None, token_file: Path | None = None
) -> RunAddress:
    """The run that a command line names. ``config``: an argument; ``other``: an option.

    :raises UsageError: two of them were given.
    """
    if config is not None and other is not None:
        raise UsageError("give CONFIG once")
    return RunAddress(config if config is not None else other, endpoint, token_file)


def checked_target(target: str | None) -> str | None:
    """``target``, unless it is a config file.

    :raises UsageError: it is a config file.
    """
    if target is not None and target.endswith(".toml"):
        raise UsageError(f'"{target}" is no group or replica', hint=f"name a config with -c {target}")
    return target


# ------------------------------------------------------------ answers


def json_text(value: object) -> str:
    """``value`` as indented JSON."""
    return ascii_controls(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())


def show(value: Any, draw: Callable[[Console], None], *, as_json: bool) -> None:
    """Print an answer to stdout: as JSON, or drawn by ``draw``."""
    if as_json:
        print(json_text(value))
    else:
        draw(Screen())


@contextmanager
def patience(doing: str) -> Iterator[Callable[[str], None]]:
    """On a terminal, show a progress line; the yielded function changes its text."""
    console = Screen(to_stderr=True)
    if not console.is_terminal:
        yield lambda doing: None
        return
    with console.status(_under_way(doing)) as spinner:
        yield lambda doing: spinner.update(_under_way(doing))


def _under_way(doing: str) -> Text:
    return Text(f"{one_line(doing)} ...")


@contextmanager
def exit_codes(*, failed: int = UNAVAILABLE) -> Iterator[None]:
    """Turn a library error into one message on stderr and its exit code.

    :param failed: the exit code of a WorldError or SyncError.
    """
    try:
        yield
    except ReplicasError as error:
        complain(str(error))
        raise typer.Exit(exit_code_of(error, failed)) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def exit_code_of(error: ReplicasError, failed: int = UNAVAILABLE) -> int:
    """The exit code of a command that ends with ``error``."""
    if isinstance(error, BadConfig):
        return BAD_CONFIG
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, Disconnected):
        return UNAVAILABLE
    return failed if isinstance(error, WorldError | SyncError) else BUG

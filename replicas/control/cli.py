"""The command ``replicas``: ``run``, ``check``, ``status``.

``python -m replicas.supervisor CONFIG`` is ``replicas run CONFIG``.
Exit codes: 0 done, 1 a group failed past its budget, 2 usage, 3 this run is already supervised, 69 nothing to talk to,
70 a bug, 75 drained on preemption, 78 bad config. Answers go to stdout, everything else to stderr. No command but ``run``
starts anything, and none imports torch.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

import replicas
from replicas.config import Config
from replicas.config_file import load
from replicas.control import client, render
from replicas.errors import BadConfig, Disconnected, ReplicasError, UsageError, WorldError

__all__ = ["BAD_CONFIG", "BUG", "FAILED", "SUPERVISED", "UNAVAILABLE", "USAGE", "app", "main", "supervisor_main"]

FAILED = 1
USAGE = 2
SUPERVISED = 3
UNAVAILABLE = 69
BUG = 70
BAD_CONFIG = 78

app = typer.Typer(
    name="replicas",
    help="Keep one set of weights in step across many separate torchrun jobs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"replicas {replicas.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command()
def run(config: ConfigPath) -> None:
    """Supervise the run of CONFIG until it is over."""
    with _exit_codes():
        loaded = load(config)
        from replicas.supervisor.__main__ import supervise  # it brings the event loop; the other commands stay light

        code = supervise(loaded)
    raise typer.Exit(code)


@app.command()
def check(config: ConfigPath, as_json: Json = False) -> None:
    """Check CONFIG and print the resolved plan; exit code 78 and every problem when it is bad."""
    with _exit_codes():
        loaded = load(config)
    _show(loaded, lambda console: console.print(render.plan(loaded)), as_json=as_json)


@app.command()
def status(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Default: the run below this folder.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The run's control port.")] = None,
    as_json: Json = False,
) -> None:
    """Print the state of a running run: its replicas, channels and versions."""
    with _exit_codes():
        if config is not None and endpoint is not None:
            raise UsageError("give CONFIG or --endpoint, not both")
        if endpoint is None:
            where = client.find_endpoint(load(config) if config is not None else None, folder=Path.cwd())
            answer = client.fetch_status(where.endpoint)
            if answer.run != where.run:
                raise Disconnected(f'run "{where.run}" is gone: {where.endpoint} is now the port of run "{answer.run}"')
        else:
            answer = client.fetch_status(endpoint)
    _show(answer, lambda console: console.print(render.run_status(answer)), as_json=as_json)


def _show(value: msgspec.Struct | Config, draw: Callable[[Console], None], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())
    else:
        draw(Console(highlight=False))


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn this library's errors into one clear message on stderr and the exit code of the contract."""
    try:
        yield
    except ReplicasError as error:
        print(f"replicas: {error}", file=sys.stderr)
        raise typer.Exit(_exit_code(error)) from error


def _exit_code(error: ReplicasError) -> int:
    if isinstance(error, BadConfig):
        return BAD_CONFIG
    if isinstance(error, UsageError):
        return USAGE
    return UNAVAILABLE if isinstance(error, Disconnected | WorldError) else BUG


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script: run one command and return its exit code.

    :param arguments: without the program's name (default: those of this process).
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="replicas")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else FAILED
    except Exception:  # noqa: BLE001  # the outermost frame: whatever arrives here is a bug and must say so
        traceback.print_exc()
        print("replicas: this is a bug; please report it with the lines above", file=sys.stderr)
        return BUG
    return 0


def supervisor_main(arguments: Sequence[str] | None = None) -> int:
    """``python -m replicas.supervisor CONFIG``: the same as ``replicas run CONFIG``."""
    return main(["run", *(sys.argv[1:] if arguments is None else arguments)])

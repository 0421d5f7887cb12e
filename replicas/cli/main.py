"""The command ``replicas``: all its commands, of which ``run`` and ``check`` are here.

``python -m replicas.supervisor CONFIG`` is ``replicas run CONFIG``. Exit codes:
:mod:`replicas.control.exit_codes`. Answers go to stdout, everything else to stderr.
Only ``run`` starts a supervisor, and only commands for versions import torch.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

import replicas
from replicas.cli import render
from replicas.cli.agent_command import agent
from replicas.cli.base import Command, Json, Screen, app, command, complain, json_text
from replicas.cli.find_run import RunAddress
from replicas.cli.following_commands import archive, mirror, relay
from replicas.cli.look import doctor, events, logs, status
from replicas.cli.order_commands import detach, drain, reload, reset_failed, restart, scale, stacks, wait
from replicas.cli.ray_command import ray
from replicas.cli.report_command import report
from replicas.cli.slurm import slurm
from replicas.cli.steering_commands import hold, label, promote, reject, release, rollback, score, versions
from replicas.cli.token_command import token
from replicas.cli.top import top
from replicas.cli.version_commands import get, put, verify
from replicas.common.foreign import lines
from replicas.config.file import load
from replicas.config.structs import Config
from replicas.control.exit_codes import BUG, DONE, FAILED
from replicas.errors import Disconnected, UsageError
from replicas.linux import inherited
from replicas.status import NodeStatus
from replicas.supervisor.console import Console

__all__ = ["app", "check", "main", "run"]

_ANSWER_S = 0.9
"""Seconds that a check waits for a run that may be absent or stopped."""

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")]


def _print_version(wanted: bool) -> None:
    """Option ``--version``: print the version and exit the process, if wanted."""
    if wanted:
        print(f"replicas {replicas.__version__}")
        raise typer.Exit


_SERVICES_HELP = "Print the folder of alert rules, Grafana board and unit files, and exit."


def _print_services(wanted: bool) -> None:
    """Option ``--services``: if wanted, print a folder's path and exit the process.

    The folder has alert rules, a Grafana board and unit files.
    """
    if wanted:
        package = Path(replicas.__file__).parent
        found = package / "services"  # of a wheel; a clone has it beside the package
        print(found if found.is_dir() else package.with_name("services"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    services: Annotated[
        bool, typer.Option("--services", help=_SERVICES_HELP, callback=_print_services, is_eager=True)
    ] = False,
) -> None:
    """Declare to typer the options before the command, such as ``--version``.

    Does nothing: the options' own callbacks act.
    """


@command()
def run(*, config: ConfigPath) -> None:
    """Supervise the run of CONFIG until it is over."""
    loaded = load(config)
    Console().say(f"run {loaded.run.name}: starting")
    from replicas.supervisor.operator import supervise  # heavy: imported by this command only

    raise typer.Exit(supervise(loaded))


@command()
def check(*, config: ConfigPath, as_json: Json = False) -> None:
    """Check CONFIG and print the resolved plan.

    A CONFIG that is invalid, or does not fit this machine, gets exit code 78 and all
    its problems printed. One whose state folder cannot be used gets 2, as from run.
    While its run is alive, the plan also says where the run's nodes would place its
    replicas, and which of them fit no node.
    """
    loaded = load(config)
    from replicas.supervisor.fleet.placement_preview import oddities, predict_placement
    from replicas.supervisor.fleet.plans import machine_for, may_grow, notes, refuse_unfit
    from replicas.supervisor.state.state import StateDir

    machine = machine_for(loaded)
    refuse_unfit(loaded, machine)
    StateDir(loaded.run.state_dir, loaded.run.name).check()
    nodes = _nodes(config, loaded)
    where, waits = ({}, None) if nodes is None else predict_placement(loaded, nodes)
    if as_json:
        more = {} if waits is None else {"placement": where, "waiting": waits}
        print(json_text(msgspec.structs.asdict(loaded) | more))
        return
    screen = Screen()
    screen.print(render.config_tables(loaded))
    odd = [*oddities(loaded), *_foreign_addresses(loaded)]
    for note in odd if waits is not None and may_grow(loaded) else [*odd, *notes(loaded, machine)]:
        screen.print(f"note: {note}", soft_wrap=True)
    for line in render.outlook(where, waits, nodes) if waits is not None and nodes is not None else ():
        screen.print(line, soft_wrap=True)


def _foreign_addresses(config: Config) -> Iterator[str]:
    """Yield a text for each configured address on which this machine cannot listen.

    Binds a socket to each to find out, and closes it.
    """
    for key, host in (("control.listen", config.control.host), ("store.bind", config.store.bind)):
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.bind(address)
        except OSError as error:
            yield f"{key}: this machine cannot listen on {host} ({error.strerror}); run the supervisor elsewhere"


def _nodes(path: Path, config: Config) -> tuple[NodeStatus, ...] | None:
    """Ask the config's run for its nodes, and return them.

    Return None if the run is absent, does not answer within 0.9 s, or is still
    starting.

    :param path: of the config file.
    """
    try:
        found = RunAddress(path).status(timeout_s=_ANSWER_S).nodes
    except (Disconnected, UsageError):  # a check needs no run
        return None
    starts = config.cluster.local and not any(node.local for node in found)
    return None if starts else found


_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run": (run, check, agent, slurm, ray),
    "Look": (status, top, logs, events, report, stacks, wait, doctor),
    "Versions": (versions, promote, reject, rollback, hold, release, label, score),
    "Files and archives": (get, put, verify, mirror, archive, relay),
    "Change": (scale, restart, drain, detach, reset_failed, reload, token),
}
"""The commands, in the order of ``--help``."""

for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command(_command.__name__.replace("_", "-"), cls=Command, rich_help_panel=_panel)(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. This is the console script.

    :param arguments: without the program's name (default: those of this process).
    """
    inherited.open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that stdout cannot encode must not end a command
        sys.stdout.reconfigure(errors="backslashreplace")
    code = _run(arguments)
    return code if _flush_stdout() else code or FAILED


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command and return its exit code.

    An exception that is not an exit is printed as a bug.

    :param arguments: without the program's name; None: those of this process.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="replicas")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE if end.code is None else FAILED
    except Exception as error:  # noqa: BLE001  # the outermost frame: any exception here is a bug, and is reported as one
        if isinstance(error, OSError) and not _flush_stdout("\n"):
            return FAILED
        print(lines(traceback.format_exc()), file=sys.stderr)
        complain("this is a bug; please report it with the lines above")
        return BUG
    return DONE


def _flush_stdout(more: str = "") -> bool:
    """Flush stdout; return True, or False if it cannot be written.

    In that case print a message on stderr, unless the reader has closed the pipe
    (``head``), and discard all further output.

    :param more: text to write first, so that a closed stdout is noticed even if nothing
        else is to be written.
    """
    try:
        print(more, end="", flush=True)
    except (OSError, ValueError) as error:
        if not isinstance(error, BrokenPipeError):
            complain(f"standard output cannot be written: {getattr(error, 'strerror', None) or error}")
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # else Python flushes it again at its end
        return False
    return True

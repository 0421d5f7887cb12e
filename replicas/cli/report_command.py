"""The command ``report``: write a run's page, or its timeline, as one file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from replicas.cli.base import command
from replicas.cli.find_run import EVENTS_FILE, RunAddress, trusted
from replicas.common.outputs import resolve_output
from replicas.config.text import absolute
from replicas.errors import Disconnected, UsageError, WorldError
from replicas.telemetry import event_log
from replicas.telemetry.events import Record

_TRACED = 20_000
"""Spans of one kind on a track: days of syncs, in a file that browsers still open."""


@command()
def report(
    *,
    run: Annotated[
        Path | None,
        typer.Argument(metavar="STATE_DIR", help="The run's state folder, or its CONFIG. Default: below this folder."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page. Default: report.html, unless --trace is given."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a timeline that opens in ui.perfetto.dev: trace events, as JSON."),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show a recorded run, in place of STATE_DIR.")] = False,
) -> None:
    """Write a run's page as one HTML file, or its timeline, also after the run's end.

    The page opens in any browser, without a network. It has the last lines of programs
    that failed: show it only to readers who may read the run's logs.
    """
    if demo and run is not None:
        raise UsageError("give STATE_DIR or --demo, not both")
    from replicas.page.report import recorded  # imported late: only this command needs these
    from replicas.page.report import report as page_of

    def told() -> Iterable[Record]:
        """Return a new iterable of all events, of the demo or from disk.

        It reads the disk as it is iterated: the events of a long run may not fit into
        memory.
        """
        return recorded(time.time()) if demo else _events(run)

    if output is not None or trace is None:
        output = output or Path("report.html")
        write(output, page_of(told()))
        print(f"wrote {output}: open it in a browser")
    if trace is not None:
        from replicas.telemetry.spans import read
        from replicas.telemetry.trace_file import trace_json

        spans = read(told(), _TRACED)
        if not spans.seq:
            raise Disconnected(
                "there are no events of a run", hint="name the folder of its state, or --demo for a look"
            )
        write(trace, b"".join(trace_json(spans)).decode())
        print(f"wrote {trace}: open it in https://ui.perfetto.dev")


def _events(run: Path | None) -> Iterable[Record]:
    """Return the recorded events of a run, oldest first, to be iterated once.

    They are read from disk as they are iterated.

    :param run: a state folder, or a config file (``.toml``); None: the only run below
        the working folder.
    :raises Disconnected: the run has no file of events; raised here, not in the
        iteration.
    """
    folder = RunAddress(run).state_dir if run is None or run.suffix == ".toml" else trusted(absolute(run))
    path = folder / EVENTS_FILE
    if not path.exists():
        raise Disconnected(
            f"there are no events of a run in {path.parent}", hint="name the folder of its state, or --demo for a look"
        )
    return event_log.read(path)


def write(path: Path, text: str) -> None:
    """Replace the file atomically by one with this text, or create it; follow a link.

    Only its owner can read the new one. An error leaves the old file as it was.

    :raises replicas.errors.WorldError: it cannot be written, or is a device or a pipe.
    """
    try:
        target = resolve_output(path)
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            fresh.touch(mode=0o600)
            fresh.write_text(text)
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise WorldError(f"{path} cannot be written: {error.strerror}", hint="name another file with -o") from error

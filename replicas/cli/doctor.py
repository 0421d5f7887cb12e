"""The command ``doctor``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from replicas import errors
from replicas.cli.base import (
    ConfigArgument,
    ConfigOption,
    Json,
    exit_codes,
    json_text,
    place_of,
)
from replicas.cli.find_run import RunAddress
from replicas.cli.screen import Screen
from replicas.common.foreign import one_line
from replicas.control.exit_codes import FAILED

if TYPE_CHECKING:
    from replicas.cli.checks import Finding

__all__ = ["doctor", "draw_findings"]

_MARKS = {"ok": ("+", "green"), "note": ("~", "yellow"), "problem": ("-", "bold red")}


def doctor(config: ConfigArgument = None, named: ConfigOption = None, as_json: Json = False) -> None:
    """Check for leftovers of dead runs, held ports, GPU processes and limits.

    Changes nothing. Exit code 1 when there is a problem.
    """
    from replicas.cli.checks import examine  # imports the supervisor's inspection of the machine

    with exit_codes():
        place = place_of(config, named)
        findings = list(examine(place.config, _state_dir(place)))
    bad = sum(finding.state == "problem" for finding in findings)
    if as_json:
        print(json_text({"problems": bad, "findings": findings}))
    else:
        screen = Screen(soft_wrap=True)
        draw_findings(screen, findings)
        screen.print(f"{bad} problem{'s' if bad != 1 else ''}" if bad else "all is well")
    if bad:
        raise typer.Exit(FAILED)


def draw_findings(screen: Screen, findings: Iterable[Finding]) -> None:
    """A line for each finding, and one for the remedy of a problem."""
    for finding in findings:
        mark, style = _MARKS[finding.state]
        screen.print(Text.assemble((f"[{mark}] ", style), (f"{finding.about:10}", "bold"), one_line(finding.text)))
        if finding.remedy:
            screen.print(Text(f"{'':14}-> {one_line(finding.remedy)}"))


def _state_dir(place: RunAddress) -> Path | None:
    """The run's state folder; None: no run here, only the machine is checked."""
    try:
        return place.named_dir
    except errors.Disconnected:
        return None

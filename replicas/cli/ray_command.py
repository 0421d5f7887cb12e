"""The command ``ray``: a run on the machines of a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replicas.cli.base import command
from replicas.config.file import load
from replicas.errors import UsageError


@command()
def ray(
    *,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")],
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="The cluster's address. Default: $RAY_ADDRESS, or the one of this machine."
        ),
    ] = None,
) -> None:
    """Run CONFIG on a Ray cluster until it is over, supervised by this process.

    Each node of each replica gets a bundle of a placement group, and an agent in it.
    """
    loaded = load(config)
    try:
        from replicas.integrations.ray_run import run  # imports Ray, which only this command needs
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UsageError("Ray is not installed", hint='pip install "ray[default]"') from error
    raise typer.Exit(run(loaded, address=address))

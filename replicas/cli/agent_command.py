"""The command ``agent``: offer this machine to a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from replicas import environ, errors
from replicas.cli.base import command
from replicas.config.values import checked, labels, name


def _labels(words: list[str]) -> dict[str, str]:
    """Return the labels in ``NAME=VALUE`` texts, by name.

    :raises UsageError: a text is not of this form, or a name or value is not valid.
    """
    if odd := next((word for word in words if "=" not in word), None):
        raise errors.UsageError(f"--label {odd}: a label is NAME=VALUE")
    read: dict[str, str] = checked("--label", labels, dict(word.split("=", 1) for word in words))
    return read


@command()
def agent(
    *,
    join: Annotated[
        str,
        typer.Option(
            metavar="TOKEN@HOST:PORT", help=f"Where to join; default: ${environ.JOIN}, which ps does not show."
        ),
    ] = "",
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label of the node; repeatable.")
    ] = None,
    node: Annotated[str, typer.Option("--name", metavar="NODE", help="Its name; default: that of the machine.")] = "",
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of its logs; default: .replicas/agent-NODE.")
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            help="Address at which other nodes reach this machine. Default: the one its connection comes from."
        ),
    ] = "",
) -> None:
    """Offer this machine to a run, as a node for its replicas.

    Joins the run's supervisor, starts the replicas that it places here, and ends them
    when the run is over, when the supervisor cannot be reached, or on SIGTERM.
    """
    from replicas.supervisor.agent.machine import node_name
    from replicas.supervisor.agent.remote import Invitation, serve_node  # heavy: imported by this command only

    text = os.environ.pop(environ.JOIN, "")
    if not (text := join or text):
        raise errors.UsageError("no run to join was given", hint=f"pass --join TOKEN@HOST:PORT, or set {environ.JOIN}")
    chosen = checked("--name", name, node or node_name())
    try:
        folder = (state_dir or Path(".replicas") / f"agent-{chosen}").absolute()
    except FileNotFoundError as error:
        raise errors.UsageError("the current folder has been removed", hint="give a --state-dir from /") from error
    code = serve_node(Invitation(text), name=chosen, labels=_labels(label or []), state_dir=folder, address=address)
    raise typer.Exit(code)

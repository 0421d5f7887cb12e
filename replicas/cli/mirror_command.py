"""The command ``mirror``: keep the newest versions of a channel as folders."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import replicas
from replicas import environ
from replicas.cli.base import Addressed, command, patience
from replicas.cli.find_run import RunAddress
from replicas.cli.version_commands import ChannelName, Group, membership
from replicas.control.exit_codes import FAILED
from replicas.errors import UsageError

if TYPE_CHECKING:
    from replicas.sources.mirror import Mirror

_JOIN_S = 60.0


@command(failed=FAILED)
def mirror(
    *,
    channel: ChannelName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to keep; made if it is not there.")],
    place: Addressed,
    keep: Annotated[int, typer.Option(metavar="N", min=1, help="Versions that stay; one more while writing.")] = 2,
    every: Annotated[int, typer.Option(metavar="N", min=1, help="Write every N-th version at most.")] = 1,
    name: Annotated[
        str, typer.Option(metavar="TEXT", help="Name of a version's folder: {version}, or a key of meta in braces.")
    ] = "version-{version}",
    like: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="A model's folder: its files but weights are copied.")
    ] = None,
    marker: Annotated[str, typer.Option(metavar="NAME", help="An empty file to put into each folder.")] = "",
    group: Group = "",
) -> None:
    """Keep the newest versions of CHANNEL as folders in DIR, until it is told to stop.

    DIR/latest is the newest, as a model's folder: programs reload from it. A folder is
    whole or not there, and its version counts as loaded when it is there. DIR may have
    versions of an earlier run: the newest is the one that was written last. Only one
    mirror writes to DIR. Joins as a target of an external group, or as the replica that
    a supervisor has started. A version that cannot be written (a full disk) is refused,
    and a message on stderr says so.
    """
    from replicas.sources.mirror import Mirror  # torch

    kept = Mirror(folder, keep=keep, name=name, like=like, marker=marker)
    with kept, _until_told() as told, _member(place, channel, group) as member:
        version = 0
        while not told:
            with patience(f"waiting for a version of {channel}"):
                update = member.receive(at_least=version + every if version else None).wait()
            version = update.version
            with update:
                _write(kept, update, member._hub.hello.run, member._hub.session.term)


def _write(kept: Mirror, update: replicas.Update, run: str, term: int) -> None:
    """Write the version of ``update`` as a folder of the mirror, and print its path.

    If that fails by a UsageError, refuse the version (tell the run that it was not
    loaded), and print the error on stderr. Does not close ``update``.

    :param kept: the mirror, which writes the folder. :param run: name of the run.
    :param term: number of its coordinator's life.
    """
    from replicas.sources.mirror import Version

    told = Version(version=update.version, digest=update.digest, meta=dict(update.meta), run=run, term=term)
    file = os.open(update.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        place = kept.write(file, told)
    except UsageError as error:
        print(f"version {update.version} is refused: {error}", file=sys.stderr, flush=True)
        update.refuse(error)
    else:
        print(f"version {update.version}: {place}", flush=True)
    finally:
        os.close(file)


def _member(place: RunAddress, channel: str, group: str) -> replicas.Channel:
    """Join the channel, and return it; the caller closes it.

    Joins as the replica that the environment names, or without one (or with ``group``)
    as a new target of the run ``place``, in an external group.

    :param group: the external group; empty: one that fits.
    """
    if group or environ.read().group is None:
        return membership(place, channel, "targets", group, _JOIN_S)
    return replicas.join(channel)


@contextlib.contextmanager
def _until_told() -> Iterator[list[int]]:
    """Context manager: raise typer's Exit in the block at SIGTERM.

    That ends the command. The old handler is restored on leaving. Yields a list to
    which each signal is added. The caller must look at the list, too, as code in the
    block may swallow the exception (``shutil.rmtree`` does).
    """
    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> NoReturn:
        """Signal handler: record the signal, and raise typer's Exit."""
        told.append(number)
        raise typer.Exit

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)

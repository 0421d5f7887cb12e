"""The commands ``mirror``, ``archive`` and ``relay``, which follow a channel.

They run until they are told to stop: by themselves, or as a replica of a run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

import replicas
from replicas import environ
from replicas.cli.base import Addressed, command, patience
from replicas.cli.find_run import RunAddress
from replicas.cli.steering_commands import seconds_of
from replicas.cli.version_commands import ChannelName, Group, Key, Source, following, membership
from replicas.control.exit_codes import FAILED
from replicas.errors import UsageError

if TYPE_CHECKING:
    from replicas.archive import Facts, Follower
    from replicas.sources.mirror import Mirror

_JOIN_S = 60.0


@command(failed=FAILED)
def mirror(
    *,
    channel: Source,
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
    key: Key = "",
) -> None:
    """Keep the newest versions of CHANNEL as folders in DIR, until it is told to stop.

    DIR/latest is the newest, as a model's folder: programs reload from it. A folder is
    whole or not there, and its version counts as loaded when it is there. DIR may have
    versions of an earlier run: the newest is the one that was written last. Only one
    mirror writes to DIR. Joins as a target of an external group, or as the replica that
    a supervisor has started. A version that cannot be written (a full disk) is refused,
    and a message on stderr says so. From an archive it reads, and joins nothing.
    """
    from replicas.archive.archiver import until_stored  # torch
    from replicas.sources.mirror import Mirror

    kept = Mirror(folder, keep=keep, name=name, like=like, marker=marker)
    with kept, until_told() as told, contextlib.ExitStack() as stack:
        found: Follower | None = None
        if "://" in channel:
            found = stack.enter_context(following(channel, key))
        else:
            member = stack.enter_context(member_of(place, channel, "targets", group))
        version = 0
        while not told.is_set():
            least = version + every if version else 0
            with patience(f"waiting for a version of {channel}"):
                if found is not None:
                    take = lambda: next(one for one in found if one.version >= least)  # noqa: B023, E731
                    update, run, term = until_stored(take, told), channel, 0
                else:
                    update = member.receive(at_least=least or None).wait()
                    run, term = member._hub.hello.run, member._hub.session.term
            version = update.version
            with update:
                _write(kept, update, run, term)


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


@command(failed=FAILED)
def archive(
    *,
    channel: ChannelName,
    url: Annotated[str, typer.Argument(metavar="URL", help='Such as "s3://bucket/run" or "file:///folder".')],
    place: Addressed,
    key: Annotated[Path, typer.Option(metavar="FILE", help="The private key that signs; made if it is not there.")],
    keep: Annotated[int, typer.Option(metavar="N", min=0, help="Newest versions that stay; 0: all.")] = 0,
    grace: Annotated[str, typer.Option(metavar="TIME", help="How much longer than a version its data stay.")] = "10m",
    chain: Annotated[int, typer.Option(metavar="N", min=1, help="Versions that share a whole one, at most.")] = 20,
    group: Group = "",
) -> None:
    """Write the versions of CHANNEL to an archive at URL, until it is told to stop.

    An archive is for readers that can dial nobody: `replicas.follow` and the commands
    get, verify, mirror and relay read it. While the storage fails, it is tried again,
    and no publish waits. Labels, leases and scores are kept with the versions. Joins as
    a target of an external group, or as the replica that a supervisor has started: that
    of a channel's key `archive`.
    """
    from replicas.archive import ArchiveKey, Rules, Writer  # torch
    from replicas.archive.archiver import archive_versions, until_stored

    rules, signer = Rules(chain=chain, keep=keep, grace_s=seconds_of("--grace", grace)), ArchiveKey.of_file(key)
    print(f"{url}: readers need the key {signer.public}", flush=True)
    with member_of(place, channel, "targets", group) as member, until_told(raises=False) as told:
        run = member._hub.hello.run
        owner = os.environ.get(environ.STATE_ID) or secrets.token_hex(8)
        writer = until_stored(lambda: Writer(url, channel, run=run, key=signer, rules=rules, owner=owner), told)
        archive_versions(member, writer, lambda: _facts_of(place, channel), told, owner)


def _facts_of(place: RunAddress, channel: str) -> Facts:
    """Ask the run for labels, scores and leases of a channel's versions.

    :param place: the run, unless a supervisor has started this process.
    :raises Disconnected: it does not answer.
    """
    from replicas.archive import Facts

    known = environ.read()
    status = (RunAddress(endpoint=known.endpoint) if known.group is not None else place).status()
    found = {one.number: one for channels in status.channels if channels.name == channel for one in channels.versions}
    labels = {label: number for number, one in found.items() for label in one.labels}
    scores = {number: one.scores for number, one in found.items() if one.scores}
    return Facts(labels, scores, {number for number, one in found.items() if one.leases})


@command(failed=FAILED)
def relay(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of a channel in an archive.")],
    channel: ChannelName,
    place: Addressed,
    key: Key = "",
    group: Group = "",
) -> None:
    """Publish the versions of an archive on CHANNEL, until it is told to stop.

    Each has the number, the meta and the bytes that it has in the archive. Versions
    that are archived during a publish are left out, but for the newest. Joins as a
    source of an external group, or as the replica that a supervisor has started: a
    channel starts one whose sources are { archive = "URL", key = "..." }.
    """
    from replicas.archive.archiver import until_stored  # torch

    joined = member_of(place, channel, "sources", group)
    with until_told() as told, following(url, key) as found, joined as member:
        while not told.is_set():
            with until_stored(found.__next__, told) as update:
                if update.version > member.latest:
                    member.publish(update.tensors(), version=update.version, meta=update.meta).wait()
                    print(f"version {update.version} is published", flush=True)


def member_of(place: RunAddress, channel: str, role: str, group: str) -> replicas.Channel:
    """Join the channel, and return it; the caller closes it.

    Joins as the replica that the environment names, or without one (or with ``group``)
    as a new member of the run ``place``, in an external group.

    :param role: ``sources`` or ``targets``.
    :param group: the external group; empty: one that fits.
    """
    if group or environ.read().group is None:
        return membership(place, channel, role, group, _JOIN_S)
    return replicas.join(channel)


@contextlib.contextmanager
def until_told(*, raises: bool = True) -> Iterator[Event]:
    """Context manager: raise typer's Exit in the block at SIGTERM.

    That ends the command. The old handler is restored on leaving. Yields an event that
    is set then. The caller must look at it, too, as code in the block may swallow the
    exception (``shutil.rmtree`` does).

    :param raises: False: only set the event.
    """
    told = Event()

    def end(number: int, frame: FrameType | None) -> None:
        """Signal handler: set the event, and raise typer's Exit."""
        told.set()
        if raises:
            raise typer.Exit

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)

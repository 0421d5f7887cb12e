"""The commands ``get``, ``put`` and ``verify``, which join as a member for one version.

The member is a replica of its own in an external group. It leaves as soon as it has the
file of the version, before it copies or compares: a mapping of that file does not
change when later versions are published, so a slow disk delays no publish. A channel
may also be the URL of one in an archive, which is read without a run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

import replicas
from replicas.cli.base import Addressed, Json, command, json_text, patience
from replicas.cli.find_run import RunAddress
from replicas.cli.steering_commands import is_candidate, seconds_of, wait_until_served
from replicas.common.decoding import MALFORMED
from replicas.common.sizes import size_text
from replicas.config.values import nearest
from replicas.control.exit_codes import FAILED
from replicas.errors import Gone, SyncError, UsageError

if TYPE_CHECKING:
    from replicas.archive import Follower

_DIFFERENCES = 10
_LOOK_S = 0.05

ChannelName = Annotated[str, typer.Argument(metavar="CHANNEL", help="The name of a channel.")]
Source = Annotated[str, typer.Argument(metavar="CHANNEL", help="The name of a channel, or its URL in an archive.")]
Key = Annotated[str, typer.Option("--archive-key", metavar="KEY", help='Public key of an archive, its file, or "any".')]
Deadline = Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="Longest time for the sync.")]
Group = Annotated[
    str,
    typer.Option(metavar="GROUP", help="External group to join in; default: one with min_ready = 0, else the first."),
]
Exactly = Annotated[
    int | None, typer.Option("--version", metavar="N", min=1, help="This version, if it is held, or an error.")
]
OrNewer = Annotated[int | None, typer.Option(metavar="N", min=1, help="This version, or a newer one; waits for it.")]


class _Got(NamedTuple):
    """A version on this host; ``file``: a descriptor of its immutable bytes."""

    file: int
    facts: dict[str, Any]
    text: str


@command(failed=FAILED)
def get(
    *,
    channel: Source,
    place: Addressed,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write or replace; a link is followed.")
    ],
    version: Exactly = None,
    at_least: OrNewer = None,
    deadline: Deadline = 60.0,
    group: Group = "",
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Write the newest version of CHANNEL to a safetensors file.

    The file is whole or not there, and its header has the version and the publisher's
    meta. Joins as a target of an external group, and leaves before it writes. From an
    archive it reads, and joins nothing.
    """
    from replicas.sources.version_file import save  # torch: imported by these commands only

    with _got(place, channel, group, key, deadline, (version, at_least)) as got:
        meta = msgspec.json.encode(got.facts["meta"]).decode()
        said = {name: str(value) for name, value in got.facts.items()} | {"meta": meta}
        save(got.file, output, {f"replicas.{name}": text for name, text in said.items()})
    print(json_text(got.facts) if as_json else f"{got.text}: {output}")


@command(failed=FAILED)
def put(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors file, or a model's folder.")],
    channel: ChannelName,
    place: Addressed,
    version: Annotated[int | None, typer.Option(metavar="N", min=1, help="Its number; default: the next.")] = None,
    wait: Annotated[
        str, typer.Option(metavar="TIME", help='Longest wait until all targets serve it, such as "10m".')
    ] = "",
    deadline: Deadline = 60.0,
    group: Group = "",
    as_json: Json = False,
) -> None:
    """Publish a safetensors file, or a model's folder, as a version of CHANNEL.

    Joins as a source of an external group. The version lives on in the targets, so
    there must be one. A file of ``replicas get`` is published with its ``meta``. With
    --wait, exit code 1 if the version is rejected, or not served in time.
    """
    from replicas.sources.checkpoint import checkpoint

    limit_s = seconds_of("--wait", wait) if wait else 0.0
    weights = checkpoint(file)
    try:
        meta = msgspec.json.decode(weights.metadata.get("replicas.meta", "{}"), type=dict[str, Any])
    except MALFORMED:
        meta = {}
    with membership(place, channel, "sources", group, deadline) as joined, patience(f"publishing {file}"):
        receipt = joined.publish(weights, version=version, meta=meta, deadline=deadline).wait()
    took = sorted({f"{one.group}/{one.replica}" for one in receipt.members if one != joined.member})
    text = f"{channel}: version {receipt.version}, {size_text(receipt.nbytes)} in {receipt.seconds:.2f} s, digest "
    facts = {name: getattr(receipt, name) for name in ("version", "nbytes", "seconds", "phases", "digest", "lost")}
    print(json_text(facts | {"members": took}) if as_json else f"{text}{receipt.digest}: {', '.join(took) or 'nobody'}")
    if not took:
        hint = "start a target before the next one, or set min_targets = 1 for the channel, which waits for one"
        raise SyncError("no target has taken the version, which is lost as this command ends", hint=hint)
    says = ""
    if limit_s:
        with patience(f"waiting until version {receipt.version} is served"):
            says = f"version {wait_until_served(place, channel, receipt.version, limit_s)} is served"
    elif not as_json and is_candidate(place, channel, receipt.version):
        says = f"version {receipt.version} is the candidate"
    if says and not as_json:
        print(f"{channel}: {says}")


@command(failed=FAILED)
def verify(
    *,
    channel: Source,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A safetensors file, or a model's folder, to compare with.")
    ] = None,
    place: Addressed,
    version: Exactly = None,
    at_least: OrNewer = None,
    deadline: Deadline = 60.0,
    group: Group = "",
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Compare the version of CHANNEL on this host with its digest, and with FILE.

    All bytes are read again, and all tensors of FILE compared bit by bit. Exit code 1
    if they differ; the differences are printed.
    """
    from replicas.sources.checkpoint import checkpoint, differences
    from replicas.sources.version_file import digest

    theirs = None if file is None else checkpoint(file)
    with _got(place, channel, group, key, deadline, (version, at_least)) as got, patience(f"comparing {got.text}"):
        found, wanted = digest(got.file), got.facts["digest"]
        wrong = [f"digest: {found} here, {wanted} published"] if wanted and found != wanted else []
        if theirs is not None:
            wrong += differences(checkpoint(f"/proc/self/fd/{got.file}"), theirs, channel, str(file))
    if as_json:
        print(json_text(got.facts | {"found": found, "differences": wrong}))
    else:
        more = [f"and {len(wrong) - _DIFFERENCES} more"] if len(wrong) > _DIFFERENCES else []
        print("\n".join([f"{got.text}: {'differs' if wrong else 'the same'}", *wrong[:_DIFFERENCES], *more]))
    if wrong:
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def _got(
    place: RunAddress, channel: str, group: str, key: str, deadline_s: float, which: tuple[int | None, int | None]
) -> Iterator[_Got]:
    """Context manager: bring a version of the channel here; yield its file and facts.

    Joins the channel as a target, receives the newest version or the one asked for, and
    leaves before the block, at whose end the version's file is closed. From an archive
    it reads the version, and joins nothing.

    :param group: external group to join in; empty: one is chosen.
    :param key: public key of an archive's writer.
    :param deadline_s: longest time of the join, and of the receive, in seconds.
    :param which: exactly this version, or SyncError; or at least this one, which is
        waited for.
    """
    version, at_least = which
    if None not in which:
        raise UsageError("give --version or --at-least, not both")
    if "://" in channel:
        wanted = {"version": version, "at_least": at_least, "timeout": deadline_s}
        with following(channel, key, **wanted) as archive, next(archive) as update:
            file = os.open(update.path, os.O_RDONLY | os.O_CLOEXEC)
    else:
        file, update = _received(place, channel, group, deadline_s, version, at_least)
    try:
        facts = {"channel": channel, "version": update.version, "digest": update.digest, "meta": update.meta}
        size = size_text(os.fstat(file).st_size)
        yield _Got(file, facts, f"{channel}: version {update.version}, {size}, digest {update.digest or 'unknown'}")
    finally:
        os.close(file)


def _received(
    place: RunAddress, channel: str, group: str, deadline_s: float, version: int | None, at_least: int | None
) -> tuple[int, replicas.Update]:
    """Join the channel, receive a version, and leave; return its file, and its update.

    The caller closes the file. The update has ended.
    """
    found = [one for one in place.status().channels if one.name == channel]
    others = {known.number for one in found for known in one.versions if known.held and known.number != one.current}
    with (
        membership(place, channel, "targets", group, deadline_s) as joined,
        patience(f"waiting for a version of {channel}"),
    ):
        if version is None or version not in others:
            update = joined.receive(deadline=deadline_s, at_least=version or at_least).wait()
        if version is not None and (version in others or update.version != version):
            update = _kept(joined, version, deadline_s)
        with update:
            file = os.open(update.path, os.O_RDONLY | os.O_CLOEXEC)
    return file, update


@contextlib.contextmanager
def following(url: str, key: str, **options: Any) -> Iterator[Follower]:
    """Context manager: yield the follower of a channel in an archive, and close it.

    :param url: of the channel's folder. :param key: public key of its writer; "any".
    :param options: of :func:`replicas.follow`.
    :raises UsageError: there is no key.
    """
    key = Path(key).read_text().strip() if Path(key).is_file() else key
    if not key:
        hint = 'the writer logs it, and keeps it beside its private key, in FILE.pub; "any" trusts whoever can write'
        raise UsageError(f"--archive-key is missing, which {url} is checked with", hint=hint)
    with contextlib.closing(replicas.follow(url, key=None if key == "any" else key, **options)) as found:
        yield found


def _kept(joined: replicas.Channel, version: int, deadline_s: float) -> replicas.Update:
    """Have the run bring an older version to this member; return it open for reading.

    Other members hold it; a lease that this makes keeps it there until this member
    leaves. Blocks until the bytes are here. The caller closes the update.

    :param deadline_s: longest time of the order, and again of the transfer, in seconds.
    :raises Gone: no member holds it, or it did not come within ``deadline_s``.
    """
    joined.versions.hold(version, deadline=deadline_s).wait()
    until = time.monotonic() + deadline_s
    while True:
        try:
            return joined.versions.read(version).wait()
        except Gone:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_S)


def membership(place: RunAddress, channel: str, role: str, group: str, deadline_s: float) -> replicas.Channel:
    """Join the channel as a replica of its own, and return it; the caller closes it.

    :param role: ``sources`` or ``targets``.
    :param group: the external group to join in; "" chooses one.
    :param deadline_s: longest wait for the join.
    :raises UsageError: the run has no such channel, or no group that fits.
    """
    status = place.status()
    named = {one.name: getattr(one, role) for one in status.channels}
    if channel not in named:
        raise UsageError(f'run "{status.run}" has no channel "{channel}"{nearest(channel, named)}', hint="")
    fit = {one.name: one for one in status.groups if one.launcher == "external" and one.world_size == 1}
    groups = sorted((name for name in named[channel] if name in fit), key=lambda name: fit[name].min_ready != 0)
    if group not in ("", *groups) or not groups:
        text = f'group "{group}" is of another kind' if group else "the run has no such group"
        hint = f"use --group {' or '.join(groups)}, or leave --group out" if groups else _remedy(channel, role)
        where = f"an external group of one rank in the {role} of {channel}"
        raise UsageError(f"this command joins {where}: {text}", hint=hint)
    endpoint = status.endpoint if place.endpoint is None or place.endpoint.startswith("unix:") else place.endpoint
    return replicas.join(
        channel,
        endpoint=endpoint,
        token=place.token(),
        run=status.run,
        group=group or groups[0],
        replica="auto",
        rank=0,
        world_size=1,
        timeout=max(1.0, deadline_s),
    )


def _remedy(channel: str, role: str) -> str:
    """Return a hint which keys of the config let a command join the channel.

    :param role: ``sources`` or ``targets``.
    """
    name = "reader" if role == "targets" else "loader"
    return (
        f'add to the config: [groups.{name}] with launcher = "external" and min_ready = 0, and "{name}" to {role} of '
        f"[channels.{channel}]; then start the run again"
    )

"""Commands to serve, keep, name and score versions."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from replicas.cli import render
from replicas.cli.base import Addressed, Json, Screen, command, json_text
from replicas.cli.find_run import RunAddress
from replicas.cli.order_commands import print_answer, send
from replicas.config import values as config_values
from replicas.control.exit_codes import FAILED
from replicas.errors import Disconnected, SyncError, UsageError
from replicas.messages import version_orders as orders
from replicas.messages.version_orders import Steered, VersionOrder
from replicas.status import ChannelStatus, RunStatus

Channel = Annotated[str, typer.Argument(metavar="CHANNEL", help="The name of a channel.")]
_VERSION = typer.Argument(metavar="VERSION", help="The number of a version, or a label.")
Version = Annotated[str, _VERSION]
_LOOK_S = 0.5


def seconds_of(option: str, text: str) -> float:
    """Return the seconds of an option's text, such as ``10m``.

    :param option: its name, such as ``--for``, for the error.
    :raises UsageError: it is not a duration above 0.
    """
    if not (seconds := config_values.in_units(text, config_values.UNITS_S)):
        raise UsageError(f'"{text}" is not a duration', hint=f'write {option} "90s", "10m" or "1h"')
    return seconds


def wait_until_served(place: RunAddress, channel: str, version: int, limit_s: float) -> int:
    """Poll the run until all its ready targets serve a version, or a later one.

    Return the version that is served. A supervisor that does not answer is asked again.

    :param limit_s: longest wait, in seconds.
    :raises SyncError: it was rejected, a newer candidate has taken its place, or it is
        not served within ``limit_s``.
    """
    until, why, hint = time.monotonic() + limit_s, "", ""
    while True:
        try:
            status = place.status()
            if is_served(status, channel, version):
                return _channel(status, channel).current
            waits = _channel(status, channel).current < version
            why = "that version is the candidate" if waits else "a target has not loaded that version yet"
            hint = f"replicas promote {channel} serves it" if waits else "see replicas status"
        except Disconnected as error:
            why, hint = error.message, error.hint or ""
        if time.monotonic() > until:
            raise SyncError(f"version {version} is not served within {limit_s:g} s: {why}", hint=hint)
        time.sleep(_LOOK_S)


def is_candidate(place: RunAddress, channel: str, version: int) -> bool:
    """Ask the run for its status; return True if the version is a candidate.

    That is a committed version which targets do not load before it is promoted.
    """
    return _channel(place.status(), channel).current < version


def _channel(status: RunStatus, name: str) -> ChannelStatus:
    """Return the status of the channel of this name, which exists."""
    return next(one for one in status.channels if one.name == name)


def is_served(status: RunStatus, name: str, version: int) -> bool:
    """Return True if all ready targets of a channel serve the version or a later one.

    Return False if one does not yet, or if no target is ready.

    :param name: the channel's.
    :raises SyncError: it was rejected, or a newer candidate has taken its place.
    """
    channel = _channel(status, name)
    rejected = {one.number: one.rejected for one in channel.versions if one.rejected}
    if version in rejected:
        raise SyncError(f"version {version} was rejected: {rejected[version]}", hint="")
    if channel.current >= version:
        groups = (one for one in status.groups if one.name in channel.targets and one.name != channel.archive)
        ready = [one for group in groups for one in group.replicas if one.state == "ready"]
        return bool(ready) and all(one.versions.get(name, 0) >= version for one in ready)
    if channel.committed_version > version:
        text = f"version {channel.committed_version} has taken the place of version {version}, which was not served"
        raise SyncError(text, hint="promote the newer version, or put this one again")
    return False


@command(failed=FAILED)
def versions(
    *,
    channel: Annotated[str | None, typer.Argument(metavar="CHANNEL", help="Only this channel.")] = None,
    place: Addressed,
    as_json: Json = False,
) -> None:
    """Show the versions of CHANNEL: labels, scores, and replicas that serve them."""
    status = place.status()
    found = [one for one in status.channels if one.name == channel or (channel is None and one.versions)]
    if channel is not None and not found:
        raise _no_channel(channel, [one.name for one in status.channels])
    if as_json:
        print(json_text({one.name: _plain(one) for one in found}))
    elif not found:
        print("no version is committed yet")
    else:
        now = time.time()
        for one in found:
            Screen().print(render.versions_table(one, now))


def _plain(channel: ChannelStatus) -> dict[str, object]:
    """Return what ``versions --json`` prints of a channel, as builtins.

    The keys are ``follow``, ``canary`` and ``versions``, as in its status.
    """
    keys = ("follow", "canary", "versions")
    return {key: msgspec.to_builtins(getattr(channel, key)) for key in keys}


def _no_channel(name: str, known: list[str]) -> UsageError:
    """Return (do not raise) the error that the run has no channel of this name.

    :param known: names of its channels.
    """
    hint = f"its channels are {', '.join(known)}" if known else "it has no channels"
    return UsageError(f'the run has no channel "{name}"{config_values.nearest(name, known)}', hint=hint)


def _carry_out(place: RunAddress, order: VersionOrder, doing: str, words: str, *, as_json: bool) -> None:
    """Send an order about versions, wait until it is done, and print the outcome.

    :param doing: text of the progress line.
    :param words: the outcome, with ``{version}``, ``{of}`` (the version whose content
        it has) and ``{name}`` (of a lease or label) to be filled in.
    """
    answer = send(place, order, doing)
    decided = msgspec.convert(answer.result, Steered)
    lasts = f", until {time.strftime('%H:%M:%S', time.localtime(decided.until))}" if decided.until else ""
    text = words.format(version=decided.version, of=decided.content_of, name=decided.name)
    print_answer(answer, f"{order.channel}: {text}{lasts}", as_json=as_json)


@command(failed=FAILED)
def promote(
    *, channel: Channel, version: Annotated[str, _VERSION] = "candidate", place: Addressed, as_json: Json = False
) -> None:
    """Serve VERSION (default: the candidate): all targets of CHANNEL load it."""
    order = orders.Promote(channel=channel, version=version)
    _carry_out(place, order, f"promoting {version}", "version {version} is served", as_json=as_json)


@command(failed=FAILED)
def reject(
    *,
    channel: Channel,
    version: Annotated[str, _VERSION] = "candidate",
    why: Annotated[str, typer.Option("--why", help="The reason, which is recorded.")] = "",
    place: Addressed,
    as_json: Json = False,
) -> None:
    """Never serve the candidate; replicas with it go back to the served version."""
    order = orders.Reject(channel=channel, version=version, why=why)
    _carry_out(place, order, f"rejecting {version}", "version {version} is rejected", as_json=as_json)


@command(failed=FAILED)
def rollback(
    *,
    channel: Channel,
    to: Annotated[str, typer.Option("--to", metavar="VERSION", help="The number of a version, or a label.")] = (
        "previous"
    ),
    place: Addressed,
    as_json: Json = False,
) -> None:
    """Serve an older version's content again, as a new version.

    Waits for the end of publishes that have begun, commits the content under the next
    number, and then rejects the candidate, if there is one. Targets load the version;
    no bytes move to hosts that have the content.
    """
    order = orders.Rollback(channel=channel, to=to)
    words = "version {version} is served, with the content of version {of}"
    _carry_out(place, order, f"going back to {to}", words, as_json=as_json)


@command(failed=FAILED)
def hold(
    *,
    channel: Channel,
    version: Version,
    lasts: Annotated[
        str, typer.Option("--for", metavar="TIME", help='How long, such as "10m". Default: until it is released.')
    ] = "",
    name: Annotated[str, typer.Option("--name", help="Name of the lease.")] = "",
    place: Addressed,
    as_json: Json = False,
) -> None:
    """Keep the content of VERSION while newer ones come; print the lease's name."""
    seconds = seconds_of("--for", lasts) if lasts else None
    order = orders.Hold(channel=channel, version=version, seconds=seconds, name=name)
    _carry_out(place, order, f"holding {version}", "lease {name} keeps version {version}", as_json=as_json)


@command(failed=FAILED)
def release(
    *,
    channel: Channel,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the lease.")],
    place: Addressed,
    as_json: Json = False,
) -> None:
    """End the lease NAME, which a hold has made."""
    order = orders.Release(channel=channel, name=name)
    _carry_out(place, order, f"releasing {name}", "lease {name} no longer keeps version {version}", as_json=as_json)


@command(failed=FAILED)
def label(
    *,
    channel: Channel,
    label: Annotated[str, typer.Argument(metavar="LABEL", help="A name of yours for a version.")],
    version: Annotated[str, _VERSION] = "",
    move: Annotated[bool, typer.Option("--move", help="It may point to another version now.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the label, in place of VERSION.")] = False,
    place: Addressed,
    as_json: Json = False,
) -> None:
    """Point LABEL to VERSION, whose content the run then keeps; or remove LABEL."""
    if bool(version) == remove:
        raise UsageError("give VERSION or --remove")
    order = orders.Label(channel=channel, label=label, version=version, move=move)
    words = "label {name} is removed" if remove else "label {name} points to version {version}"
    _carry_out(place, order, f"labelling {version}", words, as_json=as_json)


@command(failed=FAILED)
def score(
    *,
    channel: Channel,
    version: Version,
    scores: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="Scores, such as reward=0.82.")],
    place: Addressed,
    as_json: Json = False,
) -> None:
    """Report scores of VERSION. Their mean may promote or reject a candidate."""
    found: dict[str, float] = {}
    for one in scores:
        name, _, value = one.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise UsageError(f'"{one}" is not NAME=VALUE with a number', hint="such as reward=0.82") from None
    order = orders.Score(channel=channel, version=version, scores=found)
    _carry_out(place, order, f"scoring {version}", "version {version} has the scores", as_json=as_json)

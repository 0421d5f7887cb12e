"""The command ``wait``, for scripts that continue when replicas are ready."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs

from replicas.cli.base import (
    ConfigOption,
    EndpointOption,
    Json,
    OptionalTarget,
    TokenFileOption,
    checked_target,
    exit_codes,
    json_text,
    patience,
    place_of,
)
from replicas.cli.find_run import RunAddress
from replicas.config import values as config_values
from replicas.control.exit_codes import FAILED
from replicas.core.lives.ordering import GOOD, enough, is_good
from replicas.errors import DeadlineExceeded, UsageError, WorldError
from replicas.status import GroupStatus, ReplicaStatus, RunStatus

__all__ = ["chosen", "unready", "wait"]

_LOOK_AGAIN_S = 0.2


def wait(
    target: OptionalTarget = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    token_file: TokenFileOption = None,
    ready: Annotated[bool, typer.Option("--ready", help="Until they are ready; the default.")] = True,
    timeout: Annotated[
        str, typer.Option("--timeout", "-t", metavar="DURATION", help='How long at most, such as "90s" or "1h".')
    ] = "10m",
    as_json: Json = False,
) -> None:
    """Wait until a replica, a group or (without TARGET) the whole run is ready.

    One that has done its work counts as ready. Exit code 1 when that cannot happen any
    more (a replica has failed or was drained, the run is over), or not in time.
    """
    with exit_codes(failed=FAILED):
        place = place_of(config, None, endpoint, token_file)
        name, seconds = checked_target(target), _seconds(timeout)
        began = time.monotonic()
        found = _until_ready(place, name, began + seconds, timeout)
    if as_json:
        print(
            json_text(
                {
                    "ready": [one.name for one in found if one.state in GOOD],
                    "seconds": round(time.monotonic() - began, 3),
                }
            )
        )
    else:
        print(f"{name or 'the run'}: ready")


def _seconds(text: str) -> float:
    place = config_values.Place(Path())
    found = config_values.duration().read(place, text)
    if place.problems:
        raise UsageError(f'"{text}" is no duration', hint='write --timeout "90s", "10m" or "1h"')
    seconds: float = found
    return seconds


def _until_ready(place: RunAddress, target: str | None, until: float, words: str) -> tuple[ReplicaStatus, ...]:
    missing: list[ReplicaStatus] | None = None
    with patience("waiting") as show_doing:
        for status in place.looks(_LOOK_AGAIN_S):
            missing = missing if status is None else unready(status, target)
            if status is not None and not missing:
                return tuple(one for group in chosen(status, target) for one in group.replicas)
            if missing:
                show_doing(f"waiting for {_named(missing)}")
            if time.monotonic() >= until:
                what = "nobody answered" if missing is None else f"not ready: {_named(missing)}"
                raise DeadlineExceeded(f"not within {words}: {what}", hint="replicas status tells why")
    raise WorldError("the run is over")


def chosen(status: RunStatus, target: str | None) -> tuple[GroupStatus, ...]:
    """The named group, or its group with only the named replica; None: all groups.

    :raises UsageError: there is no such group or replica.
    """
    group, _, index = (target or "").partition("/")
    found = tuple(one for one in status.groups if target is None or one.name == group)
    if index:
        replicas = tuple(one for each in found for one in each.replicas if one.name == target)
        found = tuple(structs.replace(one, replicas=replicas, min_ready=None) for one in found if replicas)
    if not found:
        known = ", ".join(one.name for one in status.groups)
        raise UsageError(f'run "{status.run}" has no "{target}"', hint=f"its groups: {known}")
    return found


def unready(status: RunStatus, target: str | None) -> list[ReplicaStatus]:
    """Replicas to wait for. A group is ready with ``min_ready`` ready or done ones.

    :raises WorldError: too few of them can still become ready.
    """
    missing: list[ReplicaStatus] = []
    for group in chosen(status, target):
        if is_good([one.state for one in group.replicas], group.min_ready):
            continue
        lost = [one for one in group.replicas if one.state in ("failed", "drained")]
        if len(group.replicas) - len(lost) < enough(group.min_ready, len(group.replicas)):
            why = f"has failed: {lost[0].reason}" if lost[0].state == "failed" else "was drained"
            raise WorldError(f"{lost[0].name} {why}", hint=f"see: replicas logs {lost[0].name}")
        missing += [one for one in group.replicas if one.state not in GOOD]
    return missing


def _named(found: list[ReplicaStatus]) -> str:
    words = [f"{one.name} ({one.reason or one.state})" for one in found[:4]]
    return ", ".join(words) + (f" and {len(found) - 4} more" if len(found) > 4 else "")

"""The command ``wait``, for scripts that go on when replicas serve."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from replicas import config_values
from replicas.control.cli_base import (
    FAILED,
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
from replicas.control.find import Place
from replicas.errors import DeadlineExceeded, Disconnected, UsageError, WorldError
from replicas.status import ReplicaStatus, RunStatus

__all__ = ["chosen", "unready", "wait"]

_LOOK_AGAIN_S = 0.2
_OVER = ("failed", "finished", "drained")
"""States in which nothing comes by itself."""


def wait(
    target: OptionalTarget = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    token_file: TokenFileOption = None,
    ready: Annotated[bool, typer.Option("--ready", help="Until they are ready: what it waits for anyway.")] = True,
    timeout: Annotated[
        str, typer.Option("--timeout", "-t", metavar="DURATION", help='How long at most, such as "90s" or "1h".')
    ] = "10m",
    as_json: Json = False,
) -> None:
    """Wait until a replica, a group or (without TARGET) all of the run is ready, or has done its work.

    Exit code 1 when that cannot come about any more (a replica has failed or was drained, the run is over), or not in time.
    """
    with exit_codes(failed=FAILED):
        place = place_of(config, None, endpoint, token_file)
        name, seconds = checked_target(target), _seconds(timeout)
        began = time.monotonic()
        found = _until_ready(place, name, began + seconds, timeout)
    if as_json:
        print(json_text({"ready": [one.name for one in found], "seconds": round(time.monotonic() - began, 3)}))
    else:
        print(f"{name or 'the run'}: ready")


def _seconds(text: str) -> float:
    place = config_values.Place(Path())
    found = config_values.duration()(place, text)
    if place.problems:
        raise UsageError(f'"{text}" is no duration', hint='write --timeout "90s", "10m" or "1h"')
    seconds: float = found
    return seconds


def _until_ready(place: Place, target: str | None, until: float, words: str) -> tuple[ReplicaStatus, ...]:
    end = place.end()
    missing: list[ReplicaStatus] | None = None
    with patience("waiting") as spinner:
        while True:
            try:
                status = place.status()
                end.answered()
            except Disconnected as error:
                if end.came(error):
                    raise WorldError("the run is over") from error
            else:
                missing = unready(status, target)
                if not missing:
                    return chosen(status, target)
                if spinner is not None:
                    spinner.update(f"waiting for {_named(missing)} ...")
            if time.monotonic() >= until:
                what = "nobody answered" if missing is None else f"not ready: {_named(missing)}"
                raise DeadlineExceeded(f"not within {words}: {what}", hint="replicas status tells why")
            time.sleep(_LOOK_AGAIN_S)


def chosen(status: RunStatus, target: str | None) -> tuple[ReplicaStatus, ...]:
    """The replicas that are meant; None: all of the run.

    :raises UsageError: there is no such group or replica.
    """
    group, _, index = (target or "").partition("/")
    groups = [one for one in status.groups if target is None or one.name == group]
    found = tuple(one for each in groups for one in each.replicas if not index or one.name == target)
    if not groups or (index and not found):
        known = ", ".join(one.name for one in status.groups)
        raise UsageError(f'run "{status.run}" has no "{target}"', hint=f"its groups: {known}")
    return found


def unready(status: RunStatus, target: str | None) -> list[ReplicaStatus]:
    """Those that are not ready yet. A program that has done its work is waited for no longer.

    :raises WorldError: one of them will not be ready by itself.
    """
    found = [one for one in chosen(status, target) if one.state != "ready" and not _is_done(one)]
    lost = next((one for one in found if one.state in _OVER), None)
    if lost is not None:
        raise WorldError(f"{lost.name} {_why(lost)}", hint=f"replicas logs {lost.name}")
    return found


def _is_done(one: ReplicaStatus) -> bool:
    return one.state == "finished" and one.reason != "stopped"


def _why(one: ReplicaStatus) -> str:
    if one.state == "failed":
        return f"has failed: {one.reason}"
    return "was drained"


def _named(found: list[ReplicaStatus]) -> str:
    words = [f"{one.name} ({one.reason or one.state})" for one in found[:4]]
    return ", ".join(words) + (f" and {len(found) - 4} more" if len(found) > 4 else "")

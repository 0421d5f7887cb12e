"""Commands that send orders: scale, restart, drain, reset-failed, reload and stacks."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from replicas.cli.base import (
    ConfigArgument,
    ConfigOption,
    EndpointOption,
    GroupArgument,
    Json,
    OptionalTarget,
    TargetArgument,
    TokenFileOption,
    checked_target,
    exit_codes,
    json_text,
    patience,
    place_of,
)
from replicas.cli.find_run import RunAddress, RunEndWatcher
from replicas.cli.screen import Screen
from replicas.common.foreign import one_line
from replicas.control.commands import Answer, Drain, Order, Reload, ResetFailed, Restart, Scale, StacksOrder
from replicas.control.exit_codes import FAILED
from replicas.core.lives.lifecycle import SETTLED
from replicas.status import RunStatus

__all__ = ["drain", "reload", "reset_failed", "restart", "scale", "stacks"]

_LOOK_AGAIN_S = 0.2

NoWait = Annotated[bool, typer.Option("--no-wait", help="Return as soon as it has begun.")]


def scale(
    group: GroupArgument,
    replicas: Annotated[int, typer.Argument(metavar="REPLICAS", min=0, help="The new number of replicas.")],
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    token_file: TokenFileOption = None,
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Set GROUP to REPLICAS replicas: starts more, or drains the highest ones.

    Holds until the next scale, or until a reload changes the number in the config.
    """
    with exit_codes(failed=FAILED):
        place = place_of(config, None, endpoint, token_file)
        order = Scale(group=checked_target(group) or "", replicas=replicas)
        answer = _hand_in(place, order, f"scaling {group}", wait=not no_wait)
    _tell(answer, f"{group}: {replicas} replica{'s' if replicas != 1 else ''} wanted", as_json=as_json)


def restart(
    target: TargetArgument,
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    token_file: TokenFileOption = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="A few at a time (max_unavailable), each ready before the next.")
    ] = False,
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Restart a replica, or all of a group. Spends no restart budget.

    Returns when their next generation has begun, with --rolling when all are ready; see
    also the command wait.
    """
    with exit_codes(failed=FAILED):
        place = place_of(config, None, endpoint, token_file)
        order = Restart(target=checked_target(target) or "", rolling=rolling)
        answer = _hand_in(place, order, f"restarting {target}", wait=not no_wait)
    _tell(answer, f"{target}: restarted, and ready" if rolling else f"{target}: starting again", as_json=as_json)


def drain(
    target: OptionalTarget = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    token_file: TokenFileOption = None,
    hurry: Annotated[
        bool, typer.Option("--hurry", help="Kill at once; also hurries a drain that is under way.")
    ] = False,
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """End a replica or a group in good order, or (without TARGET) the whole run.

    Each replica may finish its sync (drain_timeout), then gets SIGTERM, then
    (stop_timeout) SIGKILL.
    """
    with exit_codes(failed=FAILED):
        place = place_of(config, None, endpoint, token_file)
        order = Drain(target=checked_target(target), hurry=hurry)
        if target is not None:
            answer = _hand_in(place, order, f"draining {target}", wait=not no_wait)
        else:
            end = place.end()
            answer = place.client().order(order, wait=False)
            if not no_wait:
                _until_gone(place, end)
                answer = Answer(done=True)
    _tell(answer, f"{target}: drained" if target is not None else "the run is over", as_json=as_json)


def reset_failed(
    target: OptionalTarget = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    token_file: TokenFileOption = None,
    as_json: Json = False,
) -> None:
    """Start failed replicas again, with a full restart budget."""
    with exit_codes(failed=FAILED):
        place = place_of(config, None, endpoint, token_file)
        answer = _hand_in(place, ResetFailed(target=checked_target(target)), "resetting")
    names = answer.result or ()
    _tell(
        answer,
        f"starting again: {', '.join(names)}" if names else "nothing had failed; restart budgets are full",
        as_json=as_json,
    )


def reload(
    config: ConfigArgument = None,
    named: ConfigOption = None,
    endpoint: EndpointOption = None,
    token_file: TokenFileOption = None,
    as_json: Json = False,
) -> None:
    """Have the supervisor read its config again; only changed groups are restarted.

    A config with problems changes nothing: they are printed, with exit code 78.
    """
    with exit_codes(failed=FAILED):
        answer = _hand_in(place_of(config, named, endpoint, token_file), Reload(), "reloading")
    _tell(answer, _reloaded(answer), as_json=as_json)


def stacks(
    target: OptionalTarget = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    token_file: TokenFileOption = None,
    as_json: Json = False,
) -> None:
    """Print the stack of every thread of the ranks."""
    with exit_codes(failed=FAILED):
        place = place_of(config, None, endpoint, token_file)
        answer = _hand_in(place, StacksOrder(target=checked_target(target)), "asking")
    found: dict[str, str] = answer.result or {}
    if as_json:
        print(json_text(found))
        return
    console = Screen(soft_wrap=True)
    for name, text in found.items():
        console.rule(Text(name, style="bold"), align="left")
        console.print(text.rstrip("\n"))


# ------------------------------------------------------------ helpers


def _hand_in(place: RunAddress, order: Order, doing: str, *, wait: bool = True) -> Answer:
    client = place.client()
    with patience(doing):
        return client.order(order, wait=wait)


def _until_gone(place: RunAddress, end: RunEndWatcher) -> None:
    """Wait until the run has ended.

    :raises Disconnected: it has not ended, and no longer answers.
    """
    pid = None
    with patience("draining") as show_doing:
        for status in place.looks(_LOOK_AGAIN_S, end):
            if status is None:
                continue
            if pid not in (None, status.pid):
                return  # the run was started again
            pid = status.pid
            show_doing(f"draining: {_running(status)} left")


def _running(status: RunStatus) -> str:
    names = [one.name for group in status.groups for one in group.replicas if one.state not in SETTLED]
    return ", ".join(names) if 0 < len(names) <= 4 else f"{len(names)} replicas"


def _reloaded(answer: Answer) -> str:
    result = answer.result if isinstance(answer.result, dict) else {}
    parts = [f"{name}: {', '.join(result[name])}" for name in ("changed", "added", "removed") if result.get(name)]
    return f"reloaded; {'; '.join(parts)}" if parts else "reloaded; nothing has changed"


def _tell(answer: Answer, words: str, *, as_json: bool) -> None:
    if as_json:
        print(json_text({"done": answer.done, "result": answer.result}))
    elif answer.done:
        print(one_line(words))
    else:
        print("begun; follow it with: replicas events --follow")

"""Commands that send orders to a run, and ``wait``, which waits until it is ready."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from msgspec import structs
from rich.text import Text

from replicas.cli.base import (
    GroupArgument,
    Json,
    OptionalRanks,
    OptionalTarget,
    Screen,
    TargetArgument,
    ThisRun,
    command,
    json_text,
    patience,
)
from replicas.cli.find_run import RunAddress
from replicas.common.foreign import one_line
from replicas.common.sizes import count_text, list_text
from replicas.config import values as config_values
from replicas.control.commands import Answer, Detach, Drain, Order, Reload, ResetFailed, Restart, Scale, StacksOrder
from replicas.control.exit_codes import FAILED
from replicas.core.lives.lifecycle import SETTLED
from replicas.core.lives.ordering import GOOD, is_good, needed_replicas
from replicas.errors import DeadlineExceeded, Disconnected, UsageError, WorldError
from replicas.linux.processes import command_line, processes, start_time
from replicas.status import GroupStatus, ReplicaStatus, RunStatus

_LOOK_AGAIN_S = 0.2
_SCALED_S = 600.0
_COMING_S = 30.0
"""Seconds that a run may take to appear before ``wait`` gives up."""
_STARTS = re.compile(r"replicas (run|slurm|ray) |replicas\.supervisor ")

NoWait = Annotated[bool, typer.Option("--no-wait", help="Return as soon as the order has begun.")]


@command(failed=FAILED)
def scale(
    *,
    group: GroupArgument,
    replicas: Annotated[int, typer.Argument(metavar="REPLICAS", min=0, help="The new number of replicas.")],
    place: ThisRun,
    ready: Annotated[bool, typer.Option("--ready", help="Wait until GROUP is ready, for up to 10 minutes.")] = False,
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Set GROUP to REPLICAS replicas: starts more, or drains the highest ones.

    Waits until drained replicas have ended, and for new ones only with --ready. Holds
    until the next scale, or until a reload changes the number in the config.
    """
    if ready and no_wait:
        raise UsageError("give --ready or --no-wait, not both")
    answer = send(place, Scale(group=group, replicas=replicas), f"scaling {group}", wait=not no_wait)
    if ready:
        _until_ready(place, group, time.monotonic() + _SCALED_S, "10m")
    words = f"{count_text(replicas, 'replica')} {'wanted, and ready' if ready else 'wanted'}"
    print_answer(answer, f"{group}: {words}", as_json=as_json)


@command(failed=FAILED)
def restart(
    *,
    target: TargetArgument,
    place: ThisRun,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="A few at a time (max_unavailable), each ready before the next.")
    ] = False,
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Restart a replica, or all of a group. Spends no restart budget.

    Returns when the next generation has begun, with --rolling when all replicas are
    ready; see also the command wait.
    """
    answer = send(place, Restart(target=target, rolling=rolling), f"restarting {target}", wait=not no_wait)
    done = f"{target}: restarted, and ready" if rolling else f"{target}: starting again"
    print_answer(answer, done, as_json=as_json)


@command(failed=FAILED)
def drain(
    *,
    target: OptionalTarget = None,
    place: ThisRun,
    hurry: Annotated[
        bool, typer.Option("--hurry", help="Kill at once; also hurries a drain that is under way.")
    ] = False,
    node: Annotated[
        str, typer.Option(metavar="NODE", help="Move the replicas of this node elsewhere, in place of TARGET.")
    ] = "",
    undo: Annotated[bool, typer.Option("--undo", help="With --node: let the node take replicas again.")] = False,
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """End a replica or a group in good order, or (without TARGET) the whole run.

    Each replica may finish its sync (drain_timeout), then gets SIGTERM, then
    (stop_timeout) SIGKILL.
    """
    if (node and (target is not None or hurry)) or (undo and not node):
        raise UsageError("give TARGET (with or without --hurry), or --node (with or without --undo)")
    order = Drain(target=target, hurry=hurry, node=node or None, undo=undo)
    if node or target is not None:
        what = f"node {node}" if node else target
        answer = send(place, order, f"draining {what}", wait=not no_wait)
        done = f"{what} {'takes replicas again' if undo else 'is drained'}" if node else f"{what}: drained"
    else:
        states, done = place.poll_status(_LOOK_AGAIN_S), "the run is over"
        answer = place.client().order(order, wait=False)
        if not no_wait:
            _until_gone(states)
            answer = Answer(done=True)
    print_answer(answer, done, as_json=as_json)


@command(failed=FAILED)
def detach(*, place: ThisRun, as_json: Json = False) -> None:
    """End the supervisor alone; the next one takes over its replicas and agents.

    For an upgrade, or a restart of the supervisor. Needs run.adopt in the config: the
    time within which the next one must be started.
    """
    states = place.poll_status(_LOOK_AGAIN_S)
    answer = place.client().order(Detach())
    _until_gone(states)
    print_answer(answer, "the replicas run on; start the next supervisor with: replicas run CONFIG", as_json=as_json)


@command(failed=FAILED)
def reset_failed(*, target: OptionalTarget = None, place: ThisRun, as_json: Json = False) -> None:
    """Start failed replicas again, with a full restart budget."""
    answer = send(place, ResetFailed(target=target), "resetting")
    again = f"starting again: {', '.join(answer.result)}" if answer.result else ""
    print_answer(answer, again or "nothing had failed; restart budgets are full", as_json=as_json)


@command(failed=FAILED)
def reload(*, place: ThisRun, as_json: Json = False) -> None:
    """Have the supervisor read its config again; only changed groups are restarted.

    A config with problems changes nothing: they are printed, with exit code 78.
    """
    answer = send(place, Reload(), "reloading")
    result = answer.result if isinstance(answer.result, dict) else {}
    parts = [f"{name}: {', '.join(result[name])}" for name in ("changed", "added", "removed") if result.get(name)]
    print_answer(answer, f"reloaded; {'; '.join(parts) or 'nothing has changed'}", as_json=as_json)


@command(failed=FAILED)
def stacks(*, target: OptionalRanks = None, place: ThisRun, as_json: Json = False) -> None:
    """Print the stack of every thread of the ranks."""
    replica, rank = target, None
    if target is not None and target.count("/") == 2:
        replica, _, rank = target.rpartition("/")
    found: dict[str, str] = send(place, StacksOrder(target=replica), "asking").result or {}
    if rank is not None:  # texts of the whole replica say why a rank is missing
        found = {name: text for name, text in found.items() if name == target or not name.startswith(f"{replica}/")}
        if not found:
            raise UsageError(f'rank "{target}" does not run now', hint=f"see its ranks with: replicas stacks {replica}")
    if as_json:
        print(json_text(found))
        return
    console = Screen(soft_wrap=True)
    for name, text in found.items():
        console.print(Text(name, style="bold"))
        console.print(text.rstrip("\n"))


def send(place: RunAddress, order: Order, doing: str, *, wait: bool = True) -> Answer:
    """Send an order to the run's supervisor, wait, and return the answer.

    On a terminal a progress line is shown meanwhile.

    :param doing: text of the progress line, such as "scaling rollout".
    :param wait: return when the order is done; False: as soon as it has begun, with
        ``done=False`` in the answer.
    :raises replicas.errors.ReplicasError: it was refused or failed, or there was no
        answer.
    """
    with patience(doing):
        return place.client().order(order, wait=wait)


def _until_gone(states: Iterator[RunStatus | None]) -> None:
    """Wait until the run is over, or has another supervisor; show progress.

    :param states: of :meth:`RunAddress.poll_status`.
    :raises replicas.errors.Disconnected: its supervisor was killed, or is silent.
    """
    pid = None
    with patience("waiting for its end") as show_doing:
        for status in states:
            if status is None:
                continue
            if pid not in (None, status.pid):
                return  # the run was started again
            pid = status.pid
            left = [one.name for group in status.groups for one in group.replicas if one.state not in SETTLED]
            if status.draining:
                show_doing(f"draining: {', '.join(left) if 0 < len(left) <= 4 else f'{len(left)} replicas'} left")


def print_answer(answer: Answer, words: str, *, as_json: bool) -> None:
    """Print the answer to an order, as JSON or as words.

    :param words: printed if the order is done; otherwise that it has begun.
    """
    if as_json:
        print(json_text({"done": answer.done, "result": answer.result}))
    elif answer.done:
        print(one_line(words))
    else:
        print("the order has begun; follow it with: replicas events --follow")


@command(failed=FAILED)
def wait(
    *,
    target: OptionalTarget = None,
    place: ThisRun,
    ready: Annotated[bool, typer.Option("--ready", help="Wait until they are ready; the default.")] = True,
    timeout: Annotated[
        str, typer.Option("--timeout", "-t", metavar="DURATION", help='How long at most, such as "90s" or "1h".')
    ] = "10m",
    as_json: Json = False,
) -> None:
    """Wait until a replica, a group or (without TARGET) the whole run is ready.

    A replica that has done its work counts as ready. A run that is only being started
    is waited for, too: 30 s until it appears. Exit code 1 if it can no longer become
    ready (a replica has failed or was drained, the run is over), or not in time.
    """
    seconds = config_values.in_units(timeout, config_values.UNITS_S)
    if not seconds:
        raise UsageError(f'"{timeout}" is not a duration', hint='write --timeout "90s", "10m" or "1h"')
    began = time.monotonic()
    found = _until_ready(place, target, began + seconds, timeout)
    if as_json:
        names = [one.name for one in found if one.state in GOOD]
        print(json_text({"ready": names, "seconds": round(time.monotonic() - began, 3)}))
    else:
        print(f"{target or 'the run'}: ready")


def _until_ready(place: RunAddress, target: str | None, until: float, words: str) -> tuple[ReplicaStatus, ...]:
    """Wait until the target is ready, showing progress; return its replicas.

    :param target: a group or replica; None for all groups.
    :param until: when to give up, by ``time.monotonic()``.
    :param words: the timeout as the user wrote it, for the error.
    :raises DeadlineExceeded: it was not ready in time.
    :raises WorldError: it can no longer become ready, or the run is over.
    """
    missing: list[ReplicaStatus] | None = None
    with patience("waiting") as show_doing:
        for status in _wait_for_run(place, until, show_doing):
            missing = missing if status is None else unready(status, target)
            if status is not None and not missing:
                return tuple(one for group in chosen(status, target) for one in group.replicas)
            if missing:
                show_doing(f"waiting for {_named(missing)}")
            if time.monotonic() >= until:
                what = "the run does not answer" if missing is None else f"not ready: {_named(missing)}"
                raise DeadlineExceeded(f"timed out after {words}: {what}", hint="replicas status shows why")
    raise WorldError("the run is over")


def _wait_for_run(place: RunAddress, until: float, show_doing: Callable[[str], None]) -> Iterator[RunStatus | None]:
    """Block until the run answers; return an iterator that polls its states.

    So a script may start the run in the background, and wait for it immediately. That
    an earlier run of the same config has ended is no error while a new one starts.

    :param until: when to give up, by ``time.monotonic()``.
    :param show_doing: changes the progress line.
    :raises replicas.errors.Disconnected: it does not appear, or not in time.
    :raises WorldError: it is over, and no process that starts it is seen.
    """
    give_up_at = min(until, time.monotonic() + _COMING_S)
    while True:
        try:
            states = place.poll_status(_LOOK_AGAIN_S)
            place.status()
            return states
        except Disconnected as error:
            over, late = place.how_it_ended(), time.monotonic() >= (until if place.starting else give_up_at)
            if over and (late or not _any_begins()):
                raise WorldError(error.message, hint=error.hint) from error
            if late:
                raise
        show_doing("waiting for the run to start")
        time.sleep(_LOOK_AGAIN_S)


def _any_begins() -> bool:
    """Return True if a command that starts a run has begun within the last 30 s.

    It is looked for among this machine's processes: it may still import its modules, so
    that no state folder shows it.
    """
    since = (start_time(os.getpid()) or 0) - _COMING_S * os.sysconf("SC_CLK_TCK")
    return any(_STARTS.search(command_line(pid)) and (start_time(pid) or 0) > since for pid in processes())


def chosen(status: RunStatus, target: str | None) -> tuple[GroupStatus, ...]:
    """Return the status of the groups that a target selects.

    :param target: a group, or a replica, which selects its group without its other
        replicas; None for all groups.
    :raises UsageError: there is no such group or replica.
    """
    group, _, index = (target or "").partition("/")
    found = tuple(one for one in status.groups if target is None or one.name == group)
    if index:
        replicas = tuple(one for each in found for one in each.replicas if one.name == target)
        found = tuple(structs.replace(one, replicas=replicas, min_ready=None) for one in found if replicas)
    if not found:
        known = {one.name: count_text(len(one.replicas), "replica") for one in status.groups}
        why = f"; {group} has {known[group]}" if group in known else config_values.nearest(group, known)
        raise UsageError(f'run "{status.run}" has no "{target}"{why}')
    return found


def unready(status: RunStatus, target: str | None) -> list[ReplicaStatus]:
    """Return the replicas for which the target must still wait; none if it is ready.

    They are neither ready nor done, in each group of the target that has fewer good
    replicas than it needs.

    :param target: a group or replica; None for all groups.
    :raises WorldError: so many replicas of a group have failed or were drained that the
        group cannot become ready.
    """
    missing: list[ReplicaStatus] = []
    for group in chosen(status, target):
        if is_good([one.state for one in group.replicas], group.min_ready):
            continue
        lost = [one for one in group.replicas if one.state in ("failed", "drained")]
        if len(group.replicas) - len(lost) < needed_replicas(group.min_ready, len(group.replicas)):
            why = f"has failed: {lost[0].reason}" if lost[0].state == "failed" else "was drained"
            raise WorldError(f"{lost[0].name} {why}", hint=f"see: replicas logs {lost[0].name}")
        missing += [one for one in group.replicas if one.state not in GOOD]
    return missing


def _named(found: list[ReplicaStatus]) -> str:
    """Return up to four replicas as text, each with its reason or state."""
    return list_text([f"{one.name} ({one.reason or one.state})" for one in found], 4)

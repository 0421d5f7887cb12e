"""Read-only commands: ``status``, ``logs``, ``events``, ``doctor``."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from replicas.cli import render
from replicas.cli.base import Json, OptionalRanks, Screen, ThisRun, command, complain, json_text, patience, slashed
from replicas.cli.find_run import EVENTS_FILE, STATE_FILE, NotTrusted, RunAddress, has_supervisor, trusted
from replicas.cli.slurm import queued
from replicas.cli.top import show_live
from replicas.common.foreign import ascii_controls, one_line, readable
from replicas.common.sizes import count_text
from replicas.config.values import UNITS_S, in_units, nearest
from replicas.control.commands import DoctorOrder
from replicas.control.exit_codes import FAILED
from replicas.control.log_files import POLL_S, LogFollower, LogLine, Selection, origin
from replicas.errors import Disconnected, ReplicasError, UsageError
from replicas.status import RunStatus
from replicas.telemetry import event_log, words
from replicas.telemetry.events import TYPES, Record, RunEnded, RunStarted, encode

if TYPE_CHECKING:
    from replicas.supervisor.agent.checks import Finding

_LINE_NBYTES = 2 << 20
_CLOCKS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue with new lines until the run is over.")]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="WHEN", help='Only newer than this: "10m" (ago; ms, s, m, h, d), "14:30" or "2026-11-21 14:30".'
    ),
]


@command()
def status(
    *,
    place: ThisRun,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it repeatedly until the run is over.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Interval of --watch.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Print the state of a running run: its replicas, channels and versions.

    With --watch a terminal shows the view of `replicas top`.
    """
    states = place.poll_status(interval) if watch else None
    try:
        answer = place.status()
    except Disconnected as error:
        raise Disconnected(error.message, hint=queued(place) or error.hint) from error
    if states is not None and (as_json or not show_live(place, interval)):
        _print_each(states, as_json=as_json)
    elif states is None and as_json:
        print(json_text(answer))
    elif states is None:
        Screen().print(render.status_tables(answer))


def _print_each(states: Iterator[RunStatus | None], *, as_json: bool) -> None:
    """Print each state as it comes, as a line of JSON or as tables; skip None.

    After the last one, unless with JSON, print that the run is over.
    """
    console = Screen()
    for answer in states:
        if answer is not None and as_json:
            print(ascii_controls(msgspec.json.encode(answer).decode()), flush=True)
        elif answer is not None:
            console.print(render.status_tables(answer))
    if not as_json:
        console.print("the run is over")


@command()
def logs(
    *,
    target: OptionalRanks = None,
    place: ThisRun,
    rank: Annotated[int | None, typer.Option("--rank", "-r", min=0, help="Only this rank of each replica.")] = None,
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", min=1, help="Only this generation (start). Default: the newest.")
    ] = None,
    follow: Follow = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=0, help="Only the last N of each rank. Default: all; with -f, 10."),
    ] = None,
    since: Since = None,
    previous: Annotated[bool, typer.Option("--previous", help="Logs of the run before this one.")] = False,
    as_json: Json = False,
) -> None:
    """Print the output of a replica, a group or all programs, also after the run's end.

    Lines of several ranks begin with GROUP/INDEX/RANK.
    """
    selection = Selection(
        target=target,
        rank=rank,
        generation=generation,
        lines=10 if follow and lines is None and since is None else lines,
        since=None if since is None else moment(since, now=time.time()),
    )
    if place.endpoint is None and (previous or not _has_other_nodes(place)):
        found = _from_files(place, selection, follow, previous)
    elif previous:
        raise UsageError("--previous reads files on the run's own machine, and cannot be used with --endpoint")
    else:
        found = _from_port(place, selection, follow)
    _print_lines(found, target or "the run", as_json=as_json)


def _has_other_nodes(place: RunAddress) -> bool:
    """Return True if the run has a living supervisor, and nodes on other machines.

    Only the supervisor can read their logs.
    """
    from replicas.supervisor.state.run_state import RunState  # slow to import: only this command needs it

    saved = RunState(place.state_dir / STATE_FILE).peek()
    return saved is not None and any(not agent.local for agent in saved.agents) and has_supervisor(place.state_dir)


def _from_port(place: RunAddress, selection: Selection, follow: bool) -> Iterator[tuple[LogLine, bool]]:
    """Yield log lines that the run's supervisor sends over the control port.

    Each comes with True if the lines are of several ranks, so that its origin must be
    shown.

    :param selection: which lines. :param follow: continue until the run is over.
    """
    query = {name: str(value) for name, value in msgspec.structs.asdict(selection).items() if value is not None}
    seen: set[tuple[str, int]] = set()
    for text in place.client().logs({**query, "follow": str(int(follow))}):
        if text:
            line = msgspec.json.decode(text, type=LogLine)
            seen.add((line.replica, line.rank))
            yield line, len(seen) > 1 or "/" not in (selection.target or "")


def _from_files(
    place: RunAddress, selection: Selection, follow: bool, previous: bool
) -> Iterator[tuple[LogLine, bool]]:
    """Yield log lines from the files in the run's state folder.

    Each comes with True if the lines are of several ranks, so that its origin must be
    shown.

    :param selection: which lines. :param follow: continue while the run has a
        supervisor.
    :param previous: read the logs of the run before this one.
    """
    state_dir = place.state_dir
    follower = LogFollower(state_dir / ("logs.previous" if previous else "logs"), selection)
    try:
        found, more = list[LogLine](), True
        while found or more:
            more = follow and has_supervisor(state_dir)  # before the poll, so that the last lines are not missed
            found = follower.poll()
            for line in found:
                yield line, follower.many
            if more and not found:
                time.sleep(POLL_S)
    finally:
        rest = follower.close()
    for line in rest:
        yield line, follower.many


def _print_lines(found: Iterator[tuple[LogLine, bool]], of: str, *, as_json: bool) -> None:
    """Print log lines as they come; if there are none, say so on stderr.

    On a terminal, keep colors but no other control sequences.

    :param found: each line, and whether to show its rank before it.
    :param of: what the lines are of, for the message on stderr.
    """
    terminal, line = sys.stdout.isatty(), None
    for line, many in found:
        prefix = origin(line) if many else ""
        if as_json:
            text = ascii_controls(msgspec.json.encode(line).decode())
        elif terminal:
            text = b"".join(readable(f"{line.text}\n".encode(), prefix.encode(), _LINE_NBYTES)).decode().rstrip("\n")
        else:
            text = f"{prefix}{line.text}"
        print(text, flush=terminal or as_json)
    if line is None:
        complain(f"{of}: no output yet, or its logs were removed")


@command()
def events(
    *,
    place: ThisRun,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", metavar="TARGET", help="Only events of a group, GROUP/INDEX or GROUP/INDEX/RANK."
        ),
    ] = None,
    follow: Follow = False,
    after: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only events with a number above N.")] = None,
    since: Since = None,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=1, help="Only the last N.")] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Include events of earlier runs.")] = False,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="TYPE", help="Only events of this type, such as SyncEnded; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the events of a run, also of one that is over.

    Without --type and --json, events that every version brings are left out (commits,
    replicas that serve it), and successful collectives. So are ends of processes, which
    the change of state of their replica tells.
    """
    if unknown := set(types or ()) - set(TYPES):
        text = f"no event has the type {min(unknown)}{nearest(min(unknown), TYPES)}"
        raise UsageError(text, hint="docs/reference/events.md lists all types")
    target = slashed(target)
    first = 0.0 if since is None else moment(since, now=time.time())
    console = Screen(soft_wrap=True)

    def wanted(record: Record) -> bool:
        """Return True if the options select this event by its target, time and type."""
        shown = type(record.event).__name__ in types if types else as_json or not words.routine(record.event)
        return shown and record.at >= first and (target is None or words.concerns(record, target))

    position = after if after is not None else 0 if every or since is not None else _began(place)
    named = target is None

    def past() -> Iterator[Record]:
        """Yield the selected events that are recorded already.

        Set ``position`` to the number of the last event read, and ``named`` if an event
        was of the target.
        """
        nonlocal position, named
        for record in _past(place, position):
            position, named = record.seq, named or words.concerns(record, target or "", itself=True)
            if wanted(record):
                yield record

    for record in past() if lines is None else deque(past(), lines):
        _print_event(console, record, as_json=as_json)
    if not named:
        complain(f"no event names {target}; shown are those of the run, its channels and what {target} is part of")
    if follow and not place.how_it_ended():
        for record in filter(wanted, _follow_events(place, position)):
            _print_event(console, record, as_json=as_json)


def _print_event(console: Screen, record: Record, *, as_json: bool) -> None:
    """Print an event: a line of JSON, or else of words for people."""
    if as_json:
        print(ascii_controls(encode(record).decode()), flush=True)
    else:
        console.print(render.event_line(record))


def _began(place: RunAddress) -> int:
    """Return the number of the last event before the run's newest start, or 0.

    A supervisor that took the run over from an earlier one has not started it.
    """
    starts = (
        record.seq for record in _past(place, 0) if isinstance(record.event, RunStarted) and not record.event.resumed
    )
    return max(starts, default=1) - 1


def _past(place: RunAddress, after: int) -> Iterator[Record]:
    """Return the recorded events that are numbered above ``after``.

    They are read from the file in the state folder, or from the control port of a
    remote run.

    :raises Disconnected: there is no such file yet, or no answer.
    """
    if place.endpoint is not None:
        return place.client().events(after, follow=False)
    path = place.state_dir / EVENTS_FILE
    if not path.exists():
        raise Disconnected(
            f"{path} does not exist: nothing has happened yet", hint="start it with: replicas run CONFIG"
        )
    return event_log.read(path, after)


def _follow_events(place: RunAddress, after: int) -> Iterator[Record]:
    """Yield events numbered above ``after`` as they come, until the run ends.

    The control port sends them.

    :raises Disconnected: the connection ended before the run.
    """
    ended = False
    try:
        for record in place.client().events(after):
            ended = isinstance(record.event, RunEnded)
            yield record
    except Disconnected:
        if not ended:
            raise


def moment(text: str, *, now: float) -> float:
    """Return the time that a text names, in seconds since 1970.

    :param text: an age ("10m"), a time of day (today's or, if that is still to come,
        yesterday's), or a date with or without a time; in this machine's time zone.
    :param now: the present time, in seconds since 1970.
    :raises UsageError: the text is none of these.
    """
    age = in_units(text, UNITS_S)
    if age is not None:
        return now - age
    today = time.strftime("%Y-%m-%d", time.localtime(now))
    for said in (text.strip(), f"{today} {text.strip()}"):
        for clock in _CLOCKS:
            try:
                found = time.mktime(time.strptime(said, clock))
            except (ValueError, OverflowError):
                continue
            return found if found <= now or said == text.strip() else found - UNITS_S["d"]
    raise UsageError(f'"{text}" is not a time', hint='write "10m" (ago), "14:30", or "2026-11-21 14:30"')


_MARKS = {"ok": ("+", "green"), "note": ("~", "yellow"), "problem": ("-", "bold red")}


@command()
def doctor(
    *,
    place: ThisRun,
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="Only the machine of this node, by its agent.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check for leftovers of dead runs, held ports, GPU processes and limits.

    On this machine, and by their agents on all other nodes of a run; with --endpoint on
    the nodes only. Changes nothing. Exit code 1 when there is a problem.
    """
    findings = _on_nodes(place, node) if node or place.endpoint is not None else list(_here(place))
    bad = sum(finding.state == "problem" for finding in findings)
    if as_json:
        print(json_text({"problems": bad, "findings": findings}))
    else:
        screen = Screen(soft_wrap=True)
        draw_findings(screen, findings)
        screen.print(count_text(bad, "problem") if bad else "all is well")
    if bad:
        raise typer.Exit(FAILED)


def _here(place: RunAddress) -> Iterator[Finding]:
    """Yield findings on this machine and, if the run is alive, on its other nodes.

    The agents of those nodes check them; that they cannot be asked is a finding, too.
    """
    from replicas.cli.doctor import examine, supervisor_of  # imports the supervisor's inspection of the machine
    from replicas.supervisor.agent.checks import Finding

    config = place.config
    try:
        state_dir = place.named_dir
    except Disconnected:  # no run here: only the machine is checked
        state_dir = None
    yield from examine(config, state_dir)
    try:
        if state_dir is None or supervisor_of(trusted(state_dir)) is None or not has_supervisor(state_dir):
            return  # its supervisor asks its nodes, if it answers already
        others = {node.name for node in place.status().nodes if not node.local}
        yield from (one for one in (_on_nodes(place, None) if others else ()) if one.node in others)
    except NotTrusted:
        return  # and none of its files were examined
    except ReplicasError as error:
        yield Finding("nodes", "problem", f"the nodes cannot be asked: {error.message}", error.hint)


def _on_nodes(place: RunAddress, node: str | None) -> list[Finding]:
    """Have the agent of a node check its machine; wait, and return the findings.

    :param node: name of the node; None: all nodes of the run.
    """
    from replicas.supervisor.agent.checks import Finding

    client = place.client()
    with patience("asking the nodes"):
        answer = client.order(DoctorOrder(node=node))
    return msgspec.convert(answer.result, list[Finding])


def draw_findings(screen: Screen, findings: Iterable[Finding]) -> None:
    """Print findings and their remedies, grouped below the names of their nodes."""
    node = ""
    for finding in findings:
        if finding.node != node:
            node = finding.node
            screen.print(Text(f"node {one_line(node)}", style="bold"))
        mark, style = _MARKS[finding.state]
        screen.print(Text.assemble((f"[{mark}] ", style), (f"{finding.about:10}", "bold"), one_line(finding.text)))
        if finding.remedy:
            screen.print(Text(f"{'':14}-> {one_line(finding.remedy)}"))

"""Format events as lines: time, number, subject, and what happened."""

from __future__ import annotations

import time

import msgspec
from rich.text import Text

from replicas.cli.render import STATE_STYLES, duration_text, size_text
from replicas.common.foreign import one_line
from replicas.core import effects
from replicas.messages.identity import Member
from replicas.telemetry import events as happened

__all__ = ["concerns", "event_line"]

_BAD = "bold red"


def event_line(record: happened.Record) -> Text:
    """``20:07:51     12  rollout/1          ready after 2.1 s``."""
    who, what, style = _words(record.event, record.at)
    clock = time.strftime("%H:%M:%S", time.localtime(record.at))
    return Text.assemble(
        (f"{clock} {record.seq:>6}  ", "dim"), (f"{one_line(who):18} ", "bold"), (one_line(what), style)
    )


def concerns(record: happened.Record, target: str) -> bool:
    """Whether the event is about this group, this ``group/index``, or all."""
    who = _subject(record.event)
    return not who or who == target or who.startswith(f"{target}/") or target.startswith(f"{who}/")


def _subject(event: happened.Event) -> str:
    """Group or replica that an event is about; empty: the whole run, or a channel."""
    target = getattr(event, "target", None)
    if isinstance(target, str):
        return target
    group = getattr(event, "group", None)
    member = getattr(event, "member", None)
    if isinstance(member, Member):
        return f"{member.group}/{member.replica}"
    if not isinstance(group, str) or not group:
        return ""
    replica = getattr(event, "replica", -1)
    return f"{group}/{replica}" if isinstance(replica, int) and replica >= 0 else group


def _words(event: happened.Event, at: float) -> tuple[str, str, str]:
    """Subject, text and style of an event at ``at`` (seconds since 1970)."""
    who = _subject(event)
    match event:
        case happened.Transition():
            return who, _transition(event), STATE_STYLES[event.after]
        case happened.RunStarted():
            how = ", goes on where the one before died" if event.resumed else ""
            return "run", f"{event.run}: supervised by process {event.pid}, release {event.version}{how}", "bold"
        case happened.RunEnded():
            return "run", f"over, exit code {event.exit_code}{_because(event.reason)}", "bold"
        case happened.Draining():
            return who or "run", f"draining ({event.reason}{', at once' if event.hurry else ''})", "yellow"
        case happened.Drained():
            return who or "run", f"drained in {duration_text(event.seconds)}", ""
        case happened.Scaled():
            return who, f"scaled from {event.before} to {event.after}", ""
        case happened.RestartAsked():
            return who, f"{'rolling ' if event.rolling else ''}restart asked for", ""
        case happened.FailedReset():
            budgets = f"full restart budget: {', '.join(event.groups)}" if event.groups else ""
            failed = f"failures forgotten: {', '.join(event.replicas)}" if event.replicas else ""
            return "run", "; ".join(filter(None, (failed, budgets))), ""
        case happened.Reloaded():
            parts = [("changed", event.changed), ("added", event.added), ("removed", event.removed)]
            said = "; ".join(f"{name}: {', '.join(groups)}" for name, groups in parts if groups)
            return "config", f"reloaded{_because(said or 'nothing has changed')}", ""
        case happened.ReloadRefused():
            return "config", f"not reloaded: {'; '.join(event.problems)}", _BAD
        case happened.ReplicaExited():
            return who, f"generation {event.generation} ended: {event.outcome}{_because(event.reason)}", _outcome(event)
        case happened.HeldUp():
            fate = "no longer waits for" if event.gave_up else "waits for"
            since = f", killed {duration_text(max(0.0, at - event.since))} ago" if event.pid else ""
            return who, f"{fate} {event.what}: {event.holder}{since}", "yellow"
        case happened.LeftoverFound():
            fate = "killed" if event.swept else "NOT killed"
            return who or "run", f"left over by a dead run: process {event.pid} ({event.command}), {fate}", "yellow"
    return _channel_words(who, event)


def _outcome(event: happened.ReplicaExited) -> str:
    return "red" if event.outcome in ("failed", "lost") else ""


def _transition(event: happened.Transition) -> str:
    if event.after == "ready" and event.start_s is not None:
        recovered = "" if event.recovery_s is None else f", {duration_text(event.recovery_s)} after it was lost"
        return f"ready after {duration_text(event.start_s)} (generation {event.generation}{recovered})"
    if event.after == "starting" and event.before != "ready":
        return f"starting (generation {event.generation})"
    return f"{event.before} -> {event.after}{_because(event.reason)}"


def _channel_words(who: str, event: happened.Event) -> tuple[str, str, str]:
    match event:
        case effects.MemberJoined():
            return event.member.name, f"joined {event.channel}", ""
        case effects.MemberLost():
            return event.member.name, f"left {event.channel}{_because(event.reason)}", "yellow"
        case effects.MemberQuarantined():
            return event.member.name, f"quarantined on {event.channel}{_because(event.reason)}", "red"
        case effects.EpochStarted():
            return event.channel, f"epoch {event.epoch} of {len(event.members)} members", "dim"
        case effects.SyncEnded():
            sync = event.record
            lost = f", without {', '.join(sync.lost)}" if sync.lost else ""
            what = f"version {sync.version} {sync.outcome} in {duration_text(sync.seconds)}, {size_text(sync.nbytes)}"
            return event.channel, f"{what}, {sync.members} members{lost}", "" if sync.outcome == "committed" else "red"
        case effects.CaughtUp():
            names = ", ".join(member.name for member in event.members)
            return event.channel, f"version {event.version} fetched later by {names}", "dim"
        case effects.ReplicaLoaded():
            what = f"serves version {event.version}" if event.version else "serves no whole version any more"
            return who, f"{what} of {event.channel}", ""
        case effects.StoreChanged():
            return event.channel, f"store {'up' if event.up else 'down'}", "" if event.up else _BAD
    return who or "run", _plain(event), ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _plain(event: happened.Event) -> str:
    """Any other event: its name in words, and its fields."""
    name = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(event).__name__).strip()
    fields = {
        field: value
        for field, value in msgspec.structs.asdict(event).items()
        if field not in ("group", "replica", "target") and value not in ("", (), None, 0, False)
    }
    return f"{name}: {', '.join(f'{field} {value}' for field, value in fields.items())}" if fields else name

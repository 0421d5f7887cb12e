"""Describe events in words, for terminals, pages and timelines. Pure."""

from __future__ import annotations

import msgspec

from replicas.common.sizes import count_text, size_text
from replicas.core.base import effects
from replicas.core.lives.lifecycle import RUNNING, Transition
from replicas.telemetry import events

TONES = ("", "quiet", "title", "warning", "error", "alarm")
"""Tones of a text: quiet is routine, an alarm is never expected."""


def duration_text(seconds: float) -> str:
    """Return a duration in at most two units: ``35 ms``, ``3m 20s``, ``4d 1h``."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    first = next(index for index, (number, _) in enumerate(units) if number)
    return " ".join(f"{number}{unit}" for number, unit in units[first : first + 2] if number)


def concerns(record: events.Record, target: str) -> bool:
    """Return True if the event concerns this group, replica or rank, or all."""
    member = getattr(record.event, "member", None)
    who = subject(record.event) if member is None else member.name
    return not who or who == target or who.startswith(f"{target}/") or target.startswith(f"{who}/")


def routine(event: events.Event) -> bool:
    """Return True if every successful version or collective has such events.

    Also True if another event tells the same: a change of state tells how the replica
    ended and which version it had; ``LoadFailed`` why a version was not loaded by all
    ranks.
    """
    if isinstance(event, effects.SyncEnded):
        return event.record.outcome == "committed" and not event.record.lost
    if isinstance(event, effects.OperationEnded):
        return event.outcome == "ok"
    if isinstance(event, effects.MemberLost):
        return event.reason == "exited" and not event.observes
    return isinstance(event, events.ReplicaExited | effects.ReplicaLoaded)


def subject(event: events.Event) -> str:
    """Return the group or replica of an event; empty for the whole run or a channel."""
    target = getattr(event, "target", None)
    if isinstance(target, str):
        return target
    about = getattr(event, "member", event)
    group, replica = getattr(about, "group", ""), getattr(about, "replica", -1)
    return f"{group}/{replica}" if group and replica >= 0 else group


def in_words(event: events.Event, at: float) -> tuple[str, str, str]:
    """Return subject, text and tone of an event at ``at`` (seconds since 1970).

    The tone is one of :data:`TONES`, or the state of a replica.
    """
    who = subject(event)
    match event:
        case Transition():
            return who, _transition(event), event.after
        case events.RunStarted():
            how = ", continues the run of a dead one" if event.resumed else ""
            return "run", f"{event.run}: supervised by process {event.pid}, release {event.version}{how}", "title"
        case events.RunEnded():
            return "run", f"over, exit code {event.exit_code}{_because(event.reason)}", "title"
        case events.Draining():
            return who or "run", f"draining ({event.reason}{', at once' if event.hurry else ''})", "warning"
        case events.Drained():
            return who or "run", f"drained in {duration_text(event.seconds)}", ""
        case events.Scaled():
            return who, f"scaled from {event.before} to {event.after}", ""
        case events.RestartAsked():
            return who, f"{'rolling ' if event.rolling else ''}restart requested", ""
        case events.FailedReset():
            budgets = f"full restart budget: {', '.join(event.groups)}" if event.groups else ""
            failed = f"failures forgotten: {', '.join(event.replicas)}" if event.replicas else ""
            return "run", "; ".join(filter(None, (failed, budgets))), ""
        case events.Reloaded():
            parts = [("changed", event.changed), ("added", event.added), ("removed", event.removed)]
            said = "; ".join(f"{name}: {', '.join(groups)}" for name, groups in parts if groups)
            return "config", f"reloaded{_because(said or 'nothing has changed')}", ""
        case events.ReloadRefused():
            return "config", f"not reloaded: {'; '.join(event.problems)}", "alarm"
        case events.ReplicaExited():
            style = "error" if event.outcome in ("failed", "lost") else ""
            return who, f"generation {event.generation} ended: {event.outcome}{_because(event.reason)}", style
        case events.HeldUp():
            fate = "no longer waits for" if event.gave_up else "waits for"
            since = f", killed {duration_text(max(0.0, at - event.since))} ago" if event.pid else ""
            return who, f"{fate} {event.what}: {event.holder}{since}", "warning"
        case events.LeftoverFound():
            fate = "killed" if event.swept else "NOT killed"
            return who or "run", f"left over by a dead run: process {event.pid} ({event.command}), {fate}", "warning"
        case events.LeasesAwaited():
            nodes = ", ".join(node or "an unknown node" for node in event.nodes)
            return "run", f"waits up to {duration_text(event.seconds)} for the leases of {nodes}", "warning"
        case events.NodeChanged():
            style = "" if event.after == "up" else "warning"
            return f"node {event.node}", f"{event.after}{_because(event.reason)}", style
        case events.TokenChanged():
            return "run", f"{event.role} token {event.change}", "warning" if event.change == "revoked" else ""
    return _channel_words(who, event)


def _transition(event: Transition) -> str:
    if event.after == "ready" and event.start_s is not None:
        recovered = "" if event.recovery_s is None else f", {duration_text(event.recovery_s)} after it was lost"
        return f"ready after {duration_text(event.start_s)} (generation {event.generation}{recovered})"
    if event.after == "starting" and event.before not in RUNNING:
        return f"starting (generation {event.generation})"
    again = f"; starts again in {duration_text(event.resume_s)}" if event.resume_s is not None else ""
    return f"{event.before} -> {event.after}{_because(event.reason)}{again}"


def _channel_words(who: str, event: events.Event) -> tuple[str, str, str]:
    match event:
        case effects.MemberJoined():
            return event.member.name, f"joined {event.channel}", ""
        case effects.MemberLost():
            return event.member.name, f"left {event.channel}{_because(event.reason)}", "warning"
        case effects.MemberQuarantined():
            return event.member.name, f"quarantined on {event.channel}{_because(event.reason)}", "error"
        case effects.EpochStarted():
            return event.channel, f"epoch {event.epoch} of {count_text(len(event.members), 'member')}", "quiet"
        case effects.SyncEnded():
            sync = event.record
            lost = f", without {', '.join(sync.lost)}" if sync.lost else ""
            what = f"version {sync.version} {sync.outcome} in {duration_text(sync.seconds)}, {size_text(sync.nbytes)}"
            style = "" if sync.outcome == "committed" else "error"
            return event.channel, f"{what}, {count_text(sync.members, 'member')}{lost}", style
        case effects.StepFell():
            return event.channel, f"version {event.version} has step {event.step:g} after {event.before:g}", "alarm"
        case effects.CaughtUp():
            names = ", ".join(member.name for member in event.members)
            return event.channel, f"caught up with version {event.version}: {names}", "quiet"
        case effects.WrongBytes():
            what = f"was served wrong bytes of version {event.version} by {event.holder}"
            return event.member.name, f"{what}{_because(event.reason)}", "error"
        case effects.ReplicaLoaded():
            what = f"serves version {event.version}" if event.version else "serves no version"
            return who, f"{what} of {event.channel}", ""
        case effects.LoadFailed():
            what = "refused" if event.kept else "did not load"
            return who, f"{what} version {event.version} of {event.channel}{_because(event.reason)}", "error"
        case effects.OperationEnded():
            tone = "quiet" if event.outcome == "ok" else "error"
            return event.channel, f"{event.kind} {event.outcome} in {duration_text(event.seconds)}", tone
        case effects.StoreChanged():
            return event.channel, f"store {'up' if event.up else 'down'}", "" if event.up else "alarm"
    return who or "run", _plain(event), ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _plain(event: events.Event) -> str:
    name = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(event).__name__).strip()
    fields = {
        field: value
        for field, value in msgspec.structs.asdict(event).items()
        if field not in ("group", "replica", "target") and value not in ("", (), None, 0, False)
    }
    return f"{name}: {', '.join(f'{field} {value}' for field, value in fields.items())}" if fields else name

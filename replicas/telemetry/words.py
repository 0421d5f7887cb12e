"""Describe events in words, for terminals, pages and timelines. Pure."""

from __future__ import annotations

import msgspec

from replicas.common.sizes import count_text, size_text
from replicas.core.base import effects
from replicas.core.base.effects import LOSS_WORDS
from replicas.core.lives.lifecycle import RUNNING, Transition
from replicas.telemetry import events

_DRAINS = {"over": "the run is over", "scaled": "scaled down", "node": "its replicas move", "reloaded": "removed"}

_FAULTS = {"failed": "a lane failed", "store": "the store was replaced", "refused": "a member was not ready"}
_REFUSED = LOSS_WORDS | {
    "token": "a wrong or an old token",
    "hello": "a join that does not fit",
    "fenced": "an old process, which a newer one has replaced (nothing to do)",
    "tls": "no TLS 1.3",
}


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


def outcome_text(outcome: str) -> str:
    """Return why a version was not committed: ``peers lost``, ``no free slot ...``."""
    return "no free slot" if outcome == "busy" else outcome.replace("_", " ")


def concerns(record: events.Record, target: str, *, itself: bool = False) -> bool:
    """Return True if the event concerns ``target`` or a part of it, what ``target`` is
    a part of, or the whole run.

    :param target: name of a group, replica or rank, such as ``rollout/1``.
    :param itself: the event must be of the target, or of a part of it.
    """
    member = getattr(record.event, "member", None)
    who = subject(record.event) if member is None else member.name
    names = f"{who}/".startswith(f"{target}/")
    return names or (not itself and (not who or target.startswith(f"{who}/")))


def routine(event: events.Event) -> bool:
    """Return True for an event of ordinary success, such as a committed version, and
    for an event that another event explains.

    A change of state tells how the replica ended and which version it had;
    ``LoadFailed`` why a version was not loaded by all ranks.
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

    The tone is empty, quiet (routine), title, warning, error or alarm (never expected),
    or the state of a replica.
    """
    who = subject(event)
    match event:
        case Transition():
            return who, _transition(event), event.after
        case events.RunStarted():
            how = ", continues the run of a supervisor that died" if event.resumed else ""
            return "run", f"{event.run} is supervised by process {event.pid}, replicas {event.version}{how}", "title"
        case events.RunEnded():
            return "run", f"over, exit code {event.exit_code}{_because(event.reason)}", "title"
        case events.Draining():
            why = _DRAINS.get(event.reason, event.reason)
            return who or "run", f"draining ({why}{', at once' if event.hurry else ''})", "warning"
        case events.Drained():
            return who or "run", f"drained in {duration_text(event.seconds)}", ""
        case events.Scaled():
            return who, f"scaled from {event.before} to {event.after}", ""
        case events.RestartAsked():
            return who, f"{'rolling ' if event.rolling else ''}restart requested", ""
        case events.FailedReset():
            budgets = f"restart budget of {', '.join(event.groups)} restored" if event.groups else ""
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
        case events.StacksSaved():
            why = event.reason or "asked for"
            return who, f"{why}: the stacks of generation {event.generation} are in its log", ""
        case events.LeasesAwaited():
            nodes = ", ".join(node or "an unknown node" for node in event.nodes)
            return "run", f"waits up to {duration_text(event.seconds)} for the leases of {nodes}", "warning"
        case events.NodeChanged():
            style = "" if event.after == "up" else "warning"
            return f"node {event.node}", f"{event.after}{_because(event.reason)}", style
        case events.EventsLost():
            return "run", f"{count_text(event.count, 'event')} not written to disk{_because(event.reason)}", "warning"
        case events.LogLinesDropped():
            where = "its log" if event.where == "file" else "the terminal"
            return who, f"{count_text(event.count, 'line')} missing in {where}{_because(event.reason)}", "warning"
        case events.StateSetAside():
            what = f"the state file could not be read ({event.reason}): moved to {event.path}"
            return "run", f"{what}; restart budgets and counters start at zero", "warning"
        case events.TokenChanged():
            return "run", f"{event.role} token {event.change}", "warning" if event.change == "revoked" else ""
        case events.ConnectionsRefused():
            why = _REFUSED.get(event.reason, event.reason.replace("_", " "))
            return "run", f"refused {count_text(event.count, 'connection')}: {why}", ""
    return _channel_words(who, event)


def _transition(event: Transition) -> str:
    """Return a change of a replica's state as text."""
    if event.after == "ready" and event.start_s is not None:
        recovered = "" if event.recovery_s is None else f", {duration_text(event.recovery_s)} after it was lost"
        return f"ready after {duration_text(event.start_s)} (generation {event.generation}{recovered})"
    if event.after == "starting" and event.before not in RUNNING:
        return f"starting (generation {event.generation})"
    when = f"in {duration_text(event.resume_s)}" if event.resume_s else "as soon as it can"
    again = f"; starts again {when}" if event.resume_s is not None else ""
    return f"{event.before} -> {event.after}{_because(event.reason)}{again}"


def _channel_words(who: str, event: events.Event) -> tuple[str, str, str]:
    """Return subject, text and tone of an event of a channel, or of any other event.

    :param who: the subject of events that name no member or channel.
    """
    match event:
        case effects.MemberJoined():
            return event.member.name, f"joined {event.channel}", ""
        case effects.MemberLost():
            how = (
                ": its program has closed the channel"
                if event.reason == "left"
                else _because(LOSS_WORDS.get(event.reason, event.reason))
            )
            return event.member.name, f"left {event.channel}{how}", "warning"
        case effects.EpochStarted():
            what = f"its members have changed: {count_text(len(event.members), 'member')} now"
            return event.channel, f"{what} (epoch {event.epoch})", "quiet"
        case effects.SyncEnded():
            sync = event.record
            lost = f", without {', '.join(sync.lost)}" if sync.lost else ""
            if sync.outcome != "committed":
                why = f"{outcome_text(sync.outcome)}, after {duration_text(sync.seconds)}{lost}"
                return event.channel, f"version {sync.version} was not committed: {why}", "error"
            what = f"version {sync.version} committed in {duration_text(sync.seconds)}, {size_text(sync.nbytes)}"
            return event.channel, f"{what}, {count_text(sync.members, 'member')}{lost}", ""
        case effects.StepFell():
            what = f"the step fell from {event.before:g} to {event.step:g} with version {event.version}"
            return event.channel, f"{what}: did its trainer lose its checkpoint?", "alarm"
        case effects.CaughtUp():
            names = ", ".join(member.name for member in event.members)
            return event.channel, f"{names} caught up with version {event.version}", "quiet"
        case effects.VersionDecided():
            return event.channel, _decided(event), "warning" if event.what in ("rejected", "rolled_back") else ""
        case effects.WrongBytes():
            what = f"was served wrong bytes of version {event.version} by {event.holder}"
            return event.member.name, f"{what}{_because(event.reason)}", "error"
        case effects.ReplicaLoaded():
            what = f"serves version {event.version}" if event.version else "serves no version"
            return who, f"{what} of {event.channel}", ""
        case effects.LoadFailed():
            what = "refused" if event.kept else "did not load"
            return who, f"{what} version {event.version} of {event.channel}{_because(event.reason)}", "error"
        case effects.ReplicaIdle():
            return who, f"has finished its work in progress on {event.channel}", ""
        case effects.OperationEnded():
            tone = "quiet" if event.outcome == "ok" else "error"
            what = f"{event.kind} {event.outcome} in {duration_text(event.seconds)}"
            return event.channel, f"{what}{_because(event.error)}", tone
        case effects.Retried():
            why = event.why or _FAULTS.get(event.reason, f"a member was {event.reason}")
            return event.channel, f"repeats the transfer: {why}", ""
        case effects.SidecarReplaced():
            return event.channel, f"replaces {count_text(event.count, 'sidecar')} ({event.reason})", ""
        case effects.StoreChanged():
            return event.channel, f"rendezvous store {'up' if event.up else 'down'}", "" if event.up else "alarm"
    return who or getattr(event, "channel", "run"), _plain(event), ""


def _decided(event: effects.VersionDecided) -> str:
    """Return a decision about a version as text."""
    version, name, value = f"version {event.version}", event.name, event.value
    match event.what:
        case "promoted" | "rejected":
            return f"{version} is {event.what}{_because(event.why)}"
        case "rolled_back":
            return f"{version} is served, with the content of version {value:g}"
        case "held":
            return f"{name} keeps {version}{f' for {duration_text(value)}' if value else ''}"
        case "released":
            return f"{name} no longer keeps {version}{_because(event.why)}"
        case "labelled":
            return f"{name} is {version}" if value else f"{name} is no label of {version} any more"
        case "scored":
            return f"{version} has {name} {value:g}"


def _because(reason: str) -> str:
    """Return ``: REASON``, or an empty text without a reason."""
    return f": {reason}" if reason else ""


def _plain(event: events.Event) -> str:
    """Return the name of an event and its fields, as text."""
    name = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(event).__name__).strip()
    fields = {
        field: value
        for field, value in msgspec.structs.asdict(event).items()
        if field not in ("group", "replica", "target") and value not in ("", (), None, 0, False)
    }
    return f"{name}: {', '.join(f'{field} {value}' for field, value in fields.items())}" if fields else name

"""Describe events in words, for terminals, pages and timelines. Pure."""

from __future__ import annotations

from replicas.common.sizes import count_text, size_text
from replicas.core.base import effects
from replicas.core.base.effects import LOSS_WORDS
from replicas.core.lives.lifecycle import RUNNING, ReplicaEvent, Transition
from replicas.telemetry import events

_DRAINS = {"over": "the run is over", "scaled": "scaled down", "reloaded": "removed", "node": "node drain"}
_CHANGES = {
    ReplicaEvent.ADOPT: "continues under a new supervisor",
    ReplicaEvent.READY: "ready again",
    ReplicaEvent.UNREADY: "not ready",
    ReplicaEvent.HELD_UP: "still ending",
    ReplicaEvent.RETRY: "ended",
    ReplicaEvent.LEFT: "ended, free for the next program",
    ReplicaEvent.GIVE_UP: "failed for good",
    ReplicaEvent.STOPPED: "stopped",
    ReplicaEvent.RESTART: "will start again",
    ReplicaEvent.RESET: "will start again (reset-failed)",
}
NODE_WORDS = {"away": "away (its agent is not connected)", "lost": "lost (its replicas start elsewhere)"}
_ENDS = {"ok": "ended with exit code 0", "failed": "failed", "stopped": "was stopped", "lost": "was lost"}
_TOKENS = {
    "made": "new {} token",
    "rotated": "new {} token; the old one stays valid",
    "revoked": "old {} token revoked",
}
_FAULTS = {"failed": "a process group failed", "store": "the store was replaced", "refused": "a member was not ready"}
_REFUSED = {
    "token": "a wrong or old token (the right one: replicas token)",
    "tls": "no TLS 1.3",
    "peer": "a process of another user",
    "too_many": "too many at once without a token",
    "host": "a host name that is not this run's",
    "hello": "a join that the run cannot accept",
    "fenced": "an old process, which a newer one has replaced (nothing to do)",
    "flood": "more messages than a process may send; slowed down",
    "overflow": "a process that does not read its messages",
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
    """Return why a version was not committed, in words such as ``peers lost``.

    :param outcome: of the publish, in snake case, such as ``peers_lost``.
    """
    return "no free slot, all are in use (raise slots)" if outcome == "busy" else outcome.replace("_", " ")


def concerns(record: events.Record, target: str, *, itself: bool = False) -> bool:
    """Return True if the event concerns ``target``.

    It does if it is an event of the target, of a part of it (for the replica
    ``rollout/1`` its rank ``rollout/1/0``), of its replica or group (``rollout``), or
    of the whole run.

    :param target: name of a group, replica or rank.
    :param itself: only events of the target and its parts count.
    """
    member = getattr(record.event, "member", None)
    who = subject(record.event) if member is None else member.name
    names = f"{who}/".startswith(f"{target}/")
    return names or (not itself and (not who or target.startswith(f"{who}/")))


def routine(event: events.Event) -> bool:
    """Return True if people need not see the event: it tells of ordinary success, such
    as a committed version, or repeats what another event tells.

    For instance the change of a replica's state tells how its programs exited, and
    ``LoadFailed`` tells why a version was not loaded by all ranks.
    """
    if isinstance(event, effects.SyncEnded):
        return event.record.outcome == "committed" and not event.record.lost
    if isinstance(event, effects.OperationEnded):
        return event.outcome == "ok"
    if isinstance(event, effects.MemberLost):
        return event.reason == "exited" and not event.observes
    return isinstance(event, events.ReplicaExited | effects.ReplicaLoaded)


def subject(event: events.Event) -> str:
    """Return the name of the group, replica or node that an event is about; empty for
    the whole run or a channel."""
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
            how = "continues under a new supervisor," if event.resumed else "started by supervisor"
            return "run", f"{event.run} {how} process {event.pid} (replicas {event.version})", "title"
        case events.RunEnded():
            return "run", f"over, exit code {event.exit_code}{_because(event.reason)}", "title"
        case events.Draining():
            how = "its processes are killed at once" if event.hurry else "ends after its present sync"
            how = "its replicas move to other nodes" if event.reason == "node" else how
            return who or "run", f"draining: {how} ({_DRAINS.get(event.reason, event.reason)})", "warning"
        case events.Drained():
            return who or "run", f"drained: none of its processes is left, after {duration_text(event.seconds)}", ""
        case events.Scaled():
            return who, f"scaled from {event.before} to {count_text(event.after, 'replica')}", ""
        case events.RestartAsked():
            return who, f"restart requested{', a few replicas at a time' if event.rolling else ''}", ""
        case events.FailedReset():
            budgets = f"restart budget of group {', '.join(event.groups)} is full again" if event.groups else ""
            failed = f"starting {', '.join(event.replicas)} again" if event.replicas else ""
            return "run", f"by order (reset-failed): {'; '.join(filter(None, (failed, budgets)))}", ""
        case events.Reloaded():
            parts = [("changed", event.changed), ("added", event.added), ("removed", event.removed)]
            said = "; ".join(f"{name} {', '.join(groups)}" for name, groups in parts if groups)
            return "config", f"reloaded{_because(said or 'nothing has changed')}", ""
        case events.ReloadRefused():
            return "config", f"new file refused, the old config stays: {'; '.join(event.problems)}", "alarm"
        case events.ReplicaExited():
            style = "error" if event.outcome in ("failed", "lost") else ""
            why = "" if event.reason in ("finished", "stopped") else event.reason.removeprefix("stopped: ")
            return who, f"generation {event.generation} {_ENDS[event.outcome]}{_because(why)}", style
        case events.HeldUp():
            return who, _held_up(event, at), "warning"
        case events.LeftoverFound():
            fate = "was killed" if event.swept else "could NOT be killed"
            return who or "run", f"process {event.pid} of a dead supervisor {fate}: {event.command}", "warning"
        case events.StacksSaved():
            return who, f"saved stack traces in the log of generation {event.generation}{_because(event.reason)}", ""
        case events.LeasesAwaited():
            nodes = " and ".join(node or "a node whose name is lost" for node in event.nodes)
            what = f"waiting up to {duration_text(event.seconds)} before replicas start: old ones may still run"
            return "run", f"{what} on {nodes}", "warning"
        case events.NodeChanged():
            style = "" if event.after == "up" else "warning"
            return f"node {event.node}", f"{NODE_WORDS.get(event.after, event.after)}{_because(event.reason)}", style
        case events.EventsLost():
            return "run", f"{count_text(event.count, 'event')} not written to disk{_because(event.reason)}", "warning"
        case events.LogLinesDropped():
            where = "its log" if event.where == "file" else "the terminal, not in its log"
            return who, f"{count_text(event.count, 'line')} missing in {where}{_because(event.reason)}", "warning"
        case events.StateSetAside():
            what = f"unusable state file moved to {event.path} ({event.reason})"
            return "run", f"{what}; restart budgets and counters start at zero", "warning"
        case events.TokenChanged():
            return "run", _TOKENS[event.change].format(event.role), "warning" if event.change == "revoked" else ""
        case events.ConnectionsRefused():
            why = _REFUSED.get(event.reason, event.reason.replace("_", " "))
            return "run", f"control port refused {count_text(event.count, 'connection')}: {why}", ""
    return _channel_words(who, event)


def _held_up(event: events.HeldUp, at: float) -> str:
    """Return what a replica waits for, as text: a dying process, or GPU memory."""
    still = f"{event.what}, still held by {event.holder}"
    if event.since:
        still = f"{event.holder} to die, alive {duration_text(max(0.0, at - event.since))} after SIGKILL"
    return f"no longer waits for {still}" if event.gave_up else f"waits for {still}"


def _transition(event: Transition) -> str:
    """Return a change of a replica's state as text."""
    if event.after == "ready" and event.start_s is not None:
        down = "" if event.recovery_s is None else f", down for {duration_text(event.recovery_s)}"
        return f"ready after {duration_text(event.start_s)} (generation {event.generation}{down})"
    if event.after == "starting" and event.before not in RUNNING and event.event is not ReplicaEvent.ADOPT:
        return f"starting (generation {event.generation})"
    when = f"in {duration_text(event.resume_s)}" if event.resume_s else "when its old processes have ended"
    again = f"; starts again {when}" if event.resume_s is not None else ""
    what = _CHANGES.get(event.event, f"stays {event.after}" if event.before == event.after else event.after)
    if event.after == "draining" and event.event is not ReplicaEvent.HELD_UP:
        what = "ending"
    return f"{event.reason if event.reason.startswith(what) else what + _because(event.reason)}{again}"


def _channel_words(who: str, event: events.Event) -> tuple[str, str, str]:
    """Return subject, text and tone of an event of a channel, or of any other event.

    :param who: the subject of events that name no member or channel.
    """
    match event:
        case effects.MemberJoined():
            return event.member.name, f"joined channel {event.channel}", ""
        case effects.MemberLost(reason="left"):
            return event.member.name, f"closed channel {event.channel}", "warning"
        case effects.MemberLost():
            what = f"removed from channel {event.channel}"
            return event.member.name, f"{what}{_because(LOSS_WORDS.get(event.reason, event.reason))}", "warning"
        case effects.EpochStarted():
            what = f"membership has changed: {count_text(len(event.members), 'member')} now"
            return event.channel, f"{what} (epoch {event.epoch})", "quiet"
        case effects.SyncEnded():
            sync = event.record
            lost = f"; left out: {', '.join(sync.lost)}" if sync.lost else ""
            took = duration_text(sync.seconds)
            if sync.outcome != "committed":
                why = f"{outcome_text(sync.outcome)}{f' ({sync.error})' if sync.error else ''}{lost}"
                return event.channel, f"version {sync.version} failed after {took}, not committed: {why}", "error"
            what = f"version {sync.version} committed in {took}: {size_text(sync.nbytes)}"
            return event.channel, f"{what} on {count_text(sync.members, 'member')}{lost}", ""
        case effects.StepFell():
            what = f"the trainer's step fell from {event.before:g} to {event.step:g} with version {event.version}"
            return event.channel, f"{what}: was its checkpoint lost?", "alarm"
        case effects.CaughtUp():
            names = ", ".join(member.name for member in event.members)
            return event.channel, f"{names} caught up: received version {event.version} late", "quiet"
        case effects.VersionDecided():
            return event.channel, _decided(event), "warning" if event.what in ("rejected", "rolled_back") else ""
        case effects.WrongBytes():
            what = f"got wrong bytes of version {event.version} from {event.holder}, and asks again"
            return event.member.name, f"{what}{_because(event.reason)}", "error"
        case effects.ReplicaLoaded():
            what = f"all ranks serve version {event.version}" if event.version else "no version is served by all ranks"
            return who, f"{what} on channel {event.channel}", ""
        case effects.LoadFailed():
            what = "keeps its version and refuses" if event.kept else "failed to load"
            return who, f"{what} version {event.version} of {event.channel}{_because(event.reason)}", "error"
        case effects.ReplicaIdle():
            return who, f"may end: no sync of channel {event.channel} needs it now", ""
        case effects.OperationEnded():
            how, tone = ("done in", "quiet") if event.outcome == "ok" else (f"failed ({event.outcome}) after", "error")
            return event.channel, f"{event.kind} {how} {duration_text(event.seconds)}{_because(event.error)}", tone
        case effects.Retried():
            why = event.why or _FAULTS.get(event.reason, f"a member was {event.reason}")
            return event.channel, f"trying a transfer or operation again: {why}", ""
        case effects.SidecarReplaced():
            why = _FAULTS.get(event.reason, f"a member was {event.reason}")
            return event.channel, f"replacing {count_text(event.count, 'sidecar')} (helper processes): {why}", ""
        case effects.StoreChanged():
            what = "answers" if event.up else "does not answer: no new process group forms"
            return event.channel, f"the rendezvous store {what}", "" if event.up else "alarm"
    return who or getattr(event, "channel", "run"), type(event).__name__, ""


def _decided(event: effects.VersionDecided) -> str:
    """Return a decision about a version as text: promoted, kept by a lease, ..."""
    version, name, value = f"version {event.version}", event.name, event.value
    match event.what:
        case "promoted":
            return f"{version} is promoted, targets load it{_because(event.why)}"
        case "rejected":
            return f"{version} is rejected, and never served{_because(event.why)}"
        case "rolled_back":
            return f"rolled back: {version} has the content of version {value:g}, and is served"
        case "held":
            return f"{version} is kept{f' for {duration_text(value)}' if value else ''} by lease {name}"
        case "released":
            return f"{version} is no longer kept by lease {name}{_because(event.why)}"
        case "labelled":
            return f"label {name} {'points' if value else 'no longer points'} to {version}"
        case "scored":
            return f"{version} was scored: {name} is {value:g}"


def _because(reason: str) -> str:
    """Return ``: REASON``, or an empty text without a reason."""
    return f": {reason}" if reason else ""

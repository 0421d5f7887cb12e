"""Draw plans and states as Rich tables that fit 80 columns, and events as lines."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replicas.common.foreign import one_line
from replicas.config.structs import ChannelConfig, ChannelRole, Config, GroupConfig, ResourcesConfig
from replicas.config.values import size_text
from replicas.core.base import effects
from replicas.core.lives.lifecycle import Transition
from replicas.core.lives.ordering import enough, least_left
from replicas.status import ChannelStatus, GroupStatus, NodeStatus, ReplicaStatus, RunStatus
from replicas.telemetry import events as happened

STATE_STYLES = {
    "pending": "dim",
    "starting": "yellow",
    "ready": "green",
    "draining": "yellow",
    "backoff": "red",
    "failed": "bold red",
    "finished": "cyan",
    "drained": "magenta",
}
_GROUP = ("group", "replicas", "ranks each", "launcher", "starts after", "command")
_RESOURCES = ("group", "GPUs a rank", "threads a rank", "memory a replica", "processes a replica")
_CHANNEL = ("channel", "members", "backend", "transport", "deadline", "on lost", "slots", "staging")
_GROUP_STATE = ("group", "ready", "not ready", "restarts", "budget left", "failures without progress", "on failure")
_REPLICA_STATE = ("replica", "state", "for", "restarts", "heartbeat", "loaded", "reason")
_CHANNEL_STATE = ("channel", "epoch", "version", "live ranks", "synced", "failed", "last sync", "sent")
_LONG_OPEN_S = 60.0
_NODE_STATE = ("node", "state", "heard", "GPUs free", "labels", "replicas")


def duration_text(seconds: float) -> str:
    """At most two units: ``0 s``, ``35 ms``, ``2.5 s``, ``3m 20s``, ``4d 1h``."""
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


def plan(config: Config) -> RenderableType:
    groups = config.groups.values()
    replicas = sum(group.replicas for group in groups)
    ranks = sum(group.replicas * group.world_size for group in groups)
    control = f"[{config.control.host}]" if ":" in config.control.host else config.control.host
    facts = [
        ("run", config.run.name),
        ("over when", f"{', '.join(config.run.stop_when)} finished" if config.run.stop_when else "stopped by a signal"),
        ("state in", str(config.run.state_dir)),
        ("control", f"{control}:{config.control.port or '(any free port)'}"),
        ("store", f"{config.store.bind}, port {config.store.port or '(any free one)'}"),
        ("in all", f"{_count(len(config.groups), 'group')}, {_count(replicas, 'replica')}, {_count(ranks, 'rank')}"),
    ]
    on_channels = frozenset[str]().union(*(one.groups for one in config.channels.values()))
    failures, timeouts = (_failure_row(config, group, on_channels) for group in groups), map(_timeout_row, groups)
    head = Table.grid(padding=(0, 2))
    for name, value in facts:
        head.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    parts: list[RenderableType] = [
        head,
        _table("Groups", _GROUP, map(_group_row, groups)),
        _table("Failures", ("group", "restart", "no progress", "after that", "ready with"), failures),
        _table("Timeouts", ("group", "start", "beat", "progress", "load", "drain", "stop"), timeouts),
    ]
    if any(group.resources != ResourcesConfig() for group in groups):
        parts.append(_table("Resources", _RESOURCES, map(_resource_row, groups)))
    if config.channels:
        parts.append(_table("Channels", _CHANNEL, map(_channel_row, config.channels.values())))
    return Group(*parts)


def outlook(where: Mapping[str, Sequence[str]], waits: Mapping[str, str], nodes: Sequence[NodeStatus]) -> list[str]:
    """Lines with what each node would run, and with what fits on none, by replica."""
    if not waits and all(node.local for node in nodes):
        return []
    runs = {node.name: [one for one, places in where.items() if node.name in places] for node in nodes}
    width = max(map(len, (*runs, *waits)))
    return [
        f"note: {'' if waits else 'all replicas fit '}on the {_count(len(nodes), 'node')} of its run",
        *(f"{node:{width}}  runs {', '.join(names)}" for node, names in runs.items() if names),
        *(f"{one:{width}}  waits for {what}" for one, what in waits.items()),
    ]


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:  # wide enough that no word of the heading is broken
        table.add_column(column, overflow="fold", min_width=max(map(len, column.split())))
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))  # no markup in foreign text
    return table


def _group_row(group: GroupConfig) -> tuple[str, ...]:
    nodes = f" ({group.nnodes} nodes)" if group.nnodes > 1 else ""
    return (
        group.name,
        str(group.replicas),
        f"{group.world_size}{nodes}",
        group.launcher,
        ", ".join(map(str, group.depends_on)) or "-",
        "(others start it)" if group.external else shlex.join(group.command),
    )


_ENDS = {"run": "the run ends", "group": "its group ends", "replica": "it stays failed"}


def _failure_row(config: Config, group: GroupConfig, on_channels: frozenset[str]) -> tuple[str, ...]:
    ready = f"{enough(group.min_ready, group.replicas)} of {group.replicas}"
    if group.external:
        return group.name, "by others", "-", "-", ready
    rules = group.restart
    never = rules.policy == "never"
    cycles = rules.no_progress_cycles if group.name in on_channels and not never else 0
    least = least_left(config, group)
    below = f", the run below {least}" if group.on_failure != "run" and least else ""
    return (
        group.name,
        rules.policy if never else f"{rules.policy} {rules.max_restarts}/{duration_text(rules.window_s)}",
        f"{cycles} in a row" if cycles else "-",
        f"{_ENDS[group.on_failure]}{below}",
        ready,
    )


def _timeout_row(group: GroupConfig) -> tuple[str, ...]:
    health = group.health
    beat, drain = duration_text(health.heartbeat_timeout_s), duration_text(group.drain_timeout_s)
    if group.external:
        return group.name, "-", beat, "-", "-", drain, "-"
    others = (health.start_timeout_s, health.progress_timeout_s, health.load_deadline_s, group.stop_timeout_s)
    start, progress, load, stop = map(duration_text, others)
    return group.name, start, beat, progress, load, drain, stop


def _resource_row(group: GroupConfig) -> tuple[str, ...]:
    has = group.resources
    memory = "-" if has.memory_nbytes is None else size_text(has.memory_nbytes)
    return group.name, str(has.gpus or "-"), str(has.cpu_threads or "-"), memory, str(has.max_processes or "-")


def _channel_row(channel: ChannelConfig) -> tuple[str, ...]:
    members = f"{_parties(channel.sources)} -> {_parties(channel.targets) or '(nobody)'}"
    return (
        channel.name,
        f"peers {_parties(channel.peers)}" if channel.peers else members,
        channel.backend,
        f"{channel.transport}, encrypted" if channel.encrypt else channel.transport,
        duration_text(channel.deadline_s),
        channel.on_lost + (", adopted together" if channel.adopt_together else ""),
        str(channel.slots),
        channel.staging,
    )


def _parties(parties: Iterable[ChannelRole]) -> str:
    return ", ".join(f"{party.group} ({party.ranks})" for party in parties)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def run_status(status: RunStatus) -> RenderableType:
    ready = ("ready", "bold green") if status.ready else ("not ready", "bold yellow")
    title = Text.assemble((status.run, "bold"), "  ", ready, f"  {status.endpoint}  pid {status.pid}")
    title.append(f"  up {duration_text(status.uptime_s)}")
    if status.exit_code is not None:
        title.append(f"  over, exit code {status.exit_code}", style="bold")
    if not status.store.up:
        title.append("  store down", style="bold red")
    replicas = [replica for group in status.groups for replica in group.replicas]
    parts: list[RenderableType] = [
        title,
        _table("Groups", _GROUP_STATE, map(_group_state_row, status.groups)),
        _table("Replicas", _REPLICA_STATE, map(_replica_row, replicas)),
    ]
    if len(status.nodes) > 1 or any(not node.local for node in status.nodes):
        parts.append(_table("Nodes", _NODE_STATE, map(_node_row, status.nodes)))
    if status.channels:
        parts.append(_table("Channels", _CHANNEL_STATE, map(_channel_state_row, status.channels)))
        notes = [words for channel in status.channels for words in (_fallen(channel), _mixed(channel)) if words]
        parts += [Text(words, style="bold red") for words in notes]
    return Group(*parts)


def _group_state_row(group: GroupStatus) -> tuple[str | Text, ...]:
    states = Counter(replica.state for replica in group.replicas)
    others = [f"{count} {state}" for state, count in sorted(states.items()) if state != "ready"]
    restarts = [f"{count} {reason}" for reason, count in sorted(group.restarts.items()) if count]
    cycles = max((replica.cycles for replica in group.replicas), default=0)
    external = group.launcher == "external"
    limit = f"{cycles} of {group.no_progress_cycles}" if group.no_progress_cycles and not external else "-"
    return (
        group.name,
        f"{states['ready']} of {group.size if external else len(group.replicas)}",
        ", ".join(others) or "-",
        ", ".join(restarts) or "-",
        "-" if external else f"{group.restart_budget_remaining_ratio:.0%}",
        Text(limit, style="bold red" if group.no_progress_remaining_ratio < 0.5 else ""),
        "-" if external else group.on_failure,
    )


def _replica_row(replica: ReplicaStatus) -> tuple[str | Text, ...]:
    versions = sorted(replica.versions.items())
    loaded = str(versions[0][1]) if len(versions) == 1 else ", ".join(f"{name} {number}" for name, number in versions)
    return (
        replica.name,
        Text(replica.state, style=STATE_STYLES[replica.state]),
        duration_text(replica.state_age_s),
        str(replica.restarts),
        "-" if replica.heartbeat_age_s is None else duration_text(replica.heartbeat_age_s),
        loaded or "-",
        replica.reason or _open_updates(replica) or replica.last_exit,
    )


def _open_updates(replica: ReplicaStatus) -> str:
    """The updates that it has had open for long: others may wait for the slot."""
    open_s = sorted(replica.open_s.items())
    return ", ".join(f"update of {name} open for {duration_text(s)}" for name, s in open_s if s > _LONG_OPEN_S)


def _node_row(node: NodeStatus) -> tuple[str | Text, ...]:
    return (
        node.name + (" (this machine)" if node.local else ""),
        Text(node.state, style={"up": "green", "lost": "red"}.get(node.state, "yellow")),
        "-" if node.local else duration_text(node.heard_age_s),
        f"{node.gpus_free} of {node.gpus}" if node.gpus else "-",
        ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items())) or "-",
        ", ".join(node.replicas) or "-",
    )


def _channel_state_row(channel: ChannelStatus) -> tuple[str, ...]:
    last = channel.last_sync
    synced = channel.syncs.get("committed", 0)
    age_s = None if channel.committed_at is None else max(0.0, time.time() - channel.committed_at)
    ago = (
        f", {duration_text(age_s)} ago"
        if age_s is not None and last is not None and last.outcome == "committed"
        else ""
    )
    return (
        channel.name,
        str(channel.epoch),
        str(channel.committed_version) + (f" (step {channel.step:g})" if channel.step is not None else ""),
        str(sum(member.state == "live" for member in channel.members)),
        str(synced),
        str(sum(channel.syncs.values()) - synced),
        "-" if last is None else f"{last.outcome} in {duration_text(last.seconds)}{ago}",
        size_text(channel.bytes_total),
    )


def _fallen(channel: ChannelStatus) -> str:
    if channel.step is None or channel.step_before is None:
        return ""
    return f"{channel.name}: step {channel.step:g} after {channel.step_before:g} (a trainer without its checkpoint?)"


def _mixed(channel: ChannelStatus) -> str:
    if channel.mixed_since is None:
        return ""
    counts = sorted(channel.served.items(), reverse=True)
    said = ", ".join(f"version {version} on {_count(count, 'replica')}" for version, count in counts)
    return f"{channel.name}: MIXED for {duration_text(max(0.0, time.time() - channel.mixed_since))}: {said}"


def event_line(record: happened.Record) -> Text:
    """``20:07:51     12  rollout/1          ready after 2.1 s``."""
    who, what, style = _words(record.event, record.at)
    clock = time.strftime("%H:%M:%S", time.localtime(record.at))
    return Text.assemble(
        (f"{clock} {record.seq:>6}  ", "dim"), (f"{one_line(who):18} ", "bold"), (one_line(what), style)
    )


def concerns(record: happened.Record, target: str) -> bool:
    """Return True if the event is about this group, this ``group/index``, or all."""
    who = _subject(record.event)
    return not who or who == target or who.startswith(f"{target}/") or target.startswith(f"{who}/")


def routine(event: happened.Event) -> bool:
    """Return True if every version that goes well has such events."""
    if isinstance(event, effects.SyncEnded):
        return event.record.outcome == "committed" and not event.record.lost
    return isinstance(event, effects.ReplicaLoaded) and event.version > 0


def _subject(event: happened.Event) -> str:
    """Group or replica that an event is about; empty: the whole run, or a channel."""
    target = getattr(event, "target", None)
    if isinstance(target, str):
        return target
    about = getattr(event, "member", event)
    group, replica = getattr(about, "group", ""), getattr(about, "replica", -1)
    return f"{group}/{replica}" if group and replica >= 0 else group


def _words(event: happened.Event, at: float) -> tuple[str, str, str]:
    """Subject, text and style of an event at ``at`` (seconds since 1970)."""
    who = _subject(event)
    match event:
        case Transition():
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
            return "config", f"not reloaded: {'; '.join(event.problems)}", "bold red"
        case happened.ReplicaExited():
            style = "red" if event.outcome in ("failed", "lost") else ""
            return who, f"generation {event.generation} ended: {event.outcome}{_because(event.reason)}", style
        case happened.HeldUp():
            fate = "no longer waits for" if event.gave_up else "waits for"
            since = f", killed {duration_text(max(0.0, at - event.since))} ago" if event.pid else ""
            return who, f"{fate} {event.what}: {event.holder}{since}", "yellow"
        case happened.LeftoverFound():
            fate = "killed" if event.swept else "NOT killed"
            return who or "run", f"left over by a dead run: process {event.pid} ({event.command}), {fate}", "yellow"
        case happened.LeasesAwaited():
            nodes = ", ".join(node or "an unknown node" for node in event.nodes)
            return "run", f"waits up to {duration_text(event.seconds)} for the leases of {nodes}", "yellow"
        case happened.NodeChanged():
            style = "" if event.after == "up" else "yellow"
            return f"node {event.node}", f"{event.after}{_because(event.reason)}", style
        case happened.TokenChanged():
            return "run", f"{event.role} token {event.change}", "yellow" if event.change == "revoked" else ""
    return _channel_words(who, event)


def _transition(event: Transition) -> str:
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
            return event.channel, f"epoch {event.epoch} of {_count(len(event.members), 'member')}", "dim"
        case effects.SyncEnded():
            sync = event.record
            lost = f", without {', '.join(sync.lost)}" if sync.lost else ""
            what = f"version {sync.version} {sync.outcome} in {duration_text(sync.seconds)}, {size_text(sync.nbytes)}"
            style = "" if sync.outcome == "committed" else "red"
            return event.channel, f"{what}, {_count(sync.members, 'member')}{lost}", style
        case effects.StepFell():
            return event.channel, f"version {event.version} has step {event.step:g} after {event.before:g}", "bold red"
        case effects.CaughtUp():
            names = ", ".join(member.name for member in event.members)
            return event.channel, f"caught up with version {event.version}: {names}", "dim"
        case effects.WrongBytes():
            what = f"was served wrong bytes of version {event.version} by {event.holder}"
            return event.member.name, f"{what}{_because(event.reason)}", "red"
        case effects.ReplicaLoaded():
            what = f"serves version {event.version}" if event.version else "serves no whole version any more"
            return who, f"{what} of {event.channel}", ""
        case effects.LoadFailed():
            what = "refused" if event.kept else "did not load"
            return who, f"{what} version {event.version} of {event.channel}{_because(event.reason)}", "red"
        case effects.StoreChanged():
            return event.channel, f"store {'up' if event.up else 'down'}", "" if event.up else "bold red"
    return who or "run", _plain(event), ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _plain(event: happened.Event) -> str:
    name = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(event).__name__).strip()
    fields = {
        field: value
        for field, value in msgspec.structs.asdict(event).items()
        if field not in ("group", "replica", "target") and value not in ("", (), None, 0, False)
    }
    return f"{name}: {', '.join(f'{field} {value}' for field, value in fields.items())}" if fields else name

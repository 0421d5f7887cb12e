"""Draw plans and states as Rich tables that fit 80 columns."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replicas.config.structs import ChannelConfig, ChannelRole, Config, GroupConfig, ResourcesConfig
from replicas.core.lives.ordering import enough
from replicas.status import ChannelStatus, ReplicaStatus, RunStatus

__all__ = ["STATE_STYLES", "duration_text", "plan", "run_status", "size_text"]

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


def size_text(nbytes: int) -> str:
    """Three digits and a binary unit: ``0 B``, ``1.5 KiB``, ``269 MiB``."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.3g} {units[0]}"


def plan(config: Config) -> RenderableType:
    """The output of ``replicas check``: the resolved config."""
    groups = config.groups.values()
    replicas = sum(group.replicas for group in groups)
    ranks = sum(group.replicas * group.world_size for group in groups)
    control = f"[{config.control.host}]" if ":" in config.control.host else config.control.host
    facts = [
        ("run", config.run.name),
        ("over when", f"{_and(config.run.stop_when)} finished" if config.run.stop_when else "stopped by a signal"),
        ("state in", str(config.run.state_dir)),
        ("control", f"{control}:{config.control.port or '(any free port)'}"),
        ("store", f"{config.store.bind}, port {config.store.port or '(any free one)'}"),
        ("in all", f"{_count(len(config.groups), 'group')}, {_count(replicas, 'replica')}, {_count(ranks, 'rank')}"),
    ]
    on_channels = {
        party.group for one in config.channels.values() for party in (*one.sources, *one.targets, *one.peers)
    }
    parts: list[RenderableType] = [
        _facts(facts),
        _table_of_groups(groups),
        _table_of_failures(groups, on_channels),
        _table_of_timeouts(groups),
    ]
    if any(group.resources != ResourcesConfig() for group in groups):
        parts.append(_table_of_resources(groups))
    if config.channels:
        parts.append(_table_of_channels(config.channels.values()))
    return Group(*parts)


def _facts(facts: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    return table


def _new_table(title: str, *columns: str) -> Table:
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
    return table


def _table_of_groups(groups: Iterable[GroupConfig]) -> Table:
    table = _new_table("Groups", "group", "replicas", "ranks each", "launcher", "starts after", "command")
    for group in groups:
        nodes = f" ({group.nnodes} nodes)" if group.nnodes > 1 else ""
        table.add_row(
            Text(group.name),
            str(group.replicas),
            f"{group.world_size}{nodes}",
            group.launcher,
            Text(_and([str(dependency) for dependency in group.depends_on]) or "-"),
            Text(shlex.join(group.command)),
        )
    return table


_ENDS = {"run": "the run ends", "group": "its group ends", "replica": "it stays failed"}


def _table_of_failures(groups: Iterable[GroupConfig], on_channels: set[str]) -> Table:
    """When a replica is not started again, and what ends then."""
    table = _new_table("Failures", "group", "restart", "no progress", "after that", "ready with")
    for group in groups:
        rules = group.restart
        never = rules.policy == "never"
        cycles = rules.no_progress_cycles if group.name in on_channels and not never else 0
        ends = _ENDS[group.on_failure]
        if group.on_failure != "run" and group.min_ready:
            ends += f", the run below {group.min_ready}"
        table.add_row(
            Text(group.name),
            rules.policy if never else f"{rules.policy} {rules.max_restarts}/{duration_text(rules.window_s)}",
            f"{cycles} in a row" if cycles else "-",
            ends,
            f"{enough(group.min_ready, group.replicas)} of {group.replicas}",
        )
    return table


def _table_of_timeouts(groups: Iterable[GroupConfig]) -> Table:
    table = _new_table("Timeouts", "group", "start", "beat", "progress", "load", "drain", "stop")
    for group in groups:
        health = group.health
        times = (
            health.start_timeout_s,
            health.heartbeat_timeout_s,
            health.progress_timeout_s,
            health.load_deadline_s,
            group.drain_timeout_s,
            group.stop_timeout_s,
        )
        table.add_row(Text(group.name), *(duration_text(seconds) for seconds in times))
    return table


def _table_of_resources(groups: Iterable[GroupConfig]) -> Table:
    table = _new_table("Resources", "group", "GPUs a rank", "threads a rank", "memory a replica", "processes a replica")
    for group in groups:
        has = group.resources
        table.add_row(
            Text(group.name),
            str(has.gpus or "-"),
            str(has.cpu_threads or "-"),
            "-" if has.memory_nbytes is None else size_text(has.memory_nbytes),
            str(has.max_processes or "-"),
        )
    return table


def _table_of_channels(channels: Iterable[ChannelConfig]) -> Table:
    table = _new_table(
        "Channels", "channel", "members", "backend", "transport", "deadline", "on lost", "slots", "staging"
    )
    for channel in channels:
        if channel.peers:
            members = f"peers {_parties(channel.peers)}"
        else:
            members = f"{_parties(channel.sources)} -> {_parties(channel.targets) or '(nobody)'}"
        table.add_row(
            Text(channel.name),
            Text(members),
            channel.backend,
            channel.transport,
            duration_text(channel.deadline_s),
            channel.on_lost,
            str(channel.slots),
            channel.staging,
        )
    return table


def _parties(parties: Iterable[ChannelRole]) -> str:
    return ", ".join(f"{party.group} ({party.ranks})" for party in parties)


def _and(words: Iterable[str]) -> str:
    return ", ".join(words)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def run_status(status: RunStatus) -> RenderableType:
    """The output of ``replicas status``."""
    ready = ("ready", "bold green") if status.ready else ("not ready", "bold yellow")
    title = Text.assemble((status.run, "bold"), "  ", ready, f"  {status.endpoint}  pid {status.pid}")
    title.append(f"  up {duration_text(status.uptime_s)}")
    if not status.store.up:
        title.append("  store down", style="bold red")
    parts: list[RenderableType] = [title, _table_of_group_states(status), _table_of_replicas(status)]
    if status.channels:
        parts.append(_table_of_channel_states(status.channels))
    return Group(*parts)


def _table_of_group_states(status: RunStatus) -> Table:
    table = _new_table("Groups", "group", "ready", "others", "restarts", "budget left", "no progress", "then ends")
    for group in status.groups:
        states = Counter(replica.state for replica in group.replicas)
        others = [f"{count} {state}" for state, count in sorted(states.items()) if state != "ready"]
        restarts = [f"{count} {reason}" for reason, count in sorted(group.restarts.items()) if count]
        cycles = max((replica.cycles for replica in group.replicas), default=0)
        limit = f"{cycles} of {group.no_progress_cycles}" if group.no_progress_cycles else "-"
        table.add_row(
            Text(group.name),
            f"{states['ready']} of {len(group.replicas)}",
            Text(_and(others) or "-"),
            Text(_and(restarts) or "-"),
            f"{group.restart_budget_remaining_ratio:.0%}",
            Text(limit, style="bold red" if group.no_progress_remaining_ratio < 0.5 else ""),
            group.on_failure,
        )
    return table


def _table_of_replicas(status: RunStatus) -> Table:
    table = _new_table("Replicas", "replica", "state", "for", "restarts", "heartbeat", "loaded", "reason")
    for group in status.groups:
        for replica in group.replicas:
            table.add_row(*_replica_row(replica))
    return table


def _replica_row(replica: ReplicaStatus) -> tuple[str | Text, ...]:
    heartbeat = "-" if replica.heartbeat_age_s is None else duration_text(replica.heartbeat_age_s)
    versions = sorted(replica.versions.items())
    loaded = str(versions[0][1]) if len(versions) == 1 else ", ".join(f"{name} {number}" for name, number in versions)
    return (
        Text(replica.name),
        Text(replica.state, style=STATE_STYLES[replica.state]),
        duration_text(replica.state_age_s),
        str(replica.restarts),
        heartbeat,
        Text(loaded or "-"),
        Text(replica.reason or replica.last_exit),
    )


def _table_of_channel_states(channels: Iterable[ChannelStatus]) -> Table:
    table = _new_table(
        "Channels", "channel", "epoch", "version", "live ranks", "synced", "failed", "last sync", "moved"
    )
    for channel in channels:
        last = channel.last_sync
        synced = channel.syncs.get("committed", 0)
        table.add_row(
            Text(channel.name),
            str(channel.epoch),
            str(channel.committed_version),
            str(sum(1 for member in channel.members if member.state == "live")),
            str(synced),
            str(sum(channel.syncs.values()) - synced),
            "-" if last is None else Text(f"{last.outcome} in {duration_text(last.seconds)}"),
            size_text(channel.bytes_total),
        )
    return table

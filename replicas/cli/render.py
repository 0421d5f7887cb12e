"""Draw plans and states as Rich tables that fit 80 columns, and events as lines."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from replicas.common.foreign import one_line
from replicas.common.sizes import count_text, list_text, size_text
from replicas.config.structs import ChannelConfig, ChannelRole, Config, GroupConfig, ResourcesConfig
from replicas.core.lives.ordering import least_left, needed_replicas
from replicas.messages.bounds import CONTROL_PORT
from replicas.status import (
    ChannelStatus,
    GroupStatus,
    NodeStatus,
    PublishStatus,
    ReplicaStatus,
    RunStatus,
    VersionStatus,
)
from replicas.telemetry.events import Record
from replicas.telemetry.verdict import OPEN_S, ill_first, verdict
from replicas.telemetry.words import duration_text, in_words

STATE_STYLES = {
    "pending": "dim",
    "starting": "yellow",
    "ready": "green",
    "silent": "bold red",
    "draining": "yellow",
    "backoff": "red",
    "failed": "bold red",
    "finished": "cyan",
    "drained": "magenta",
}
LEVEL_STYLES = {"good": "bold green", "note": "bold yellow", "warn": "bold yellow", "bad": "bold red"}
_TONES = {"quiet": "dim", "title": "bold", "warning": "yellow", "error": "red", "alarm": "bold red"} | STATE_STYLES
_GROUP = ("group", "replicas", "ranks each", "launcher", "starts after", "command")
_RESOURCES = ("group", "GPUs a rank", "threads a rank", "memory a replica", "processes a replica")
_CHANNEL = ("channel", "members", "backend", "transport", "deadline", "on lost", "slots", "staging")
_GROUP_STATE = ("group", "ready", "not ready", "restarts", "budget left", "failures without progress", "on failure")
_REPLICA_STATE = ("replica", "state", "for", "restarts", "heartbeat", "loaded", "reason")
_CHANNEL_STATE = ("channel", "epoch", "version", "live ranks", "synced", "failed", "last sync", "sent")
_TOP_REPLICA = ("replica", "state", "for", "heartbeat", "version", "behind", "reason")
_TOP_CHANNEL = ("channel", "version", "age", "last sync", "behind", "under way")
_VERSIONS = ("version", "labels", "step", "age", "size", "held", "served by", "what is said of it")
_BROKEN = 14
"""Width of a column in which words are broken."""
_BETWEEN = 2
"""Characters between two columns, and beside them."""
_NODE_STATE = ("node", "state", "heard", "GPUs free", "labels", "replicas")


def config_tables(config: Config) -> RenderableType:
    """Return the tables of a config, as ``replicas check`` prints them."""
    groups = config.groups.values()
    replicas = sum(group.replicas for group in groups)
    ranks = sum(group.replicas * group.world_size for group in groups)
    control = f"[{config.control.host}]" if ":" in config.control.host else config.control.host
    usual = f"{CONTROL_PORT} (another one where that is in use)"
    port = usual if config.control.port is None else config.control.port or "(any free port)"
    facts = [
        ("run", config.run.name),
        ("over when", f"{', '.join(config.run.stop_when)} finished" if config.run.stop_when else "stopped by a signal"),
        ("state in", str(config.run.state_dir)),
        ("control", f"{control}:{port}"),
        ("store", f"{config.store.bind}, port {config.store.port or '(any free one)'}"),
        ("in all", ", ".join(map(count_text, (len(config.groups), replicas, ranks), ("group", "replica", "rank")))),
    ]
    on_channels = frozenset[str]().union(*(one.groups for one in config.channels.values()))
    failures, timeouts = (_failure_row(config, group, on_channels) for group in groups), map(_timeout_row, groups)
    head = Table.grid(padding=(0, 2))
    for name, value in facts:
        head.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    parts: list[RenderableType] = [
        head,
        _Table("Groups", _GROUP, map(_group_row, groups)),
        _Table("Failures", ("group", "restart", "no progress", "after that", "ready with"), failures),
        _Table("Timeouts", ("group", "start", "beat", "progress", "load", "drain", "stop"), timeouts),
    ]
    if any(group.resources != ResourcesConfig() for group in groups):
        parts.append(_Table("Resources", _RESOURCES, map(_resource_row, groups)))
    if config.channels:
        parts.append(_Table("Channels", _CHANNEL, map(_channel_row, config.channels.values())))
    return Group(*parts)


def outlook(where: Mapping[str, Sequence[str]], waits: Mapping[str, str], nodes: Sequence[NodeStatus]) -> list[str]:
    """Return a line for each node with replicas, and each replica that fits no node.

    Return no lines if all fit, and all nodes are this machine.

    :param where: names of nodes, by each replica that fits.
    :param waits: the lacking resource as text, by each replica that does not."""
    if not waits and all(node.local for node in nodes):
        return []
    runs = {node.name: [one for one, places in where.items() if node.name in places] for node in nodes}
    width = max(map(len, (*runs, *waits)))
    return [
        f"note: {'' if waits else 'all replicas fit '}on the {count_text(len(nodes), 'node')} of its run",
        *(f"{node:{width}}  runs {', '.join(names)}" for node, names in runs.items() if names),
        *(f"{one:{width}}  waits for {what}" for one, what in waits.items()),
    ]


def fitted(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return widths for columns of texts that together fit into ``room`` characters.

    Each column begins with its heading. It gets its longest word, then its longest
    cell, then its heading, small needs first. If even the words do not fit, the widest
    columns (paths) get less.
    """
    widths = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    while sum(widths) > max(room, len(widths)):
        longest = widths.index(max(widths))
        widths[longest] = min(_BROKEN, widths[longest] - 1)  # if it is broken anyway, the others get the room
    left = room - sum(widths)
    for heading in (1, 0):
        needs = [
            max(map(cell_len, column[heading:]), default=0) - width
            for column, width in zip(columns, widths, strict=True)
        ]
        for column in sorted(range(len(needs)), key=needs.__getitem__):
            more = max(0, min(needs[column], left))
            widths[column], left = widths[column] + more, left - more
    return widths


def versions_table(channel: ChannelStatus, now: float) -> RenderableType:
    """Return the versions of a channel as a table; ``now``: seconds since 1970."""
    rows = [_version_row(one, now) for one in channel.versions]
    canary = f", canary {list_text(channel.canary)}" if channel.canary else ""
    return _Table(f"{channel.name}: follows {channel.follow}{canary}", _VERSIONS, rows)


def _version_row(version: VersionStatus, now: float) -> tuple[str | Text, ...]:
    """Return the cells of a version's row; ``now``: in seconds since 1970."""
    said = [f"content of {version.content_of}"] if version.content_of else []
    said += [f"{name} {value:g}" for name, value in version.scores.items()]
    said += [f"rejected: {version.rejected}"] if version.rejected else []
    for lease in version.leases:
        left = f", {duration_text(max(0.0, lease.until - now))} left" if lease.until else ""
        said.append(f"kept by {lease.name}{f' of {lease.holder}' if lease.holder else ''}{left}")
    return (
        Text(str(version.number), style="dim" if not version.held else ""),
        Text(", ".join(version.labels), style="bold"),
        "" if version.step is None else f"{version.step:g}",
        duration_text(now - version.at) if version.at else "",
        size_text(version.nbytes) if version.nbytes else "",
        str(version.held) if version.held else "gone",
        list_text(version.serving, 2),
        "; ".join(said),
    )


class _Table:
    """A table with the widths of :func:`fitted`.

    Rich alone narrows the widest columns, even if that breaks their words.
    """

    def __init__(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> None:
        """Keep title, headings and rows of cells; drawing chooses the widths."""
        self._title, self._columns = title, tuple(columns)
        # foreign text is not markup
        self._rows = [tuple(Text(cell) if isinstance(cell, str) else cell for cell in row) for row in rows]

    def __rich_console__(self, console: object, options: ConsoleOptions) -> RenderResult:
        """Yield the Rich table, with widths for the console's size."""
        columns = [(name, *(row[place].plain for row in self._rows)) for place, name in enumerate(self._columns)]
        widths = fitted(columns, options.max_width - _BETWEEN * len(columns))
        table = Table(
            title=self._title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for name, width in zip(self._columns, widths, strict=True):
            table.add_column(name, overflow="fold", width=width)
        for row in self._rows:
            table.add_row(*row)
        yield table


def _group_row(group: GroupConfig) -> tuple[str, ...]:
    """Return a group's cells in the table Groups: sizes, launcher, command, ..."""
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
    """Return a group's cells in the table Failures.

    ``on_channels``: names of all groups that take part in channels."""
    ready = f"{needed_replicas(group.min_ready, group.replicas)} of {group.replicas}"
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
    """Return the cells of a group's row in the table Timeouts; "-" for no timeout."""
    health = group.health
    beat, drain = duration_text(health.heartbeat_timeout_s), duration_text(group.drain_timeout_s)
    if group.external:
        return group.name, "-", beat, "-", "-", drain, "-"
    others = (health.start_timeout_s, health.progress_timeout_s, health.load_deadline_s, group.stop_timeout_s)
    start, progress, load, stop = map(duration_text, others)
    return group.name, start, beat, progress, load, drain, stop


def _resource_row(group: GroupConfig) -> tuple[str, ...]:
    """Return the cells of a group's row in the table Resources; "-" for no limit."""
    has = group.resources
    memory = "-" if has.memory_nbytes is None else size_text(has.memory_nbytes)
    return group.name, str(has.gpus or "-"), str(has.cpu_threads or "-"), memory, str(has.max_processes or "-")


def _channel_row(channel: ChannelConfig) -> tuple[str, ...]:
    """Return a channel's cells in the table Channels: members, backend, slots, ..."""
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
    """Return a channel's groups as text: ``trainer (leader), eval (all)``."""
    return ", ".join(f"{party.group} ({party.ranks})" for party in parties)


def _title(status: RunStatus) -> Text:
    """Return the first line of ``replicas status``: run, readiness, address, ..."""
    ready = ("ready", "bold green") if status.ready else ("not ready", "bold yellow")
    title = Text.assemble((status.run, "bold"), "  ", ready, f"  {status.endpoint}  pid {status.pid}")
    title.append(f"  up {duration_text(status.uptime_s)}")
    if status.exit_code is not None:
        title.append(f"  over, exit code {status.exit_code}", style="bold")
    return title


def _wrong(status: RunStatus, now: float) -> Iterator[Text]:
    """Yield a styled sentence for each trouble, and each wait with a known end."""
    for one in verdict(status, now).troubles:
        if one.level != "note" or one.until is not None:
            most = "up to " * one.about.startswith("group ")  # of several replicas, the first has it longest
            lasts = "" if one.since is None else f", for {most}{duration_text(max(0.0, now - one.since))}"
            lasts += "" if one.until is None else f", at most {duration_text(max(0.0, one.until - now))} more"
            lasts += f", then {one.then}" if one.then else ""
            yield Text(f"{one.text.rstrip('.')}{lasts}", style=LEVEL_STYLES[one.level])


def status_tables(status: RunStatus) -> RenderableType:
    """Return the tables of a run's state, as ``replicas status`` prints them."""
    replicas = [replica for group in status.groups for replica in group.replicas]
    parts: list[RenderableType] = [
        _title(status),
        *_wrong(status, time.time()),
        _Table("Groups", _GROUP_STATE, map(_group_state_row, status.groups)),
        _Table("Replicas", _REPLICA_STATE, map(_replica_row, replicas)),
    ]
    if len(status.nodes) > 1 or any(not node.local for node in status.nodes):
        parts.append(_Table("Nodes", _NODE_STATE, map(_node_row, status.nodes)))
    if status.channels:
        parts.append(_Table("Channels", _CHANNEL_STATE, map(_channel_state_row, status.channels)))
    return Group(*parts)


def top_lines(status: RunStatus, now: float, width: int) -> list[Text]:
    """Return the tables of ``replicas top``, each row as one line of this width.

    ``now``: in seconds since 1970. Rich's tables would render hundreds of rows, of
    which a few are seen.
    """
    groups, replicas = ill_first(status)
    nodes = status.nodes if len(status.nodes) > 1 or any(not node.local for node in status.nodes) else ()
    return [
        *_lines(_GROUP_STATE[:5], (row[:5] for row in map(_group_state_row, groups)), width),
        *_lines(_TOP_CHANNEL, [_top_channel_row(one, replicas, now) for one in status.channels], width),
        *_lines(_TOP_REPLICA, map(_top_row, replicas), width),
        *_lines(_NODE_STATE, map(_node_row, nodes), width),
    ]


def _lines(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], width: int) -> Iterator[Text]:
    """Yield a table as lines of this width, headings first; nothing without rows."""
    cells = [[cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row] for row in rows]
    if not cells:
        return
    shown = [(name, *(row[place].plain for row in cells)) for place, name in enumerate(columns)]
    widths = fitted(shown, width - len(columns) + 1)
    yield Text(" ".join(map(_cut, columns, widths)), style="reverse")
    for row in cells:
        fit = (Text(_cut(cell.plain, size), cell.style) for cell, size in zip(row, widths, strict=True))
        yield Text(" ").join(fit)


def _cut(text: str, width: int) -> str:
    """Return the text in ``width`` terminal cells: padded, or cut with an ellipsis."""
    return set_cell_size(text, width) if cell_len(text) <= width else f"{set_cell_size(text, max(0, width - 1))}…"


def _top_row(replica: ReplicaStatus) -> tuple[str | Text, ...]:
    """Return the cells of a replica's row in ``replicas top``."""
    name, state, age, _, heartbeat, loaded, reason = _replica_row(replica)
    behind = max(replica.lag_s.values(), default=0.0)
    return name, state, age, heartbeat, loaded, duration_text(behind) if behind else "-", reason


def _top_channel_row(channel: ChannelStatus, replicas: Iterable[ReplicaStatus], now: float) -> tuple[str, ...]:
    """Return a channel's cells in ``replicas top``.

    ``replicas``: all of the run, of which it reads how far they are behind."""
    lags = sorted(((one.lag_s.get(channel.name, 0.0), one.name) for one in replicas), reverse=True)
    behind = list_text([name for lag_s, name in lags if lag_s], 1)
    last, step = channel.last_sync, "" if channel.step is None else f" (step {channel.step:g})"
    return (
        channel.name,
        f"{channel.committed_version}{step}",
        "-" if channel.committed_at is None else duration_text(max(0.0, now - channel.committed_at)),
        "-" if last is None else f"{last.outcome} in {duration_text(last.seconds)}",
        f"{behind}, {duration_text(lags[0][0])}" if behind else "-",
        "; ".join(map(_under_way, channel.under_way)) or "-",
    )


def _under_way(publish: PublishStatus) -> str:
    """Return a publish as text: version, state, duration, and remaining wait."""
    waits = f", waits {publish.waits} ({publish.left_s:.0f} s at most)" if publish.waits else ""
    return f"{publish.version} {publish.state} for {duration_text(publish.seconds)}{waits}"


def _group_state_row(group: GroupStatus) -> tuple[str | Text, ...]:
    """Return the cells of a group's row in ``replicas status``."""
    states = Counter(replica.state for replica in group.replicas)
    others = [f"{count} {state}" for state, count in sorted(states.items()) if state != "ready"]
    restarts = [f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(group.restarts.items()) if count]
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
    """Return the cells of a replica's row in ``replicas status``."""
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
    """Return the replica's updates that are open for too long, as text, or ""."""
    open_s = sorted(replica.open_s.items())
    return ", ".join(f"update of {name} open for {duration_text(s)}" for name, s in open_s if s > OPEN_S)


def _node_row(node: NodeStatus) -> tuple[str | Text, ...]:
    """Return the cells of a node's row in ``replicas status``."""
    return (
        node.name + (" (this machine)" if node.local else ""),
        Text(node.state, style={"up": "green", "lost": "red"}.get(node.state, "yellow")),
        "-" if node.local else duration_text(node.heard_age_s),
        f"{node.gpus_free} of {node.gpus}" if node.gpus else "-",
        ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items())) or "-",
        ", ".join(node.replicas) or "-",
    )


def _channel_state_row(channel: ChannelStatus) -> tuple[str, ...]:
    """Return the cells of a channel's row in ``replicas status``."""
    last = channel.last_sync
    synced = channel.syncs.get("committed", 0)
    ago = ""
    if channel.committed_at is not None and last is not None and last.outcome == "committed":
        ago = f", {duration_text(max(0.0, time.time() - channel.committed_at))} ago"
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


def event_line(record: Record) -> Text:
    """Return an event as a line such as ``20:07:51 12 rollout/1 ready after 2.1 s``."""
    who, what, tone = in_words(record.event, record.at)
    clock = time.strftime("%H:%M:%S", time.localtime(record.at))
    return Text.assemble(
        (f"{clock} {record.seq:>6}  ", "dim"), (f"{one_line(who):18} ", "bold"), (one_line(what), _TONES.get(tone, ""))
    )

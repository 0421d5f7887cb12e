"""Prometheus metrics of a run; the only module that imports prometheus_client.

Flow: at each scrape :class:`replicas.status.RunStatus` -> gauges, and the fold of the
run's events (:class:`replicas.telemetry.tally.Tally`) -> counters and histograms. No
values are kept here, so a metric cannot disagree with ``GET /status`` or ``GET
/events``, counters continue under a new supervisor, and the series of a removed replica
or node disappear with it. The registry is private: an embedding program's own metrics
are neither changed nor exported.

A metric is a row of a table: its name, its help, and the source of its value. Every
series has the label ``run``, so that another run at the same address is another series.
All labels are bounded: ``run``, ``group``, ``replica``, ``channel``, ``node``,
``phase``, ``reason``, ``state``, ``outcome`` and ``kind``; never a rank, pid, address,
version or error text. A counter with a label whose values are known begins with all of
them at 0: Prometheus sees an increase only of a series that existed before.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import replicas
from replicas import errors
from replicas.common.sizes import snake_case
from replicas.core.base.effects import What
from replicas.core.lives.lifecycle import RestartReason
from replicas.core.lives.ordering import is_good, needed_replicas
from replicas.messages.carried import OperationKind
from replicas.status import PHASES, ChannelStatus, GroupStatus, NodeStatus, ReplicaState, ReplicaStatus, RunStatus
from replicas.telemetry.scrape_format import prefers_openmetrics
from replicas.telemetry.tally import START_BUCKETS, SYNC_BUCKETS, Histogram, Tally

Key = tuple[str, ...]
Series = Iterable[tuple[Key, float]]

_STATES: Key = get_args(ReplicaState)
_NODE_STATES = ("up", "draining", "away", "lost")
_MEMBER_STATES = ("live", "joining", "behind", "observing")
_RESTARTS: Key = get_args(RestartReason)
_RETRIES = ("lost", "frozen", "failed", "refused", "store")
_KINDS: Key = get_args(OperationKind)
_PHASES = (*PHASES, "total")


ERRORS = tuple(
    snake_case(name)
    for name, one in vars(errors).items()
    if isinstance(one, type) and issubclass(one, errors.ReplicasError) and one is not errors.BadConfig
)
"""Names of errors as values of the label ``outcome``."""


class _Row(NamedTuple):
    """One metric; ``value`` returns the value of one thing, or None if it has none."""

    name: str
    text: str
    value: Callable[[Any], float | None]


_RUN = (
    _Row("run_over", "1 when the run is over, and its supervisor about to end.", lambda run: run.exit_code is not None),
    _Row("run_exit_code", "Exit code of the run, once it is over.", lambda run: run.exit_code),
    _Row("store_up", "1 when the rendezvous store answers.", lambda run: run.store.up),
    _Row("store_keys", "Keys in the rendezvous store.", lambda run: run.store.keys),
    _Row(
        "event_loop_lag_seconds",
        "How late the supervisor's event loop last ran a timer: above a second it is overloaded.",
        lambda run: run.event_loop_lag_s,
    ),
)
_NODE = (
    _Row(
        "node_up",
        "1 when the node is up and takes new replicas; 0 when it is draining, away or lost.",
        lambda node: node.state == "up",
    ),
    _Row("node_gpus", "GPUs that the node has for the run.", lambda node: node.gpus),
    _Row("node_gpus_free", "GPUs of the node that no replica holds.", lambda node: node.gpus_free),
    _Row("node_replicas", "Replicas of which a part is on the node.", lambda node: len(node.replicas)),
    _Row("node_heard_age_seconds", "Seconds since the node's agent was last heard.", lambda node: node.heard_age_s),
)
_GROUP = (
    _Row(
        "group_ready",
        "1 when as many of the group's replicas are ready or done as it needs.",
        lambda group: is_good([one.state for one in group.replicas], _needed(group)),
    ),
    _Row(
        "restart_budget_remaining_ratio",
        "Share of the group's restart budget that is left in the present window.",
        lambda group: group.restart_budget_remaining_ratio,
    ),
    _Row(
        "no_progress_remaining_ratio",
        "Share of restart.no_progress_cycles that every replica of the group has left; at 0 one has failed for good.",
        lambda group: group.no_progress_remaining_ratio if group.no_progress_cycles else None,
    ),
)
_REPLICA = (
    _Row("replica_up", "1 when the replica is ready.", lambda one: one.state == "ready"),
    _Row(
        "heartbeat_age_seconds",
        "Seconds since the last heartbeat of the replica's quietest rank.",
        lambda one: one.heartbeat_age_s,
    ),
    _Row("replica_step", "The newest step that the replica's program has reported.", lambda one: one.step),
    _Row("replica_restarts_total", "Restarts of the replica, for any reason.", lambda one: one.restarts),
)
_WEIGHTS = (
    _Row(
        "weight_version",
        "Version of the channel's weights that the replica has loaded.",
        lambda pair: pair[0].versions.get(pair[1].name),
    ),
    _Row(
        "version_lag",
        "How many versions the loaded weights are behind the committed ones.",
        lambda pair: _behind(*pair),
    ),
    _Row(
        "version_lag_seconds",
        "Seconds for which a newer version than the loaded one has been committed; 0: there is none.",
        lambda pair: pair[0].lag_s.get(pair[1].name),
    ),
    _Row("archive_lag_versions", "Committed versions that the archive lacks.", lambda pair: _unarchived(*pair)[0]),
    _Row("archive_lag_seconds", "Seconds for which the archive lacks one.", lambda pair: _unarchived(*pair)[1]),
    _Row(
        "update_open_seconds",
        "Seconds for which the replica has had an update open, which keeps a slot; 0: it has none.",
        lambda pair: pair[0].open_s.get(pair[1].name, 0.0) if pair[1].name in pair[0].versions else None,
    ),
    _Row(
        "slots_in_use",
        "Slots of the replica that hold a version; replicas_slots is how many there are.",
        lambda pair: pair[0].slots.get(pair[1].name),
    ),
    _Row(
        "received_bytes_total",
        "Bytes of weights that were sent to the replica; what is mapped on one host does not move.",
        lambda pair: pair[0].received_nbytes.get(pair[1].name, 0 if pair[1].name in pair[0].versions else None),
    ),
)
_CHANNEL = (
    _Row("channel_epoch", "Number of the newest membership; rises with each change.", lambda one: one.epoch),
    _Row("committed_version", "Newest committed version of the channel's weights.", lambda one: one.committed_version),
    _Row(
        "committed_step",
        'meta["step"] of the newest committed version, if its publisher gave one.',
        lambda one: one.step,
    ),
    _Row(
        "last_commit_timestamp_seconds",
        "When the newest version was committed, in seconds since 1970.",
        lambda one: one.committed_at,
    ),
    _Row("version_bytes", "Size of the newest committed version.", lambda one: one.version_nbytes),
    _Row("slots", "Slots of each member of the channel: versions that it has memory for.", lambda one: one.slots),
    _Row("served_versions", "Number of different versions that ready replicas serve now.", lambda one: len(one.served)),
    _Row("adopts_together", "1 when targets load together (adopt_together).", lambda one: one.adopt_together),
    _Row(
        "sync_bytes_total",
        "Bytes of weights that were sent to members, also to latecomers; what is mapped on one host does not move.",
        lambda one: one.bytes_total,
    ),
    _Row(
        "wrong_bytes_total",
        "How often a member was served bytes of weights that were not the published ones, and asked again.",
        lambda one: one.wrong_total,
    ),
)


def _needed(group: GroupStatus) -> int:
    """Return how many ready replicas the group needs, as the supervisor counts.

    An external group is expected to have its full size, however many have joined.
    """
    expected = group.size if group.launcher == "external" else len(group.replicas)
    return needed_replicas(group.min_ready, expected)


def _unarchived(replica: ReplicaStatus, channel: ChannelStatus) -> tuple[int | None, float | None]:
    """Return how many versions the archive lacks, and for how many seconds; None and
    None unless the replica writes it."""
    is_writer = channel.archive == replica.group
    return (_behind(replica, channel), replica.lag_s.get(channel.name)) if is_writer else (None, None)


def _behind(replica: ReplicaStatus, channel: ChannelStatus) -> int | None:
    """Return how many versions the replica is behind; None if it has loaded no
    version."""
    loaded = replica.versions.get(channel.name)
    return None if loaded is None else max(0, channel.current - loaded)


class Metrics(Collector):
    """The metrics of one run, from its status and counters at each scrape."""

    def __init__(self, status: Callable[[], RunStatus], tally: Callable[[], Tally] = Tally) -> None:
        """Make a private registry. ``status`` returns the run's status, ``tally`` the
        counters of its events; both are called at each scrape, and not before."""
        self._status = status
        self._tally = tally
        self._run = ""
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = ""
        self._build = {
            "version": replicas.__version__,
            "python_version": platform.python_version(),
            "torch_version": torch,
        }
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as (body, Content-Type), read now from status and
        counters.

        :param accept: the Accept header of a scrape, which may ask for OpenMetrics.
            Default: Prometheus' text format, version 0.0.4.
        """
        if prefers_openmetrics(accept):
            return openmetrics.generate_latest(self._registry), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]  # of 0.26
        return generate_latest(self._registry), "text/plain; version=0.0.4; charset=utf-8"

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics from the present status and counters, for
        :meth:`render`."""
        status, tally = self._status(), self._tally()
        self._run = status.run
        replicas_ = [((one.group, str(one.replica)), one) for group in status.groups for one in group.replicas]
        weights = [((*key, one.name), (replica, one)) for key, replica in replicas_ for one in status.channels]
        text = "Always 1; its labels are the releases of this package, Python and torch."
        yield self._metric("build_info", text, tuple(self._build), [(tuple(self._build.values()), 1)])
        yield from self._rows(_RUN, (), [((), status)])
        yield from self._rows(_NODE, ("node",), _named(status.nodes))
        yield from self._rows(_GROUP, ("group",), _named(status.groups))
        yield from self._rows(_REPLICA, ("group", "replica"), replicas_)
        yield from self._rows(_WEIGHTS, ("group", "replica", "channel"), weights)
        yield from self._rows(_CHANNEL, ("channel",), _named(status.channels))
        yield from self._states(status)
        yield from self._counts(status, tally)
        yield from self._times(status, tally)

    # ------------------------------------------------------------ with their own labels

    def _states(self, status: RunStatus) -> Iterator[Metric]:
        """Yield the metrics of nodes, replicas and members by state, and of places."""
        yield self._metric("nodes", "Nodes of the run by state.", ("state",), _by_state((), status.nodes, _NODE_STATES))
        series = [pair for one in status.groups for pair in _by_state((one.name,), one.replicas, _STATES)]
        yield self._metric("group_replicas", "Replicas of a group by state.", ("group", "state"), series)
        series = [pair for one in status.channels for pair in _by_state((one.name,), one.members, _MEMBER_STATES)]
        yield self._metric("channel_members", "Members of the channel by state.", ("channel", "state"), series)
        text = "Always 1; its labels say on which nodes a replica runs."
        places = [(one, node) for group in status.groups for one in group.replicas for node in dict.fromkeys(one.nodes)]
        series = [((one.group, str(one.replica), node), 1) for one, node in places]
        yield self._metric("replica_node_info", text, ("group", "replica", "node"), series)

    def _counts(self, status: RunStatus, tally: Tally) -> Iterator[Metric]:
        """Yield the counters of the run's events, and gauges of reload and labels."""
        groups, channels = status.groups, status.channels
        text = "1 when the config that was last read is in use."
        yield self._metric("config_last_reload_successful", text, (), [((), tally.reload_ok)])
        yield self._metric(
            "events_lost_total", "Events that could not be written to disk.", (), [((), tally.events_lost)]
        )
        text = "Sidecars that were killed and replaced."
        series = _by_key((), status.sidecar_replacements, _RETRIES)
        yield self._metric("sidecar_replacements_total", text, ("reason",), series)
        text = "Connections and messages that the control port refused."
        yield self._metric("refused_total", text, ("reason",), _by_key((), status.refused))
        text = "Lines of output that are missing from the logs."
        series = [((group.name,), tally.log_lines_dropped.get(group.name, 0)) for group in groups]
        yield self._metric("log_lines_dropped_total", text, ("group",), series)
        ours = [(one, _RESTARTS if one.launcher != "external" else ()) for one in groups]
        series = [pair for one, reasons in ours for pair in _by_key((one.name,), one.restarts, reasons)]
        yield self._metric("restarts_total", "Restarts of the group's replicas.", ("group", "reason"), series)
        text = "Publishes by outcome: committed, or the error that ended them."
        series = [pair for one in channels for pair in _by_key((one.name,), one.syncs, ("committed", *ERRORS))]
        yield self._metric("sync_total", text, ("channel", "outcome"), series)
        text = "Loads that failed: refused before anything was loaded, or failed half-way."
        failed = ((one.name, tally.failed_loads.get(one.name, {})) for one in channels)
        series = [pair for name, counts in failed for pair in _by_key((name,), counts, ("failed", "refused"))]
        yield self._metric("failed_loads_total", text, ("channel", "outcome"), series)
        text = "Decisions about versions: promoted, rejected, rolled back, held, released, labelled, scored."
        decided = ((one.name, tally.decided.get(one.name, {})) for one in channels if one.targets)
        series = [pair for name, counts in decided for pair in _by_key((name,), counts, get_args(What))]
        yield self._metric("version_decisions_total", text, ("channel", "decision"), series)
        text = "The version of a label: current is what targets load."
        labels = [
            (one.name, label, version.number)
            for one in channels
            for version in one.versions
            for label in version.labels
        ]
        series = [((name, label), number) for name, label, number in labels]
        yield self._metric("label_version", text, ("channel", "label"), series)
        text = "The mean of a score of the version with a label."
        scores = [
            ((one.name, label, name), score)
            for one in channels
            for version in one.versions
            for label in version.labels
            for name, score in version.scores.items()
        ]
        yield self._metric("version_score", text, ("channel", "label", "score"), scores)
        text = "Transfers that were made again, by reason."
        series = [pair for one in channels for pair in _by_key((one.name,), one.retries, _RETRIES)]
        yield self._metric("sync_retries_total", text, ("channel", "reason"), series)
        text = "Collectives between peers by outcome: ok, or the error that ended them."
        kinds = {
            one.name: tally.operations.get(one.name, {})
            for one in channels
            if one.name in tally.operations or any(member.role == "peer" for member in one.members)
        }
        series = [
            pair
            for name, found in kinds.items()
            for kind in _KINDS
            for pair in _by_key((name, kind), _snaked(found.get(kind, {})), ("ok", *ERRORS))
        ]
        yield self._metric("operations_total", text, ("channel", "kind", "outcome"), series)

    def _times(self, status: RunStatus, tally: Tally) -> Iterator[Metric]:
        """Yield the histograms of durations: starts, syncs, loads, operations."""
        groups, channels, none = status.groups, status.channels, Histogram()
        text = "Seconds from the start of a replica to its readiness."
        spreads: list[tuple[Key, Histogram]]
        spreads = [((one.name,), tally.starts.get(one.name, none)) for one in groups]
        yield self._histogram("start_duration_seconds", text, ("group",), START_BUCKETS, spreads)
        text = "Seconds from the loss of a ready replica to the readiness of its next generation."
        spreads = [((one.name,), tally.recoveries.get(one.name, none)) for one in groups]
        yield self._histogram("recovery_duration_seconds", text, ("group",), START_BUCKETS, spreads)
        phases = {one.name: tally.sync_phases.get(one.name, {}) for one in channels}
        text = "Seconds of a committed sync."
        spreads = [((name,), found.get("total", none)) for name, found in phases.items()]
        yield self._histogram("sync_duration_seconds", text, ("channel",), SYNC_BUCKETS, spreads)
        text = 'Seconds of each phase of a committed sync. phase="total" is the whole sync: leave it out of sums.'
        spreads = [
            ((name, phase), found.get(phase, none))
            for name, found in phases.items()
            for phase in dict.fromkeys((*_PHASES, *found))
        ]
        yield self._histogram("sync_phase_seconds", text, ("channel", "phase"), SYNC_BUCKETS, spreads)
        text = (
            "Seconds for which a replica had an update open, from its receive to its report; the slowest rank counts."
        )
        targets = {(name, group.name) for group in groups for one in group.replicas for name in one.versions}
        spreads = [(key, tally.loads.get(key[0], {}).get(key[1], none)) for key in sorted(targets)]
        yield self._histogram("load_duration_seconds", text, ("channel", "group"), SYNC_BUCKETS, spreads)
        text = "Seconds from the first post of a collective to its end."
        spreads = [
            ((one.name, kind), spread)
            for one in channels
            for kind, spread in tally.operation_times.get(one.name, {}).items()
        ]
        yield self._histogram("operation_duration_seconds", text, ("channel", "kind"), SYNC_BUCKETS, spreads)

    # ------------------------------------------------------------ families

    def _rows(self, rows: Sequence[_Row], labels: Key, things: Sequence[tuple[Key, object]]) -> Iterator[Metric]:
        """Yield the metric of each row of a table.

        :param labels: names of the labels, beside ``run``.
        :param things: (label values, thing): the row's ``value`` is called on each
            thing.
        """
        for row in rows:
            found = [(key, value) for key, thing in things if (value := row.value(thing)) is not None]
            yield self._metric(row.name, row.text, labels, found)

    def _metric(self, name: str, text: str, labels: Key, series: Series) -> Metric:
        """Return the metric ``replicas_NAME`` with help ``text``: a counter if its name
        ends in ``_total``, else a gauge.

        :param labels: their names, without ``run``. :param series: label values,
            number.
        """
        kind: type[CounterMetricFamily | GaugeMetricFamily]
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"replicas_{name}", text, labels=("run", *labels))
        for values, number in series:
            family.add_metric((self._run, *values), float(number))
        return family

    def _histogram(
        self, name: str, text: str, labels: Key, bounds: tuple[float, ...], series: Iterable[tuple[Key, Histogram]]
    ) -> Metric:
        """Return the histogram ``replicas_NAME``; ``bounds``: upper limits of its
        buckets.

        :param series: (label values, observations) of each series.
        """
        family = HistogramMetricFamily(f"replicas_{name}", text, labels=("run", *labels))
        names = [*map(floatToGoString, bounds), "+Inf"]
        for values, spread in series:
            counts = spread.cumulative() or [0] * len(names)
            family.add_metric((self._run, *values), list(zip(names, counts, strict=True)), spread.total_s)
        return family


def _named(things: Iterable[NodeStatus | GroupStatus | ChannelStatus]) -> list[tuple[Key, object]]:
    """Return ((name,), thing) for each thing: its name is the value of a label."""
    return [((one.name,), one) for one in things]


def _by_state(key: Key, things: Iterable[Any], states: Iterable[str]) -> list[tuple[Key, float]]:
    """Count things by their state; return (label values, count) for each of ``states``.

    :param key: label values before that of the state.
    """
    found = Counter[str](one.state for one in things)
    return [((*key, state), found[state]) for state in states]


def _by_key(key: Key, counts: Mapping[str, int], known: Iterable[str] = ()) -> list[tuple[Key, float]]:
    """Return (label values, count) for each name in ``counts``.

    :param key: label values before the name.
    :param known: names that have a count of 0 if ``counts`` lacks them.
    """
    counts = {**dict.fromkeys(known, 0), **counts}
    return [((*key, name), number) for name, number in sorted(counts.items())]


def _snaked(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts with their names in snake_case."""
    return {snake_case(name): number for name, number in counts.items()}

"""Prometheus metrics of a run; the only module that imports prometheus_client.

Nothing is kept here: each scrape makes gauges from one
:class:`replicas.status.RunStatus`, and counters and histograms from the fold of the
run's events (:class:`replicas.telemetry.tally.Tally`). So a metric cannot disagree with
``GET /status`` or ``GET /events``, counters continue under a new supervisor, and the
series of a removed replica or node disappear with it. The registry is private: an
embedding program's own metrics are neither changed nor exported. Labels are bounded:
``group``, ``replica``, ``channel``, ``node``, ``phase``, ``reason``, ``state`` and
``outcome``; never a rank, pid, address, version or error text.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import replicas
from replicas.status import MemberStatus, NodeStatus, ReplicaState, ReplicaStatus, RunStatus
from replicas.telemetry.tally import START_BUCKETS, SYNC_BUCKETS, Histogram, Tally

__all__ = ["Metrics"]

Series = Iterable[tuple[tuple[str, ...], float]]

_STATES: tuple[str, ...] = get_args(ReplicaState)
_NODE_STATES = ("up", "draining", "away", "lost")
_MEMBER_STATES = ("live", "joining", "behind", "quarantined", "observing")


class Metrics(Collector):
    """The metrics of one run, from its status and counters at each scrape."""

    def __init__(self, status: Callable[[], RunStatus], tally: Callable[[], Tally] = Tally) -> None:
        self._status = status
        self._tally = tally
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

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        status, tally = self._status(), self._tally()
        text = "Always 1; its labels are the versions in use."
        yield _gauge("build_info", text, tuple(self._build), [(tuple(self._build.values()), 1)])
        yield from _run_metrics(status, tally)
        yield from _node_metrics(status)
        yield from _group_metrics(status, tally)
        yield from _version_metrics(status)
        yield from _channel_metrics(status, tally)


def _gauge(name: str, text: str, labels: Sequence[str], series: Series) -> Metric:
    return _filled(GaugeMetricFamily(f"replicas_{name}", text, labels=labels), series)


def _counter(name: str, text: str, labels: Sequence[str], series: Series) -> Metric:
    return _filled(CounterMetricFamily(f"replicas_{name}", text, labels=labels), series)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, series: Series) -> Metric:
    for values, number in series:
        family.add_metric(values, number)
    return family


def _histogram(
    name: str,
    text: str,
    labels: Sequence[str],
    bounds: tuple[float, ...],
    series: Iterable[tuple[tuple[str, ...], Histogram]],
) -> Metric:
    family = HistogramMetricFamily(f"replicas_{name}", text, labels=labels)
    names = [*map(floatToGoString, bounds), "+Inf"]
    for values, spread in series:
        family.add_metric(values, list(zip(names, spread.cumulative(), strict=True)), spread.total_s)
    return family


def _by_state(
    things: Iterable[ReplicaStatus | MemberStatus | NodeStatus], states: Iterable[str]
) -> list[tuple[str, int]]:
    found = Counter[str](one.state for one in things)
    return [(state, found[state]) for state in states]


def _by_key(labels: tuple[str, ...], counts: Mapping[str, int], *, always: str = "") -> Series:
    counts = {always: 0, **counts} if always else counts
    return [((*labels, key), number) for key, number in sorted(counts.items())]


def _run_metrics(status: RunStatus, tally: Tally) -> Iterator[Metric]:
    yield _gauge("store_up", "1 when the store process answers.", (), [((), float(status.store.up))])
    yield _gauge("store_keys", "Keys in the rendezvous store.", (), [((), status.store.keys)])
    text = "How late the supervisor's event loop last ran a timer."
    yield _gauge("event_loop_lag_seconds", text, (), [((), status.event_loop_lag_s)])
    text = "1 when the config that was last read is in use."
    yield _gauge("config_last_reload_successful", text, (), [((), float(tally.reload_ok))])
    text = "Sidecars that were killed and replaced."
    yield _counter("sidecar_replacements_total", text, ("reason",), _by_key((), status.sidecar_replacements))
    text = "Connections and messages that the control port refused."
    yield _counter("refused_total", text, ("reason",), _by_key((), status.refused))
    yield _counter("events_lost_total", "Events that could not be written to disk.", (), [((), tally.events_lost)])


def _node_metrics(status: RunStatus) -> Iterator[Metric]:
    nodes, node_only = status.nodes, ("node",)
    series: Series = [((state,), number) for state, number in _by_state(nodes, _NODE_STATES)]
    yield _gauge("nodes", "Nodes of the run by state.", ("state",), series)
    text = "1 when the node is up and takes new replicas; 0 when it is draining, away or lost."
    yield _gauge("node_up", text, node_only, [((one.name,), float(one.state == "up")) for one in nodes])
    yield _gauge(
        "node_gpus", "GPUs that the node has for the run.", node_only, [((one.name,), one.gpus) for one in nodes]
    )
    series = [((one.name,), one.gpus_free) for one in nodes]
    yield _gauge("node_gpus_free", "GPUs of the node that no replica holds.", node_only, series)
    series = [((one.name,), len(one.replicas)) for one in nodes]
    yield _gauge("node_replicas", "Replicas with a place on the node.", node_only, series)
    series = [((one.name,), one.heard_age_s) for one in nodes]
    yield _gauge("node_heard_age_seconds", "Seconds since the node's agent was last heard.", node_only, series)


def _group_metrics(status: RunStatus, tally: Tally) -> Iterator[Metric]:
    groups, group_only, of_replica = status.groups, ("group",), ("group", "replica")
    everyone = [((one.group, str(one.replica)), one) for group in groups for one in group.replicas]
    series: Series = [
        ((group.name, state), number) for group in groups for state, number in _by_state(group.replicas, _STATES)
    ]
    yield _gauge("group_replicas", "Replicas of a group by state.", ("group", "state"), series)
    series = [(key, float(one.state == "ready")) for key, one in everyone]
    yield _gauge("replica_up", "1 when the replica is ready.", of_replica, series)
    text = "Seconds since the last heartbeat of the replica's quietest rank."
    series = [(key, one.heartbeat_age_s) for key, one in everyone if one.heartbeat_age_s is not None]
    yield _gauge("heartbeat_age_seconds", text, of_replica, series)
    series = [pair for group in groups for pair in _by_key((group.name,), group.restarts, always="exit")]
    yield _counter("restarts_total", "Restarts of the group's replicas.", ("group", "reason"), series)
    text = "Share of the group's restart budget that is left in the present window."
    series = [((group.name,), group.restart_budget_remaining_ratio) for group in groups]
    yield _gauge("restart_budget_remaining_ratio", text, group_only, series)
    text = "Share of restart.no_progress_cycles that each replica of the group has left."
    series = [((group.name,), group.no_progress_remaining_ratio) for group in groups if group.no_progress_cycles]
    yield _gauge("no_progress_remaining_ratio", text, group_only, series)
    text = "Lines of output that are missing from the logs."
    series = [((group.name,), tally.log_lines_dropped.get(group.name, 0)) for group in groups]
    yield _counter("log_lines_dropped_total", text, group_only, series)
    text = "Seconds from the start of a replica to its readiness."
    spreads = [((group.name,), tally.starts[group.name]) for group in groups if group.name in tally.starts]
    yield _histogram("start_duration_seconds", text, group_only, START_BUCKETS, spreads)
    text = "Seconds from the loss of a ready replica to the readiness of its next generation."
    spreads = [((group.name,), tally.recoveries[group.name]) for group in groups if group.name in tally.recoveries]
    yield _histogram("recovery_duration_seconds", text, group_only, START_BUCKETS, spreads)


def _version_metrics(status: RunStatus) -> Iterator[Metric]:
    committed = {channel.name: channel.committed_version for channel in status.channels}
    loaded = [
        ((one.group, str(one.replica), channel), version)
        for group in status.groups
        for one in group.replicas
        for channel, version in sorted(one.versions.items())
    ]
    labels = ("group", "replica", "channel")
    yield _gauge("weight_version", "Version of the channel's weights that the replica has loaded.", labels, loaded)
    text = "How many versions the loaded weights are behind the committed ones."
    series = [(key, max(0, committed.get(key[2], 0) - version)) for key, version in loaded]
    yield _gauge("version_lag", text, labels, series)


def _channel_metrics(status: RunStatus, tally: Tally) -> Iterator[Metric]:
    channels, channel_only = status.channels, ("channel",)
    series: Series = [((one.name,), one.epoch) for one in channels]
    yield _gauge("channel_epoch", "Newest membership epoch.", channel_only, series)
    series = [
        ((one.name, state), number) for one in channels for state, number in _by_state(one.members, _MEMBER_STATES)
    ]
    yield _gauge("channel_members", "Members of the channel by state.", ("channel", "state"), series)
    series = [((one.name,), one.committed_version) for one in channels]
    yield _gauge("committed_version", "Newest committed version of the channel's weights.", channel_only, series)
    text = "Publishes by outcome: committed, or the error that ended them."
    series = [pair for one in channels for pair in _by_key((one.name,), one.syncs, always="committed")]
    yield _counter("sync_total", text, ("channel", "outcome"), series)
    text = "Bytes of weights that were sent to members, also to latecomers; what is mapped on one host does not move."
    series = [((one.name,), one.bytes_total) for one in channels]
    yield _counter("sync_bytes_total", text, channel_only, series)
    series = [pair for one in channels for pair in _by_key((one.name,), one.retries)]
    yield _counter("sync_retries_total", "Transfers that were made again, by reason.", ("channel", "reason"), series)
    text = "Loads that failed: refused before anything was loaded, or failed half-way."
    none = {"refused": 0, "failed": 0}
    series = [pair for one in channels for pair in _by_key((one.name,), none | tally.failed_loads.get(one.name, {}))]
    yield _counter("failed_loads_total", text, ("channel", "outcome"), series)
    text = "Seconds of each phase of a committed sync."
    spreads = [
        ((one.name, phase), spread)
        for one in channels
        for phase, spread in sorted(tally.sync_phases.get(one.name, {}).items())
    ]
    yield _histogram("sync_phase_seconds", text, ("channel", "phase"), SYNC_BUCKETS, spreads)

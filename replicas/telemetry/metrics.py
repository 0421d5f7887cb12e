"""Prometheus metrics of a run; the only module that imports prometheus_client.

Nothing is kept here: each scrape makes gauges from one
:class:`replicas.status.RunStatus`, and counters and histograms from the fold of the
run's events (:class:`replicas.telemetry.tally.Tally`). So a metric cannot disagree with
``GET /status`` or ``GET /events``, counters continue under a new supervisor, and the
series of a removed replica disappear with it. The registry is private: an embedding
program's own metrics are neither changed nor exported. Labels are bounded: ``group``,
``replica``, ``channel``, ``phase``, ``reason``, ``state`` and ``outcome``; never a
rank, pid, host, version or error text.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import replicas
from replicas.status import ChannelStatus, GroupStatus, ReplicaState, RunStatus
from replicas.telemetry.tally import START_BUCKETS, SYNC_BUCKETS, Histogram, Tally

__all__ = ["Metrics"]

_STATES: tuple[str, ...] = get_args(ReplicaState)
_MEMBER_STATES = ("live", "joining", "behind", "quarantined", "observing")


class Metrics(Collector):
    """The metrics of one run.

    :param status: returns the run's current state, with the counters of ``tally`` in
        it; called once for each scrape.
    :param tally: returns the counters.
    """

    def __init__(self, status: Callable[[], RunStatus], tally: Callable[[], Tally] = Tally) -> None:
        self._status = status
        self._tally = tally
        self._build = {
            "version": replicas.__version__,
            "python_version": platform.python_version(),
            "torch_version": _installed("torch"),
        }
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        tally = self._tally()
        yield self._info()
        yield from _run_metrics(status, tally)
        yield from _group_metrics(status, tally)
        yield from _channel_metrics(status, tally)

    def _info(self) -> Metric:
        family = GaugeMetricFamily(
            "replicas_build_info", "Always 1; its labels are the versions in use.", labels=list(self._build)
        )
        family.add_metric(list(self._build.values()), 1)
        return family


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


Series = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: tuple[str, ...], series: Series) -> Metric:
    family = GaugeMetricFamily(f"replicas_{name}", text, labels=labels)
    for values, number in series:
        family.add_metric(values, number)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], series: Series) -> Metric:
    family = CounterMetricFamily(f"replicas_{name}", text, labels=labels)
    for values, number in series:
        family.add_metric(values, number)
    return family


def _histogram(
    name: str,
    text: str,
    labels: tuple[str, ...],
    bounds: tuple[float, ...],
    series: Iterable[tuple[tuple[str, ...], Histogram]],
) -> Metric:
    family = HistogramMetricFamily(f"replicas_{name}", text, labels=labels)
    names = [*map(floatToGoString, bounds), "+Inf"]
    for values, spread in series:
        family.add_metric(values, list(zip(names, spread.cumulative(), strict=True)), spread.total_s)
    return family


def _run_metrics(status: RunStatus, tally: Tally) -> Iterator[Metric]:
    yield _gauge("store_up", "1 when the store process answers.", (), [((), float(status.store.up))])
    yield _gauge("store_keys", "Keys in the rendezvous store.", (), [((), status.store.keys)])
    yield _gauge(
        "event_loop_lag_seconds",
        "How late the supervisor's event loop last ran a timer.",
        (),
        [((), status.event_loop_lag_s)],
    )
    yield _gauge(
        "config_last_reload_successful",
        "1 when the config that was last read is in use.",
        (),
        [((), float(tally.reload_ok))],
    )
    yield _counter(
        "sidecar_replacements_total",
        "Sidecars that were killed and replaced.",
        ("reason",),
        _by_key((), status.sidecar_replacements),
    )
    yield _counter(
        "refused_total",
        "Connections and messages that the control port refused.",
        ("reason",),
        _by_key((), status.refused),
    )
    yield _counter("events_lost_total", "Events that could not be written to disk.", (), [((), tally.events_lost)])


def _by_key(labels: tuple[str, ...], counts: Mapping[str, int], *, always: str = "") -> Series:
    counts = {always: 0, **counts} if always else counts
    return [((*labels, key), number) for key, number in sorted(counts.items())]


def _group_metrics(status: RunStatus, tally: Tally) -> Iterator[Metric]:
    groups = status.groups
    everyone = [replica for group in groups for replica in group.replicas]
    yield _gauge(
        "group_replicas",
        "Replicas of a group by state.",
        ("group", "state"),
        [((group.name, state), number) for group in groups for state, number in _by_state(group)],
    )
    yield _gauge(
        "replica_up",
        "1 when the replica is ready.",
        ("group", "replica"),
        [((one.group, str(one.replica)), float(one.state == "ready")) for one in everyone],
    )
    yield _gauge(
        "heartbeat_age_seconds",
        "Age of the oldest of the last heartbeats of the replica's ranks.",
        ("group", "replica"),
        [((one.group, str(one.replica)), one.heartbeat_age_s) for one in everyone if one.heartbeat_age_s is not None],
    )
    yield _counter(
        "restarts_total",
        "Restarts of the group's replicas.",
        ("group", "reason"),
        [pair for group in groups for pair in _by_key((group.name,), group.restarts, always="exit")],
    )
    yield _gauge(
        "restart_budget_remaining_ratio",
        "Share of the group's restart budget that is left in the present window.",
        ("group",),
        [((group.name,), group.restart_budget_remaining_ratio) for group in groups],
    )
    yield _gauge(
        "no_progress_remaining_ratio",
        "Share of restart.no_progress_cycles that each replica of the group has left.",
        ("group",),
        [((group.name,), group.no_progress_remaining_ratio) for group in groups if group.no_progress_cycles],
    )
    yield _counter(
        "log_lines_dropped_total",
        "Lines of output that are missing from the logs.",
        ("group",),
        [((group.name,), tally.log_lines_dropped.get(group.name, 0)) for group in groups],
    )
    yield _histogram(
        "start_duration_seconds",
        "Seconds from the start of a replica to its readiness.",
        ("group",),
        START_BUCKETS,
        [((group.name,), tally.starts[group.name]) for group in groups if group.name in tally.starts],
    )
    yield _histogram(
        "recovery_duration_seconds",
        "Seconds from the loss of a ready replica to the readiness of its next generation.",
        ("group",),
        START_BUCKETS,
        [((group.name,), tally.recoveries[group.name]) for group in groups if group.name in tally.recoveries],
    )
    yield from _version_metrics(status)


def _by_state(group: GroupStatus) -> list[tuple[str, int]]:
    return [(state, sum(1 for one in group.replicas if one.state == state)) for state in _STATES]


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
    yield _gauge(
        "version_lag",
        "How many versions the loaded weights are behind the committed ones.",
        labels,
        [(key, max(0, committed.get(key[2], 0) - version)) for key, version in loaded],
    )


def _channel_metrics(status: RunStatus, tally: Tally) -> Iterator[Metric]:
    channels = status.channels
    yield _gauge(
        "channel_epoch",
        "Newest membership epoch.",
        ("channel",),
        [((one.name,), one.epoch) for one in channels],
    )
    yield _gauge(
        "channel_members",
        "Members of the channel by state.",
        ("channel", "state"),
        [((one.name, state), number) for one in channels for state, number in _members(one)],
    )
    yield _gauge(
        "committed_version",
        "Newest committed version of the channel's weights.",
        ("channel",),
        [((one.name,), one.committed_version) for one in channels],
    )
    yield _counter(
        "sync_total",
        "Publishes by outcome: committed, or the error that ended them.",
        ("channel", "outcome"),
        [pair for one in channels for pair in _by_key((one.name,), one.syncs, always="committed")],
    )
    yield _counter(
        "sync_bytes_total",
        "Bytes of weights that were sent to members, also to latecomers; what is mapped on one host does not move.",
        ("channel",),
        [((one.name,), one.bytes_total) for one in channels],
    )
    yield _counter(
        "sync_retries_total",
        "Transfers that were made again, by reason.",
        ("channel", "reason"),
        [pair for one in channels for pair in _by_key((one.name,), one.retries)],
    )
    yield _histogram(
        "sync_phase_seconds",
        "Seconds of each phase of a committed sync.",
        ("channel", "phase"),
        SYNC_BUCKETS,
        [
            ((one.name, phase), spread)
            for one in channels
            for phase, spread in sorted(tally.sync_phases.get(one.name, {}).items())
        ],
    )


def _members(channel: ChannelStatus) -> list[tuple[str, int]]:
    return [(state, sum(1 for one in channel.members if one.state == state)) for state in _MEMBER_STATES]

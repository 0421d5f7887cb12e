"""The metrics: names and labels of the contract, values of the status, and nothing left
of what is gone.

Covers: telemetry/metrics.py, telemetry/scrape_format.py, telemetry/tally.py.
"""

from __future__ import annotations

import msgspec
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replicas.core.base.effects import (
    CaughtUp,
    LoadFailed,
    OperationEnded,
    ReplicaLoaded,
    Retried,
    SidecarReplaced,
    SyncEnded,
)
from replicas.core.lives.lifecycle import Lifecycle, ReplicaEvent
from replicas.status import (
    ChannelStatus,
    GroupStatus,
    MemberStatus,
    NodeStatus,
    ReplicaStatus,
    RunStatus,
    StoreStatus,
    SyncRecord,
)
from replicas.telemetry.events import ConnectionsRefused, EventsLost, LogLinesDropped, ReloadRefused
from replicas.telemetry.metrics import Metrics
from replicas.telemetry.tally import Tally

CONTRACT = {
    "build_info",
    "group_replicas",
    "replica_up",
    "restarts_total",
    "restart_budget_remaining_ratio",
    "no_progress_remaining_ratio",
    "heartbeat_age_seconds",
    "start_duration_seconds",
    "recovery_duration_seconds",
    "channel_epoch",
    "channel_members",
    "committed_version",
    "weight_version",
    "version_lag",
    "sync_total",
    "sync_phase_seconds",
    "sync_bytes_total",
    "wrong_bytes_total",
    "sync_retries_total",
    "failed_loads_total",
    "sidecar_replacements_total",
    "refused_total",
    "events_lost_total",
    "log_lines_dropped_total",
    "store_up",
    "store_keys",
    "nodes",
    "node_up",
    "node_gpus",
    "node_gpus_free",
    "node_replicas",
    "node_heard_age_seconds",
    "event_loop_lag_seconds",
    "config_last_reload_successful",
    "committed_step",
    "run_over",
    "run_exit_code",
    "group_ready",
    "last_commit_timestamp_seconds",
    "load_duration_seconds",
    "operation_duration_seconds",
    "operations_total",
    "adopts_together",
    "received_bytes_total",
    "replica_node_info",
    "replica_restarts_total",
    "replica_step",
    "served_versions",
    "slots",
    "slots_in_use",
    "sync_duration_seconds",
    "update_open_seconds",
    "version_bytes",
    "version_lag_seconds",
}
LABELS = {"run", "kind", "group", "replica", "channel", "node", "phase", "reason", "state", "outcome", "le"}
BUILD_LABELS = {"run", "version", "python_version", "torch_version"}


def a_record(outcome: str = "committed") -> SyncRecord:
    return SyncRecord(
        version=7,
        outcome=outcome,
        seconds=0.3,
        nbytes=100,
        moved_nbytes=200,
        moved_to={"rollout/0": 150, "rollout/1": 50},
        phases={"pack": 0.1, "transfer": 0.2},
    )


NODES = (
    NodeStatus(name="gpu2", state="up", gpus=8, gpus_free=6, replicas=("rollout/0", "rollout/1"), heard_age_s=0.25),
    NodeStatus(name="gpu3", state="away", gpus=8, heard_age_s=4.5),
    NodeStatus(name="gpu4", state="draining"),
)


def a_status(*, exit_code: int | None = None, rollouts: int = 2, nodes: tuple[NodeStatus, ...] = NODES) -> RunStatus:
    rollout = [
        ReplicaStatus(
            name=f"rollout/{index}",
            group="rollout",
            replica=index,
            state="ready" if index == 0 else "backoff",
            generation=1 + index,
            heartbeat_age_s=0.5 if index == 0 else None,
            versions={"policy": 7 - 2 * index},
            restarts=3 * index,
            nodes=("gpu3", "gpu3") if index else ("gpu2",),
            step=41 if index == 0 else None,
            slots={"policy": 2},
            open_s={"policy": 1.5} if index == 1 else {},
            lived_s=50.0,
        )
        for index in range(rollouts)
    ]
    members = (
        MemberStatus(name="trainer/0/0", state="live", role="source"),
        MemberStatus(name="rollout/0/0", state="live", role="target"),
        MemberStatus(name="rollout/1/0", state="joining", role="target"),
    )
    policy = ChannelStatus(
        name="policy", epoch=3, committed_version=7, current=7, digest="ab", members=members, step=40, slots=2
    )
    return RunStatus(
        run="grpo",
        version="0",
        endpoint="127.0.0.1:1",
        pid=1,
        uptime_s=1.0,
        ready=True,
        store=StoreStatus(up=True, host="127.0.0.1", port=2, keys=11),
        groups=(
            GroupStatus(
                name="rollout",
                launcher="torchrun",
                world_size=1,
                replicas=tuple(rollout),
                restart_budget_remaining_ratio=0.8,
                no_progress_cycles=4,
                no_progress_remaining_ratio=0.25,
            ),
        ),
        channels=(policy,),
        nodes=nodes,
        exit_code=exit_code,
        event_loop_lag_s=0.002,
        refused={"origin": 0, "token": 0},
    )


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name (without the prefix) and sorted labels, without the run's
    name, which all have."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "grpo"
            found[sample.name.removeprefix("replicas_"), tuple(sorted(labels.items()))] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


def metrics_of(tally: Tally) -> Metrics:
    return Metrics(lambda: tally.shown_in(a_status(), now=1100.0), lambda: tally)


def fed() -> Metrics:
    tally = Tally()
    life = Lifecycle("rollout", 0, now=0.0)
    for now, event in enumerate(
        (ReplicaEvent.START, ReplicaEvent.READY, ReplicaEvent.RETRY, ReplicaEvent.BACKOFF_ELAPSED, ReplicaEvent.READY)
    ):
        tally.count(life.apply(event, now=float(now), restart_reason="signal"))
    tally.count(
        SyncEnded("policy", msgspec.structs.replace(a_record(), version=6, moved_nbytes=0, moved_to={})), 1060.0
    )
    tally.count(SyncEnded("policy", a_record()), 1090.0)
    tally.count(SyncEnded("policy", a_record("peers_lost")), 1095.0)
    tally.count(CaughtUp("policy", 7, (), 10, {"rollout/1": 10}))
    tally.count(ReplicaLoaded("policy", "rollout", 0, 7, 0.25))
    tally.count(ReplicaLoaded("policy", "rollout", 1, 0))
    tally.count(ReplicaLoaded("policy", "rollout", 0, 7))  # by the next coordinator
    tally.count(OperationEnded("policy", "all_reduce", "ok", 0.5))
    tally.count(OperationEnded("policy", "all_reduce", "DeadlineExceeded", 9.5))
    tally.count(Retried("policy", "lost"))
    for version in (3, 4):
        tally.count(LoadFailed("policy", "rollout", 0, version, "no weights for b", kept=True))
    tally.count(SidecarReplaced("policy", "died", 4))
    tally.count(ConnectionsRefused(reason="token", count=3))
    tally.count(EventsLost(count=5, reason="full"))
    tally.count(LogLinesDropped(group="rollout", replica=0, generation=1, count=6))
    tally.count(ReloadRefused(problems=("no",)))
    return metrics_of(tally)


def test_every_metric_of_the_contract_and_no_other_is_there_with_bounded_labels() -> None:
    suffixes = ("_bucket", "_sum", "_count")
    found = set()
    for name, labels in (*samples(fed()), *samples(Metrics(lambda: a_status(exit_code=1)))):
        base = next((name.removesuffix(end) for end in suffixes if name.endswith(f"seconds{end}")), name)
        found.add(base)
        assert {label for label, _ in labels} <= (BUILD_LABELS if base == "build_info" else LABELS)
    assert found == CONTRACT


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("group_replicas", {"group": "rollout", "state": "ready"}, 1),
        ("group_replicas", {"group": "rollout", "state": "failed"}, 0),
        ("replica_up", {"group": "rollout", "replica": "0"}, 1),
        ("replica_up", {"group": "rollout", "replica": "1"}, 0),
        ("restarts_total", {"group": "rollout", "reason": "signal"}, 1),
        ("restarts_total", {"group": "rollout", "reason": "exit"}, 0),
        ("restart_budget_remaining_ratio", {"group": "rollout"}, 0.8),
        ("no_progress_remaining_ratio", {"group": "rollout"}, 0.25),
        ("group_replicas", {"group": "rollout", "state": "drained"}, 0),
        ("heartbeat_age_seconds", {"group": "rollout", "replica": "0"}, 0.5),
        ("heartbeat_age_seconds", {"group": "rollout", "replica": "1"}, None),
        ("start_duration_seconds_count", {"group": "rollout"}, 2),
        ("recovery_duration_seconds_sum", {"group": "rollout"}, 2.0),
        ("channel_epoch", {"channel": "policy"}, 3),
        ("channel_members", {"channel": "policy", "state": "live"}, 2),
        ("channel_members", {"channel": "policy", "state": "joining"}, 1),
        ("committed_version", {"channel": "policy"}, 7),
        ("weight_version", {"group": "rollout", "replica": "1", "channel": "policy"}, 5),
        ("version_lag", {"group": "rollout", "replica": "1", "channel": "policy"}, 2),
        ("sync_total", {"channel": "policy", "outcome": "committed"}, 2),
        ("sync_total", {"channel": "policy", "outcome": "no_capacity"}, 0),
        ("sync_duration_seconds_count", {"channel": "policy"}, 2),
        ("version_lag_seconds", {"group": "rollout", "replica": "0", "channel": "policy"}, 0.0),
        ("version_lag_seconds", {"group": "rollout", "replica": "1", "channel": "policy"}, 40.0),
        ("update_open_seconds", {"group": "rollout", "replica": "0", "channel": "policy"}, 0.0),
        ("update_open_seconds", {"group": "rollout", "replica": "1", "channel": "policy"}, 1.5),
        ("received_bytes_total", {"group": "rollout", "replica": "1", "channel": "policy"}, 60),
        ("slots_in_use", {"group": "rollout", "replica": "1", "channel": "policy"}, 2),
        ("slots", {"channel": "policy"}, 2),
        ("version_bytes", {"channel": "policy"}, 100),
        ("last_commit_timestamp_seconds", {"channel": "policy"}, 1090.0),
        ("committed_step", {"channel": "policy"}, 40),
        ("served_versions", {"channel": "policy"}, 1),
        ("adopts_together", {"channel": "policy"}, 0),
        ("replica_step", {"group": "rollout", "replica": "0"}, 41),
        ("replica_step", {"group": "rollout", "replica": "1"}, None),
        ("replica_restarts_total", {"group": "rollout", "replica": "1"}, 3),
        ("replica_node_info", {"group": "rollout", "replica": "1", "node": "gpu3"}, 1),
        ("group_ready", {"group": "rollout"}, 0),
        ("load_duration_seconds_sum", {"channel": "policy", "group": "rollout"}, 0.25),
        ("operations_total", {"channel": "policy", "kind": "all_reduce", "outcome": "ok"}, 1),
        ("operations_total", {"channel": "policy", "kind": "all_reduce", "outcome": "deadline_exceeded"}, 1),
        ("operations_total", {"channel": "policy", "kind": "barrier", "outcome": "ok"}, 0),
        ("operation_duration_seconds_sum", {"channel": "policy", "kind": "all_reduce"}, 10.0),
        ("restarts_total", {"group": "rollout", "reason": "load_timeout"}, 0),
        ("sync_total", {"channel": "policy", "outcome": "peers_lost"}, 1),
        ("sync_bytes_total", {"channel": "policy"}, 210),
        ("sync_retries_total", {"channel": "policy", "reason": "lost"}, 1),
        ("sync_phase_seconds_count", {"channel": "policy", "phase": "transfer"}, 2),
        ("sync_phase_seconds_sum", {"channel": "policy", "phase": "total"}, 0.6),
        ("sync_phase_seconds_count", {"channel": "policy", "phase": "map"}, 0),
        ("failed_loads_total", {"channel": "policy", "outcome": "refused"}, 2),
        ("failed_loads_total", {"channel": "policy", "outcome": "failed"}, 0),
        ("sidecar_replacements_total", {"reason": "died"}, 4),
        ("refused_total", {"reason": "token"}, 3),
        ("refused_total", {"reason": "origin"}, 0),
        ("events_lost_total", {}, 5),
        ("log_lines_dropped_total", {"group": "rollout"}, 6),
        ("run_over", {}, 0),
        ("run_exit_code", {}, None),
        ("store_up", {}, 1),
        ("store_keys", {}, 11),
        ("nodes", {"state": "up"}, 1),
        ("nodes", {"state": "lost"}, 0),
        ("node_up", {"node": "gpu2"}, 1),
        ("node_up", {"node": "gpu3"}, 0),
        ("node_up", {"node": "gpu4"}, 0),
        ("node_gpus", {"node": "gpu2"}, 8),
        ("node_gpus_free", {"node": "gpu2"}, 6),
        ("node_replicas", {"node": "gpu2"}, 2),
        ("node_replicas", {"node": "gpu3"}, 0),
        ("node_heard_age_seconds", {"node": "gpu3"}, 4.5),
        ("event_loop_lag_seconds", {}, 0.002),
        ("config_last_reload_successful", {}, 0),
    ],
)
def test_a_value(name: str, labels: dict[str, str], expected: float | None) -> None:
    assert value(fed(), name, **labels) == expected


def test_the_series_of_a_removed_replica_or_node_are_gone() -> None:
    now = a_status()
    metrics = Metrics(lambda: now)
    assert value(metrics, "replica_up", group="rollout", replica="1") == 0
    now = a_status(rollouts=1, nodes=NODES[:1])
    assert not [labels for _, labels in samples(metrics) if ("replica", "1") in labels]
    assert {one for _, labels in samples(metrics) for one in labels if one[0] == "node"} == {("node", "gpu2")}


def test_two_runs_in_one_process_share_nothing_with_each_other_or_the_global_registry() -> None:
    first, second = fed(), metrics_of(Tally())
    assert value(first, "sync_phase_seconds_count", channel="policy", phase="pack") == 2
    assert value(second, "sync_phase_seconds_count", channel="policy", phase="pack") == 0
    assert "replicas_" not in prometheus_client.generate_latest().decode()

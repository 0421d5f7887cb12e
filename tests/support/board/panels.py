"""What the board shows: its rows, in the order in which an operator asks.

Is all well, and what is not; do new weights come; who serves old ones; where does the
time of a sync go; what goes over the network; who was restarted, and how often may it
happen again; which machines are there; do collectives work; is the supervisor itself
well. Each query is asked of a real run by a test.
"""

from __future__ import annotations

from typing import Any

from tests.support.board.shapes import (
    AMBER,
    BLUE,
    GREEN,
    RED,
    Panel,
    Query,
    bar_gauge,
    bars,
    lanes,
    lines,
    stat,
    table,
    variable,
)
from tests.support.board.shapes import board as made

__all__ = ["board"]

RUN = 'run="$run"'
GROUP = f'{RUN}, group=~"$group"'
CHANNEL = f'{RUN}, channel=~"$channel"'
BOTH = f'{GROUP}, channel=~"$channel"'
SPAN = "[$__rate_interval]"

_LIVE = f"last_over_time(replicas_run_over{{{RUN}}}[$__range])"


def _mean(name: str, labels: str, by: str) -> str:
    """Of a histogram, by these labels; nothing where nothing was observed."""
    sums = (f"sum by ({by}) (rate({name}_{end}{{{labels}}}{SPAN}))" for end in ("sum", "count"))
    return f"{' / '.join(sums)} >= 0"


def _quantile(name: str, labels: str, by: str) -> str:
    return f"histogram_quantile(0.95, sum by ({by}, le) (rate({name}_bucket{{{labels}}}{SPAN}))) >= 0"


def _now() -> list[Panel]:
    return [
        stat(
            "Run",
            "Whether its supervisor answers. After a kill -9 it does not; after the end of the run it is over. "
            "Alert: ReplicasSupervisorDown.",
            Query(f"max({_LIVE} == 1 or replicas_run_over{{{RUN}}} or {_LIVE} + 2)", "run"),
            words={0: ("running", GREEN), 1: ("over", BLUE), 2: ("no answer", RED)},
            none="never seen",
        ),
        stat(
            "Exit code",
            "Of a run that is over: 0 well, 1 a group failed, 4 processes were killed, 75 preempted. "
            "Alert: ReplicasRunFailed.",
            Query(f"last_over_time(replicas_run_exit_code{{{RUN}}}[$__range])", "exit code"),
            none="not over",
        ),
        stat(
            "Groups ready",
            "A group is ready when as many of its replicas are ready or done as it needs (min_ready).",
            Query(f"min(replicas_group_ready{{{GROUP}}})", "groups"),
            words={0: ("not all", RED), 1: ("all", GREEN)},
        ),
        stat(
            "Replicas",
            "Ready now, of all.",
            Query(f"sum(replicas_replica_up{{{GROUP}}})", "ready"),
            Query(f"count(replicas_replica_up{{{GROUP}}})", "of"),
        ),
        stat(
            "Newest version",
            "The number of the newest committed version.",
            Query(f"max by (channel) (replicas_committed_version{{{CHANNEL}}} > 0)", "{{channel}}"),
        ),
        stat(
            "Its step",
            'meta["step"] of the newest committed version.',
            Query(f"max by (channel) (replicas_committed_step{{{CHANNEL}}})", "{{channel}}"),
        ),
        stat(
            "Its age",
            "Time since the newest commit. Alert: ReplicasSyncsStopped.",
            Query(f"time() - max by (channel) (replicas_last_commit_timestamp_seconds{{{CHANNEL}}})", "{{channel}}"),
            unit="s",
            decimals=0,
        ),
        stat(
            "Its size",
            "Bytes of the newest committed version.",
            Query(f"max by (channel) (replicas_version_bytes{{{CHANNEL}}} > 0)", "{{channel}}"),
            unit="bytes",
        ),
        table(
            "Alerts that fire",
            "Of services/supervisor/alerts.yml. docs/alerts has a page for each.",
            Query(f'ALERTS{{alertstate="firing", {RUN}}}'),
            units={},
        )._replace(height=5),
    ]


def _weights() -> list[Panel]:
    return [
        lines(
            "Steps",
            'meta["step"] of the newest version, and what programs report by progress(). '
            "A fall: the trainer began without its checkpoint. Alert: ReplicasStepFell.",
            Query(f"replicas_committed_step{{{CHANNEL}}}", "committed on {{channel}}"),
            Query(f"replicas_replica_step{{{GROUP}}}", "{{group}}/{{replica}}"),
        ),
        lines(
            "Age of the newest commit",
            "A saw: it falls to 0 with each commit, and its teeth are as high as a step of the trainer takes. "
            "Alert: ReplicasSyncsStopped.",
            Query(f"time() - replicas_last_commit_timestamp_seconds{{{CHANNEL}}}", "{{channel}}"),
            unit="s",
        ),
        lines(
            "Size of a version",
            "Bytes of the newest committed version.",
            Query(f"replicas_version_bytes{{{CHANNEL}}} > 0", "{{channel}}"),
            unit="bytes",
        ),
        lines(
            "Behind, in versions",
            "Committed versions that a replica has not loaded.",
            Query(f"replicas_version_lag{{{BOTH}}}", "{{group}}/{{replica}} {{channel}}"),
        ),
        lines(
            "Behind, in seconds",
            "For how long a newer version than the loaded one has been committed. Alert: ReplicasWeightsStale.",
            Query(f"replicas_version_lag_seconds{{{BOTH}}}", "{{group}}/{{replica}} {{channel}}"),
            unit="s",
            limit=600,
        ),
        lines(
            "Archive behind, in versions",
            "Committed versions that the archive of a channel lacks.",
            Query(f"replicas_archive_lag_versions{{{BOTH}}}", "{{group}}/{{replica}} {{channel}}"),
        ),
        lines(
            "Archive behind, in seconds",
            "For how long a newer version than the archived one has been committed. Alert: ReplicasArchiveBehind.",
            Query(f"replicas_archive_lag_seconds{{{BOTH}}}", "{{group}}/{{replica}} {{channel}}"),
            unit="s",
            limit=600,
        ),
        lines(
            "Versions served at once",
            "Different versions that ready replicas serve; 1: all the same. With adopt_together more than 1 is a "
            "fault. Alert: ReplicasVersionsMixed.",
            Query(f"replicas_served_versions{{{CHANNEL}}} > 0", "{{channel}}"),
            Query(f"replicas_adopts_together{{{CHANNEL}}} > 0", "{{channel}} loads together"),
        ),
        lines(
            "Version by replica",
            "The version that each replica has loaded, beside the newest.",
            Query(f"replicas_weight_version{{{BOTH}}}", "{{group}}/{{replica}} {{channel}}"),
            Query(f"replicas_committed_version{{{CHANNEL}}} > 0", "committed on {{channel}}"),
            Query(f"replicas_label_version{{{CHANNEL}}} > 0", "{{label}} of {{channel}}"),
            width=12,
        ),
        lines(
            "Members of the channels",
            "live take part; joining and behind are brought the newest version.",
            Query(f"sum by (channel, state) (replicas_channel_members{{{CHANNEL}}}) > 0", "{{channel}} {{state}}"),
            Query(f"changes(replicas_channel_epoch{{{CHANNEL}}}[5m])", "{{channel}} joins and losses in 5 min"),
            width=12,
        ),
    ]


def _syncs() -> list[Panel]:
    return [
        bars(
            "Decisions about versions",
            "Promoted, rejected, rolled back, kept, named, scored.",
            Query(
                f"sum by (decision) (increase(replicas_version_decisions_total{{{CHANNEL}}}{SPAN})) > 0", "{{decision}}"
            ),
            width=12,
        ),
        lines(
            "Scores of versions",
            "The mean of each score of the versions with labels.",
            Query(f"replicas_version_score{{{CHANNEL}}}", "{{score}} of {{label}}"),
            width=12,
        ),
        bars(
            "Publishes by outcome",
            "committed, or the error that ended them. Alerts: ReplicasSyncsFailing, ReplicasSyncsStopped.",
            Query(f"sum by (outcome) (increase(replicas_sync_total{{{CHANNEL}}}{SPAN})) > 0", "{{outcome}}"),
        ),
        lines(
            "Where a sync's time goes",
            'Mean of each phase. "wait" is for a slot that nobody reads any more.',
            Query(_mean("replicas_sync_phase_seconds", f'{CHANNEL}, phase!="total"', "phase"), "{{phase}}"),
            unit="s",
            stacked=True,
        ),
        lines(
            "Time of a sync, 95th percentile",
            "Alert: ReplicasSyncSlow.",
            Query(_quantile("replicas_sync_duration_seconds", CHANNEL, "channel"), "{{channel}}"),
            unit="s",
            limit=30,
        ),
        lines(
            "Load and hold time",
            "How long replicas have an update open, from receive to report: mean and 95th percentile by group.",
            Query(_mean("replicas_load_duration_seconds", BOTH, "channel, group"), "{{group}} {{channel}} mean"),
            Query(_quantile("replicas_load_duration_seconds", BOTH, "channel, group"), "{{group}} {{channel}} 95 %"),
            unit="s",
        ),
        lines(
            "Who keeps an update open",
            "The ten longest. An open update keeps a slot, and a publish waits when all are in use. "
            "Alert: ReplicasUpdateOpen.",
            Query(f"topk(10, replicas_update_open_seconds{{{BOTH}}})", "{{group}}/{{replica}} {{channel}}"),
            unit="s",
            limit=300,
        ),
        lines(
            "Slots in use",
            "Slots that hold a version, by replica, of those that each member of the channel has.",
            Query(f"replicas_slots_in_use{{{BOTH}}}", "{{group}}/{{replica}} {{channel}}"),
            Query(f"max by (channel) (replicas_slots{{{CHANNEL}}} > 0)", "slots of {{channel}}"),
        ),
        bars(
            "Trouble on the way",
            "Transfers made again, loads that failed, blocks that were not the published ones, and sidecars that "
            "were replaced. Alert: ReplicasSidecarsReplaced.",
            Query(
                f"sum by (reason) (increase(replicas_sync_retries_total{{{CHANNEL}}}{SPAN})) > 0", "retry: {{reason}}"
            ),
            Query(
                f"sum by (outcome) (increase(replicas_failed_loads_total{{{CHANNEL}}}{SPAN})) > 0", "load: {{outcome}}"
            ),
            Query(f"sum(increase(replicas_wrong_bytes_total{{{CHANNEL}}}{SPAN})) > 0", "wrong bytes"),
            Query(
                f"sum by (reason) (increase(replicas_sidecar_replacements_total{{{RUN}}}{SPAN})) > 0",
                "sidecar: {{reason}}",
            ),
            width=24,
        ),
    ]


def _bytes() -> list[Panel]:
    received = f"sum by (run, group, replica) (rate(replicas_received_bytes_total{{{BOTH}}}{SPAN}))"
    info = f"replicas_replica_node_info{{{GROUP}}}"
    nodes = f"count by (run, group, replica) ({info})"
    return [
        lines(
            "Received, by machine",
            "Bytes of weights that were sent to the replicas of each node; what is mapped on one host does not move. "
            "A replica on several nodes counts in equal parts.",
            Query(
                f"sum by (node) ({info} * on (run, group, replica) group_left () ({received} / {nodes}))", "{{node}}"
            ),
            unit="Bps",
        ),
        lines(
            "Received, by replica",
            "Bytes of weights that were sent to each replica.",
            Query(
                f"sum by (group, replica) (rate(replicas_received_bytes_total{{{BOTH}}}{SPAN}))",
                "{{group}}/{{replica}}",
            ),
            unit="Bps",
        ),
        lines(
            "Sent, by channel",
            "Bytes of weights that were sent to members, also to latecomers.",
            Query(f"rate(replicas_sync_bytes_total{{{CHANNEL}}}{SPAN})", "{{channel}}"),
            unit="Bps",
        ),
    ]


def _replicas() -> list[Panel]:
    by = "by (group, replica)"
    return [
        lanes(
            "Replicas over time",
            "A gap: it was not there yet, or no longer.",
            Query(f"replicas_replica_up{{{GROUP}}}", "{{group}}/{{replica}}"),
            words={1: ("ready", GREEN), 0: ("not ready", AMBER)},
        ),
        table(
            "Replicas now",
            "Restarts are those of this run, for any reason.",
            Query(f"max {by} (replicas_replica_up{{{GROUP}}})", "ready"),
            Query(f"max {by} (replicas_replica_step{{{GROUP}}})", "step"),
            Query(f"max {by} (replicas_replica_restarts_total{{{GROUP}}})", "restarts"),
            Query(f"max {by} (replicas_heartbeat_age_seconds{{{GROUP}}})", "heartbeat"),
            Query(f"count {by} (replicas_replica_node_info{{{GROUP}}})", "nodes"),
            units={"heartbeat": "s"},
        ),
        bars(
            "Restarts by replica",
            "Alerts: ReplicasRestartBudgetLow, ReplicasNoProgress.",
            Query(f"increase(replicas_replica_restarts_total{{{GROUP}}}{SPAN}) > 0", "{{group}}/{{replica}}"),
            width=12,
        ),
        bars(
            "Restarts by reason",
            "Why they were made: docs/reference/events.md has the reasons.",
            Query(
                f"sum by (group, reason) (increase(replicas_restarts_total{{{GROUP}}}{SPAN})) > 0",
                "{{group}} {{reason}}",
            ),
            width=12,
        ),
        bar_gauge(
            "Restart budget that is left",
            "When it is spent no replica of the group is started again: on_failure says what ends. "
            "Alert: ReplicasRestartBudgetLow.",
            Query(f"min by (group) (replicas_restart_budget_remaining_ratio{{{GROUP}}})", "{{group}}"),
            low=((None, RED), (0.41, GREEN)),
        ),
        bar_gauge(
            "Ends without progress that are left",
            "Of restart.no_progress_cycles. Alert: ReplicasNoProgress.",
            Query(f"min by (group) (replicas_no_progress_remaining_ratio{{{GROUP}}})", "{{group}}"),
            low=((None, RED), (0.5, GREEN)),
        ),
        lines(
            "Heartbeats",
            "Seconds since the quietest rank of each replica was heard. Alert: ReplicasHeartbeatLate.",
            Query(f"replicas_heartbeat_age_seconds{{{GROUP}}}", "{{group}}/{{replica}}"),
            unit="s",
            limit=15,
        ),
        lines(
            "Replicas by state",
            "Alerts: ReplicasGroupFailed, ReplicasNotReady, ReplicasDrained.",
            Query(f"sum by (state) (replicas_group_replicas{{{GROUP}}}) > 0", "{{state}}"),
            stacked=True,
        ),
        lines(
            "Start and recovery",
            "From the start of a replica, and from the loss of a ready one, to readiness: means of five minutes.",
            Query(_mean("replicas_start_duration_seconds", GROUP, "group").replace(SPAN, "[5m]"), "{{group}} start"),
            Query(
                _mean("replicas_recovery_duration_seconds", GROUP, "group").replace(SPAN, "[5m]"), "{{group}} recovery"
            ),
            unit="s",
        ),
    ]


def _nodes() -> list[Panel]:
    return [
        table(
            "Nodes now",
            "Alert: ReplicasNodeLost.",
            Query(f"max by (node) (replicas_node_up{{{RUN}}})", "up"),
            Query(f"max by (node) (replicas_node_replicas{{{RUN}}})", "replicas"),
            Query(f"max by (node) (replicas_node_gpus{{{RUN}}})", "GPUs"),
            Query(f"max by (node) (replicas_node_gpus_free{{{RUN}}})", "free GPUs"),
            Query(f"max by (node) (replicas_node_heard_age_seconds{{{RUN}}})", "last heard"),
            units={"last heard": "s"},
            width=16,
        ),
        lines(
            "Nodes by state",
            "draining: no new replicas; away: its agent is not heard; lost: its lease is over.",
            Query(f"sum by (state) (replicas_nodes{{{RUN}}}) > 0", "{{state}}"),
            width=8,
            stacked=True,
        ),
    ]


def _collectives() -> list[Panel]:
    return [
        bars(
            "Collectives by outcome",
            "ok, or the error that ended them. Alert: ReplicasOperationsFailing.",
            Query(
                f"sum by (channel, kind, outcome) (increase(replicas_operations_total{{{CHANNEL}}}{SPAN})) > 0",
                "{{channel}} {{kind}} {{outcome}}",
            ),
            width=12,
        ),
        lines(
            "Time of a collective, 95th percentile",
            "From the first post to the end.",
            Query(_quantile("replicas_operation_duration_seconds", CHANNEL, "channel, kind"), "{{channel}} {{kind}}"),
            unit="s",
            width=12,
        ),
    ]


def _supervisor() -> list[Panel]:
    return [
        lines(
            "Event loop",
            "How late the supervisor's event loop ran a timer. Alert: ReplicasEventLoopLate.",
            Query(f"replicas_event_loop_lag_seconds{{{RUN}}}", "lag"),
            unit="s",
            limit=0.5,
        ),
        lines(
            "Rendezvous store",
            "Alert: ReplicasStoreDown.",
            Query(f"replicas_store_up{{{RUN}}}", "up"),
            Query(f"replicas_store_keys{{{RUN}}}", "keys"),
        ),
        bars(
            "Refused at the control port",
            "token, tls, timeout, too_many: somebody should not be there; the others: a member is ill. "
            "Alert: ReplicasRefused.",
            Query(f"sum by (reason) (increase(replicas_refused_total{{{RUN}}}{SPAN})) > 0", "{{reason}}"),
        ),
        bars(
            "Records that are missing",
            "Events that could not be written to disk, and lines of output that are not in the logs.",
            Query(f"increase(replicas_events_lost_total{{{RUN}}}{SPAN}) > 0", "events"),
            Query(f"increase(replicas_log_lines_dropped_total{{{GROUP}}}{SPAN}) > 0", "lines of {{group}}"),
        ),
        stat(
            "Config",
            "Whether the config that was last read is in use.",
            Query(f"replicas_config_last_reload_successful{{{RUN}}}", "config"),
            words={1: ("in use", GREEN), 0: ("refused", RED)},
            width=4,
        ),
        table(
            "Releases",
            "Of this package, Python and torch in the supervisor.",
            Query(f"replicas_build_info{{{RUN}}}"),
            units={},
            width=12,
        )._replace(height=4),
    ]


def board() -> dict[str, Any]:
    """The board as Grafana reads it."""
    restarts = f"sum by (group, reason) (increase(replicas_restarts_total{{{GROUP}}}[30s])) > 0"
    return made(
        "replicas",
        "replicas",
        "One run of replicas: weights, syncs, restarts, nodes. Made from code: make board.",
        variables=[
            variable("run", "label_values(replicas_build_info, run)", "Run", several=False),
            variable("group", f"label_values(replicas_group_ready{{{RUN}}}, group)", "Group"),
            variable("channel", f"label_values(replicas_channel_epoch{{{RUN}}}, channel)", "Channel"),
        ],
        marks=[("restart", RED, Query(restarts, "{{group}}: {{reason}}"))],
        rows=[
            ("Now", _now()),
            ("Weights", _weights()),
            ("Syncs", _syncs()),
            ("Bytes", _bytes()),
            ("Replicas", _replicas()),
            ("Nodes", _nodes()),
            ("Collectives between peers", _collectives()),
            ("The supervisor", _supervisor()),
        ],
    )

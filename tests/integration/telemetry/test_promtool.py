"""Prometheus' own checker on the metrics, the alert rules with their tests, and the
scrape config."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.core.base.effects import SyncEnded
from replicas.core.lives.lifecycle import Lifecycle, ReplicaEvent
from replicas.status import ChannelStatus, GroupStatus, MemberStatus, ReplicaStatus, RunStatus, StoreStatus, SyncRecord
from replicas.telemetry.metrics import Metrics
from replicas.telemetry.tally import Tally
from tests.support.root import ROOT

SERVICE = ROOT / "services" / "supervisor"
PROMTOOL = shutil.which(
    "promtool", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: make .venv/bin/promtool")


def promtool(*arguments: str, stdin: bytes = b"") -> tuple[int, str]:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], input=stdin, capture_output=True, cwd=SERVICE, timeout=60, check=False
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def a_status() -> RunStatus:
    replica = ReplicaStatus(
        name="rollout/0",
        group="rollout",
        replica=0,
        state="ready",
        generation=1,
        heartbeat_age_s=0.5,
        versions={"policy": 7},
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
            GroupStatus(name="rollout", launcher="torchrun", world_size=1, replicas=(replica,), restarts={"signal": 1}),
        ),
        channels=(
            ChannelStatus(
                name="policy",
                epoch=3,
                committed_version=7,
                digest="ab",
                members=(MemberStatus(name="rollout/0/0", state="live", role="target"),),
                syncs={"committed": 7},
                retries={"peers_lost": 1},
                bytes_total=700,
            ),
        ),
        sidecar_replacements={"died": 1},
        refused={"token": 3},
    )


def test_metrics_pass_promtool() -> None:
    tally = Tally()
    metrics = Metrics(a_status, lambda: tally)
    life = Lifecycle("rollout", 0, now=0.0)
    for now, event in enumerate((ReplicaEvent.START, ReplicaEvent.READY)):
        tally.count(life.apply(event, now=float(now)))
    tally.count(SyncEnded("policy", SyncRecord(version=1, outcome="committed", seconds=0.2, nbytes=1)))
    assert promtool("check", "metrics", stdin=metrics.render()[0]) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml"), ("check", "config", "prometheus.yml")],
)
def test_the_deployed_files_pass_promtool(arguments: tuple[str, ...]) -> None:
    code, output = promtool(*arguments)
    assert code == 0, output

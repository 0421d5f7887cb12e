"""Every query of the Grafana board and every alert rule, asked of a real Prometheus
that scrapes a real run; and what both say when a run ends, and when it is killed."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import board
from tests.support.board import queries
from tests.support.board.prometheus import PROMETHEUS, Prometheus, beside
from tests.support.programs import SLEEPS, group
from tests.support.runs import Run, running
from tests.support.waits import eventually

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: make .venv/bin/prometheus")

TRAINS = """
import itertools, time, torch, replicas
with replicas.join("policy") as channel:
    for step in itertools.count(1):
        channel.publish({"w": torch.full((1000,), step)}, meta={"step": step}).wait(60)
        channel.progress(step)
        channel.versions.score("current", {"reward": step}).wait(60)
        time.sleep(0.2)
"""

ROLLS = """
import os, pathlib, replicas
with replicas.join("policy") as channel:
    for loaded in range(10**9):
        with channel.receive().wait() as update:
            list(update)
        channel.progress(update.version)
        if loaded == 3 and os.environ["REPLICA_ID"] == "0" and not pathlib.Path("died").exists():
            pathlib.Path("died").touch()
            os._exit(3)
"""

REDUCES = """
import itertools, time, torch, replicas
with replicas.join("grads") as channel:
    for step in itertools.count(1):
        channel.all_reduce(torch.ones(4), op="sum", step=step).wait(60)
        channel.progress(step)
        time.sleep(0.2)
"""

CHANNELS = """
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
[channels.grads]
peers = ["peer"]
"""

BOARD = json.loads(board.text())
FILL = {"__rate_interval": "1m", "__range": "1h", "run": "test", "group": ".*", "channel": ".*"}
AFTERWARDS = {"Exit code"}
"""Panels that have something to show when the run is over."""


def asked(panel: dict[str, Any], **values: str) -> list[str]:
    return [queries.filled(target["expr"], FILL | values) for target in panel.get("targets", ())]


def panel(title: str) -> dict[str, Any]:
    (found,) = (one for one in BOARD["panels"] if one["title"] == title)
    return found  # type: ignore[no-any-return] # JSON


def to_answer() -> Iterator[tuple[str, str]]:
    """Title and query of what has something to show of a run that goes on; without the
    limit above which some is shown."""
    for one in BOARD["panels"]:
        if one["title"] not in AFTERWARDS:
            yield from ((one["title"], queries.unfiltered(expr)) for expr in asked(one) if "ALERTS" not in expr)


def scraped(run: Run) -> dict[str, set[str]]:
    """Labels of each series that the run itself shows, by name."""
    with urllib.request.urlopen(f"http://{run.endpoint()}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)\{(.*)\} \S+$", text, re.M):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def check_scrape(run: Run) -> None:
    """The reference promises what a run shows, and the other way round."""
    promised = {
        name: set(labels - queries.TARGET)
        for name, labels in queries.reference().items()
        if name not in queries.OF_PROMETHEUS
    }
    found = scraped(run)
    assert promised.keys() - found.keys() == {"replicas_run_exit_code"}, "which there is when it is over"
    assert found == {name: labels for name, labels in promised.items() if name in found}


@pytest.mark.timeout(300)
def test_board_and_alerts_beside_a_real_run(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "prometheus").mkdir()
    again = 'restart = { initial_delay = "100ms" }'
    text = group("trainer", TRAINS) + group("rollout", ROLLS, f"replicas = 2\n{again}")
    text += group("peer", REDUCES, "replicas = 2") + CHANNELS
    with running(tmp_path, text) as run, running(tmp_path / "other", group("a", SLEEPS), name="killed") as other:
        targets = {"test": run.endpoint(), "killed": other.endpoint()}
        with beside(tmp_path / "prometheus", targets) as prometheus:
            check_board(run, prometheus)
            check_ends(run, other, prometheus)


def check_board(run: Run, prometheus: Prometheus) -> None:
    eventually(lambda: (run.folder / "died").exists(), "the end of a rollout", timeout_s=90)
    for title, expr in to_answer():
        eventually(partial(prometheus.ask, expr), f"an answer for {title}: {expr}", timeout_s=90)
    (mark,) = BOARD["annotations"]["list"]
    expr = queries.filled(mark["target"]["expr"], FILL)
    eventually(lambda: prometheus.ask(expr.replace("[30s]", "[5m]")), "the mark of the restart")
    ((labels, restarts),) = prometheus.ask('sum by (group, reason) (replicas_restarts_total{run="test"}) > 0')
    assert (labels, restarts) == ({"group": "rollout", "reason": "exit"}, 1)
    check_scrape(run)
    rules = prometheus.rules()
    eventually(lambda: all(one["health"] == "ok" for one in prometheus.rules().values()), "rules that were evaluated")
    assert [one["lastError"] for one in rules.values() if one.get("lastError")] == []
    names = {one for each in BOARD["panels"] for one in re.findall(r"Replicas[A-Z]\w+", each.get("description", ""))}
    assert names == set(rules)


def evaluated(prometheus: Prometheus) -> datetime:
    return datetime.fromisoformat(prometheus.rules()["ReplicasSupervisorDown"]["lastEvaluation"])


def scrapes(prometheus: Prometheus) -> float:
    ((_, count),) = prometheus.ask('count_over_time(up{run="test"}[1h])')
    return count


def check_ends(run: Run, other: Run, prometheus: Prometheus) -> None:
    other.kill()
    (state,) = asked(panel("Run"), run="killed")
    eventually(lambda: prometheus.ask(state) == [({}, 2)], "no answer of a killed run", timeout_s=30)
    pending = 'ALERTS{alertname="ReplicasSupervisorDown"}'
    eventually(lambda: prometheus.ask(pending), "an alert of it", timeout_s=30)
    seen = scrapes(prometheus)  # this test's own look came in between, and from the same address
    eventually(lambda: scrapes(prometheus) >= seen + 2, "two scrapes at the usual interval", timeout_s=60)
    run.signal(signal.SIGTERM)
    assert run.wait(timeout_s=60) == 0
    (state,) = asked(panel("Run"))
    eventually(lambda: prometheus.ask('up{run="test"} == 0'), "the end of the port", timeout_s=30)
    assert prometheus.ask(state) == [({}, 1)], "over"
    (code,) = asked(panel("Exit code"))
    ((_, exit_code),) = prometheus.ask(code)
    assert exit_code == 0
    down = datetime.now(UTC)
    eventually(lambda: evaluated(prometheus) > down, "the rules afterwards")
    assert {labels["run"] for labels, _ in prometheus.ask(pending)} == {"killed"}
    run.assert_nothing_left()

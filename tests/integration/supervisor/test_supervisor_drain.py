"""A drain lets a replica finish its sync, and everything answers meanwhile; a group
that restarts as a whole."""

from __future__ import annotations

import signal
import statistics
import time
import urllib.request
from pathlib import Path

from replicas.status import ReplicaStatus
from tests.support.processes import kill
from tests.support.programs import SLEEPS, group
from tests.support.runs import Run, running
from tests.support.waits import eventually

PUBLISHES_ONCE = """
import time, torch, replicas
with replicas.join("policy") as channel:
    channel.publish({"a": torch.ones(8)}).wait()
    time.sleep(600)
"""

LOADS_SLOWLY = """
import os, time, replicas
with replicas.join("policy") as channel:
    with channel.receive().wait() as update:
        print("loading", flush=True)
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.02)
    print("loaded", update.version, flush=True)
    time.sleep(600)
"""


def replica(run: Run, name: str) -> ReplicaStatus:
    return next(one for found in run.status().groups for one in found.replicas if one.name == name)


def test_a_drain_waits_for_a_sync_and_everything_answers_meanwhile(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    more = f'drain_timeout = "60s"\ndepends_on = ["trainer"]\nenv = {{ GATE = "{gate}" }}'
    text = group("trainer", PUBLISHES_ONCE) + group("rollout", LOADS_SLOWLY, more)
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
    with running(tmp_path, text) as run:
        log = run.log("rollout/0")
        eventually(lambda: log.exists() and "loading" in log.read_text(), "a load", timeout_s=90)
        run.signal(signal.SIGTERM)
        eventually(lambda: replica(run, "rollout/0").state == "draining", "the drain")
        took: list[float] = []
        for _ in range(20):
            for page in ("status", "metrics"):
                began = time.monotonic()
                with urllib.request.urlopen(f"http://{run.endpoint()}/{page}", timeout=10) as answer:
                    assert answer.read()
                took.append(time.monotonic() - began)
        assert statistics.median(took) < 0.1
        assert replica(run, "rollout/0").reason == "the run ends; present work: it loads version 1 of policy"
        assert replica(run, "trainer/0").state == "ready", "it ends after those that depend on it"
        gate.touch()
        assert run.wait(timeout_s=60) == 0
        assert log.read_text().splitlines()[-1] == "loaded 1"
        run.assert_nothing_left()


def test_a_group_restarts_as_a_whole(tmp_path: Path) -> None:
    rules = 'replicas = 2\nrestart = { strategy = "group", initial_delay = "100ms", max_restarts = 1 }'
    with running(tmp_path, group("a", SLEEPS, rules) + group("b", SLEEPS)) as run:
        eventually(lambda: run.state_dir.joinpath("endpoint.json").exists() and run.status().ready, "3 ready replicas")
        before = {name: replica(run, name).pid for name in ("a/0", "a/1", "b/0")}
        victim = before["a/1"]
        assert victim is not None
        kill(victim)
        eventually(lambda: {replica(run, name).generation for name in ("a/0", "a/1")} == {2}, "generation 2 of both")
        eventually(lambda: run.status().ready, "all are ready again")
        first, second = run.status().groups
        assert first.restarts == {"signal": 1, "group": 1}
        assert first.restart_budget_remaining_ratio == 0.0, "one incident"
        assert replica(run, "b/0").pid == before["b/0"]
        assert second.restarts == {}
        run.end()

"""Whole runs on a real Ray of three nodes: a node that dies and one that is added, an
agent that is killed, a group that grows, and ends of the driver.

Covers: integrations/ray_agent.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.control.client import Client
from replicas.linux.processes import command_line
from replicas.status import RunStatus
from tests.engines.programs.cluster_programs import ROLLOUT, TRAINER, commits
from tests.engines.programs.ray_cluster import Raylets, raylets
from tests.support.runs import MARK, ROOT
from tests.support.waits import eventually

RUN = f"""
schema_version = 1
[run]
name = "grpo"
stop_when = ["trainer"]
[groups.trainer]
launcher = "exec"
command = ["{sys.executable}", "trainer.py", "STEPS"]
[groups.rollout]
replicas = 2
launcher = "exec"
command = ["{sys.executable}", "rollout.py"]
placement = {{ spread = true }}
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
"""
FOR_EVER = 1_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(1, 1, 1) as cluster:
        yield cluster


class Driver:
    """``replicas ray`` in a folder of its own."""

    def __init__(self, cluster: Raylets, folder: Path, steps: int) -> None:
        self.cluster, self.folder = cluster, folder
        self.state_dir = folder / ".replicas/grpo"
        (folder / "trainer.py").write_text(TRAINER)
        (folder / "rollout.py").write_text(ROLLOUT)
        (folder / "run.toml").write_text(RUN.replace("STEPS", str(steps)))
        self.out = folder / "out"
        command = (sys.executable, "-m", "replicas", "ray", "run.toml", "--address", cluster.address)
        environ = {**os.environ, MARK: cluster.mark, "PYTHONPATH": str(ROOT)}
        with self.out.open("w") as out:
            self.process = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=out)

    def status(self) -> RunStatus:
        where = json.loads((self.state_dir / "endpoint.json").read_text())
        return Client(where["endpoint"], token=(self.state_dir / "token").read_text().strip()).status()

    def wait_for_commits(self, least: int, *, of: int = 0, timeout_s: float = 120.0) -> None:
        def enough() -> bool:
            assert self.process.poll() is None, self.out.read_text()
            return len([version for version, _, members in commits(self.folder) if len(members) >= of]) >= least

        eventually(enough, f"{least} commits of {of} targets", timeout_s=timeout_s)

    def scale(self, rollouts: int) -> None:
        self.order("scale", "rollout", f"{rollouts}", "--no-wait")

    def order(self, *words: str) -> None:
        command = (sys.executable, "-m", "replicas", *words, "-c", "run.toml")
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=self.folder, env=environ, check=True, timeout=60)

    def node_of(self, replica: str) -> str:
        """The Ray node, in short, on which a replica is."""
        (node,) = [one.name for one in self.status().nodes if replica in one.replicas and one.state == "up"]
        return node.rpartition("-")[2]


@contextlib.contextmanager
def driver(cluster: Raylets, folder: Path, steps: int = FOR_EVER) -> Iterator[Driver]:
    running = Driver(cluster, folder, steps)
    try:
        yield running
    except BaseException:
        print(running.out.read_text()[-6000:])
        raise
    finally:
        running.process.terminate()
        try:
            running.process.wait(60)
        finally:
            running.process.kill()
            running.process.wait()
        cluster.wait_until_free(timeout_s=40)


def test_a_run_on_ray_ends_its_driver(cluster: Raylets, tmp_path: Path) -> None:
    with driver(cluster, tmp_path, steps=20) as run:
        assert run.process.wait(120) == 0, run.out.read_text()
        assert [version for version, _, _ in commits(tmp_path)] == [*range(1, 21)]
        nodes = {path.parts[-6] for path in tmp_path.rglob("rank-0.log")}
        assert len({node.rpartition("-")[2] for node in nodes}) == 3, f"one bundle fits on each node: {nodes}"


def test_a_node_that_dies_and_one_that_is_added(cluster: Raylets, tmp_path: Path) -> None:
    with driver(cluster, tmp_path) as run:
        run.wait_for_commits(3, of=2)
        homes = {name: run.node_of(name) for name in ("trainer/0", "rollout/0", "rollout/1")}
        doomed, lost = next(
            (node, name)
            for node in cluster.cluster.worker_nodes
            for name, home in homes.items()
            if name != "trainer/0" and node.node_id.startswith(home)
        )
        cluster.cluster.remove_node(doomed, allow_graceful=False)
        before = len(commits(tmp_path))
        run.wait_for_commits(before + 10)
        cluster.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        eventually(lambda: len(commits(tmp_path)[-1][2]) == 2, "both rollouts", timeout_s=90)
        assert run.node_of(lost) not in homes.values()
        assert [version for version, _, _ in commits(tmp_path)] == [*range(1, len(commits(tmp_path)) + 1)]


def test_an_agent_that_is_killed_comes_back(cluster: Raylets, tmp_path: Path) -> None:
    with driver(cluster, tmp_path) as run:
        run.wait_for_commits(3, of=2)
        lines = {pid: command_line(pid, 4096) for pid in cluster.ours()}
        (agent,) = [pid for pid, line in lines.items() if "ray_agent" in line and " rollout-0-" in line]
        os.kill(agent, signal.SIGKILL)
        before = len(commits(tmp_path))
        run.wait_for_commits(before + 10)
        eventually(lambda: len(commits(tmp_path)[-1][2]) == 2, "both rollouts", timeout_s=60)


def test_a_group_that_grows_gets_a_bundle(cluster: Raylets, tmp_path: Path) -> None:
    with driver(cluster, tmp_path) as run:
        run.wait_for_commits(3, of=2)
        added = cluster.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        run.scale(3)
        eventually(lambda: len(commits(tmp_path)[-1][2]) == 3, "three rollouts", timeout_s=90)
        assert run.node_of("rollout/2") == added.node_id[:8]
        run.scale(2)
        eventually(lambda: len([one for one in run.status().nodes if one.state == "up"]) == 3, "a bundle less")


def test_a_drained_node_is_replaced_by_another_bundle(cluster: Raylets, tmp_path: Path) -> None:
    with driver(cluster, tmp_path) as run:
        run.wait_for_commits(3, of=2)
        cluster.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        (node,) = [one.name for one in run.status().nodes if "rollout/0" in one.replicas]
        run.order("drain", "--node", node)
        before = len(commits(tmp_path))
        run.wait_for_commits(before + 10)
        eventually(lambda: len(commits(tmp_path)[-1][2]) == 2, "both rollouts", timeout_s=60)
        assert node not in [one.name for one in run.status().nodes if one.state == "up"]


def test_a_reload_that_asks_for_other_bundles_gets_them(cluster: Raylets, tmp_path: Path) -> None:
    with driver(cluster, tmp_path) as run:
        run.wait_for_commits(3, of=2)
        added = cluster.cluster.add_node(num_cpus=2, object_store_memory=80 << 20, labels={"pool": "x"})
        config = tmp_path / "run.toml"
        config.write_text(config.read_text().replace("{ spread = true }", '{ labels = { pool = "x" } }'))
        run.order("reload")
        eventually(lambda: len(commits(tmp_path)[-1][2]) == 2, "both rollouts", timeout_s=90)
        assert {run.node_of("rollout/0"), run.node_of("rollout/1")} == {added.node_id[:8]}
        before = len(commits(tmp_path))
        run.wait_for_commits(before + 10, of=2)


def test_nothing_outlives_a_driver_that_is_killed(cluster: Raylets, tmp_path: Path) -> None:
    with driver(cluster, tmp_path) as run:
        run.wait_for_commits(3, of=2)
        assert any("trainer.py" in line for line in cluster.ours().values()), "ranks are seen"
        run.process.kill()
        began = time.monotonic()
        cluster.wait_until_free(timeout_s=40)
        print(f"nothing is left {time.monotonic() - began:.1f} s after kill -9 of the driver")

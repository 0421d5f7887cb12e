"""A whole run submitted to a real Ray of three nodes as a job, and its end by ``ray job
stop``. How soon it commits is measured by bench/bench_jobs.py, of parts that are
here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.programs.cluster_programs import ROLLOUT, TRAINER, commits
from tests.engines.programs.ray_cluster import Raylets, raylets
from tests.engines.test_ray_run import RUN
from tests.support.runs import MARK, ROOT
from tests.support.waits import eventually

OWN = """
import ray, sys, time
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

class Actor:
    def began(self):
        return time.time()

ray.init(configure_logging=False)
trainer, rollouts = (placement_group([{"CPU": 1.0}] * count, strategy="SPREAD") for count in (1, 2))
places = [(trainer, 0), (rollouts, 0), (rollouts, 1)]
actors = [ray.remote(Actor).options(num_cpus=1, scheduling_strategy=In(*place)).remote() for place in places]
print("began", max(ray.get([actor.began.remote() for actor in actors])), flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(1, 1, 1, include_dashboard=True, dashboard_port=0) as cluster:
        yield cluster


def write(folder: Path, steps: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "trainer.py").write_text(TRAINER)
    (folder / "rollout.py").write_text(ROLLOUT)
    (folder / "run.toml").write_text(RUN.replace("STEPS", str(steps)))


def job(cluster: Raylets, folder: Path, *words: str) -> str:
    """What ``ray job`` said."""
    order, *rest = words
    url = f"http://{cluster.cluster.head_node.webui_url}"
    command = (sys.executable, "-m", "ray.scripts.scripts", "job", order, f"--address={url}", *rest)
    environ = {**os.environ, MARK: cluster.mark, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environ, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def entry(folder: Path) -> tuple[str, ...]:
    return ("bash", "-c", f"cd {folder} && exec {sys.executable} -m replicas ray run.toml")


def alone(cluster: Raylets, folder: Path) -> float:
    """Time to the first commit of a supervisor alone."""
    write(folder, steps=3)
    config = folder / "run.toml"
    config.write_text("\n".join(line for line in config.read_text().splitlines() if "placement" not in line))
    began = time.time()
    command = (sys.executable, "-m", "replicas", "run", "run.toml")
    environ = {**os.environ, MARK: cluster.mark, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, timeout=300)
    return commits(folder)[0][1] - began


def rays_own(cluster: Raylets, folder: Path) -> float:
    """Time that Ray takes to start a job, its placement groups and an actor in each."""
    write(folder, steps=3)
    (folder / "own.py").write_text(OWN)
    began = time.time()
    said = job(cluster, folder, "submit", "--", sys.executable, str(folder / "own.py"))
    (shown,) = [line for line in said.splitlines() if line.startswith("began ")]
    return float(shown.split()[1]) - began


def submitted(cluster: Raylets, folder: Path) -> float:
    write(folder, steps=3)
    began = time.time()
    job(cluster, folder, "submit", "--", *entry(folder))
    return commits(folder)[0][1] - began


def test_a_job_that_is_stopped_leaves_nothing(cluster: Raylets, tmp_path: Path) -> None:
    write(tmp_path, steps=1_000_000)
    job(cluster, tmp_path, "submit", "--no-wait", "--submission-id=run", "--", *entry(tmp_path))
    eventually(lambda: len(commits(tmp_path)) >= 5, "five commits", timeout_s=90)
    assert "was stopped" in job(cluster, tmp_path, "stop", "run")
    cluster.wait_until_free()
    assert "over, exit code 0" in job(cluster, tmp_path, "logs", "run")

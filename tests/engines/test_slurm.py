"""Runs as jobs of a real Slurm with two nodes: commits, kills of an agent, preemption,
cancellation, and ``srun`` alone. How soon they commit is measured by
bench/bench_jobs.py, of parts that are here."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.programs.cluster_programs import ROLLOUT, TRAINER, commits
from tests.engines.programs.slurm_cluster import UNPACKED, Slurm, slurm, why_no_slurm
from tests.support.waits import eventually

RUN = f"""
schema_version = 1
[run]
name = "grpo"
stop_when = ["trainer"]
[slurm]
partition = "work"
nodes = 2
time = "10m"
[groups.trainer]
launcher = "exec"
command = ["{sys.executable}", "trainer.py", "STEPS"]
placement = {{ labels = {{ node = "n1" }} }}
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
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class Job:
    """A run in a folder of its own, submitted."""

    def __init__(self, cluster: Slurm, folder: Path, steps: int = FOR_EVER, *options: str) -> None:
        self.cluster, self.folder = cluster, folder
        write(folder, steps)
        command = (sys.executable, "-m", "replicas", "slurm", "run.toml", "--submit", *options)
        self.number = cluster.run(*command, cwd=folder).strip()

    def commits(self) -> list[tuple[int, float, list[str]]]:
        return commits(self.folder)

    def wait_for_commits(self, least: int, *, of: int = 0, timeout_s: float = 90.0) -> None:
        """Until ``least`` versions are committed (by ``of`` members at least)."""

        def enough() -> bool:
            return len([version for version, _, members in self.commits() if len(members) >= of]) >= least

        try:
            eventually(enough, f"{least} commits of {of} targets", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.commits()[-3:]}; it said: {self.said()}") from None

    def said(self) -> str:
        found = list(self.folder.glob("slurm-*.out"))
        return found[0].read_text() if found else ""

    def run_again(self) -> None:
        """Have it run 2 s after it was put back into the queue, not two minutes.

        Slurm waits for the nodes to forget the job, which they were told to end: they
        refuse it, and it fails, if it starts in the same second.
        """
        eventually(lambda: self._state == "PENDING", "its place in the queue")
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+2")
        eventually(lambda: self._state not in ("PENDING", "CONFIGURING"), "the next start", timeout_s=60)
        assert self._state == "RUNNING", self.cluster.job(self.number)

    @property
    def _state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def cancel(self) -> None:
        self.cluster.run("scancel", self.number)

    def wait_until_nothing_is_left(self) -> None:
        eventually(lambda: not self.cluster.processes(), f"the end of {self.cluster.processes()}", timeout_s=30)
        assert not list(self.folder.glob(".replicas/grpo/slurm-*.join"))


def write(folder: Path, steps: int) -> None:
    (folder / "trainer.py").write_text(TRAINER)
    (folder / "rollout.py").write_text(ROLLOUT)
    (folder / "run.toml").write_text(RUN.replace("STEPS", str(steps)))


@contextlib.contextmanager
def submitted(cluster: Slurm, folder: Path, steps: int = FOR_EVER, *options: str) -> Iterator[Job]:
    """Cancelled at the end, whatever happened: then nothing is left of it."""
    job = Job(cluster, folder, steps, *options)
    try:
        yield job
    finally:
        job.cancel()
        job.wait_until_nothing_is_left()


def test_a_run_over_two_nodes_ends_its_job(cluster: Slurm, tmp_path: Path) -> None:
    with submitted(cluster, tmp_path, steps=20) as job:
        ended = cluster.wait_for(job.number, "COMPLETED", "FAILED", timeout_s=90)
        assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), job.said()
        assert [version for version, _, _ in job.commits()] == [*range(1, 21)]
        nodes = {path.parts[-6] for path in tmp_path.rglob("rollout/**/rank-0.log")}
        assert nodes == {"n1", "n2"}, "rollouts are spread"
        (out,) = tmp_path.glob("slurm-*.out")
        assert out.stat().st_mode & 0o777 == 0o600
        job.wait_until_nothing_is_left()


def test_an_agent_that_is_killed_comes_back(cluster: Slurm, tmp_path: Path) -> None:
    with submitted(cluster, tmp_path) as job:
        job.wait_for_commits(3, of=2)
        (_, agent) = sorted(cluster.pids("n2", "--here agent"))  # the task, and its agent
        os.kill(agent, signal.SIGKILL)
        before = len(job.commits())
        job.wait_for_commits(before + 10)
        eventually(lambda: "starting another" in job.said(), "the next agent")
        eventually(lambda: len(job.commits()[-1][2]) == 2, "both rollouts", timeout_s=60)
        assert [version for version, _, _ in job.commits()] == [*range(1, len(job.commits()) + 1)]


@pytest.mark.timeout(300)
def test_a_run_that_may_lose_nodes_goes_on_without_one(tmp_path: Path) -> None:
    """On a cluster of its own, which has lost a node at the end."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    (folder := tmp_path / "run").mkdir()
    (tmp_path / "slurm").mkdir()
    with slurm(tmp_path / "slurm") as cluster, submitted(cluster, folder, FOR_EVER, "--option=--no-kill") as job:
        job.wait_for_commits(3, of=2)
        cluster.switch_off("n2")
        state = ("sinfo", "--noheader", "--nodes=n2", "--partition=work", "--format=%T")
        eventually(lambda: "down" in cluster.run(*state), "what Slurm does when a node is down", timeout_s=60)
        before = len(job.commits())
        job.wait_for_commits(before + 20)
        eventually(lambda: len(job.commits()[-1][2]) == 2, f"both rollouts; {job.commits()[-3:]}", timeout_s=60)
        found = cluster.job(job.number)
        assert (found["JobState"], found["Restarts"]) == ("RUNNING", "0"), job.said()


@pytest.mark.parametrize("by", ["notice", "priority"])
def test_a_run_that_is_preempted_goes_on_when_its_job_runs_again(by: str, cluster: Slurm, tmp_path: Path) -> None:
    with submitted(cluster, tmp_path) as job:
        job.wait_for_commits(3, of=2)
        if by == "notice":
            cluster.run("scancel", "--batch", "--signal=TERM", job.number)
        else:
            wrap = ("--exclusive", "--nodes=2", "--partition=urgent", "--output=/dev/null", "--wrap=exit")
            cluster.run("sbatch", *wrap, cwd=tmp_path)
        eventually(lambda: "over, exit code 75" in job.said(), "the end of the drain", timeout_s=60)
        eventually(lambda: cluster.job(job.number)["Restarts"] == "1", "the requeue", timeout_s=60)
        before = len(job.commits())
        job.run_again()
        job.wait_for_commits(before + 3, of=2, timeout_s=200)
        versions = [version for version, _, _ in job.commits()]
        assert versions == sorted(set(versions)), "one may have committed when its trainer was ended"


def test_a_job_that_is_cancelled_does_not_come_back(cluster: Slurm, tmp_path: Path) -> None:
    with submitted(cluster, tmp_path) as job:
        job.wait_for_commits(3, of=2)
        job.cancel()
        job.wait_until_nothing_is_left()
        ended = cluster.wait_for(job.number, "CANCELLED")
        assert ended["Restarts"] == "0"
        assert "over, exit code 75" in job.said()


def test_srun_alone_runs_a_run(cluster: Slurm, tmp_path: Path) -> None:
    write(tmp_path, steps=10)
    part = (sys.executable, "-m", "replicas", "slurm", "run.toml", "--here", "all")
    cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *part, cwd=tmp_path, timeout_s=90)
    assert [version for version, _, _ in commits(tmp_path)] == [*range(1, 11)]
    eventually(lambda: not cluster.processes(), f"the end of {cluster.processes()}", timeout_s=30)


def first_of(folder: Path, began: float) -> float:
    return commits(folder)[0][1] - began


def alone(cluster: Slurm, folder: Path) -> float:
    """Time to the first commit of a supervisor alone."""
    write(folder, steps=3)
    config = folder / "run.toml"
    config.write_text("\n".join(line for line in config.read_text().splitlines() if "placement" not in line))
    began = time.time()
    cluster.run(sys.executable, "-m", "replicas", "run", "run.toml", cwd=folder)
    return first_of(folder, began)


def slurms_own(cluster: Slurm, folder: Path) -> float:
    """Time from the allocation of two nodes to a step on them."""
    wrap = ("--nodes=2", "--exclusive", f"--output={folder}/own", "--wrap=srun --ntasks-per-node=1 date +%s.%N")
    number = cluster.run("sbatch", "--parsable", *wrap, cwd=folder).strip()
    cluster.wait_for(number, "COMPLETED")
    began = max(float(line) for line in (folder / "own").read_text().split() if line[0].isdigit())
    return began - cluster.allocated_at(number)


def queued(cluster: Slurm, folder: Path) -> float:
    with submitted(cluster, folder) as job:
        job.wait_for_commits(1)
        return first_of(folder, cluster.allocated_at(job.number))


def test_the_script_is_clean(tmp_path: Path) -> None:
    checker = shutil.which("shellcheck") or str(UNPACKED / "usr/bin/shellcheck")
    if not Path(checker).exists():
        pytest.skip("needs shellcheck")
    write(tmp_path, 1)
    command = (sys.executable, "-m", "replicas", "slurm", str(tmp_path / "run.toml"))
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    done = subprocess.run([checker, "-"], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")

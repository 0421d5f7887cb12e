"""A job of a real Slurm that ends in the middle of a sync, and what it leaves to the
next one: prime-rl#2331 in docs/field.md."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.programs.slurm_cluster import Slurm, slurm, why_no_slurm
from tests.engines.test_slurm import submitted
from tests.support.runs import alive
from tests.support.waits import eventually


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def strangers() -> Iterator[tuple[int, Path]]:
    """A process and shared memory of somebody else's engine."""
    left = Path("/dev/shm") / f"vllm-{secrets.token_hex(4)}"
    left.write_bytes(b"stale")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "vllm", "torchrun"]) as process:
        try:
            yield process.pid, left
        finally:
            process.kill()
            left.unlink(missing_ok=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("end", ["scancel", "slurmstepd"])
def test_prime_rl_2331_a_job_that_ends_in_a_sync_leaves_nothing_to_the_next(
    cluster: Slurm, tmp_path: Path, strangers: tuple[int, Path], end: str
) -> None:
    """A run publishes all the time, so it ends in a sync. What Slurm loses track of
    (the step daemon of a node is killed) ends as well, and the next job commits."""
    process, left = strangers
    (first := tmp_path / "first").mkdir()
    (second := tmp_path / "second").mkdir()
    with submitted(cluster, first) as job:
        job.wait_for_commits(3, of=2)
        if end == "slurmstepd":
            steps = [pid for pid in cluster.machines[1].processes() if program_of(pid).startswith("slurmstepd")]
            assert steps
            for pid in steps:
                os.kill(pid, signal.SIGKILL)
        job.cancel()
        job.wait_until_nothing_is_left()
    nodes = ("sinfo", "--noheader", "--Node", "--partition=work", "--format=%T")
    eventually(
        lambda: cluster.run(*nodes).split() == ["idle"] * 2, f"two idle nodes: {cluster.run(*nodes)}", timeout_s=90
    )
    with submitted(cluster, second, 20) as job:
        job.wait_for_commits(20, timeout_s=150)
        cluster.wait_for(job.number, "COMPLETED", timeout_s=60)
    assert alive(process)
    assert left.read_bytes() == b"stale", "they are somebody else's"


def program_of(pid: int) -> str:
    """The file name of its first argument; Slurm's step daemons retitle themselves."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].rpartition(b"/")[2])
    except OSError:
        return ""

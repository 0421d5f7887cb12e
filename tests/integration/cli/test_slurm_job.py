"""The parts of a run in a Slurm job, as processes with a job's variables: what brings
an agent back, and what does not disturb the others. Needs no Slurm.

Covers: cli/slurm_job.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.cli import main as cli
from replicas.control.exit_codes import FAILED, SUPERVISED, UNAVAILABLE
from replicas.linux import private
from tests.support.programs import SLEEPS, group
from tests.support.runs import MARK, ROOT, Run, running
from tests.support.waits import eventually

JOB = {"SLURM_JOB_ID": "5", "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1"}
PART = (sys.executable, "-m", "replicas", "slurm", "--here")
RESTARTS = "restart = { initial_delay = 0 }"


ENDS = """
import os, signal, sys
from pathlib import Path
from replicas import errors
from replicas.cli import main as cli, slurm_job
from replicas.supervisor.agent import remote

ends, invitation = (Path(word) for word in sys.argv[2:])
def serve_node(to, **_):
    this, *others = ends.read_text().split()
    ends.write_text(" ".join(others))
    if this == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if this == "replaced":
        invitation.write_text(f"new{to.token}@{to.endpoint}")
    if this in ("replaced", "refused"):
        raise errors.WorldError("refused")
    return int(this)

remote.serve_node = serve_node
slurm_job._AGAIN_S = 0.0
sys.exit(cli.main(["slurm", "--here", "agent", sys.argv[1]]))
"""
"""The task of an agent of which the ends are given: a code, or a word."""


class Agent:
    """The task of an agent, and what it says."""

    def __init__(self, run: Run) -> None:
        self.output = run.folder / "agent.txt"
        env = {**os.environ, **JOB, MARK: run.mark, "PYTHONPATH": str(ROOT), "TMPDIR": str(run.scratch)}
        with self.output.open("ab") as output:
            self.task = subprocess.Popen([*PART, "agent", str(run.config)], env=env, stderr=output, stdout=output)

    def kill(self) -> None:
        """SIGKILL to the agent itself, not to its task."""
        children = Path(f"/proc/{self.task.pid}/task/{self.task.pid}/children")
        os.kill(int(children.read_text()), signal.SIGKILL)

    def wait_for(self, words: str, *, times: int = 1) -> None:
        eventually(lambda: self.output.read_text().count(words) >= times, f"{words} in {self.output.read_text()}")


@contextlib.contextmanager
def job(folder: Path, text: str) -> Iterator[tuple[Run, Agent]]:
    environ = [f"{name}={value}" for name, value in JOB.items()]
    with running(folder, text, command=("env", *environ, *PART, "supervisor")) as run:
        agent = Agent(run)
        try:
            yield run, agent
        finally:
            agent.task.kill()
            agent.task.wait()


def invitation(run: Run) -> Path:
    return run.state_dir / "slurm-5-0-batch.join"


def ready(run: Run, generation: int) -> bool:
    (one,) = run.status().groups[0].replicas
    return (one.state, one.generation) == ("ready", generation)


def token(run: Run, *words: str) -> None:
    assert cli.main(["token", "-c", str(run.config), *words]) == 0


def test_an_agent_comes_back_after_its_token_was_replaced(tmp_path: Path) -> None:
    with job(tmp_path, group("a", SLEEPS, RESTARTS)) as (run, agent):
        eventually(lambda: run.endpoint() and ready(run, 1), "a/0", timeout_s=60)
        before = invitation(run).read_text()
        token(run, "--role", "operator", "--rotate")
        token(run, "--role", "operator", "--revoke-old")
        assert invitation(run).read_text() != before
        assert invitation(run).stat().st_mode & 0o777 == 0o600
        agent.kill()
        agent.wait_for("joined run test", times=2)
        eventually(lambda: ready(run, 2), f"a/0; {agent.output.read_text()}", timeout_s=60)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75
        assert agent.task.wait(30) == 0
        assert not invitation(run).exists()


def test_a_second_supervisor_of_a_job_leaves_the_first_its_agents(tmp_path: Path) -> None:
    with job(tmp_path, group("a", SLEEPS, RESTARTS)) as (run, agent):
        eventually(lambda: run.endpoint() and ready(run, 1), "a/0", timeout_s=60)
        second = [*PART, "supervisor", str(run.config)]
        done = subprocess.run(
            second,
            env={**os.environ, **JOB, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, "is already supervised by" in done.stderr) == (SUPERVISED, True)
        assert invitation(run).exists()
        agent.kill()
        eventually(lambda: ready(run, 2), f"a/0; {agent.output.read_text()}", timeout_s=60)


@pytest.mark.parametrize(
    ("ends", "listens", "code", "left"),
    [
        ("1 killed 1 0", True, 0, ""),
        ("1 0", False, UNAVAILABLE, "0"),  # the supervisor is gone, and its machine says so
        ("replaced 0", True, 0, ""),
        ("refused 0", True, FAILED, "0"),
    ],
)
def test_an_agent_is_started_again_while_its_supervisor_may_be_there(
    ends: str, listens: bool, code: int, left: str, tmp_path: Path
) -> None:
    config, given = tmp_path / "run.toml", tmp_path / "ends"
    config.write_text(f"schema_version = 1\n[run]\nname = 'test'\n{group('a', SLEEPS)}")
    given.write_text(ends)
    state_dir = tmp_path / ".replicas/test"
    private.make_folder(state_dir)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (state_dir / "slurm-5-0-batch.join").write_text(f"token@127.0.0.1:{port}")
        (state_dir / "slurm-5-0-batch.join").chmod(0o600)
        if not listens:
            server.close()
        command = [sys.executable, "-c", ENDS, str(config), str(given), str(state_dir / "slurm-5-0-batch.join")]
        env = {**os.environ, **JOB, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, given.read_text()) == (code, left), done.stderr
    assert done.stderr.count("starting another") == len(ends.split()) - len(left.split()) - 1

"""The parts of a run in a Slurm job, as processes with a job's variables: what brings
an agent back, and what does not disturb the others. Needs no Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from replicas.cli import main as cli
from replicas.control.exit_codes import SUPERVISED
from tests.support.programs import SLEEPS, group
from tests.support.runs import MARK, ROOT, Run, eventually, running

JOB = {"SLURM_JOB_ID": "5", "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1"}
PART = (sys.executable, "-m", "replicas", "slurm", "--here")
RESTARTS = "restart = { initial_delay = 0 }"


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

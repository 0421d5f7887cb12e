"""Programs that others start: they join by themselves, come and go, and are served by
whichever supervisor is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from replicas.status import ReplicaStatus
from tests.support.runs import MARK, ROOT, Run, running
from tests.support.waits import eventually

EXTERNAL = """
[groups.trainer]
launcher = "external"
health = { heartbeat_timeout = "3s" }

[groups.rollout]
launcher = "external"
replicas = 2
min_ready = 1

[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
"""

TRAINS = """
import sys, torch, replicas
with replicas.join("policy") as channel:
    print("joined", channel.member.replica, flush=True)
    for line in sys.stdin:
        receipt = channel.publish({"w": torch.full((1000,), float(line))}).wait(60)
        print(receipt.version, flush=True)
"""

SERVES = """
import torch, replicas
with replicas.join("policy") as channel:
    print("joined", channel.member.replica, flush=True)
    while True:
        with channel.receive().wait() as update:
            tensors = dict(update)
            print(update.version, float(tensors["w"][0]), flush=True)
"""


class Others:
    """Programs that the test starts in place of a cluster."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.programs: list[subprocess.Popen[str]] = []

    def start(self, program: str, group: str, replica: str = "auto") -> subprocess.Popen[str]:
        env = {
            **os.environ,
            MARK: self._run.mark,
            "PYTHONPATH": str(ROOT),
            "REPLICAS_ENDPOINT": self._run.endpoint(),
            "REPLICAS_TOKEN_FILE": str(self._run.state_dir / "token"),
            "REPLICAS_RUN": self._run.name,
            "REPLICAS_GROUP": group,
            "REPLICA_ID": replica,
        }
        one = subprocess.Popen(
            [sys.executable, "-c", program],
            env=env,
            cwd=self._run.folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.programs.append(one)
        return one

    def __enter__(self) -> Others:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.programs:
            one.kill()
            one.communicate()

    def says(self, one: subprocess.Popen[str]) -> str:
        assert one.stdout is not None
        return one.stdout.readline().strip()

    def publish(self, trainer: subprocess.Popen[str], value: float) -> str:
        assert trainer.stdin is not None
        trainer.stdin.write(f"{value}\n")
        trainer.stdin.flush()
        return self.says(trainer)


def replicas_of(run: Run) -> dict[str, ReplicaStatus]:
    return {replica.name: replica for group in run.status().groups for replica in group.replicas}


def states(run: Run) -> dict[str, str]:
    return {name: one.state for name, one in replicas_of(run).items()}


def test_a_run_of_external_groups_is_a_coordinator(tmp_path: Path) -> None:
    with running(tmp_path, EXTERNAL) as run, Others(run) as others:
        run.wait_line("control at")
        assert states(run) == {"trainer/0": "pending", "rollout/0": "pending", "rollout/1": "pending"}
        trainer, first = others.start(TRAINS, "trainer"), others.start(SERVES, "rollout")
        assert (others.says(trainer), others.says(first)) == ("joined 0", "joined 0")
        assert others.publish(trainer, 1.5) == "1"
        assert others.says(first) == "1 1.5"
        second = others.start(SERVES, "rollout")
        assert (others.says(second), others.says(second)) == ("joined 1", "1 1.5")
        eventually(lambda: run.status().ready, "everything ready")
        more = others.start(SERVES, "rollout")  # an autoscaler's
        assert others.says(more) == "joined 2"
        eventually(lambda: states(run).get("rollout/2") == "ready", "one more than expected")
        # One is killed, and comes back; one more goes.
        first.kill()
        run.wait_line("rollout/0: ended (rank 0: its process ended); free for the next program to join", timeout_s=10)
        more.kill()
        eventually(lambda: "rollout/2" not in states(run), "the end of rollout/2")
        assert others.publish(trainer, 2.5) == "2"
        again = others.start(SERVES, "rollout")
        assert (others.says(again), others.says(again)) == ("joined 0", "2 2.5")
        eventually(lambda: states(run)["rollout/0"] == "ready", "rollout/0 again")
        assert (replicas_of(run)["rollout/0"].generation, replicas_of(run)["rollout/0"].restarts) == (2, 0)
        # One that takes the place of another: the earlier is told, and ends.
        rival = others.start(SERVES, "rollout", "0")
        assert (others.says(rival), others.says(rival)) == ("joined 0", "2 2.5")
        assert again.wait(20) != 0
        eventually(lambda: replicas_of(run)["rollout/0"].generation == 3, "a new life of rollout/0")
        eventually(lambda: states(run)["rollout/0"] == "ready", "rollout/0 again")
        run.signal(signal.SIGTERM)
        assert run.wait() == 0


def test_programs_that_others_start_outlive_the_supervisor(tmp_path: Path) -> None:
    head = '[control]\nlisten = "127.0.0.1:{port}"\n'
    with running(tmp_path, EXTERNAL) as run, Others(run) as others:
        port = run.endpoint().rpartition(":")[2]
        trainer, server = others.start(TRAINS, "trainer"), others.start(SERVES, "rollout")
        assert (others.says(trainer), others.says(server)) == ("joined 0", "joined 0")
        assert others.publish(trainer, 1.0) == "1"
        assert others.says(server) == "1 1.0"
        run.signal(signal.SIGKILL)
        run.wait()
        with running(tmp_path, EXTERNAL, head=head.format(port=port)) as after:
            assert others.publish(trainer, 2.0) == "2"
            assert others.says(server) == "2 2.0"
            eventually(lambda: states(after)["rollout/0"] == "ready", "rollout/0")
            assert (trainer.poll(), server.poll()) == (None, None)
            after.signal(signal.SIGTERM)
            assert after.wait() == 0

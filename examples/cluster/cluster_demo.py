"""`make demo-cluster`: three machines, a killed supervisor, and a machine that is
switched off.

    python examples/cluster/cluster_demo.py [--adopt 15s] [--out DIR]

The supervisor and the trainer are on one machine, agents offer the two others, and the
rollouts are spread over them. As root the machines are namespaces with a network
between them (machines.py). It prints its observations in plain lines, and exits with 1
when a process did not survive its supervisor, a version was torn or lost, or the
rollout of the lost machine did not come back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from machines import Machine, machines

from replicas.control.client import Client
from replicas.control.commands import Scale
from replicas.errors import Disconnected
from replicas.status import NodeStatus, ReplicaStatus, RunStatus

HERE = Path(__file__).resolve().parent
STEADY_S = 3.0
LOOK_S = 0.05
T = TypeVar("T")


class Problem(Exception):
    """The run did not behave as expected."""


def until(condition: Callable[[], T | None], what: str, timeout_s: float = 60.0) -> T:
    """Return the first value of ``condition`` that is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Problem(f"not within {timeout_s:g} s: {what}")
        time.sleep(LOOK_S)


class Demo:
    """One run on three machines."""

    def __init__(self, out: Path, head: Machine, nodes: list[Machine], adopt: str) -> None:
        self._out, self._head, self._nodes, self._adopt = out, head, nodes, adopt
        self._state, self._records = out / "run", out / "records"
        self._began = time.monotonic()
        self._env = {"DEMO_RECORDS": str(self._records), "OMP_NUM_THREADS": "1"}
        self._supervisor: subprocess.Popen[bytes] | None = None

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)

    # ------------------------------------------------------------ what runs

    def start_supervisor(self) -> None:
        text = (HERE / "run.toml").read_text().replace("127.0.0.1", self._head.address)
        text = re.sub(r'adopt = "\w+"', f'adopt = "{self._adopt}"', text)
        text = text.replace("[control]", f'state_dir = "{self._state}"\n\n[control]', 1)
        for name in ("trainer", "rollout"):
            text = text.replace(f"[groups.{name}]", f'[groups.{name}]\ncwd = "{HERE}"')
        (self._out / "run.toml").write_text(text)
        command = [sys.executable, "-m", "replicas.supervisor", str(self._out / "run.toml")]
        self._supervisor = self._head.start(command, self._env, self._out / "supervisor.log")

    def start_agent(self, node: Machine) -> None:
        endpoint = json.loads((self._state / "endpoint.json").read_text())["endpoint"]
        invitation = f"{(self._state / 'operator-token').read_text().strip()}@{endpoint}"
        folder = self._out / f"agent-{node.name}"
        replicas = "import sys; from replicas.cli.entry import main; sys.exit(main())"  # the command, of this tree
        command = [sys.executable, "-c", replicas, "agent", "--name", node.name]
        command += ["--label", "role=serve", "--state-dir", str(folder)]
        node.start(command, {**self._env, "REPLICAS_JOIN": invitation}, self._out / f"agent-{node.name}.log")

    def status(self) -> RunStatus | None:
        """Return the run's status, or None if the supervisor does not answer."""
        try:
            return self.client().status()
        except (Disconnected, OSError):
            return None

    def client(self) -> Client:
        return Client(f"unix:{self._state / 'control.sock'}")

    def nodes(self) -> tuple[NodeStatus, ...]:
        status = self.status()
        return status.nodes if status is not None else ()

    def replicas(self) -> dict[str, ReplicaStatus]:
        status = self.status()
        return {one.name: one for group in status.groups for one in group.replicas} if status is not None else {}

    def ready(self) -> dict[str, ReplicaStatus] | None:
        found = self.replicas()
        all_ready = all(
            one.state == "ready" and one.pid is not None for one in found.values()
        )  # no pid: its node is away
        return found if len(found) == 3 and all_ready else None

    def records(self, name: str) -> list[dict[str, Any]]:
        path = self._records / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def commits(self, since: float = 0.0) -> list[dict[str, Any]]:
        return [one for one in self.records("trainer") if "version" in one and one["at"] > since]

    # ------------------------------------------------------------ the story

    def begin(self) -> None:
        self.start_supervisor()
        until(lambda: (self._state / "endpoint.json").exists() and self.status() is not None, "the supervisor answers")
        for node in self._nodes:
            self.start_agent(node)
        until(lambda: sum(node.state == "up" for node in self.nodes()) == 3, "all nodes are up")
        self.client().order(Scale(group="rollout", replicas=2))
        found = until(self.ready, "all replicas are ready")
        own = {node.name: self._head.name for node in self.nodes() if node.local}
        places = ", ".join(f"{name} on {own.get(one.nodes[0], one.nodes[0])}" for name, one in found.items())
        self.say(f"3 nodes are up, and all replicas are ready: {places}")
        if {one.nodes for name, one in found.items() if name != "trainer/0"} != {(node.name,) for node in self._nodes}:
            raise Problem("the rollouts are not spread over the nodes")
        time.sleep(STEADY_S)
        self.say(f"version {self.commits()[-1]['version']} is committed; now the supervisor is killed (-9)")

    def lose_supervisor(self) -> None:
        before, killed = self.replicas(), time.monotonic()
        assert self._supervisor is not None
        self._head.kill(self._supervisor)
        self.start_supervisor()
        after = until(self.ready, "a new supervisor has taken all replicas over")
        commit = until(lambda: next(iter(self.commits(since=killed)), None), "the next version is committed")
        self.say(
            f"a new one has taken over; version {commit['version']} committed {commit['at'] - killed:.1f} s after the kill"
        )
        if {name: (one.pid, one.generation) for name, one in before.items()} != {
            name: (one.pid, one.generation) for name, one in after.items()
        }:
            raise Problem(f"other processes than before: {before} and {after}")
        self.say(f"the same {len(after)} processes as before, generation 1 each")
        steps = [one for one in self.records("trainer") if "took_s" in one]
        if [one["step"] for one in steps] != list(range(1, len(steps) + 1)):
            raise Problem("the trainer has lost or repeated a step")
        pairs = itertools.pairwise(steps)
        pause_s = max(later["at"] - one["at"] for one, later in pairs if later["at"] > killed)
        self.say(f"the trainer lost no step of {len(steps)}; the longest pause between two was {pause_s:.1f} s")

    def lose_node(self) -> None:
        lost, left = self._nodes[1], self._nodes[0]
        (victim,) = [one for one in self.replicas().values() if lost.name in one.nodes]
        off = time.monotonic()
        lost.switch_off()
        self.say(f"{lost.name} is switched off, and with it {victim.name}")
        first = until(lambda: next(iter(self.commits(since=off)), None), "a version is committed without it")
        self.say(f"version {first['version']} committed {first['at'] - off:.1f} s later, targets: {first['targets']}")

        until(lambda: (lost.name, "lost") in [(one.name, one.state) for one in self.nodes()], f"{lost.name} is lost")
        self.say(f"{lost.name} is lost after {time.monotonic() - off:.1f} s: its lease is over")
        back = until(lambda: (self.ready() or {}).get(victim.name), f"{victim.name} is back")
        self.say(
            f"{victim.name} runs on {back.nodes[0]} {time.monotonic() - off:.1f} s after the loss, "
            f"generation {back.generation}, with version {back.versions.get('policy')}"
        )
        if back.nodes != (left.name,):
            raise Problem(f"it should be on {left.name}")
        time.sleep(STEADY_S)

    def end(self) -> None:
        versions = [one["version"] for one in self.commits()]
        failed = [one["failed"] for one in self.records("trainer") if "failed" in one]
        self.say(f"{len(versions)} versions committed, {len(failed)} publishes failed")
        if versions != sorted(set(versions)) or failed:
            raise Problem(f"versions {versions}, failures {failed}")
        for name in ("rollout-0", "rollout-1"):
            loads = self.records(name)
            torn = [one["version"] for one in loads if not one["whole"]]
            if torn or [one["version"] for one in loads] != sorted(one["version"] for one in loads):
                raise Problem(f"{name} has loaded torn or older versions: {torn or loads}")
        self.say("every load was of one whole version, and never of an older one")
        restarts = {group.name: dict(group.restarts) for group in self.client().status().groups}["rollout"]
        self.say(f"restarts: {', '.join(f'{count} ({reason})' for reason, count in restarts.items())}")
        began = time.monotonic()
        self.stop()
        self.say(f"the run is over, {time.monotonic() - began:.1f} s after SIGTERM")
        page = self._out / "report.html"
        command = [sys.executable, "-m", "replicas", "report", str(self._state), "-o", str(page)]
        subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
        self.say(f"the whole run, to look through in a browser: {page}")

    def stop(self) -> None:
        """Send SIGTERM to the supervisor if it runs, and wait for its end."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._head.signal(self._supervisor, signal.SIGTERM)
            self._supervisor.wait(40.0)


def main() -> int:
    parser = argparse.ArgumentParser(description="A run on three machines, which loses its supervisor and a machine.")
    parser.add_argument("--out", type=Path, default=Path("demo-output/cluster"), help="folder for state and logs")
    parser.add_argument("--adopt", default="15s", help="for how long replicas go on without a supervisor")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    (out / "records").mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without namespaces the machines would offer the same GPUs
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    with machines("head", "left", "right") as (words, (head, *nodes)):
        demo = Demo(out, head, nodes, options.adopt)
        demo.say(words)
        try:
            demo.begin()
            demo.lose_supervisor()
            demo.lose_node()
            demo.end()
        except Problem as problem:
            demo.say(f"FAILED: {problem}; logs are in {out}")
            return 1
        finally:
            demo.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

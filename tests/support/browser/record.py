"""Record the run that ``replicas report --demo`` shows: as root, some five minutes.

    PYTHONPATH=examples/cluster python -m tests.support.browser.record DIR

A trainer and four rollouts run on three machines (namespaces, as in
``examples/cluster``). A rollout is killed, the network is slow during a sync, a machine
is switched off, the group is scaled, a load fails, a sync fails as the network is slow
while a rollout is suspended, and the new rollout fails for good. DIR gets the files of
the run, and ``demo.jsonl``: its events from time 0 on, without paths and addresses of
this machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from machines import Machine, machines

import replicas
from replicas.control.client import Client
from replicas.control.commands import Restart, Scale
from replicas.errors import Disconnected, SyncError
from tests.support.root import ROOT

LASTS_S, EVERY_S, DEADLINE_S = 295.0, 6.5, 12.0
SHAPE = (8192, 8192)
ONCE, FOR_GOOD = "fail once", "fail for good"
KILL, SUSPEND = "sleep 2; kill -KILL $PPID", "kill -STOP $PPID; sleep 20; kill -CONT $PPID"
THROTTLE = "tc qdisc add dev eth0 root tbf rate {} burst 1mb latency 100ms; sleep {}; tc qdisc del dev eth0 root"
CONFIG = """
schema_version = 1
[run]
name = "demo"
state_dir = "{out}/run"
stop_when = ["trainer"]
[control]
listen = "{address}:0"
[store]
bind = "{address}"
[cluster]
local = false
min_nodes = 3
[groups.trainer]
launcher = "exec"
command = ["-m", "tests.support.browser.record", "trainer"]
placement = {{ labels = {{ role = "train" }} }}
[groups.rollout]
replicas = 4
launcher = "exec"
command = ["-m", "tests.support.browser.record", "rollout"]
depends_on = ["trainer"]
on_failure = "replica"
placement = {{ spread = true }}
[groups.rollout.restart]
max_restarts = 20
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
min_targets = 3
"""


def train() -> None:
    weight, step, end = torch.zeros(SHAPE), 0, time.monotonic() + LASTS_S
    with replicas.join("policy") as channel:
        while time.monotonic() < end:
            time.sleep(EVERY_S)
            step += 4
            weight.fill_(step)
            with suppress(SyncError):
                channel.publish({"weight": weight}, meta={"step": step}, deadline=DEADLINE_S).wait()


def roll_out() -> None:
    """Serve; a file may have a fault to show, or a shell command for one."""
    weight = torch.empty(SHAPE)
    with replicas.join("policy") as channel:
        path = Path(os.environ["FAULTS"]) / str(channel.member.replica)
        while True:
            with channel.receive().wait() as update:
                time.sleep(0.4)  # an engine does more than to copy
                fault = path.read_text() if path.exists() else ""
                if fault != FOR_GOOD:
                    path.unlink(missing_ok=True)
                if fault in (ONCE, FOR_GOOD):
                    raise RuntimeError("out of memory: 2.0 GiB are needed, 1.3 GiB are free")
                if fault:
                    subprocess.Popen(["sh", "-c", fault])
                update.load_into({"weight": weight})
            print(f"loaded version {update.version}", flush=True)


class Recording:
    """One run on three machines, and what happens to it."""

    def __init__(self, out: Path, nodes: list[Machine]) -> None:
        self._out, self._nodes = out, nodes
        self._faults = out / "faults"
        self._faults.mkdir(parents=True)
        self._client = Client(f"unix:{out}/run/control.sock")

    def run(self) -> None:
        head, *others = self._nodes
        config = self._out / "run.toml"
        config.write_text(CONFIG.format(out=self._out, address=head.address))
        supervisor = self._start(head, "-m", "replicas.supervisor", str(config))
        endpoint = json.loads(self._until(lambda: self._file("endpoint.json")))["endpoint"]
        invitation = f"{self._until(lambda: self._file('operator-token')).strip()}@{endpoint}"
        for node in self._nodes:
            label = "role=train" if node is head else "role=serve"
            command = ("-m", "replicas", "agent", "--name", node.name, "--label", label)
            self._start(node, *command, "--state-dir", str(self._out / node.name), REPLICAS_JOIN=invitation)
            self._until(partial(self._joined, node.name))
        self._until(lambda: self._ready() == 5)
        began = time.monotonic()
        for at, act in (
            (35.0, lambda: self._fault("1", KILL)),
            (62.0, lambda: self._throttle("500mbit", 8)),
            (95.0, others[1].switch_off),
            (140.0, lambda: self._client.order(Scale(group="rollout", replicas=5))),
            (165.0, lambda: self._fault("0", ONCE)),
            (213.0, lambda: self._fault("3", SUSPEND)),
            (225.0, lambda: self._throttle("50mbit", 22)),
            (250.0, lambda: self._client.order(Restart(target="rollout/2"))),
            (262.0, lambda: self._fault("4", FOR_GOOD)),
        ):
            time.sleep(max(0.0, began + at - time.monotonic()))
            act()
            print(f"{at:g} s: {self._ready()} are ready", flush=True)
        supervisor.wait(120.0)

    def anonymous(self) -> str:
        """The events of the run, without what is this machine's own."""
        text = self._file("events.jsonl")
        words = {str(self._out): "/home/user/demo", sys.executable: "python", str(ROOT): "/home/user/grpo"}
        words |= {sysconfig.get_path("stdlib"): "/usr/lib/python3", "tests/support/browser/record.py": "rollout.py"}
        words |= {node.address: f"10.0.0.{number}" for number, node in enumerate(self._nodes, 1)}
        for old, new in words.items():
            text = text.replace(old, new)
        # Machines that are namespaces of one are advised to share memory.
        text = re.sub(r'"(?:channel )?policy: receiving versions over the network[^"]*",', "", text)
        text = re.sub(r'"\w+":null,|,"\w+":null(?=})', "", text)
        began_at = float(re.findall(r'"at":([0-9.]+)', text)[0])
        text = re.sub(r'(?<="at":)[0-9.]+', lambda found: f"{float(found[0]) - began_at:.3f}", text)
        return re.sub(r"\d+\.\d{5,}", lambda found: f"{float(found[0]):.4f}", text)

    def _start(self, node: Machine, *words: str, **env: str) -> subprocess.Popen[bytes]:
        env |= {"FAULTS": str(self._faults), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/examples/cluster"}
        return node.start([sys.executable, *words], env, self._out / f"{node.name}.log")

    def _throttle(self, rate: str, seconds: float) -> None:
        """Slow down what the trainer's machine sends."""
        self._nodes[0].start(["sh", "-c", THROTTLE.format(rate, seconds)], {}, self._out / "tc.log")

    def _fault(self, rollout: str, fault: str) -> None:
        (self._faults / rollout).write_text(fault)

    def _file(self, name: str) -> str:
        path = self._out / "run" / name
        return path.read_text() if path.exists() else ""

    def _joined(self, node: str) -> bool:
        return f'"node":"{node}","before":"away","after":"up"' in self._file("events.jsonl")

    def _ready(self) -> int:
        try:
            status = self._client.status()
        except (Disconnected, OSError):
            return 0
        return sum(one.state == "ready" for group in status.groups for one in group.replicas)

    @staticmethod
    def _until(found: Callable[[], str | bool]) -> str:
        deadline = time.monotonic() + 60.0
        while not (value := found()):
            if time.monotonic() > deadline:
                raise TimeoutError("the run does not start: see the logs in DIR")
            time.sleep(0.1)
        return str(value)


def main(out: Path) -> None:
    with machines("n1", "n2", "n3") as (words, nodes):
        print(words)
        recording = Recording(out.resolve(), nodes)
        recording.run()
        (out / "demo.jsonl").write_text(recording.anonymous())


if __name__ == "__main__":
    match sys.argv[1]:
        case "trainer":
            train()
        case "rollout":
            roll_out()
        case folder:
            main(Path(folder))

"""A run over four hosts: its supervisor on A, agents on B, C and D, and the replicas
wherever it places them.

Theory of operation
===================

Each host looks like a machine of its own to all code that compares machines: it has
namespaces of network, mounts and processes (:mod:`tests.support.machine.networks`), a
boot id and a monotonic clock of its own, its own ``/dev/shm``, its own control groups,
its own wall clock, which can be set (:mod:`tests.chaos.clocks`), and a small disk for
what its agent, or the supervisor, keeps. A switch joins them
(:mod:`tests.support.machine.switch`), so that a host can be cut off without a word. The
folder ``out``, in which the ranks write down what they see, is the same on all: that is
the test's side of them.

Agents are kept by :meth:`NodeWorld.tend`, as a service manager would: one that ends is
started again, once its host is there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from replicas.control.client import Client
from replicas.control.commands import Order
from replicas.control.socket import SOCKET_FILE
from replicas.errors import Disconnected
from replicas.status import RunStatus
from tests.chaos.census import Census, Life, now
from tests.chaos.nodes.node_host import LABELS, NAMES, Host
from tests.chaos.syncs.rig import Tail
from tests.chaos.written import Line
from tests.support.machine.disks import small_disk
from tests.support.machine.switch import Switch, switched_hosts

__all__ = ["ADOPT_S", "DEADLINE_S", "HEARTBEAT_S", "LEASE_S", "ROLLOUTS", "NodeWorld", "node_world", "wait_whole"]

PROGRAMS = Path(__file__).parents[1] / "programs"
ROLLOUTS = 6
ADOPT_S = float(os.environ.get("CHAOS_ADOPT_S", "15"))
LEASE_S = 6.0
"""In the config. What holds is the longer of the two."""
HEARTBEAT_S = 4.0
DEADLINE_S = 8.0
PORT = 7700
DISK_NBYTES = 64 << 20
START_S = 120.0
RUN = "nodes"


def config(out: Path, address: str, state_dir: Path) -> str:
    """TOML of the run."""
    often = 'max_restarts = 100000, no_progress_cycles = 0, window = "24h", initial_delay = "50ms", max_delay = "200ms"'
    common = f"""launcher = "exec"
stop_timeout = "2s"
env = {{ CHAOS_OUT = "{out}", CHAOS_NBYTES = "{1 << 20}", CHAOS_PAUSE_S = "0.2", OMP_NUM_THREADS = "1" }}
restart = {{ policy = "always", {often} }}
health = {{ heartbeat_timeout = "{HEARTBEAT_S:g}s", load_deadline = "30s" }}
resources = {{ gpus = 1 }}
"""
    return f"""schema_version = 1
[run]
name = "{RUN}"
stop_when = []
state_dir = "{state_dir}"
adopt = "{ADOPT_S:g}s"
[cluster]
lease = "{LEASE_S:g}s"
labels = {{ train = "yes" }}
[control]
listen = "{address}:{PORT}"
[store]
bind = "{address}"
[groups.trainer]
command = ["{PROGRAMS}/node_rank.py", "trainer"]
{common}
[groups.trainer.placement]
labels = {{ train = "yes" }}
[groups.serve]
command = ["{PROGRAMS}/node_rank.py", "server"]
replicas = {ROLLOUTS}
{common}
[groups.serve.placement]
spread = true
labels = {{ serve = "yes" }}
[channels.policy]
sources = ["trainer"]
targets = ["serve"]
deadline = "{DEADLINE_S:g}s"
slots = 3
"""


class NodeWorld:
    """The run and its hosts, from the test's side. What its programs write shows as
    :class:`tests.chaos.written.Writes` says."""

    def __init__(self, folder: Path, switch: Switch, census: Census, *, disk: bool) -> None:
        self.folder, self.switch, self.census = folder, switch, census
        self.out = folder / "out"
        self.deadline_s = DEADLINE_S
        self.peers: list[str] = []
        self.hosts = [Host(index, machine, folder, disk=disk) for index, machine in enumerate(switch.hosts)]
        self.config = folder / "run.toml"
        self.config.write_text(config(self.out, switch.hosts[0].address, self.hosts[0].state_dir))
        self.unasked: list[str] = []
        """Ends of agents and supervisors that no fault explains."""
        self.old_state = b""
        """The supervisor's state of an earlier round."""
        self._tails: dict[str, Tail] = {}

    # ------------------------------------------------------------ hands

    def start_supervisor(self) -> None:
        self.hosts[0].start("-m", "tests.chaos.nodes.node_supervisor", str(self.out), str(self.config), env={})

    def start_agent(self, host: Host) -> None:
        token = self._token.read_text().strip()
        labels = [word for name, value in LABELS[host.index].items() for word in ("--label", f"{name}={value}")]
        host.start(
            "-m",
            "replicas",
            "agent",
            "--name",
            host.name,
            "--state-dir",
            str(host.state_dir),
            *labels,
            env={"REPLICAS_JOIN": f"{token}@{self.switch.hosts[0].address}:{PORT}"},
        )

    @property
    def _token(self) -> Path:
        """An operator's, by which agents join."""
        return self.hosts[0].state_dir / "operator-token"

    def tend(self) -> None:
        """Start what should run and does not."""
        for host in self.hosts:
            if host.popen is not None and (code := host.popen.poll()) is not None:
                host.codes.append(code)
                host.popen = None
                host.off_until = max(host.off_until, now() + 0.3)
            if host.popen is None and now() >= host.off_until:
                if host.index == 0:
                    self.start_supervisor()
                elif self._token.exists():
                    self.start_agent(host)

    def order(self, order: Order, *, wait: bool = False) -> None:
        """:raises replicas.errors.ReplicasError: it was not carried out."""
        self._client().order(order, wait=wait)

    def _client(self) -> Client:
        return Client(f"unix:{self.hosts[0].state_dir / SOCKET_FILE}", timeout_s=3.0)

    def close(self) -> None:
        for host in self.hosts:
            host.close()
            host.remove_cgroup()

    # ------------------------------------------------------------ what shows

    def status(self) -> RunStatus | None:
        """None: no supervisor answers."""
        try:
            return self._client().status()
        except (Disconnected, OSError):
            return None

    def log(self, name: str) -> list[Line]:
        return self._tails.setdefault(name, Tail(self.out / f"{name}.jsonl")).lines()

    def events(self) -> list[Line]:
        """Of the run: ``seq``, ``at`` and ``event`` each."""
        return self._tails.setdefault("", Tail(self.hosts[0].state_dir / "events.jsonl")).lines()

    @staticmethod
    def sources() -> list[str]:
        return ["trainer-0.0"]

    def targets(self) -> dict[str, list[Line]]:
        return {f"serve-{index}.0": self.log(f"serve-{index}.0") for index in range(ROLLOUTS)}

    def decided(self) -> list[int]:
        return [line["version"] for line in self.log("decisions") if line["kind"] == "commit"]

    def runs(self, name: str, pid: Any) -> bool:
        lines = self.log(name)
        life = self.census.alive().get(name.rpartition(".")[0])
        return life is not None and bool(lines) and lines[-1]["generation"] == life.generation

    def commits(self, since: float) -> list[Line]:
        """Ends of publishes that began after this time and were committed."""
        found, began = [], 0.0
        for line in self.log("trainer-0.0"):
            if "began" in line:
                began = line["at"]
            elif "ended" in line and "version" in line and began > since:
                found.append(line)
        return found

    def supervised(self, since: float) -> float:
        """When, after this time, a supervisor was there; 0: not yet."""
        return next(
            (line["at"] for line in self.log("members") if line["event"] == "there" and line["at"] > since), 0.0
        )

    def errors(self, since: float) -> list[Line]:
        return [line for line in self.log("trainer-0.0") if "error" in line and line["at"] > since]

    def served(self, name: str, version: int, life: Life) -> bool:
        """Whether this very process has served that version or a newer one."""
        lines = self.log(f"{name}.0")
        return any(
            "stamp" in line and line.get("version", 0) >= version and line["generation"] == life.generation
            for line in reversed(lines[-50:])
        )

    def not_whole(self, since: float) -> str:
        """What is missing: all nodes are up, all replicas ready, and each has served a
        version that was published after this time, and of which nobody was missing;
        empty: nothing."""
        status = self.status()
        if status is None:
            return "a supervisor"
        states = {node.name: node.state for node in status.nodes}
        local = next((node.name for node in status.nodes if node.local), "")
        if missing := [name for name in NAMES if states.get(local if name == "A" else name) != "up"]:
            return f"nodes {missing}: {states}"
        replicas = {one.name: one for group in status.groups for one in group.replicas}
        if len(replicas) != ROLLOUTS + 1:
            return f"replicas: {sorted(replicas)}"
        if unready := [f"{name}: {one.state}, {one.reason}" for name, one in replicas.items() if one.state != "ready"]:
            return "; ".join(unready)
        lives = self.census.alive()
        for name, one in replicas.items():
            life = lives.get(name.replace("/", "-"))
            if life is None or life.generation != one.generation:
                return f"{name} generation {one.generation}: the census has {life}"
        commits = [line for line in self.commits(since) if not line["lost"]]
        names = [f"serve-{index}" for index in range(ROLLOUTS)]
        if not any(all(self.served(name, line["version"], lives[name]) for name in names) for line in commits[-20:]):
            return f"a version that all serve (of {[line['version'] for line in commits[-20:]]})"
        return ""

    def story(self, since: float) -> str:
        """For people: what happened from a little before this time on."""
        rows: list[tuple[float, str]] = []
        for line in self.events():
            if line["at"] > since - 3.0 and line["event"]["type"] not in ("OperationEnded", "ReplicaLoaded"):
                rows.append((line["at"], f"event {json.dumps(line['event'])[:300]}"))
        for line in self.log("trainer-0.0"):
            if line["at"] > since - 3.0 and ("ended" in line or "apart" in line):
                rows.append((line["at"], f"trainer {json.dumps(line)[:300]}"))
        for life in self.census.lives:
            if life.ended is None or life.ended > since - 3.0:
                rows.append((life.began, f"began {life}"))
                rows += [] if life.ended is None else [(life.ended, f"ended {life}")]
        text = "\n".join(f"{at - since:8.2f} {text}" for at, text in sorted(rows))
        hosts = "\n".join(f"== {host.name} {host.codes}\n{host.said()[-3000:]}" for host in self.hosts)
        return f"{text}\n{hosts}\nstatus: {self.status()}"


@contextmanager
def node_world(folder: Path) -> Iterator[NodeWorld]:
    """A world in which all is whole; nothing of it is left after the block."""
    (folder / "out").mkdir(parents=True)
    with ExitStack() as stack:
        disks = [stack.enter_context(small_disk(folder / f"disk-{name}", DISK_NBYTES)) for name in NAMES]
        switch = stack.enter_context(switched_hosts(len(NAMES)))
        census = stack.enter_context(Census(folder / "out"))
        world = NodeWorld(folder, switch, census, disk=all(disks))
        stack.callback(world.close)
        for host in world.hosts:
            host.set_up()
        wait_whole(world, now(), START_S, "the start")
        yield world


def wait_whole(world: NodeWorld, since: float, timeout_s: float, what: str) -> float:
    """When all was whole. AssertionError with the story: not in time."""
    deadline, missing = now() + timeout_s, ""
    while True:
        world.tend()
        if not (missing := world.not_whole(since)):
            return now()
        if now() > deadline:
            raise AssertionError(
                f"{what}: not whole within {timeout_s:.0f} s, missing: {missing}\n{world.story(since)}"
            )
        time.sleep(0.1)

"""The run under chaos: its programs, its processes, and the faults done to them.

Each rank writes what happened to it into a file of JSON lines of its own, with times of ``CLOCK_MONOTONIC``, which all
processes of the machine share (:data:`tests.support.programs.PUBLISHES` and ``RECEIVES``).
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Set
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicas.status import ReplicaStatus
from tests.support.programs import PUBLISHES, RECEIVES
from tests.support.runs import Run, alive, eventually

__all__ = ["DEADLINE_S", "LEASE_S", "Fault", "Victim", "World", "chaos_config"]

DEADLINE_S = 10.0
LEASE_S = 5.0

# SIGKILL; SIGSTOP, and SIGCONT 1-2 s later; SIGSTOP until it is replaced, or until the round is over. What nobody needs at
# the moment can be frozen without harm: with a forkserver or the store a sidecar is killed, with a shim its rank.
KINDS = ("kill", "pause", "freeze")
TARGETS = ("target rank", "source rank", "sidecar", "forkserver", "shim", "store")
ALL = [*((kind, target) for kind in KINDS for target in TARGETS), ("pause", "supervisor")]
DECK = [pair for pair in ALL if os.environ.get("CHAOS_ONLY", "") in " ".join(pair)]


def chaos_config(folder: Path) -> str:
    """TOML of the run, whose ranks write under ``folder``."""
    (folder / "trainer.py").write_text(PUBLISHES)
    (folder / "target.py").write_text(RECEIVES)
    out = folder / "out"
    out.mkdir()
    common = f"""launcher = "exec"
env = {{ OUT = "{out}", OMP_NUM_THREADS = "1" }}
stop_timeout = "1s"
restart = {{ max_restarts = 10000, initial_delay = "100ms", max_delay = "200ms" }}
health = {{ heartbeat_timeout = "{LEASE_S:g}s" }}
"""
    return f"""
[groups.trainer]
command = ["{sys.executable}", "{folder}/trainer.py"]
{common}
[groups.rollout]
replicas = 2
command = ["{sys.executable}", "{folder}/target.py"]
{common}
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
deadline = "{DEADLINE_S:g}s"
"""


@dataclass(frozen=True)
class Fault:
    kind: str
    target: str
    delay_s: float
    pause_s: float

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"

    @classmethod
    def deck(cls, rng: random.Random) -> Iterator[Fault]:
        """Faults without end; every kind comes on every target before any comes twice."""
        while True:
            for kind, target in rng.sample(DECK, len(DECK)):
                longer_s = LEASE_S if target == "supervisor" else 0.0
                yield cls(kind, target, rng.uniform(0.0, 0.3), rng.uniform(1.0, 2.0) + longer_s)


@dataclass(frozen=True)
class Victim:
    """``replica``: which one it belongs to, if any; ``restarts``: that one must start again; ``also``: killed with it."""

    pid: int
    replica: str = ""
    restarts: bool = False
    also: int = 0


class World:
    """A run and what shows of it."""

    def __init__(self, run: Run, rng: random.Random) -> None:
        self.run = run
        self.out = run.folder / "out"
        self._rng = rng

    def replicas(self) -> dict[str, ReplicaStatus]:
        return {one.name: one for group in self.run.status().groups for one in group.replicas}

    def log(self, name: str) -> list[dict[str, Any]]:
        """The whole lines that ``trainer-0``, ``rollout-0`` or ``rollout-1`` has written so far."""
        return _lines(self.out / f"{name}.jsonl")

    def decided(self) -> list[int]:
        """Every version that was ever committed, in order."""
        return [line["version"] for line in _lines(self.run.state_dir / "decisions.jsonl")]

    def page(self, name: str) -> tuple[int, str]:
        """Status and text of a control page."""
        host, _, port = self.run.endpoint().rpartition(":")
        with closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
            connection.request("GET", f"/{name}")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def wait_for_publish(self) -> None:
        """Until a publish begins that had not begun before."""
        before = len(self.log("trainer-0"))
        eventually(lambda: any("began" in line for line in self.log("trainer-0")[before:]), "a publish", timeout_s=30)

    def choose(self, fault: Fault, spared: Set[str]) -> Victim | None:
        """A process of this run, not of the replicas ``spared``, once there is one; None when those are all."""
        group = {"source rank": "trainer", "target rank": "rollout", "shim": "rollout"}.get(fault.target, "")
        names = sorted(n for n, one in self.replicas().items() if one.group.startswith(group) and n not in spared)
        if fault.target == "supervisor" or not names:
            return Victim(self.run.pid) if names else None
        name = self._rng.choice(names)
        found: Victim = eventually(lambda: self._choose(fault, name), f"a {fault.target} to {fault.kind}")
        return found

    def _choose(self, fault: Fault, name: str) -> Victim | None:
        rank, lives, freezes = self.replicas()[name].pid, fault.kind == "pause", fault.kind == "freeze"
        if rank is None or not alive(rank):
            return None
        shim = _parent(rank)
        servers = [pid for pid, line in self._children(shim).items() if "sidecar.forkserver" in line]
        sidecars = sorted(child for server in servers for child in self._children(server))
        if not sidecars:
            return None
        return {
            "source rank": Victim(rank, name, not lives),
            "target rank": Victim(rank, name, not lives),
            "sidecar": Victim(sidecars[0], name),
            "forkserver": Victim(servers[0], name, also=sidecars[0] if freezes else 0),
            "shim": Victim(shim, name, not lives, rank if freezes else 0),
            "store": Victim(self.run.find("store_process"), also=sidecars[0] if freezes else 0),
        }[fault.target]

    def _children(self, pid: int) -> dict[int, str]:
        return {child: line for child, line in self.run.processes().items() if _parent(child) == pid}

    def hit(self, fault: Fault, victim: Victim) -> None:
        self.signal(victim.pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if victim.also:
            self.signal(victim.also, signal.SIGKILL)
        if fault.kind == "pause":
            time.sleep(fault.pause_s)  # the fault itself, not a wait for anything
            self.signal(victim.pid, signal.SIGCONT)

    def signal(self, pid: int, signum: int) -> None:
        """By a pidfd, and only a process that is certainly of this run; nothing when it is gone."""
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                if pid == self.run.pid or pid in self.run.processes():
                    signal.pidfd_send_signal(pidfd, signum)
            finally:
                os.close(pidfd)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

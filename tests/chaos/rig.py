"""The run under chaos: its programs, its processes, and the faults done to them.

Every element of every tensor of a version is its *stamp*, the clock in microseconds when it was made: weights that mix two
versions, or that nobody committed, show by themselves. Each rank writes what happened to it into a file of JSON lines of
its own, with times of ``CLOCK_MONOTONIC``, which all processes of the machine share.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from replicas.status import ReplicaStatus
from tests.support.runs import Run, alive, eventually

__all__ = ["DEADLINE_S", "LEASE_S", "Fault", "Victim", "World", "chaos_config"]

DEADLINE_S = 10.0
LEASE_S = 5.0

FaultKind = Literal["kill", "pause", "freeze"]
FAULTS: tuple[FaultKind, ...] = ("kill", "pause", "freeze")
"""SIGKILL; SIGSTOP, and SIGCONT 1-2 s later; SIGSTOP until it is replaced, or until the round is over.

What nobody needs at the moment can be frozen without harm, therefore a freeze of a forkserver or of the store comes with
the kill of a sidecar, and that of a shim with the kill of its rank.
"""
TARGETS = ("target rank", "source rank", "sidecar", "forkserver", "shim", "store")
ALL: tuple[tuple[FaultKind, str], ...] = (*((k, t) for k in FAULTS for t in TARGETS), ("pause", "supervisor"))
DECK = [pair for pair in ALL if os.environ.get("CHAOS_ONLY", "") in " ".join(pair)]

TRAINER = f"""
import json, os, random, time
import torch, replicas

out = os.environ["OUT"]
log = open(out + "/trainer-0.jsonl", "a", buffering=1)
def tell(**what):
    log.write(json.dumps({{"pid": os.getpid(), "at": time.monotonic(), **what}}) + "\\n")
pause = random.Random(os.getpid())
with replicas.join("policy") as channel:
    while not os.path.exists(out + "/stop"):
        stamp = time.monotonic_ns() // 1000
        weights = {{"a": torch.full((300_000,), stamp), "b": torch.full((7, 11), stamp)}}
        tell(began=stamp)
        try:
            receipt = channel.publish(weights, meta={{"stamp": stamp}}, deadline={DEADLINE_S}).wait()
            tell(ended=stamp, version=receipt.version, lost=list(receipt.lost))
        except replicas.errors.Fenced:
            raise
        except replicas.errors.ReplicasError as error:
            tell(ended=stamp, error=type(error).__name__, text=str(error))
        time.sleep(pause.uniform(0.0, 0.1))
"""

TARGET = """
import json, os, time
import replicas

log = open(os.environ["OUT"] + f"/rollout-{os.environ['REPLICA_ID']}.jsonl", "a", buffering=1)
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            values = {int(v) for _, t in update for v in (t.min(), t.max())}
        log.write(json.dumps({"pid": os.getpid(), "at": time.monotonic(), "version": update.version,
                              "stamp": update.meta["stamp"], "values": sorted(values)}) + "\\n")
"""


def chaos_config(folder: Path) -> str:
    """TOML of the run, whose ranks write under ``folder``."""
    (folder / "trainer.py").write_text(TRAINER)
    (folder / "target.py").write_text(TARGET)
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


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


@dataclass(frozen=True)
class Fault:
    kind: FaultKind
    target: str
    delay_s: float
    pause_s: float

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

    # ------------------------------------------------------------ facts

    def replicas(self) -> dict[str, ReplicaStatus]:
        return {one.name: one for group in self.run.status().groups for one in group.replicas}

    def trainer(self) -> list[dict[str, Any]]:
        return lines(self.out / "trainer-0.jsonl")

    def target(self, replica: int) -> list[dict[str, Any]]:
        return lines(self.out / f"rollout-{replica}.jsonl")

    def decided(self) -> list[int]:
        """Every version that was ever committed, in order."""
        return [line["version"] for line in lines(self.run.state_dir / "decisions.jsonl")]

    def page(self, name: str) -> tuple[int, str]:
        """Status and text of a control page."""
        try:
            with urllib.request.urlopen(f"http://{self.run.endpoint()}/{name}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over the series with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        rows = [row for row in self.page("metrics")[1].splitlines() if row.startswith(name + "{")]
        return sum(float(row.rpartition(" ")[2]) for row in rows if all(label in row for label in wanted))

    # ------------------------------------------------------------ faults

    def wait_for_publish(self) -> None:
        """Until a publish begins that had not begun before."""
        before = len(self.trainer())
        eventually(lambda: any("began" in line for line in self.trainer()[before:]), "a publish", timeout_s=30)

    def choose(self, fault: Fault, spared: str = "") -> Victim:
        """A process of this run that the fault may hit, once there is one, not of the replica ``spared``."""
        return eventually(lambda: self._choose(fault, spared), f"a {fault.target} to {fault.kind}", timeout_s=20)  # type: ignore[no-any-return]  # a true value of _choose

    def _choose(self, fault: Fault, spared: str) -> Victim | None:
        if fault.target == "supervisor":
            return Victim(self.run.pid)
        groups = {"source rank": ["trainer"], "target rank": ["rollout"], "shim": ["rollout"]}
        allowed = groups.get(fault.target, ["trainer", "rollout"])
        found = {name: one.pid or 0 for name, one in self.replicas().items() if one.group in allowed and name != spared}
        if not found:
            return None
        name = self._rng.choice(sorted(found))
        rank, shim, freezes = found[name], _parent(found[name]), fault.kind == "freeze"
        if not rank or not alive(rank):
            return None
        servers = [pid for pid in self._children(shim) if "sidecar.forkserver" in self._processes.get(pid, "")]
        sidecars = sorted(child for server in servers for child in self._children(server))
        if not sidecars:
            return None
        sidecar = self._rng.choice(sidecars)
        return {
            "source rank": Victim(rank, name, fault.kind != "pause"),
            "target rank": Victim(rank, name, fault.kind != "pause"),
            "sidecar": Victim(sidecar, name),
            "forkserver": Victim(servers[0], name, also=sidecar if freezes else 0),
            "shim": Victim(shim, name, fault.kind != "pause", rank if freezes else 0),
            "store": Victim(self.run.find("store_process"), also=sidecar if freezes else 0),
        }[fault.target]

    def _children(self, pid: int) -> list[int]:
        self._processes = self.run.processes()
        return [child for child in self._processes if _parent(child) == pid]

    @contextmanager
    def hit(self, fault: Fault, victim: Victim) -> Iterator[None]:
        """Do it; whatever is still stopped at the end of the block goes on then."""
        with self._opened(victim.pid) as pidfd:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            try:
                if victim.also:
                    with self._opened(victim.also) as also:
                        signal.pidfd_send_signal(also, signal.SIGKILL)
                if fault.kind == "pause":
                    time.sleep(fault.pause_s)  # the fault itself, not a wait for anything
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                yield
            finally:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    @contextmanager
    def _opened(self, pid: int) -> Iterator[int]:
        """A pidfd of a process that is certainly of this run."""
        pidfd = os.pidfd_open(pid)
        try:
            if pid != self.run.pid and pid not in self.run.processes():
                raise ProcessLookupError(f"process {pid} is not one of this run any more")
            yield pidfd
        finally:
            os.close(pidfd)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0

"""The run under chaos: its config, its processes, what shows of it outside, and the
hands that reach into it."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicas.status import ReplicaStatus
from tests.chaos.anatomy import Anatomy, Unfinished
from tests.chaos.programs.guest import Guest
from tests.chaos.syncs.gateway import Gateway
from tests.chaos.syncs.moments import moments_of
from tests.chaos.written import GUEST
from tests.support.runs import Run, running
from tests.support.waits import eventually

__all__ = ["DEADLINE_S", "GUEST", "LEASE_S", "Shape", "SyncWorld", "Tail", "open_world"]

DEADLINE_S = 8.0
LEASE_S = 4.0
LOAD_DEADLINE_S = 15.0
"""More than a replica needs to be ready again, on a machine that is busy with other
things, too."""
PROGRAMS = Path(__file__).parents[1] / "programs"
HOLDS = {"serve-1": 1.0, GUEST: 2.5}
"""Slow readers: up to how many seconds these keep some updates open, and then read them
again."""
SLOTS = 3
"""So many that a reader which keeps one of them open holds up no publish."""


@dataclass(frozen=True)
class Shape:
    """What a run is made of. ``torchrun``: the trainer and one group of targets have
    two ranks under torchrun each.

    ``transport``: of weights; ``auto`` maps them, as all are on one host.
    """

    torchrun: bool
    source_ranks: str = "leader"
    transport: str = "auto"

    @property
    def moments(self) -> tuple[str, ...]:
        """Of weights."""
        return moments_of(self.transport, parts=self.source_ranks == "all")

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each replica, by ``group-replica``."""
        if self.torchrun:
            return {"trainer-0": 2, "rollout-0": 2, "serve-0": 1, "serve-1": 1}
        return {"trainer-0": 1, "serve-0": 1, "serve-1": 1}

    @property
    def targets(self) -> list[str]:
        return [name for name in self.sizes if not name.startswith("trainer")]

    @property
    def peers(self) -> list[str]:
        return [name for name in self.sizes if not (self.torchrun and name.startswith("trainer"))]

    def env(self, folder: Path) -> dict[str, str]:
        """What the programs, which write into ``folder``, are told."""
        return {
            "CHAOS_OUT": str(folder),
            "CHAOS_PEERS": " ".join(self.peers),
            "CHAOS_SOURCE_RANKS": self.source_ranks,
            "CHAOS_HOLDS": " ".join(f"{name}={seconds}" for name, seconds in HOLDS.items()),
            "OMP_NUM_THREADS": "1",
        }

    def config(self, folder: Path) -> str:
        """TOML of the run."""
        env = self.env(folder)
        common = f"""env = {{ {", ".join(f'{key} = "{value}"' for key, value in env.items())} }}
stop_timeout = "1s"
restart = {{ policy = "always", max_restarts = 100000, no_progress_cycles = 0, initial_delay = "50ms", max_delay = "100ms" }}
health = {{ heartbeat_timeout = "{LEASE_S:g}s", load_deadline = "{LOAD_DEADLINE_S:g}s" }}
"""
        double = 'launcher = "torchrun"\nnproc_per_node = 2\n' if self.torchrun else 'launcher = "exec"\n'
        groups = f'[groups.trainer]\ncommand = ["{PROGRAMS}/trainer.py"]\n{double}{common}'
        if self.torchrun:
            groups += f'[groups.rollout]\ncommand = ["{PROGRAMS}/server.py"]\n{double}{common}'
        groups += f'[groups.serve]\ncommand = ["{PROGRAMS}/server.py"]\nlauncher = "exec"\nreplicas = 2\n{common}'
        lease = f'health = {{ heartbeat_timeout = "{LEASE_S:g}s" }}'
        groups += f'[groups.guest]\nlauncher = "external"\nmin_ready = 0\n{lease}\n'
        targets = '["rollout", "serve", "guest"]' if self.torchrun else '["serve", "guest"]'
        peers = '["rollout", "serve"]' if self.torchrun else '["trainer", "serve"]'
        return f"""{groups}
[channels.policy]
sources = [{{ group = "trainer", ranks = "{self.source_ranks}" }}]
targets = {targets}
deadline = "{DEADLINE_S:g}s"
transport = "{self.transport}"
slots = {SLOTS}
[channels.outer]
peers = {peers}
deadline = "{DEADLINE_S:g}s"
"""


@contextmanager
def open_world(folder: Path, shape: Shape) -> Iterator[SyncWorld]:
    """A run, and everything of it gone at the end of the block."""
    out = folder / "out"
    out.mkdir()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.chaos.syncs.supervisor_under_test", str(theirs.fileno())]
    command.append(str(out / "decisions.jsonl"))
    endpoint = folder / ".replicas" / "chaos" / "endpoint.json"

    def target() -> str:
        return str(json.loads(endpoint.read_text())["endpoint"]) if endpoint.exists() else ""

    with closing(ours), closing(theirs), Gateway([*shape.sizes, GUEST], target) as gateway:
        ways = {name: proxy.endpoint for name, proxy in gateway.proxies.items()}
        (out / "proxies.json").write_text(json.dumps(ways))
        with running(folder, shape.config(out), name="chaos", command=command, pass_fds=[theirs.fileno()]) as run:
            theirs.close()
            group, _, replica = GUEST.partition("-")
            guest = Guest(run, group, int(replica), shape.env(out))
            with closing(guest):
                yield SyncWorld(run, shape, out, gateway, ours, guest)


class SyncWorld:
    """A run and what shows of it."""

    def __init__(
        self, run: Run, shape: Shape, out: Path, gateway: Gateway, control: socket.socket, guest: Guest
    ) -> None:
        self.run = run
        self.guest = guest
        self.shape = shape
        self.out = out
        self.gateway = gateway
        self._control = control
        self._orders = 0
        self._tails: dict[Path, Tail] = {}

    # ------------------------------------------------------------ what shows

    @property
    def deadline_s(self) -> float:
        return DEADLINE_S

    @property
    def peers(self) -> list[str]:
        return self.shape.peers

    def sources(self) -> list[str]:
        """The logs of everyone who publishes."""
        return list(self.logs(["trainer-0"]))

    @staticmethod
    def runs(name: str, pid: int) -> bool:
        """Whether the process that wrote this pid into its log still runs."""
        return Path(f"/proc/{pid}").exists()

    def replicas(self) -> dict[str, ReplicaStatus]:
        """Those that the supervisor starts, by ``group-replica``."""
        groups = [group for group in self.run.status().groups if group.launcher != "external"]
        return {one.name.replace("/", "-"): one for group in groups for one in group.replicas}

    def anatomy(self, timeout_s: float = 20.0) -> Anatomy:
        """All processes of the run, once they are all there."""

        def look() -> Anatomy | None:
            try:
                return Anatomy(self.run, self.replicas(), self.guest.pids())
            except Unfinished:
                return None

        found: Anatomy = eventually(look, "every process of the run", timeout_s=timeout_s)
        return found

    def log(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of ``out/name.jsonl`` so far, such as ``trainer-0.1`` (rank
        1) or ``serve-0.0.outer``."""
        return self._tail(self.out / f"{name}.jsonl")

    def _tail(self, path: Path) -> list[dict[str, Any]]:
        return self._tails.setdefault(path, Tail(path)).lines()

    def targets(self) -> dict[str, list[dict[str, Any]]]:
        """The logs of everyone who must serve the newest weights."""
        return self.logs(self.shape.targets) | {f"{GUEST}.0": self.log(f"{GUEST}.0")}

    def logs(self, names: list[str]) -> dict[str, list[dict[str, Any]]]:
        """Of each rank of these replicas."""
        ranks = [f"{name}.{rank}" for name in names for rank in range(self.shape.sizes[name])]
        return {name: self.log(name) for name in ranks}

    def decided(self) -> list[int]:
        """Every version of the weights that was ever committed, in order."""
        lines = self._tail(self.out / "decisions.jsonl")
        return [line["version"] for line in lines if line["channel"] == "policy" and line["kind"] == "commit"]

    def page(self, name: str) -> tuple[int, str]:
        """Status and text of a control page."""
        host, _, port = self.run.endpoint().rpartition(":")
        with closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
            connection.request("GET", f"/{name}")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def token(self) -> str:
        return (self.run.state_dir / "token").read_text().strip()

    # ------------------------------------------------------------ hands

    def arm(self, channel: str, moment: str, delay_s: float, deeds: list[dict[str, Any]]) -> int:
        """Have the deeds done at the moment; the order's number."""
        self._orders += 1
        order = {"arm": self._orders, "channel": channel, "moment": moment, "delay_s": delay_s, "deeds": deeds}
        self._control.send(json.dumps(order).encode())
        assert self._answer("armed", 10.0) == {"armed": self._orders}
        return self._orders

    def done(self, number: int, patience_s: float) -> dict[str, Any]:
        """What was done, at the moment or, when it did not come for so long, now
        (``landed`` is empty then)."""
        answer = self._answer("done", patience_s)
        late = answer is None
        if answer is None:
            self._control.send(json.dumps({"fire": number}).encode())
            answer = self._answer("done", 10.0)
        assert answer is not None, "the supervisor does not answer"
        assert answer["done"] == number, (answer, number)
        return {**answer, "late": late}

    def refusals(self) -> dict[str, int]:
        """How many connections and messages were turned away, by reason."""
        self._control.send(b'{"ask": "refusals"}')
        answer = self._answer("refusals", 10.0)
        assert answer is not None, "the supervisor does not answer"
        return dict(answer["refusals"])

    def _answer(self, kind: str, timeout_s: float) -> dict[str, Any] | None:
        self._control.settimeout(max(0.01, timeout_s))
        try:
            answer: dict[str, Any] = json.loads(self._control.recv(65536))
        except TimeoutError:
            return None
        assert kind in answer, answer
        return answer

    def signal(self, pid: int, signum: int) -> None:
        """By a pidfd, and only a process that is certainly of this run; nothing when it
        is gone."""
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                if pid == self.run.pid or pid in self.run.processes():
                    signal.pidfd_send_signal(pidfd, signum)
            finally:
                os.close(pidfd)

    def unlimit(self) -> None:
        """No process of the run has a memory limit any more."""
        for pid in self.run.processes():
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Tail:
    """The lines of a growing file of JSON lines, each parsed once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._lines: list[dict[str, Any]] = []

    def lines(self) -> list[dict[str, Any]]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._at += len(whole) + len(newline)
            self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines

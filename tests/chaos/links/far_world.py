"""A world of several hosts on a switch: the coordinator on A, a trainer on B, two
targets each on C and D.

Or, for collectives alone, a peer each on B, C and D. All of them run by themselves
until the end, write down what they see, and join again when they are fenced. A process
that ends is noted, and started again by :meth:`FarWorld.tend`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicas import environ
from tests.chaos.links.far_coordinator import PORT
from tests.chaos.syncs.rig import Tail
from tests.chaos.written import Line
from tests.support.machine.networks import Machine
from tests.support.machine.switch import MBIT_NBYTES, Shape, Switch, switched_hosts
from tests.support.runs import ROOT
from tests.support.waits import eventually

__all__ = ["PLACES", "A", "B", "C", "D", "FarWorld", "Scene", "far_world"]

A, B, C, D = range(4)
PROGRAMS = Path(__file__).parents[1] / "programs"
START_S = 200.0
PLACES = {"trainer-0": B, "serve-0": C, "serve-1": C, "serve-2": D, "serve-3": D}
LAN = Shape(rate_nbytes_s=200 * MBIT_NBYTES)


@dataclass(frozen=True)
class Scene:
    """What a world is made of. ``places``: the host of each replica, by
    ``group-replica``."""

    nbytes: int = 32 << 20
    deadline_s: float = 40.0
    lease_s: float = 12.0
    shape: Shape = LAN
    places: dict[str, int] = field(default_factory=lambda: dict(PLACES))
    peers: tuple[str, ...] = ()
    on_lost: str = "drop"
    transport: str = "auto"

    @property
    def channels(self) -> dict[str, Any]:
        """The config of ``policy``, and of ``outer`` where there are peers."""
        common = {"deadline": f"{self.deadline_s:g}s", "on_lost": self.on_lost}
        found: dict[str, Any] = {
            "policy": {"sources": ["trainer"], "targets": ["serve"], "slots": 3, "transport": self.transport, **common}
        }
        if self.peers:
            found["outer"] = {"peers": sorted({name.partition("-")[0] for name in self.peers}), **common}
        return found

    @property
    def groups(self) -> dict[str, int]:
        groups = [name.partition("-")[0] for name in self.places]
        return {group: groups.count(group) for group in groups}

    def on(self, *hosts: int) -> list[str]:
        """The targets on these hosts."""
        return [name for name, host in self.places.items() if host in hosts and not name.startswith("trainer")]


class _Process:
    """A program on a host, which may be started many times."""

    def __init__(self, name: str, host: Machine, command: list[str], env: dict[str, str], out: Path) -> None:
        self.name = name
        self.host = host
        self.log = out / f"{name}.log"
        self.generation = 0
        self._command = host.command(sys.executable, *command)
        self._env = env
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """After the one before has ended, if there was one."""
        self.close()
        self.generation += 1
        env = {**os.environ, **self._env, environ.GENERATION: str(self.generation)}
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self._command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    @property
    def ended(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self.popen is not None
        return self.popen.poll()

    @property
    def pid(self) -> int:
        """As it is seen from here."""
        assert self.popen is not None
        return self.host.pid_of(self.popen.pid)

    def line(self, timeout_s: float) -> bytes:
        """What it prints next."""
        assert self.popen is not None
        assert self.popen.stdout is not None
        assert select.select([self.popen.stdout], [], [], timeout_s)[0], f"{self.name} says nothing for {timeout_s} s"
        found = self.popen.stdout.readline()
        assert found, f"{self.name} has ended: {self.log.read_text()[-2000:]}"
        return found

    def close(self) -> None:
        if self.popen is not None:
            self.popen.kill()
            with self.popen:  # waits for it, and closes its pipes
                pass


class FarWorld:
    """The world from the test's side. What its programs write shows here as
    :class:`tests.chaos.written.Writes` says."""

    def __init__(self, scene: Scene, switch: Switch, out: Path) -> None:
        self.scene = scene
        self.switch = switch
        self.out = out
        self.deadline_s = scene.deadline_s
        self.peers = scene.peers
        self._tails: dict[str, Tail] = {}
        self.deaths: list[tuple[float, str, int]] = []
        """When, who and how: each process that ended unasked."""
        given = {
            "channels": scene.channels,
            "groups": scene.groups,
            "lease_s": scene.lease_s,
            "host": switch.hosts[A].address,
            "out": str(out),
        }
        program = ["-m", "tests.chaos.links.far_coordinator", json.dumps(given)]
        self.coordinator = _Process("coordinator", switch.hosts[A], program, {}, out)
        self.members = {name: self._member(name, host) for name, host in scene.places.items()}

    def _member(self, name: str, host: int) -> _Process:
        group, _, replica = name.partition("-")
        env = {
            "CHAOS_OUT": str(self.out),
            "CHAOS_NBYTES": str(self.scene.nbytes),
            "CHAOS_PEERS": " ".join(self.scene.peers),
            "CHAOS_REJOINS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            environ.TOKEN_FILE: str(self.out / "token"),
            environ.GROUP: group,
            environ.REPLICA: replica,
        }
        program = PROGRAMS / ("trainer.py" if group == "trainer" else "server.py")
        return _Process(name, self.switch.hosts[host], [str(program)], env, self.out)

    def start(self) -> None:
        endpoint = f"{self.switch.hosts[A].address}:{PORT}"
        (self.out / "proxies.json").write_text(json.dumps(dict.fromkeys(self.scene.places, endpoint)))
        self.start_coordinator()
        for member in self.members.values():
            member.start()

    def start_coordinator(self) -> None:
        self.coordinator.start()
        assert self.coordinator.line(START_S) == b"serves\n"

    def tend(self) -> None:
        """Start again who has ended."""
        for name, member in self.members.items():
            code = member.ended
            if code is not None:
                self.deaths.append((time.monotonic(), name, code))
                member.start()

    def kill(self, *names: str) -> None:
        """SIGKILL to these members, which are started again; their deaths are asked
        for."""
        for name in names:
            os.kill(self.members[name].pid, signal.SIGKILL)
        for name in names:
            self.members[name].start()

    def send(self, host: int, signum: int) -> None:
        """To all processes on a host but those that hold it."""
        machine = self.switch.hosts[host]
        for pid in {*machine.processes()} - {*machine.processes("sh"), *machine.processes("cat")}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def heal(self) -> None:
        """All links are as they were, nobody is stopped, and there is a coordinator."""
        self.switch.heal()
        self.switch.shape_all(self.scene.shape)
        for host in range(len(self.switch.hosts)):
            self.send(host, signal.SIGCONT)
        if self.coordinator.ended is not None:
            self.start_coordinator()

    def close(self) -> None:
        for process in (*self.members.values(), self.coordinator):
            process.close()

    # ------------------------------------------------------------ what shows

    def status(self) -> dict[str, Any]:
        """What the coordinator says."""
        assert self.coordinator.popen is not None
        assert self.coordinator.popen.stdin is not None
        self.coordinator.popen.stdin.write(b"\n")
        self.coordinator.popen.stdin.flush()
        found: dict[str, Any] = json.loads(self.coordinator.line(20.0))
        return found

    def standings(self, channel: str = "policy") -> dict[str, str]:
        """The state of each member that the coordinator knows, by ``group-replica``."""
        members = self.status()["channels"][channel]["members"]
        return {"-".join(name.split("/")[:2]): one["state"] for name, one in members.items()}

    def log(self, name: str) -> list[Line]:
        return self._tails.setdefault(name, Tail(self.out / f"{name}.jsonl")).lines()

    def sources(self) -> list[str]:
        return [f"{name}.0" for name in self.scene.places if name.startswith("trainer")]

    def targets(self) -> dict[str, list[Line]]:
        return {f"{name}.0": self.log(f"{name}.0") for name in self.scene.on(B, C, D)}

    def decided(self) -> list[int]:
        lines = self.log("decisions")
        return [line["version"] for line in lines if line["channel"] == "policy" and line["kind"] == "commit"]

    def runs(self, name: str, pid: int) -> bool:
        """``pid``: in the namespace of its host, where no other process gets it again
        so soon."""
        member = self.members[name.partition(".")[0]]
        lines = self.log(name)
        return member.ended is None and lines[-1]["pid"] == pid

    # ---------------------------------------------------------- what has happened since

    def commits(self, since: float) -> list[Line]:
        """Ends of publishes that were committed after this time."""
        return [
            line for line in self.log("trainer-0.0") if "ended" in line and "version" in line and line["at"] > since
        ]

    def failures(self, since: float) -> list[Line]:
        return [line for line in self.log("trainer-0.0") if "error" in line and line["at"] > since]

    def served(self, name: str, version: int) -> float:
        """When this target first served that version or a newer one; 0 if it has
        not."""
        lines = self.log(f"{name}.0")
        return next((line["at"] for line in lines if "stamp" in line and line.get("version", 0) >= version), 0.0)

    def joined(self, name: str, since: float) -> bool:
        """Whether this target has joined again since then."""
        return any("joined" in line and line["at"] > since for line in self.log(f"{name}.0"))

    def fenced(self, since: float) -> set[str]:
        """Who was told so."""
        names = [*self.scene.places, *(f"{peer}.outer" for peer in self.scene.peers)]
        logs = {
            name: self.log(name.replace(".outer", "") + ".0" + ".outer" * name.endswith(".outer")) for name in names
        }
        return {
            name
            for name, lines in logs.items()
            if any("Fenced" in (line.get("apart"), line.get("error")) and line["at"] > since for line in lines)
        }

    def whole_at(self, since: float) -> float:
        """When, after this time, all had served a version of which nobody was missing,
        and all peers had met; 0: not yet."""
        found: list[float] = [self._met_at(since)] if self.peers else []
        for line in self.commits(since):
            if not line["lost"]:
                served = [self.served(name, line["version"]) for name in self.scene.on(B, C, D)]
                found.append(max(served) if all(served) else 0.0)
                break
        else:
            return 0.0
        return max(*found, since) if all(found) else 0.0

    def _met_at(self, since: float) -> float:
        return min((at for at, _, members in self.reduced(since) if set(members) == set(self.peers)), default=0.0)

    def story(self, since: float) -> str:
        """What the programs said from a little before this time on, by seconds from it,
        and what the coordinator says now."""
        names = [*(f"{name}.0" for name in self.scene.places), *(f"{peer}.0.outer" for peer in self.peers)]
        lines = [{**line, "from": name} for name in names for line in self.log(name) if line["at"] > since - 3.0]
        telling = {"ended", "error", "members", "apart", "joined", "version"}
        dull = ("at", "pid", "generation", "values", "touched", "unanimous", "mean_step", "step", "ended", "stamp")
        rows = [
            f"{line['at'] - since:7.1f} " + " ".join(f"{key}={value}" for key, value in line.items() if key not in dull)
            for line in sorted(lines, key=lambda line: float(line["at"]))
            if telling & line.keys()
        ]
        shown = rows if len(rows) < 160 else [*rows[:120], "...", *rows[-40:]]
        events = [
            f"{line['at'] - since:7.1f} {line}"
            for line in self.log("events")
            if line["at"] > since - 3.0 and line["event"] not in ("OperationEnded", "ReplicaLoaded", "EpochStarted")
        ]
        return "\n".join(
            ("", *shown, "events:", *events[:60], f"deaths: {self.deaths}", f"now: {self.status()['channels']}")
        )

    def reduced(self, since: float) -> list[tuple[float, str, list[str]]]:
        """When, who and with whom: collectives that began after this time and
        succeeded, by time."""
        found = [
            (line["at"], peer, line["members"])
            for peer in self.scene.peers
            for line in self.log(f"{peer}.0.outer")
            if "members" in line and line["at"] - line["seconds"] > since
        ]
        return sorted(found)


@contextmanager
def far_world(folder: Path, scene: Scene) -> Iterator[FarWorld]:
    """A world in which everybody has joined and a version is served by all; nothing of
    it is left after the block."""
    out = folder / "out"
    out.mkdir(parents=True)
    with switched_hosts(4) as switch, ExitStack() as stack:
        world = FarWorld(scene, switch, out)
        stack.callback(world.close)
        world.start()

        def begun() -> bool:
            world.tend()
            assert len(world.deaths) < 5, world.deaths
            peers = set(scene.peers)
            met = not peers or any(set(members) == peers for _, _, members in world.reduced(0.0))
            return met and all(world.served(name, 1) for name in scene.on(B, C, D))

        try:
            eventually(begun, "everybody serves a version", timeout_s=START_S)
        except AssertionError:
            print(world.story(time.monotonic() - START_S))
            raise
        switch.shape_all(scene.shape)
        yield world

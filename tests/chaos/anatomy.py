"""The processes of a run by what they are, from the process table."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from replicas.status import ReplicaStatus
from tests.support.processes import parents, sidecars_of
from tests.support.runs import Run

__all__ = ["Anatomy", "Body", "Unfinished"]


class Unfinished(Exception):
    """Not everything that a run consists of is there at the moment."""


@dataclass
class Body:
    """The processes of one replica, 0 for what there is none of. ``launcher``:
    torchrun's; ``ranks`` in order."""

    name: str
    shim: int
    launcher: int
    ranks: list[int]
    pump: int = 0
    sidecars: list[int] = field(default_factory=list)
    carriers: list[int] = field(default_factory=list)

    @property
    def pids(self) -> set[int]:
        """All of them."""
        return {self.shim, self.launcher, self.pump, *self.ranks, *self.sidecars, *self.carriers} - {0}


class Anatomy:
    """A picture of the run; ``orphans`` are processes of it that have no place in the
    picture.

    :param guests: processes that are known to be there besides.
    :param whole: False leaves out replicas of which something is missing.
    :raises Unfinished: some part is missing.
    """

    def __init__(
        self, run: Run, replicas: Mapping[str, ReplicaStatus], guests: Set[int], *, whole: bool = True
    ) -> None:
        lines = run.processes()
        up = parents()
        below: dict[int, list[int]] = {}
        for pid in sorted(lines):
            below.setdefault(up.get(pid, 0), []).append(pid)
        own = below.get(run.pid, [])
        self.store = next((pid for pid in own if "store_process" in lines[pid]), 0)
        self.agent = next((pid for pid in own if "supervisor.agent.local" in lines[pid]), 0)
        started = below.get(self.agent, [])
        self.forkserver = next((pid for pid in started if "sidecar.forkserver" in lines[pid]), 0)
        self.bodies: dict[str, Body] = {}
        for name, one in replicas.items():
            try:
                self.bodies[name] = _body(name, one.pid, up, below, lines)
            except Unfinished:
                if whole:
                    raise
        known = {run.pid, self.store, self.agent, self.forkserver, *guests}
        for body in self.bodies.values():
            known |= body.pids
        known |= {pid for guest in guests for pid in _carriers(guest, below, lines)}
        self.orphans = {pid: line for pid, line in lines.items() if pid not in known}
        for name, pid in (("store", self.store), ("agent", self.agent)):
            if not pid:
                raise Unfinished(f"no {name}")


def _body(
    name: str, main: int | None, up: Mapping[int, int], below: Mapping[int, list[int]], lines: Mapping[int, str]
) -> Body:
    if main is None or main not in lines:
        raise Unfinished(f"{name} has no main process")
    shim = up.get(main, 0)
    pump = next((pid for pid in below.get(shim, []) if lines[pid].startswith("replicas log pump")), 0)
    launcher = main if "supervisor.shim.launcher" in lines[main] else 0
    ranks = sorted(below.get(launcher, []), key=_rank) if launcher else [main]
    if not ranks:
        raise Unfinished(f"{name} has no ranks")
    carriers = [pid for rank in ranks for pid in _carriers(rank, below, lines)]
    return Body(name, shim, launcher, ranks, pump, sidecars_of(main), carriers)


def _carriers(rank: int, below: Mapping[int, list[int]], lines: Mapping[int, str]) -> list[int]:
    return [pid for pid in below.get(rank, []) if "replicas.carry.carrier" in lines[pid]]


def _rank(pid: int) -> int:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return -1
    return int(next((entry[5:] for entry in entries if entry.startswith(b"RANK=")), b"-1"))

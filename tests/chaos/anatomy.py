"""The processes of a run by what they are, from the process table."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from replicas.status import ReplicaStatus
from tests.support.processes import parents
from tests.support.runs import Run

__all__ = ["Anatomy", "Body", "Unfinished"]


class Unfinished(Exception):
    """Not everything that a run consists of is there at the moment."""


@dataclass
class Body:
    """The processes of one replica. ``launcher``: torchrun's, 0 where there is none; ``ranks`` in order."""

    name: str
    shim: int
    launcher: int
    ranks: list[int]
    forkserver: int
    sidecars: list[int] = field(default_factory=list)


class Anatomy:
    """A picture of the run; ``orphans`` are processes of it that have no place in the picture.

    :raises Unfinished: some part is missing.
    """

    def __init__(self, run: Run, replicas: Mapping[str, ReplicaStatus], guests: Set[int]) -> None:
        lines = run.processes()
        up = parents()
        below: dict[int, list[int]] = {}
        for pid in sorted(lines):
            below.setdefault(up.get(pid, 0), []).append(pid)
        self.store = next((pid for pid in below.get(run.pid, []) if "store_process" in lines[pid]), 0)
        self.bodies = {name: _body(name, one.pid, up, below, lines) for name, one in replicas.items()}
        known = {run.pid, self.store, *guests}
        for body in self.bodies.values():
            known |= {body.shim, body.launcher, body.forkserver, *body.ranks, *body.sidecars}
        self.orphans = {pid: line for pid, line in lines.items() if pid not in known}
        if not self.store:
            raise Unfinished("no store")


def _body(
    name: str, main: int | None, up: Mapping[int, int], below: Mapping[int, list[int]], lines: Mapping[int, str]
) -> Body:
    if main is None or main not in lines:
        raise Unfinished(f"{name} has no main process")
    shim = up.get(main, 0)
    server = next((pid for pid in below.get(shim, []) if "sidecar.forkserver" in lines[pid]), 0)
    if not server:
        raise Unfinished(f"{name} has no forkserver")
    launcher = main if "supervisor.launcher" in lines[main] else 0
    ranks = sorted(below.get(launcher, []), key=_rank) if launcher else [main]
    if not ranks:
        raise Unfinished(f"{name} has no ranks")
    return Body(name, shim, launcher, ranks, server, below.get(server, []))


def _rank(pid: int) -> int:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return -1
    return int(next((entry[5:] for entry in entries if entry.startswith(b"RANK=")), b"-1"))

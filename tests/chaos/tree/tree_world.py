"""The supervisor alone: replicas without torch or channels, on a disk of their own,
under a clock that can be set.

Supervisors come and go in it, on the same state folder: each is a
:class:`tests.support.runs.Run` with a mark of its own.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicas.cli.find_run import RunAddress
from replicas.control.commands import Order
from replicas.errors import Disconnected
from replicas.status import ReplicaStatus
from tests.chaos.anatomy import Anatomy, Unfinished
from tests.chaos.syncs.rig import Tail
from tests.support.machine.disks import small_disk
from tests.support.processes import start_time
from tests.support.runs import Run, processes_marked
from tests.support.waits import eventually

__all__ = [
    "HEARTBEAT_S",
    "LOG_NBYTES",
    "MAX_RESTARTS",
    "Picture",
    "Process",
    "TreeShape",
    "TreeWorld",
    "alive",
    "open_tree",
]

HEARTBEAT_S = 5.0
"""After so much silence a shim is killed; long enough for a machine that is busy with
other things."""
MAX_RESTARTS = 100_000
LOG_NBYTES = 1 << 20
KEPT_LOGS = 16
DISK_NBYTES = 192 << 20
START_S = 30.0
PROGRAMS = Path(__file__).parents[1] / "programs"
KINDS = {"plain": "plain", "loud": "plain", "deaf": "deaf", "breeds": "breeds", "ranks": "breeds"}
"""What the programs of each group are (:mod:`tests.chaos.programs.crew`)."""


@dataclass(frozen=True)
class TreeShape:
    """``torchrun``: there is a group ``ranks`` of two ranks under torchrun too."""

    torchrun: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each replica, by ``group-replica``."""
        exec_ones = {"plain-0": 1, "plain-1": 1, "loud-0": 1, "deaf-0": 1, "breeds-0": 1}
        return exec_ones | ({"ranks-0": 2} if self.torchrun else {})

    @property
    def groups(self) -> list[str]:
        return [*dict.fromkeys(name.partition("-")[0] for name in self.sizes)]

    def config(self, out: Path) -> str:
        """TOML of the groups."""
        text = ""
        for group in self.groups:
            command = [sys.executable, "-I", "-S", f"{PROGRAMS}/crew.py", KINDS[group], str(out)]
            replicas = sum(name.startswith(f"{group}-") for name in self.sizes)
            launcher = 'launcher = "torchrun"\nnproc_per_node = 2' if group == "ranks" else 'launcher = "exec"'
            text += f"""[groups.{group}]
command = {json.dumps(command)}
{launcher}
replicas = {replicas}
stop_timeout = "1s"
restart = {{ policy = "always", max_restarts = {MAX_RESTARTS}, no_progress_cycles = 0, window = "24h", \
initial_delay = "50ms", max_delay = "100ms" }}
health = {{ heartbeat_timeout = "{HEARTBEAT_S:g}s" }}
"""
        return text


Process = tuple[int, int]
"""Pid and start time: no other process has had both."""


class Picture(Anatomy):
    """All processes of a run. ``daemons``: by replica, what its present ranks have left
    to themselves.

    ``whole`` False: replicas of which something is missing may be left out.
    """

    def __init__(
        self, run: Run, replicas: dict[str, ReplicaStatus], daemons: dict[str, list[int]], *, whole: bool = True
    ) -> None:
        guests = {pid for pids in daemons.values() for pid in pids}
        super().__init__(run, replicas, guests, whole=whole)
        self.daemons = daemons
        self.supervisor = run.pid
        pids = {pid for name, body in self.bodies.items() for pid in (*body.pids, *daemons[name])}
        self.identities = {pid: start_time(pid) for pid in (run.pid, self.store, self.agent, *pids)}

    def all_of(self, name: str) -> set[Process]:
        """Every process of a replica, to be known again."""
        pids = (*self.bodies[name].pids, *self.daemons[name])
        return {(pid, began) for pid in pids if (began := self.identities[pid]) is not None}

    def everything(self) -> set[Process]:
        return {(pid, began) for pid, began in self.identities.items() if began is not None}


def alive(processes: Iterable[Process]) -> set[Process]:
    """Those of them that still are."""
    return {(pid, began) for pid, began in processes if start_time(pid) == began}


@contextmanager
def open_tree(folder: Path, shape: TreeShape) -> Iterator[TreeWorld]:
    """A world with a supervisor in it, and nothing of it left at the end of the
    block."""
    out = folder / "out"
    out.mkdir()
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / ".replicas", DISK_NBYTES))
        world = TreeWorld(folder, shape, out, disk=disk)
        stack.callback(world.close)
        world.start()
        yield world


class TreeWorld:
    """``run``: the present supervisor's. ``disk``: where the state lies, if that is a
    disk of its own."""

    def __init__(self, folder: Path, shape: TreeShape, out: Path, *, disk: bool) -> None:
        self.folder = folder
        self.shape = shape
        self.out = out
        self.disk = folder / ".replicas" if disk else None
        self.run: Run
        self.runs: list[Run] = []
        self.jumped = False
        self._clock = folder / "clock"
        self._clock.write_bytes(struct.pack("d", 0.0))
        self._tails: dict[Path, Tail] = {}

    def start(self) -> None:
        """Another supervisor for this state."""
        command = [sys.executable, "-m", "tests.chaos.tree.tree_supervisor", str(self._clock)]
        head = f'[logs]\nmax_size = "{LOG_NBYTES}B"\nkeep = {KEPT_LOGS}\n'
        self.run = Run(self.folder, self.shape.config(self.out), name="tree", head=self._head(head), command=command)
        self.runs.append(self.run)
        self.run.start()

    @staticmethod
    def _head(text: str) -> str:
        return f'[control]\nlisten = "127.0.0.1:0"\n{text}'

    def close(self) -> None:
        for run in self.runs:
            run.clean_up()

    def jump(self, seconds: float) -> None:
        """Set the supervisor's wall clock to another time, for good."""
        self.jumped = True
        with self._clock.open("r+b") as file:
            (wrong_s,) = struct.unpack("d", file.read(8))
            file.seek(0)
            file.write(struct.pack("d", wrong_s + seconds))

    def order(self, order: Order) -> None:
        """Hand in an order at the run's socket.

        :raises replicas.errors.ReplicasError: it was not carried out.
        """
        RunAddress(self.run.config).client().order(order)

    # ------------------------------------------------------------ what shows

    def replicas(self) -> dict[str, ReplicaStatus]:
        """By ``group-replica``."""
        return {one.name.replace("/", "-"): one for group in self.run.status().groups for one in group.replicas}

    def ports(self) -> list[int]:
        """Those of the run: control and store."""
        status = self.run.status()
        return [int(status.endpoint.rpartition(":")[2]), status.store.port]

    def processes(self) -> str:
        """For people: all of every supervisor's."""
        return "\n".join(f"{pid:8} {line}" for run in self.runs for pid, line in processes_marked(run.mark).items())

    def told(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank of ``group-replica`` has written down, over all its
        generations."""
        path = self.out / f"{name}.{rank}.jsonl"
        return self._tails.setdefault(path, Tail(path)).lines()

    def written(self, name: str, pid: int) -> int:
        """How many lines that very process says it has written to its log."""
        lines = [line for line in self.told(name) if "written" in line and line["pid"] == pid]
        return int(lines[-1]["written"]) if lines else 0

    def look(self, *, whole: bool = True) -> Picture | None:
        """Everything, if it is there and every program is up; with ``whole`` False what
        there is."""
        if not (self.run.state_dir / "endpoint.json").exists():
            return None
        try:
            replicas = self.replicas()
            if whole and set(replicas) != set(self.shape.sizes):
                return None
            daemons = {name: self._daemons(name, one.generation, whole=whole) for name, one in replicas.items()}
            picture = Picture(self.run, replicas, daemons, whole=whole)
        except (Unfinished, Disconnected):  # or a killed supervisor's endpoint file is still there
            return None
        if whole and any(len(body.ranks) != self.shape.sizes[name] for name, body in picture.bodies.items()):
            return None
        return picture

    def _daemons(self, name: str, generation: int, *, whole: bool) -> list[int]:
        found: list[int] = []
        for rank in range(self.shape.sizes[name]):
            ups = [line for line in self.told(name, rank) if "up" in line]
            if not ups or ups[-1]["generation"] != generation or start_time(ups[-1]["pid"]) is None:
                if whole:
                    raise Unfinished(f"rank {rank} of {name} is not up")
                continue
            found += ups[-1]["daemons"]
        return found

    def picture(self, timeout_s: float = START_S) -> Picture:
        try:
            found: Picture = eventually(self.look, "every process of the run", timeout_s=timeout_s)
        except AssertionError:
            self.explain()
            raise
        return found

    def explain(self) -> None:
        """For people: what the supervisor and its shims have said last."""
        print("", *list(self.run.said())[-30:], self.processes(), sep="\n")
        for path in sorted((self.run.state_dir / "logs").rglob("shim-*.log"), key=lambda p: p.stat().st_mtime)[-12:]:
            if text := path.read_text(errors="replace")[-1500:]:
                print(f"== {path}", text, sep="\n")

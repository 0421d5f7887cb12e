"""The invariants, checked on what the processes themselves wrote and on what the machine shows. Each line is read once.

The numbers are those of ARCHITECTURE.md.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicas.status import ReplicaStatus
from tests.chaos.anatomy import Anatomy
from tests.chaos.rig import DEADLINE_S, GUEST, SLOTS, World
from tests.support.memfds import mapped_anywhere, memories, ownerless
from tests.support.runs import eventually

__all__ = ["Invariants"]

MARGIN_S = 5.0 + 2.0 + 2.5
"""Beyond its deadline: 5 s for the coordinator's word, up to 2 s that its process may be stopped for, a busy machine."""
ALLOWED = {"PeersLost", "DeadlineExceeded", "OutcomeUnknown", "Busy", "Gone", "Disconnected", "NoCapacity", "SyncError"}
"""Errors that a fault may cause; any other is a bug of ours."""
SETTLE_S = 15.0
FDS_GROWTH = 30
STORE_KEYS = 600
MEMORIES = 3 * SLOTS
"""Buffers of one process: in its slots, left to readers, and spare."""

Line = dict[str, Any]


class Invariants:
    """``base``: the run when nothing had happened to it yet."""

    def __init__(self, world: World, base: Anatomy) -> None:
        self.world = world
        self._read: dict[str, int] = defaultdict(int)
        self._open: dict[str, Line] = {}
        self._verdicts: dict[int, dict[str, str]] = defaultdict(dict)
        self._failed: set[int] = set()
        self._stamps: dict[int, int] = {}
        self._last: dict[str, Line] = {}
        self._sequences: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._took_part: dict[int, list[str]] = {}
        self._decided: list[int] = []
        self._fds = {pid: _fds(pid) for body in base.bodies.values() for pid in body.ranks}
        self._typical_fds = max(self._fds.values())
        self._memory: set[int] = set()
        self.keys = 0
        self.fds = self._typical_fds

    def check(self, what: str) -> None:
        """Everything that the programs wrote since the last check."""
        self._publishes(what)
        self._weights(what)
        self._collectives(what)
        assert not (self.world.out / "trap").exists(), (what, "I7: something was unpickled")

    def _new(self, name: str) -> list[Line]:
        lines = self.world.log(name)
        fresh = lines[self._read[name] :]
        self._read[name] = len(lines)
        return fresh

    # ------------------------------------------------------------ I1

    def _publishes(self, what: str) -> None:
        """Each ended by its deadline, with a receipt or a typed error, the same on all ranks, unless its process died."""
        for rank in range(self.world.shape.sizes["trainer-0"]):
            name = f"trainer-0.{rank}"
            for line in self._new(name):
                self._publish_line(name, line, what)
            line = self._open.get(name, {})
            if line and Path(f"/proc/{line['pid']}").exists():
                assert time.monotonic() - line["at"] < DEADLINE_S + MARGIN_S, (what, "I1: a publish hangs", line)

    def _publish_line(self, name: str, line: Line, what: str) -> None:
        began = self._open.get(name)
        if "began" in line:
            assert began is None or began["pid"] != line["pid"], (what, "I1: two at once", line)
            self._open[name] = line
        elif "ended" in line:
            assert began is not None, (what, "I1: ended and never began", line)
            seconds = line["at"] - began["at"]
            assert seconds < DEADLINE_S + MARGIN_S, (what, "I1: it took too long", seconds, line)
            del self._open[name]
            self._verdict(name, line, what)
        else:
            assert line["works"], (what, "I1: the program's own group gave another value", line)

    def _verdict(self, name: str, line: Line, what: str) -> None:
        verdicts = self._verdicts[line["ended"]]
        error = line.get("error", "")
        allowed = ALLOWED | {""} | ({"Preflight"} if "memory full" in what else set())  # none of its sidecars can work
        assert error in allowed, (what, "I1: no error for a fault of this kind", line)
        verdicts[name] = error or f"version {line['version']}"
        settled = {verdict for verdict in verdicts.values() if verdict not in ("OutcomeUnknown", "Disconnected")}
        assert len(settled) <= 1, (what, "I1: ranks were told different things", verdicts, line)
        if error and line["unanimous"]:
            self._failed.add(line["ended"])
        if not error:
            stamp = self._stamps.setdefault(line["version"], line["ended"])
            assert stamp == line["ended"], (what, "I2: one number for two sets of weights", line)

    # ------------------------------------------------------------ I2

    def _weights(self, what: str) -> None:
        """Nothing torn, nothing uncommitted, nothing older after something newer, the same on all ranks of a replica."""
        fresh = {name: self._new(name) for name in self.world.targets()}
        self._decided = self.world.decided()
        assert self._decided == sorted(set(self._decided)), (what, "I2: decisions out of order", self._decided)
        decided = set(self._decided)
        for name, lines in fresh.items():
            for line in lines:
                if "works" in line:
                    assert line["works"], (what, "I2: the ranks of a replica loaded different versions", line)
                    continue
                if "kept" in line:
                    assert line["values"] == [line["stamp"]], (what, "I2: it changed while it was open", name, line)
                    continue
                if "version" in line:
                    assert line["version"] in decided, (what, "I2: not committed", line)
                    self._served(name, line, what)
                self._last[_incarnation(name, line)] = line

    def _served(self, name: str, line: Line, what: str) -> None:
        version, stamp = line["version"], line["stamp"]
        assert line["values"] == [stamp], (what, "I2: torn", name, line)
        assert stamp not in self._failed, (what, "I2: its publish had failed", name, line)
        assert self._stamps.setdefault(version, stamp) == stamp, (what, "I2: other weights", name, line)
        before = self._last.get(_incarnation(name, line), {})
        if "version" in before and before["pid"] == line["pid"]:
            assert version > before["version"], (what, "I2: not newer", name, before, line)
        newest = before.get("version", before.get("joined", 0))
        assert version >= newest, (what, "I2: backwards", name, before, line)
        replica, _, rank = name.rpartition(".")
        sequences = self._sequences[replica, line["generation"]]
        sequences[rank].append(version)
        shortest = min(len(sequence) for sequence in sequences.values())
        heads = {tuple(sequence[:shortest][-3:]) for sequence in sequences.values()}
        assert len(heads) == 1, (what, "I2: the ranks of a replica loaded different versions", replica, heads)

    # ------------------------------------------------------------ I3

    def _collectives(self, what: str) -> None:
        """A mean over exactly those that the receipt names, or an error and untouched tensors."""
        peers = self.world.shape.peers
        for name in peers:
            for line in self._new(f"{name}.0.outer"):
                assert "crashed" not in line, (what, "I1: the peer's thread died", name, line)
                if "joined" in line:
                    continue
                assert line["seconds"] < DEADLINE_S + MARGIN_S, (what, "I1: it took too long", name, line)
                if "error" in line:
                    allowed = ALLOWED | {"RanksDisagree"}  # after a loss peers must find a common step again
                    assert line["error"] in allowed, (what, "I1: no error for a fault of this kind", name, line)
                    assert not line["touched"], (what, "I3: a failed collective changed its input", name, line)
                    continue
                members = line["members"]
                mean = sum(2.0 ** peers.index(member) for member in members) / len(members)
                assert name in members, (what, "I3: not named in its own receipt", name, line)
                assert all(abs(value - mean) < 1e-3 for value in line["values"]), (what, "I3: mean", mean, name, line)
                assert line["mean_step"] == line["step"], (what, "I3: mixed steps", name, line)
                assert self._took_part.setdefault(line["step"], members) == members, (what, "I3: members", name, line)

    # ------------------------------------------------------------ I5, I6

    def nothing_piles_up(self, what: str) -> Anatomy:
        """The processes are what they were, by number and kind; descriptors and store keys are bounded."""
        sizes = self.world.shape.sizes

        def settled() -> Anatomy | None:
            found = self.world.anatomy()
            whole = all(len(body.ranks) == sizes[name] for name, body in found.bodies.items())
            few = all(len(body.sidecars) <= 3 * sizes[name] for name, body in found.bodies.items())
            return found if whole and few and not found.orphans and self.world.guest.fenced() else None

        try:
            found: Anatomy = eventually(settled, f"{what}: I5: as many processes as before", timeout_s=SETTLE_S)
        except AssertionError:
            now = self.world.anatomy()
            print("orphans:", now.orphans, "guests:", self.world.guest.replaced, *now.bodies.values(), sep="\n")
            raise
        counts = {pid: _fds(pid) for body in found.bodies.values() for pid in body.ranks}
        self.fds = max(counts.values())
        assert self.fds <= self._typical_fds + FDS_GROWTH, (what, "I5: descriptors pile up", counts)
        self.keys = self.world.run.status().store.keys
        assert self.keys < STORE_KEYS, (what, "I5: store keys pile up", self.keys)
        self._memory_is_bounded(what)
        return found

    def _memory_is_bounded(self, what: str) -> None:
        """Nobody keeps the memory of a process that has ended, and nobody has more than the slots that it may have."""
        run = self.world.run
        eventually(
            lambda: not ownerless(run.processes()), f"{what}: I5: no memory without an owner", timeout_s=SETTLE_S
        )
        for pid in run.processes():
            found = memories(pid, "replicas-policy")
            self._memory |= found.keys()
            own = [memory for memory in found.values() if memory.owned]
            assert len(own) <= MEMORIES, (what, "I5: memory piles up", pid, own)

    def no_memory_left(self) -> None:
        """The run is over."""
        assert mapped_anywhere(self._memory) == {}, "I5: memory of the run is still there"

    def only_these(self, expected: Mapping[str, int], hit: set[str], before: Anatomy, now: Anatomy, what: str) -> None:
        """I6: restarts by status, generation and metrics tell one story, and nobody else was touched."""
        after = self.world.replicas()
        for name, one in after.items():
            assert one.restarts == one.generation - 1 == expected[name], (what, "I6: restarts", one, dict(expected))
            if name not in hit:
                then, there = before.bodies[name], now.bodies[name]
                assert (then.shim, then.launcher, then.ranks) == (there.shim, there.launcher, there.ranks), (
                    what,
                    "I6: another replica was touched",
                    then,
                    there,
                )
        self._counted(after, what)

    def _counted(self, replicas: Mapping[str, ReplicaStatus], what: str) -> None:
        rows = [row for row in self.world.page("metrics")[1].splitlines() if row.startswith("replicas_restarts_total{")]
        for group in {one.group for one in replicas.values()}:
            counted = sum(float(row.rpartition(" ")[2]) for row in rows if f'group="{group}"' in row)
            shown = sum(one.restarts for one in replicas.values() if one.group == group)
            assert counted == shown, (what, "I6: metrics and status differ", rows)


def _incarnation(name: str, line: Line) -> str:
    """Two generations of a replica never run at once; of the guest, one may still be frozen while the next one serves."""
    return f"{name} {line['pid']}" if name.startswith(GUEST) else name


def _fds(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0

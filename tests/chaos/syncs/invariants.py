"""The invariants, checked on what the processes themselves wrote
(:mod:`tests.chaos.written`) and on what the machine shows.

The numbers are those of ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from replicas.status import ReplicaStatus
from tests.chaos.anatomy import Anatomy
from tests.chaos.syncs.rig import LOAD_DEADLINE_S, SLOTS, SyncWorld
from tests.chaos.written import Written
from tests.support.machine.memfds import mapped_anywhere, memories, ownerless
from tests.support.processes import name_of
from tests.support.waits import eventually

__all__ = ["Invariants"]

SETTLE_S = 15.0
LET_GO_S = LOAD_DEADLINE_S + SETTLE_S
"""A reader may take its load deadline for what it has mapped, whoever made it; then it
is ended."""
FDS_GROWTH = 30
STORE_KEYS = 600
MEMORIES = 3 * SLOTS
"""Buffers of one process: in its slots, left to readers, and spare."""


class Invariants(Written):
    """``base``: the run when nothing had happened to it yet."""

    def __init__(self, world: SyncWorld, base: Anatomy) -> None:
        super().__init__(world)
        self.world = world
        self._fds = {pid: _fds(pid) for body in base.bodies.values() for pid in body.ranks}
        self._typical_fds = max(self._fds.values())
        self._memory: set[int] = set()
        self.keys = 0
        self.fds = self._typical_fds

    # ------------------------------------------------------------ I5, I6

    def nothing_piles_up(self, what: str) -> Anatomy:
        """The processes are what they were, by number and kind; descriptors and store
        keys are bounded."""
        sizes = self.world.shape.sizes

        def settled() -> Anatomy | None:
            found = self.world.anatomy()
            whole = all(len(body.ranks) == sizes[name] for name, body in found.bodies.items())
            few = all(len(body.sidecars) <= 3 * sizes[name] for name, body in found.bodies.items())
            few &= all(len(body.carriers) <= len(body.ranks) for body in found.bodies.values())
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
        """Nobody keeps the memory of a process that has ended, and nobody has more than
        the slots that it may have."""
        run = self.world.run
        try:
            eventually(
                lambda: not ownerless(run.processes()), f"{what}: I5: no memory without an owner", timeout_s=LET_GO_S
            )
        except AssertionError:
            for inode, pids in ownerless(run.processes()).items():
                names = {pid: (name_of(pid), memories(pid).get(inode)) for pid in pids}
                print("without an owner:", inode, names, flush=True)
            raise
        for pid in run.processes():
            found = memories(pid, "replicas-policy")
            self._memory |= found.keys()
            own = [memory for memory in found.values() if memory.owned]
            assert len(own) <= MEMORIES, (what, "I5: memory piles up", pid, own)

    def no_memory_left(self) -> None:
        """The run is over."""
        assert mapped_anywhere(self._memory) == {}, "I5: memory of the run is still there"

    def only_these(self, expected: Mapping[str, int], hit: set[str], before: Anatomy, now: Anatomy, what: str) -> None:
        """I6: restarts by status, generation and metrics tell one story, and nobody
        else was touched."""
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


def _fds(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0

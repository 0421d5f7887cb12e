"""Faults by seed, one after the other, on one run; after each, the invariants, by what the processes themselves wrote.

``CHAOS_SEED`` and ``CHAOS_ROUNDS`` choose another history or a longer one; the same seed picks the same faults, victims and
delays. ``CHAOS_AT_ONCE``: up to so many in a round; ``CHAOS_ONLY="freeze store"``: only such. ``pytest -s`` shows each round
and a table at the end. The numbers I1 to I6 are those of ARCHITECTURE.md.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest

from replicas.status import ReplicaStatus
from tests.chaos.rig import DEADLINE_S, Fault, World, chaos_config
from tests.support.runs import eventually, running

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "8"))
SEED = int(os.environ.get("CHAOS_SEED", "7"))
ROLLOUTS = ("rollout-0", "rollout-1")
AT_ONCE = int(os.environ.get("CHAOS_AT_ONCE", "2"))
RECOVERY_S = 30.0
"""From a fault to a newer version that every target serves, with all replicas ready."""
MARGIN_S = 5.0 + 2.0 + 2.5
"""Beyond its deadline: a publish waits 5 s for the coordinator's word; its process may be stopped for 2 s; a busy machine."""


class Chaos:
    """The rounds and what they found."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.restarts: dict[str, int] = defaultdict(int)
        self.times: dict[str, list[float]] = defaultdict(list)

    def round(self, number: int, faults: list[Fault]) -> None:
        """One fault, or several at once on different replicas."""
        world, before = self.world, self.world.replicas()
        what = f"seed {SEED} round {number}:"
        hurt: set[str] = set()
        restarted: set[str] = set()
        hit_at = time.monotonic()
        world.wait_for_publish()
        with ExitStack() as stack:
            for fault in faults:
                time.sleep(fault.delay_s)  # the moment is the seed's choice
                victim = world.choose(fault, hurt)
                if victim is None:
                    continue
                what += f" {fault} {victim.replica} (pid {victim.pid}, {fault.delay_s * 1e3:.0f} ms)"
                hit_at = time.monotonic()
                stack.callback(world.signal, victim.pid, signal.SIGCONT)  # frozen no longer than the round
                world.hit(fault, victim)
                hurt |= {victim.replica}
                if victim.restarts:
                    restarted |= {victim.replica}
                    self.restarts[victim.replica] += 1
            seconds = self.recovered(hit_at, what)
        self.times[str(faults[0]) if len(faults) == 1 else f"{len(faults)} at once"].append(seconds)
        print(f"{what}: recovered in {seconds:.1f} s", flush=True)
        self.publishes_ended(what)
        self.weights_are_whole(what)
        self.only_these_were_restarted(restarted, before, what)

    def recovered(self, hit_at: float, what: str) -> float:
        """I4: a version whose publish began after the fault is committed, both targets serve it, and all are ready."""
        world, since = self.world, int(hit_at * 1e6)

        def again() -> bool:
            committed = any(line.get("ended", 0) > since and "version" in line for line in world.log("trainer-0"))
            served = all(line["stamp"] > since for name in ROLLOUTS for line in world.log(name)[-1:])
            running = all(self.restarts[name] == one.restarts for name, one in world.replicas().items())
            return committed and served and running and world.page("readyz")[0] == 200

        try:
            eventually(again, f"{what}: recovery", timeout_s=RECOVERY_S)
        except AssertionError:
            tails = [str(line) for name in ("trainer-0", *ROLLOUTS) for line in world.log(name)[-4:]]
            print(*tails, world.page("readyz?verbose")[1], world.page("status")[1], dict(self.restarts), sep="\n")
            raise
        return time.monotonic() - hit_at

    def publishes_ended(self, what: str) -> None:
        """I1: each publish ended within its deadline, with a receipt or a typed error, unless its process was killed."""
        began: dict[int, dict[str, float]] = {}
        lines = self.world.log("trainer-0")
        for line in lines:
            if "began" in line:
                began[line["began"]] = line
            else:
                seconds = line["at"] - began.pop(line["ended"])["at"]
                assert seconds < DEADLINE_S + MARGIN_S, (what, line)
        open_ones = [line for line in began.values() if line["pid"] == lines[-1]["pid"]]
        assert len(open_ones) <= 1, (what, open_ones)
        assert all(time.monotonic() - line["at"] < DEADLINE_S + MARGIN_S for line in open_ones), (what, open_ones)

    def weights_are_whole(self, what: str) -> None:
        """I2: nothing torn, nothing uncommitted, nothing older after something newer, the same version for both."""
        world = self.world
        seen = [world.log(name) for name in ROLLOUTS]
        decided = world.decided()
        assert decided == sorted(set(decided)), (what, decided)
        published = world.log("trainer-0")
        stamps = {line["version"]: line["ended"] for line in published if "version" in line}
        failed = {line["ended"] for line in published if line.get("error", "OutcomeUnknown") != "OutcomeUnknown"}
        for lines in seen:
            for line in lines:
                assert line["stamp"] not in failed, (what, "its publish failed", line)
                assert line["values"] == [line["stamp"]], (what, "torn", line)
                assert line["version"] in decided, (what, "not committed", line)
                assert stamps.setdefault(line["version"], line["stamp"]) == line["stamp"], (what, "other weights", line)
            for older, newer in itertools.pairwise(lines):
                same = older["pid"] == newer["pid"]
                assert newer["version"] >= older["version"] + same, (what, "went backwards", older, newer)

    def only_these_were_restarted(self, names: set[str], before: dict[str, ReplicaStatus], what: str) -> None:
        """I6: restarts by fault, status, metrics and generations tell one story, and nobody else was touched."""
        after = self.world.replicas()
        for name, one in after.items():
            assert one.restarts == one.generation - 1 == self.restarts[name], (what, one, dict(self.restarts))
            if name not in names:
                assert one.pid == before[name].pid, (what, one)
        rows = [row for row in self.world.page("metrics")[1].splitlines() if row.startswith("replicas_restarts_total{")]
        for group in ("trainer", "rollout"):
            counted = sum(float(row.rpartition(" ")[2]) for row in rows if f'group="{group}"' in row)
            assert counted == sum(one.restarts for one in after.values() if one.group == group), (what, rows)

    def table(self) -> str:
        rows = [f"{'fault':24}{'tried':>6}{'median':>9}{'worst':>8}"]
        for name, times in sorted(self.times.items()):
            rows.append(f"{name:24}{len(times):6}{statistics.median(times):7.1f} s{max(times):6.1f} s")
        return "\n".join(rows)


@pytest.mark.timeout(60 + 40 * ROUNDS)
def test_chaos(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    with running(tmp_path, chaos_config(tmp_path), stop_when='["trainer"]', name="chaos") as run:
        world = World(run, random.Random(SEED))
        chaos = Chaos(world)
        eventually(lambda: run.status().ready and len(world.decided()) > 1, "the start", timeout_s=60)
        try:
            deck = Fault.deck(rng)
            for number in range(1, ROUNDS + 1):
                at_once = rng.choice([1, 1, *range(1, AT_ONCE + 1)])
                chaos.round(number, [next(deck) for _ in range(at_once)])
        finally:
            print(chaos.table(), flush=True)
        status = run.status()
        (world.out / "stop").touch()
        assert run.wait(timeout_s=30) == 0, run.lines
        run.assert_nothing_left(int(status.endpoint.rpartition(":")[2]), status.store.port)  # I5
        told = [line for line in run.lines if "; starting again " in line]
        assert len(told) == sum(chaos.restarts.values()), told

"""Faults by seed, one round after the other, on one run; after each, the invariants.

Without more it goes on for some 100 seconds, in two worlds. ``CHAOS_SEED`` and
``CHAOS_ROUNDS`` choose another history or a longer one (``make chaos ROUNDS=500
SEED=3``): the same seed deals the same faults, targets, moments and delays.
``CHAOS_WORLD``: ``exec``, ``torchrun`` or ``torchrun-all`` in place of the seed's
choice. ``CHAOS_TRANSPORT``: ``auto``, ``tcp`` or ``group``; without it the weights are
mapped (``auto``) with even seeds, and sent with odd ones. ``CHAOS_AT_ONCE``: up to so
many faults in a round; ``CHAOS_ONLY="freeze store"``: only such. ``pytest -s`` shows
each round and a table at the end.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.anatomy import Anatomy
from tests.chaos.report import Report
from tests.chaos.syncs.attack import Attack, choose
from tests.chaos.syncs.faults import Fault, deck
from tests.chaos.syncs.invariants import Invariants
from tests.chaos.syncs.recovery import Recovery
from tests.chaos.syncs.rig import GUEST, Shape, SyncWorld, open_world
from tests.support.waits import eventually

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "0"))
SECONDS = float(os.environ.get("CHAOS_SECONDS", "50"))
"""How long a run goes on when it is not told how many rounds."""
SEED = int(os.environ.get("CHAOS_SEED", "7"))
AT_ONCE = int(os.environ.get("CHAOS_AT_ONCE", "2"))
ONLY = os.environ.get("CHAOS_ONLY", "")
WORLDS = {
    "exec": Shape(torchrun=False),
    "torchrun": Shape(torchrun=True),
    "torchrun-all": Shape(torchrun=True, source_ranks="all"),
}
RECOVERY_S = 60.0
"""From a fault to a newer version that every target serves, a collective of all peers,
and all replicas ready, on a machine that is busy with other things, too. The tables
show what it really took."""


SLOW_S = 10.0
"""Beyond it a round says what it waited for."""


class Chaos:
    """The rounds and what they found."""

    def __init__(self, world: SyncWorld) -> None:
        self.world = world
        self.report = Report()
        self.restarts: dict[str, int] = defaultdict(int)
        self._maybe: set[str] = set()
        self._anatomy: Anatomy = world.anatomy()
        self.invariants = Invariants(world, self._anatomy)

    def round(self, number: int, faults: list[Fault]) -> None:
        """One fault, or several on different replicas."""
        world = self.world
        refused = sum(world.refusals().values())
        with ExitStack() as undo:
            attacks = self._attack(faults, undo)
            what = f"seed {SEED} round {number}: {' + '.join(map(str, attacks))}"
            if not attacks:
                print(f"{what}none of {', '.join(map(str, faults))}: there is no such process now", flush=True)
                return
            print(what, end="", flush=True)
            seconds = self._recovered(attacks, what)
        self._note(attacks, seconds)
        self.invariants.check(what)
        now = self.invariants.nothing_piles_up(what)
        self._settle_maybes()
        hit = {attack.victim.replica for attack in attacks}
        self.invariants.only_these(self.restarts, hit | self._maybe, self._anatomy, now, what)
        if any(attack.refused for attack in attacks):
            assert sum(world.refusals().values()) > refused, (what, "I7: what was refused was not counted")
        self._anatomy = now
        print(f" (keys {self.invariants.keys}, fds {self.invariants.fds})", flush=True)

    def _attack(self, faults: list[Fault], undo: ExitStack) -> list[Attack]:
        attacks: list[Attack] = []
        spared: set[str] = set()
        self._maybe.clear()
        for fault in faults:
            victim = choose(fault, self.world, self._anatomy, spared)
            if victim is None:
                continue
            attack = Attack(fault, victim, self.world, self._anatomy, undo)
            attack.run()
            attacks.append(attack)
            spared.add(victim.replica or fault.target)
            if fault.cost == "restart":
                self.restarts[victim.replica] += 1
            elif fault.cost == "maybe":
                self._maybe.add(victim.replica)
        return attacks

    def _settle_maybes(self) -> None:
        """Memory that is full may kill or not; whichever it was, it was once."""
        replicas = self.world.replicas()
        for name in self._maybe:
            self.restarts[name] += replicas[name].restarts == self.restarts[name] + 1

    def _recovered(self, attacks: list[Attack], what: str) -> float:
        """I4: everything works again, within seconds."""
        since = max(attack.since for attack in attacks)
        recovery = Recovery(self.world, since, self.restarts, self._maybe)
        try:
            eventually(recovery.seen, f"{what}: recovery", timeout_s=RECOVERY_S)
        except AssertionError:
            print(f": only {recovery}", flush=True)
            self._explain()
            raise
        seconds = time.monotonic() - max(attack.at for attack in attacks)
        print(f": recovered in {seconds:.1f} s", end=f" ({recovery})" if seconds > SLOW_S else "", flush=True)
        return seconds

    def _explain(self) -> None:
        world = self.world
        names = [f"{GUEST}.0", *world.logs(list(world.shape.sizes)), *(f"{name}.0.outer" for name in world.shape.peers)]
        print("", *(f"{name}: {line}" for name in names for line in world.log(name)[-3:]), sep="\n")
        print(world.page("readyz?verbose")[1], world.page("status")[1], dict(self.restarts), sep="\n")
        for path in sorted((world.run.state_dir / "logs").rglob("gen-*/*.log"), key=lambda p: p.stat().st_mtime)[-12:]:
            print(f"== {path}", path.read_text(errors="replace")[-1500:], sep="\n")

    def _note(self, attacks: list[Attack], seconds: float) -> None:
        self.report.rounds += 1
        self.report.late += sum(attack.late for attack in attacks)
        name = str(attacks[0].fault) if len(attacks) == 1 else f"{len(attacks)} at once"
        self.report.by_fault[name].append(seconds)
        for attack in attacks:
            self.report.by_moment[attack.fault.moment].append(seconds)


def worlds() -> list[tuple[str, str]]:
    """Those to be run through, and how weights go: of a long run one, by the seed if it
    is not named."""
    named, transport = os.environ.get("CHAOS_WORLD"), os.environ.get("CHAOS_TRANSPORT")
    if not ROUNDS and not named:
        return [("exec", transport or "group"), ("torchrun-all", transport or "auto")]
    return [(named or random.Random(SEED).choice(sorted(WORLDS)), transport or ("group" if SEED % 2 else "auto"))]


@pytest.mark.timeout(300 + 45 * ROUNDS)
@pytest.mark.parametrize(("name", "transport"), worlds())
def test_chaos(name: str, transport: str, tmp_path: Path) -> None:
    rng, shape = random.Random(SEED), replace(WORLDS[name], transport=transport)
    print(f"seed {SEED}: {shape}", flush=True)
    with open_world(tmp_path, shape) as world:
        run = world.run
        eventually(lambda: run.status().ready and len(world.decided()) > 1, "the start", timeout_s=60)
        world.guest.start()
        eventually(lambda: world.log(f"{GUEST}.0"), "the guest", timeout_s=30)
        chaos = Chaos(world)
        try:
            cards = deck(rng, shape.moments, torchrun=shape.torchrun, only=ONLY)
            until = time.monotonic() + SECONDS
            for number in itertools.count(1):
                if number > ROUNDS if ROUNDS else time.monotonic() > until:
                    break
                at_once = rng.choice([1, 1, *range(1, AT_ONCE + 1)])
                chaos.round(number, [next(cards) for _ in range(at_once)])
        finally:
            print(f"\n{chaos.report.table()}", flush=True)
        status = run.status()
        world.guest.close()
        run.signal(15)
        assert run.wait(timeout_s=30) == 0, run.lines
        run.assert_nothing_left(int(status.endpoint.rpartition(":")[2]), status.store.port)  # I5
        chaos.invariants.no_memory_left()
        told = [line for line in run.lines if "; starting again " in line]
        assert len(told) == sum(chaos.restarts.values()), told  # I6

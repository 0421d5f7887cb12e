"""Faults by seed of the supervisor and its tree alone, without channels, one round
after the other; after each, the facts. (tests/chaos/test_nodes.py has runs over hosts,
and needs root; what holds of pids, marks, control groups and the disk of one host is
checked here alone.)

Without more it goes on for some 50 seconds, in two worlds. ``CHAOS_SEED`` and
``CHAOS_ROUNDS`` choose another history or a longer one (``make chaos-tree ROUNDS=300
SEED=3``): the same seed deals the same faults, victims and moments. ``CHAOS_WORLD``:
``exec`` or ``torchrun`` in place of the seed's choice; ``CHAOS_AT_ONCE``: up to so many
faults in a round; ``CHAOS_ONLY="freeze shim,full disk"``: only such. ``pytest -s``
shows each round and a table at the end.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from replicas.control.exit_codes import CUT, DONE
from tests.chaos.report import Report
from tests.chaos.tree.tree_attack import Attack
from tests.chaos.tree.tree_facts import Facts
from tests.chaos.tree.tree_faults import ENDS_RUN, Fault, deck
from tests.chaos.tree.tree_world import Picture, Process, TreeShape, TreeWorld, alive, open_tree
from tests.support.waits import eventually

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "0"))
SECONDS = float(os.environ.get("CHAOS_SECONDS", "25"))
"""How long a run goes on when it is not told how many rounds."""
SEED = int(os.environ.get("CHAOS_SEED", "7"))
AT_ONCE = int(os.environ.get("CHAOS_AT_ONCE", "2"))
ONLY = os.environ.get("CHAOS_ONLY", "")
GONE_S = 5.0
"""From a fault to the end of the last process of what it has hit: promised. The table
counts those that took longer."""
PATIENCE_S = 30.0
"""After which a test fails, on a machine that is busy with other things, too."""


class TreeChaos:
    """The rounds and what they found."""

    def __init__(self, world: TreeWorld) -> None:
        self.world = world
        self.report = Report(second="all gone after")
        self._picture = world.picture()
        self.facts = Facts(world, self._picture)
        self.slow = 0
        self.ports = world.ports()

    def round(self, number: int, faults: list[Fault]) -> None:
        """One fault, or several."""
        before = self._picture
        with ExitStack() as undo:
            attack = Attack(faults, self.world, before, undo)
            attack.run()
            what = f"seed {SEED} round {number}: {attack}"
            print(what, end="", flush=True)
            gone_s = self._gone(attack, what)
            if attack.ends is not None:
                self._again(attack, what)
            self._picture = self._recovered(attack, what)
        seconds = time.monotonic() - attack.at
        try:
            self.facts.floods(attack, what)
            self.facts.nothing_piles_up(self._picture, what)
            self.facts.one_story(attack, before, self._picture, what)
        except AssertionError:
            self.world.explain()
            raise
        self._note(attack, seconds, gone_s)

    def _gone(self, attack: Attack, what: str) -> float | None:
        """Everything that must end has ended: so long after the fault. None: there was
        nothing."""
        doomed = attack.doomed - (attack.frozen if attack.ends is not None else set())
        if not doomed:
            return None
        self._wait_for_end(doomed, what)
        seconds = time.monotonic() - attack.at
        slow = seconds > GONE_S and not any(fault.kind == "freeze" for fault in attack.faults)
        self.slow += slow
        print(f": gone in {seconds:.1f} s{' !' if slow else ''}", end="", flush=True)
        return seconds

    def _wait_for_end(self, doomed: set[Process], what: str) -> None:
        def left() -> dict[int, str]:
            return {pid: _line(pid) for pid, _ in alive(doomed)}

        try:
            eventually(lambda: not alive(doomed), f"{what}: I5", timeout_s=PATIENCE_S)
        except AssertionError:
            self.world.explain()
            raise AssertionError(f"{what}: I5: not gone within {PATIENCE_S} s: {left()}") from None

    def _again(self, attack: Attack, what: str) -> None:
        """The run has ended: nothing of it is left; another supervisor takes it up."""
        assert attack.ends is not None
        run, world = self.world.run, self.world
        code = run.wait(timeout_s=PATIENCE_S)
        expected = ENDS_RUN[attack.ends.pair]
        ends = {expected, CUT} if expected == DONE and attack.ends.pair == ("drain", "supervisor") else {expected}
        assert code in ends, (what, "its exit code", code, run.lines[-10:])
        but = {pid for pid, _ in attack.frozen}
        self.facts.nothing_left(run, self.ports, what, but=but)
        world.start()
        if attack.ends.kind == "stutter":
            time.sleep(attack.ends.pause_s)  # the fault itself, not a wait for anything
            world.run.signal(signal.SIGKILL)
            assert world.run.wait(timeout_s=PATIENCE_S) == -signal.SIGKILL
            self.facts.nothing_left(world.run, [], what, but=but)
            world.start()

    def _recovered(self, attack: Attack, what: str) -> Picture:
        """Everything is there and ready again, and has been paid for."""
        world, missing = self.world, ["everything"]

        def settled() -> Picture | None:
            picture = world.look()
            if picture is None:
                missing[:] = ["processes"]
                return None
            seen = {
                "orphans": not picture.orphans,
                "readiness": world.run.status().ready,
                "pumps": all(body.pump for body in picture.bodies.values()),
                "ends": not alive(attack.doomed),
                "restarts": attack.ends is not None or self.facts.paid(attack),
            }
            missing[:] = [name for name, there in seen.items() if not there]
            return None if missing else picture

        try:
            found: Picture = eventually(settled, f"{what}: recovery", timeout_s=2 * PATIENCE_S)
        except AssertionError:
            self.world.explain()
            raise AssertionError(f"{what}: no recovery within {2 * PATIENCE_S} s for {missing}") from None
        self.ports = world.ports()
        if attack.ends is not None:
            killed = attack.ends.kind in ("kill", "stutter")
            full = any(fault.target == "disk" for fault in attack.faults)
            resumed = self.facts.resumed()
            assert resumed or not killed or full, (what, "the state of a dead supervisor was not taken up")
            self.facts.another(found, resumed=resumed, certain=self.facts.certain and not full)
        return found

    def _note(self, attack: Attack, seconds: float, gone_s: float | None) -> None:
        self.report.rounds += 1
        name = str(attack.faults[0]) if len(attack.faults) == 1 else f"{len(attack.faults)} at once"
        self.report.by_fault[name].append(seconds)
        if gone_s is not None:
            self.report.by_moment[name].append(gone_s)
        print(f": recovered in {seconds:.1f} s", flush=True)


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def worlds() -> list[str]:
    """Those to be run through: of a long run one, by the seed if it is not named."""
    named = os.environ.get("CHAOS_WORLD")
    if not ROUNDS and not named:
        return ["exec", "torchrun"]
    return [named or random.Random(SEED).choice(("exec", "exec", "torchrun"))]


@pytest.mark.timeout(300 + 60 * ROUNDS)
@pytest.mark.parametrize("name", worlds())
def test_supervisor_chaos(name: str, tmp_path: Path) -> None:
    rng, shape = random.Random(SEED), TreeShape(torchrun=name == "torchrun")
    print(f"seed {SEED}: {shape}", flush=True)
    with open_tree(tmp_path, shape) as world:
        chaos = TreeChaos(world)
        if world.disk is None:
            print("no right to mount: the disk is never full", flush=True)
        try:
            cards = deck(rng, at_once=AT_ONCE, torchrun=shape.torchrun, disk=world.disk is not None, only=ONLY)
            until = time.monotonic() + SECONDS
            for number in itertools.count(1):
                if number > ROUNDS if ROUNDS else time.monotonic() > until:
                    break
                chaos.round(number, next(cards))
        finally:
            print(f"\n{chaos.report.table()}\n{chaos.slow} times something was not gone after {GONE_S:g} s", flush=True)
        picture, run, ports = world.picture(), world.run, chaos.ports
        run.signal(15)
        assert run.wait(timeout_s=30) in (DONE, CUT), run.lines  # a group of the tree heeds no SIGTERM
        assert not alive(picture.everything())
        chaos.facts.nothing_left(run, ports, "the end", but=set())

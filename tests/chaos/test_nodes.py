"""Faults of nodes by seed, one round after the other, in one run over four hosts; after
each, the invariants.

A supervisor with ``adopt`` on A, agents on B, C and D, a trainer that publishes in a
loop and six rollouts, placed by the supervisor; see
:mod:`tests.chaos.nodes.node_faults` for what is done to them. ``CHAOS_SEED`` and
``CHAOS_ROUNDS`` choose another history or a longer one (``make chaos-nodes ROUNDS=200
SEED=3``); ``CHAOS_NODE_ONLY="power cut"``: only such; ``CHAOS_PAIRS=1``: two at once in
every round.

What is checked besides I1 and I2 (:mod:`tests.chaos.written`): no two processes of one
replica are alive at once, on whichever hosts, and no two have one generation; no GPU
has two owners; whoever no fault touches goes on with the same process, and serves new
versions within seconds; what a lost node had runs elsewhere before it is back; events
and counters tell of each restart once; nothing is left at the end.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.census import now
from tests.chaos.nodes.node_facts import Facts, Table
from tests.chaos.nodes.node_faults import NodeFault, deck
from tests.chaos.nodes.node_world import NodeWorld, node_world, wait_whole
from tests.support.machine.load import Load
from tests.support.machine.switch import why_no_switch

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "0"))
SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
"""How long it goes on when it is not told how many rounds."""
SEED = int(os.environ.get("CHAOS_SEED", "5"))
ONLY = os.environ.get("CHAOS_NODE_ONLY", "")
PAIRS = float(os.environ.get("CHAOS_PAIRS") or 0.4)
OLD = 3
"""Every how many rounds a state is kept, which a later one may put in place."""
WHOLE_S = 60.0
"""From the end of the last fault, on a machine that has time for it."""


class Rounds:
    """The rounds and what they found."""

    def __init__(self, world: NodeWorld, load: Load) -> None:
        self.world, self.load = world, load
        self.facts, self.table = Facts(world, load), Table()

    def round(self, number: int, dealt: Sequence[NodeFault]) -> None:
        faults: list[NodeFault] = []
        for fault in dealt:
            if fault.aim(self.world, [one.host for one in faults]):
                faults.append(fault)
        world, what = self.world, f"seed {SEED} round {number}: {' and '.join(map(str, faults))}"
        print(what, end="", flush=True)
        before, began, ticks = self.facts.before(), now(), time.monotonic()
        deeds = [(began + fault.waits_s, fault.begin) for fault in faults]
        deeds += [(began + fault.waits_s + fault.lasts_s, fault.end) for fault in faults]
        for at, deed in sorted(deeds, key=lambda one: one[0]):
            while now() < at:
                world.tend()
                time.sleep(0.05)
            deed(world)
        try:
            over = now()
            whole = wait_whole(world, over, self.load.bar_s(WHOLE_S, ticks), what)
            told = self.table.add(faults, world)
            print(f": whole {whole - over:.1f} s after the end; {told}", flush=True)
            self.facts.check(faults, before, ticks, what)
            state = world.hosts[0].state_dir / "state.json"
            if number % OLD == 0 and state.exists():
                world.old_state = state.read_bytes()
        except AssertionError:
            print(f"\n{world.story(began)}", flush=True)
            raise


@pytest.mark.timeout(600 + 120 * ROUNDS + SECONDS)
def test_nodes_under_chaos(tmp_path: Path) -> None:
    reason = why_no_switch()
    if reason:
        pytest.skip(reason)
    rng = random.Random(SEED)
    with Load() as load, node_world(tmp_path) as world:
        rounds = Rounds(world, load)
        try:
            until = now() + SECONDS
            for number, faults in zip(itertools.count(1), deck(rng, ONLY, PAIRS), strict=False):
                if number > ROUNDS if ROUNDS else now() > until:
                    break
                rounds.round(number, faults)
        finally:
            print(f"\n{rounds.table}", flush=True)
        rounds.facts.end("the end")

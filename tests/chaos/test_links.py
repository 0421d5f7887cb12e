"""Broken and slow links between hosts: who can be reached goes on, nobody healthy is
lost, and all are whole again soon.

Beside tests/chaos/test_link_chaos.py, whose faults come at any moment and in pairs, and
whose bars are wide for that: here each fault is alone, and its bars are tight.

A coordinator on A, a trainer on B, two targets each on C and D; 32 MiB over 200 Mbit/s,
published without a pause, so that a fault nearly always hits in the middle of a
transfer. Every element of a version is checked (:mod:`tests.chaos.written`).

The bars: whoever still can be reached serves a version that was decided after the fault
within ``REACH_S`` of it, and again and again while it lasts; within ``WHOLE_S`` of the
heal a version is committed that nobody is missing from, and served by all. On a machine
that is busy with other things they are multiplied by the root of how many times longer
than on a quiet one what computes takes meanwhile (:mod:`tests.support.machine.load`).
``make chaos-links`` runs all cases and shows what each took; ``ONLY="host A"`` those
with these words in their names; without ``CHAOS_LINKS=all`` a few are run.
``CHAOS_TRANSPORT=group``: process groups are tried before hosts pull.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.links.far_world import A, B, C, D, FarWorld, Scene, far_world
from tests.chaos.written import ALLOWED, Written
from tests.support.machine.load import Load
from tests.support.machine.switch import MBIT_NBYTES, Shape, why_no_switch

pytestmark = pytest.mark.timeout(400)

REACH_S = 8.0
WHOLE_S = 5.0
STARVED = 8.0
"""Held up so many times, whoever could not be reached for a part of its lease may have
no time to speak in the rest of it."""
GIVES_UP_S = 60.0
"""After which a case no longer waits to see what it takes."""

TRANSPORT = os.environ.get("CHAOS_TRANSPORT", "auto")

LARGE = Scene(transport=TRANSPORT)
SMALL = Scene(nbytes=2 << 20, deadline_s=20.0, transport=TRANSPORT)
PEERS = Scene(
    nbytes=1 << 16, places={"trainer-0": B, "serve-0": C, "serve-1": D}, peers=("trainer-0", "serve-0", "serve-1")
)


Fault = Callable[[FarWorld], None]


@dataclass(frozen=True)
class Case:
    """``bad``: the hosts that cannot be reached, or are slow: their members may be in
    ``lost``.

    ``fences``: whose members may be fenced. ``reach``: False where nothing can be
    committed, or no collective ends well, while it lasts. ``starts``: hosts whose
    targets have to join again before all can be whole. ``doubts``: a link that is in
    doubt after the heal is the only way to some host in the next case, which therefore
    gets another world: a publish does not wait for such a link (core/moving/links.py).
    """

    name: str
    scene: Scene
    fault: Fault
    lasts_s: float = 20.0
    bad: tuple[int, ...] = ()
    fences: tuple[int, ...] = ()
    reach: bool = True
    starts: tuple[int, ...] = ()
    doubts: bool = False

    def __str__(self) -> str:
        return self.name


def one_way(*ways: tuple[int, int]) -> Fault:
    def cut(world: FarWorld) -> None:
        for way in ways:
            world.switch.cut(*way, one_way=True)

    return cut


def host(which: int) -> Fault:
    return lambda world: world.switch.cut_off(which)


def link(one: int, other: int) -> Fault:
    return one_way((one, other), (other, one))


def stop(which: int) -> Fault:
    return lambda world: world.send(which, signal.SIGSTOP)


def shape(shape: Shape, *hosts: int) -> Fault:
    return lambda world: world.switch.shape_all(shape, *hosts)


def ways(shape: Shape, *links: tuple[int, int]) -> Fault:
    def do(world: FarWorld) -> None:
        for one, other in links:
            world.switch.shape(one, other, shape)

    return do


def kill(*hosts: int) -> Fault:
    return lambda world: world.kill(*world.scene.on(*hosts))


def both(*faults: Fault) -> Fault:
    def do(world: FarWorld) -> None:
        for fault in faults:
            fault(world)

    return do


CASES = [
    Case("link B-C", LARGE, link(B, C)),
    Case("link B-D", LARGE, link(B, D)),
    Case("link C-D", LARGE, link(C, D)),
    Case("link B to C", LARGE, one_way((B, C))),
    Case("link C to B", LARGE, one_way((C, B))),
    Case("host C 1 s", LARGE, host(C), 1.0, bad=(C,)),
    Case("host C 5 s", LARGE, host(C), 5.0, bad=(C,)),
    Case("host D 20 s", LARGE, host(D), bad=(D,), fences=(D,)),
    Case("host D hears", LARGE, one_way((D, A), (D, B), (D, C)), bad=(D,), fences=(D,)),
    Case("host D speaks", LARGE, one_way((A, D), (B, D), (C, D)), bad=(D,), fences=(D,)),
    Case("host B 5 s", LARGE, host(B), 5.0, reach=False),
    Case("host A 3 s", LARGE, host(A), 3.0, reach=False),
    Case("host A 7 s", LARGE, host(A), 7.0, reach=False),
    Case("host A 9 s", LARGE, host(A), 9.0, reach=False),
    Case("host A 20 s", LARGE, host(A), 20.0, reach=False),
    Case("host C stopped 6 s", LARGE, stop(C), 6.0, bad=(C,)),
    Case("coordinator killed 3 s", LARGE, lambda world: world.coordinator.close(), 3.0, reach=False),
    Case("ranks of C killed", LARGE, kill(C), 0.0, bad=(C,), starts=(C,)),
    Case("loss 5 %", SMALL, shape(Shape(loss=0.05)), 15.0),
    Case("delay 100 ms", SMALL, shape(Shape(delay_s=0.1)), 15.0),
    Case("D at 200 kB/s", SMALL, shape(Shape(rate_nbytes_s=200_000.0), D), 30.0, bad=(D,)),
    Case("D at 200 kB/s, 300 ms", SMALL, shape(Shape(rate_nbytes_s=200_000.0, delay_s=0.3), D), 30.0, bad=(D,)),
    Case("C at 200 kB/s", SMALL, shape(Shape(rate_nbytes_s=200_000.0), C), 30.0, bad=(C,)),
    Case("link C-D at 200 kB/s", SMALL, ways(Shape(rate_nbytes_s=200_000.0), (C, D)), 20.0),
    Case("D at 10 kB/s", SMALL, shape(Shape(rate_nbytes_s=10_000.0), D), 30.0, bad=(D,)),
    Case(
        "joins over 1.5 Mbit/s", SMALL, both(shape(Shape(rate_nbytes_s=1.5 * MBIT_NBYTES), D), kill(D)), 40.0, bad=(D,)
    ),
    Case("peers: link B-C", PEERS, link(B, C), reach=False, doubts=True),
    Case("peers: link C-D", PEERS, link(C, D), reach=False, doubts=True),
    Case("peers: link B to C", PEERS, one_way((B, C)), reach=False, doubts=True),
    Case("peers: host D 1 s", PEERS, host(D), 1.0, bad=(D,)),
    Case("peers: host D 6 s", PEERS, host(D), 6.0, bad=(D,)),
    Case("peers: host D 20 s", PEERS, host(D), 20.0, bad=(D,), fences=(D,)),
    Case("peers: host A 3 s", PEERS, host(A), 3.0, reach=False),
    Case("peers: host A 5 s", PEERS, host(A), 5.0, reach=False),
    Case("peers: D at 1.5 Mbit/s", PEERS, shape(Shape(rate_nbytes_s=1.5 * MBIT_NBYTES), D), bad=(D,)),
]


FEW = ("host A 3 s", "peers: host D 1 s")


def cases() -> list[Case]:
    wanted = os.environ.get("CHAOS_LINKS", "")
    found = [case for case in CASES if (wanted in ("all", "") or wanted in case.name) and (wanted or case.name in FEW)]
    assert found, f"no case has {wanted!r} in its name: {', '.join(case.name for case in CASES)}"
    return found


@pytest.fixture(autouse=True, scope="module")
def _switch() -> None:
    reason = why_no_switch()
    if reason:
        pytest.skip(reason)


class Worlds:
    """One world serves all cases of its scene in a row; after a case that failed the
    next one gets a new one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._count = 0
        self._scene: Scene | None = None
        self._given: tuple[FarWorld, Written] | None = None

    def take(self, scene: Scene) -> tuple[FarWorld, Written]:
        """Whoever does not :meth:`give_back` has broken it."""
        if self._given is None or self._scene is not scene:
            self.close()
            self._count += 1
            self._scene = scene
            world = self._stack.enter_context(far_world(self._folder / str(self._count), scene))
            self._given = world, Written(world, ALLOWED | {"Fenced"})
        taken, self._given = self._given, None
        return taken

    def give_back(self, world: FarWorld, written: Written) -> None:
        self._given = world, written

    def close(self) -> None:
        self._given = None
        self._stack.close()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_broken_link(case: Case, worlds: Worlds) -> None:
    world, written = worlds.take(case.scene)
    with Load() as load:
        trial = Trial(world, case)
        trial.run()
    print(f"\n{trial} (held up {load.factor(trial.began):.1f} times)")
    verdict = trial.verdict(load)
    if verdict:
        print(world.story(trial.began))
    written.check(case.name)
    assert verdict == []
    if not case.doubts:
        worlds.give_back(world, written)


class Trial:
    """A case in a world, and what it took. ``floor``: the newest version that was
    decided before the fault."""

    def __init__(self, world: FarWorld, case: Case) -> None:
        self.world = world
        self.case = case
        self.began = self.healed = 0.0
        self.floor = 0
        self.dead = len(world.deaths)

    def run(self) -> None:
        world = self.world
        self._until(lambda: world.whole_at(time.monotonic() - 10.0))
        self.floor = max(world.decided())
        self.began = time.monotonic()
        self.case.fault(world)
        self._until(lambda: time.monotonic() - self.began > self.case.lasts_s)
        world.heal()
        self._until(lambda: all(world.joined(name, self.began) for name in world.scene.on(*self.case.starts)))
        self.healed = time.monotonic()
        self._until(lambda: self.whole_s() and (self.reached_s() or not self.case.reach))

    def _until(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + GIVES_UP_S
        while not condition() and time.monotonic() < until:
            self.world.tend()
            time.sleep(0.05)

    # ------------------------------------------- what it took; 0: it has not come about

    def reached_s(self) -> float:
        """From the fault until all that can be reached serve a newer version; of peers,
        until some have met again."""
        if self.world.peers:
            return min(
                (at - self.began for at, _, them in self.world.reduced(self.began) if len(them) > 1), default=0.0
            )
        hosts = {B, C, D} - {*self.case.bad}
        served = [self.world.served(name, self.floor + 1) for name in self.world.scene.on(*hosts)]
        return max(served) - self.began if all(served) else 0.0

    def gap_s(self) -> float:
        """The longest time without a commit, or a collective, while it lasted."""
        found: list[float] = [line["at"] for line in self.world.commits(self.began)]
        if self.world.peers:
            found = [at for at, _, _ in self.world.reduced(self.began)]
        times: list[float] = [self.began, *(at for at in found if at < self.healed), self.healed]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    def whole_s(self) -> float:
        """From the heal until a version is served by all, of which nobody was missing,
        and all peers have met."""
        at = self.world.whole_at(self.healed)
        return at - self.healed if at else 0.0

    def lost(self) -> set[str]:
        """Who was missing from a version that was committed since the fault."""
        names: set[str] = {name for line in self.world.commits(self.began) for name in line["lost"]}
        met = {name for _, _, members in self.world.reduced(self.began) for name in {*self.world.peers} - {*members}}
        return {"-".join(name.split("/")[:2]) for name in names} | met

    def verdict(self, load: Load) -> list[str]:
        """What is not as it must be."""
        case, world = self.case, self.world
        healthy = {name for name, host in world.scene.places.items() if host not in case.bad}
        safe = {name for name, host in world.scene.places.items() if host not in case.fences}
        if load.factor(self.began) > STARVED:
            safe -= {*world.scene.on(*case.bad)}
        reach_s, whole_s = load.bar_s(REACH_S, self.began), load.bar_s(WHOLE_S, self.began)
        found = [
            (
                case.reach and not 0 < self.reached_s() < reach_s,
                f"reached after {self.reached_s():.1f} s, not {reach_s:.1f}",
            ),
            (case.reach and self.gap_s() > reach_s, f"{self.gap_s():.1f} s without a commit, not {reach_s:.1f}"),
            (not 0 < self.whole_s() < whole_s, f"whole {self.whole_s():.1f} s after the heal, not {whole_s:.1f}"),
            (healthy & self.lost(), f"healthy and lost: {sorted(healthy & self.lost())}"),
            (safe & world.fenced(self.began), f"healthy and fenced: {sorted(safe & world.fenced(self.began))}"),
            (case.reach and not world.peers and world.failures(self.began), f"failed: {world.failures(self.began)}"),
            (len(world.deaths) > self.dead, f"died: {world.deaths[self.dead :]}"),
        ]
        return [text for broken, text in found if broken]

    def __str__(self) -> str:
        world = self.world
        return (
            f"{self.case}: reached {self.reached_s():.1f} s, longest gap {self.gap_s():.1f} s, whole {self.whole_s():.1f} s, "
            f"lost {sorted(self.lost())}, fenced {sorted(world.fenced(self.began))}, failed {len(world.failures(self.began))}"
        )

"""Faults of links between hosts, alone and beside one of a process: what a seed deals,
and how it is done to a world.

By pair and direction: ``cut`` and ``cut one way``; ``cut host`` (from all others);
``flap`` (cut and healed again and again); ``loss`` up to 30 %; ``delay`` up to 300 ms
each way; ``rate`` and ``rate one way`` from 10 kB/s to 200 Mbit/s; ``slow host``: a
rate and a delay on all its ways. Of processes: SIGKILL of a rank, a sidecar, the store
or the coordinator (which is started again), and SIGSTOP of a rank for as long as the
links are broken.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.links.far_world import A, B, C, D, FarWorld
from tests.support.machine.switch import MBIT_NBYTES, Shape

__all__ = ["LinkFault", "ProcessFault", "Trouble", "done", "troubles"]

LINKS = ("cut", "cut one way", "cut host", "flap", "loss", "delay", "rate", "rate one way", "slow host")
PROCESSES = ("kill rank", "kill sidecar", "stop rank", "kill store", "kill coordinator")
CARRIERS = ("kill carrier", "kill carriers of B", "stop carrier", "starve carrier")
"""``starve``: no further descriptor."""
RATES_NBYTES_S = (10_000.0, 200.0 * MBIT_NBYTES)
FLAP_S = 0.4


@dataclass(frozen=True)
class LinkFault:
    """``other``: -1 for a fault of a whole host."""

    kind: str
    one: int
    other: int
    shape: Shape

    def __str__(self) -> str:
        names = "ABCD"
        whom = names[self.one] + (
            "" if self.other < 0 else f"{'>' if 'one way' in self.kind else '-'}{names[self.other]}"
        )
        rate, delay_s, loss = self.shape
        words = {f"{rate / 1000:.0f} kB/s": rate, f"{delay_s * 1000:.0f} ms": delay_s, f"{loss:.0%}": loss}
        return " ".join((self.kind, whom, *(word for word, value in words.items() if value)))

    @property
    def hosts(self) -> set[int]:
        """Those whose ways it touches."""
        return {self.one, self.other} - {-1}

    @property
    def apart(self) -> set[int]:
        """Hosts whose way to the coordinator it touches."""
        if self.other < 0:
            return {B, C, D} if self.one == A else {self.one}
        return self.hosts - {A} if A in self.hosts else set()

    def do(self, world: FarWorld) -> None:
        switch = world.switch
        if self.kind == "cut host":
            switch.cut_off(self.one)
        elif self.kind == "slow host":
            switch.shape_all(self.shape, self.one)
        elif self.kind.startswith(("cut", "flap")):
            switch.cut(self.one, self.other, one_way="one way" in self.kind)
        else:
            switch.shape(self.one, self.other, self.shape, one_way="one way" in self.kind)

    def go_on(self, world: FarWorld, seconds: float) -> None:
        """So long after it began."""
        if self.kind == "flap" and int(seconds / FLAP_S) % 2:
            world.switch.heal(self.one, self.other)
        elif self.kind == "flap":
            self.do(world)


@dataclass(frozen=True)
class ProcessFault:
    """``pick``: which of several, from 0 to 1. ``after_s``: from the faults of
    links."""

    kind: str
    pick: float
    after_s: float

    def __str__(self) -> str:
        return f"{self.kind} after {self.after_s:.1f} s"

    def do(self, world: FarWorld) -> str:
        """The member that it was done to; empty for others."""
        names = sorted(world.members)
        name = names[int(self.pick * len(names))]
        if self.kind == "kill rank":
            world.kill(name)
        elif self.kind == "stop rank":
            _signal(world.members[name].pid, signal.SIGSTOP)
        elif "carrier" in self.kind:
            return self._do_carrier(world)
        elif self.kind == "kill sidecar":
            found = [pid for host in world.switch.hosts for pid in host.processes("replica-sidecar")]
            _signal(found[int(self.pick * len(found))] if found else 0, signal.SIGKILL)
            return ""
        elif self.kind == "kill store":
            found = [pid for pid in world.switch.hosts[A].processes() if "store_process" in _command(pid)]
            for pid in found:
                _signal(pid, signal.SIGKILL)
            return ""
        else:
            world.coordinator.close()
            world.start_coordinator()
            return ""
        return name

    def _do_carrier(self, world: FarWorld) -> str:
        hosts = [world.switch.hosts[B]] if self.kind.endswith("of B") else world.switch.hosts
        found = sorted(pid for host in hosts for pid in host.processes("replicas-carry"))
        for pid in found[int(self.pick * len(found)) :][:1]:
            if self.kind == "starve carrier":
                starve(pid)
            else:
                _signal(pid, signal.SIGSTOP if self.kind == "stop carrier" else signal.SIGKILL)
        return ""


def starve(pid: int) -> None:
    """It gets no descriptor besides those that it has."""
    with contextlib.suppress(OSError):  # it has just ended
        count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, hard))


def fed(world: FarWorld) -> None:
    """No carrier lacks descriptors any more."""
    for host in world.switch.hosts:
        for pid in host.processes("replicas-carry"):
            with contextlib.suppress(OSError):
                hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(1024, hard), hard))


@dataclass(frozen=True)
class Trouble:
    """What a round has. ``waits_s``: before it; ``lasts_s``: until all links are as
    they were."""

    links: tuple[LinkFault, ...]
    process: ProcessFault | None
    waits_s: float
    lasts_s: float

    def __str__(self) -> str:
        return (
            " + ".join(map(str, (*self.links, *([self.process] if self.process else []))))
            + f" for {self.lasts_s:.1f} s"
        )


def troubles(rng: random.Random, only: str = "") -> Iterator[Trouble]:
    """Without end: each kind of link fault comes before any comes again. ``only``: of
    kinds with this in their name."""
    dealt = (*PROCESSES, *CARRIERS)
    kinds = [kind for kind in LINKS if only in kind] or list(LINKS)
    hands: list[str] = []
    processes: list[str] = []
    while True:
        hands = hands or rng.sample(kinds, len(kinds))
        links = [_link(rng, hands.pop())]
        if rng.random() < 0.25:
            links.append(_link(rng, rng.choice(kinds)))
        process = None
        lasts_s = rng.choice((rng.uniform(0.3, 3.0), rng.uniform(3.0, 6.0), rng.uniform(8.0, 11.0)))
        if rng.random() < 0.6:
            processes = processes or rng.sample(dealt, len(dealt))
            process = ProcessFault(processes.pop(), rng.random(), rng.uniform(0.0, lasts_s * 0.8))
        yield Trouble(tuple(links), process, rng.uniform(0.0, 0.5), lasts_s)


def _link(rng: random.Random, kind: str) -> LinkFault:
    one, other = rng.sample((A, B, C, D), 2)
    low, high = map(math.log, RATES_NBYTES_S)
    rate, delay_s, loss = math.exp(rng.uniform(low, high)), rng.uniform(0.01, 0.3), rng.uniform(0.01, 0.3)
    shapes = {
        "loss": Shape(loss=loss),
        "delay": Shape(delay_s=delay_s),
        "rate": Shape(rate),
        "rate one way": Shape(rate),
        "slow host": Shape(rate, delay_s),
    }
    return LinkFault(kind, one, -1 if "host" in kind else other, shapes.get(kind, Shape()))


def done(trouble: Trouble, world: FarWorld, each: Callable[[], None]) -> str:
    """All of it, one after the other, and healed at the end; which member the fault of
    a process was done to.

    ``each`` is called many times a second meanwhile.
    """
    hit = ""
    began = time.monotonic()
    for link in trouble.links:
        link.do(world)
    left = trouble.process
    flapped = 0
    while (seconds := time.monotonic() - began) < trouble.lasts_s:
        if left is not None and seconds >= left.after_s:
            hit, left = left.do(world), None
        if int(seconds / FLAP_S) > flapped:
            flapped = int(seconds / FLAP_S)
            for link in trouble.links:
                link.go_on(world, seconds)
        each()
        time.sleep(0.05)
    if left is not None:
        hit = left.do(world)
    world.heal()
    fed(world)
    return hit


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signum)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return ""

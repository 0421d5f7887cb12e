"""From a fault to its deeds: who is hit, how the moment is brought about, and what is
done besides signals."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.anatomy import Anatomy, Body
from tests.chaos.programs.signals import EXIT, RAISE, REJOIN, REJOIN_OUTER
from tests.chaos.syncs.faults import Fault
from tests.chaos.syncs.noise import attack_port, framed, garbage
from tests.chaos.syncs.rig import LEASE_S, SyncWorld
from tests.support.waits import eventually

__all__ = ["Attack", "Victim", "choose"]

PATIENCE_S = 3.0
"""How long a moment is waited for before the fault comes anyway."""
SIGNALS = {
    "kill": signal.SIGKILL,
    "abort": signal.SIGABRT,
    "pause": signal.SIGSTOP,
    "freeze": signal.SIGSTOP,
    "exception": RAISE,
    "exit 0": EXIT,
}
HEADROOM_NBYTES = 2**20


@dataclass(frozen=True)
class Victim:
    """``replica``: to which it belongs, or the guest; empty for store, supervisor,
    forkserver and ports."""

    replica: str
    deeds: list[dict[str, Any]] = field(default_factory=list)


def choose(fault: Fault, world: SyncWorld, anatomy: Anatomy, spared: Set[str]) -> Victim | None:
    """Whom the fault hits, but none of the replicas and targets ``spared``; None when
    those are all that it could."""
    if fault.target in spared:
        return None
    if fault.target == "supervisor":
        return Victim("", [_deed(fault, pid=world.run.pid)])
    if fault.target == "store":
        return Victim("", [_deed(fault, pid=anatomy.store)])
    if fault.target == "forkserver":  # it starts when a rank first needs it
        return Victim("", [_deed(fault, pid=anatomy.forkserver)]) if anatomy.forkserver else None
    if fault.target.endswith("port"):
        return Victim("")
    if fault.target == "guest":
        if (
            world.guest.name in spared
        ):  # the one that has just been started has yet to join, and would replace the next one
            return None
        return Victim(world.guest.name, [] if fault.kind == "usurp" else [_deed(fault, pid=world.guest.pid)])
    bodies = [body for name, body in sorted(anatomy.bodies.items()) if name not in spared]
    if fault.group:
        bodies = [body for body in bodies if body.name.startswith("trainer") == (fault.group == "source")]
    if fault.target == "torchrun":
        bodies = [body for body in bodies if body.launcher]
    if fault.target == "sidecar" and world.shape.transport != "group":  # nobody else has any
        bodies = [body for body in bodies if body.name in world.shape.peers]
    if fault.target == "sidecar":
        bodies = [body for body in bodies if body.sidecars]
    if not bodies:
        return None
    body = bodies[int(fault.pick * len(bodies))]
    deeds = [] if fault.target == "session" else [_in_body(fault, body)]
    if (fault.kind, fault.target) == ("freeze", "torchrun"):  # nobody would miss it otherwise
        deeds.append({"signal": int(signal.SIGKILL), "pid": body.ranks[-1]})
    return Victim(body.name, deeds)


def _in_body(fault: Fault, body: Body) -> dict[str, Any]:
    if fault.target == "sidecar":
        return _deed(fault, beside=body.ranks[0], pick=fault.pick * 7919 % 1.0)
    rank = body.ranks[int(fault.pick * 7919) % len(body.ranks)]
    others = {"pump": body.pump, "torchrun": body.launcher, "shim": body.shim}
    pid = others.get(fault.target, rank)
    return _deed(fault, pid=pid)


def _deed(fault: Fault, **whom: float) -> dict[str, Any]:
    if fault.kind == "memory full":
        return {"limit_nbytes": HEADROOM_NBYTES, **whom}
    return {"signal": int(SIGNALS[fault.kind]), **whom}


class Attack:
    """One fault on its way. ``undo`` gets what must be taken back at the end of the
    round."""

    def __init__(self, fault: Fault, victim: Victim, world: SyncWorld, anatomy: Anatomy, undo: ExitStack) -> None:
        self.fault = fault
        self.victim = victim
        self.at = self.since = 0.0
        """When it was done, and when there was nothing more to do."""
        self.landed = ""
        self.late = False
        self.refused = False
        """Something was sent that must have been refused, and counted."""
        self.pids: list[int] = []
        self._world = world
        self._anatomy = anatomy
        self._undo = undo
        self._rng = random.Random(fault.noise)

    def __str__(self) -> str:
        fault, where = self.fault, " late" if self.late else ""
        moment = fault.moment if fault.channel == "policy" else f"{fault.moment} ({fault.channel})"
        hit = f" [{self.landed}{where}]" if self.late or self.landed != fault.moment else ""
        pids = f" pid {', '.join(map(str, self.pids))}" if self.pids else ""
        return f"{fault} {self.victim.replica} @ {moment}{hit}{pids}"

    def run(self) -> None:
        """Wait for the moment, and do it."""
        fault, world = self.fault, self._world
        number = world.arm(fault.channel, fault.moment, fault.delay_s, self.victim.deeds)
        if fault.moment in ("forming", "catching up") or fault.channel == "outer":
            self._bring_about()
        done = world.done(number, PATIENCE_S)
        self.at, self.landed, self.late, self.pids = done["at"], done["landed"], done["late"], done["hit"]
        act: Callable[[], None] | None = {
            "pause": self._pause,
            "freeze": self._freeze,
            "memory full": self._memory_full,
            "half-close": self._half_close,
            "delay": self._delay,
            "garbage": self._garbage,
        }.get(fault.kind)
        if act is not None:
            act()
        if fault.target == "guest":
            self._replace_guest()
        if fault.kind == "freeze" and fault.target in ("forkserver", "store"):
            self._bring_about(wait=True)  # nobody would miss it otherwise
        self.since = time.monotonic()

    def _replace_guest(self) -> None:
        """Half of those that are frozen are lost by their lease, the others to the new
        one."""
        if self.fault.kind == "freeze" and self._rng.random() < 0.5:
            time.sleep(LEASE_S + 1.0)
        self._world.guest.start()

    def _bring_about(self, *, wait: bool = False) -> None:
        """A lane is formed, or somebody caught up, only when the members change: have
        one of them join again.

        So does the coordinator hear of collectives only then.
        """
        fault = self.fault
        names = [name for name in ("serve-0", "serve-1") if name != self.victim.replica]
        if fault.moment == "catching up" and fault.target == "target rank" and self.victim.replica.startswith("serve"):
            names = [self.victim.replica]
        name = names[int(fault.pick * 104729) % len(names)]
        order, suffix = (REJOIN, "") if fault.channel == "policy" else (REJOIN_OUTER, ".outer")
        before = len(self._world.log(f"{name}.0{suffix}"))
        self._world.signal(self._anatomy.bodies[name].ranks[0], order)

        def joined() -> bool:
            return any("joined" in line for line in self._world.log(f"{name}.0{suffix}")[before:])

        if wait:
            eventually(joined, f"{name} to join again")

    # ------------------------------------------------------- what is more than a signal

    def _pause(self) -> None:
        time.sleep(self.fault.pause_s)  # the fault itself, not a wait for anything
        self._go_on()

    def _freeze(self) -> None:
        self._undo.callback(self._go_on)

    def _go_on(self) -> None:
        for pid in self.pids:
            self._world.signal(pid, signal.SIGCONT)

    def _memory_full(self) -> None:
        time.sleep(self.fault.pause_s)
        self._world.unlimit()

    def _half_close(self) -> None:
        inwards = self._rng.random() < 0.5
        self._world.gateway.do(self.victim.replica, lambda proxy: proxy.half_close(inwards=inwards))

    def _delay(self) -> None:
        def slow(delay_s: float) -> None:
            self._world.gateway.do(self.victim.replica, lambda proxy: setattr(proxy, "delay_s", delay_s))

        slow(self._rng.uniform(0.05, 0.8))
        time.sleep(self.fault.pause_s)
        slow(0.0)

    def _garbage(self) -> None:
        world, rng, trap = self._world, self._rng, self._world.out / "trap"
        if self.fault.target == "session":
            inwards = rng.random() < 0.5
            data = garbage(rng, trap)
            data = framed(data, masked=inwards) if rng.random() < 0.5 else data
            world.gateway.do(self.victim.replica, lambda proxy: proxy.spoil(data, inwards=inwards))
            return
        store = world.run.status().store
        host, _, port = world.run.endpoint().rpartition(":")
        address = (store.host, store.port) if self.fault.target == "store port" else (host, int(port))
        for _ in range(5):
            kind = attack_port(address, rng, trap, world.token())
            self.refused |= self.fault.target == "control port" and kind in ("a wrong token", "nonsense for a Hello")

"""Faults of nodes, by seed: what is dealt, and how it is done to a world.

A fault begins, lasts, and ends. ``short`` ones are over within the lease, ``long`` ones
are not: the node's replicas then start elsewhere, and it comes back after that.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from replicas.control.commands import Drain, Order, Restart, Scale
from replicas.errors import ReplicasError
from replicas.linux.processes import start_time
from tests.chaos.census import Life, now
from tests.chaos.nodes.node_host import NAMES, Host, mark_of
from tests.chaos.nodes.node_world import ADOPT_S, ROLLOUTS, NodeWorld
from tests.support.machine.disks import fill

__all__ = ["KINDS", "LOST_S", "NodeFault", "deck"]

LOST_S = ADOPT_S + 5.0
"""A node is lost so long after its last beat (``core/lives/lease_times.py``)."""
AGENT = ("-m replicas agent", "agent.local")
SUPERVISOR = ("tests.chaos.nodes.node_supervisor",)
SHIM = ("supervisor.shim.shim",)
_LATER_S = 6.0
"""Time in which what was lost should be running elsewhere before the node is back."""
FAR = (1, 2, 3)
ANY = (0, 1, 2, 3)
KINDS: dict[str, tuple[int, tuple[int, ...], tuple[float, float]]] = {
    "kill agent": (3, ANY, (0.3, 2.0)),
    "kill agent, a frozen shim": (2, FAR, (8.0, 12.0)),
    "kill agent, long": (1, FAR, (LOST_S + _LATER_S, LOST_S + _LATER_S)),
    "kill node": (3, FAR, (0.3, 3.0)),
    "kill node, long": (2, FAR, (LOST_S + _LATER_S, LOST_S + _LATER_S)),
    "power cut": (2, FAR, (2.0, 6.0)),
    "power cut, long": (3, FAR, (LOST_S + _LATER_S, LOST_S + _LATER_S)),
    "partition 1 s": (2, FAR, (1.0, 1.0)),
    "partition, short": (2, FAR, (ADOPT_S * 0.6, ADOPT_S * 0.6)),
    "partition, about a lease": (3, FAR, (ADOPT_S - 1.0, LOST_S + 1.0)),
    "partition 20 s": (2, FAR, (20.0, 20.0)),
    "partition, long": (3, FAR, (LOST_S + _LATER_S, LOST_S + _LATER_S)),
    "freeze agent": (2, ANY, (1.0, ADOPT_S * 0.6)),
    "freeze agent, about a lease": (2, FAR, (ADOPT_S - 1.0, LOST_S + 1.0)),
    "freeze agent, killed supervisor": (2, (0,), (1.0, ADOPT_S * 1.5)),
    "freeze agent, long": (2, FAR, (LOST_S + _LATER_S, LOST_S + _LATER_S)),
    "freeze node": (1, FAR, (1.0, 3.0)),
    "freeze node, long": (2, FAR, (LOST_S + _LATER_S, LOST_S + _LATER_S)),
    "full disk": (2, ANY, (2.0, 8.0)),
    "clock": (2, ANY, (0.0, 0.0)),
    "kill supervisor": (4, (0,), (0.1, 2.0)),
    "kill supervisor, long": (1, (0,), (ADOPT_S + 6.0, ADOPT_S + 6.0)),
    "kill supervisor, another namespace": (3, (0,), (0.1, 3.0)),
    "kill supervisor, another machine": (3, (0,), (0.1, 3.0)),
    "kill supervisor, lost state": (2, (0,), (0.1, 3.0)),
    "kill supervisor, old state": (2, (0,), (0.1, 3.0)),
    "kill supervisor, newer state": (2, (0,), (0.1, 3.0)),
    "kill supervisor, full disk": (2, (0,), (2.0, 8.0)),
    "kill supervisor's host": (1, (0,), (0.5, 2.0)),
    "power cut of supervisor's host": (1, (0,), (1.0, 3.0)),
    "drain": (2, FAR, (2.0, 5.0)),
    "drain, undone": (1, ANY, (2.0, 5.0)),
    "leave": (2, FAR, (2.0, 5.0)),
    "scale": (1, (0,), (1.0, 6.0)),
    "rolling restart": (1, (0,), (0.0, 0.0)),
    "kill shim": (1, ANY, (0.0, 0.0)),
    "kill rank": (1, ANY, (0.0, 0.0)),
}
"""By name: how often, on which hosts, and for how long from and to."""


@dataclass
class NodeFault:
    """``pick``: chooses one of several hosts and processes. The rest is filled in when
    it is done: ``hit`` and ``over`` are when it began and ended, ``ranks`` those of the
    host then, and ``old`` all that belonged to their replicas, by these."""

    kind: str
    waits_s: float
    lasts_s: float
    pick: float
    host: int = -1
    hit: float = 0.0
    over: float = 0.0
    old: dict[str, list[Life]] = field(default_factory=dict)
    ranks: list[Life] = field(default_factory=list)
    trainers: bool = False
    _full: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    refused: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {NAMES[self.host]} after {self.waits_s:.1f} s for {self.lasts_s:.1f} s"

    @property
    def of_supervisor(self) -> bool:
        """No supervisor is there for a while."""
        return "supervisor" in self.kind

    @property
    def of_node(self) -> bool:
        """It is the node's fault alone that replicas end."""
        return self.host > 0 and self.kind.startswith(("kill agent", "kill node", "power cut", "partition", "freeze"))

    @property
    def of_state(self) -> bool:
        """The next supervisor does not know what runs."""
        return self.kind.endswith(" state")

    @property
    def moves(self) -> bool:
        """Whatever ran on the host ends, and runs again somewhere."""
        if self.kind.endswith(("another namespace", "another machine")):
            return True
        if self.kind.startswith(("kill agent", "kill node", "power cut", "drain", "leave")) or "host" in self.kind:
            return True
        return self.kind.endswith("long") or self.kind == "partition 20 s"

    def touches_all(self, world: NodeWorld) -> bool:
        """Whether replicas on any host may have ended: a supervisor that was not there
        in time, on a busy machine, adopts nothing."""
        late = self.of_supervisor and world.supervised(self.hit) - self.hit > ADOPT_S - 3.0
        return late or self.of_state or self.kind in ("scale", "rolling restart")

    # ------------------------------------------------------------ doing it

    def aim(self, world: NodeWorld, taken: Collection[int]) -> bool:
        """Choose a host, one with replicas if there is one; False: all are taken."""
        hosts = [host for host in KINDS[self.kind][1] if host not in taken]
        used = {life.node for life in world.census.alive().values()}
        hosts = [host for host in hosts if NAMES[host] in used] or hosts
        if hosts:
            self.host = hosts[int(self.pick * len(hosts))]
        return bool(hosts)

    def begin(self, world: NodeWorld) -> None:
        host = world.hosts[self.host]
        agent, supervisor, shims = (host.find(*names) for names in (AGENT, SUPERVISOR, SHIM))
        self.ranks = [life for life in world.census.alive().values() if life.node == host.name]
        self.trainers = any(life.name.startswith("trainer") for life in self.ranks)
        of_replicas, marks = host.of_replicas, {life.name: mark_of(life.pid) for life in self.ranks}
        for name, mark in marks.items():
            self.old[name] = world.census.watch(pid for pid, its in of_replicas.items() if its == mark)
        self.hit = now()
        match self.kind.partition(",")[0]:
            case "kill agent":
                host.off_until = self.hit + self.lasts_s if self.host else 0.0
                if "frozen shim" in self.kind:
                    host.off_until = self.hit  # the next one meets it
                    self._one(host, shims, signal.SIGSTOP)
                send_each(host, signal.SIGKILL, agent)
            case "kill node" | "kill supervisor's host":
                host.off_until = self.hit + self.lasts_s
                kill_all(host)
            case "power cut" | "power cut of supervisor's host":
                host.off_until = float("inf")
                world.switch.cut_off(self.host)
                kill_all(host)
            case "partition" | "partition 1 s" | "partition 20 s":
                world.switch.cut_off(self.host)
            case "freeze agent":
                send_each(host, signal.SIGSTOP, agent)
                if self.of_supervisor:
                    send_each(host, signal.SIGKILL, supervisor)
            case "freeze node":
                freeze_all(host)
            case "full disk":
                if host.has_disk:
                    self._full.enter_context(fill(host.state_dir.parent))
            case "clock":
                host.set_clock((self.pick - 0.5) * 60 * 3600)
            case "kill supervisor":
                host.off_until = self.hit + self.lasts_s
                if "full disk" in self.kind and host.has_disk:
                    host.off_until = self.hit
                    self._full.enter_context(fill(host.state_dir.parent))
                send_each(host, signal.SIGKILL, supervisor)
                self._change(world, host)
            case "drain":
                host.off_until = self.hit + self.lasts_s
                self._order(world, Drain(node=self._name(world)))
            case "leave":
                host.off_until = self.hit + self.lasts_s
                send_each(host, signal.SIGTERM, agent)
            case "scale":
                self._order(world, Scale(group="serve", replicas=ROLLOUTS - 1 - int(self.pick * 3)))
            case "rolling restart":
                self._order(world, Restart(target="serve", rolling=True))
            case "kill shim":
                self._one(host, shims)
            case "kill rank":
                self._one(host, [life.pid for life in self.ranks])

    def _change(self, world: NodeWorld, host: Host) -> None:
        """What the next supervisor finds, or where it starts."""
        state = host.state_dir / "state.json"
        match self.kind.partition(", ")[2]:
            case "another namespace" | "another machine" as where:
                host.enter_space(machine=where == "another machine")
            case "lost state":
                state.unlink(missing_ok=True)
            case "old state" if world.old_state:
                state.write_bytes(world.old_state)
            case "newer state" if state.exists():
                state.write_bytes(state.read_bytes().replace(b'"schema":1', b'"schema":99'))

    def end(self, world: NodeWorld) -> None:
        """All is again as it was, as far as this fault is concerned."""
        host = world.hosts[self.host]
        match self.kind.partition(",")[0]:
            case "power cut" | "power cut of supervisor's host":
                host.boot()
                world.switch.heal(self.host)
                host.off_until = now()
            case "partition" | "partition 1 s" | "partition 20 s":
                world.switch.heal(self.host)
            case "freeze agent" | "freeze node" | "kill agent":
                host.go_on()
            case "full disk" | "kill supervisor":
                self._full.close()
            case "drain" if self.kind == "drain, undone":
                self._order(world, Drain(node=self._name(world), undo=True))
            case "scale":
                self._order(world, Scale(group="serve", replicas=ROLLOUTS))
        self.over = now()

    def _one(self, host: Host, pids: list[int], signum: int = signal.SIGKILL) -> None:
        send_each(host, signum, sorted(pids)[int(self.pick * len(pids)) :][:1])

    def _name(self, world: NodeWorld) -> str:
        if self.host:
            return NAMES[self.host]
        status = world.status()
        return next((node.name for node in status.nodes if node.local), "?") if status is not None else "?"

    def _order(self, world: NodeWorld, order: Order) -> None:
        try:
            world.order(order)
        except (ReplicasError, OSError) as error:  # its supervisor is gone just now
            self.refused = str(error)


def send_each(host: Host, signum: int, pids: list[int]) -> None:
    if pids:
        host.send(signum, *pids)


def kill_all(host: Host) -> None:
    """In the order in which they were started, as ``kill -9 -1`` does: an agent that
    outlived its shims for a moment would tell of their deaths. Again and again, as they
    start others meanwhile."""
    while pids := sorted(host.pids, key=lambda pid: start_time(pid) or 0):
        host.send(signal.SIGKILL, *pids)


def freeze_all(host: Host) -> None:
    stopped: set[int] = set()
    while pids := {*host.pids} - stopped:
        host.send(signal.SIGSTOP, *pids)
        stopped |= pids


def deck(rng: random.Random, only: str, pairs: float) -> Iterator[tuple[NodeFault, ...]]:
    """For ever: one fault, or two at once on different hosts.

    :param pairs: how probable two are.
    """
    kinds = [kind for kind in KINDS if not only or kind == only]
    weights = [KINDS[kind][0] for kind in kinds]

    def deal() -> NodeFault:
        kind = rng.choices(kinds, weights)[0]
        _, _, (least_s, most_s) = KINDS[kind]
        return NodeFault(kind, rng.uniform(0.0, 2.0), round(rng.uniform(least_s, most_s), 1), rng.random())

    while True:
        first, second = deal(), deal()
        yield (first, second) if rng.random() < pairs else (first,)

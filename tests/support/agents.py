"""Agents on fake shims, and a fleet over several of them, in virtual time.

A :class:`FakeAgent` keeps the protocol of agents, and its shims live as planned
(:class:`tests.support.fleets.Life`). Its network can be cut, it can freeze, and it can
be killed; it keeps its lease as a real one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from msgspec.structs import replace

from replicas.config.structs import Config, GroupConfig
from replicas.core.lives.lease_times import BEAT_S, END_S
from replicas.core.lives.tenancy import Tenancy
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.checks import Finding
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.fleet.cluster import Cluster
from replicas.supervisor.fleet.fleet import Fleet
from replicas.supervisor.fleet.handle import AgentLink
from replicas.supervisor.fleet.nodes import Nodes
from replicas.supervisor.wire.orders import PartSpec, plain
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, RankExit
from replicas.trust.tokens import Tokens
from tests.support.fleets import Life, Yard, config_of

__all__ = ["LEASE_S", "OUTLIVES_S", "FakeAgent", "Field", "field"]

LEASE_S = 10.0
OUTLIVES_S = 23.0
"""For how long the own node's processes may outlive the supervisor."""


class _Shim:
    def __init__(self, agent: FakeAgent, order: wire.Start, life: Life) -> None:
        spec = order.spec
        self.agent, self.life = agent, life
        self.dies_s = 0.0
        """From SIGKILL to its end."""
        self.name = f"{spec['group']}/{spec['replica']}"
        self.state = UNKNOWN.with_identity_of(PartSpec.of(spec))._replace(pid=7)
        self.loop = asyncio.get_running_loop()
        self.loop.call_later(life.start_s, self._started)
        if life.ends_s is not None:
            report = ExitReport("failed", ranks=(RankExit(0, life.code),)) if life.code else ExitReport("ok")
            self.loop.call_later(life.start_s + life.ends_s, self.end, report)

    @property
    def alive(self) -> bool:
        return not self.state.gone

    def _set(self, **changes: Any) -> None:
        self.state = self.state._replace(**changes)
        self.agent.tell(wire.PartNews(plain(self.state)))

    def _started(self) -> None:
        if self.state.report is None:
            self._set(main_pid=8)

    def stop(self, timeout_s: float) -> None:
        self._set(stopping=True)
        takes_s = timeout_s if self.life.stop_s is None else min(self.life.stop_s, timeout_s)
        self.loop.call_later(takes_s + self.dies_s, self.end, ExitReport("stopped"))

    def end(self, report: ExitReport) -> None:
        if self.alive:
            self._set(report=report, gone=True)


class FakeAgent:
    """The agent of one node.

    :ivar cut: nothing passes between it and the supervisor until :meth:`heal`.
    :ivar dead: its process is gone. :ivar frozen: its process does not run.
    """

    def __init__(self, field: Field, name: str, *, local: bool = False, **offer: Any) -> None:
        self.field, self.name, self.local = field, name, local
        gpus, cpus = tuple(map(str, range(offer.pop("gpus", 0)))), offer.pop("cpus", 1)
        self.machine = Machine(gpus=gpus, cpus=cpus, memory_nbytes=64 << 30)
        self.labels: dict[str, str] = offer.pop("labels", {})
        self.scope: str = offer.pop("scope", name)
        assert not offer
        self.incarnation = f"{name}.{self.scope}.1"
        self.shims: dict[str, _Shim] = {}
        self.cut = self.dead = self.frozen = False
        self.over = self.refused = self.token = ""
        self.asked: list[wire.Examine] = []
        self._held: list[Callable[[], None]] = []
        self._tenancy = Tenancy()
        self._connected = False
        self._link: _Link | None = None
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run())

    def tell(self, message: wire.AgentMessage) -> None:
        if self._connected and self.cut:
            self._held.append(lambda: self.field.cluster.receive(self.name, wire.encode(message)))
        elif self._connected and not self.frozen:
            self.field.cluster.receive(self.name, wire.encode(message))

    def heal(self) -> None:
        """End the cut: what both sides have sent arrives."""
        self.cut = False
        held, self._held = self._held, []
        for arrives in held if self._connected else ():
            arrives()

    async def _run(self) -> None:
        while not self.over:
            now = self._loop.time()
            if not (self.dead or self.frozen):
                if not self._connected and not self.cut:
                    self._join(now)
                if self._connected:
                    self.tell(wire.Beat(self._tenancy.next_beat(now)))
                if self._tenancy.over(now):
                    for shim in self.shims.values():
                        self._loop.call_later(min(END_S, shim.life.stop_s or END_S), shim.end, ExitReport("stopped"))
            elif self._tenancy.over(now) or self.dead:  # the shims have the same lease, and see its death
                for shim in self.shims.values():
                    self._loop.call_later(2.0, shim.end, ExitReport("stopped"))
            await asyncio.sleep(BEAT_S)

    def _join(self, now: float) -> None:
        link = _Link(self)
        hello = wire.Hello(
            release="test",
            node=self.name,
            incarnation=self.incarnation,
            pid=5,
            start_time=6,
            scope=self.scope,
            address=self.name,
            labels=self.labels,
            machine=None if self.local else self.machine,
            parts=tuple(plain(shim.state) for shim in self.shims.values()),
        )
        self._asked_at = now
        self._link, self._connected = link, True
        if not self.field.cluster.hello(hello, link, local=self.local, seen_at=self.name):
            self._connected = False

    def obey(self, data: bytes) -> None:
        if self.cut:
            self._held.append(lambda: self.obey(data))
        if self.cut or self.dead or self.frozen:
            return
        match order := wire.decode_order(data):
            case wire.Welcome(lease_s=lease_s):
                self._tenancy.granted(lease_s, self._asked_at)
            case wire.Refused(message=message):
                self.refused = message
            case wire.NewToken(operator=operator):
                self.token = operator
            case wire.Heard(number):
                self._tenancy.extend_lease(number)
            case wire.Start():
                name = f"{order.spec['group']}/{order.spec['replica']}"
                if order.spec["nonce"] not in self.shims:
                    self.shims[order.spec["nonce"]] = _Shim(self, order, self.field.life_of(name))
                    self.field.check()
            case wire.Stop(nonce=nonce, timeout_s=timeout_s):
                if nonce in self.shims:
                    self.shims[nonce].stop(timeout_s)
            case wire.Forget(nonce):
                self.shims.pop(nonce, None)
            case wire.Clean(shims):
                self._loop.call_later(3.0, self.tell, wire.Cleaned(tuple(one.nonce for one in shims)))
            case wire.Examine(number=number):
                self.asked.append(order)
                self.tell(wire.Examined(number=number, findings=(Finding("gpus", "ok", f"none on {self.name}"),)))
            case wire.Over(reason):
                self.over = reason
                for shim in self.shims.values():
                    shim.end(ExitReport("stopped"))
                self.hang_up()

    def hang_up(self) -> None:
        """The connection ends, and both sides see it."""
        link, self._link, self._connected = self._link, None, False
        self._held = []
        if link is not None:
            self._loop.call_soon(self.field.cluster.closed, self.name, link)

    def kill(self) -> None:
        """The process of the agent is killed: its shims end within seconds."""
        self.dead = True
        self.hang_up()

    def start_again(self) -> None:
        """Another process takes its place."""
        self.dead = self.frozen = self._connected = False
        self.incarnation += "1"
        for shim in self.shims.values():
            shim.state = shim.state._replace(gone=True)
        self.shims = {}
        self._tenancy = Tenancy()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False


class _Link(AgentLink):
    def __init__(self, agent: FakeAgent) -> None:
        self._agent = agent

    def send(self, data: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._arrived, data)

    def _arrived(self, data: bytes) -> None:
        if self._agent._link is self:
            self._agent.obey(data)

    def close(self) -> None:
        if self._agent._link is self:
            self._agent._link, self._agent._connected = None, False


def adopting(config: Config, adopt_s: float = LEASE_S) -> Config:
    """The config of a run with these leases; 0: without adoption."""
    cluster = replace(config.cluster, lease_s=LEASE_S)
    return replace(config, run=replace(config.run, adopt_s=adopt_s), cluster=cluster)


class Field(Yard):
    """A yard with several nodes, its own among them.

    :ivar overlaps: replicas of which two generations were alive at once.
    """

    def __init__(self, groups: tuple[GroupConfig, ...], lives: Mapping[str, list[Life]]) -> None:
        super().__init__(adopting(config_of(*groups)), lives)
        self.own_scope = "local"
        self.operator_token = "first"
        self.cluster = self.new_cluster()
        self.agents: dict[str, FakeAgent] = {}
        self.overlaps: list[str] = []
        self._counts: dict[str, int] = {}

    def new_cluster(self) -> Cluster:
        def leaving(node: str, reason: str) -> None:
            self.said.append(f"{node} leaves: {reason}")

        return Cluster(self.context, is_own=lambda hello: hello.scope == self.own_scope, leaving=leaving)

    def nodes(self) -> Nodes:
        """What a supervisor's orders about nodes go through."""
        nodes = Nodes(self.context, lambda: self.fleet)
        nodes._cluster = self.cluster
        return nodes

    def life_of(self, name: str) -> Life:
        plan = self.lives.get(name) or self.lives.get(name.partition("/")[0]) or [Life()]
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        return plan[min(number, len(plan) - 1)]

    def check(self) -> None:
        """No replica may be alive in two generations."""
        alive: dict[str, set[int]] = {}
        for agent in self.agents.values():
            for shim in agent.shims.values():
                if shim.alive:
                    alive.setdefault(shim.name, set()).add(shim.state.generation)
        self.overlaps += [name for name, generations in alive.items() if len(generations) > 1]

    def join(self, name: str, **offer: Any) -> FakeAgent:
        agent = self.agents[name] = FakeAgent(self, name, **offer)
        return agent

    def where(self, name: str) -> str:
        """The node on which the replica lives now."""
        found = [
            agent.name
            for agent in self.agents.values()
            for shim in agent.shims.values()
            if shim.name == name and shim.alive
        ]
        return " and ".join(found)

    async def replace_supervisor(self, *groups: GroupConfig, lost: bool = False) -> None:
        """Another supervisor takes over, with these groups or the same, from what the
        one before had last saved. ``lost``: all but the leases of that."""
        saved, shims, agents = self.saved, self.fleet.shims(), self.cluster.records()
        await self.end()
        saved, shims, agents = ({}, (), ()) if lost else (saved, shims, agents)
        self._scopes, self._tasks = [], []
        leases = self.leases.written
        self.context = self.new_context(
            replace(self.config, groups=config_of(*groups).groups) if groups else self.config
        )
        self.resources.withdraw("local")
        self.cluster = self.new_cluster()
        nodes = self.nodes()
        nodes.adopting = bool(agents)
        self.context.awaited.inherit(leases, leases if lost else (), self._loop.time())
        nodes._expected = self.cluster.expect(agents, shims, self.own_scope)
        self.context.start_shim = self.cluster.start_shim
        self.fleet = Fleet(self.context, saved=saved)
        self.fleet.start(nodes.adopted(self.config))
        self.spawn(self.tend)
        for agent in self.agents.values():
            agent.hang_up()

    # ------------------------------------------------------------ its tokens

    @property
    def tokens(self) -> Tokens:
        return cast("Tokens", self)

    def text(self, role: str) -> str:
        return self.operator_token if role == "operator" else role

    async def tend(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.cluster.tick()


@asynccontextmanager
async def field(*groups: GroupConfig, lives: Mapping[str, list[Life]] | None = None) -> AsyncIterator[Field]:
    """A fleet whose nodes join in the block; it drains at the end."""
    made = Field(groups, lives or {})
    made.resources.withdraw("local")
    made.context.start_shim = made.cluster.start_shim
    made.fleet = Fleet(made.context)
    made.fleet.start()
    made.spawn(made.tend)
    try:
        yield made
        assert made.overlaps == [], "two generations of one replica at once"
        if not made.fleet.draining:
            await asyncio.wait_for(asyncio.create_task(made.fleet.drain()), 1000)
        made.cluster.order_all_to_end()
        await asyncio.sleep(1)
    finally:
        for agent in made.agents.values():
            agent._task.cancel()
        await made.end()

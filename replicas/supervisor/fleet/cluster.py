"""The nodes of a run: connect their agents, and start shims through them.

A node is known by its name, from the first Hello of its agent until it is drained. Its
connection and its willingness to take replicas are two tables
(:mod:`replicas.core.lives.node_life`). The replicas of a lost node end for the reason
``node``, which does not use the restart budget, and start elsewhere.

A new agent process on a node (another *incarnation*) has none of the earlier agent's
shims. It is ordered to end their leftover processes; only then have the replicas ended.
That works only if it can see those processes. With the same name elsewhere (another
machine or boot, or another pid namespace, such as another pod), the earlier agent's
lease must end first. A supervisor that takes a run over expects the nodes of the saved
state, with their shims, as if they were away, for the length of their leases. The agent
of an earlier supervisor's own machine cannot reconnect to this one: its processes end
with its lease. Agents that no state names are waited for, too
(:mod:`replicas.supervisor.fleet.awaited`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec

from replicas.common.foreign import one_line
from replicas.common.logs import Log
from replicas.common.patience import PauseClock
from replicas.common.tasks import is_set_within
from replicas.core.lives.lease_times import BEAT_S, lost_after_s
from replicas.core.lives.node_life import DutyEvent, NodeState
from replicas.status import NodeStatus
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.messages import Hello
from replicas.supervisor.fleet.admission import Admission, AgentLink, NodeEntry
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.state.run_state import AgentRecord, ProcessRecord, ShimRecord
from replicas.supervisor.wire.orders import PartSpec, plain
from replicas.supervisor.wire.part_state import ExitReport, PartState
from replicas.telemetry.events import NodeChanged

log = Log("replicas.supervisor")

_DRAINED = "the node is drained"
Reply = TypeVar("Reply", wire.LogReply, wire.Examined)


class Cluster:
    """The nodes of a run. For the event loop's thread only.

    :param lease_s: time after which a silent node is lost.
    :param outlives_s: for how long the own node's processes may outlive the supervisor.
    :param is_own: returns True if this supervisor started, or took over, the agent of a
        Hello that came through the run's own socket.
    :param leaving: called with a node that is about to be taken away, and the reason.
    """

    def __init__(
        self,
        context: FleetContext,
        *,
        lease_s: float,
        outlives_s: float = 0.0,
        is_own: Callable[[Hello], bool],
        leaving: Callable[[str, str], None],
    ) -> None:
        self._context, self._leaving = context, leaving
        self.awaited = context.awaited
        self._members: dict[str, NodeEntry] = {}
        self._admission = Admission(
            self._members, context.awaited, lease_s=lease_s, outlives_s=outlives_s, is_own=is_own
        )
        self._loop = asyncio.get_running_loop()
        self._clock = PauseClock(math.inf)
        self.incarnation = secrets.token_hex(8)
        """Random id of this supervisor process."""
        self.joined = asyncio.Event()
        """Set when the supervisor's own agent has joined."""
        self._hung_up = asyncio.Event()
        self._over = False
        self._replies: dict[tuple[type, int], asyncio.Future[Any]] = {}
        self._drains = itertools.count(1)
        self._released: set[str] = set()
        """Incarnations of agents that were ordered to end."""

    # ------------------------------------------------------------ shims

    def start_shim(self, spec: PartSpec, changed: Callable[[], None]) -> ShimHandle:
        """Order a shim on the node that its replica holds, and return its handle.

        If the node has gone away meanwhile, the handle has ended, for that reason.

        :raises OSError: the node of this part is unknown.
        """
        try:
            name = self._context.resources.node(spec.group, spec.replica, spec.node)
        except LookupError:
            raise OSError(f"{spec.group}/{spec.replica} has no node") from None
        member = self._members.get(name)
        if member is None:
            raise OSError(f"node {name} is unknown")
        limits = self._context.config.groups[spec.group].resources
        order = wire.Start(spec=plain(spec), memory_nbytes=limits.memory_nbytes, max_processes=limits.max_processes)
        handle = self._handle(spec.nonce, member, changed, start=order)
        if member.life.state != "up":  # not a failure of the replica
            handle.end(ExitReport("node", text=f"node {name} is {member.life.state}"))
            return handle
        member.handles[spec.nonce] = handle
        member.send(order)
        return handle

    def _handle(
        self,
        nonce: str,
        member: NodeEntry,
        changed: Callable[[], None] = lambda: None,
        *,
        start: wire.Start | None = None,
    ) -> ShimHandle:
        def unheard_s() -> float:
            if member.local:
                return 0.0
            return self.silent_s(member.name) if member.life.state == "up" else math.inf  # messages may come late

        return ShimHandle(
            nonce, member.name, member.send, changed, start=start, local=member.local, unheard_s=unheard_s
        )

    def expect(
        self, agents: Iterable[AgentRecord], shims: Iterable[ShimRecord], scope: str = ""
    ) -> dict[str, ShimHandle]:
        """Expect the nodes and shims of an earlier supervisor; return handles by mark.

        :param scope: of this machine: that supervisor's own agent must have the same.
        """
        now = self._loop.time()
        elsewhere: set[str] = set()
        gone: set[str] = set()
        for agent in agents:
            elsewhere |= {*agent.elsewhere}
            if agent.local and agent.scope != scope:
                gone.add(agent.node)
            local = agent.local and agent.node == self._context.resources.local
            member = self._members[agent.node] = NodeEntry(agent.node, local=local, now=now)
            member.incarnation, member.process, member.scope = agent.incarnation, agent.process, agent.scope
            member.life.lease_s = max(agent.lease_s, self._admission.lease_s(local=False))
            if agent.draining:
                self._ask(member, "drain")
        found: dict[str, ShimHandle] = {}
        for shim in shims:
            owner = self._members.get(shim.agent)
            if owner is None:
                continue
            handle = self._handle(shim.nonce, owner)
            handle.state = handle.state._replace(cgroup=shim.cgroup)
            if shim.process is not None:
                known = shim.process
                handle.state = handle.state._replace(pid=known.pid, start_time=known.start_time)
            found[shim.nonce] = handle
            if shim.nonce in elsewhere or owner.name in gone:
                self._wait_for_lease(owner, {shim.nonce: handle}, since=now)
            else:
                owner.handles[shim.nonce] = handle
        return found

    # ------------------------------------------------------------ agents

    def hello(self, hello: Hello, link: AgentLink, *, local: bool, seen_at: str) -> str:
        """Accept an agent, or refuse it.

        :param local: it came through the run's own socket.
        :param seen_at: the address from which it came.
        :return: the name of its node, or "" if it was refused.
        """
        if refusal := self._admission.refusal(hello, local=local):
            link.send(wire.encode(refusal))
            return ""
        states = [wire.part_state(part) for part in hello.parts]
        now, name = self._loop.time(), hello.node
        member = self._members.get(name)
        if member is None:
            member = self._members[name] = NodeEntry(name, local=local, now=now)
        if member.link is not None:
            member.link.close()
        before, again = member.life.state, member.incarnation == hello.incarnation
        if not again:
            self._inherit(member, hello.scope)
        member.scope, member.life.lease_s = hello.scope, self._admission.lease_s(local=local)
        member.incarnation, member.link, member.life.heard_at = hello.incarnation, link, now
        member.life.step("hello")
        member.process = ProcessRecord(hello.pid, hello.start_time)
        member.life.leased, member.release, member.labels = not local, hello.release, dict(hello.labels)
        member.address = hello.address or seen_at
        member.limits_refused = hello.limits_refused
        member.machine = hello.machine or self._context.resources.machine
        if not local and (not again or before == "lost"):
            self._ask(member, "anew")
        if released := hello.incarnation in self._released:
            self._ask(member, "release")
        member.send(self._welcome(local=local))
        if not local:
            member.send(self._new_token())  # tokens may have been replaced while it was away
        self._compare(member, states)
        self._drop_empty_leases(member)
        if member.cleaning:
            member.send(wire.Clean(tuple(one.left for one in member.cleaning.values())))
        if released:
            member.send(wire.Over(_DRAINED))  # the first one did not arrive
        self._offer(member)
        self._changed(member, before)
        if local:
            self.joined.set()
        return name

    def _welcome(self, *, local: bool) -> wire.Welcome:
        context, tokens = self._context, self._context.coordinator.tokens
        return wire.Welcome(
            run=context.config.run.name,
            supervisor=self.incarnation,
            lease_s=0.0 if local else self._admission.lease_s(local=False),
            adopt_s=context.config.run.adopt_s,
            endpoint="" if local else context.coordinator.endpoint,
            token="" if local else tokens.text("member"),
            state_id=context.state.identity if local else "",
        )

    def _new_token(self) -> wire.NewToken:
        tokens = self._context.coordinator.tokens
        return wire.NewToken(tokens.text("member"), tokens.text("operator"))

    def _inherit(self, member: NodeEntry, scope: str) -> None:
        """Assign the earlier agent's shims to a new agent, which ends them."""
        handles = member.cleaning | member.handles
        left = {nonce: handle for nonce, handle in handles.items() if not handle.state.gone}
        member.cleaning, member.handles = {}, {}
        if scope == member.scope or member.local:
            member.cleaning = left
        elif left:
            self._wait_for_lease(member, left, since=member.life.heard_at)
        for handle in left.values():
            handle.lose(ExitReport("node", text=f"the agent of node {member.name} died"))

    @staticmethod
    def _wait_for_lease(member: NodeEntry, handles: dict[str, ShimHandle], *, since: float) -> None:
        """Note that shims of an agent elsewhere end with its lease."""
        until = since + lost_after_s(member.life.lease_s)
        member.elsewhere.append((until, handles))
        for handle in handles.values():
            handle.over_at = until
            handle.lose(ExitReport("node", text=f"the agent of node {member.name} died"))

    def _compare(self, member: NodeEntry, states: Iterable[PartState]) -> None:
        """Compare an agent's shims with the expected ones; repeat orders."""
        told = {state.nonce: state for state in states}
        for nonce, handle in list(member.handles.items()):
            state = told.pop(nonce, None)
            if state is not None:
                self._state(member, state)
            elif handle.start is None and not handle.state.gone:
                handle.end(ExitReport("node", text=f"node {member.name} has lost it"))
                del member.handles[nonce]
            for order in handle.again(known=state is not None):
                member.send(order)
        for state in told.values():
            self._state(member, state)

    def _state(self, member: NodeEntry, state: PartState) -> None:
        handle = member.handles.get(state.nonce)
        if handle is None and not state.gone:  # of a replica that runs elsewhere now, or of another supervisor
            handle = self._stranger(member, state)
        if handle is not None:
            handle.start = None
            handle.update_state(state)
        if state.gone:
            member.handles.pop(state.nonce, None)
            member.send(wire.Forget(state.nonce))
            if member.life.duty != "open":
                self._nodes_changed()

    def _stranger(self, member: NodeEntry, state: PartState) -> ShimHandle:
        if len(member.handles) >= wire.SHIMS_MAX:
            raise msgspec.DecodeError(f"more than {wire.SHIMS_MAX:,} shims")

        def changed() -> None:
            if handle.state.gone and not member.life.over:
                self._offer(member)
                self._nodes_changed()

        handle = member.handles[state.nonce] = self._handle(state.nonce, member, changed)
        self.awaited.stranger(state, handle)
        handle.stop(0.0)
        self._offer(member)
        return handle

    def receive(self, node: str, data: bytes) -> None:
        """Handle a message of this node's agent.

        :raises msgspec.DecodeError: it is not a message of this protocol.
        """
        message = wire.decode_from_agent(data)
        if (member := self._members.get(node)) is None:
            return  # it was drained, and its connection is being closed
        if member.life.heard(self._loop.time()):
            self._offer(member)
            self._changed(member, "away")
        match message:
            case wire.Beat(number):
                member.send(wire.Heard(number))
            case wire.PartNews(state):
                self._state(member, wire.part_state(state))
            case wire.StacksFound(nonce=nonce, found=found):
                if (handle := member.handles.get(nonce)) is not None:
                    handle.found(found)
            case wire.Cleaned(nonces):
                for nonce in nonces:
                    if (left := member.cleaning.pop(nonce, None)) is not None:
                        left.end(ExitReport("node", text=f"the agent of node {member.name} died"))
                self._drop_empty_leases(member)
            case wire.Leaving(reason):
                self._leaving(node, one_line(reason))
            case wire.LogReply(number=number) | wire.Examined(number=number):
                asked = self._replies.pop((type(message), number), None)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case _:
                log.error("an unexpected %s of the agent of node %s", type(message).__name__, node)

    def closed(self, node: str, link: AgentLink) -> None:
        """Handle the end of a connection."""
        member = self._members.get(node)
        if member is None or member.link is not link:
            return
        member.link = None
        self._hung_up.set()
        if member.life.duty == "released" and not member.living:
            self._lose(member, "left", "its agent has left")
            del self._members[node]
        else:
            self._away(member, "closed")

    def _away(self, member: NodeEntry, event: Literal["closed", "silent"]) -> None:
        if member.life.step(event):
            self._offer(member)
            self._changed(member, "up")

    def tick(self) -> None:
        """Find nodes that are away or lost. Call it at least every second."""
        now = self._loop.time()
        pause_s, self._clock.due = self._clock.pause_at(now), now + BEAT_S
        for member in [*self._members.values()]:
            member.life.heard_at += pause_s  # what has arrived meanwhile is not handled yet
            self._end_elsewhere(member, now)
            match member.life.due_event(now):
                case "silent":
                    self._away(member, "silent")
                case "lease_over":
                    silent_s = now - member.life.heard_at
                    self._lose(member, "lease_over", f"nothing was heard of it for {silent_s:.0f} s")
                    if member.life.duty == "released":
                        del self._members[member.name]
        if self.awaited.tick(now):
            self._context.say("the leases of earlier supervisors are over")
            self._nodes_changed()

    def _end_elsewhere(self, member: NodeEntry, now: float) -> None:
        """End handles of an agent elsewhere whose lease is over."""
        over = [handles for until, handles in member.elsewhere if now > until]
        member.elsewhere = [(until, handles) for until, handles in member.elsewhere if now <= until]
        for handle in itertools.chain(*(handles.values() for handles in over)):
            handle.end(ExitReport("node", text=f"the agent of node {member.name} died"))
        if over:
            self._drop_empty_leases(member)

    def _drop_empty_leases(self, member: NodeEntry) -> None:
        """Forget leases of earlier agents of the node if their shims are gone."""
        if not (member.elsewhere or member.cleaning):
            self.awaited.end(member.name, but=member.incarnation)

    def silent_s(self, node: str) -> float:
        """Return the seconds since this node was heard."""
        member = self._members.get(node)
        return self._loop.time() - member.life.heard_at if member is not None else 0.0

    def _lose(self, member: NodeEntry, event: Literal["left", "lease_over"], reason: str) -> None:
        """Note that the node's processes are gone, so replicas may start elsewhere."""
        before = member.life.state
        member.life.step(event)
        if member.link is not None:
            member.link.close()
            member.link = None
        lost, member.handles, member.cleaning, member.elsewhere = member.living, {}, {}, []
        self.awaited.end(member.name)
        self._offer(member)
        self._changed(member, before, reason)
        for handle in lost:
            handle.end(ExitReport("node", text=f"node {member.name} was lost: {reason}"))

    def _offer(self, member: NodeEntry) -> None:
        resources = self._context.resources
        if member.life.over:
            resources.withdraw(member.name)
            return
        is_open = member.life.takes_replicas and not self.awaited.strangers_on(member.name)
        if not member.local:
            resources.offer(member.name, member.machine, member.labels, open=is_open)
        else:
            resources.open(member.name, is_open)

    def _changed(self, member: NodeEntry, before: NodeState, reason: str = "") -> None:
        after = member.life.state
        if after != before and not self._over and not (member.local and after == "up"):
            self._context.emit(
                NodeChanged(node=member.name, before=before, after=after, reason=reason, address=member.address)
            )
            self._context.say(f"node {member.name}: {after}{': ' if reason else ''}{reason}")
        self._nodes_changed()

    def _nodes_changed(self) -> None:
        self._context.wake_monitor()
        self._context.save()

    # ------------------------------------------------------------ operators' orders

    def limits_refused(self, node: str) -> str:
        """Return why memory and processes cannot be limited there, or ""."""
        member = self._members.get(node)
        return member.limits_refused if member is not None else ""

    def names(self) -> list[str]:
        return list(self._members)

    def others(self) -> list[str]:
        """Return the nodes of other machines that are up."""
        return [name for name, member in self._members.items() if not member.local and member.life.state == "up"]

    def drain(self, node: str) -> int:
        """Start no new replicas on the node. Return the number of this drain."""
        member = self._members[node]
        self._ask(member, "drain")
        self._offer(member)
        self._nodes_changed()
        return member.drain

    def _ask(self, member: NodeEntry, event: DutyEvent) -> None:
        member.life.ask(event)
        member.drain = 0 if member.life.duty == "open" else member.drain or next(self._drains)

    def undrain(self, node: str) -> None:
        """Allow new replicas on the node again."""
        member = self._members[node]
        self._ask(member, "undrain")
        self._released.discard(member.incarnation)
        self._offer(member)
        self._nodes_changed()

    def drains(self, node: str, number: int) -> bool:
        """Return True if drain ``number`` was not undone, and the agent is the same."""
        member = self._members.get(node)
        return member is None or member.drain == number

    def draining(self) -> list[str]:
        """Return the nodes that are being drained or are drained."""
        return [name for name, member in self._members.items() if member.life.duty != "open"]

    def is_empty(self, node: str) -> bool:
        """Return True if the node has no shim left, or is lost."""
        member = self._members.get(node)
        return member is None or member.life.over or not member.living

    def release(self, node: str) -> None:
        """Order the agent of a drained node to end; forget a lost node."""
        if (member := self._members.get(node)) is not None:
            self._released.add(member.incarnation)
            self._ask(member, "release")
            member.send(wire.Over(_DRAINED))
            if member.life.state == "lost":
                del self._members[node]

    def living(self) -> list[str]:
        """Return the nodes on which processes may be left."""
        return [name for name, member in self._members.items() if member.living]

    def tell_tokens(self) -> None:
        """Send the present tokens to the agents of other machines."""
        for node in self._members.values():
            if not node.local:
                node.send(self._new_token())

    def unreached(self) -> tuple[str, ...]:
        """Return the nodes that may live but cannot be sent a new token now."""
        now = self._loop.time()
        silent = [
            one.name
            for one in self._members.values()
            if not one.local
            and not one.life.over
            and (one.life.state == "away" or now - one.life.heard_at > 2 * BEAT_S)
        ]
        awaited = (node for node in self.awaited.nodes() if node != self._context.resources.local)
        return tuple(dict.fromkeys((*silent, *awaited)))

    def over(self, reason: str = "the run is over") -> None:
        """Order all agents to end their processes, and to exit."""
        self._over = True
        for member in self._members.values():
            member.send(wire.Over(reason))

    async def closed_all(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for all agents to disconnect."""
        deadline = self._loop.time() + timeout_s
        while any(one.link is not None for one in self._members.values()):
            left = deadline - self._loop.time()
            if left <= 0:
                return
            self._hung_up.clear()
            await is_set_within(self._hung_up, left)

    async def ask(self, node: str, query: wire.Query, kind: type[Reply], timeout_s: float = 10.0) -> Reply:
        """Return the reply of this node's agent. TimeoutError if there is none."""
        member = self._members.get(node)
        if member is None or member.link is None or member.life.state != "up":
            raise TimeoutError(f"node {node} is away")
        asked: asyncio.Future[Reply] = self._loop.create_future()
        self._replies[kind, query.number] = asked
        member.send(query)
        try:
            async with asyncio.timeout(timeout_s):
                return await asked
        finally:
            self._replies.pop((kind, query.number), None)

    # ------------------------------------------------------------ state

    def records(self) -> tuple[AgentRecord, ...]:
        """Return the agents that the next supervisor has to find."""
        return tuple(
            AgentRecord(
                node=member.name,
                incarnation=member.incarnation,
                local=member.local,
                process=member.process,
                draining=member.life.duty != "open",
                scope=member.scope,
                lease_s=member.life.lease_s,
                elsewhere=tuple(nonce for _, handles in member.elsewhere for nonce in handles),
            )
            for member in self._members.values()
            if not member.life.over
        )

    def status(self) -> tuple[NodeStatus, ...]:
        now = self._loop.time()
        resources = self._context.resources
        return tuple(
            NodeStatus(
                name=member.name,
                state=member.life.shown,
                local=member.local,
                address=member.address,
                labels=resources.labels(member.name) if member.local else member.labels,
                gpus=len(member.machine.gpus),
                gpus_free=len(resources.free_on(member.name)),
                cpus=member.machine.cpus,
                memory_nbytes=member.machine.memory_nbytes,
                replicas=tuple(f"{group}/{index}" for group, index in resources.on(member.name)),
                heard_age_s=max(0.0, now - member.life.heard_at),
                release=member.release,
            )
            for member in self._members.values()
        )

"""The nodes of a run: connect their agents, and start shims through them.

A node is known by its name, from the first Hello of its agent until it is drained. Its
connection and its duty are tables (:mod:`replicas.core.lives.node_life`). The replicas
of a lost node end for the reason ``node``, at no cost, and start elsewhere.

A new agent process on a node (another *incarnation*) has none of the earlier agent's
shims. It is ordered to end their leftover processes; only then have the replicas ended.
If it is elsewhere (another machine, boot or pid namespace), the earlier agent's lease
must end first. A supervisor that takes a run over expects the saved nodes and shims.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from replicas.common.foreign import one_line
from replicas.common.logs import Log
from replicas.common.patience import PauseClock
from replicas.config.structs import Config
from replicas.core.lives.lease_times import BEAT_S, lost_after_s, outlives_s
from replicas.core.lives.node_life import NodeState
from replicas.status import NodeStatus
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.messages import Hello
from replicas.supervisor.fleet.admission import refusal
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.handle import AgentLink, NodeEntry, ShimHandle
from replicas.supervisor.state.leases import Lease
from replicas.supervisor.state.run_state import AgentRecord, ProcessRecord, ShimRecord
from replicas.supervisor.wire.orders import PartSpec, plain
from replicas.supervisor.wire.part_state import ExitReport, PartState
from replicas.telemetry.events import NodeChanged
from replicas.telemetry.words import NODE_WORDS

log = Log("replicas.supervisor")

_DRAINED = "the node is drained"
Reply = TypeVar("Reply", wire.LogReply, wire.Examined)


def lease_of(config: Config, *, local: bool = False) -> float:
    """Return for how many seconds a node's processes may outlive the supervisor.

    At least the time of adoption, as an agent cannot distinguish a dead supervisor from
    a broken link. A silent node is lost after that time, except the supervisor's own
    machine (``local``).
    """
    return outlives_s(config.run.adopt_s) if local else max(config.cluster.lease_s, config.run.adopt_s)


class Cluster:
    """The nodes of a run, their agents and shims. For the event loop's thread only.

    :ivar members: the nodes by name.
    """

    def __init__(
        self, context: FleetContext, *, is_own: Callable[[Hello], bool], leaving: Callable[[str, str], None]
    ) -> None:
        """Begin without nodes. ``context``: shared parts of the run. ``is_own``:
        returns True if this supervisor started, or took over, the agent of a Hello that
        came through the run's own socket. ``leaving``: called with a node that is about
        to be taken away, and the reason."""
        self._context, self._is_own, self._leaving = context, is_own, leaving
        self.members: dict[str, NodeEntry] = {}
        self._loop = asyncio.get_running_loop()
        self._clock = PauseClock(math.inf)
        self.incarnation = secrets.token_hex(8)
        """Random id of this supervisor process."""
        self.joined = asyncio.Event()
        """Set when the supervisor's own agent has joined."""
        self._over = False
        self._replies: dict[tuple[type, int], asyncio.Future[Any]] = {}
        self._released: set[str] = set()
        """Incarnations of agents that were ordered to end."""

    # ------------------------------------------------------------ shims

    def start_shim(self, spec: PartSpec, changed: Callable[[], None]) -> ShimHandle:
        """Order an agent to start a shim, which owns a part; return its handle.

        Never waits. ``changed`` is called at each change of the shim's state. The
        handle has ended if the node is away. OSError if the node is unknown.
        """
        shares = self._context.resources.shares(spec.group, spec.replica)
        member = self.members.get(shares[spec.node].node) if shares else None
        if member is None:
            raise OSError(f"the node of part {spec.node} of {spec.group}/{spec.replica} is unknown")
        limits = self._context.config.groups[spec.group].resources
        order = wire.Start(spec=plain(spec), memory_nbytes=limits.memory_nbytes, max_processes=limits.max_processes)
        handle = ShimHandle(spec.nonce, member, changed, start=order)
        if member.life.state != "up":  # not a failure of the replica
            handle.end(ExitReport("node", text=f"node {member.name} is {member.life.state}: nothing can start there"))
            return handle
        member.handles[spec.nonce] = handle
        member.send(order)
        return handle

    def expect(
        self, agents: Iterable[AgentRecord], shims: Iterable[ShimRecord], scope: str = ""
    ) -> list[tuple[ShimRecord, ShimHandle]]:
        """Add an earlier supervisor's nodes, as away; return handles of their shims.

        :param scope: boot and pid namespace here; local agents of others are not seen.
        """
        now = self._loop.time()
        known = {agent.node: agent for agent in agents}
        for agent in known.values():
            process = agent.process or ProcessRecord(0, 0)
            hello = Hello(
                release="",
                node=agent.node,
                incarnation=agent.incarnation,
                pid=process.pid,
                start_time=process.start_time,
                scope=agent.scope,
            )
            local = agent.local and agent.node == self._context.resources.local
            member = self.members[agent.node] = NodeEntry(hello, local=local, now=now)
            member.life.lease_s = max(agent.lease_s, lease_of(self._context.config))
            if agent.draining:
                member.life.ask("drain")
        found = [(shim, ShimHandle(shim.nonce, self.members[shim.agent])) for shim in shims if shim.agent in known]
        for shim, handle in found:
            agent, member = known[shim.agent], self.members[shim.agent]
            process = shim.process or ProcessRecord(0, 0)
            handle.state = handle.state._replace(pid=process.pid, start_time=process.start_time, cgroup=shim.cgroup)
            if shim.nonce in agent.elsewhere or (agent.local and agent.scope != scope):
                self._wait_for_lease(member, handle, since=now)
            else:
                member.handles[shim.nonce] = handle
        return found

    # ------------------------------------------------------------ agents

    def hello(self, hello: Hello, link: AgentLink, *, local: bool, seen_at: str) -> str | None:
        """Accept an agent and return its node's name, or refuse it and return None.

        :param local: it came through the run's own socket. :param seen_at: its address.
        """
        if refused := self._refusal(hello, local=local):
            link.send(wire.encode(refused))
            return None
        states = [wire.part_state(part) for part in hello.parts]
        now, name, machine = self._loop.time(), hello.node, hello.machine or self._context.resources.machine
        hello = replace(hello, parts=(), address=hello.address or seen_at, machine=machine)
        member = self.members.setdefault(name, NodeEntry(hello, local=local, now=now))
        if member.link is not None:
            member.link.close()
        before, again = member.life.state, member.hello.incarnation == hello.incarnation
        if not again:
            self._assign_leftover_shims(member, hello.scope)
        member.hello, member.link = hello, link
        member.life.leased, member.life.lease_s = not local, lease_of(self._context.config, local=local)
        member.life.heard_at = now
        member.life.step("hello")
        if not local and (not again or before == "lost"):
            member.life.ask("anew")
        if released := hello.incarnation in self._released:
            member.life.ask("release")
        member.send(self._welcome(local=local))
        if not local:
            member.send(self._new_token())  # tokens may have been replaced while it was away
        self._reconcile_shims(member, states)
        self._drop_ended_leases(member)
        if member.cleaning:
            member.send(wire.Clean(tuple(one.left for one in member.cleaning.values())))
        if released:
            member.send(wire.Over(_DRAINED))  # the first one did not arrive
        self._changed(member, before)
        if local:
            self.joined.set()
        return name

    def _refusal(self, hello: Hello, *, local: bool) -> wire.Refused | None:
        """Return why an agent is refused; or save its lease to disk and return None."""
        if local and not self._is_own(hello):
            return wire.Refused(message="a newer agent of this machine has replaced this one")
        refused = refusal(self.members, hello, local=local)
        if refused is not None:
            return refused
        lease = Lease(
            node=hello.node,
            incarnation=hello.incarnation,
            local=local,
            scope=hello.scope,
            lease_s=lease_of(self._context.config, local=local),
            process=ProcessRecord(hello.pid, hello.start_time) if local else None,
        )
        problem = self._context.awaited.grant(lease)
        if problem:
            log.error("refusing node %s for now: that it joined cannot be written to disk (%s)", hello.node, problem)
            return wire.Refused(message=f"the supervisor cannot write to disk that this joined ({problem})", again=True)
        return None

    def _welcome(self, *, local: bool) -> wire.Welcome:
        """Return the message that accepts an agent, ``local`` or of another machine."""
        context, tokens = self._context, self._context.coordinator.tokens
        return wire.Welcome(
            run=context.config.run.name,
            supervisor=self.incarnation,
            lease_s=0.0 if local else lease_of(context.config),
            adopt_s=context.config.run.adopt_s,
            endpoint="" if local else context.coordinator.endpoint,
            token="" if local else tokens.text("member"),
            state_id=context.state.identity if local else "",
        )

    def _new_token(self) -> wire.NewToken:
        """Return the message with the run's present tokens, for an agent."""
        tokens = self._context.coordinator.tokens
        return wire.NewToken(tokens.text("member"), tokens.text("operator"))

    def _assign_leftover_shims(self, member: NodeEntry, scope: str) -> None:
        """Have shims of the node's previous agent ended: by the new agent, if pids of
        ``scope`` are valid for it; else count them as ended after the old lease."""
        left = {nonce: one for nonce, one in (member.cleaning | member.handles).items() if not one.state.gone}
        member.cleaning, member.handles = {}, {}
        for nonce, handle in left.items():
            if scope == member.hello.scope or member.local:
                member.cleaning[nonce] = handle
                handle.lose(member.died)
            else:
                self._wait_for_lease(member, handle, since=member.life.heard_at)

    @staticmethod
    def _wait_for_lease(member: NodeEntry, handle: ShimHandle, *, since: float) -> None:
        """Count the shim as ending until its agent's lease (from ``since``) is over."""
        member.elsewhere[handle.nonce] = handle
        handle.over_at = since + lost_after_s(member.life.lease_s)
        handle.lose(member.died)

    def _reconcile_shims(self, member: NodeEntry, states: Iterable[PartState]) -> None:
        """Update handles by an agent's shim states; resend orders that it may lack."""
        told = {state.nonce: state for state in states}
        for nonce, handle in list(member.handles.items()):
            state = told.pop(nonce, None)
            if state is not None:
                self._update_shim(member, state)
            elif handle.start is None and not handle.state.gone:
                handle.end(ExitReport("node", text=f"the agent of node {member.name} no longer knows its processes"))
                del member.handles[nonce]
            for order in handle.orders_to_repeat(known=state is not None):
                member.send(order)
        for state in told.values():
            self._update_shim(member, state)

    def _update_shim(self, member: NodeEntry, state: PartState) -> None:
        """Use the state of a shim that the node's agent sent; end an unknown shim."""
        handle = member.handles.get(state.nonce)
        if handle is None and not state.gone:  # of a replica that runs elsewhere now, or of another supervisor
            handle = self._end_stranger(member, state)
        if handle is not None:
            handle.start = None
            handle.update_state(state)
        if state.gone:
            member.handles.pop(state.nonce, None)
            member.send(wire.Forget(state.nonce))
            if member.life.duty != "open":
                self._changed(member)

    def _end_stranger(self, member: NodeEntry, state: PartState) -> ShimHandle:
        """Order a shim of no replica to end, and return the new handle of that shim."""
        if len(member.handles) >= wire.SHIMS_MAX:
            raise msgspec.DecodeError(f"more than {wire.SHIMS_MAX:,} shims")
        handle = member.handles[state.nonce] = ShimHandle(state.nonce, member)
        self._context.awaited.stranger(state, handle)
        handle.stop_alone(lambda: self._changed(member))
        self._offer(member)
        return handle

    def receive(self, node: str, data: bytes) -> None:
        """Handle a message of a node's agent. DecodeError if it is malformed."""
        message = wire.decode_from_agent(data)
        if (member := self.members.get(node)) is None:
            return  # it was drained, and its connection is being closed
        if member.life.heard(self._loop.time()):
            self._changed(member, "away")
        match message:
            case wire.Beat(number):
                member.send(wire.Heard(number))
            case wire.PartNews(state):
                self._update_shim(member, wire.part_state(state))
            case wire.StacksFound(nonce=nonce, found=found):
                if (handle := member.handles.get(nonce)) is not None:
                    handle.take_stacks(found)
            case wire.Cleaned(nonces):
                for nonce in nonces:
                    if (left := member.cleaning.pop(nonce, None)) is not None:
                        left.end(member.died)
                self._drop_ended_leases(member)
            case wire.Leaving(reason):
                self._leaving(node, one_line(reason))
            case wire.LogReply(number=number) | wire.Examined(number=number):
                asked = self._replies.pop((type(message), number), None)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case _:
                log.error("ignoring an unexpected message (%s) of the agent of node %s", type(message).__name__, node)

    def closed(self, node: str, link: AgentLink) -> None:
        """Mark the node as away (gone if released), if ``link`` was its present one."""
        member = self.members.get(node)
        if member is None or member.link is not link:
            return
        member.link = None
        if member.life.duty == "released" and not member.living:
            self._lose(member, "left", "its agent has left")
        elif member.life.step("closed"):
            self._changed(member, "up")

    def tick(self) -> None:
        """Find nodes that are away or lost, and report them. Call it every second."""
        now = self._loop.time()
        pause_s, self._clock.due = self._clock.measure_pause(now), now + BEAT_S
        for member in [*self.members.values()]:
            member.life.heard_at += pause_s  # what has arrived meanwhile is not handled yet
            for handle in [one for one in member.elsewhere.values() if now > one.over_at]:
                del member.elsewhere[handle.nonce]
                handle.end(member.died)
                self._drop_ended_leases(member)
            match member.life.due_event(now):
                case "silent":
                    member.life.step("silent")
                    self._changed(member, "up")
                case "lease_over":
                    silent_s = now - member.life.heard_at
                    self._lose(member, "lease_over", f"no message from its agent for {silent_s:.0f} s")
        if self._context.awaited.tick(now):
            self._context.say("no longer waiting for processes of earlier supervisors: their time (lease) is over")
            self._nodes_changed()

    def _drop_ended_leases(self, member: NodeEntry) -> None:
        """Forget leases of earlier agents of the node if their shims are gone."""
        if not (member.elsewhere or member.cleaning):
            self._context.awaited.end(member.name, but=member.hello.incarnation)

    def silent_s(self, node: str) -> float:
        """Return the seconds since this node was heard; 0 for an unknown node."""
        member = self.members.get(node)
        return self._loop.time() - member.life.heard_at if member is not None else 0.0

    def _lose(self, member: NodeEntry, event: Literal["left", "lease_over"], reason: str) -> None:
        """Mark the node as gone by ``event``; count its processes as gone, too."""
        before = member.life.state
        member.life.step(event)
        if member.link is not None:
            member.link.close()
            member.link = None
        lost, member.handles, member.cleaning, member.elsewhere = member.living, {}, {}, {}
        self._context.awaited.end(member.name)
        if member.life.duty == "released":
            del self.members[member.name]
        self._changed(member, before, reason)
        for handle in lost:
            handle.end(ExitReport("node", text=f"node {member.name} was lost ({reason})"))

    def _offer(self, member: NodeEntry) -> None:
        """Offer the node for placement; withdraw it if it is lost or not to be used."""
        resources, cluster = self._context.resources, self._context.config.cluster
        if member.life.over or (member.local and not cluster.local):
            resources.withdraw(member.name)
            return
        machine = resources.machine if member.local else member.machine
        is_open = member.life.takes_replicas and not self._context.awaited.strangers_on(member.name)
        resources.offer(member.name, machine, self._labels(member), open=is_open)

    def _labels(self, member: NodeEntry) -> Mapping[str, str]:
        """Return the node's labels; this machine has those of the config."""
        return self._context.config.cluster.labels if member.local else member.hello.labels

    def _changed(self, member: NodeEntry, before: NodeState | None = None, reason: str = "") -> None:
        """Offer or withdraw the node; report a new state; wake the monitor; save.

        :param before: its earlier state; None if the state has not changed.
        """
        self._offer(member)
        after, address = member.life.state, member.hello.address
        told = not self._over and not (member.local and after == "up")
        if before is not None and before != after and told:
            event = NodeChanged(node=member.name, before=before, after=after, reason=reason, address=address)
            self._context.emit(event)
            self._context.say(f"node {member.name}: {NODE_WORDS.get(after, after)}{': ' if reason else ''}{reason}")
        self._nodes_changed()

    def _nodes_changed(self) -> None:
        """Wake the fleet's monitor, and save the run's state."""
        self._context.wake_monitor()
        self._context.save()

    # ------------------------------------------------------------ operators' orders

    def others(self) -> list[str]:
        """Return the nodes of other machines that are up."""
        return [name for name, member in self.members.items() if not member.local and member.life.state == "up"]

    def drain(self, node: str, *, undo: bool = False) -> None:
        """Let no replica start on the node, or allow it again (``undo``); move none."""
        member = self.members[node]
        member.life.ask("undrain" if undo else "drain")
        if undo:
            self._released.discard(member.hello.incarnation)
        self._changed(member)

    def is_open(self, node: str) -> bool:
        """Return True if the node is known, and is not being drained."""
        member = self.members.get(node)
        return member is not None and member.life.duty == "open"

    def is_empty(self, node: str) -> bool:
        """Return True if the node has no shim left, or is lost or unknown."""
        member = self.members.get(node)
        return member is None or member.life.over or not member.living

    def release(self, node: str) -> None:
        """Order the agent of a drained node to end; forget a lost node."""
        if (member := self.members.get(node)) is not None:
            self._released.add(member.hello.incarnation)
            member.life.ask("release")
            member.send(wire.Over(_DRAINED))
            if member.life.state == "lost":
                del self.members[node]

    def send_tokens(self) -> None:
        """Send the present tokens to the agents of other machines."""
        for node in self.members.values():
            if not node.local:
                node.send(self._new_token())

    def unreached(self) -> tuple[str, ...]:
        """Return the nodes that may live but cannot be sent a new token now."""
        now = self._loop.time()
        silent = [
            one.name
            for one in self.members.values()
            if not one.local
            and not one.life.over
            and (one.life.state == "away" or now - one.life.heard_at > 2 * BEAT_S)
        ]
        awaited = (node for node in self._context.awaited.nodes() if node != self._context.resources.local)
        return tuple(dict.fromkeys((*silent, *awaited)))

    def order_all_to_end(self) -> None:
        """Order all agents to end their processes, and to exit; do not wait."""
        self._over = True
        for member in self.members.values():
            member.send(wire.Over())

    async def closed_all(self, timeout_s: float) -> None:
        """Wait until all agents have disconnected, or until ``timeout_s`` is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for link in [one.link for one in self.members.values() if one.link is not None]:
                    await link.over.wait()

    async def ask(self, node: str, query: wire.Query, kind: type[Reply], timeout_s: float = 10.0) -> Reply:
        """Send ``node`` a query; return its reply, of type ``kind``. Raise TimeoutError
        if the node is away, or does not reply in time."""
        member = self.members.get(node)
        if member is None or member.link is None or member.life.state != "up":
            raise TimeoutError(f"node {node} is away: its agent is not connected")
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
        """Return records of all agents that are not lost, for the next supervisor."""
        return tuple(
            AgentRecord(
                node=member.name,
                incarnation=member.hello.incarnation,
                local=member.local,
                process=ProcessRecord(member.hello.pid, member.hello.start_time),
                draining=member.life.duty != "open",
                scope=member.hello.scope,
                lease_s=member.life.lease_s,
                elsewhere=tuple(member.elsewhere),
            )
            for member in self.members.values()
            if not member.life.over
        )

    def status(self) -> tuple[NodeStatus, ...]:
        """Return a snapshot of all nodes, for ``replicas status``."""
        now = self._loop.time()
        resources = self._context.resources
        return tuple(
            NodeStatus(
                name=member.name,
                state=member.life.shown,
                local=member.local,
                address=member.hello.address,
                labels=self._labels(member),
                gpus=len(member.machine.gpus),
                gpus_free=len(resources.free_on(member.name)),
                cpus=member.machine.cpus,
                memory_nbytes=member.machine.memory_nbytes,
                replicas=tuple(f"{group}/{index}" for group, index in resources.on(member.name)),
                heard_age_s=max(0.0, now - member.life.heard_at),
                release=member.hello.release,
            )
            for member in self.members.values()
        )

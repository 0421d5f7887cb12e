"""A node of a run, the connection to its agent, and the admission of agents."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

from replicas.common.logs import Log
from replicas.coordinator.sessions import OUTBOX_NBYTES
from replicas.coordinator.websocket import WebSocket
from replicas.core.lives.node_life import SILENT_S, NodeLife
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.agent.messages import Hello, Order
from replicas.supervisor.fleet.awaited import Awaited
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.state.leases import Lease
from replicas.supervisor.state.run_state import ProcessRecord

log = Log("replicas.supervisor")

NODES_MAX = 4096


class AgentLink:
    """A connection to an agent. With too much unread data, one more message ends it.

    :param refused: called with the reason in that case.
    """

    def __init__(self, connection: WebSocket, refused: Callable[[str], None]) -> None:
        self._connection, self._refused = connection, refused
        self.over = asyncio.Event()

    def send(self, data: bytes) -> None:
        """Send without waiting; does nothing after the end of the connection."""
        if self.over.is_set():
            return
        if self._connection.unread_nbytes > OUTBOX_NBYTES:
            log.error("disconnecting an agent that does not read its messages")
            self._refused("overflow")
            self.close()
            self._connection.cut()
            return
        self._connection.write((data,))

    def close(self) -> None:
        self.over.set()


class NodeEntry:
    """One node and its agent."""

    def __init__(self, name: str, *, local: bool, now: float) -> None:
        self.name = name
        self.life = NodeLife(now, leased=not local)
        self.incarnation = ""
        self.process: ProcessRecord | None = None
        self.address = ""
        self.release = ""
        self.labels: dict[str, str] = {}
        self.machine = Machine()
        self.limits_refused = ""
        self.link: AgentLink | None = None
        self.drain = 0
        """Number of the drain in progress or done, or 0."""
        self.handles: dict[str, ShimHandle] = {}
        self.cleaning: dict[str, ShimHandle] = {}
        """Shims of an earlier agent of the node, until the present agent ended them."""
        self.scope = ""
        """Machine, boot and pid namespace in which the agent's pids are valid."""
        self.elsewhere: list[tuple[float, dict[str, ShimHandle]]] = []
        """Shims of earlier agents of that name elsewhere, and when their lease ends."""

    @property
    def local(self) -> bool:
        """True for the supervisor's own machine, whose agent has no lease."""
        return not self.life.leased

    def send(self, order: Order) -> None:
        if self.link is not None:
            self.link.send(wire.encode(order))

    @property
    def living(self) -> list[ShimHandle]:
        there = itertools.chain(*(handles.values() for _, handles in self.elsewhere))
        return [one for one in (*self.handles.values(), *self.cleaning.values(), *there) if not one.state.gone]


class Admission:
    """Decides which agents may join, and writes their leases.

    :param nodes: of the run, by name.
    :param is_own: returns True if this supervisor started, or took over, the agent of a
        Hello that came through the run's own socket.
    """

    def __init__(
        self,
        nodes: Mapping[str, NodeEntry],
        awaited: Awaited,
        *,
        lease_s: float,
        outlives_s: float,
        is_own: Callable[[Hello], bool],
    ) -> None:
        self._nodes, self._awaited, self._is_own = nodes, awaited, is_own
        self._lease_s, self._outlives_s = lease_s, outlives_s
        self._loop = asyncio.get_running_loop()

    def lease_s(self, *, local: bool) -> float:
        """Return for how many seconds a node's processes may outlive the supervisor."""
        return self._outlives_s if local else self._lease_s

    def refusal(self, hello: Hello, *, local: bool) -> wire.Refused | None:
        """Return why this agent is refused, or None when its lease is on disk."""
        if hello.protocol != wire.PROTOCOL:
            text = f"this agent speaks protocol {hello.protocol}, the supervisor {wire.PROTOCOL}: install one release"
            return wire.Refused(message=text)
        if hello.node not in self._nodes and len(self._nodes) >= NODES_MAX:
            return wire.Refused(message=f"a run has {NODES_MAX:,} nodes at most", again=True)
        if local and not self._is_own(hello):
            return wire.Refused(message="another agent of this machine has replaced this one")
        entry = self._nodes.get(hello.node)
        if entry is not None and entry.incarnation != hello.incarnation:
            if entry.local != local:
                return wire.Refused(message=f"{hello.node} is the supervisor's own node: give it another --name")
            if entry.life.state == "up" and self._loop.time() - entry.life.heard_at < SILENT_S:
                return wire.Refused(message=f"node {hello.node} has an agent already ({entry.address})", again=True)
        return self._offered_twice(hello) or self._ungranted(hello, local=local)

    def _ungranted(self, hello: Hello, *, local: bool) -> wire.Refused | None:
        """Write the agent's lease. Return a refusal if that fails."""
        lease_s = self.lease_s(local=local)
        if not lease_s:  # it ends with this supervisor
            self._awaited.seen(hello.incarnation)
            return None
        lease = Lease(
            node=hello.node,
            incarnation=hello.incarnation,
            local=local,
            scope=hello.scope,
            lease_s=lease_s,
            process=ProcessRecord(hello.pid, hello.start_time) if local else None,
        )
        problem = self._awaited.grant(lease)
        if problem:
            log.error("refusing node %s: its lease cannot be written: %s", hello.node, problem)
            return wire.Refused(message=f"the supervisor cannot write its lease: {problem}", again=True)
        return None

    def _offered_twice(self, hello: Hello) -> wire.Refused | None:
        """Return a refusal if another agent of this machine offers the same GPUs."""
        gpus = set(hello.machine.gpus if hello.machine is not None else ())
        for entry in self._nodes.values():
            beside = entry.name != hello.node and entry.scope == hello.scope and not entry.life.over
            if beside and (shared := sorted(gpus.intersection(entry.machine.gpus))):
                text = (
                    f"node {entry.name} is on the same machine and offers its GPUs {', '.join(shared)} already: "
                    "give each agent its own CUDA_VISIBLE_DEVICES"
                )
                if entry.local:
                    text += ", or set [cluster] local = false"
                return wire.Refused(message=text, again=entry.life.state == "away")
        return None

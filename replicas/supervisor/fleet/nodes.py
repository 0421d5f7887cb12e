"""The supervisor's side of all agents: its own machine's, and those that join.

:class:`Nodes` creates the :class:`~replicas.supervisor.fleet.cluster.Cluster`, starts
the agent of this machine, and finds the generations of an earlier supervisor.

*Adoption.* With ``run.adopt`` the agents, their shims and ranks outlive a supervisor
for that time. The next supervisor of the run locks the state folder, finds the agents
in the saved state, expects their shims
(:meth:`~replicas.supervisor.fleet.cluster.Cluster.expect`), and listens on the same
port, to which agents and members reconnect. Replicas whose shims are expected continue
with the same processes and generations; all others start. If the agent of this machine
has ended, the sweep at the start ends its leftover processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import anyio
from msgspec.structs import replace

import replicas
from replicas import errors
from replicas.config.structs import Config
from replicas.control.log_files import FolderReader, LogReader, Selection
from replicas.core.lives.lease_times import BEAT_S
from replicas.linux import cgroups
from replicas.linux.cgroups import LIMITS
from replicas.messages.bounds import CONTROL_PORT
from replicas.status import NodeStatus
from replicas.supervisor.agent.checks import Demand, Finding
from replicas.supervisor.agent.messages import Examine, Examined
from replicas.supervisor.fleet.cluster import Cluster, lease_of
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.fleet import Adopted, Fleet
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.fleet.local_agent import LocalAgent
from replicas.supervisor.fleet.node_logs import NodesReader
from replicas.supervisor.fleet.plans import may_grow
from replicas.supervisor.state.leases import Lease
from replicas.supervisor.state.run_state import Cause, ShimRecord, machine
from replicas.supervisor.wire.part_state import ExitReport
from replicas.telemetry.events import Drained, Draining

ANSWER_S = 40.0
"""A GPU driver that hangs takes 25 s of it."""
_numbers = itertools.count(1)


def longest_lease_of(config: Config) -> float:
    """Return the longest lease of any node in seconds, or 0 without leases.

    A lease is how long a node's processes may run without a supervisor.
    """
    return max(lease_of(config, local=True), lease_of(config) if may_grow(config) else 0.0)


class Nodes:
    """Starts, finds, drains and ends the agents of a run's nodes, as ``async with``.

    Use it while holding the run's lock.

    :param fleet: returns the groups of the run, or raises UsageError during the start.
    """

    def __init__(self, context: FleetContext, fleet: Callable[[], Fleet]) -> None:
        """Keep the arguments; ``async with`` starts the agent and finds the nodes.

        :param fleet: returns the groups of the run, or raises UsageError during the
            start.
        """
        self._context, self._fleet = context, fleet
        self._cluster: Cluster | None = None
        self._local: LocalAgent | None = None
        self._expected: list[tuple[ShimRecord, ShimHandle]] = []
        self._draining: set[str] = set()
        self._started = False
        self._left = False
        self.adopting = False
        """True if agents of an earlier supervisor continue."""

    @property
    def cluster(self) -> Cluster:
        """The nodes and their agents; UsageError unless the supervisor is entered."""
        if self._cluster is None:
            raise errors.UsageError("the supervisor is not running", hint="use it with `async with`")
        return self._cluster

    @property
    def agent_pid(self) -> int | None:
        """Pid of the agent of this machine, or None while there is none."""
        return self._local.pid if self._local is not None else None

    @property
    def kept(self) -> frozenset[str]:
        """Marks (random ids) of an earlier supervisor's shims that continue."""
        return frozenset(record.nonce for record, handle in self._expected if not handle.state.gone)

    # ------------------------------------------------------------ start and end

    async def __aenter__(self) -> Self:
        """Start the agent of this machine, and expect those of an earlier supervisor.

        :raises replicas.errors.WorldError: the agent cannot be started.
        """
        context, config, left = self._context, self._context.config, self._context.state.heritage
        self._cluster = cluster = Cluster(
            context,
            is_own=lambda hello: hello.scope == machine() and hello.pid == self.agent_pid,
            leaving=self._leaving,
        )
        context.awaited.inherit(left.leases, left.unseen, asyncio.get_running_loop().time())
        self._expected = cluster.expect(left.agents, left.shims, machine())
        self.adopting = bool(left.agents)
        if config.cluster.local:
            keep = () if config.run.adopt_s else (context.state.lock,)
            self._local = LocalAgent(context.resources.local, cluster, self._arguments(), keep=keep)
            try:
                self._local.start(left.known)
            except OSError as error:
                raise errors.WorldError(f"the agent of this machine cannot be started: {error}") from error
        return self

    def _arguments(self) -> list[str]:
        """Return the command-line arguments for this machine's agent.

        May move this process into a control group of its own.
        """
        context, config = self._context, self._context.config
        limited = self._limited
        words = ["--run", config.run.name, "--node", context.resources.local]
        words += ["--socket", str(context.door), "--state-dir", str(config.run.state_dir)]
        words += [] if config.run.adopt_s else ["--lock", str(context.state.lock)]
        words += ["--limited"] if limited else []
        with contextlib.suppress(OSError):  # the agent says why there are no control groups
            words += ["--cgroup", str(cgroups.prepare(limited=limited))]
        return words

    @property
    def _limited(self) -> bool:
        """True if a group limits its memory or processes."""
        limits = [group.resources for group in self._context.config.groups.values()]
        return any(getattr(one, field) is not None for one in limits for field in LIMITS.values())

    async def joined(self) -> None:
        """Wait until this machine's agent has joined, if it has one.

        :raises replicas.errors.WorldError: it has not joined in time, or cannot set the
            limits that a group wants.
        """
        if self._local is None:
            return
        await self._local.joined()
        refused = self.cluster.members[self._context.resources.local].hello.limits_refused
        if self._limited and refused:
            raise errors.WorldError(
                f"resources.memory and max_processes cannot be enforced here: {refused}",
                hint="run replicas as a systemd unit with Delegate=yes, or remove these keys from the config",
            )

    @property
    def left(self) -> tuple[Lease, ...]:
        """Leases of agents with processes left at the end, for the next supervisor."""
        return self._context.awaited.left([name for name, one in self.cluster.members.items() if one.living])

    def leave(self) -> None:
        """Let the agents and their processes run on for the next supervisor.

        Watch this machine's agent no longer; :meth:`finish` then does nothing.
        """
        self._left = True
        if self._local is not None:
            self._local.leave()
            self._local = None

    async def finish(self) -> None:
        """Order all agents to end their processes, and wait for the agents.

        Waits for this machine's agent first, and one second at most for the others.
        Does nothing after :meth:`leave`.
        """
        if self._left:
            return
        self.cluster.order_all_to_end()
        with anyio.CancelScope(shield=True):
            if self._local is not None:
                await self._local.aclose()
            await self.cluster.closed_all(BEAT_S)

    async def __aexit__(self, *_: object) -> None:
        """End the agent of this machine, unless :meth:`finish` did."""
        if self._local is not None:
            with anyio.CancelScope(shield=True):
                await self._local.aclose()

    # ------------------------------------------------------------ adoption

    @property
    def port_wanted(self) -> int:
        """The control port to try first unless the config names one; 0 for any.

        That of an earlier supervisor, where agents look for this one, or the default.
        """
        saved = self._context.state.saved
        if saved is not None and saved.port:
            return saved.port  # agents look for the supervisor there
        return CONTROL_PORT if self._context.config.control.port is None else 0

    def adopted(self, config: Config) -> Adopted | None:
        """Take over the replicas that an earlier supervisor left running.

        End those of groups that the config no longer has, or leaves to other launchers.
        If a replica lacks parts, its others are killed, and count as lost with a node.

        :returns: the others, by group and index, with records and shims of their parts;
            None if this run takes over nothing.
        """
        if not self.adopting:
            return None
        found: dict[tuple[str, int], tuple[list[ShimRecord], list[ShimHandle]]] = {}
        for record, handle in sorted(self._expected, key=lambda one: one[0].node):
            wanted = config.groups.get(record.group)
            if wanted is None or wanted.external:
                self._end(record, handle)
                continue
            records, nodes = found.setdefault((record.group, record.replica), ([], []))
            records.append(record)
            nodes.append(handle)
        for (group, _), (_, nodes) in found.items():
            if len(nodes) != config.groups[group].nnodes:  # others of its nodes were lost with the supervisor
                for handle in nodes:
                    handle.lose(ExitReport("node", text="another of its nodes was lost with the earlier supervisor"))
                    handle.stop(0.0)
        return found

    def _end(self, record: ShimRecord, handle: ShimHandle) -> None:
        """Order the end of the shim of ``handle``, which belongs to no replica.

        Do not wait. The GPUs and memory in its ``record`` stay taken until its
        processes are gone.
        """
        let_go = self._context.resources.hold(record.nonce, record.share)

        def gone() -> None:
            """Free the share, and let replicas that wait for it start."""
            let_go()
            self._context.wake_monitor()
            self._context.save()

        handle.stop_alone(gone)

    # ------------------------------------------------------------ while it runs

    async def tick_forever(self) -> None:
        """Check the nodes and this machine's agent twice a second until cancelled."""
        while True:
            await anyio.sleep(BEAT_S / 2)
            self.cluster.tick()
            if self._local is not None:
                self._local.tick()

    async def drain(self, node: str, *, undo: bool = False) -> None:
        """Move a node's replicas elsewhere; then end its agent, unless it is our own.

        Waits until no process of a replica is on the node.

        :param undo: let replicas start there again instead, and do not wait.
        :raises replicas.errors.UsageError: the run has no such node.
        :raises replicas.errors.WorldError: the drain was undone meanwhile, or its order
            cannot be saved.
        """
        cluster, fleet, context = self.cluster, self._fleet(), self._context
        self._refuse_unknown(node)
        context.save(order=True)
        cluster.drain(node, undo=undo)
        if undo:
            return
        target, began = f"node {node}", asyncio.get_running_loop().time()
        context.emit(Draining(target=target, reason="node"))
        for replica in (fleet.replica(*key) for key in context.resources.on(node)):
            if replica is not None and not replica.leaving and replica.life.alive:
                replica.restart(Cause("node", f"node {node} is being drained"))
        await fleet.until(lambda: cluster.is_empty(node) or cluster.is_open(node) or fleet.over.is_set())
        if cluster.is_open(node):
            raise errors.WorldError(f"the drain of node {node} ends: it was undone, or the agent was replaced")
        context.emit(Drained(target=target, seconds=asyncio.get_running_loop().time() - began))
        if node != context.resources.local:
            cluster.release(node)

    def _refuse_unknown(self, node: str) -> None:
        """Raise UsageError if the run has no node of this name."""
        if node not in self.cluster.members:
            known = ", ".join(self.cluster.members) or "none"
            raise errors.UsageError(f'the run has no node "{node[:80]}"', hint=f"its nodes are {known}")

    def refuse_while_away(self) -> None:
        """Raise UsageError if a node that is away may know only the old token."""
        away = self.cluster.unreached()
        if away:
            names = ", ".join(node or "an unknown one" for node in away)
            raise errors.UsageError(
                f"nodes are away, could not come back with the old token, and their replicas would end: {names}",
                hint="wait until they are up or lost (see: replicas status), or end the old token with --force",
            )

    async def examine(self, node: str | None) -> tuple[Finding, ...]:
        """Return the findings of ``replicas doctor`` for this node, or for all (None).

        Asks the agents, and waits up to 40 s for their answers.

        :raises replicas.errors.UsageError: the run has no such node.
        """
        if node is not None:
            self._refuse_unknown(node)
        asked = sorted(self.cluster.members) if node is None else [node]
        known = {one.name: one for one in self.cluster.status()}
        found = await asyncio.gather(*(self._examine(known[name]) for name in asked))
        return tuple(replace(one, node=name) for name, each in zip(asked, found, strict=True) for one in each)

    async def _examine(self, node: NodeStatus) -> tuple[Finding, ...]:
        """Ask a node's agent for its findings; return them, and one about the node.

        If the node is away or does not answer within 40 s, return only a problem.
        """
        if node.state in ("away", "lost"):
            text = f"{node.state}: its agent has sent nothing for {node.heard_age_s:.0f} s"
            remedy = f"check its machine, or remove it with: replicas drain --node {node.name}"
            return (Finding("node", "problem", text, remedy),)
        demand, supervisor = self._demand(node.name), os.getpid() if node.local else 0
        order = Examine(number=next(_numbers), demand=demand, supervisor=supervisor)
        try:
            answer = await self.cluster.ask(node.name, order, Examined, ANSWER_S)
        except TimeoutError:
            text = f"its agent does not answer within {ANSWER_S:.0f} s"
            return (Finding("node", "problem", text, "see the agent's log, and check that it has this release"),)
        release = f"release {node.release}"
        if node.release == replicas.__version__:
            return (Finding("node", "ok", f"{node.state}, {release}"), *answer.findings)
        return (Finding("node", "note", f"{release}, and the supervisor's is {replicas.__version__}"), *answer.findings)

    def _demand(self, node: str) -> Demand:
        """Return how many processes and log bytes the run needs on the node."""
        groups, resources = self._context.config.groups, self._context.resources
        parts = [
            groups[group].nproc_per_node
            for group, index in resources.on(node)
            if group in groups
            for share in resources.shares(group, index)
            if share.node == node
        ]
        return Demand.of(self._context.config.logs, replicas=len(parts), ranks=sum(parts))

    def read_logs(self, folder: Path, selection: Selection) -> LogReader:
        """Return a reader of the logs of all nodes.

        :param folder: the logs of this machine.
        :param selection: which lines to read.
        """
        if self.cluster.others():
            return NodesReader(folder, self.cluster, selection, self._newest)
        return FolderReader(folder, selection)

    def _newest(self) -> dict[str, int]:
        """Return the present generation of each replica, by name."""
        return {one.name: one.life.generation for one in self._fleet().all()}

    def _leaving(self, node: str, reason: str) -> None:
        """Let no replica start on a node that is about to be taken away.

        Its agent has said so. Start a task that moves its replicas, unless the run is
        still being started.
        """
        self._context.say(f"node {node}: moving its replicas to other nodes: {reason}")
        self.cluster.drain(node)
        if self._started:
            self._drain_on(node)

    def go_on(self) -> None:
        """Note that replicas run; start tasks for drains of nodes that are not done.

        An earlier supervisor began these drains, or they were ordered during the start.
        """
        self._started = True
        for node, member in [*self.cluster.members.items()]:
            if member.life.duty != "open" and (node != self._context.resources.local or member.living):
                self._drain_on(node)

    def _drain_on(self, node: str) -> None:
        """Start a task that drains a node, unless one runs; do not wait."""
        if node in self._draining:
            return
        self._draining.add(node)

        async def drain() -> None:
            """Drain the node; print an error."""
            try:
                await self.drain(node)
            except errors.ReplicasError as error:
                self._context.say(str(error))
            finally:
                self._draining.discard(node)

        self._context.spawn(drain)

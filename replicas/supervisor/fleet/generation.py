"""One generation of a replica: a shim for each node, from start until all are gone."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from replicas import environ
from replicas.config.structs import GroupConfig, LogsConfig
from replicas.config.values import is_loopback
from replicas.core.lives.leases import UNHEARD_S
from replicas.linux.processes import MARK
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.state.run_state import ProcessRecord, ShimRecord
from replicas.supervisor.wire.orders import ExitReport, NodeSpec, Remains

STUCK_S = 8.0
"""Grace after a generation's stop timeout, in seconds: then shims that give no reason
for being late are killed. At the end of the run, after the same time again, processes
that do not die are abandoned."""
PRESS_INTERVAL_S = 1.0
_SHIM_DIES_S = 4.0


class Generation:
    """One generation. ``changed``: called when a message of a shim has arrived."""

    def __init__(self, context: FleetContext, changed: Callable[[], None]) -> None:
        self.nodes: list[ShimHandle] = []
        self._records: list[ShimRecord] = []
        self._specs: list[NodeSpec] = []
        self._gone_by: float | None = None
        self._pressed_at: float | None = None
        self._context = context
        self._changed = changed
        self._loop = asyncio.get_running_loop()

    def prepare(self, group: GroupConfig, index: int, number: int, *, replicas: int) -> str:
        """Have it on disk which shims are to be started; the disk's problem, if not.

        :param replicas: the wanted size of the group.
        """
        context = self._context
        self._specs = specs = [
            _node_spec(context, group, index, number, node, replicas=replicas) for node in range(group.nnodes)
        ]
        shares = context.resources.shares(group.name, index)
        self._records = [
            ShimRecord(
                nonce=spec.nonce,
                group=group.name,
                replica=index,
                generation=number,
                node=spec.node,
                agent=share.node,
                gpus=share.gpus,
                memory_nbytes=share.memory_nbytes,
            )
            for spec, share in zip(specs, shares, strict=True)
        ]
        problem = context.save_start(number)  # before they start, so that a later supervisor can find them
        if problem:
            self._records = []
        return problem

    def start(self) -> None:
        """Start a shim for each node; OSError: one cannot be, and others may run."""
        for spec in self._specs:
            self.nodes.append(self._context.start_shim(spec, self._changed))

    def adopt(self, records: list[ShimRecord], nodes: list[ShimHandle]) -> None:
        """Go on with shims that an earlier supervisor has started."""
        self._records, self.nodes = records, nodes
        for node in nodes:
            node.changed = self._changed

    @property
    def records(self) -> list[ShimRecord]:
        """Records by which another supervisor finds the shims."""
        for number, node in enumerate(self.nodes[: len(self._records)]):
            record = self._records[number]
            if record.process is None and node.pid and node.local:
                self._records[number] = msgspec.structs.replace(
                    record, process=ProcessRecord(node.pid, node.start_time), cgroup=node.cgroup
                )
        return self._records

    def settled(self) -> None:
        """Forget the records: nothing of it is left to be found."""
        self._records = []

    @property
    def started(self) -> bool:
        return bool(self.nodes) and all(node.main_pid is not None for node in self.nodes)

    @property
    def reports(self) -> list[ExitReport]:
        return [node.report for node in self.nodes if node.report is not None]

    @property
    def failing(self) -> bool:
        return any(report.outcome != "ok" for report in self.reports)

    @property
    def ended(self) -> bool:
        return len(self.reports) == len(self.nodes)

    @property
    def gone(self) -> bool:
        return all(node.gone.is_set() for node in self.nodes)

    @property
    def remains(self) -> Remains | None:
        """Processes that SIGKILL has not ended yet; None if none are known."""
        left = [node for node in self.nodes if not node.gone.is_set()]
        found = [node.remains for node in left if node.remains is not None]
        if self.late_s >= _SHIM_DIES_S:  # its shims were killed by then
            since = time.time() - self.late_s
            heard = [node for node in left if node.over_at is None and node.unheard_s() < UNHEARD_S]
            dying = [node for node in heard if node.remains is None]
            found += [Remains(since, ((node.pid, "its shim"),)) for node in dying]
        if not found:
            return None
        processes = tuple(one for remains in found for one in remains.processes)
        return Remains(since=min(remains.since for remains in found), processes=processes)

    @property
    def awaits(self) -> str:
        """The lease that ends it, as in "waits ..."; empty: its agents tell its end."""
        left = {node.node: node.over_at for node in self.nodes if node.over_at is not None and not node.gone.is_set()}
        if not left:
            return ""
        name, until = max(left.items(), key=lambda one: one[1])
        return f"{max(0.0, until - self._loop.time()):.0f} s for the lease of node {name}"

    @property
    def unheard(self) -> list[str]:
        """The nodes of it of which nothing is heard."""
        return [node.node for node in self.nodes if not node.gone.is_set() and node.unheard_s() > UNHEARD_S]

    @property
    def stopped_before(self) -> bool:
        """Whether an earlier supervisor had told the generation to end."""
        return any(node.stopping for node in self.nodes)

    def silent(self, now: float, timeout_s: float) -> list[int]:
        """Return the parts whose shim has been silent for longer than ``timeout_s``."""
        return [index for index, node in enumerate(self.nodes) if node.silent_s(now) > timeout_s]

    def introduce(self) -> None:
        meeting = self.nodes[0].rendezvous if self.nodes else None
        for node in self.nodes[1:]:
            if meeting is not None and node.rendezvous is None:
                node.rendezvous = meeting
                node.meet(*meeting)

    def stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        """SIGTERM now, SIGKILL after ``timeout_s``; ``stacks``: dump these first."""
        if self.nodes:
            self.be_gone_within(timeout_s + STUCK_S)
        for node in self.nodes:
            node.stop(timeout_s, stacks=stacks)

    def be_gone_within(self, seconds: float) -> None:
        deadline = self._loop.time() + seconds
        self._gone_by = deadline if self._gone_by is None else min(self._gone_by, deadline)

    @property
    def look_at(self) -> float | None:
        return self._gone_by if self._pressed_at is None else self._pressed_at + PRESS_INTERVAL_S

    def press(self) -> None:
        """Kill late shims that do not report a wait; their remains are swept."""
        now = self._loop.time()
        if self.look_at is None or now < self.look_at:
            return
        self._pressed_at = now
        for node in self.nodes:
            if not node.gone.is_set() and node.remains is None:
                node.kill()

    @property
    def late_s(self) -> float:
        return 0.0 if self._gone_by is None else max(0.0, self._loop.time() - self._gone_by)

    def abandon(self) -> None:
        for node in self.nodes:
            if not node.gone.is_set():
                node.abandon()

    async def stacks(self) -> dict[str, str]:
        """Stacks by ``group/replica/rank``; nodes that do not answer are named."""
        found: dict[str, str] = {}
        for node, record in zip(self.nodes, self.records, strict=False):  # an ended generation has no records left
            if node.report is not None:
                continue
            try:
                found |= await node.stacks()
            except TimeoutError:
                found[f"{record.group}/{record.replica}, node {record.node}"] = "its shim does not answer"
        return found


def rank_environment(
    group: GroupConfig, replica: int, generation: int, *, replicas: int, shared: Mapping[str, str]
) -> dict[str, str]:
    """What a replica's processes have in their environment beyond that of their node.

    The group's variables, those ``shared`` in the run, and the replica's identity.
    """
    identity = {
        environ.GROUP: group.name,
        environ.REPLICA: str(replica),
        environ.REPLICAS: str(replicas),
        environ.GENERATION: str(generation),
    }
    return {"PYTHONFAULTHANDLER": "1", **group.env, **shared, **identity}


def wants_tee(logs: LogsConfig) -> bool:
    return logs.tee == "always" or (logs.tee == "auto" and os.isatty(2))


def _sidecars(context: FleetContext, group: str) -> str:
    """When ranks of the group need sidecars: probably never if they share memory.

    Members on other machines could not reach a store that listens on loopback.
    """
    if not context.on_channel(group):
        return ""
    channels = (one for one in context.config.channels.values() if group in one.groups)
    soon = any(one.peers or one.transport != "auto" or one.staging != "host" for one in channels)
    return "ahead" if soon or not is_loopback(context.config.store.bind) else "later"


def _node_spec(
    context: FleetContext, group: GroupConfig, index: int, generation: int, node: int, *, replicas: int
) -> NodeSpec:
    """The spec of node ``node``; each call gives it a new mark."""
    nonce = secrets.token_hex(16)
    folder = str(context.state.log_dir(group.name, index, generation))
    shared = {**context.environment(), environ.LOG_DIR: folder, MARK: nonce}
    shared |= context.resources.environment(group, index, node)
    env = rank_environment(group, index, generation, replicas=replicas, shared=shared)
    return NodeSpec(
        run=context.config.run.name,
        group=group.name,
        replica=index,
        generation=generation,
        node=node,
        nnodes=group.nnodes,
        nproc_per_node=group.nproc_per_node,
        launcher=group.launcher,
        command=group.command,
        env=env,
        cwd=str(group.cwd),
        log_dir=folder,
        stop_timeout_s=group.stop_timeout_s,
        nonce=nonce,
        sidecars=_sidecars(context, group.name),
        rendezvous_timeout_s=group.health.start_timeout_s,
        log_max_nbytes=context.config.logs.max_nbytes,
        log_keep=context.config.logs.keep,
        log_keep_generations=context.config.logs.keep_generations,
        tee=wants_tee(context.config.logs),
    )

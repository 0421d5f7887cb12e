"""One generation of a replica: a shim for each node, from start until all are gone."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from replicas import environ
from replicas.config.structs import Config, GroupConfig, LogsConfig
from replicas.config.values import is_loopback
from replicas.coordinator import Coordinator
from replicas.core.lives.leases import UNHEARD_S
from replicas.core.lives.lifecycle import Transition
from replicas.core.lives.placement import Share
from replicas.linux.processes import MARK
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.state.run_state import ProcessRecord, ShimRecord
from replicas.supervisor.state.state import StateDir
from replicas.supervisor.wire.orders import ExitReport, NodeSpec, Remains
from replicas.telemetry.events import Event

STUCK_S = 8.0
"""Grace after a generation's stop timeout, in seconds: then shims that give no reason
for being late are killed. At the end of the run, after the same time again, processes
that do not die are abandoned."""
PRESS_INTERVAL_S = 1.0
_SHIM_DIES_S = 4.0
ShimStarter = Callable[[NodeSpec, Callable[[], None]], ShimHandle]
"""Called with the spec and a callback for each change."""


class Ground(Protocol):
    """The supervisor as the fleet and its replicas see it. Tests use fakes."""

    @property
    def state(self) -> StateDir: ...
    @property
    def coordinator(self) -> Coordinator: ...
    @property
    def environment(self) -> Callable[[], Mapping[str, str]]: ...
    @property
    def emit(self) -> Callable[[Event], None]: ...
    @property
    def say(self) -> Callable[[str], None]: ...

    def save(self, *, order: bool = False) -> bool:
        """Save the state that must survive a kill now; False: it could not be.

        ``order``: for good, or WorldError: then the order is refused.
        """
        ...


class Starts(Protocol):
    """What keeps generations from starting, whatever their group. Tests use fakes."""

    def save_start(self, generation: int) -> str:
        """Save, before it starts, that a generation of this number does; the problem of
        the disk, in words, if that could not be saved.

        A start that no disk has noted would be one of which the next supervisor does
        not know, and its number could be used again.
        """
        ...

    def blocks(self, group: str, replica: int) -> str:
        """What of an earlier supervisor keeps a replica from starting, as in "waits
        ..."; empty: nothing."""
        ...

    def floor(self, group: str, replica: int) -> int:
        """The highest number of a generation that may have been used unknown to the
        replica."""
        ...


class Host(Ground, Protocol):
    @property
    def config(self) -> Config: ...
    @property
    def starts(self) -> Starts: ...
    def size(self, group: str) -> int: ...
    def share(self, group: str, replica: int, node: int) -> Mapping[str, str]:
        """Environment of one node of a replica with its share of the machine."""
        ...

    def shares(self, group: str, replica: int) -> tuple[Share, ...]:
        """The place of each node of a replica, which it has taken."""
        ...

    def waits_for(self, group: str, replica: int) -> str:
        """What a replica's first start waits for, as in "waits ..."; empty: its share
        is now taken."""
        ...

    def may_resume(self, group: str, replica: int) -> str:
        """What a replica whose delay is over waits for, likewise; empty: it may start
        again.

        A group that restarts as a whole waits for its last replica; and the share of
        the machine is taken, which a reload may have changed.
        """
        ...

    def fell(self, group: str, replica: int, text: str) -> None:
        """Handle a failing replica: others of its group may have to end, too."""
        ...

    def progressed(self, group: str, replica: int) -> bool | None:
        """Whether this generation made a new step or version; None: on no channel."""
        ...

    def on_channel(self, group: str) -> bool: ...
    def moved(self, transition: Transition) -> None: ...


class Generation:
    """One generation. ``changed``: called when a message of a shim has arrived."""

    def __init__(self, host: Host, start_shim: ShimStarter, changed: Callable[[], None]) -> None:
        self.nodes: list[ShimHandle] = []
        self._records: list[ShimRecord] = []
        self._specs: list[NodeSpec] = []
        self._gone_by: float | None = None
        self._pressed_at: float | None = None
        self._host = host
        self._start_shim = start_shim
        self._changed = changed
        self._loop = asyncio.get_running_loop()

    def prepare(self, group: GroupConfig, index: int, number: int) -> str:
        """Have it on disk which shims are to be started; the disk's problem, if not."""
        self._specs = specs = [_node_spec(self._host, group, index, number, node) for node in range(group.nnodes)]
        shares = self._host.shares(group.name, index)
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
        problem = self._host.starts.save_start(number)  # before they start, so that a later supervisor can find them
        if problem:
            self._records = []
        return problem

    def start(self) -> None:
        """Start a shim for each node; OSError: one cannot be, and others may run."""
        for spec in self._specs:
            self.nodes.append(self._start_shim(spec, self._changed))

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
        """Whether an earlier supervisor had told it to end."""
        return any(node.stopping for node in self.nodes)

    def silent(self, now: float, timeout_s: float) -> list[int]:
        """Nodes whose shims are silent for so long; call it each second: it pings."""
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


def _sidecars(host: Host, group: str) -> str:
    """When ranks of the group need sidecars: probably never if they share memory.

    Members on other machines could not reach a store that listens on loopback.
    """
    if not host.on_channel(group):
        return ""
    channels = (one for one in host.config.channels.values() if group in one.groups)
    soon = any(one.peers or one.transport != "auto" or one.staging != "host" for one in channels)
    return "ahead" if soon or not is_loopback(host.config.store.bind) else "later"


def _node_spec(host: Host, group: GroupConfig, index: int, generation: int, node: int) -> NodeSpec:
    """The spec of node ``node``; each call gives it a new mark."""
    nonce = secrets.token_hex(16)
    folder = str(host.state.log_dir(group.name, index, generation))
    shared = {**host.environment(), environ.LOG_DIR: folder, MARK: nonce}
    shared |= host.share(group.name, index, node)
    env = rank_environment(group, index, generation, replicas=host.size(group.name), shared=shared)
    return NodeSpec(
        run=host.config.run.name,
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
        sidecars=_sidecars(host, group.name),
        rendezvous_timeout_s=group.health.start_timeout_s,
        log_max_nbytes=host.config.logs.max_nbytes,
        log_keep=host.config.logs.keep,
        log_keep_generations=host.config.logs.keep_generations,
        tee=wants_tee(host.config.logs),
    )

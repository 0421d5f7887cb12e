"""One generation of a replica: a shim for each part, from start to end."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import Callable

import msgspec

from replicas import environ
from replicas.common.reason import Reason
from replicas.config.structs import GroupConfig, LogsConfig
from replicas.core.lives.lease_times import UNHEARD_S
from replicas.core.members.preflight import sends_by_group
from replicas.linux.processes import MARK
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.state.run_state import ProcessRecord, ShimRecord
from replicas.supervisor.wire.orders import PartSpec
from replicas.supervisor.wire.part_state import ExitReport, Remains

STUCK_S = 8.0
"""Seconds after a generation's stop timeout until shims that report no reason are
killed. At the end of the run, processes that survive as long again are abandoned."""
PRESS_INTERVAL_S = 1.0
_SHIM_DIES_S = 4.0


class Generation:
    """One start of a replica: a shim (the process that owns a part) for each node.

    :param changed: called when the state of a part has arrived.
    """

    def __init__(self, context: FleetContext, changed: Callable[[], None]) -> None:
        """Begin without parts; start nothing.

        :param changed: called on the loop when the state of a part has arrived.
        """
        self.parts: list[ShimHandle] = []
        self._records: list[ShimRecord] = []
        self._specs: list[PartSpec] = []
        self._gone_by = math.inf
        self._kill_time = 0.0
        """When its processes get SIGKILL, in seconds since 1970."""
        self.look_at = math.inf
        """When :meth:`kill_late_shims` must be called, by the loop's clock."""
        self._context = context
        self._changed = changed
        self._loop = asyncio.get_running_loop()

    def prepare(self, group: GroupConfig, index: int, number: int, *, replicas: int) -> Reason | None:
        """Write to disk which shims will be started. Return the problem, or None.

        Blocks for the write. After a problem, nothing may be started.

        :param group: the config of the group.
        :param index: of the replica.
        :param number: of the generation.
        :param replicas: the wanted size of the group, for the environment of the ranks.
        """
        context = self._context
        self._specs = specs = [
            _part_spec(context, group, index, number, node, replicas=replicas) for node in range(group.nnodes)
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
        problem = save_start(context, number)  # before they start, so that a later supervisor can find them
        if problem:
            self._records = []
        return problem

    def start(self) -> None:
        """Order a shim for each part from the agent of its node. Does not wait.

        :raises OSError: one cannot be started; others may run then.
        """
        for spec in self._specs:
            self.parts.append(self._context.start_shim(spec, self._changed))

    def adopt(self, records: list[ShimRecord], parts: list[ShimHandle]) -> None:
        """Take over an earlier supervisor's shims.

        Their handles call this object's ``changed`` from now on.

        :param records: one for each part, in the order of ``parts``.
        :param parts: handles of the shims, one for each part.
        """
        self._records, self.parts = records, parts
        for part in parts:
            part.changed = self._changed

    @property
    def records(self) -> list[ShimRecord]:
        """Records by which another supervisor finds the shims, one for each part.

        A shim is the process that owns the processes of one part.
        """
        for number, part in enumerate(self.parts[: len(self._records)]):
            record = self._records[number]
            if record.process is None and part.state.pid and part.local:
                self._records[number] = msgspec.structs.replace(
                    record, process=ProcessRecord(part.state.pid, part.state.start_time), cgroup=part.state.cgroup
                )
        return self._records

    def drop_records(self) -> None:
        """Forget the records of the shims, because all their processes are gone."""
        self._records = []

    @property
    def started(self) -> bool:
        """True if the main process of each part is started."""
        return bool(self.parts) and all(part.state.main_pid is not None for part in self.parts)

    @property
    def reports(self) -> list[ExitReport]:
        """Exit reports of the parts whose main process has ended."""
        return [part.state.report for part in self.parts if part.state.report is not None]

    @property
    def failing(self) -> bool:
        """True if the main process of a part has ended, and not as ``ok``."""
        return any(report.outcome != "ok" for report in self.reports)

    @property
    def ended(self) -> bool:
        """True if the main processes of all parts have ended."""
        return len(self.reports) == len(self.parts)

    @property
    def gone(self) -> bool:
        """True if no process of any part is left."""
        return all(part.state.gone for part in self.parts)

    @property
    def remains(self) -> Remains | None:
        """Processes that survive SIGKILL, or None if none are known.

        Includes shims that should be dead by now.
        """
        left = [part for part in self.parts if not part.state.gone]
        found = [part.state.remains for part in left if part.state.remains is not None]
        if self.late_s >= _SHIM_DIES_S:  # its shims were killed by then
            since = time.time() - self.late_s
            heard = [part for part in left if part.over_at == math.inf and part.unheard_s() < UNHEARD_S]
            dying = [part for part in heard if part.state.remains is None]
            found += [Remains(since, ((part.state.pid, "its shim, which watches the ranks"),)) for part in dying]
        if not found:
            return None
        processes = tuple(one for remains in found for one in remains.processes)
        return Remains(since=min(remains.since for remains in found), processes=processes)

    @property
    def awaits(self) -> Reason | None:
        """Why its end is delayed (``up to 12 s for its processes on node a to end``).

        The end of shims on a lost machine is known only when their agent's lease is
        over. None without such a delay.
        """
        left = {part.node: part.over_at for part in self.parts if part.over_at < math.inf and not part.state.gone}
        if not left:
            return None
        name, until = max(left.items(), key=lambda one: one[1])
        return f"up to {max(0.0, until - self._loop.time()):.0f} s for its processes on node {name} to end"

    @property
    def unheard(self) -> list[str]:
        """The nodes of living parts that are silent."""
        return [part.node for part in self.parts if not part.state.gone and part.unheard_s() > UNHEARD_S]

    def send_rendezvous(self) -> None:
        """Send the rendezvous (host and port) of part 0 to the other parts' shims.

        Do nothing while part 0 has not reported it.
        """
        meeting = self.parts[0].state.rendezvous if self.parts else None
        if meeting is not None:
            for part in self.parts[1:]:
                part.send_rendezvous(*meeting)

    def stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        """Order SIGTERM for all parts now, SIGKILL after ``timeout_s``. Does not wait.

        :param stacks: have the ranks' stacks saved to their logs first.
        """
        if self.parts:
            self.be_gone_within(timeout_s + STUCK_S)
        for part in self.parts:
            part.stop(timeout_s, stacks=stacks)

    def be_gone_within(self, seconds: float) -> None:
        """Set when shims that are not gone are late: after ``seconds``, if not earlier.

        An earlier limit stays. Kills none here: :meth:`kill_late_shims` does that when
        it is due.
        """
        deadline = self._loop.time() + seconds
        if deadline < self._gone_by:
            self._gone_by = self.look_at = deadline
            self._kill_time = time.time() + seconds - STUCK_S

    @property
    def kill_at(self) -> float:
        """When its processes get SIGKILL, by the loop's clock; 0 if unknown or gone."""
        return 0.0 if self._gone_by == math.inf or self.gone or self.remains is not None else self._gone_by - STUCK_S

    @property
    def ending(self) -> str:
        """The text after "waits" while its processes end, or "" if it is not ending.

        An example: ``for the old processes to end; any left at 12:00:00 get SIGKILL``.
        The time is local.
        """
        clock = time.strftime("%H:%M:%S", time.localtime(self._kill_time))
        return (
            f"for the old processes to end; any left at {clock} get SIGKILL" if self.kill_at > self._loop.time() else ""
        )

    def kill_late_shims(self) -> None:
        """Have shims killed that have outlived the limit of :meth:`be_gone_within`.

        Spares shims that report which process does not die. Agents then kill the
        processes of a dead shim. To be called at :attr:`look_at`.
        """
        now = self._loop.time()
        if now < self.look_at:
            return
        self.look_at = now + PRESS_INTERVAL_S
        for part in self.parts:
            if not part.state.gone and part.state.remains is None:
                part.kill()

    @property
    def late_s(self) -> float:
        """Seconds since the limit of :meth:`be_gone_within`; 0 before it."""
        return max(0.0, self._loop.time() - self._gone_by)

    def abandon(self) -> None:
        """Call ``changed`` no longer for parts that are not gone; end no process."""
        for part in self.parts:
            if not part.state.gone:
                part.abandon()

    async def stacks(self) -> dict[str, str]:
        """Ask for the stacks of all ranks, wait, and return them as texts.

        By ``group/replica/rank``; a part whose shim does not answer within 5 s has a
        note, one that has ended is left out.
        """
        found: dict[str, str] = {}
        for part, record in zip(self.parts, self.records, strict=False):  # an ended generation has no records left
            if part.state.report is not None:
                continue
            try:
                found |= await part.stacks()
            except TimeoutError:
                found[f"{record.group}/{record.replica}, node {record.node}"] = "their shim does not answer"
        return found


def save_start(context: FleetContext, generation: int) -> Reason | None:
    """Save the run's state, with a generation of this number that is about to start.

    Blocks for the writes. Without them, the next supervisor would not know of the
    start, and could use its number again.

    :return: the problem of the disk, in words, or None.
    """
    leases = context.state.leases
    try:
        leases.reserve_generation(generation)
        leases.starts += 1
        if not context.save():
            leases.starts -= 1  # or the next write of the leases would declare the state on disk old
            return context.state.run_state.problem
        leases.write_starts()
    except OSError as error:
        return f"{leases.path}: {error.strerror or error}"
    return None


def wants_tee(logs: LogsConfig) -> bool:
    """Return True if lines of ranks are to be shown on stderr, by ``logs.tee``.

    With ``auto``: if stderr is a terminal now.
    """
    return logs.tee == "always" or (logs.tee == "auto" and os.isatty(2))


def _sidecars(context: FleetContext, group: str) -> str:
    """Return when ranks of the group start sidecars: "ahead", "later", or "" (never).

    A sidecar is the process that owns a rank's part of a process group.
    """
    if not context.on_channel(group):
        return ""
    channels = (one for one in context.config.channels.values() if group in one.groups)
    return "ahead" if any(one.peers or sends_by_group(one) for one in channels) else "later"


def _part_spec(
    context: FleetContext, group: GroupConfig, index: int, generation: int, node: int, *, replicas: int
) -> PartSpec:
    """Return the spec of one part of a generation, with a new random mark.

    :param index: of the replica.
    :param node: number of the part within the replica.
    :param replicas: the wanted size of the group, for the environment of the ranks.
    """
    nonce = secrets.token_hex(16)
    folder = str(context.state.log_dir(group.name, index, generation))
    env = {"PYTHONFAULTHANDLER": "1", **group.env, **context.environment(), environ.LOG_DIR: folder, MARK: nonce}
    env |= context.resources.environment(group, index, node)
    env |= {
        environ.GROUP: group.name,
        environ.REPLICA: str(index),
        environ.REPLICAS: str(replicas),
        environ.GENERATION: str(generation),
    }
    return PartSpec(
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
        preload=group.preload,
        rendezvous_timeout_s=group.health.start_timeout_s,
        log_max_nbytes=context.config.logs.max_nbytes,
        log_keep=context.config.logs.keep,
        log_keep_generations=context.config.logs.keep_generations,
        tee=wants_tee(context.config.logs),
    )

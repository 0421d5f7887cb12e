"""One replica: it is started, watched, ended and started again.

Theory of operation
===================

:class:`Replica` is the shell round :mod:`replicas.core.lifecycle`. One task (:meth:`Replica.run`) follows the state: it
waits in ``pending`` for the groups that this one depends on, lives through one *generation* in ``starting``, ``ready``
and ``draining``, waits in ``backoff``, and rests in ``finished`` or ``failed`` until someone asks for more.

A generation is one shim for each node (:mod:`replicas.supervisor.node`). It ends in this order: a *cause* (a main process
ended, a timeout, a request) → every node is told to stop → every main process is gone, and the coordinator is told that
the members are lost → every process is gone → the lifecycle takes its end event. The next generation starts only after
that; what does not die of SIGKILL within ``STUCK_S`` fails the replica.

Everything here runs on the event loop; requests (:meth:`stop`, :meth:`restart`, :meth:`check`) change the state at once
and never wait.
"""

from __future__ import annotations

import asyncio
import time

from replicas import environ, errors
from replicas.config import GroupConfig
from replicas.core.budget import RestartBudget, wants_restart
from replicas.core.lifecycle import Event, Lifecycle, RestartReason, after_exit
from replicas.status import ReplicaStatus
from replicas.supervisor.causes import Cause, verdict
from replicas.supervisor.host import Host, Readiness, ShimHandle, ShimStarter
from replicas.supervisor.node import Node, rank_environment
from replicas.supervisor.orders import ExitReport, NodeSpec
from replicas.supervisor.processes import MARK

__all__ = ["STUCK_S", "Replica"]

STUCK_S = 8.0
"""Beyond its stop timeout: how long a generation may take to be gone before its shims are killed, and again after that."""


class Replica:
    """One replica of a group.

    :param group: the group's config.
    :param index: which replica of the group, from 0.
    :param budget: the group's restart budget, shared by its replicas.
    :param generation: generations of this replica that an earlier object has used up.
    :param start_shim: for tests.
    """

    def __init__(
        self,
        group: GroupConfig,
        index: int,
        host: Host,
        budget: RestartBudget,
        *,
        generation: int = 0,
        start_shim: ShimStarter = Node,
    ) -> None:
        self.group = group
        self.index = index
        self.life = Lifecycle(group.name, index, now=time.monotonic())
        self.life.generation = generation
        self.last_exit = ""
        self.over = asyncio.Event()
        """Set when :meth:`run` has returned: it was asked to stop and no process of it is left."""
        self._host = host
        self._budget = budget
        self._start_shim = start_shim
        self._nodes: list[ShimHandle] = []
        self._poke = asyncio.Event()
        self._stopping = False
        self._cause: Cause | None = None
        self._told = False
        self._gone_by: float | None = None
        self._resume_at = 0.0
        self._view: Readiness | None = None
        self._was_ready = False
        self._left = False
        self._unready_at = 0.0

    @property
    def name(self) -> str:
        """``group/replica``."""
        return self.life.name

    # ------------------------------------------------------------ requests

    def stop(self, timeout_s: float | None = None) -> None:
        """Ask for its end; ``timeout_s`` (default: the group's) from SIGTERM to SIGKILL. A later call can only hurry."""
        if not self._stopping:
            self._stopping = True
            self._apply(Event.STOP, reason="" if self.life.settled else "stop requested")
        self._end_nodes(self.group.stop_timeout_s if timeout_s is None else timeout_s)
        self.poke()

    def restart(self) -> None:
        """Ask for a new generation; it spends no budget.

        :raises replicas.errors.UsageError: the replica is being stopped for good.
        """
        if self._stopping:
            raise errors.UsageError(f"replica {self.name} is being stopped")
        running = self.life.alive
        self._apply(Event.RESTART, reason="restart requested")
        if running:
            self._cause = Cause("requested", "restart requested")
            self._end_nodes(self.group.stop_timeout_s)
        self.poke()

    def poke(self) -> None:
        """Have the task look at the world again."""
        self._poke.set()

    def forgive(self, pause_s: float) -> None:
        """This process did not run for ``pause_s``: none of the replica's timeouts is shortened by that."""
        self._unready_at += pause_s
        self.life.forgive(pause_s)

    def check(self, now: float) -> None:
        """Take the replica's health, from the coordinator and the clock."""
        if self.life.state == "pending":
            self.poke()
        if self.life.state not in ("starting", "ready") or any(node.report for node in self._nodes):
            return
        if any(node.silent_s(now) > self.group.health.heartbeat_timeout_s for node in self._nodes):
            self._end_frozen(now)
            return
        view = self._look()
        ready = view.ready if view is not None else self._started
        if ready and self.life.state == "starting":
            self._was_ready = True
            self._left = False
            self._apply(Event.READY)
        elif not ready and self.life.state == "ready":
            self._unready_at = now
            self._apply(Event.UNREADY, reason=view.reason if view is not None else "")
        self._judge(view, ready, now)

    def _end_frozen(self, now: float) -> None:
        """A shim does not answer: nobody looks after its processes. They are swept by their mark once it is killed."""
        timeout_s = self.group.health.heartbeat_timeout_s
        frozen = [index for index, node in enumerate(self._nodes) if node.silent_s(now) > timeout_s]
        names = ", ".join(map(str, frozen))
        self._end(
            Event.HEARTBEAT_TIMEOUT, Cause("lost", f"the shim of node {names} did not answer for {timeout_s:g} s")
        )
        for index in frozen:
            self._nodes[index].kill()

    @property
    def _started(self) -> bool:
        return bool(self._nodes) and all(node.main_pid is not None for node in self._nodes)

    def _look(self) -> Readiness | None:
        if not self._host.on_channel(self.group.name):
            return None
        self._view = self._host.overseer.readiness(self.group.name, self.index, self.life.generation)
        return self._view

    def _judge(self, view: Readiness | None, ready: bool, now: float) -> None:
        health = self.group.health
        if not ready and not self._was_ready and self.life.starting_s(now) > health.start_timeout_s:
            why = f": {view.reason}" if view is not None and view.reason else ""
            text = f"not ready within {health.start_timeout_s:g} s{why}"
            self._end(Event.START_TIMEOUT, Cause("start_timeout", text))
        elif view is None:
            return
        elif view.heartbeat_age_s is not None and view.heartbeat_age_s > health.heartbeat_timeout_s:
            text = f"no heartbeat for {health.heartbeat_timeout_s:g} s"
            self._end(Event.HEARTBEAT_TIMEOUT, Cause("heartbeat_timeout", text))
        elif view.progressed_s is not None and view.progressed_s > health.progress_timeout_s:
            text = f"no progress for {health.progress_timeout_s:g} s"
            self._end(Event.PROGRESS_TIMEOUT, Cause("progress_timeout", text))
        elif view.partial:
            self._end(Event.LOAD_TIMEOUT, Cause("load_timeout", "it loaded a version only in part"))
        elif self._overdue(view, ready) and now - self._unready_at > health.load_deadline_s:
            text = f"not ready again within {health.load_deadline_s:g} s: {view.reason}"
            self._end(Event.LOAD_TIMEOUT, Cause("load_timeout", text))

    def _overdue(self, view: Readiness, ready: bool) -> bool:
        """Whether it was ready, and must become so again: not when ranks have left, unless others wait for them."""
        return not ready and self._was_ready and (not self._left or view.stranded)

    def member_lost(self, rank: int, reason: str) -> None:
        """The coordinator has lost a member of this replica: ``lease``, ``overflow``, ``left`` and others.

        One that *left* needs no more of us, and is not expected back. One that is silent, or does not read, is frozen.
        Whatever else ended it will be seen in its process.
        """
        if reason == "left":
            self._left = True
        elif self.life.state in ("starting", "ready") and reason in ("lease", "overflow"):
            health = self.group.health
            silent = f"sent no heartbeat for {health.heartbeat_timeout_s:g} s"
            text = f"rank {rank} {silent if reason == 'lease' else 'does not read what it is sent'}"
            self._end(Event.HEARTBEAT_TIMEOUT, Cause("heartbeat_timeout", text))

    def _end(self, event: Event, cause: Cause) -> None:
        self._cause = cause
        self._apply(event, reason=cause.text)
        self._end_nodes(self.group.stop_timeout_s)
        self.poke()

    def _end_nodes(self, timeout_s: float) -> None:
        if self._nodes:
            self._be_gone_within(timeout_s + STUCK_S)
        for node in self._nodes:
            node.stop(timeout_s)

    def _be_gone_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._gone_by = deadline if self._gone_by is None else min(self._gone_by, deadline)

    def _apply(self, event: Event, *, reason: str = "", restart_reason: RestartReason | None = None) -> None:
        now = time.monotonic()
        transition = self.life.apply(event, now=now, reason=reason, restart_reason=restart_reason)
        self._host.moved(transition, self.last_exit)

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Live until :meth:`stop` and the end of the last process. Cancelled, it leaves its shims to end by themselves."""
        try:
            while not (self._stopping and self.life.settled):
                state = self.life.state
                if state == "pending" and self._host.may_start(self.group.name):
                    self._apply(Event.START)
                elif state == "starting":
                    await self._generation()
                elif state == "backoff" and time.monotonic() >= self._resume_at:
                    self._apply(Event.BACKOFF_ELAPSED)
                else:
                    await self._poked(self._resume_at if state == "backoff" else None)
        finally:
            for node in self._nodes:
                node.abandon()
            self.over.set()

    async def _poked(self, until: float | None = None) -> None:
        """Wait for a poke, or for the time ``until``."""
        try:
            async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())):
                await self._poke.wait()
        except TimeoutError:
            return
        self._poke.clear()

    async def _generation(self) -> None:
        self._cause = self._gone_by = self._view = None
        self._told = self._was_ready = self._left = False
        self.last_exit = ""
        try:
            for node in range(self.group.nnodes):
                self._nodes.append(self._start_shim(self._spec(node), self.poke, self._host.state.lock))
        except OSError as error:
            self._cause = Cause("lost", f"a shim cannot be started: {error}")
            self._end_nodes(0.0)
        await self._until_gone()
        self._generation_ended()

    async def _until_gone(self) -> None:
        """Follow the nodes to their end; a shim that is late is killed, and given up when that does not help."""
        killed = False
        while not all(node.gone.is_set() for node in self._nodes):
            await self._poked(self._gone_by)
            self._follow()
            late = self._gone_by is not None and time.monotonic() >= self._gone_by
            if late and killed:
                return
            if late:
                killed = True
                self._gone_by = time.monotonic() + STUCK_S
                for node in self._nodes:
                    node.kill()
        self._follow()

    def _spec(self, node: int) -> NodeSpec:
        group = self.group
        nonce = Node.nonce()
        folder = str(self._host.state.log_dir(group.name, self.index, self.life.generation))
        shared = {**self._host.environment(), environ.LOG_DIR: folder, MARK: nonce}
        forkserver = f"replicas-{nonce}" if self._host.on_channel(group.name) else ""
        if forkserver:
            shared[environ.FORKSERVER] = forkserver
        env = rank_environment(
            group, self.index, self.life.generation, replicas=self._host.size(group.name), shared=shared
        )
        return NodeSpec(
            run=self._host.run,
            group=group.name,
            replica=self.index,
            generation=self.life.generation,
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
            forkserver=forkserver,
            rendezvous_timeout_s=group.health.start_timeout_s,
        )

    def _follow(self) -> None:
        """Act on what the nodes have said: introduce them, end all when one failed, tell the coordinator."""
        meeting = self._nodes[0].rendezvous if self._nodes else None
        for node in self._nodes[1:]:
            if meeting is not None and node.rendezvous is None:
                node.rendezvous = meeting
                node.meet(*meeting)
        reports = [node.report for node in self._nodes if node.report is not None]
        failed = any(report.outcome != "ok" for report in reports)
        if failed and self._gone_by is None:
            self._end_nodes(self.group.stop_timeout_s)
        if len(reports) == len(self._nodes):
            self._be_gone_within(STUCK_S)
            if not self._told:
                self._told = True
                self._note_exit(reports)
                name = (self.group.name, self.index, self.life.generation)
                self._host.overseer.replica_ended(*name, self.last_exit or "finished")

    def _note_exit(self, reports: list[ExitReport]) -> None:
        own = verdict(reports)
        if self._cause is None and not self._stopping:
            self._cause = own
        self.last_exit = self._cause.text if self._cause is not None else "stopped" if self._stopping else "finished"

    def _generation_ended(self) -> None:
        """Every process is gone: what now?"""
        stuck = not all(node.gone.is_set() and node.swept for node in self._nodes)
        for node in self._nodes:
            if not node.gone.is_set():
                node.abandon()
        self._nodes = []
        self._gone_by = None
        now = time.monotonic()
        cause = self._cause
        config = self.group.restart
        requested = cause is not None and cause.reason == "requested"
        asks = not self._stopping and not requested and not stuck and wants_restart(config, ok=cause is None)
        delay_s = self._budget.take(self.index, now=now) if asks else None
        event = after_exit(
            ok=cause is None,
            stopping=self._stopping,
            policy=config.policy,
            granted=delay_s is not None,
            requested=requested,
        )
        if stuck:
            self._apply(Event.GIVE_UP, reason="processes of it survive SIGKILL")
        elif event is Event.RETRY:
            self._resume_at = now + (delay_s or 0.0)
            self._apply(event, reason=self.last_exit, restart_reason=cause.reason if cause else "exit")
        elif event is Event.GIVE_UP:
            left = f"no restart is left of {config.max_restarts} in {config.window_s:g} s"
            rule = "restart policy is never" if config.policy == "never" else left
            self._apply(event, reason=f"{self.last_exit}; {rule}")
        else:
            self._apply(event, reason=self.last_exit)

    @property
    def resume_in_s(self) -> float:
        """Seconds until the next generation, in ``backoff``."""
        return max(0.0, self._resume_at - time.monotonic())

    def status(self, now: float) -> ReplicaStatus:
        """A snapshot."""
        life, view = self.life, self._view
        running = life.state in ("starting", "ready")
        reason = view.reason if running and view is not None else life.reason
        if life.state == "pending" and self.group.depends_on:
            reason = f"waits for {', '.join(self.group.depends_on)}"
        return ReplicaStatus(
            name=life.name,
            group=life.group,
            replica=life.replica,
            state=life.state,
            generation=life.generation,
            reason="" if life.state == "ready" else reason,
            pid=self._nodes[0].main_pid if self._nodes else None,
            restarts=sum(life.restarts.values()),
            state_age_s=life.state_age_s(now),
            heartbeat_age_s=view.heartbeat_age_s if running and view is not None else None,
            versions=dict(view.versions) if running and view is not None else {},
            last_exit=self.last_exit,
        )

"""One replica: start its generations, watch them, end them, and restart.

:class:`Replica` is the shell of :mod:`replicas.core.lives.lifecycle`. One task
(:meth:`Replica.run`) follows the state: it waits in ``pending`` for dependencies and
resources, runs one *generation* through ``starting``, ``ready`` and ``draining``, waits
in ``backoff``, and rests in ``finished`` or ``failed`` until a request.

A generation is one shim for each node (:mod:`replicas.supervisor.fleet.handle`). It
ends in this order:

1. There is a *cause*: a main process ended, a timeout, a request.
2. If it was requested, the replica is *draining*: it finishes its sync, within
   ``drain_timeout``.
3. Every node is told to stop.
4. Every main process is gone, and the coordinator is told that the members are lost.
5. Every process is gone.
6. The lifecycle takes the end event.

The next generation starts only after that, however long it takes: a process that does
not die of SIGKILL is reported, and killed again and again. Only the end of the run
leaves it behind. Requests change the state at once and never wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Literal

from replicas import errors
from replicas.config.structs import GroupConfig
from replicas.core.lives.leases import BEAT_S
from replicas.core.lives.lifecycle import FREE_REASONS, Lifecycle, ReplicaEvent, RestartReason, after_exit
from replicas.core.lives.restarts import Restarts, RestartVerdict
from replicas.status import ReplicaStatus
from replicas.supervisor.cleanup.still_held import HoldUps
from replicas.supervisor.fleet.causes import Cause, Health, dropped, exited, verdict
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.shim.generation import STUCK_S, Generation, Host, ShimStarter
from replicas.supervisor.shim.orders import ExitReport
from replicas.supervisor.state.run_state import ShimRecord
from replicas.telemetry.events import StacksSaved

__all__ = ["REQUESTED", "Replica", "new_turns"]

REQUESTED = Cause("requested", "restart requested")
UNHEARD_S = 2 * BEAT_S
"""A silent node, so that the silence of its ranks is not theirs."""
TURN_S = 2.0
_TURNS_FOR_EACH_CORE = 2


def new_turns() -> asyncio.Semaphore:
    """Limit of concurrent starts, which keep the event loop and the cores busy."""
    return asyncio.Semaphore(_TURNS_FOR_EACH_CORE * len(os.sched_getaffinity(0)))


async def _turn(turns: asyncio.Semaphore) -> Callable[[], None]:
    """Wait for a turn, which ends when the result is called, or after ``TURN_S``."""
    await turns.acquire()
    once = contextlib.ExitStack()
    once.callback(turns.release)
    asyncio.get_running_loop().call_later(TURN_S, once.close)
    return once.close


class Replica:
    """One replica of a group. Create it on the event loop.

    :param group: the group's config; a reload may replace it.
    :param restarts: the group's restart rules, shared by its replicas.
    :param generation: number of generations that an earlier object of it used.
    """

    def __init__(
        self,
        group: GroupConfig,
        index: int,
        host: Host,
        restarts: Restarts,
        *,
        generation: int = 0,
        turns: asyncio.Semaphore | None = None,
        start_shim: ShimStarter,
    ) -> None:
        self.group = group
        self.index = index
        self._now = asyncio.get_running_loop().time
        self.life = Lifecycle(group.name, index, now=self._now())
        self.life.generation = generation
        self.name = self.life.name
        self.last_exit = ""
        self.over = asyncio.Event()
        """Set when :meth:`run` has returned.

        The replica was stopped for good, and no process of it is left.
        """
        self._host = host
        self._restarts = restarts
        self._turns = turns or new_turns()
        self._start_shim = start_shim
        self._poke = asyncio.Event()
        self.ending: Literal["", "halt", "leave", "fail"] = ""
        """What was asked: a stop until a restart, or for good; its group has failed."""
        self._cause: Cause | None = None
        self._health = Health()
        self._mark: tuple[int, ...] = ()
        self._drain_by: float | None = None
        self._busy_with = ""
        self._resume_at = 0.0
        self._waits_for = ""
        self._run_over = False
        self._adopted = False
        self._ran_s = 0.0
        self._begin()

    def _begin(self) -> None:
        """Make what lives as long as one generation."""
        self._generation = Generation(self._host, self._start_shim, self.poke)
        self._hold_ups = HoldUps(self._host.emit, *self._key, self.life.generation)

    @property
    def _key(self) -> tuple[str, int]:
        return self.group.name, self.index

    @property
    def _members_generation(self) -> int:
        """The greatest generation that its members may have."""
        return self.life.generation

    @property
    def shims(self) -> list[ShimRecord]:
        """Records by which another supervisor finds this generation's shims."""
        return self._generation.records

    @property
    def falling(self) -> bool:
        """Whether its generation is ending, and something of it may be left."""
        return self.life.alive and (self.life.state == "draining" or self._cause is not None)

    @property
    def stuck(self) -> bool:
        """Whether its last generation left processes behind, which keep resources."""
        return self.life.settled and not self._generation.gone

    @property
    def halted(self) -> bool:
        """Whether it was, or is being, stopped by hand until the next restart."""
        return self.ending == "halt" or (self.life.state == "drained" and self.ending != "leave")

    @property
    def unwanted(self) -> bool:
        """Whether it was, or is being, stopped by hand or for good."""
        return self.halted or bool(self.ending)

    @property
    def resting(self) -> bool:
        return self.life.settled and not self.ending

    # ------------------------------------------------------------ requests

    def adopt(self, number: int, records: list[ShimRecord], nodes: list[ShimHandle]) -> None:
        """Go on with a generation that an earlier supervisor has started."""
        self.life.generation = number
        self._begin()
        self._generation.adopt(records, nodes)
        self._adopted = True
        self._apply(ReplicaEvent.ADOPT)

    def stop(self, hurry_s: float | None = None, *, run_over: bool = False) -> None:
        """Stop the replica for good.

        :param hurry_s: skip the sync: SIGTERM now, SIGKILL after this time. A later
            call can only shorten it. None: finish the sync first.
        :param run_over: processes that do not die in time are left behind.
        """
        self._run_over |= run_over
        self._end_on_request("leave", hurry_s)

    def halt(self, hurry_s: float | None = None) -> None:
        """Stop the replica until a restart, as :meth:`stop`, if it is not settled."""
        if not self.life.settled:
            self._end_on_request("halt", hurry_s)

    def fail(self, reason: str) -> None:
        """End the replica because its group has failed, until a reset or restart."""
        if not self.life.settled and not self.ending:
            self._cause = Cause("group", reason)
            self._end_on_request("fail", None, ReplicaEvent.GROUP_FAILED, reason)

    def _end_on_request(
        self,
        how: Literal["halt", "leave", "fail"],
        hurry_s: float | None,
        event: ReplicaEvent = ReplicaEvent.STOP,
        reason: str = "stop requested",
    ) -> None:
        first = not self.ending
        if self.ending != "leave":
            self.ending = how
        if first and not self.life.settled:
            self._apply(event, reason=reason)
            if self.life.alive and hurry_s is None:
                self._drain()
        if self.life.alive and hurry_s is not None:
            self._end_processes(hurry_s)
        self._rest_if_settled()
        self.poke()

    def _rest_if_settled(self) -> None:
        if self.ending in ("halt", "fail") and self.life.settled:
            self.ending = ""

    def restart(self, cause: Cause = REQUESTED, *, drain: bool = True) -> None:
        """Start a new generation, which spends no budget; ``drain``: after the sync.

        :raises replicas.errors.UsageError: the replica is being stopped for good.
        """
        if self.ending == "leave":
            raise errors.UsageError(f"replica {self.name} is being stopped")
        self.ending = ""
        running, before = self.life.alive, self.life.state
        self._apply(ReplicaEvent.RESTART, reason=cause.text)
        if running:
            if self._cause is None or cause.reason == "requested":
                self._cause = cause
            if not drain:
                self._end_processes(self.group.stop_timeout_s)
            elif before != "draining":
                self._drain()
        self.poke()

    def reset(self) -> bool:
        """Start again now; False: it has neither failed nor is in backoff."""
        if self.ending or self.life.state not in ("failed", "backoff"):
            return False
        self._apply(ReplicaEvent.RESET)
        self.poke()
        return True

    def poke(self) -> None:
        self._poke.set()

    def forgive(self, pause_s: float) -> None:
        """Extend all timeouts by ``pause_s``, in which this process did not run."""
        self._health.unready_at += pause_s
        self.life.forgive(pause_s)
        if self._drain_by is not None:
            self._drain_by += pause_s

    # ------------------------------------------------------------ while it runs

    def check(self, now: float) -> None:
        """Update the replica's health, from the coordinator and the clock."""
        if self.life.state in ("pending", "backoff"):
            self.poke()
        elif self.life.state == "draining":
            self._check_drain(now)
        generation, health, config = self._generation, self._health, self.group.health
        failing = any(report.outcome != "ok" for report in generation.reports)
        if self.life.state not in ("starting", "ready") or failing or generation.ended:
            return  # it ends, or still waits for its turn or for resources of the last generation
        if frozen := generation.silent(now, config.heartbeat_timeout_s):
            text = f"the shim of node {', '.join(map(str, frozen))} did not answer for {config.heartbeat_timeout_s:g} s"
            self._end_unhealthy(ReplicaEvent.HEARTBEAT_TIMEOUT, Cause("lost", text))
            for index in frozen:  # their processes are swept by mark when they are dead
                generation.nodes[index].kill()
            return
        view = None
        if self._host.on_channel(self.group.name):
            view = health.view = self._host.coordinator.readiness(*self._key, self.life.generation)
        ready = view.ready if view is not None else generation.started
        if ready and self.life.state == "starting":
            health.was_ready, health.left = True, False
            self._apply(ReplicaEvent.READY)
        elif not ready and self.life.state == "ready":
            health.unready_at = now
            self._apply(ReplicaEvent.UNREADY, reason=view.reason if view is not None else "")
        sick = health.judge(config, ready=ready, starting_s=self.life.starting_s(now), now=now)
        if sick is not None:
            self._end_unhealthy(ReplicaEvent(sick.reason), sick)

    def member_lost(self, rank: int, reason: str) -> None:
        """Handle the loss of a member: ``lease``, ``overflow``, ``left`` and others.

        One that is silent, or does not read, is frozen, or cut off with its node. Any
        other end will be seen in its process.
        """
        if reason == "left":
            self._health.left = True
        elif self.life.state in ("starting", "ready") and reason in ("lease", "overflow"):
            silent = f"sent no heartbeat for {self.group.health.heartbeat_timeout_s:g} s"
            text = f"rank {rank} {silent if reason == 'lease' else 'does not read what it is sent'}"
            self._end_unhealthy(ReplicaEvent.HEARTBEAT_TIMEOUT, self._cut_off(rank) or Cause("heartbeat_timeout", text))

    def _cut_off(self, rank: int) -> Cause | None:
        """The cause, if nothing is heard of the rank's whole node."""
        part = rank // self.group.nproc_per_node
        for node in self._generation.nodes[part : part + 1]:
            if node.unheard_s() > UNHEARD_S:
                return Cause("node", f"nothing is heard of node {node.node}")
        return None

    @property
    def progressed(self) -> bool | None:
        """Whether this generation made a new step or version; None: on no channel."""
        if not self._host.on_channel(self.group.name):
            return None
        return self._host.coordinator.progress(*self._key) != self._mark

    # ------------------------------------------------------------ ending a generation

    def _end_unhealthy(self, event: ReplicaEvent, cause: Cause) -> None:
        self._cause = cause
        self._apply(event, reason=cause.text)
        self._end_processes(self.group.stop_timeout_s, stacks=True)
        self._host.fell(*self._key, cause.text)

    def _drain(self) -> None:
        """Let the replica finish its sync before it is told to stop."""
        if not self._host.on_channel(self.group.name):
            self._end_processes(self.group.stop_timeout_s)
            return
        self._host.coordinator.set_draining(*self._key, self._members_generation)
        self._drain_by = self._now() + self.group.drain_timeout_s
        self.idle()
        if self._busy_with:
            self._host.say(f"{self.name}: stopping it when its sync is over; {self._busy_with}")

    def idle(self) -> None:
        """Handle the end of a sync, as reported by the coordinator."""
        self._check_drain(self._now())

    def _check_drain(self, now: float) -> None:
        if self._drain_by is None:
            return
        self._busy_with = self._host.coordinator.busy(*self._key)
        if self._busy_with and now >= self._drain_by:
            self._host.say(f"{self.name}: not over within {self.group.drain_timeout_s:g} s; {self._busy_with}")
        if not self._busy_with or now >= self._drain_by or self._generation.reports:
            self._end_processes(self.group.stop_timeout_s)

    def _end_processes(self, timeout_s: float, *, stacks: bool = False) -> None:
        """SIGTERM now, SIGKILL after ``timeout_s``; ``stacks``: save these first."""
        self._drain_by, self._busy_with = None, ""
        self._generation.stop(timeout_s, stacks=stacks)
        self.poke()  # the task must watch the new deadline: a frozen shim would not wake it

    def _apply(self, event: ReplicaEvent, *, reason: str = "", restart_reason: RestartReason | None = None) -> None:
        self._host.moved(self.life.apply(event, now=self._now(), reason=reason, restart_reason=restart_reason))

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Run until :meth:`stop` and the last process's end; a cancel leaves those."""
        try:
            while not (self.ending == "leave" and self.life.settled):
                if self.life.state == "starting":
                    await self._run_generation()
                elif not self._start_if_due():
                    waits = self.life.state == "backoff" and self._resume_at > self._now()
                    await self._poked(self._resume_at if waits else None)
        finally:
            self._generation.abandon()
            self.over.set()

    def _start_if_due(self) -> bool:
        event = ReplicaEvent.BACKOFF_ELAPSED
        if self.life.state == "pending":
            event = ReplicaEvent.START
            self._waits_for = self._host.waits_for(*self._key)
            due = not self._waits_for
        else:
            waited = self.life.state == "backoff" and self._now() >= self._resume_at
            self._waits_for = self._host.may_resume(*self._key) if waited else ""
            due = waited and not self._waits_for
        if due:
            self._restarts.resumed()
            self._apply(event)
        return due

    async def _poked(self, until: float | None = None) -> None:
        try:
            async with asyncio.timeout(None if until is None else max(0.0, until - self._now())):
                await self._poke.wait()
        except TimeoutError:
            return
        self._poke.clear()

    async def _run_generation(self) -> None:
        self._cause = self._drain_by = None
        self._health = Health()
        self._mark = self._host.coordinator.progress(*self._key)
        adopted, self._adopted = self._adopted, False
        if not adopted:
            self.last_exit = ""
            old = [node.belongings for node in self._generation.nodes if node.local]
            self._begin()
            await self._hold_ups.until_clear(old, self._pause)
        turn_over = await self._launch()
        generation = self._generation
        try:
            while not generation.gone and not (self._run_over and generation.late_s >= STUCK_S):
                await self._poked(generation.look_at)
                self._follow()
                if generation.started or generation.reports:
                    turn_over()
                generation.press()
                if self._hold_ups.remain(generation.remains):
                    self._apply(ReplicaEvent.HELD_UP, reason=self._with_hold_ups())
        finally:
            turn_over()
        self._follow()
        self._generation_ended()

    async def _launch(self) -> Callable[[], None]:
        """Start the processes, unless they run already; the result ends the turn."""
        if self._generation.nodes:
            self.life.launched(self._now())
            return lambda: None
        turn_over = await _turn(self._turns)
        self.life.launched(self._now())
        try:
            if self._wanted:
                self._generation.start(self.group, self.index, self.life.generation)
        except OSError as error:
            self._cause = Cause("lost", f"a shim cannot be started: {error}")
            self._host.fell(*self._key, self._cause.text)
        return turn_over

    @property
    def _wanted(self) -> bool:
        """Whether neither a cause nor a request ends the generation."""
        return self._cause is None and not self.ending

    def _with_hold_ups(self, reason: str = "") -> str:
        """Why the generation ends, and what holds that up."""
        reason = reason or (self._cause.text if self._cause else "stop requested" if self.ending else "")
        return "; ".join(filter(None, (reason, self._hold_ups.text)))

    async def _pause(self, seconds: float) -> bool:
        await self._poked(self._now() + seconds)
        return self._wanted

    def _follow(self) -> None:
        """Act on the nodes' messages, and tell the coordinator of the members' end."""
        generation = self._generation
        generation.introduce()
        for node in generation.nodes:
            losses, node.losses = node.losses, []
            for loss in losses:
                self._host.emit(dropped(*self._key, self.life.generation, loss))
        if any(report.outcome != "ok" for report in generation.reports) and generation.gone_by is None:
            self._end_processes(self.group.stop_timeout_s)
        if generation.ended:
            if generation.gone_by is None:
                generation.be_gone_within(STUCK_S)
            if not generation.noted:
                generation.noted = True
                self._ran_s = self.life.starting_s(self._now())
                self._note_exit(generation.reports)
            # Ranks that leave in order, as requested, are not lost. Those that are
            # children of the main process may outlive it.
            asked = bool(self.ending) or (self._cause is not None and self._cause.reason in FREE_REASONS)
            leave = asked and not generation.gone and generation.remains is None
            if not generation.told and not leave:
                generation.told = True
                self._host.coordinator.replica_ended(*self._key, self.life.generation, self.last_exit or "finished")

    def _note_exit(self, reports: list[ExitReport]) -> None:
        own = verdict(reports)
        if self._generation.stopped_before and all(report.outcome in ("ok", "stopped") for report in reports):
            own = Cause("requested", "it was being ended")  # by an earlier supervisor
        if self._wanted:
            self._cause = own
            if own is not None:
                self._host.fell(*self._key, own.text)
        self.last_exit = self._cause.text if self._cause is not None else "stopped" if self.ending else "finished"
        generation = self.life.generation
        stuck = self._cause is not None and self._cause.reason.endswith("timeout")
        if stuck and any(node.last_stacks for node in self._generation.nodes):
            group, replica = self._key
            path = str(self._host.state.log_dir(group, replica, generation))
            self._host.emit(
                StacksSaved(group=group, replica=replica, generation=generation, reason=self.last_exit, path=path)
            )
        if reports:
            self._host.emit(exited(*self._key, generation, reports, reason=self.last_exit))

    def _generation_ended(self) -> None:
        """Take the next state: the generation has ended, or was left behind."""
        self._drain_by = None
        cause, generation = self._cause, self._generation
        generation.abandon()
        if not generation.gone:
            self._hold_ups.remain(generation.remains, gave_up=True)
            self._apply(ReplicaEvent.GIVE_UP, reason=self._with_hold_ups("left behind at the end of the run"))
        elif self.ending:
            generation.settled()
            self._apply(ReplicaEvent.GIVE_UP if self.ending == "fail" else ReplicaEvent.STOPPED, reason=self.last_exit)
        else:
            generation.settled()
            found = self._judge_end(cause)
            free = cause is not None and cause.reason in FREE_REASONS
            granted = found.delay_s is not None
            event = after_exit(ok=cause is None, policy=self.group.restart.policy, granted=granted, requested=free)
            if event is ReplicaEvent.RETRY:
                self._resume_at = self._now() + (found.delay_s or 0.0)
                self._apply(event, reason=self.last_exit, restart_reason=cause.reason if cause else "exit")
            else:
                text = self.last_exit if event is ReplicaEvent.FINISHED else f"{self.last_exit}; {found.rule}"
                self._apply(event, reason=text)
        self._rest_if_settled()

    def _judge_end(self, cause: Cause | None) -> RestartVerdict:
        """The verdict of the rules; of a request only whether it waits for others."""
        now = self._now()
        if cause is not None and cause.reason in FREE_REASONS:
            return RestartVerdict(self._restarts.resume_in_s(now) if cause.reason == "group" else 0.0)
        progressed = self._host.progressed(*self._key)
        ok, ran_s = cause is None, self._ran_s  # without the time that its last process took to die
        return self._restarts.ended(self.index, ok=ok, progressed=progressed, ran_s=ran_s, now=now)

    async def stacks(self) -> dict[str, str]:
        return await self._generation.stacks()

    @property
    def resume_in_s(self) -> float:
        return max(0.0, self._resume_at - self._now())

    def status(self, now: float) -> ReplicaStatus:
        life, nodes = self.life, self._generation.nodes
        view = self._health.view if life.state in ("starting", "ready") else None
        reason = view.reason if view is not None else life.reason
        if life.state == "pending" and self._waits_for:
            reason = f"waits for {self._waits_for}"
        elif life.state == "backoff" and self._waits_for:
            reason = f"{reason}; waits for {self._waits_for}"
        elif self._hold_ups.text and life.alive:
            reason = self._with_hold_ups()
        elif self._busy_with:
            reason = f"{reason}; {self._busy_with}"
        return ReplicaStatus(
            name=life.name,
            group=life.group,
            replica=life.replica,
            state=life.state,
            generation=life.generation,
            reason="" if life.state == "ready" else reason,
            pid=nodes[0].main_pid if nodes and life.alive else None,
            restarts=sum(life.restarts.values()),
            state_age_s=life.state_age_s(now),
            heartbeat_age_s=view.heartbeat_age_s if view is not None else None,
            versions=dict(view.versions) if view is not None else {},
            last_exit=self.last_exit,
            cycles=self._restarts.cycles_of(self.index),
            nodes=tuple(share.node for share in self._host.shares(*self._key)),
        )

"""One replica: start its generations, watch them, end them, and restart.

:class:`Replica` is the shell of :mod:`replicas.core.lives.lifecycle`. One task
(:meth:`Replica.run`) follows the state: it waits in ``pending`` for dependencies and
resources, runs one *generation* through ``starting``, ``ready`` and ``draining``, waits
in ``backoff``, and rests in ``finished`` or ``failed`` until a request.
Requests to the replica are a table (:data:`replicas.core.lives.ending.ASKED`); so is a
generation (:mod:`replicas.supervisor.fleet.generation_lifecycle`). The next one starts
when the last process of the previous one is gone: a process that survives SIGKILL is
reported and killed again; only the end of the run leaves it. Requests never wait.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from replicas import errors
from replicas.common.reason import Reason
from replicas.common.table import StateMachine
from replicas.common.tasks import is_set_within
from replicas.config.diff import digest_of_start
from replicas.config.structs import GroupConfig
from replicas.core.lives.ending import ASKED, ASKED_ACTIONS, LEAVING, UNWANTED, Asked, Request, request_of
from replicas.core.lives.lease_times import UNHEARD_S
from replicas.core.lives.lifecycle import RUNNING, Lifecycle, ReplicaEvent, after_exit
from replicas.core.lives.restarts import Restarts, RestartVerdict
from replicas.status import ReplicaStatus
from replicas.supervisor.fleet.causes import lacks
from replicas.supervisor.fleet.context import FleetContext, Neighbours
from replicas.supervisor.fleet.generation import Generation
from replicas.supervisor.fleet.generation_lifecycle import GenerationLifecycle
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.state.run_state import Cause, ShimRecord

REQUESTED = Cause("requested", "restart requested")


class Replica:
    """One replica of a group: begins, checks and ends its generations (its starts)."""

    def __init__(
        self, context: FleetContext, group: GroupConfig, index: int, fleet: Neighbours, restarts: Restarts
    ) -> None:
        """Begin in the state "pending", on the running loop, without :meth:`run`.

        ``group``: its config. ``fleet``: tells about other replicas. ``restarts``:
        rules, shared by the group.
        """
        self.group = group
        self.index = index
        self._now = asyncio.get_running_loop().time
        self.life = Lifecycle(group.name, index, now=self._now())
        self.name = self.life.name
        self.over = asyncio.Event()
        """Set when :meth:`run` has returned: stopped for good, with no process left."""
        self._context, self._fleet = context, fleet
        self._restarts = restarts
        self._poke = asyncio.Event()
        self._asked = StateMachine(ASKED, ASKED_ACTIONS)
        self._resume_at = 0.0
        self._waits_for: Reason | None = None
        self.current = GenerationLifecycle(self, context)
        """Its present generation, or the last one."""

    @property
    def _key(self) -> tuple[str, int]:
        """Group name and index."""
        return self.group.name, self.index

    @property
    def _generation(self) -> Generation:
        """Shims of its present generation (one start), or of the last one."""
        return self.current.generation

    @property
    def group_size(self) -> int:
        """The wanted number of replicas of its group."""
        return self._fleet.size(self.group.name)

    @property
    def members_generation(self) -> int:
        """Highest generation whose members a drain excludes from new versions."""
        return self.life.generation

    @property
    def shims(self) -> list[ShimRecord]:
        """Records by which another supervisor finds this generation's shims."""
        return self._generation.records

    @property
    def asked(self) -> Asked:
        """The pending request: ``nothing``, ``restart``, ``halt``, ``leave`` etc."""
        return self._asked.now

    @property
    def here(self) -> bool:
        """True if the last generation runs, or ran, on the supervisor's machine."""
        return all(part.local for part in self._generation.parts)

    @property
    def falling(self) -> bool:
        """True if its generation is ending, and processes may be left."""
        return self.life.alive and (self.life.state == "draining" or self.asked != "nothing")

    @property
    def _silence(self) -> tuple[str, float]:
        """Silent nodes or ranks, in words ("" if none), and the seconds of silence."""
        if self.life.state != "starting" and (unheard := self._generation.unheard):
            return f"no message from the agent of node {', '.join(unheard)}", UNHEARD_S
        return self.current.health.silence(self.group.health)

    @property
    def outdated(self) -> bool:
        """True if its living processes were started with a config of other settings."""
        return self.life.alive and self.current.started_with not in ("", digest_of_start(self.group))

    @property
    def stuck(self) -> bool:
        """True if its last generation left processes behind, which hold resources."""
        return self.life.settled and not self._generation.gone

    @property
    def leaving(self) -> bool:
        """True if it was, or is being, stopped for good."""
        return self.asked in LEAVING

    @property
    def halted(self) -> bool:
        """True if it was, or is being, stopped by hand until the next restart."""
        return self.asked == "halt" or (self.life.state == "drained" and not self.leaving)

    @property
    def unwanted(self) -> bool:
        """True if it was, or is being, stopped by hand, for good or with its group."""
        return self.halted or self.asked in UNWANTED

    @property
    def resting(self) -> bool:
        """True if it is finished, failed or stopped, and waits for a request."""
        return self.life.settled and self.asked not in UNWANTED

    # ------------------------------------------------------------ requests

    def adopt(self, records: list[ShimRecord], nodes: list[ShimHandle]) -> None:
        """Continue a generation that an earlier supervisor started, with its shims."""
        self._context.resources.keep(*self._key, tuple(one.share for one in records))
        self.life.generation = records[0].generation
        self.current = GenerationLifecycle(self, self._context)
        self.current.adopt(records, nodes)
        self._apply(ReplicaEvent.ADOPT)

    def end_as(self, cause: Cause) -> None:
        """Go on ending an adopted generation for ``cause``; then start the next one."""
        if request_of(cause.reason) == "fault":
            self.end_for_failure(cause)
            self._end_processes(self.group.stop_timeout_s)
        else:
            self.restart(cause, drain=cause.reason != "group")

    def stop(self, hurry_s: float | None = None, *, run_over: bool = False, why: str = "stop requested") -> None:
        """Stop the replica for good, for the reason ``why`` (in words).

        :param hurry_s: skip the sync: SIGTERM now, SIGKILL after this time, which later
            calls can only shorten. If None, finish the sync first.
        :param run_over: the run ends: leave processes behind that do not die in time.
        """
        if self.asked != "over":
            self._request("end_run" if run_over else "leave", hurry_s, None, "the run ends" if run_over else why)

    def halt(self, hurry_s: float | None = None) -> None:
        """Stop it as :meth:`stop` does, but until a restart; not if it has ended."""
        if not self.life.settled:
            self._request("halt", hurry_s, None, "drain requested")

    def fail(self, reason: str) -> None:
        """End the replica because its group failed (``reason``), until a restart."""
        if not self.life.settled:
            self._request("fail", None, Cause("group", reason))

    def _request(self, request: Request, hurry_s: float | None, cause: Cause | None, why: str = "") -> None:
        """Record a request; end what runs: after its sync, or within ``hurry_s``."""
        if self._ask(request, cause) and not self.life.settled:
            event = ReplicaEvent.GROUP_FAILED if request == "fail" else ReplicaEvent.STOP
            self._apply(event, reason=cause.text if cause is not None else why)
            if self.life.alive and hurry_s is None:
                self.current.apply_event("drain", self.group.stop_timeout_s)
        if self.life.alive and hurry_s is not None:
            self._end_processes(hurry_s)
        if self.life.settled:
            self._ask("done")
        self.wake()

    def _ask(self, request: Request, cause: Cause | None = None) -> bool:
        """Note a request and its cause; return True if it is to end the replica."""
        actions = self._asked.step(request)
        if "note_cause" in actions:
            self.current.cause = cause
        return "end" in actions

    def restart(self, cause: Cause = REQUESTED, *, drain: bool = True) -> None:
        """Order an end (``drain``: after its sync) and a new start, outside the budget.

        :raises replicas.errors.UsageError: the replica is being stopped for good.
        """
        if self.leaving:
            raise errors.UsageError(f"replica {self.name} is being stopped for good")
        running = self.life.alive
        if running:
            self._ask(request_of(cause.reason), cause)
        self._apply(ReplicaEvent.RESTART, reason=cause.text)
        if running and drain:
            self.current.apply_event("drain", self.group.stop_timeout_s)
        elif running:
            self._end_processes(self.group.stop_timeout_s)
        self.wake()

    def reset(self) -> bool:
        """Start again now. Return False if it has not failed and is not in backoff."""
        if self.unwanted or self.life.state not in ("failed", "backoff"):
            return False
        self._apply(ReplicaEvent.RESET)
        self.wake()
        return True

    def wake(self) -> None:
        """Wake the replica's task, which then looks at its state."""
        self._poke.set()

    def forgive(self, pause_s: float) -> None:
        """Extend all timeouts by ``pause_s``, in which this process was suspended."""
        self.current.health.unready_at += pause_s
        self.life.skip_pause(pause_s)
        self.current.forgive(pause_s)

    # ------------------------------------------------------------ while it runs

    def check(self, now: float) -> None:
        """Update the health; end a generation that is silent, faulty or late."""
        if self.life.state in ("pending", "backoff"):
            self.wake()
        self.current.check_sync(now)
        generation, health, config = self._generation, self.current.health, self.group.health
        if not self._lives:
            return  # it is ending, or waits for its turn or for resources of the previous generation
        silences = [part.state.silent_s for part in generation.parts]
        if frozen := [index for index, silent_s in enumerate(silences) if silent_s > config.heartbeat_timeout_s]:
            text = f"no answer of its shim on node {', '.join(map(str, frozen))} for {config.heartbeat_timeout_s:g} s"
            self._end_unhealthy(ReplicaEvent.HEARTBEAT_TIMEOUT, Cause("lost", text))
            for index in frozen:  # agents sweep their processes by their mark
                generation.parts[index].kill()
            return
        view = None
        if self._context.on_channel(self.group.name):
            view = health.view = self._context.coordinator.readiness(*self._key, self.life.generation)
        ready = view.ready if view is not None else generation.started
        self._follow(ready=ready, now=now)
        sick = health.judge(config, ready=ready, starting_s=self.life.starting_s(now), now=now)
        if sick is not None and sick.reason == "heartbeat_timeout":
            self._end_silent(sick)
        elif sick is not None:
            self._end_unhealthy(ReplicaEvent(sick.reason), sick)

    def _follow(self, *, ready: bool, now: float) -> None:
        """Step the lifecycle to the observed state (ready, silent), if it is new."""
        health, (silence, silent_s) = self.current.health, self._silence
        event = health.step(self.life.state, ready=ready, silent=bool(silence), now=now)
        if event is not None:
            heard = f"heard after {self.life.state_age_s(now):.1f} s" if self.life.state == "silent" else ""
            lacks = health.view.reason if health.view is not None and event is ReplicaEvent.UNREADY else ""
            self._apply(event, reason=silence or "; ".join(filter(None, (heard, lacks))), seconds=silent_s)

    @property
    def _lives(self) -> bool:
        """True if its generation runs and is not ending."""
        generation = self._generation
        return self.life.state in RUNNING and not (generation.failing or generation.ended)

    def member_lost(self, rank: int, reason: str) -> None:
        """Note that a rank is no longer a member. If it was silent (``lease``) or read
        no messages (``overflow``), it is frozen or cut off: the replica is restarted.
        After ``left`` and ``exited`` the end of its process decides.
        """
        if reason == "left":
            self.current.health.left = True
        elif reason == "exited":
            self.current.health.lost_at = self._now()
        elif self._lives and reason in ("lease", "overflow"):
            silent = f"sent no heartbeat for {self.group.health.heartbeat_timeout_s:g} s"
            text = f"rank {rank} {silent if reason == 'lease' else 'does not read its messages'}"
            self._end_silent(Cause("heartbeat_timeout", text), rank // self.group.nproc_per_node)

    def _end_silent(self, cause: Cause, part: int | None = None) -> None:
        """End the generation as silent, for ``cause`` or for the silence of a node."""
        for one in self._generation.parts if part is None else self._generation.parts[part : part + 1]:
            if one.unheard_s() > UNHEARD_S:
                cause = Cause("node", f"no message from the agent of node {one.node}")
        self._end_unhealthy(ReplicaEvent.HEARTBEAT_TIMEOUT, cause)

    # ------------------------------------------------------------ ending a generation

    def _end_unhealthy(self, event: ReplicaEvent, cause: Cause) -> None:
        """Apply ``event``, save stacks, end processes; restart the group if set so."""
        self._ask(request_of(cause.reason), cause)
        self._apply(event, reason=cause.text)
        self._end_processes(self.group.stop_timeout_s, stacks=True)
        self._fleet.restart_group_with(*self._key, cause.text)

    def end_for_failure(self, cause: Cause) -> None:
        """Note why the generation ends; restart its group if that is configured."""
        self._ask(request_of(cause.reason), cause)
        self._fleet.restart_group_with(*self._key, cause.text)

    def on_sync_over(self) -> None:
        """Stop the processes if their end waited for a sync, which is over now."""
        self.current.check_sync(self._now())

    def _end_processes(self, timeout_s: float, *, stacks: bool = False) -> None:
        """Order SIGTERM (after the ``stacks``, if set); SIGKILL ``timeout_s`` later."""
        self.current.apply_event("stop", timeout_s, stacks=stacks)

    def _apply(self, event: ReplicaEvent, **about: Any) -> None:
        """Step the lifecycle by an event with details; report it to the fleet."""
        self._fleet.on_transition(self.life.apply(event, now=self._now(), **about))

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Start and follow generations until the replica is stopped for good."""
        try:
            while self.asked != "over":
                if self.life.alive:
                    await self._run_generation()
                elif not self._start_if_due():
                    waits = self.life.state == "backoff" and self._resume_at > self._now()
                    await self.wait_for_wake(self._resume_at if waits else math.inf)
        finally:
            self._generation.abandon()
            self.over.set()

    def _start_if_due(self) -> bool:
        """Begin a generation if its start is due and allowed. Return True if so."""
        first = self.life.state == "pending"
        due = first or (self.life.state == "backoff" and self._now() >= self._resume_at)
        self._waits_for = self._fleet.waits_for(*self._key, first=first) if due else None
        if due := due and not self._waits_for:
            self._restarts.resumed()
            self.life.generation = max(self.life.generation, self._context.awaited.generation(*self._key))
            self._apply(ReplicaEvent.START if first else ReplicaEvent.BACKOFF_ELAPSED)
            self.current = GenerationLifecycle(self, self._context, self._generation.parts)
        return due

    async def wait_for_wake(self, until: float = math.inf) -> None:
        """Wait for :meth:`wake`, or until this time of the loop's clock."""
        if await is_set_within(self._poke, None if until == math.inf else max(0.0, until - self._now())):
            self._poke.clear()

    def held_up(self) -> None:
        """Report that processes of the generation take long to die."""
        self._apply(ReplicaEvent.HELD_UP, reason=self._with_hold_ups())

    def _with_hold_ups(self, reason: str = "") -> str:
        """Return ``reason`` (or the generation's cause of end), and its delays."""
        cause = self.current.cause
        reason = reason or (cause.text if cause else "stop requested" if self.unwanted else "")
        return "; ".join(filter(None, (reason, self.current.hold_ups.text)))

    async def _run_generation(self) -> None:
        """Follow the generation to its end; then start the next one, or settle."""
        await self.current.run()
        generation = self._generation
        if self.current.state == "left_behind":
            generation.abandon()
            self.current.hold_ups.report_remains(generation.remains, gave_up=True)
            self.current.cut = True
            self._apply(ReplicaEvent.GIVE_UP, reason=self._with_hold_ups("processes left behind at the end of the run"))
        else:
            generation.drop_records()
            self._go_on()
        self._ask("done")

    def _go_on(self) -> None:
        """Start again or settle, as requested, or by the restart rules."""
        if self.asked in UNWANTED:
            event = ReplicaEvent.GIVE_UP if self.asked == "fail" else ReplicaEvent.STOPPED
            self._apply(event, reason=self.current.last_exit)
            return
        cause, last_exit, found = self.current.cause, self.current.last_exit, self._judge_end()
        event = after_exit(
            ok=self.asked == "nothing",
            policy=self.group.restart.policy,
            granted=found.delay_s is not None,
            requested=self.asked == "restart",
        )
        if event is ReplicaEvent.RETRY:
            self._resume_at = self._now() + (found.delay_s or 0.0)
            why = cause.reason if cause else "exit"
            self._apply(event, reason=last_exit, restart_reason=why, seconds=found.delay_s or 0.0)
        else:
            text = last_exit if event is ReplicaEvent.FINISHED else f"{last_exit}; {found.rule}"
            self._apply(event, reason=text)

    def _judge_end(self) -> RestartVerdict:
        """Report the end to the restart rules; return their verdict, maybe a delay."""
        now, cause = self._now(), self.current.cause
        if self.asked == "restart":
            return RestartVerdict(self._restarts.resume_in_s(now) if cause and cause.reason == "group" else 0.0)
        progressed = self._fleet.progressed(*self._key)
        ok, ran_s = cause is None, self.current.ran_s  # without the time that its last process took to die
        return self._restarts.ended(self.index, ok=ok, progressed=progressed, ran_s=ran_s, now=now)

    async def stacks(self) -> dict[str, str]:
        """Ask for the stacks of its ranks; return texts by ``group/replica/rank``."""
        return await self._generation.stacks()

    @property
    def _cycles(self) -> int:
        """Failures in a row without progress; 0 after progress or a long run."""
        long = self.life.starting_s(self._now()) >= self.group.restart.window_s
        well = self.life.alive and (long or self._fleet.progressed(*self._key) is not False)
        return 0 if well else self._restarts.cycles_of(self.index)

    @property
    def waits(self) -> str:
        """The reason of a delayed start or end: the text after "waits", or ""."""
        if self.life.state in ("pending", "backoff"):
            return self._waits_for or ""
        return self._generation.awaits or self.current.hold_ups.waits or self._generation.ending

    def status(self, now: float) -> ReplicaStatus:
        """Return a snapshot of the replica, at loop time ``now``."""
        life, parts = self.life, self._generation.parts
        view = self.current.health.view if life.state in RUNNING else None
        reason = life.reason if view is None else self._silence[0] or view.reason
        if waits := self.waits:
            reason = "; ".join(filter(None, (reason * (view is None and life.state != "pending"), f"waits {waits}")))
        elif self.current.hold_ups.text and life.alive:
            reason = self._with_hold_ups()
        elif self.current.state == "syncing":
            reason = f"{reason}; present work: {self.current.busy_with}"
        start_by = self.current.health.until(self.group.health, life, now)
        ends = {"starting": start_by, "backoff": self._resume_at, "draining": self.current.kill_at}
        until = ends.get(life.state, 0)
        return ReplicaStatus(
            name=life.name,
            group=life.group,
            replica=life.replica,
            state=life.state,
            generation=life.generation,
            reason=(lacks(view) or "") if life.state == "ready" else reason,
            pid=parts[0].state.main_pid if parts and life.alive else None,
            restarts=sum(life.restarts.values()),
            state_age_s=life.state_age_s(now),
            heartbeat_age_s=view.heartbeat_age_s if view is not None else None,
            versions=dict(view.versions) if view is not None else {},
            last_exit=self.current.last_exit,
            cycles=self._cycles,
            nodes=tuple(share.node for share in self._context.resources.shares(*self._key)),
            pids=view.pids if view is not None else {},
            step=view.step if view is not None else None,
            open_s=view.open_s if view is not None else {},
            slots=view.slots if view is not None else {},
            lived_s=life.starting_s(now) if life.alive else 0.0,
            left_s=until - now if until > now else None,
        )

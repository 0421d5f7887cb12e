"""The lifecycle of one generation, from before its start to the end of its processes.

:class:`GenerationLifecycle` is the shell of
:data:`replicas.core.lives.ending.GENERATION`: it feeds that table with the states of
the generation's shims, and carries out its actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from replicas.common.table import StateMachine
from replicas.config.structs import GroupConfig
from replicas.core.lives.ending import GENERATION, GENERATION_ACTIONS, Asked, CourseInput, CourseState
from replicas.core.lives.lifecycle import Lifecycle
from replicas.supervisor.cleanup.still_held import StartObstacles
from replicas.supervisor.fleet.causes import STOPPED, Cause, dropped, exited, verdict
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.generation import STUCK_S, Generation
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.telemetry.events import StacksSaved

TURN_S = 2.0
DISK_AGAIN_S = 1.0
_TURNS_FOR_EACH_CORE = 2


def new_turns() -> asyncio.Semaphore:
    """Return a limit of concurrent starts, which load the event loop and the cores."""
    return asyncio.Semaphore(_TURNS_FOR_EACH_CORE * len(os.sched_getaffinity(0)))


async def _turn(turns: asyncio.Semaphore) -> Callable[[], None]:
    """Wait for a turn. Calling the result ends it, as does ``TURN_S``."""
    await turns.acquire()
    once = contextlib.ExitStack()
    once.callback(turns.release)
    asyncio.get_running_loop().call_later(TURN_S, once.close)
    return once.close


class GenerationOwner(Protocol):
    """The replica of a generation, as the course uses it."""

    group: GroupConfig
    life: Lifecycle
    last_exit: str
    cause: Cause | None
    cut: bool

    @property
    def asked(self) -> Asked: ...
    @property
    def members_generation(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    def poke(self) -> None: ...
    async def poked(self, until: float | None = None) -> None: ...
    def fall(self, cause: Cause) -> None: ...
    def held_up(self) -> None: ...


class GenerationLifecycle:
    """One generation of ``owner`` and its state in the table.

    :param before: parts of the previous generation, which may still hold resources.
    :ivar busy_with: the sync that it is finishing, in words.
    :ivar ran_s: seconds from its start until its main processes ended.
    """

    def __init__(self, owner: GenerationOwner, context: FleetContext, before: Sequence[ShimHandle]) -> None:
        self.generation = Generation(context, owner.poke)
        self.hold_ups = StartObstacles(context.emit, owner.life.group, owner.life.replica, owner.life.generation)
        self.busy_with = ""
        self.ran_s = 0.0
        self._owner, self._context = owner, context
        self._key = owner.life.group, owner.life.replica
        self._held = [part.state.belongings for part in before if part.local]
        self._machine = StateMachine(GENERATION, GENERATION_ACTIONS)
        self._drain_by = 0.0
        self._now = asyncio.get_running_loop().time

    @property
    def state(self) -> CourseState:
        return self._machine.now

    async def run(self, turns: asyncio.Semaphore) -> None:
        """Start the processes, unless they run already; return when all are gone."""
        generation, owner = self.generation, self._owner
        await self.hold_ups.wait_until_clear(self._held, self._pause)
        turn_over = await self._launch(turns)
        try:
            self._follow()
            while self.state not in ("over", "left_behind"):
                await owner.poked(generation.look_at)
                self._follow()
                if generation.started or generation.reports:
                    turn_over()
                generation.press()
                if self.hold_ups.report_remains(generation.remains) or (
                    generation.awaits and owner.life.state != "draining"
                ):
                    owner.held_up()
        finally:
            turn_over()

    async def _pause(self, seconds: float) -> bool:
        await self._owner.poked(self._now() + seconds)
        return self.state == "waiting"

    async def _launch(self, turns: asyncio.Semaphore) -> Callable[[], None]:
        """Start the processes, unless it was asked to end. The result ends the turn."""
        if self.generation.parts:
            return lambda: None
        self.hold_ups.waits = "for other replicas to start"
        owner, turn_over = self._owner, await _turn(turns)
        owner.life.launched(self._now())
        while self.state == "waiting":
            problem = self.generation.prepare(
                owner.group, owner.life.replica, owner.life.generation, replicas=owner.group_size
            )
            self.hold_ups.waits = f"for the disk of the state folder ({problem})" if problem else ""
            if not problem:
                break
            turn_over()
            await self._pause(DISK_AGAIN_S)
        if self.state != "waiting":
            return turn_over
        owner.life.launched(self._now())
        try:
            self.generation.start()
            self.apply_event("launched")
        except OSError as error:
            owner.fall(Cause("lost", f"a shim cannot be started: {error}"))
            self.apply_event("not_launched")
        return turn_over

    def apply_event(self, event: CourseInput, timeout_s: float = 0.0, *, stacks: bool = False) -> None:
        """Step the table, and carry out its actions.

        :param timeout_s: from SIGTERM to SIGKILL. :param stacks: save stacks first.
        """
        for action in self._machine.step(event):
            match action:
                case "finish_sync":
                    self._finish_sync()
                case "stop_nodes":
                    self.generation.stop(timeout_s, stacks=stacks)
                    self._owner.poke()  # to watch the new deadline: a frozen shim does not wake the task
                case "limit":
                    self.generation.be_gone_within(STUCK_S)
                case "note_end":
                    self._note_end()
                case "tell_coordinator":
                    reason = self._owner.last_exit or "finished"
                    self._context.coordinator.replica_ended(*self._key, self._owner.life.generation, reason)

    def _finish_sync(self) -> None:
        owner = self._owner
        if not self._context.on_channel(owner.group.name):
            self.apply_event("sync_over", owner.group.stop_timeout_s)
            return
        self._context.coordinator.set_draining(*self._key, owner.members_generation)
        self._drain_by = self._now() + owner.group.drain_timeout_s
        self.check_sync(self._now())
        if self.state == "syncing":
            limit = f"{owner.group.drain_timeout_s:g} s at most"
            self._context.say(f"{owner.life.name}: stopping it after its sync; {self.busy_with} ({limit})")

    def check_sync(self, now: float) -> None:
        """Stop the processes if a sync that delayed that is over or late."""
        if self.state != "syncing":
            return
        group, late = self._owner.group, now >= self._drain_by
        self.busy_with = self._context.coordinator.busy(*self._key)
        if self.busy_with and late:
            self._context.say(f"{self._owner.life.name}: not done within {group.drain_timeout_s:g} s; {self.busy_with}")
        if not self.busy_with or late or self.generation.reports:
            self.apply_event("sync_over", group.stop_timeout_s)

    @property
    def kill_at(self) -> float:
        """When its processes get SIGKILL at the latest, or 0 if unknown."""
        late = self._drain_by + self._owner.group.stop_timeout_s
        return late if self.state == "syncing" else self.generation.kill_at

    def forgive(self, pause_s: float) -> None:
        self._drain_by += pause_s

    def _follow(self) -> None:
        """Feed the states of its parts to the table."""
        generation, owner = self.generation, self._owner
        generation.introduce()
        for part in generation.parts:
            losses, part.losses = part.losses, []
            for loss in losses:
                self._context.emit(dropped(*self._key, owner.life.generation, loss))
        if generation.failing:
            self.apply_event("failed", owner.group.stop_timeout_s)
        if generation.ended:
            self.apply_event("ended")
        # Ranks that leave in order, as requested, are not lost. Ranks may be children
        # of the main process and outlive it.
        in_order = owner.asked not in ("nothing", "fault") and generation.remains is None
        if generation.gone:
            self.apply_event("gone")
            return
        if self.state == "ended" and not in_order:
            self.apply_event("lost")
        if owner.asked == "end_run" and generation.late_s >= STUCK_S:
            self.apply_event("give_up")

    def _note_end(self) -> None:
        """Note why the main processes ended, unless a reason is known."""
        owner, generation, reports = self._owner, self.generation, self.generation.reports
        self.ran_s = owner.life.starting_s(self._now())
        own = verdict(reports)
        if generation.stopped_before and all(report.outcome in ("ok", "stopped") for report in reports):
            own = Cause("requested", "it was being ended")  # by an earlier supervisor
        if own is not None and owner.asked == "nothing":
            owner.fall(own)
        number, cause = owner.life.generation, owner.cause
        owner.last_exit = cause.text if cause is not None else "finished" if owner.asked == "nothing" else STOPPED
        if owner.asked not in ("nothing", "fault") and (cut_s := max((one.cut_s for one in reports), default=0.0)):
            owner.last_exit += f": killed {cut_s:g} s after SIGTERM"
            owner.cut = owner.asked == "end_run"
        stuck = cause is not None and cause.reason.endswith("timeout")
        if stuck and any(part.last_stacks for part in generation.parts):
            (group, replica), reason = self._key, owner.last_exit
            path = str(self._context.state.log_dir(group, replica, number))
            self._context.emit(StacksSaved(group=group, replica=replica, generation=number, reason=reason, path=path))
        if reports:
            self._context.emit(exited(*self._key, number, reports, reason=owner.last_exit))

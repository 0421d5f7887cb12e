"""The course of one generation, from before its start until no process of it is left.

:class:`Course` is the shell of :data:`replicas.core.lives.ending.GENERATION`: it tells
the table what it sees of the generation's shims, and carries the actions out.
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
from replicas.supervisor.cleanup.still_held import HoldUps
from replicas.supervisor.fleet.causes import STOPPED, Cause, dropped, exited, verdict
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.generation import STUCK_S, Generation
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.telemetry.events import StacksSaved

TURN_S = 2.0
DISK_AGAIN_S = 1.0
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


class GenerationOwner(Protocol):
    """The replica, as its generation needs it."""

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


class Course:
    """One generation of ``owner`` on its way through the table.

    :param before: the last one's parts, which may still hold resources.
    :ivar busy_with: the sync that it finishes, while it is syncing.
    :ivar ran_s: from its start until its main processes ended.
    """

    def __init__(self, owner: GenerationOwner, context: FleetContext, before: Sequence[ShimHandle]) -> None:
        self.generation = Generation(context, owner.poke)
        self.hold_ups = HoldUps(context.emit, owner.life.group, owner.life.replica, owner.life.generation)
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
        """Start the processes, unless they run already; return when none is left."""
        generation, owner = self.generation, self._owner
        await self.hold_ups.until_clear(self._held, self._pause)
        turn_over = await self._launch(turns)
        try:
            self._follow()
            while self.state not in ("over", "left_behind"):
                await owner.poked(generation.look_at)
                self._follow()
                if generation.started or generation.reports:
                    turn_over()
                generation.press()
                if self.hold_ups.remain(generation.remains) or (generation.awaits and owner.life.state != "draining"):
                    owner.held_up()
        finally:
            turn_over()

    async def _pause(self, seconds: float) -> bool:
        await self._owner.poked(self._now() + seconds)
        return self.state == "waiting"

    async def _launch(self, turns: asyncio.Semaphore) -> Callable[[], None]:
        """Start the processes, if it still waits for that; the result ends the turn."""
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
            self.take("launched")
        except OSError as error:
            owner.fall(Cause("lost", f"a shim cannot be started: {error}"))
            self.take("not_launched")
        return turn_over

    def take(self, event: CourseInput, timeout_s: float = 0.0, *, stacks: bool = False) -> None:
        """Enter the next state, and act.

        :param timeout_s: from SIGTERM to SIGKILL; ``stacks``: save these first.
        """
        for action in self._machine.step(event):
            match action:
                case "finish_sync":
                    self._finish_sync()
                case "stop_nodes":
                    self.generation.stop(timeout_s, stacks=stacks)
                    self._owner.poke()  # the new deadline must be watched: a frozen shim would not wake its task
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
            self.take("sync_over", owner.group.stop_timeout_s)
            return
        self._context.coordinator.set_draining(*self._key, owner.members_generation)
        self._drain_by = self._now() + owner.group.drain_timeout_s
        self.check_sync(self._now())
        if self.state == "syncing":
            limit = f"{owner.group.drain_timeout_s:g} s at most"
            self._context.say(f"{owner.life.name}: stopping it when its sync is over; {self.busy_with} ({limit})")

    def check_sync(self, now: float) -> None:
        """Look whether its sync is over, or takes too long, if it is syncing."""
        if self.state != "syncing":
            return
        group, late = self._owner.group, now >= self._drain_by
        self.busy_with = self._context.coordinator.busy(*self._key)
        if self.busy_with and late:
            self._context.say(f"{self._owner.life.name}: not over within {group.drain_timeout_s:g} s; {self.busy_with}")
        if not self.busy_with or late or self.generation.reports:
            self.take("sync_over", group.stop_timeout_s)

    @property
    def kill_at(self) -> float:
        """When its processes get SIGKILL at the latest; 0: that is not known."""
        late = self._drain_by + self._owner.group.stop_timeout_s
        return late if self.state == "syncing" else self.generation.kill_at

    def forgive(self, pause_s: float) -> None:
        self._drain_by += pause_s

    def _follow(self) -> None:
        """Act on the states of its parts."""
        generation, owner = self.generation, self._owner
        generation.introduce()
        for part in generation.parts:
            losses, part.losses = part.losses, []
            for loss in losses:
                self._context.emit(dropped(*self._key, owner.life.generation, loss))
        if generation.failing:
            self.take("failed", owner.group.stop_timeout_s)
        if generation.ended:
            self.take("ended")
        # Ranks that leave in order, as requested, are not lost. Those that are children
        # of the main process may outlive it.
        in_order = owner.asked not in ("nothing", "fault") and generation.remains is None
        if generation.gone:
            self.take("gone")
            return
        if self.state == "ended" and not in_order:
            self.take("lost")
        if owner.asked == "end_run" and generation.late_s >= STUCK_S:
            self.take("give_up")

    def _note_end(self) -> None:
        """Note why the main processes have ended, unless that is known."""
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
            owner.last_exit += f": killed, as it had not ended {cut_s:g} s after SIGTERM"
            owner.cut = owner.asked == "end_run"
        stuck = cause is not None and cause.reason.endswith("timeout")
        if stuck and any(part.last_stacks for part in generation.parts):
            (group, replica), reason = self._key, owner.last_exit
            path = str(self._context.state.log_dir(group, replica, number))
            self._context.emit(StacksSaved(group=group, replica=replica, generation=number, reason=reason, path=path))
        if reports:
            self._context.emit(exited(*self._key, number, reports, reason=owner.last_exit))

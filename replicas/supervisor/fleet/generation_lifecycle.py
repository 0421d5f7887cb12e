"""The lifecycle of one generation, from before its start to the end of its processes.

:class:`GenerationLifecycle` is the shell of
:data:`replicas.core.lives.ending.GENERATION`: it feeds that table with the states of
the generation's shims, and carries out its actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from replicas.common.table import StateMachine
from replicas.config.diff import digest_of_start
from replicas.config.structs import GroupConfig
from replicas.core.lives.ending import GENERATION, GENERATION_ACTIONS, Asked, CourseInput, CourseState
from replicas.core.lives.lifecycle import Lifecycle
from replicas.supervisor.cleanup.still_held import StartObstacles
from replicas.supervisor.fleet.causes import STOPPED, Health, dropped, exited, verdict
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.generation import STUCK_S, Generation
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.state.run_state import Cause, ShimRecord
from replicas.telemetry.events import StacksSaved

TURN_S = 2.0
DISK_AGAIN_S = 1.0


async def _turn(turns: asyncio.Semaphore) -> Callable[[], None]:
    """Wait for one of the limited turns to start processes, and take it.

    :returns: a function that gives the turn back; that happens anyway after ``TURN_S``.
    """
    await turns.acquire()
    once = contextlib.ExitStack()
    once.callback(turns.release)
    asyncio.get_running_loop().call_later(TURN_S, once.close)
    return once.close


class GenerationOwner(Protocol):
    """The replica of a generation, as :class:`GenerationLifecycle` uses it."""

    group: GroupConfig
    life: Lifecycle

    @property
    def asked(self) -> Asked:
        """The pending request: ``nothing``, ``restart``, ``halt``, ``end_run`` etc."""

    @property
    def members_generation(self) -> int:
        """Highest generation whose members a drain excludes from new versions."""

    @property
    def group_size(self) -> int:
        """The wanted number of replicas of its group."""

    def wake(self) -> None:
        """Wake the replica's task, which then looks at its state."""

    async def wait_for_wake(self, until: float = math.inf) -> None:
        """Wait for :meth:`wake`, or until this time of the loop's clock."""

    def end_for_failure(self, cause: Cause) -> None:
        """Note why the generation ends, and have the fleet restart its group.

        The latter only if the group restarts as a whole. Ends no process of this
        replica.
        """

    def held_up(self) -> None:
        """Report, as the replica's state, that its processes take long to die."""


class GenerationLifecycle:
    """One start of the replica ``owner``: its state in a table, and its processes.

    :param before: parts of the previous generation, which may still hold resources.
    :ivar health: as the coordinator and its shims show it.
    :ivar cause: why it ends, or None while there is no reason.
    :ivar last_exit: how it ended, in words.
    :ivar cut: True if it did not end in time at the end of the run.
    :ivar started_with: digest of the config with which its processes start, or "" if
        unknown.
    :ivar busy_with: the sync that it is finishing, in words.
    :ivar ran_s: seconds from its start until its main processes ended.
    """

    def __init__(self, owner: GenerationOwner, context: FleetContext, before: Sequence[ShimHandle] = ()) -> None:
        """Begin in the table's first state; start no process before :meth:`run`.

        :param owner: the replica.
        :param before: parts of the previous generation, which may still hold resources.
        """
        self.generation = Generation(context, owner.wake)
        self.hold_ups = StartObstacles(context.emit, owner.life.group, owner.life.replica, owner.life.generation)
        self.health = Health()
        self.cause: Cause | None = None
        self.last_exit = self.busy_with = ""
        self.cut = False
        self.started_with = digest_of_start(owner.group)
        self.ran_s = 0.0
        self._owner, self._context = owner, context
        self._key = owner.life.group, owner.life.replica
        self._mark: object = context.coordinator.progress(*self._key)
        """How far the replica had come at its start, or None if it was adopted."""
        self._held = [part.state.belongings for part in before if part.local]
        self._machine = StateMachine(GENERATION, GENERATION_ACTIONS)
        self._drain_by = 0.0
        self._now = asyncio.get_running_loop().time

    def adopt(self, records: list[ShimRecord], nodes: list[ShimHandle]) -> None:
        """Continue with processes that an earlier supervisor started.

        :param records: one for each part. :param nodes: the shims of the parts, in that
            order.
        """
        self.started_with, self._mark = "", None
        self.generation.adopt(records, nodes)
        self.apply_event("launched")

    @property
    def progressed(self) -> bool | None:
        """True if a step or version is new since the start, else False.

        None if unknown, for example because the replica is on no channel.
        """
        if self._mark is None or not self._context.on_channel(self._key[0]):
            return None
        return self._context.coordinator.progress(*self._key) != self._mark

    @property
    def state(self) -> CourseState:
        """The state in the table, such as ``running``, ``syncing`` or ``over``."""
        return self._machine.now

    async def run(self) -> None:
        """Start the processes, unless they run already, and follow them to their end.

        Return when all are gone, or left behind at the end of the run.
        """
        generation, owner = self.generation, self._owner
        await self.hold_ups.wait_until_clear(self._held, self._pause)
        turn_over = await self._launch()
        try:
            self._follow()
            while self.state not in ("over", "left_behind"):
                await owner.wait_for_wake(generation.look_at)
                self._follow()
                if generation.started or generation.reports:
                    turn_over()
                generation.kill_late_shims()
                if self.hold_ups.report_remains(generation.remains) or (
                    generation.awaits and owner.life.state != "draining"
                ):
                    owner.held_up()
        finally:
            turn_over()

    async def _pause(self, seconds: float) -> bool:
        """Wait up to ``seconds`` or for a wake of the replica's task.

        Return False if its end was requested, so that the start must be given up.
        """
        await self._owner.wait_for_wake(self._now() + seconds)
        return self.state == "waiting"

    async def _launch(self) -> Callable[[], None]:
        """Wait for a turn and the disk, and start the processes.

        Start none if they run already, or if the end was requested meanwhile. A failed
        start is reported as the end of the generation.

        :returns: a function that ends the turn of this start (:func:`_turn`).
        """
        if self.generation.parts:
            return lambda: None
        self.hold_ups.waits = "until other replicas have started"
        owner, turn_over = self._owner, await _turn(self._context.turns)
        owner.life.launched(self._now())
        while self.state == "waiting":
            problem = self.generation.prepare(
                owner.group, owner.life.replica, owner.life.generation, replicas=owner.group_size
            )
            self.hold_ups.waits = f"until the state folder can be written ({problem})" if problem else ""
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
            owner.end_for_failure(Cause("lost", f"its shim, which starts the ranks, cannot be started: {error}"))
            self.apply_event("not_launched")
        return turn_over

    def apply_event(self, event: CourseInput, timeout_s: float = 0.0, *, stacks: bool = False) -> None:
        """Step the state table by an event, and carry out the resulting actions.

        These order the end of processes, and never wait for it.

        :param timeout_s: from SIGTERM to SIGKILL, if the processes are to be stopped.
        :param stacks: have the ranks' stacks saved to their logs before.
        :raises replicas.common.table.InvalidStep: the table does not allow it now.
        """
        for action in self._machine.step(event):
            match action:
                case "finish_sync":
                    self._finish_sync()
                case "stop_nodes":
                    self.generation.stop(timeout_s, stacks=stacks)
                    self._owner.wake()  # to watch the new deadline: a frozen shim does not wake the task
                case "limit":
                    self.generation.be_gone_within(STUCK_S)
                case "note_end":
                    self._note_end()
                case "tell_coordinator":
                    reason = self.last_exit or "finished"
                    self._context.coordinator.replica_ended(*self._key, self._owner.life.generation, reason)

    def _finish_sync(self) -> None:
        """Let the replica finish its sync; stop the processes if there is none.

        Does not wait: :meth:`check_sync` follows the sync.
        """
        owner = self._owner
        if not self._context.on_channel(owner.group.name):
            self.apply_event("sync_over", owner.group.stop_timeout_s)
            return
        self._drain_by = self._now() + owner.group.drain_timeout_s  # first: a channel that is idle calls check_sync
        self._context.coordinator.set_draining(*self._key, owner.members_generation)
        self.check_sync(self._now())
        if self.state == "syncing":
            limit = f"{owner.group.drain_timeout_s:g} s at most"
            self._context.say(f"{owner.life.name}: stopping it after its present work: {self.busy_with} ({limit})")

    def check_sync(self, now: float) -> None:
        """Stop the processes if the sync that delays their end is over or late.

        :param now: time of the loop's clock.
        """
        if self.state != "syncing":
            return
        group, late = self._owner.group, now >= self._drain_by
        self.busy_with = self._context.coordinator.busy(*self._key)
        if self.busy_with and late:
            self._context.say(f"{self._owner.life.name}: stopping it now, as drain_timeout is over: {self.busy_with}")
        if not self.busy_with or late or self.generation.reports:
            self.apply_event("sync_over", group.stop_timeout_s)

    @property
    def kill_at(self) -> float:
        """When its processes get SIGKILL, by the loop's clock, or 0 if unknown."""
        late = self._drain_by + self._owner.group.stop_timeout_s
        return late if self.state == "syncing" else self.generation.kill_at

    def forgive(self, pause_s: float) -> None:
        """Extend the time limit of the sync, as this process was suspended meanwhile.

        :param pause_s: how long it was suspended, in seconds.
        """
        self._drain_by += pause_s

    def _follow(self) -> None:
        """Apply what its parts reported, as events of the state table. Does not wait.

        Called at each change of a part. Also emits an event for each new loss of log
        lines, and sends the rendezvous of part 0 to the other parts.
        """
        generation, owner = self.generation, self._owner
        generation.send_rendezvous()
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
        """Find why the main processes ended, unless a reason is known; emit events.

        Sets :attr:`cause`, by way of the owner, :attr:`last_exit`, :attr:`ran_s` and
        :attr:`cut`.
        """
        owner, generation, reports = self._owner, self.generation, self.generation.reports
        self.ran_s = owner.life.starting_s(self._now())
        own = verdict(reports)
        if any(part.stopping for part in generation.parts) and all(
            report.outcome in ("ok", "stopped") for report in reports
        ):
            own = Cause("requested", "an earlier supervisor told it to stop")  # by an earlier supervisor
        if own is not None and owner.asked == "nothing":
            owner.end_for_failure(own)
        number, cause = owner.life.generation, self.cause
        self.last_exit = cause.text if cause is not None else "finished" if owner.asked == "nothing" else STOPPED
        if owner.asked not in ("nothing", "fault") and (cut_s := max((one.cut_s for one in reports), default=0.0)):
            self.last_exit += f": killed {cut_s:g} s after SIGTERM"
            self.cut = owner.asked == "end_run"
        stuck = cause is not None and cause.reason.endswith("timeout")
        if stuck and any(part.last_stacks for part in generation.parts):
            (group, replica), reason = self._key, self.last_exit
            path = str(self._context.state.log_dir(group, replica, number))
            self._context.emit(StacksSaved(group=group, replica=replica, generation=number, reason=reason, path=path))
        if reports:
            self._context.emit(exited(*self._key, number, reports, reason=self.last_exit))

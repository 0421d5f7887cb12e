"""The supervisor of a run: groups of replicas, the coordinator between them, and one
place to ask for their state.

Theory of operation
===================

One asyncio loop. :class:`Supervisor` takes the state folder's lock, opens the events
and the coordinator (store, sessions, control port) and the control socket, and gives
the groups to a :class:`~replicas.supervisor.fleet.fleet.Fleet`, which starts, watches
and ends them. All commands come here, from an embedding program, the control port, the
socket or a signal.

What happens goes through one place (:meth:`Supervisor.emit`) to the file of events,
those who follow it, and the counters. What must not be forgotten is written down
(:meth:`Supervisor.save`) before it happens; a supervisor that finds the state of a dead
one goes on from it. At the end the replicas go first, then the events close, and the
coordinator and its port go last, so that ranks can say goodbye. torch is never imported
here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

import replicas
from replicas import environ, errors
from replicas.config import file as config_file
from replicas.config.structs import Config
from replicas.control.access import ByToken
from replicas.control.app import control_routes
from replicas.control.exit_codes import DONE, PREEMPTED
from replicas.control.socket import SOCKET_FILE, ControlSocket
from replicas.coordinator import Coordinator
from replicas.coordinator import Event as ChannelEvent
from replicas.core.effects import MemberLost, ReplicaIdle
from replicas.core.lives.ordering import start_levels
from replicas.linux import inherited
from replicas.linux.cgroups import LIMITS
from replicas.messages import arguments
from replicas.messages.bounds import REPLICAS_MAX
from replicas.status import RunStatus
from replicas.supervisor.cleanup.containment import Containment
from replicas.supervisor.fleet.environment import Overseer
from replicas.supervisor.fleet.failure import FailureReports
from replicas.supervisor.fleet.fleet import Fleet
from replicas.supervisor.fleet.log_lines import line
from replicas.supervisor.fleet.machine import Machine
from replicas.supervisor.fleet.resources import Resources, machine_for, refuse_unfit
from replicas.supervisor.fleet.sizes import fitting, with_sizes
from replicas.supervisor.reloading import Reloading
from replicas.supervisor.state.run_state import ProcessRecord, Saved, process_record, this_process
from replicas.supervisor.state.run_state import machine as this_machine
from replicas.supervisor.state.state import StateDir
from replicas.telemetry.event_log import EventLog
from replicas.telemetry.events import ConnectionsRefused, Event, Record, Reloaded, RunEnded, Transition
from replicas.telemetry.metrics import Metrics
from replicas.telemetry.tally import CounterDeltas

__all__ = ["Supervisor"]

log = logging.getLogger("replicas.supervisor")

T = TypeVar("T")

_STUCK_LOOP_S = 10.0
_REFUSALS_INTERVAL_S = 10.0


async def _to_its_end(
    work: Callable[[], T], *, given_up: Callable[[], None] = lambda: None, undo: Callable[[], None] = lambda: None
) -> T:
    """``work`` in a thread. A cancellation ends when the thread does: it must not go on
    behind what is undone meanwhile.

    :param given_up: called at a cancellation; :param undo: then called if the work was
        done all the same.
    """
    task = asyncio.ensure_future(anyio.to_thread.run_sync(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        given_up()
        with anyio.CancelScope(shield=True):
            await asyncio.wait((task,))
        if task.exception() is None:
            undo()
        raise


class Supervisor:
    """Runs the groups of a config and keeps them running.

    ::

        async with replicas.Supervisor("run.toml") as supervisor:
            await supervisor.wait_ready("rollout")
            code = await supervisor.run_until_done()

    Leaving the block drains what still runs. Runs on asyncio (anyio on the asyncio
    backend included), best in the main thread; takes no torch into this process.

    :param config: a :class:`~replicas.config.structs.Config`, the path of its TOML
        file, or a mapping of the same shape (its relative folders are relative to the
        current one).
    :param report: called with one line for people at each step of a replica. Default:
        the logger ``replicas.supervisor``.
    :raises replicas.errors.BadConfig: with every problem of the config.
    :raises replicas.errors.UsageError: ``/proc`` is not the one of this process's pid
        namespace.
    """

    def __init__(
        self, config: Config | Path | str | Mapping[str, Any], *, report: Callable[[str], None] | None = None
    ) -> None:
        inherited.check_proc()
        self.config: Config = config_file.read(config)
        """The config in use."""
        start_levels(self.config.groups)
        self.state: StateDir = StateDir(self.config.run.state_dir, self.config.run.name)
        self._events = EventLog(None)
        self._failures = FailureReports()
        self._refusals = CounterDeltas(_REFUSALS_INTERVAL_S)
        self.metrics: Metrics = Metrics(self.status, lambda: self._events.tally)
        self._report = report or log.info
        self._coordinator: Coordinator | None = None
        self._containment: Containment | None = None
        self._fleet: Fleet | None = None
        self.resources: Resources = Resources()
        self._reloading = Reloading(self)
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup | None = None
        self._started_at = time.monotonic()
        self._preempted = False
        self._helpers: dict[int, ProcessRecord] = {}
        self._machine, self._process = this_machine(), this_process()
        self._door = self.config.control.socket or self.state.path / SOCKET_FILE

    def _make_containment(self) -> Containment:
        limits = [group.resources for group in self.config.groups.values()]
        return Containment(
            self.config.run.name,
            lambda group: self.fleet.groups[group].config.resources,
            lock=self.state.lock,
            limits=frozenset(
                name for name, field in LIMITS.items() for one in limits if getattr(one, field) is not None
            ),
            door=self._door,
        )

    def _make_coordinator(self) -> Coordinator:
        config = self.config
        return Coordinator(
            config.channels,
            run=config.run.name,
            host=config.control.host,
            port=config.control.port,
            store_bind=config.store.bind,
            store_port=config.store.port,
            state_dir=config.run.state_dir,
            epochs=self._events.tally.epochs,
            routes=control_routes(self, commands=self, streams=self, access=ByToken(self._token, self._refused)),
            live=self.live,
        )

    # ------------------------------------------------------------ from start to end

    async def __aenter__(self) -> Self:
        """Take the run, open its ports, end what a dead supervisor left, start the
        replicas (without waiting for any).

        :raises replicas.supervisor.state.state.AlreadySupervised: another supervisor
            has it.
        :raises replicas.errors.BadConfig: the plan does not fit this machine.
        :raises replicas.errors.ReplicasError: a port is in use, the store does not
            start, the state folder is no good.
        """
        inherited.open_streams()
        config = self.config
        self.resources.plan(config, await self.check_plan(config))
        await _to_its_end(self.state.acquire, given_up=self.state.given_up.set, undo=self._release)
        async with AsyncExitStack() as stack:
            stack.callback(self._release)
            self._events = self.state.open_events(config.run.events_max_nbytes)
            stack.callback(self._events.close)
            # Before any other process is started: it may have to move this one, alone,
            # to another control group.
            containment = await stack.enter_async_context(self._make_containment())
            self._containment = containment
            coordinator = self._coordinator = self._make_coordinator()  # it opens the decision log: not before the lock
            await stack.enter_async_context(coordinator)
            coordinator.subscribe(self._on_channel_event)
            routes = control_routes(self, commands=self, streams=self)
            await stack.enter_async_context(ControlSocket(self._door, routes, self._refused))
            helpers = [pid for pid in (coordinator.store_pid, containment.janitor_pid) if pid is not None]
            for leftover in await _to_its_end(lambda: self.state.sweep(helpers)):
                self._events.emit(leftover)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            saved = self.state.saved
            groups = fitting(saved.groups, config, self.resources.machine, self.say) if saved is not None else None
            self._fleet = Fleet(config, self, saved=groups, wall=time.time(), start_shim=containment.start)
            self._fleet.start()
            self._events.on_rotate = self.save
            self.state.write(endpoint=coordinator.endpoint, token=coordinator.token, socket=self._door)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await self.fleet.drain(reason="over")
            self._count_refused()
            self.emit(RunEnded(exit_code=self.exit_code, reason=self.fleet.ended_by))
            self._events.close()  # whoever follows comes to an end, and the control port with them
        finally:
            if self._tasks is not None:
                self._tasks.cancel_scope.cancel()
            self.coordinator.keep_decisions = self._preempted
            # Without the block's own error: it must come out as it is, and not in the
            # task group's ExceptionGroup.
            await self._stack.__aexit__(None, None, None)

    def _token(self) -> str:
        return self.coordinator.token

    def _refused(self, reason: str) -> None:
        self.coordinator.engine.refused(reason)

    def _release(self) -> None:
        ended = self._fleet is not None and self._fleet.over.is_set()
        if self._preempted:
            self.save()
        self.state.release(ended=ended and not self._preempted)

    @staticmethod
    async def check_plan(config: Config) -> Machine:
        """The machine, on which the plan fits.

        :raises replicas.errors.BadConfig: it does not.
        """
        found = await anyio.to_thread.run_sync(machine_for, config)
        refuse_unfit(config, found)
        return found

    # -------------------------------------------------------- what an embedder asks for

    async def run_until_done(self) -> int:
        """Wait until the run is over or drained, and end what still runs.

        :return: the exit code: 0, 1 for a failure, 75 after a preemption.
        """
        await self.fleet.over.wait()
        await self.fleet.drain(reason="over")
        return self.exit_code

    @property
    def exit_code(self) -> int:
        """What the run ends with, as far as it is known."""
        code = self._fleet.exit_code if self._fleet is not None else None
        return PREEMPTED if self._preempted else code or DONE

    async def wait_ready(self, group: str | None = None, timeout: float | None = None) -> None:
        """Wait until every replica of ``group`` (of all groups by default) is ready or
        has finished.

        :param timeout: seconds; the default waits as long as the groups' start timeouts
            let it.
        :raises TimeoutError: not in time. :raises replicas.errors.WorldError: a replica
            failed, or the run ended.
        """
        fleet = self.fleet
        timeout_s = arguments.patience("wait_ready: timeout", timeout)
        groups = list(fleet.groups.values()) if group is None else [fleet.group(group)]
        async with asyncio.timeout(timeout_s):
            await fleet.wait_ready(groups)

    async def scale(self, group: str, replicas: int) -> None:
        """Have ``replicas`` replicas of ``group``: start more (without waiting), or
        drain the highest and wait for that.

        :raises replicas.errors.UsageError: no such group, a negative number, or the run
            is being drained.
        :raises replicas.errors.BadConfig: so many do not fit this machine.
        """
        fleet = self.fleet
        fleet.group(group)
        replicas = arguments.integer("scale: replicas", replicas, least=0, most=REPLICAS_MAX)
        fleet.refuse_while_draining()
        if replicas > fleet.groups[group].size:
            sizes = {name: one.size for name, one in fleet.groups.items()} | {group: replicas}
            refuse_unfit(with_sizes(self.config, sizes), self.resources.machine)
        await fleet.scale(group, replicas)

    async def restart(self, target: str, *, rolling: bool = False) -> None:
        """End a replica (``group/index``) or all of a ``group``, when they have
        finished their sync, and start their next generation. Spends no budget. Waits
        until that is being started.

        :param rolling: only ``max_unavailable`` replicas at a time; waits until all are
            ready.
        :raises replicas.errors.UsageError: no such group or replica, or it is being
            stopped.
        :raises replicas.errors.WorldError: a replica failed in a rolling restart, which
            has stopped there.
        """
        target = arguments.text("restart: target", target)
        await self.fleet.restart(target, rolling=arguments.flag("restart: rolling", rolling))

    async def drain(self, target: str | None = None, *, hurry: bool = False) -> None:
        """End replicas when they have finished their sync, and wait until no process of
        them is left.

        :param target: a group, or a replica (``group/index``), which then rests until
            it is restarted. Default: the whole run, those that depend on others first;
            it is over then.
        :param hurry: SIGKILL at once; also hurries a drain that is under way.
        :raises replicas.errors.UsageError: no such group or replica.
        """
        await self.fleet.drain(target, hurry=arguments.flag("drain: hurry", hurry))

    async def preempt(self) -> None:
        """The machine is about to be taken away: drain the run, which ends with exit
        code 75. Its budgets, sizes and version numbers are kept for the next
        supervisor; nothing of a budget is spent. A run that is over stays what it is.
        """
        fleet = self.fleet
        if fleet.over.is_set():
            return
        self._preempted = True
        await fleet.drain(reason="preempted")

    async def reset_failed(self, target: str | None = None) -> tuple[str, ...]:
        """What made replicas fail is mended: those that have failed, or wait after a
        failure, start at once, and their groups have a full restart budget.

        :return: names of the replicas that start.
        """
        return self.fleet.reset_failed(target)

    async def reload(self, config: Config | Path | str | Mapping[str, Any] | None = None) -> Reloaded:
        """Put another config in the place of the present one: it is validated first,
        and a bad one changes nothing. New groups start, those that are gone drain, and
        those whose processes would be started differently restart, rolling; all others
        are left alone.

        :param config: default: the file of the present one, read again.
        :raises replicas.errors.BadConfig: it is no good, or changes what cannot change
            while the run lives.
        """
        return await self._reloading.reload(config)

    async def stacks(self, target: str | None = None) -> dict[str, str]:
        """What the ranks of a group, of a replica (``group/index``), or of all are
        doing, by ``group/replica/rank``."""
        found: dict[str, str] = {}
        for one in await asyncio.gather(*(replica.stacks() for replica in self.fleet.targets(target))):
            found |= one
        return found

    def events(self, after: int | None = None) -> AsyncIterator[Record]:
        """Everything that happens, as numbered
        :class:`~replicas.telemetry.events.Record`, until the run is over.

        :param after: begin behind the record with this number, as far back as the file
            of events goes; 0: with the oldest. Default: from now on.
        """
        return self._events.follow(None if after is None else arguments.integer("events: after", after, least=0))

    # ------------------------------------------------------------ what it tells

    @property
    def last_event(self) -> int:
        """Number of the newest event."""
        return self._events.seq

    @property
    def logs(self) -> Path:
        """The folder of the run's logs."""
        return self.state.logs

    @property
    def endpoint(self) -> str:
        """``host:port`` of the control port."""
        return self.coordinator.endpoint

    @property
    def coordinator(self) -> Coordinator:
        """The run's coordinator, once the supervisor has been entered."""
        if self._coordinator is None:
            raise errors.UsageError("the supervisor is not running", hint="use it with `async with`")
        return self._coordinator

    @property
    def fleet(self) -> Fleet:
        """The groups of the run, once the supervisor has been entered."""
        if self._fleet is None:
            raise errors.UsageError("the supervisor is not running", hint="use it with `async with`")
        return self._fleet

    def status(self) -> RunStatus:
        """The state of everything, now. Its counters are those of the events."""
        coordinator, fleet = self.coordinator, self.fleet
        store = coordinator.store_status()
        self._count_refused(time.monotonic())
        status = RunStatus(
            run=self.config.run.name,
            version=replicas.__version__,
            endpoint=coordinator.endpoint,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_at,
            ready=store.up and not fleet.draining and all(group.good for group in fleet.groups.values()),
            draining=fleet.draining,
            store=store,
            groups=fleet.statuses(asyncio.get_running_loop().time()),
            channels=coordinator.channel_statuses(),
            event_loop_lag_s=coordinator.loop_lag_s,
            sidecar_replacements=coordinator.sidecar_replacements(),
            refused=coordinator.refused(),
            state_dir=str(self.state.path),
        )
        return self._events.tally.shown_in(status)

    @property
    def looked_at(self) -> float:
        """When the control loop came round last, in seconds of the loop's clock."""
        return self.fleet.looked_at

    def metrics_text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self.metrics.render()

    def live(self) -> bool:
        """Whether the supervisor itself works."""
        return self.coordinator.store_up and self.coordinator.loop_lag_s < _STUCK_LOOP_S

    # -------------------------------------- what the fleet stands on (FleetEnvironment)

    @property
    def overseer(self) -> Overseer:
        return self.coordinator

    def environment(self) -> Mapping[str, str]:
        return {
            environ.ENDPOINT: self.coordinator.endpoint,
            environ.TOKEN_FILE: str(self.state.token_file),
            environ.RUN: self.config.run.name,
            environ.STATE_ID: self.state.identity,
        }

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._tasks is not None, "the supervisor has not been entered"
        self._tasks.start_soon(work)

    def say(self, text: str) -> None:
        self._report(text)

    def told(self, transition: Transition, resume_in_s: float) -> None:
        text = line(transition, resume_in_s=resume_in_s, logs=self.state.logs)
        if text:
            self._report(text)

    def emit(self, event: Event) -> None:
        """Everything that happens goes through here: to the file, to those who follow,
        and into the counters."""
        self._events.emit(event)
        if text := self._failures.text(event):
            self._report(text)
        if self._fleet is not None:
            self._fleet.look()

    def save(self) -> None:
        """Write down what must not be forgotten when this process is killed."""
        fleet, wall = self.fleet, time.time()
        self.state.run_state.save(
            Saved(
                run=self.config.run.name,
                machine=self._machine,
                supervisor=self._process,
                at=wall,
                seq=self._events.seq,
                tally=self._events.tally,
                groups=fleet.saved(wall),
                shims=fleet.shims(),
                helpers=self._helper_records(),
            )
        )

    def _helper_records(self) -> tuple[ProcessRecord, ...]:
        """Of the processes of the run that are nobody's replica. What is known already
        is not looked up again."""
        janitor = self._containment.janitor_pid if self._containment is not None else None
        known, self._helpers = self._helpers, {}
        for pid in (self.coordinator.store_pid, janitor):
            if pid is None:
                continue
            try:
                found = known.get(pid) or process_record(pid)
            except OSError as error:  # such as: no descriptor is left to this process
                log.warning("process %d of the run cannot be looked up, and is not in the saved state: %s", pid, error)
                continue
            if found is not None:
                self._helpers[pid] = found
        return tuple(self._helpers.values())

    def _on_channel_event(self, event: ChannelEvent) -> None:
        self.emit(event)
        if isinstance(event, MemberLost):
            if event.observes:
                return
            self.fleet.member_lost(event.member.group, event.member.replica, event.member.rank, event.reason)
        elif isinstance(event, ReplicaIdle):
            self.fleet.idle(event.group, event.replica)

    def _count_refused(self, now: float | None = None) -> None:
        """What was turned away at the control port since the last look, as few events:
        a flood there is none here, and who may look at pages cannot push older events
        out of the file.
        """
        for reason, count in self._refusals.since(self.coordinator.refused(), now):
            self.emit(ConnectionsRefused(reason=reason, count=count))

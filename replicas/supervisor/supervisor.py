"""The supervisor of a run: groups of replicas, their coordinator, commands and status.

One asyncio loop. :class:`Supervisor` takes the state folder's lock, opens the events,
the coordinator (store, sessions, control port) and the control socket, and passes the
groups to a :class:`~replicas.supervisor.fleet.fleet.Fleet`. All commands arrive here,
every event goes through :meth:`Supervisor.emit`, and state that must survive a kill is
written before it takes effect. The end: replicas, events, agents, then the coordinator.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

import replicas
from replicas import errors
from replicas.common import own_loop
from replicas.common.logs import Log
from replicas.common.tasks import say_if_slow
from replicas.config import file as config_file
from replicas.config.structs import Config
from replicas.control.access import ByToken, everyone
from replicas.control.app import control_routes
from replicas.control.exit_codes import BUG, CUT, DONE, PREEMPTED
from replicas.control.log_files import LogReader, Selection
from replicas.control.socket import ControlSocket
from replicas.coordinator import Coordinator
from replicas.coordinator import Event as ChannelEvent
from replicas.coordinator.orders import carry_out
from replicas.core.base.effects import MemberLost, ReplicaIdle
from replicas.core.lives.ordering import start_levels
from replicas.linux import inherited, needs
from replicas.messages import Hello, arguments
from replicas.messages.bounds import REPLICAS_MAX
from replicas.messages.version_orders import Steered, VersionOrder
from replicas.status import RunStatus
from replicas.supervisor.agent.checks import Finding
from replicas.supervisor.agent.machine import Machine, node_name
from replicas.supervisor.fleet.agent_route import agent_route
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.fleet import Fleet
from replicas.supervisor.fleet.nodes import Nodes, longest_lease_of
from replicas.supervisor.fleet.plans import fitting, machine_for, refuse_unfit, with_sizes
from replicas.supervisor.fleet.resources import Resources
from replicas.supervisor.in_thread import finish_in_thread
from replicas.supervisor.reloading import Reloading
from replicas.supervisor.reporting import Reporting
from replicas.supervisor.saving import Saving
from replicas.supervisor.state.marks import check_mark
from replicas.supervisor.state.run_state import Saved, ShimRecord
from replicas.supervisor.state.state import StateDir
from replicas.telemetry.events import Event, Record, Reloaded, RunEnded, TokenChanged
from replicas.telemetry.metrics import Metrics
from replicas.trust.tokens import ROLES, Role, Tokens

log = Log("replicas.supervisor")

_STUCK_LOOP_S = 10.0


class Supervisor:
    """Runs the groups of a config and keeps them running.

    ::

        async with replicas.Supervisor("run.toml") as supervisor:
            await supervisor.wait_ready("rollout")
            code = await supervisor.run_until_done()

    Leaving the block drains what still runs. Runs on asyncio (anyio on the asyncio
    backend included), best in the main thread; does not import torch.

    :param config: a :class:`~replicas.config.structs.Config`, the path of its TOML
        file, or a mapping of the same shape (its relative folders are relative to the
        current one).
    :param report: called with one human-readable line at each step of a replica.
        Default: the logger ``replicas.supervisor``.
    :raises replicas.errors.BadConfig: with every problem of the config.
    :raises replicas.errors.UsageError: ``/proc`` is not the one of this process's pid
        namespace, or the kernel denies a call that is needed.
    """

    def __init__(
        self, config: Config | Path | str | Mapping[str, Any], *, report: Callable[[str], None] | None = None
    ) -> None:
        """Read and check the config; start, make and lock nothing."""
        needs.check()
        read = config_file.read(config)
        start_levels(read.groups)
        self.state: StateDir = StateDir(read.run.state_dir, read.run.name, longest_lease_s=longest_lease_of(read))
        self._context = FleetContext(
            config=read,
            state=self.state,
            resources=Resources(node_name()),
            emit=self.emit,
            say=self.say,
            save=self.save,
            spawn=self.spawn,
            start_shim=lambda spec, changed: self._nodes.cluster.start_shim(spec, changed),
        )
        self._reporting = Reporting(report or log.info, self.status)
        self.on_open: Callable[[], None] = lambda: None
        """Called when agents can join, before the store is up."""
        self.on_tokens: Callable[[], None] = lambda: None
        """Called with new tokens, before the ones before are revoked."""
        self._fleet: Fleet | None = None
        self._nodes = Nodes(self._context, lambda: self.fleet)
        self.reloading: Reloading = Reloading(self._context, lambda: self.fleet, self.check_plan)
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup | None = None
        self._started_at = time.monotonic()
        self._preempted = False
        self._crashed = False
        """True if a task of this supervisor failed and ended it."""
        self.detached: bool = False
        """True if the run continues without this supervisor (:meth:`detach`)."""
        self._saving = Saving(self._context, self._nodes)

    @property
    def resources(self) -> Resources:
        """The ledger of the nodes, and of the GPUs and memory that replicas hold."""
        return self._context.resources

    @property
    def metrics(self) -> Metrics:
        """The metrics of the run, as a Prometheus collector."""
        return self._reporting.metrics

    def _make_coordinator(self) -> Coordinator:
        """Return a new coordinator with routes for agents and orders; start nothing."""
        config = self.config
        access = ByToken(lambda: self.coordinator.tokens, self._count_refusal)
        coordinator = Coordinator(
            config.channels,
            run=config.run.name,
            token=self.state.tokens.open(self.state.token, config.control.token_files),
            tls=config.control.tls,
            certificate=config.control.certificate,
            key=config.control.key,
            host=config.control.host,
            port=config.control.port or self._nodes.port_wanted,
            any_port=not config.control.port,
            store_bind=config.store.bind,
            store_port=config.store.port,
            carry_port=config.cluster.carry_port,
            state_dir=config.run.state_dir,
            epochs=self._reporting.events.tally.epochs,
            routes=[
                agent_route(self._nodes.cluster, self._count_refusal, access),
                *control_routes(self, access=access),
            ],
            live=self.live,
        )
        coordinator.engine.is_started_here = self._vouch
        return coordinator

    def _vouch(self, hello: Hello) -> bool:
        """Return True if a joining member is of a replica that this run starts.

        Return False if its group is external or unknown.

        :raises replicas.errors.Fenced: it lacks the secret mark of such a replica.
        """
        config, saved = self.config.groups.get(hello.group), self.state.saved
        shims: tuple[ShimRecord, ...] | None = saved.shims if saved else ()  # members of a run taken over come first
        if self._fleet is not None:
            group, replica = self._fleet.groups.get(hello.group), self._fleet.replica(hello.group, hello.replica)
            config, shims = group.config if group else None, tuple(replica.shims) if replica else None
        if config is None or config.external:
            return False
        check_mark(hello, shims)
        return True

    # ------------------------------------------------------------ from start to end

    async def __aenter__(self) -> Self:
        """Lock the run, open its ports, kill leftovers; start replicas without waiting.

        An error ends all that was started. Replicas of an earlier supervisor then
        continue for the next one if the config has ``run.adopt``.

        :raises replicas.supervisor.state.state.AlreadySupervised: another supervisor
            has the run.
        :raises replicas.errors.BadConfig: the plan does not fit this machine.
        :raises replicas.errors.ReplicasError: a port is in use, the store does not
            start, or the state folder or the token cannot be used.
        """
        own_loop.require("a supervisor")
        inherited.open_streams()
        config = self.config
        self.resources.plan(config, await self.check_plan(config))
        with say_if_slow(self.say, f"waiting up to {self.state.patience_s:g} s for the lock of the state folder"):
            await finish_in_thread(self.state.acquire, given_up=self.state.given_up.set, undo=self._release)
        stack = AsyncExitStack()
        try:
            await self._open(stack, config)
        except BaseException as error:
            crashed = self._tasks is not None and self._tasks.cancel_scope.cancel_called
            if (crashed or isinstance(error, Exception)) and config.run.adopt_s and self.state.saved is not None:
                self._leave("the start failed")  # replicas wait for the next supervisor
            if self._tasks is not None:
                self._tasks.cancel_scope.cancel()
            await stack.aclose()  # without the error, which a task group would wrap
            raise
        self._stack = stack
        return self

    async def _open(self, stack: AsyncExitStack, config: Config) -> None:
        """Start a run of ``config``; closing ``stack`` ends its parts, last first."""
        stack.callback(self._release)
        events = self._reporting.open(stack, self.state.open_events(config.run.events_max_nbytes), config.run.name)
        self._reporting.tell_of_leases(self.state.heritage.unseen)
        await stack.enter_async_context(self._nodes)  # before any other process is started
        coordinator = self._context.opened = self._make_coordinator()  # opens the decision log, so not before the lock
        self.state.tokens.check(coordinator.tokens.key)
        for change in self.state.tokens.changes:
            events.emit(change)
        coordinator.keep_decisions = self.state.saved is not None  # in case the start fails
        coordinator.wait_for_store = False  # members that reconnect may not have the time to wait for it
        await stack.enter_async_context(coordinator)
        coordinator.subscribe(self._on_channel_event)
        agents = agent_route(self._nodes.cluster, self._count_refusal, everyone, local=True)
        await stack.enter_async_context(
            ControlSocket(self._context.door, [agents, *control_routes(self)], self._count_refusal)
        )
        self.on_open()
        stack.push_async_callback(self._nodes.finish)  # while it still has agents
        await self._nodes.joined()
        await coordinator.store_started()
        helpers = [pid for pid in (coordinator.store_pid, self._nodes.agent_pid) if pid is not None]
        with say_if_slow(self.say, "waiting up to 5 s for leftover processes of an earlier supervisor to end"):
            for leftover in await finish_in_thread(lambda: self.state.sweep(helpers, self._nodes.kept)):
                events.emit(leftover)
        self._tasks = await stack.enter_async_context(anyio.create_task_group())
        saved = self.state.saved
        groups = fitting(saved.groups, config, self.resources.machine, self.say) if saved is not None else None
        self._fleet = Fleet(self._context, saved=groups, wall=time.time())
        self._fleet.start(self._nodes.adopted(config))
        if saved is not None:  # without it older events may be missing
            coordinator.expect(events.tally.members, events.tally)
        events.on_rotate = self.save
        self.state.write(endpoint=coordinator.endpoint, tokens=coordinator.tokens, socket=self._context.door)
        self.spawn(self._nodes.tick_forever)
        self.spawn(self.run_until_done)  # for programs that only wait for the end of the events
        self._nodes.go_on()
        if saved is not None and self._nodes.adopting:
            self._resume(saved)
        self.save()

    def _resume(self, saved: Saved) -> None:
        """Continue the ``saved`` state's drain, or apply a changed config, in a task.

        A preemption's drain continues only if this machine's old agent still lives.
        """
        preempted = saved.draining == "preempted"
        if saved.draining and self.config.run.adopt_s and (self.state.heritage.known is not None or not preempted):
            self.spawn(self.preempt if preempted else self.drain)
            return
        self.spawn(self.reloading.catch_up)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain what still runs, unless a next supervisor takes it; unlock the run."""
        try:
            self._crashed = self._tasks is not None and self._tasks.cancel_scope.cancel_called
            if self._crashed and self.config.run.adopt_s:
                self._leave("an error in this program")
            if not self.detached:
                with anyio.CancelScope(shield=True):
                    await self.fleet.drain(reason="over")
                    self._conclude()
                    if not (self._preempted or self._crashed):
                        await self._reporting.last_scrape()
            self._reporting.events.close()  # ends its followers, and with them the control port's streams
        finally:
            if self._tasks is not None:
                self._tasks.cancel_scope.cancel()
            self.coordinator.keep_decisions = self._goes_on
            await self._stack.__aexit__(None, None, None)  # without the block's error, which a task group would wrap

    def _conclude(self) -> None:
        """Write the run's last event, once, and end the streams of events."""
        if self._reporting.events.finished:
            return
        self._reporting.count_refused(self.coordinator.refused())
        code, reason = (BUG, "an error in the supervisor") if self._crashed else (self.exit_code, "")
        self._reporting.conclude(RunEnded(exit_code=code, reason=reason or self.fleet.words_of_end))

    def _count_refusal(self, reason: str) -> None:
        """Count a connection that was refused, by its reason."""
        self.coordinator.engine.refused(reason)

    def _release(self) -> None:
        """Save the state, or remove it after the run's end; unlock the state folder."""
        ended = self._fleet is not None and self._fleet.over.is_set() and not (self.detached or self._crashed)
        if self._goes_on:
            self.save()
        self.state.release(ended=ended and not self._preempted, left=self._nodes.left if ended else None)

    @property
    def _goes_on(self) -> bool:
        """True if the next supervisor continues the run."""
        return self._preempted or self.detached or self._crashed

    @staticmethod
    async def check_plan(config: Config) -> Machine:
        """Return this machine's resources; BadConfig if the groups do not fit them."""
        found = await anyio.to_thread.run_sync(machine_for, config)
        refuse_unfit(config, found)
        return found

    # ------------------------------------------------------------ commands

    async def run_until_done(self) -> int:
        """Wait until the run is over and its processes have ended, or :meth:`detach`.

        :return: the exit code: 0, 1 for a failure, 4 if processes did not end in time
            and were killed or left behind, 75 after a preemption.
        """
        await self.fleet.over.wait()
        if self.detached:
            self._reporting.events.finish()
        else:
            await self.fleet.drain(reason="over")
            self._conclude()
        return self.exit_code

    @property
    def exit_code(self) -> int:
        """The exit code of the run; before its end, the code that is known so far."""
        if self._preempted:
            return PREEMPTED
        fleet = self._fleet
        return DONE if fleet is None else fleet.exit_code or (CUT if fleet.cut else DONE)

    async def wait_ready(self, group: str | None = None, timeout: float | None = None) -> None:
        """Wait until all replicas of ``group`` are ready or have finished.

        :param group: default: all groups.
        :param timeout: seconds; default: limited only by the groups' start timeouts.
        :raises TimeoutError: not ready in time.
        :raises replicas.errors.WorldError: too many replicas failed, or the run ended.
        """
        fleet, timeout_s = self.fleet, arguments.patience("wait_ready: timeout", timeout)
        groups = fleet.groups.values() if group is None else [fleet.group(group)]
        async with asyncio.timeout(timeout_s):
            await fleet.wait_ready(groups)

    async def scale(self, group: str, replicas: int) -> None:
        """Set the size of ``group``: start replicas, or drain those of highest index.

        Waits for the end of drained replicas only. An error changes nothing.

        :raises replicas.errors.UsageError: no such group, a bad number, or the run is
            being drained.
        :raises replicas.errors.BadConfig: the replicas do not fit this machine.
        :raises replicas.errors.WorldError: writing the new size failed.
        """
        fleet = self.fleet
        scaled = fleet.group(group)
        replicas = arguments.integer("scale: replicas", replicas, least=0, most=REPLICAS_MAX)
        fleet.refuse_while_draining()
        if replicas > scaled.size:
            sizes = {name: one.size for name, one in fleet.groups.items()} | {group: replicas}
            refuse_unfit(with_sizes(self.config, sizes), self.resources.machine)
        await fleet.scale(scaled, replicas)

    async def steer(self, order: VersionOrder) -> Steered:
        """Serve, keep or name a version as ordered; return the outcome once on disk.

        :raises replicas.errors.ReplicasError: the order was refused.
        """
        return await carry_out(self.coordinator.engine, order)

    async def restart(self, target: str, *, rolling: bool = False) -> None:
        """Restart a replica (``group/index``) or all of a ``group`` after their sync.

        Does not use the restart budget. Waits until the next generations are starting.

        :param rolling: ``max_unavailable`` at a time; wait until all are ready.
        :raises replicas.errors.UsageError: no such target, or it is being stopped.
        :raises replicas.errors.WorldError: a replica failed in a rolling restart, which
            stops there; or writing the state failed, and no replicas are restarted.
        """
        target = arguments.text("restart: target", target)
        await self.fleet.restart(target, rolling=arguments.flag("restart: rolling", rolling))

    async def drain(self, target: str | None = None, *, hurry: bool = False) -> None:
        """End replicas after their sync, and wait until their processes are gone.

        :param target: a group, or a replica (``group/index``); it stays stopped until
            restarted. Default: the whole run, dependent groups first; it is over then.
        :param hurry: SIGKILL immediately, also in a drain that is in progress.
        :raises replicas.errors.UsageError: no such group or replica.
        :raises replicas.errors.WorldError: writing the state failed, and the target is
            not drained. A drain of the whole run does not depend on that.
        """
        if self.detached:
            raise errors.UsageError("this supervisor has left the run", hint="drain it by the next supervisor")
        if arguments.flag("drain: hurry", hurry):
            self._reporting.hurry()
        await self.fleet.drain(target, hurry=hurry)

    async def preempt(self) -> None:
        """Drain the run because its machine is about to be taken away; exit code 75.

        Keeps budgets and sizes for the next supervisor. Does nothing after the end.
        """
        if not self.fleet.over.is_set():
            self._preempted = True
            await self.fleet.drain(reason="preempted")

    async def detach(self) -> None:
        """Leave the run to the next supervisor, which takes it over.

        Agents and replicas continue, and end if no supervisor comes within
        ``run.adopt``. Leave the block then: :meth:`run_until_done` returns 0.

        :raises replicas.errors.UsageError: no ``run.adopt``, or the run is at its end.
        :raises replicas.errors.WorldError: writing failed; this supervisor goes on.
        """
        fleet = self.fleet
        if not self.config.run.adopt_s:
            text = "detach: without run.adopt in its config the run ends with its supervisor"
            raise errors.UsageError(text, hint='drain the run, and start it again with run.adopt = "2m" in its config')
        fleet.refuse_while_draining()
        if fleet.over.is_set():
            raise errors.UsageError("the run is over")
        self.save(order=True)  # the next supervisor needs it
        self._leave("as ordered")
        fleet.over.set()

    def _leave(self, why: str) -> None:
        """Let agents and replicas run on for the next supervisor; print ``why``."""
        self.detached = True
        self._nodes.leave()
        self.say(f"{why}: leaving the run to the next supervisor, to start within {self.config.run.adopt_s:g} s")

    async def drain_node(self, node: str, *, undo: bool = False) -> None:
        """Move a node's replicas elsewhere after their sync; start none there.

        Uses no restart budget. Waits until their processes are gone; then its agent
        ends, except on this machine. Replicas that fit nowhere else wait.

        :param undo: only let replicas start there again; an open drain raises.
        :raises replicas.errors.UsageError: no such node.
        :raises replicas.errors.WorldError: undone meanwhile, or not written to disk.
        """
        await self._nodes.drain(arguments.text("drain: node", node), undo=arguments.flag("drain: undo", undo))

    async def reset_failed(self, target: str | None = None) -> tuple[str, ...]:
        """Start failed replicas, and those in backoff, now; refill the restart budgets.

        :param target: a group, or a replica (``group/index``). Default: all.
        :return: names of the replicas that start.
        """
        return self.fleet.reset_failed(target)

    async def reload(self, config: Config | Path | str | Mapping[str, Any] | None = None) -> Reloaded:
        """Replace the config, and wait until its changes are carried out.

        New groups start, removed groups drain, and groups whose processes would be
        started differently restart, rolling; all others continue.

        :param config: default: read the file of the present one again.
        :raises replicas.errors.BadConfig: it is invalid, or changes a fixed setting;
            nothing has changed.
        :raises replicas.errors.WorldError: it is in use, but a change of it failed.
        """
        return await self.reloading.reload(config)

    async def stacks(self, target: str | None = None) -> dict[str, str]:
        """Ask for stacks of ranks; return them as texts, by ``group/replica/rank``.

        :param target: a group, or a replica (``group/index``). Default: all.
        """
        found: dict[str, str] = {}
        for one in await asyncio.gather(*(replica.stacks() for replica in self.fleet.targets(target))):
            found |= one
        return found

    async def doctor(self, node: str | None = None) -> tuple[Finding, ...]:
        """Return findings of ``replicas doctor``: leftovers, GPUs, limits, disk.

        A node that is away, or does not answer within 40 s, is reported as a problem.

        :param node: default: all nodes.
        :raises replicas.errors.UsageError: no such node.
        """
        return await self._nodes.examine(None if node is None else arguments.text("doctor: node", node))

    async def tokens(
        self, role: Role | None = None, *, rotate: bool = False, revoke_old: bool = False, force: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Return the run's join tokens, by role; create new ones, or revoke old ones.

        :param role: ``"member"`` (may join channels) or ``"operator"`` (may also give
            orders and read output); default: both.
        :param rotate: replace it. The previous token stays valid until the next
            rotation; members read the new one from their file when they reconnect.
        :param revoke_old: keep only the present token valid, and close connections that
            used the old one.
        :param force: also while nodes are away, which then cannot come back: their
            replicas end with their lease.
        :return: ``{"member": {"token": "...", "old_is_valid": False}, ...}``.
        :raises replicas.errors.UsageError: no such role; no new token in the config's
            file; or a node that is away may have only the token to be revoked.
        :raises replicas.errors.WorldError: writing the state folder failed; the tokens
            of that role are unchanged.
        """
        chosen = (arguments.one_of("tokens: role", role, ROLES),) if role is not None else ROLES
        rotate, revoke_old = arguments.flag("tokens: rotate", rotate), arguments.flag("tokens: revoke_old", revoke_old)
        found, state = self.coordinator.tokens, self.state
        ends = [one for one in chosen if (found.both_valid(one) and (rotate or revoke_old)) or (rotate and revoke_old)]
        if ends and not arguments.flag("tokens: force", force):
            self._nodes.refuse_while_away()
        for one in chosen if rotate else ():
            state.change_tokens(found, one, partial(state.tokens.rotate, role=one))
            self.emit(TokenChanged(role=one, change="rotated"))
        self._nodes.cluster.send_tokens()
        if rotate or revoke_old:
            self.on_tokens()
        for one in chosen if revoke_old else ():
            if found.both_valid(one):
                state.change_tokens(found, one, partial(Tokens.revoke_old, role=one))
                self.emit(TokenChanged(role=one, change="revoked"))
        return {one: {"token": found.text(one), "old_is_valid": found.both_valid(one)} for one in chosen}

    def events(self, after: int | None = None) -> AsyncIterator[Record]:
        """Follow all events until the run is over and its processes are gone.

        :param after: begin after the event with this number, as far back as the file of
            events goes; 0: with the oldest. Default: from now on.
        """
        return self._reporting.events.follow(
            None if after is None else arguments.integer("events: after", after, least=0)
        )

    # ------------------------------------------------------------ state

    @property
    def config(self) -> Config:
        """The config in use."""
        return self._context.config

    @property
    def last_event(self) -> int:
        """Number of the newest event."""
        return self._reporting.events.seq

    @property
    def logs(self) -> Path:
        """The folder of the run's logs."""
        return self.state.logs

    def read_logs(self, selection: Selection) -> LogReader:
        """Return a reader of logs on all nodes; its first poll opens the files."""
        return self._nodes.read_logs(self.state.logs, selection)

    @property
    def endpoint(self) -> str:
        """``host:port`` of the control port."""
        return self.coordinator.endpoint

    @property
    def coordinator(self) -> Coordinator:
        """The run's coordinator; UsageError unless the supervisor is entered."""
        return self._context.coordinator

    @property
    def fleet(self) -> Fleet:
        """The groups of the run; UsageError until their start."""
        if self._fleet is None:  # before it is entered, self.endpoint raises its own error
            raise errors.UsageError(f"the run still starts at {self.endpoint}", hint="its log says what it waits for")
        return self._fleet

    def status(self) -> RunStatus:
        """Return a snapshot of the run, after emitting newly refused connections."""
        coordinator, fleet = self.coordinator, self.fleet
        store, ended = coordinator.store_status(), self._reporting.ended
        self._reporting.count_refused(coordinator.refused(), time.monotonic())
        status = RunStatus(
            run=self.config.run.name,
            version=replicas.__version__,
            endpoint=coordinator.endpoint,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_at,
            ready=store.up and not fleet.draining and all(group.good for group in fleet.groups.values()),
            draining=fleet.draining,
            store=store,
            groups=tuple(group.status(asyncio.get_running_loop().time()) for group in fleet.groups.values()),
            channels=coordinator.channel_statuses(),
            nodes=self._nodes.cluster.status(),
            event_loop_lag_s=coordinator.loop_lag_s,
            refused=coordinator.refused(),
            state_dir=str(self.state.path),
            exit_code=ended.exit_code if ended is not None else None,
            ended_by=ended.reason if ended is not None else "",
            newest_event=self.last_event,
            adopt_s=self.config.run.adopt_s,
        )
        return self._reporting.events.tally.shown_in(status, time.time())

    @property
    def looked_at(self) -> float:
        """When the fleet's monitor last ran, in seconds of the loop's clock."""
        return self.fleet.looked_at

    def metrics_text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return self.metrics.render()[0]

    def scrape(self, accept: str, client: str = "") -> tuple[bytes, str]:
        """Note a scrape; return the metrics as ``accept`` asks, and their Content-Type.

        :param client: address of the scraper; the end waits 10 s for regular ones.
        """
        return self._reporting.scrape(accept, client)

    def live(self) -> bool:
        """Return True if the store is up and the event loop lags by less than 10 s."""
        return self.coordinator.store_up and self.coordinator.loop_lag_s < _STUCK_LOOP_S

    # ------------------------------------------------------------ called by its parts

    def spawn(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``work`` in a task until the end; an error in it ends the supervisor."""
        assert self._tasks is not None, "this supervisor has not been started"
        self._tasks.start_soon(work)

    def say(self, text: str) -> None:
        """Pass a line for people to ``report``; log an exception that it raises."""
        self._reporting.say(text)

    def emit(self, event: Event) -> None:
        """Pass an event of the run to the file, its followers and the counters."""
        self._reporting.emit(event)
        self._context.wake_monitor()

    def save(self, *, order: bool = False) -> bool:
        """Write the state that survives a kill. Return False if that fails.

        Does nothing, and returns True, before the start and after the last event.

        :param order: for an order to be acknowledged: sync it to disk, or raise.
        :raises replicas.errors.WorldError: writing failed for an order.
        """
        if self._reporting.ended is not None and not self._goes_on:
            return True  # a state after the last event would hide it, and the next start would repeat the run
        if (fleet := self._fleet) is None:
            return True
        ends = "preempted" if self._preempted else "requested" if fleet.draining else ""
        draining = "" if fleet.over.is_set() else ends
        saved = self._saving.save(fleet, self._reporting.events, draining, sync=order)
        if order and not saved:
            text = f"the order is refused, because the run's state cannot be written ({self.state.run_state.problem})"
            raise errors.WorldError(text, hint="make room on its disk; the run continues")
        return saved

    def _on_channel_event(self, event: ChannelEvent) -> None:
        """Emit the event; tell its replica of a lost member, or that its sync ended."""
        self.emit(event)
        if self._fleet is None:
            return  # members reconnect while the run is being started
        if isinstance(event, MemberLost) and not event.observes:
            if replica := self.fleet.replica(event.member.group, event.member.replica):
                replica.member_lost(event.member.rank, event.reason)
        elif isinstance(event, ReplicaIdle) and (replica := self.fleet.replica(event.group, event.replica)):
            replica.on_sync_over()

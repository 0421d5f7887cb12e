"""The supervisor of a run: groups of replicas, the coordinator between them, and one place to ask for their state.

Theory of operation
===================

One asyncio loop. :class:`Supervisor` takes the state folder's lock, opens the coordinator (store, sessions, control
port), and gives each replica a task (:mod:`replicas.supervisor.replica`). A monitor task looks at all of them four times
a second and at once when something has changed: a transition, or an event of the coordinator. It decides when the run is
over: a replica failed past its budget (exit code 1), the groups of ``stop_when`` finished, or everything did (0).

Ending goes in reverse start order, one level of ``depends_on`` after the other; the coordinator and its port go last, so
that ranks can say goodbye. torch is never imported here.
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
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

import replicas
from replicas import config_file, environ, errors
from replicas.config import ChannelConfig, Config, Party
from replicas.control.app import control_routes
from replicas.coordinator import Coordinator, GroupShape
from replicas.coordinator import Event as ChannelEvent
from replicas.core.effects import MemberLost
from replicas.core.lifecycle import Transition
from replicas.metrics import Metrics
from replicas.status import RunStatus
from replicas.supervisor.group import Group, start_levels
from replicas.supervisor.host import Overseer
from replicas.supervisor.replica import Replica
from replicas.supervisor.state import StateDir
from replicas.supervisor.words import line

__all__ = ["Supervisor"]

log = logging.getLogger("replicas.supervisor")

TICK_S = 0.25
_PAUSE_S = 1.0
"""A look at the replicas that comes this much late: this process was paused, which is nobody's fault."""
_SETTLE_S = 0.75
_STUCK_LOOP_S = 10.0
_EVENTS_KEPT = 1000


class Supervisor:
    """Runs the groups of a config and keeps them running.

    ::

        async with replicas.Supervisor("run.toml") as supervisor:
            await supervisor.wait_ready("rollout")
            code = await supervisor.run_until_done()

    Leaving the block drains what still runs. Runs on asyncio (anyio on the asyncio backend included), best in the main
    thread; takes no torch into this process.

    :param config: a :class:`~replicas.config.Config`, the path of its TOML file, or a mapping of the same shape (its
        relative folders are relative to the current one).
    :param report: called with one line for people at each step of a replica. Default: the logger ``replicas.supervisor``.
    :raises replicas.errors.BadConfig: with every problem of the config.
    """

    def __init__(
        self, config: Config | Path | str | Mapping[str, Any], *, report: Callable[[str], None] | None = None
    ) -> None:
        if isinstance(config, Path | str):
            config = config_file.load(config)
        elif not isinstance(config, Config):
            config = config_file.parse(config, base=Path.cwd(), source="config")
        self.config = config
        self.state = StateDir(config.run.state_dir, config.run.name)
        self.metrics = Metrics(self.status)
        self._report = report or log.info
        self._levels = start_levels(config.groups)
        self._groups = {name: Group(group) for name, group in config.groups.items()}
        self._channel_groups = frozenset(
            party.group for channel in config.channels.values() for party in _parties(channel)
        )
        self._coordinator: Coordinator | None = None
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup | None = None
        self._started_at = time.monotonic()
        self._dirty = asyncio.Event()
        self._over = asyncio.Event()
        self._exit_code: int | None = None
        self._draining = False
        self._hurry_s: float | None = None
        self._listeners: set[asyncio.Queue[Transition | ChannelEvent]] = set()
        self._watchers: set[asyncio.Event] = set()

    def _make_coordinator(self) -> Coordinator:
        config = self.config
        shapes = {
            name: GroupShape(group.replicas, group.world_size, group.health.heartbeat_timeout_s)
            for name, group in config.groups.items()
        }
        return Coordinator(
            config.channels,
            groups=shapes,
            run=config.run.name,
            host=config.control.host,
            port=config.control.port,
            store_bind=config.store.bind,
            store_port=config.store.port,
            state_dir=config.run.state_dir,
            routes=control_routes(self),
        )

    # ------------------------------------------------------------ from start to end

    async def __aenter__(self) -> Self:
        """Take the run, open its ports, start its replicas (without waiting for any).

        :raises replicas.supervisor.state.AlreadySupervised: another supervisor has it.
        :raises replicas.errors.ReplicasError: a port is in use, the store does not start, the state folder is no good.
        """
        await anyio.to_thread.run_sync(self.state.acquire)
        async with AsyncExitStack() as stack:
            stack.callback(self.state.release)
            coordinator = self._coordinator = self._make_coordinator()  # it opens the decision log: not before the lock
            await stack.enter_async_context(coordinator)
            coordinator.subscribe(self._on_channel_event)
            self.state.write(endpoint=coordinator.endpoint, token=coordinator.token)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            self._stack = stack.pop_all()
        for name, group in self._groups.items():
            for index in range(group.config.replicas):
                self._add(name, index)
        self._spawn(self._monitor)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await self.drain()
        finally:
            if self._tasks is not None:
                self._tasks.cancel_scope.cancel()
            # Without the block's own error: it must come out as it is, and not in the task group's ExceptionGroup.
            await self._stack.__aexit__(None, None, None)

    def _add(self, name: str, index: int) -> None:
        group = self._groups[name]
        generation = group.generations.get(index, 0)
        replica = Replica(group.config, index, self, group.budget, generation=generation)
        group.replicas[index] = replica
        self._spawn(replica.run)

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._tasks is not None, "the supervisor has not been entered"
        self._tasks.start_soon(work)

    async def _monitor(self) -> None:
        looked_at = time.monotonic()
        while True:
            with anyio.move_on_after(TICK_S):
                await self._dirty.wait()
            self._dirty.clear()
            now = time.monotonic()
            late_s, looked_at = now - looked_at - TICK_S, now
            if late_s > _PAUSE_S:
                # The coordinator reads what has arrived before it judges anybody, and so do we.
                for replica in self._all():
                    replica.forgive(late_s)
                await anyio.sleep(_SETTLE_S)
                looked_at = time.monotonic()
                continue
            for replica in self._all():
                replica.check(now)
            self._judge()
            for watcher in self._watchers:
                watcher.set()

    def _judge(self) -> None:
        """Is the run over?"""
        if self._exit_code is not None or self._draining:
            return
        failed = [replica for replica in self._all() if replica.life.state == "failed"]
        wanted = self.config.run.stop_when or tuple(self._groups)
        if failed:
            self._finish(1, f"group {failed[0].group.name} failed: replica {failed[0].name}: {failed[0].life.reason}")
        elif all(self._groups[name].finished for name in wanted):
            self._finish(0, f"done: {', '.join(wanted)} finished")

    def _finish(self, code: int, words: str) -> None:
        self._exit_code = code
        self._report(words)
        self._over.set()

    def _all(self) -> list[Replica]:
        return [replica for group in self._groups.values() for replica in group.replicas.values()]

    # ------------------------------------------------------------ what an embedder asks for

    async def run_until_done(self) -> int:
        """Wait until the run is over or drained, end what still runs, and return the exit code: 0, or 1 for a failure."""
        await self._over.wait()
        await self.drain()
        return self._exit_code or 0

    async def wait_ready(self, group: str | None = None, timeout: float | None = None) -> None:
        """Wait until every replica of ``group`` (of all groups by default) is ready or has finished.

        :param timeout: seconds; the default waits as long as the groups' start timeouts let it.
        :raises TimeoutError: not in time. :raises replicas.errors.WorldError: a replica failed, or the run ended.
        """
        groups = list(self._groups.values()) if group is None else [self._group(group)]

        def settled() -> bool:
            failed = [r for one in groups for r in one.replicas.values() if r.life.state == "failed"]
            if failed:
                raise errors.WorldError(f"replica {failed[0].name} failed: {failed[0].life.reason}")
            good = all(one.good for one in groups)
            if not good and (self._over.is_set() or self._draining):
                raise errors.WorldError("the run is over")
            return good

        async with asyncio.timeout(timeout):
            await self._until(settled)

    async def scale(self, group: str, replicas: int) -> None:
        """Have ``replicas`` replicas of ``group``: start more (without waiting), or end the highest ones and wait for that.

        :raises replicas.errors.UsageError: no such group, a negative number, or the run is being drained.
        """
        one = self._group(group)
        if replicas < 0:
            raise errors.UsageError(f"a group cannot have {replicas} replicas")
        if self._draining:
            raise errors.UsageError("the run is being drained")
        leaving = [replica for index, replica in one.replicas.items() if index >= replicas]
        one.size = replicas
        self.coordinator.set_group_size(group, replicas)
        for index in range(replicas):
            if index not in one.replicas:
                self._add(group, index)
        for replica in leaving:
            replica.stop()
        for replica in leaving:
            await replica.over.wait()
            if one.replicas.get(replica.index) is replica:
                one.retire(replica)
        self._dirty.set()

    async def restart(self, replica: str) -> None:
        """End ``group/index`` and start its next generation; wait until that is being started. Spends no budget.

        :raises replicas.errors.UsageError: no such replica, or it is being stopped.
        """
        name, _, index = replica.partition("/")
        group = self._group(name)
        if not index.isdigit() or int(index) not in group.replicas:
            known = ", ".join(one.name for one in group.replicas.values())
            raise errors.UsageError(f'no replica "{replica}"', hint=f"replicas of {name}: {known}")
        one = group.replicas[int(index)]
        before = one.life.generation
        one.restart()
        await self._until(lambda: one.life.generation > before or one.over.is_set() or self._over.is_set())

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the monitor would see."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            while not condition():
                watcher.clear()
                await watcher.wait()
        finally:
            self._watchers.discard(watcher)

    async def drain(self, *, hurry: bool = False) -> None:
        """End every replica, those that depend on others first, and wait until no process is left.

        :param hurry: SIGKILL at once; also hurries a drain that is under way.
        """
        self._draining = True
        if hurry:
            self._hurry_s = 0.0
        for names in reversed(self._levels):
            ending = [replica for name in names for replica in self._groups[name].replicas.values()]
            for replica in ending if self._hurry_s is None else self._all():
                replica.stop(self._hurry_s)
            for replica in ending:
                await replica.over.wait()
        self._over.set()

    async def events(self) -> AsyncIterator[Transition | ChannelEvent]:
        """Each step of a replica and each event of a channel from now on. A reader that is 1,000 behind loses the oldest."""
        queue: asyncio.Queue[Transition | ChannelEvent] = asyncio.Queue(_EVENTS_KEPT)
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)

    def _group(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            raise errors.UsageError(f'no group "{name}"', hint=f"groups: {', '.join(self._groups)}")
        return group

    # ------------------------------------------------------------ what it tells

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

    def status(self) -> RunStatus:
        """The state of everything, now."""
        now = time.monotonic()
        store = self.coordinator.store_status()
        return RunStatus(
            run=self.config.run.name,
            version=replicas.__version__,
            endpoint=self.coordinator.endpoint,
            pid=os.getpid(),
            uptime_s=now - self._started_at,
            ready=store.up and not self._draining and all(group.good for group in self._groups.values()),
            store=store,
            groups=tuple(group.status(now) for group in self._groups.values()),
            channels=self.coordinator.channel_statuses(),
            event_loop_lag_s=self.coordinator.loop_lag_s,
            sidecar_replacements=self.coordinator.sidecar_replacements(),
            refused=self.coordinator.refused(),
            state_dir=str(self.state.path),
        )

    def metrics_text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self.metrics.render()

    def live(self) -> bool:
        """Whether the supervisor itself works."""
        return self.coordinator.store_up and self.coordinator.loop_lag_s < _STUCK_LOOP_S

    # ------------------------------------------------------------ what a replica asks for (replica.Host)

    @property
    def run(self) -> str:
        return self.config.run.name

    @property
    def overseer(self) -> Overseer:
        return self.coordinator

    def environment(self) -> Mapping[str, str]:
        return {
            environ.ENDPOINT: self.coordinator.endpoint,
            environ.TOKEN_FILE: str(self.state.token_file),
            environ.RUN: self.config.run.name,
        }

    def size(self, group: str) -> int:
        return self._groups[group].size

    def may_start(self, group: str) -> bool:
        return all(self._groups[name].good for name in self._groups[group].config.depends_on)

    def on_channel(self, group: str) -> bool:
        return group in self._channel_groups

    def moved(self, transition: Transition, words: str) -> None:
        self.metrics.observe(transition)
        self._dirty.set()
        self._publish(transition)
        replica = self._groups[transition.group].replicas.get(transition.replica)
        text = line(transition, resume_in_s=replica.resume_in_s if replica else 0.0, logs=self.state.logs)
        if text:
            self._report(text)

    def _on_channel_event(self, event: ChannelEvent) -> None:
        self.metrics.observe(event)
        self._dirty.set()
        self._publish(event)
        if isinstance(event, MemberLost):
            group = self._groups.get(event.member.group)
            replica = group.replicas.get(event.member.replica) if group is not None else None
            if replica is not None:
                replica.member_lost(event.member.rank, event.reason)

    def _publish(self, event: Transition | ChannelEvent) -> None:
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)


def _parties(channel: ChannelConfig) -> tuple[Party, ...]:
    return (*channel.sources, *channel.targets, *channel.peers)

"""All groups of a run: when replicas start, which end together, when the run is over.

Theory of operation
===================

Each replica has its own task (:mod:`replicas.supervisor.fleet.replica`), which calls
the fleet where others are concerned: before it starts, before it restarts, and when it
fails. A monitor looks at all replicas four times a second, and at once after a change:
a transition, or an event of the coordinator. The monitor also decides when the run is
over:

* with exit code 0 when the groups of ``stop_when``, or all groups, have finished;
* with exit code 1 when a group's failures end the run: its ``on_failure`` says so, or
  fewer than ``min_ready`` of its replicas are left. A group that the end of the run
  waits for ends it in any case when none of its replicas is left.

A group that is scaled to 0 rests; it has not finished.

Groups start when their dependencies are met. With ``strategy = "group"`` a failed
replica ends the others of its group; they start again together, when the last of them
is gone. Commands are in :mod:`replicas.supervisor.fleet.fleet`.

The clock is the loop's, and all else is behind :class:`FleetEnvironment`, so that a
whole fleet can run in virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

import anyio

from replicas import errors
from replicas.config.structs import ChannelConfig, ChannelRole, Config, LogsConfig
from replicas.control.exit_codes import DONE, FAILED
from replicas.core.lives.lifecycle import SETTLED
from replicas.core.lives.lifecycle import ReplicaEvent as Step
from replicas.core.lives.ordering import unmet
from replicas.core.members.roster import GroupShape
from replicas.status import GroupStatus
from replicas.supervisor.fleet.causes import Cause
from replicas.supervisor.fleet.environment import Overseer, ShimStarter
from replicas.supervisor.fleet.group import Group
from replicas.supervisor.fleet.node import Node
from replicas.supervisor.fleet.replica import Replica
from replicas.supervisor.fleet.resources import Resources
from replicas.supervisor.fleet.starts import Starts
from replicas.supervisor.state.run_state import SavedGroup, ShimRecord
from replicas.supervisor.state.state import StateDir
from replicas.telemetry.events import Event, Transition

__all__ = ["FleetCore", "FleetEnvironment"]

TICK_S = 0.25
_PAUSE_S = 1.0
"""A monitor that comes this late was paused with its process: no replica's fault."""
_SETTLE_S = 0.75


class FleetEnvironment(Protocol):
    """The supervisor, or a fake, as the fleet sees it."""

    @property
    def state(self) -> StateDir: ...
    @property
    def overseer(self) -> Overseer: ...
    @property
    def resources(self) -> Resources: ...
    def environment(self) -> Mapping[str, str]: ...
    def emit(self, event: Event) -> None: ...
    def told(self, transition: Transition, resume_in_s: float) -> None: ...
    def say(self, text: str) -> None: ...
    def save(self) -> None:
        """Save the state that must survive a kill now, before what follows."""
        ...

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None: ...


class FleetCore:
    """The groups of a run, from :meth:`start` on. Create it on the event loop.

    :param saved: a dead supervisor's state of its groups.
    :param wall: the time of day, in seconds.
    :param start_shim: for tests.
    :param rng: source of the jitter of restarts.
    """

    def __init__(
        self,
        config: Config,
        ground: FleetEnvironment,
        *,
        saved: Mapping[str, SavedGroup] | None = None,
        wall: float = 0.0,
        start_shim: ShimStarter = Node,
        rng: random.Random | None = None,
    ) -> None:
        self._ground = ground
        self._start_shim = start_shim
        self._starts = Starts()
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        known = saved or {}
        self.groups = {
            name: Group(group, saved=known.get(name), now=now, wall=wall, rng=rng)
            for name, group in config.groups.items()
        }
        self.removed = {name: group.once_removed for name, group in known.items() if name not in config.groups}
        """Generations used by groups of earlier configs.

        A new group of the same name continues from there.
        """
        self.use(config)
        self.exit_code: int | None = None
        self.ended_by = ""
        """Why the run is over, in words."""
        self.over = asyncio.Event()
        self.draining = False
        self.looked_at = 0.0
        """When the monitor last ran, on the loop's clock."""
        self._drained = False
        self._unsaved = False
        self._hurry_s: float | None = None
        self._dirty = asyncio.Event()
        self._watchers: set[asyncio.Event] = set()

    def use(self, config: Config) -> None:
        """Take the settings of the run that belong to no group."""
        self.config = config
        self._channel_groups = frozenset(
            party.group for channel in config.channels.values() for party in _parties(channel)
        )

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """Start all groups; waits for nothing."""
        for name, group in self.groups.items():
            self.resize(name)
            self.fill(group)
        self._ground.spawn(self._monitor)

    def fill(self, group: Group) -> None:
        """Add the wanted replicas that are missing."""
        for index in range(group.size):
            if index not in group.replicas:
                self._add(group, index)

    def _add(self, group: Group, index: int) -> None:
        replica = Replica(
            group.config,
            index,
            self,
            group.rules,
            generation=group.generation(index),
            starts=self._starts,
            start_shim=self._start_shim,
        )
        group.enter(replica)
        self._ground.spawn(replica.run)

    def resize(self, name: str) -> None:
        """Report the group's shape to the coordinator."""
        group = self.groups[name]
        health = group.config.health
        shape = GroupShape(group.size, group.config.world_size, health.heartbeat_timeout_s)
        self._ground.overseer.set_group(name, shape)

    # ------------------------------------------------------------ the monitor

    async def _monitor(self) -> None:
        self.looked_at = self._loop.time()
        while True:
            with anyio.move_on_after(TICK_S):
                await self._dirty.wait()
            self._dirty.clear()
            now = self._loop.time()
            late_s, self.looked_at = now - self.looked_at - TICK_S, now
            if late_s > _PAUSE_S:
                # Let messages that have arrived be handled before judging any replica,
                # as the coordinator does.
                for replica in self.all():
                    replica.forgive(late_s)
                await anyio.sleep(_SETTLE_S)
                self.looked_at = self._loop.time()
                continue
            for replica in self.all():
                replica.check(now)
            self._judge()
            if self._unsaved:
                self.save()
            for watcher in self._watchers:
                watcher.set()

    def look(self) -> None:
        """Wake the monitor: something has changed."""
        self._dirty.set()

    def _judge(self) -> None:
        if self.exit_code is not None or self.draining:
            return
        failures = [group.failure for group in self.groups.values() if group.failure]
        named = [name for name in self.config.run.stop_when if name in self.groups]
        wanted = named or [name for name, group in self.groups.items() if group.size]  # a group scaled to 0 only rests
        if failures:
            self._finish(FAILED, failures[0])
        elif wanted and all(self.groups[name].over for name in wanted):
            short = [self.groups[name] for name in wanted if not self.groups[name].finished]
            if short and any(group.config.min_ready != 0 for group in short):
                self._finish(FAILED, next(one.words_of_failure() for one in short if one.config.min_ready != 0))
            else:
                self._finish(DONE, f"done: {', '.join(wanted)} finished")

    def _finish(self, code: int, words: str) -> None:
        self.exit_code, self.ended_by = code, words
        self._ground.say(words)
        self.over.set()

    def all(self) -> list[Replica]:
        return [replica for group in self.groups.values() for replica in group.replicas.values()]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``, which is checked after each look of the monitor."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            while not condition():
                watcher.clear()
                await watcher.wait()
        finally:
            self._watchers.discard(watcher)

    async def wait_ready(self, groups: Iterable[Group]) -> None:
        """Wait until these groups are ready.

        :raises replicas.errors.WorldError: a replica failed, or the run ended.
        """
        chosen = list(groups)

        def settled() -> bool:
            lost = next((one for one in chosen if not one.good and one.hopeless), None)
            if lost is not None and lost.failed is not None:
                raise errors.WorldError(f"replica {lost.failed.name} failed: {lost.failed.life.reason}")
            good = all(one.good for one in chosen)
            if not good and (self.over.is_set() or self.draining):
                raise errors.WorldError("the run is over")
            return good

        await self.until(settled)

    # ------------------------------------------------------------ state

    def saved(self, wall: float) -> dict[str, SavedGroup]:
        """The groups' state to save; ``wall``: the time of day, in seconds."""
        now = self._loop.time()
        return self.removed | {name: group.saved(now, wall) for name, group in self.groups.items()}

    def shims(self) -> tuple[ShimRecord, ...]:
        """Shims started, or about to be, and not known to be gone."""
        return tuple(record for replica in self.all() for record in replica.shims)

    def statuses(self, now: float) -> tuple[GroupStatus, ...]:
        return tuple(group.status(now) for group in self.groups.values())

    # ------------------------------------------------------------ Host, for replicas

    @property
    def run(self) -> str:
        return self.config.run.name

    @property
    def state(self) -> StateDir:
        return self._ground.state

    @property
    def overseer(self) -> Overseer:
        return self._ground.overseer

    @property
    def logs(self) -> LogsConfig:
        return self.config.logs

    def environment(self) -> Mapping[str, str]:
        return self._ground.environment()

    def share(self, group: str, replica: int, node: int) -> Mapping[str, str]:
        return self._ground.resources.environment(self.groups[group].config, replica, node)

    def size(self, group: str) -> int:
        return self.groups[group].size

    def waits_for(self, group: str, replica: int) -> str:
        one = self.groups[group]
        if self._held_back(one):
            return f"the other replicas of {group}"
        configs = {name: other.config for name, other in self.groups.items()}
        missing = unmet(one.config, configs, {name: other.staying for name, other in self.groups.items()})
        if missing:
            return ", ".join(missing)
        return self._ground.resources.take(one.config, replica)

    def may_resume(self, group: str, replica: int) -> bool:
        one = self.groups[group]
        return not self._held_back(one) and not self._ground.resources.take(one.config, replica)

    def _held_back(self, group: Group) -> bool:
        """Whether the group restarts as a whole, and it is not yet time."""
        if group.config.restart.strategy != "group":
            return False
        return group.falling or group.rules.resume_in_s(self._loop.time()) > 0

    def fell(self, group: str, replica: int, text: str) -> None:
        one = self.groups[group]
        rules = one.config.restart
        if rules.strategy != "group" or rules.policy == "never":
            return
        cause = Cause("group", f"restarted with {group}/{replica}: {text}")
        for index, other in one.replicas.items():
            waits = other.life.state in ("pending", "backoff", "failed")
            if index != replica and not waits and not other.unwanted:
                other.restart(cause, drain=False)

    def progressed(self, group: str, replica: int) -> bool | None:
        one = self.groups[group]
        if one.config.restart.strategy == "group":
            found = [other.progressed for other in one.replicas.values()]
            return None if None in found else any(found)
        return one.replicas[replica].progressed

    def on_channel(self, group: str) -> bool:
        return group in self._channel_groups

    def moved(self, transition: Transition, words: str) -> None:
        group = self.groups.get(transition.group)
        replica = group.replicas.get(transition.replica) if group is not None else None
        if replica is not None and transition.after in SETTLED and not replica.stuck:
            self._ground.resources.release(transition.group, transition.replica)
        if transition.restart_reason is not None:
            self.save()  # spent before it is reported: a kill here can only spend too much
        self._unsaved = True
        self._ground.emit(transition)
        self._ground.told(transition, replica.resume_in_s if replica is not None else 0.0)
        self.look()
        if group is not None and transition.event is Step.GIVE_UP and group.config.on_failure == "group":
            for other in group.replicas.values() if replica is not None and not replica.fails_with_group else ():
                other.fail(f"its group failed: replica {transition.group}/{transition.replica}: {transition.reason}")

    def save(self) -> None:
        self._unsaved = False
        self._ground.save()

    def emit(self, event: Event) -> None:
        self._ground.emit(event)

    def say(self, text: str) -> None:
        self._ground.say(text)

    def member_lost(self, group: str, replica: int, rank: int, reason: str) -> None:
        """Handle the coordinator's loss of a member."""
        one = self._replica(group, replica)
        if one is not None:
            one.member_lost(rank, reason)

    def idle(self, group: str, replica: int) -> None:
        """Handle the end of a draining replica's sync on a channel."""
        one = self._replica(group, replica)
        if one is not None:
            one.idle()

    def _replica(self, group: str, replica: int) -> Replica | None:
        found = self.groups.get(group)
        return found.replicas.get(replica) if found is not None else None


def _parties(channel: ChannelConfig) -> tuple[ChannelRole, ...]:
    return (*channel.sources, *channel.targets, *channel.peers)

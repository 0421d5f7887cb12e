"""Reload the config of a running run: validate it, then apply the differences.

A config that is invalid, or changes a setting that is fixed for the run, is refused as
a whole. New groups start; removed groups drain; groups whose processes would be started
differently restart, rolling, and so do single replicas on this machine if it has lost
labels that they need; sizes change; all other settings apply immediately. These steps
run concurrently: one that fails does not stop the others.

Configs are accepted one at a time, but the changes of one may never end (replicas that
do not become ready). So the next reload does not wait for them: it cancels the rolling
restarts of the groups that it restarts or removes, and the reload that began those
raises an error. A group that is added again waits for its own removal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from replicas import errors
from replicas.common.foreign import one_line
from replicas.config import file as config_file
from replicas.config.diff import ConfigDiff, diff
from replicas.config.structs import Config
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.fleet import Fleet
from replicas.supervisor.fleet.group import Group
from replicas.supervisor.fleet.plans import with_sizes
from replicas.supervisor.state.run_state import Cause
from replicas.telemetry.events import Reloaded, ReloadRefused

_CHANGED = Cause("reload", "its config has changed")
_MISPLACED = Cause("reload", "the labels of its node have changed")


class Reloading:
    """Reloads the config of a run: checks a new one, and applies the differences.

    :param fleet: returns the groups of the run, or raises UsageError during the start.
    :param check_plan: returns this machine, or raises BadConfig if the plan does not
        fit it.
    """

    def __init__(
        self,
        context: FleetContext,
        fleet: Callable[[], Fleet],
        check_plan: Callable[[Config], Coroutine[Any, Any, Machine]],
    ) -> None:
        """Keep the arguments; start nothing.

        :param fleet: returns the groups of the run, or raises UsageError during the
            start.
        :param check_plan: returns this machine, or raises BadConfig if the plan does
            not fit it.
        """
        self._context, self._fleet, self._check_plan = context, fleet, check_plan
        self._one_at_a_time = asyncio.Lock()
        self._rolls: dict[str, tuple[Cause, asyncio.Task[None]]] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._sizes: dict[str, int] = {}
        """New sizes to which groups have not been scaled yet."""
        self.adapt: Callable[[Config], Config] = lambda config: config
        """Returns the config to use for each config that is read."""

    async def reload(
        self,
        config: Config | Path | str | Mapping[str, Any] | None = None,
        *,
        accepted: Callable[[Reloaded], None] = lambda _: None,
    ) -> Reloaded:
        """Replace the config of the run, and wait until all changes are carried out.

        A config that is refused changes nothing: an event is emitted, and the error
        raised. The next reload can begin once this config is in use.

        :param config: default: read the file of the present one again.
        :param accepted: called once with the event, when the config is in use, before
            its restarts end.
        :returns: the event with the names of changed, added and removed groups.
        :raises replicas.errors.UsageError: the config is refused, or the run is being
            drained.
        :raises replicas.errors.WorldError: the state cannot be written; or the config
            is in use, but a restart failed, or a newer reload cancelled it.
        """
        async with self._one_at_a_time:
            context, fleet = self._context, self._fleet()
            fleet.refuse_while_draining()
            try:
                if config is None and (config := context.config.source) is None:
                    raise errors.UsageError("this run was not started from a config file", hint="pass the new config")
                if not isinstance(config, Config):
                    config = self.adapt(await anyio.to_thread.run_sync(config_file.read, config))
                found = diff(context.config, config)
                if found.refused:
                    raise errors.BadConfig(found.refused, source=str(config.source or "config"))
                # Groups whose size does not change count with their present size.
                kept = config.groups.keys() - found.resized.keys() - self._sizes.keys()
                sizes = {name: group.size for name, group in fleet.groups.items() if name in kept}
                machine = await self._check_plan(with_sizes(config, sizes))
                context.save(order=True)
            except errors.ReplicasError as error:
                problems = error.problems if isinstance(error, errors.BadConfig) else (str(error),)
                context.emit(ReloadRefused(problems=tuple(problems)))
                raise
            except Exception as error:
                context.emit(ReloadRefused(problems=(one_line(f"a bug: {type(error).__name__}: {error}"),)))
                raise
            if leaving := [self._removals[name] for name in found.added if name in self._removals]:
                await asyncio.wait(leaving)
            fleet.refuse_while_draining()
            context.resources.plan(config, machine)
            rolls = self._rolls_for(config, found)
            reloaded = self._apply_config(config, found, rolls)
            accepted(reloaded)
        await self._carry_out(found, rolls)
        return reloaded

    async def catch_up(self) -> None:
        """Restart replicas that the config would start differently or on another node.

        Called after this supervisor has taken over a running run, because the config
        may have changed without a supervisor, or an earlier reload did not finish.
        Restart one group after another, a few replicas at a time. A group that fails is
        only reported.
        """
        groups, misplaced = self._fleet().groups, self._context.resources.misplaced
        for group in [*groups.values()]:
            alive = [one for one in group.replicas.values() if one.life.alive]
            chosen = {one.index for one in alive if one.outdated or misplaced(group.config, one.index)}
            if not chosen or groups.get(group.config.name) is not group:  # a reload has removed it meanwhile
                continue
            try:
                await self._roll(group, _CHANGED, chosen)
            except errors.ReplicasError as error:
                self._context.say(f"group {group.config.name} was not restarted with its new config: {error}")

    def _rolls_for(self, new: Config, found: ConfigDiff) -> dict[str, tuple[Cause, frozenset[int]]]:
        """Choose the replicas that a reload must restart, and change nothing.

        All replicas of a group if its processes would be started differently, or if
        such a restart by an earlier reload is still in progress; else those on this
        machine that need labels which the machine no longer has.

        :param new: the config that was accepted.
        :param found: its differences from the config in use.
        :returns: by group name, the reason to report and the indices of the replicas.
            Groups without a restart are left out.
        """
        rolls: dict[str, tuple[Cause, frozenset[int]]] = {}
        groups, resources = self._fleet().groups, self._context.resources
        for name in (name for name in groups if name in new.groups):
            moved = frozenset(one for one in groups[name].replicas if resources.misplaced(new.groups[name], one))
            cause, _ = self._rolls.get(name, (None, None))
            if name in found.restarted or (moved and cause is _CHANGED):
                rolls[name] = _CHANGED, frozenset(groups[name].replicas)
            elif moved:
                rolls[name] = _MISPLACED, moved
        return rolls

    def _apply_config(self, new: Config, found: ConfigDiff, rolls: Iterable[str]) -> Reloaded:
        """Use the config in all groups, add its new groups, and save; restart nothing.

        Cancel the rolling restarts of earlier reloads in the groups ``rolls`` and in
        removed ones.

        :param found: the differences of ``new`` from the config in use.
        :param rolls: names of the groups with replicas to restart.
        :returns: the event with the changed, added and removed groups, which was
            emitted.
        :raises replicas.errors.WorldError: the state cannot be written; the config is
            in use nevertheless.
        """
        context, fleet = self._context, self._fleet()
        for name in (*rolls, *found.removed):
            if name in self._rolls:
                self._rolls.pop(name)[1].cancel()
        self._sizes.update(found.resized)
        for name in found.removed:
            self._sizes.pop(name, None)
        context.config = new
        for name in fleet.groups.keys() & new.groups.keys():
            fleet.groups[name].use(new.groups[name])
            fleet.resize(name)
        for name in found.added:
            fleet.adopt(new.groups[name])
        changed = tuple(dict.fromkeys((*found.restarted, *found.adjusted, *found.resized)))
        reloaded = Reloaded(changed=changed, added=found.added, removed=found.removed)
        context.emit(reloaded)
        context.save(order=True)
        context.wake_monitor()
        return reloaded

    async def _carry_out(self, found: ConfigDiff, rolls: Mapping[str, tuple[Cause, frozenset[int]]]) -> None:
        """Restart, scale and remove groups at the same time, and wait for all of it.

        :param found: the differences of the new config, with resized and removed
            groups.
        :param rolls: by group, why and which replicas restart, from :meth:`_rolls_for`.
        :raises replicas.errors.WorldError: the first error of a group, after all have
            ended.
        """
        steps: list[Coroutine[Any, Any, None]] = [self._remove(name) for name in found.removed]
        for name in dict.fromkeys((*found.resized, *rolls)):
            steps.append(self._restart_and_scale(name, *rolls.get(name, (_CHANGED, frozenset()))))
        for ended in await asyncio.gather(*steps, return_exceptions=True):
            if ended is not None:
                raise ended

    async def _remove(self, name: str) -> None:
        """Drain the group's replicas, remove the group, and wait until it is gone.

        The removal continues in its own task if the caller is cancelled meanwhile.
        """
        fleet = self._fleet()
        task = self._removals[name] = asyncio.create_task(fleet.scale(fleet.groups[name], 0, reason="reloaded"))
        task.add_done_callback(lambda _: self._removals.pop(name))
        await asyncio.shield(task)

    async def _restart_and_scale(self, name: str, cause: Cause, indices: frozenset[int]) -> None:
        """Restart the replicas ``indices``, then scale the group if it has a new size.

        One after the other, so that no replica starts twice. Wait until both are done.

        :param cause: the reason of the restart, for its events.
        """
        fleet = self._fleet()
        group = fleet.groups[name]
        if indices:
            await self._roll(group, cause, indices)
        size = self._sizes.pop(name, None)
        if size is not None and size != group.size:
            await fleet.scale(group, size)

    async def _roll(self, group: Group, cause: Cause, indices: Collection[int]) -> None:
        """Restart the replicas ``indices``, a few at a time; wait until all are ready.

        Skip replicas that have finished or are being stopped. A later reload can cancel
        this.

        :param cause: the reason of the restart, for its events.
        :raises replicas.errors.WorldError: a replica failed, or a newer reload took
            over.
        """
        fleet, name = self._fleet(), group.config.name
        there = [one for one in fleet.targets(name) if one.index in indices]
        chosen = [one for one in there if one.life.state != "finished" and not one.unwanted]
        task = asyncio.create_task(fleet.roll(group, chosen, cause))
        mine = self._rolls[name] = (cause, task)
        try:
            await asyncio.wait((task,))
        finally:
            superseded = self._rolls.get(name) is not mine
            if not superseded:
                del self._rolls[name]
            task.cancel()
        if superseded and task.cancelled():
            raise errors.WorldError(f"the reload ends for group {name}: a newer reload has replaced it")
        task.result()

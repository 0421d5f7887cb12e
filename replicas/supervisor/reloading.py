"""Another config for a run that lives: validated first, then only what differs is touched.

What is wrong with a config, or cannot change while the run lives, refuses all of it. New groups start; those that are gone
drain; those whose processes would be started differently restart, rolling; sizes change; all other settings apply from now
on. These steps go on side by side: one that fails does not stop the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import anyio.to_thread
import msgspec

from replicas import config_file, errors
from replicas.config import Config
from replicas.config_diff import ConfigDiff, diff
from replicas.events import Event, Reloaded, ReloadRefused
from replicas.supervisor.causes import Cause
from replicas.supervisor.fleet import Fleet
from replicas.supervisor.machine import Machine
from replicas.supervisor.resources import Resources

__all__ = ["Reloading", "with_sizes"]

_CHANGED = Cause("reload", "its config has changed")


class Site(Protocol):
    """Where a config is in use: the supervisor."""

    config: Config

    @property
    def fleet(self) -> Fleet: ...
    @property
    def resources(self) -> Resources: ...
    async def check_plan(self, config: Config) -> Machine: ...
    def emit(self, event: Event) -> None: ...


class Reloading:
    """Reloads of one run, one after the other."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._one_at_a_time = asyncio.Lock()

    async def reload(self, config: Config | Path | str | Mapping[str, Any] | None) -> Reloaded:
        """See :meth:`replicas.Supervisor.reload`."""
        async with self._one_at_a_time:
            site = self._site
            site.fleet.refuse_while_draining()
            try:
                new = await anyio.to_thread.run_sync(self._read, config)
                found = self._compare(new)
                machine = await site.check_plan(new)
            except errors.ReplicasError as error:
                problems = error.problems if isinstance(error, errors.BadConfig) else (str(error),)
                site.emit(ReloadRefused(problems=tuple(problems)))
                raise
            site.fleet.refuse_while_draining()
            site.resources.plan(new, machine)
            reloaded = self._begin(new, found)
            await self._carry_out(found)
            return reloaded

    def _read(self, config: Config | Path | str | Mapping[str, Any] | None) -> Config:
        source = self._site.config.source
        if config is None and source is None:
            raise errors.UsageError("this run was not started from a config file", hint="pass the new config")
        if isinstance(config, Config):
            return config
        if isinstance(config, Mapping):
            return config_file.parse(config, base=Path.cwd(), source="config")
        return config_file.load(config or source or "")

    def _compare(self, new: Config) -> ConfigDiff:
        found = diff(self._site.config, new)
        if found.refused:
            raise errors.BadConfig(found.refused, source=str(new.source or "config"))
        return found

    def _begin(self, new: Config, found: ConfigDiff) -> Reloaded:
        """What happens at once."""
        site = self._site
        fleet = site.fleet
        site.config = new
        fleet.use(new)
        for name in fleet.groups.keys() & new.groups.keys():
            fleet.groups[name].use(new.groups[name])
            fleet.resize(name)
        for name in found.added:
            fleet.adopt(new.groups[name])
        changed = tuple(dict.fromkeys((*found.restarted, *found.adjusted, *found.resized)))
        reloaded = Reloaded(changed=changed, added=found.added, removed=found.removed)
        site.emit(reloaded)
        fleet.save()
        fleet.look()
        return reloaded

    async def _carry_out(self, found: ConfigDiff) -> None:
        """What takes its time."""
        fleet = self._site.fleet
        steps: list[Coroutine[Any, Any, None]] = [fleet.remove(name) for name in found.removed]
        for name in dict.fromkeys((*found.resized, *found.restarted)):
            steps.append(self._change(name, found.resized.get(name), again=name in found.restarted))
        ended = await asyncio.gather(*steps, return_exceptions=True)
        failures = [one for one in ended if isinstance(one, BaseException)]
        if failures:
            raise failures[0]

    async def _change(self, name: str, size: int | None, *, again: bool) -> None:
        """Restart what there is, then come to the new size: nothing new is started twice."""
        fleet = self._site.fleet
        group = fleet.groups[name]
        if again:
            chosen = [one for one in fleet.targets(name) if one.life.state != "finished" and not one.halted]
            await fleet.roll(group, chosen, _CHANGED)
        if size is not None and size != group.size:
            await fleet.scale(name, size)


def with_sizes(config: Config, sizes: Mapping[str, int]) -> Config:
    """The config with other numbers of replicas."""
    groups = {
        name: msgspec.structs.replace(group, replicas=sizes.get(name, group.replicas))
        for name, group in config.groups.items()
    }
    return msgspec.structs.replace(config, groups=groups)

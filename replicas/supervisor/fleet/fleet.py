"""Commands on the replicas of a run: scale, restart, drain, reset.

Replicas end in reverse start order, one level of ``depends_on`` after the other. A long
command (a drain, a rolling restart) runs in its caller's task and nothing else waits
for it, so that any number of commands and the status go on side by side. Callers wait
for conditions that the monitor sees
(:meth:`~replicas.supervisor.fleet.core.FleetCore.until`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal

from replicas import errors
from replicas.common.foreign import one_line
from replicas.config.structs import GroupConfig
from replicas.control.exit_codes import FAILED
from replicas.core.lives.ordering import is_good, start_levels, within
from replicas.messages.bounds import text_of
from replicas.supervisor.fleet.causes import Cause
from replicas.supervisor.fleet.core import FleetCore
from replicas.supervisor.fleet.group import Group
from replicas.supervisor.fleet.replica import REQUESTED, Replica
from replicas.telemetry.events import Drained, Draining, FailedReset, RestartAsked, Scaled

__all__ = ["DrainReason", "Fleet"]

_DIGITS = 7

DrainReason = Literal["requested", "preempted", "over", "scaled", "reloaded", "restart"]


class Fleet(FleetCore):
    """The groups of a run, from :meth:`start` to :meth:`drain`.

    Create it on the event loop.
    """

    def group(self, name: str) -> Group:
        """The group of this name.

        :raises replicas.errors.UsageError: there is none.
        """
        group = self.groups.get(name) if isinstance(name, str) else None
        if group is None:
            raise errors.UsageError(
                f'no group "{one_line(text_of(name, 80))}"', hint=f"groups: {', '.join(self.groups)}"
            )
        return group

    def targets(self, target: str | None) -> list[Replica]:
        """The replicas that ``group`` or ``group/index`` names; None: all.

        :raises replicas.errors.UsageError: there is no such group or replica.
        """
        if target is None:
            return self.all()
        name, slash, index = target.partition("/") if isinstance(target, str) else (target, "", "")
        group = self.group(name)
        if not slash:
            return [replica for _, replica in sorted(group.replicas.items())]
        if not index.isdecimal() or len(index) > _DIGITS or int(index) not in group.replicas:
            known = ", ".join(replica.name for replica in group.replicas.values()) or "none"
            raise errors.UsageError(
                f'no replica "{one_line(text_of(target, 80))}"', hint=f"replicas of {name}: {known}"
            )
        return [group.replicas[int(index)]]

    def refuse_while_draining(self) -> None:
        """:raises replicas.errors.UsageError: the run is being drained."""
        if self.draining:
            raise errors.UsageError("the run is being drained")

    async def scale(self, name: str, replicas: int, *, reason: DrainReason = "scaled") -> None:
        """Start more replicas without waiting, or drain the highest and wait.

        The caller may be cancelled: what was begun goes on.
        """
        group = self.group(name)
        before, group.size, group.configured = group.size, replicas, group.config.replicas
        self.resize(name)
        if before != replicas:
            self._ground.emit(Scaled(group=name, before=before, after=replicas))
        self.fill(group)
        leaving = [replica for index, replica in group.replicas.items() if index >= replicas]
        self.save()
        for replica in leaving:
            replica.stop()
        ended = asyncio.Event()

        async def finish() -> None:
            try:
                await self._await_end(group, leaving, reason)
            finally:
                ended.set()

        self._ground.spawn(finish)
        await ended.wait()

    async def _await_end(self, group: Group, leaving: list[Replica], reason: DrainReason) -> None:
        """Wait for the end of replicas that were stopped for good."""
        began = self._loop.time()
        for replica in leaving:
            self._ground.emit(Draining(target=replica.name, reason=reason))
        for replica in leaving:
            await replica.over.wait()
            if group.replicas.get(replica.index) is replica:
                group.retire(replica)
                if not replica.stuck:
                    self._ground.resources.release(group.config.name, replica.index)
                self._ground.emit(Drained(target=replica.name, seconds=self._loop.time() - began))
        name = group.config.name
        if self.groups.get(name) is group:
            if reason == "reloaded" and not group.size:
                self.removed[name] = group.saved(self._loop.time(), 0.0).once_removed
                del self.groups[name]
            elif not self.draining:
                self.fill(group)  # it may have been scaled up again meanwhile
        self.look()

    async def remove(self, name: str) -> None:
        """Drain the group and forget it."""
        await self.scale(name, 0, reason="reloaded")

    def adopt(self, config: GroupConfig) -> None:
        """Start a new group."""
        group = self.groups[config.name] = Group(config, saved=self.removed.pop(config.name, None), rng=self._rng)
        self.resize(config.name)
        self.fill(group)

    async def restart(self, target: str, *, rolling: bool = False) -> None:
        """End the replicas and start their next generation.

        Waits until that is being started (rolling: until all are ready or finished), or
        the replicas are stopped meanwhile.
        """
        replicas = self.targets(target)
        self.refuse_while_draining()
        if not replicas:
            raise errors.UsageError(
                f"group {target} has no replicas", hint=f"start some with: replicas scale {target} N"
            )
        self._ground.emit(RestartAsked(target=target, rolling=rolling))
        group = self.group(target.partition("/")[0])
        if rolling:
            await self.roll(group, replicas, REQUESTED)
            return
        before = [(replica, replica.life.generation) for replica in replicas]
        if "/" not in target:
            group.rules.resumed()  # all restart: none waits for an earlier failure of the group
        for replica in replicas:
            replica.restart()
        await self.until(
            lambda: (
                self.over.is_set()
                or all(
                    one.life.generation > generation or one.over.is_set() or one.resting for one, generation in before
                )
            )
        )

    async def roll(self, group: Group, replicas: Iterable[Replica], cause: Cause) -> None:
        """Restart these replicas, with at most ``max_unavailable`` of the group away.

        A replica that is stopped meanwhile is left as it is, and not waited for.

        :raises replicas.errors.WorldError: one failed, or the run ended; the others are
            left as they are.
        """
        chosen = list(replicas)
        todo = [replica.index for replica in chosen]
        rested = {replica.index for replica in chosen if replica.unwanted}

        def due() -> list[int]:
            aside = {index for index, one in group.replicas.items() if one.unwanted and index not in todo}
            states = {index: state for index, state in group.states.items() if index not in aside}
            todo[:] = [index for index in todo if index in states]
            failed = next((one for one in group.replicas.values() if one.life.state == "failed"), None)
            if failed is not None and failed.index not in todo:
                raise errors.WorldError(f"rolling restart: replica {failed.name} failed: {failed.life.reason}")
            if self.draining or self.over.is_set():
                raise errors.WorldError("rolling restart: the run is over")
            return within(states, todo, group.config.max_unavailable)

        while todo:
            for index in due():
                todo.remove(index)
                one = group.replicas[index]
                if not one.leaving and (index in rested or not one.unwanted):
                    one.restart(cause)
            await self.until(lambda: not todo or bool(due()))
        await self.until(lambda: not due() and is_good([one.life.state for one in chosen if not one.unwanted]))

    def reset_failed(self, target: str | None = None) -> tuple[str, ...]:
        """Start failed replicas, and those in backoff, at once.

        Their groups have a full budget again, as have groups that have spent some of it
        without a failed replica.
        """
        chosen = self.targets(target)
        self.refuse_while_draining()
        now, groups = self._loop.time(), {replica.group.name: self.groups[replica.group.name] for replica in chosen}
        spent = tuple(name for name, group in groups.items() if group.rules.spent(now) or group.failed is not None)
        for name in spent:
            groups[name].rules.reset()
        names = tuple(replica.name for replica in chosen if replica.reset())
        if names and self.exit_code == FAILED:
            self.exit_code, self.ended_by = None, ""
            self.over.clear()
        self.save()
        if spent or names:
            self._ground.emit(FailedReset(replicas=names, groups=spent))
            full = f"full restart budget for {', '.join(spent)}" if spent else ""
            began = f"starting {', '.join(names)}" if names else ""
            self._ground.say(f"reset-failed: {'; '.join(filter(None, (began, full)))}")
        self.look()
        return names

    async def drain(self, target: str | None = None, *, hurry: bool = False, reason: DrainReason = "requested") -> None:
        """End replicas, and wait until no process of them is left.

        The whole run ends with dependent groups first. Replicas of a target then rest
        until they are restarted.

        :param hurry: SIGKILL at once; also hurries a drain that is under way.
        """
        if target is not None:
            await self._drain_some(target, hurry=hurry)
            return
        began = self._loop.time()
        if not self.draining or (hurry and self._hurry_s is None):
            self._ground.emit(Draining(target="", reason=reason, hurry=hurry))
        self.draining = True
        if hurry:
            self._hurry_s = 0.0
        for names in reversed(start_levels({name: group.config for name, group in self.groups.items()})):
            groups = [self.groups[name] for name in names if name in self.groups]
            ending = [replica for group in groups for replica in group.replicas.values()]
            for replica in ending if self._hurry_s is None else self.all():
                replica.stop(self._hurry_s, run_over=True)
            for replica in ending:
                await replica.over.wait()
        if not self._drained:
            self._drained = True
            self._ground.emit(Drained(target="", seconds=self._loop.time() - began))
        self.over.set()

    async def _drain_some(self, target: str, *, hurry: bool) -> None:
        chosen = self.targets(target)
        began = self._loop.time()
        self._ground.emit(Draining(target=target, hurry=hurry))
        for replica in chosen:
            replica.halt(0.0 if hurry else None)
        await self.until(
            lambda: all(
                one.resting or one.over.is_set() or not one.unwanted for one in chosen
            )  # or restarted meanwhile
        )
        self._ground.emit(Drained(target=target, seconds=self._loop.time() - began))

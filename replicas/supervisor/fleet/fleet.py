"""All groups of a run: start order, common ends, and the end of the run.

Each replica has its own task (:mod:`replicas.supervisor.fleet.replica`), which asks the
fleet before a start or restart, and reports failures to it. A monitor checks all
replicas four times a second, and after each change (a transition, or an event of the
coordinator). The monitor also decides when the run is over:

* with exit code 0 when the groups of ``stop_when``, or all, have finished (a group that
  is scaled to 0 has not);
* with exit code 2 when ``cluster.min_nodes`` nodes have not joined in time;
* with exit code 1 when a group's failures end the run: by its ``on_failure``, if fewer
  than ``min_ready`` of its replicas are left, if no target of a channel is left
  (``least_left``), or if none is left of a group for which the end of the run waits.

Groups start when their dependencies are met, and end in reverse order, level by level
of ``depends_on``. With ``strategy = "group"`` a failed replica ends the others of its
group; they start again together, when all are gone. An *external* group
(:mod:`replicas.supervisor.fleet.external`) has each expected replica, and each other
one that has joined; the run does not wait for its end. Commands run in their callers'
tasks. The clock is the loop's: tests run a fleet in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

import anyio

from replicas import errors
from replicas.common.foreign import one_line
from replicas.common.patience import PauseClock
from replicas.common.reason import Reason
from replicas.common.sizes import list_text
from replicas.config.structs import GroupConfig
from replicas.config.values import nearest
from replicas.control.exit_codes import DONE, FAILED, USAGE
from replicas.core.lives.lifecycle import SETTLED, Transition
from replicas.core.lives.lifecycle import ReplicaEvent as Step
from replicas.core.lives.ordering import is_good, least_left, restartable_now, start_levels, unmet
from replicas.core.members.roster import GroupShape
from replicas.messages.bounds import text_of
from replicas.supervisor.fleet.causes import line
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.external import External
from replicas.supervisor.fleet.group import Group
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.fleet.replica import REQUESTED, Replica
from replicas.supervisor.state.run_state import Cause, SavedGroup, ShimRecord
from replicas.telemetry.events import Drained, Draining, DrainReason, FailedReset, RestartAsked, Scaled

TICK_S = 0.25
_SETTLE_S = 0.75
_DIGITS = 7
_NAMED = 10

Adopted = Mapping[tuple[str, int], tuple[list[ShimRecord], list[ShimHandle]]]
"""Generations of an earlier supervisor by group and index: records, and shims."""


def _now() -> float:
    """Return the time of the loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


class Fleet:
    """The groups of a run: starts, checks, scales and ends their replicas."""

    def __init__(
        self, context: FleetContext, *, saved: Mapping[str, SavedGroup] | None = None, wall: float = 0.0
    ) -> None:
        """Make the groups, without replicas, on the running loop. ``saved``: their
        state under an earlier supervisor. ``wall``: seconds since 1970, for saved
        restarts."""
        self._context = context
        now, known = _now(), saved or {}
        self.groups = {
            name: Group(group, saved=known.get(name), now=now, wall=wall)
            for name, group in context.config.groups.items()
        }
        self.removed = {name: group.once_removed for name, group in known.items() if name not in self.groups}
        """State of removed groups: a new group of the same name continues from it."""
        self.exit_code: int | None = None
        self.ended_by = ""
        """Why the run is over, in words."""
        self.over = asyncio.Event()
        self.draining = False
        self.looked_at = 0.0
        """When the monitor last ran, on the loop's clock."""
        self._short_since: float | None = None
        """Since when a replica waits for the nodes of the start, or None."""
        self._drained = self._unsaved = False
        self._hurry_s: float | None = None
        self._looked = asyncio.Condition()

    # ------------------------------------------------------------ start

    def start(self, adopted: Adopted | None = None) -> None:
        """Start the monitor and the tasks of all replicas; do not wait. ``adopted``:
        generations to continue; None to start all, even replicas that had finished."""
        for name, group in self.groups.items():
            self.resize(name)
            self._fill(group, adopted)
            for index in [index for index in group.replicas if index >= group.size and not group.config.external]:
                group.replicas[index].stop()
                self._remove_when_ended(group, [group.replicas[index]], "scaled")
        self._context.spawn(self._monitor)

    def adopt(self, config: GroupConfig) -> None:
        """Add a group that a reload has added, and start its replicas."""
        group = self.groups[config.name] = Group(config, saved=self.removed.pop(config.name, None))
        self.resize(config.name)
        self._fill(group)

    def _fill(self, group: Group, adopted: Adopted | None = None) -> None:
        """Add and start the missing replicas of a group; those in ``adopted`` continue
        generations that an earlier supervisor started."""
        joined = self._context.coordinator.joined(group.config.name) if group.config.external else ()
        kind = External if group.config.external else Replica
        name, found = group.config.name, adopted or {}
        beyond = [index for other, index in found if other == name and index >= group.size]
        for index in (*range(group.size), *beyond, *joined):
            if index not in group.replicas:
                replica = kind(self._context, group.config, index, self, group.rules)
                if (name, index) in found:
                    replica.adopt(*found[name, index])
                group.enter(replica, settled=adopted is not None)
                self._context.spawn(replica.run)

    def resize(self, name: str) -> None:
        """Tell the coordinator the group's present size, ranks, heartbeat timeout."""
        group = self.groups[name]
        shape = GroupShape(group.size, group.config.world_size, group.config.health.heartbeat_timeout_s)
        self._context.coordinator.set_group(name, shape)

    # ------------------------------------------------------------ the monitor

    async def _monitor(self) -> None:
        """Check all replicas every 0.25 s and after each change, until cancelled."""
        self.looked_at = _now()
        clock = PauseClock(self.looked_at + TICK_S)
        while True:
            with anyio.move_on_after(TICK_S):
                await self._context.changed.wait()
            self._context.changed.clear()
            now = self.looked_at = _now()
            late_s, clock.due = clock.measure_pause(now), now + TICK_S
            if late_s:
                # Handle the messages that have arrived before checking any replica, as
                # the coordinator does.
                for replica in self.all():
                    replica.forgive(late_s)
                if self._short_since is not None:
                    self._short_since += late_s
                await anyio.sleep(_SETTLE_S)
                self.looked_at = _now()
                clock.due = self.looked_at + TICK_S
                continue
            for group in [group for group in self.groups.values() if group.config.external and not self.draining]:
                self._fill(group)
                group.retire_surplus(self._context.coordinator.joined(group.config.name))
            for replica in self.all():
                replica.check(now)
            waits = {replica.name: replica.waits for replica in self.all()}
            for text in self._context.waits.due(waits | self._context.coordinator.waits(), now):
                self._context.say(text)
            self._judge(now)
            if self._unsaved:
                self._unsaved = False
                self._context.save()
            async with self._looked:
                self._looked.notify_all()

    def _judge(self, now: float) -> None:
        """Declare the run over if groups finished or failed, or too few nodes came."""
        if self.exit_code is not None or self.draining:
            return
        config, resources = self._context.config, self._context.resources
        timeout_s = config.cluster.join_timeout_s
        self._short_since = (self._short_since or now) if resources.short else None
        if self._short_since is not None and now - self._short_since > timeout_s:
            self._finish(USAGE, str(resources.too_few(timeout_s)))
            return
        failures = [text for one in self.groups.values() if (text := one.failure(least_left(config, one.config)))]
        named = [name for name in config.run.stop_when if name in self.groups]
        ours = [name for name, group in self.groups.items() if not (group.config.external or group.config.added)]
        wanted = named or [name for name in ours if self.groups[name].size]  # a group scaled to 0 has not finished
        if failures:
            self._finish(FAILED, failures[0])
        elif wanted and all(self.groups[name].over for name in wanted):
            ended = [self.groups[name] for name in wanted]
            failed = [one for one in ended if not one.finished and one.config.min_ready != 0]
            if failed:
                self._finish(FAILED, failed[0].words_of_failure())
            else:
                self._finish(DONE, f"done: {', '.join(wanted)} finished")

    def _finish(self, code: int, words: str) -> None:
        """Declare the run over, with this exit code and reason; end no process."""
        self.exit_code, self.ended_by = code, words
        self._context.say(words)
        self.over.set()

    @property
    def cut(self) -> list[str]:
        """Names of replicas that did not end in time when the run ended."""
        return [replica.name for replica in self.all() if replica.current.cut]

    @property
    def words_of_cut(self) -> str:
        """A sentence that names :attr:`cut`, or "" if all replicas ended in time."""
        return f"killed, as they had not ended in time: {list_text(self.cut, _NAMED)}" if self.cut else ""

    @property
    def words_of_end(self) -> str:
        """The reason for the end of the run, and replicas that did not end in time."""
        return "; ".join(filter(None, (self.ended_by, self.words_of_cut)))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` is true; each run of the monitor checks it."""
        async with self._looked:
            await self._looked.wait_for(condition)

    async def wait_ready(self, groups: Iterable[Group]) -> None:
        """Wait until the groups are ready; WorldError if one failed or the run ends."""
        chosen = list(groups)

        def settled() -> bool:
            """Return True if all are ready; WorldError if that can no longer be."""
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
        """Return the groups' state to save. ``wall``: seconds since 1970."""
        now = _now()
        return self.removed | {name: group.saved(now, wall) for name, group in self.groups.items()}

    def shims(self) -> tuple[ShimRecord, ...]:
        """Return records of the shims that are about to start, or may live."""
        return tuple(record for replica in self.all() for record in replica.shims)

    def replica(self, group: str, index: int) -> Replica | None:
        """Return the replica, or None if there is none."""
        return self.groups[group].replicas.get(index) if group in self.groups else None

    def all(self) -> list[Replica]:
        """Return all replicas of all groups."""
        return [replica for group in self.groups.values() for replica in group.replicas.values()]

    def group(self, name: str) -> Group:
        """Return the group of this name; UsageError if there is none."""
        group = self.groups.get(name) if isinstance(name, str) else None
        if group is None:
            raise errors.UsageError(f'no group "{one_line(text_of(name, 80))}"{nearest(text_of(name), self.groups)}')
        return group

    def targets(self, target: str | None) -> list[Replica]:
        """Return the replicas of ``target``: a ``group`` or ``group/index``, or all for
        None. Raise UsageError if there are none of that name."""
        if target is None:
            return self.all()
        name, slash, index = target.partition("/") if isinstance(target, str) else (target, "", "")
        group = self.group(name)
        if not slash:
            return [replica for _, replica in sorted(group.replicas.items())]
        if not index.isdecimal() or len(index) > _DIGITS or int(index) not in group.replicas:
            known = list_text([replica.name for replica in group.replicas.values()], 8) or "none"
            raise errors.UsageError(f'no replica "{one_line(text_of(target, 80))}"', hint=f"the replicas are {known}")
        return [group.replicas[int(index)]]

    # ------------------------------------------------------------ called by replicas

    def size(self, group: str) -> int:
        """Return the wanted number of replicas of the group."""
        return self.groups[group].size

    def waits_for(self, group: str, replica: int, *, first: bool) -> Reason | None:
        """Assign nodes to a replica and return None, or return why it waits. A
        ``first`` start also waits for other groups."""
        one = self.groups[group]
        if self._held_back(one):
            return f"for the other replicas of group {group}, which restart together"
        if first:
            needed = {name: other.needed for name, other in self.groups.items()}
            if missing := unmet(one.config, needed, {name: other.staying for name, other in self.groups.items()}):
                return f"for {', '.join(missing)}"
        waits = self._context.awaited.blocks(group, replica, _now())
        lacks = None if waits else self._context.resources.assign_nodes(one.config, replica)
        return waits or (f"for {lacks}" if lacks else None)

    def _held_back(self, group: Group) -> bool:
        """Return True if the group restarts as a whole, and cannot start again yet."""
        if group.config.restart.strategy != "group":
            return False
        return any(one.falling for one in group.replicas.values()) or group.rules.resume_in_s(_now()) > 0

    def restart_group_with(self, group: str, replica: int, text: str) -> None:
        """Restart the group's others if configured: ``replica`` failed (``text``)."""
        one = self.groups[group]
        if one.config.restart.strategy != "group" or one.config.restart.policy == "never":
            return
        cause = Cause("group", f"restarted with {group}/{replica}: {text}")
        for index, other in one.replicas.items():
            waits = other.life.state in ("pending", "backoff", "failed")
            if index != replica and not waits and not other.unwanted:
                other.restart(cause, drain=False)

    def progressed(self, group: str, replica: int) -> bool | None:
        """Return whether its generation made a new step or version; None if unknown."""
        one = self.groups[group]
        if one.config.restart.strategy == "group":
            found = [other.current.progressed for other in one.replicas.values()]
            return None if None in found else any(found)
        return one.replicas[replica].current.progressed

    def on_transition(self, transition: Transition) -> None:
        """Emit a replica's new state; free its GPUs if it has ended; save if needed."""
        group = self.groups.get(transition.group)
        replica = self.replica(transition.group, transition.replica)
        if replica is not None and transition.after in SETTLED and not replica.stuck:
            self._context.resources.release(transition.group, transition.replica)
        if transition.restart_reason is not None:
            self._context.save()  # before it is reported: a kill here can only use up too much budget
        self._unsaved = True
        self._context.emit(self._context.resources.placed(transition))
        logs = self._context.state.logs if replica is None or replica.here else None
        if text := line(transition, logs, "run" if group is None else group.config.on_failure):
            self._context.say(text)
        self._context.wake_monitor()
        if group is not None and transition.event is Step.GIVE_UP and group.config.on_failure == "group":
            for other in group.replicas.values() if replica is not None and replica.asked != "fail" else ():
                other.fail(f"its group failed, with {transition.group}/{transition.replica} ({transition.reason})")

    # ------------------------------------------------------------ commands

    def refuse_while_draining(self) -> None:
        """Raise UsageError if the run is being drained."""
        if self.draining:
            raise errors.UsageError("the run is being drained")

    async def scale(self, group: Group, replicas: int, *, reason: DrainReason = "scaled") -> None:
        """Set the size: start replicas, or drain the highest and wait for their end.

        WorldError, and no change, if it cannot be saved. A cancelled call still drains.
        For an external group only the number changes, unless ``reason`` is "reloaded".
        """
        name, before, configured = group.config.name, group.size, group.configured
        group.size, group.configured = replicas, group.config.replicas
        try:
            self._context.save(order=True)
        except errors.WorldError:
            group.size, group.configured = before, configured
            raise
        self.resize(name)
        if before != replicas:
            self._context.emit(Scaled(group=name, before=before, after=replicas))
        self._fill(group)
        ours = not group.config.external or reason == "reloaded"
        leaving = [replica for index, replica in group.replicas.items() if index >= replicas and ours]
        self._context.save()
        for replica in leaving:
            replica.stop(why=f"scaled from {before} to {replicas}")
        await self._remove_when_ended(group, leaving, reason).wait()

    def _remove_when_ended(self, group: Group, leaving: list[Replica], reason: DrainReason) -> asyncio.Event:
        """In a task, remove ``leaving`` when ended; then it sets the returned event."""
        ended = asyncio.Event()

        async def finish() -> None:
            """Wait and remove them; then set the event, also after an error."""
            try:
                await self._await_end(group, leaving, reason)
            finally:
                ended.set()

        self._context.spawn(finish)
        return ended

    async def _await_end(self, group: Group, leaving: list[Replica], reason: DrainReason) -> None:
        """Wait until ``leaving`` have ended; remove them, and a group that goes too."""
        name, began = group.config.name, _now()
        for replica in leaving:
            self._context.emit(Draining(target=replica.name, reason=reason))
        for replica in leaving:
            await replica.over.wait()
            if group.replicas.get(replica.index) is replica:
                group.retire(replica)
                if not replica.stuck:
                    self._context.resources.release(name, replica.index)
                self._context.emit(Drained(target=replica.name, seconds=_now() - began))
        if self.groups.get(name) is group:
            if reason == "reloaded" and not group.size:
                self.removed[name] = group.saved(_now(), 0.0).once_removed
                del self.groups[name]
            elif not self.draining:
                self._fill(group)  # a scale may have raised the size meanwhile
        self._context.wake_monitor()

    async def restart(self, target: str, *, rolling: bool = False) -> None:
        """End the replicas, and wait until their next generations start, or a stop.

        UsageError for a bad target; WorldError, and no end, if writing the state fails.

        :param rolling: a few at a time; wait until all are ready or finished.
        """
        replicas = self.targets(target)
        self.refuse_while_draining()
        if not replicas:
            raise errors.UsageError(
                f"group {target} has no replicas", hint=f"start some with: replicas scale {target} N"
            )
        group = self.group(target.partition("/")[0])
        if group.config.external:
            text = f"group {group.config.name} is external: its programs are started by others"
            raise errors.UsageError(text, hint="restart them where they were started")
        self._context.save(order=True)  # the start would fail if the state could not be written
        self._context.emit(RestartAsked(target=target, rolling=rolling))
        if rolling:
            await self.roll(group, replicas, REQUESTED)
            return
        before = [(replica, replica.life.generation) for replica in replicas]
        if "/" not in target:
            group.rules.resumed()  # all restart, without a delay for an earlier failure
        for replica in replicas:
            replica.restart()

        def begun(one: Replica, generation: int) -> bool:
            """Return True if ``one`` has a newer generation, or is stopped or done."""
            return one.life.generation > generation or one.over.is_set() or one.resting

        await self.until(lambda: self.over.is_set() or all(begun(*one) for one in before))

    async def roll(self, group: Group, replicas: Iterable[Replica], cause: Cause) -> None:
        """Restart these replicas, at most ``max_unavailable`` of the group at a time.

        Skip replicas that are stopped meanwhile; return when all others are ready.

        :raises replicas.errors.WorldError: a replica failed, or the run ended.
        """
        chosen = list(replicas)
        todo = [replica.index for replica in chosen]
        rested = {replica.index for replica in chosen if replica.unwanted}

        def due() -> list[int]:
            """Return indices to restart now; WorldError if one failed or at the end."""
            aside = {index for index, one in group.replicas.items() if one.unwanted and index not in todo}
            states = {index: state for index, state in group.states.items() if index not in aside}
            todo[:] = [index for index in todo if index in states]
            failed = group.failed
            if failed is not None and failed.index not in todo:
                raise errors.WorldError(f"rolling restart: replica {failed.name} failed ({failed.life.reason})")
            if self.draining or self.over.is_set():
                raise errors.WorldError("rolling restart: the run is over or drained")
            return restartable_now(states, todo, group.config.max_unavailable)

        while todo:
            for index in due():
                todo.remove(index)
                one = group.replicas[index]
                if not one.leaving and (index in rested or not one.unwanted):
                    one.restart(cause)
            await self.until(lambda: not todo or bool(due()))
        await self.until(lambda: not due() and is_good([one.life.state for one in chosen if not one.unwanted]))

    def reset_failed(self, target: str | None = None) -> tuple[str, ...]:
        """Start failed replicas, and those in backoff, now. Return their names.

        Refill the restart budgets of their groups. A run that has failed goes on.
        """
        chosen = self.targets(target)
        self.refuse_while_draining()
        self._context.save(order=True)
        now, groups = _now(), {replica.group.name: self.groups[replica.group.name] for replica in chosen}
        spent = tuple(name for name, group in groups.items() if group.rules.spent(now) or group.failed is not None)
        for name in spent:
            groups[name].rules.reset()
        names = tuple(replica.name for replica in chosen if replica.reset())
        if names and self.exit_code == FAILED:
            self.exit_code, self.ended_by = None, ""
            self.over.clear()
        self._context.save(order=True)
        if spent or names:
            self._context.emit(FailedReset(replicas=names, groups=spent))
            full = f"restart budget of group {', '.join(spent)} is full again" if spent else ""
            began = f"starting {', '.join(names)} again" if names else ""
            self._context.say(f"by order (reset-failed): {'; '.join(filter(None, (began, full)))}")
        self._context.wake_monitor()
        return names

    async def drain(self, target: str | None = None, *, hurry: bool = False, reason: DrainReason = "requested") -> None:
        """End replicas after their sync, and wait until their processes are gone.

        Those of a target stay stopped until restarted. Without a target, the run is
        over then. ``hurry``: SIGKILL immediately, also in a drain in progress.
        """
        if target is not None:
            chosen, began = self.targets(target), _now()
            self._context.save(order=True)
            self._context.emit(Draining(target=target, hurry=hurry))
            for replica in chosen:
                replica.halt(0.0 if hurry else None)
            self._context.save(order=True)
            # a replica may be restarted meanwhile
            await self.until(lambda: all(one.resting or one.over.is_set() or not one.unwanted for one in chosen))
            self._context.emit(Drained(target=target, seconds=_now() - began))
            return
        began = _now()
        if not self.draining or (hurry and self._hurry_s is None):
            self._context.emit(Draining(target="", reason=reason, hurry=hurry))
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
            self._context.emit(Drained(target="", seconds=_now() - began))
        self.over.set()

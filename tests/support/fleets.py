"""A fleet on fake shims, for histories in virtual time.

A :class:`Yard` is supervisor, coordinator and machine in one. Each generation of a
replica lives as its :class:`Life` says: how long it takes to start, when it ends and
how, and how long it needs from SIGTERM to its end.
"""

from __future__ import annotations

import asyncio
import errno
import math
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from replicas.config.dependency import Dependency
from replicas.config.structs import Config, GroupConfig, RestartConfig, RunConfig
from replicas.coordinator import Coordinator, GroupShape, Readiness
from replicas.core.lives.lifecycle import Transition
from replicas.core.lives.restarts import Restarts
from replicas.supervisor.fleet import group as group_module
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.fleet import Fleet
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.fleet.resources import Resources
from replicas.supervisor.state.leases import Lease
from replicas.supervisor.state.run_state import SavedGroup
from replicas.supervisor.state.state import StateDir
from replicas.supervisor.wire.orders import PartSpec
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, LogLoss, RankExit, Remains
from replicas.telemetry.events import Event

__all__ = ["DIES", "DONE", "Life", "Yard", "config_of", "fleet", "group_of"]


@dataclass(frozen=True)
class Life:
    """One generation. ``ends_s``: after its start; None: when it is told to. ``code``:
    what its rank exits with.

    ``stop_s``: from SIGTERM to its end; None: it ignores SIGTERM. ``dies_s``: from its
    end to that of its last process.
    """

    start_s: float = 0.1
    ends_s: float | None = None
    code: int = 0
    stop_s: float | None = 0.1
    dies_s: float = 0.0


DIES = Life(ends_s=0.2, code=1)
DONE = Life(ends_s=1.0, code=0)


class SimShim:
    """A shim whose processes live as planned."""

    last_stacks: Mapping[str, str] = {}
    node, local, stopping = "local", True, False
    over_at = math.inf

    def __init__(self, yard: Yard, spec: PartSpec, changed: Callable[[], None], life: Life) -> None:
        self.spec, self.life = spec, life
        self.state = UNKNOWN.with_identity_of(spec)
        self.losses: list[LogLoss] = []
        self.told: list[tuple[float, float]] = []
        self._yard = yard
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(life.start_s, self._started)
        if life.ends_s is not None:
            self._loop.call_later(life.start_s + life.ends_s, self._ended_by_itself)

    def _started(self) -> None:
        if self.state.report is None:
            self._change(main_pid=100)

    def _change(self, **changes: Any) -> None:
        self.state = self.state._replace(**changes)
        self._changed()

    def _ended_by_itself(self) -> None:
        failed = ExitReport("failed", ranks=(RankExit(0, self.life.code),))
        self.end(failed if self.life.code else ExitReport("ok"))

    def end(self, report: ExitReport) -> None:
        if self.state.report is not None:
            return
        if self.life.dies_s:
            self._loop.call_later(self.life.dies_s, self._gone)
            self._change(report=report, remains=Remains(0.0, ((7, "python slow.py"),)))
        else:
            self.state = self.state._replace(report=report)
            self._gone()

    def _gone(self) -> None:
        self._change(remains=None, gone=True)

    async def stacks(self) -> Mapping[str, str]:
        return {}

    def send_rendezvous(self, host: str, port: int) -> None: ...

    def stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        self.told.append((self._yard.now, timeout_s))
        takes_s, cut_s = self.life.stop_s, 0.0
        if takes_s is None or takes_s > timeout_s:
            takes_s = cut_s = timeout_s
        self._loop.call_later(takes_s, self.end, ExitReport("stopped", cut_s=cut_s))

    def kill(self) -> None:
        self.end(ExitReport("lost", text="the shim was killed"))

    def unheard_s(self) -> float:
        return 0.0

    def abandon(self) -> None: ...


def group_of(name: str, **changes: Any) -> GroupConfig:
    """A group, with names of what it depends on (``"a"``, ``"a:finished"``) and rules
    of its restarts."""
    depends = tuple(Dependency(*one.split(":")) for one in changes.pop("depends_on", ()))
    rules = {"initial_delay_s": 1.0, "max_delay_s": 60.0} | changes.pop("restart", {})
    return GroupConfig(
        name=name,
        command=("x",),
        cwd=Path("/"),
        launcher=changes.pop("launcher", "exec"),
        depends_on=depends,
        restart=RestartConfig(**rules),
        **changes,
    )


def config_of(*groups: GroupConfig, stop_when: tuple[str, ...] = ()) -> Config:
    run = RunConfig(name="test", state_dir=Path("/nowhere"), stop_when=stop_when)
    return Config(schema_version=1, run=run, groups={group.name: group for group in groups})


class FakeLeases:
    """The file of leases of a state folder, on a disk that may be full."""

    floor = starts = 0
    path = Path("/nowhere/leases")

    def __init__(self) -> None:
        self.written: tuple[Lease, ...] = ()
        self.problem = ""

    def reserve_generation(self, generation: int) -> None: ...

    def write_starts(self) -> None: ...

    def write(self, leases: Sequence[Lease]) -> None:
        if self.problem:
            raise OSError(errno.ENOSPC, self.problem)
        self.written = tuple(leases)


class Yard:
    """Supervisor, its state folder and coordinator in one.

    :ivar lives: of each replica, by name, its generations to come; the last one is for
        all that follow.
    :ivar on_channel: groups that are on a channel. :ivar steps: how far replicas have
        come, by name.
    :ivar syncs: what replicas are in the middle of, by name.
    """

    def __init__(self, config: Config, lives: Mapping[str, list[Life]]) -> None:
        self.lives = {name: list(plan) for name, plan in lives.items()}
        self.on_channel: set[str] = set()
        self.steps: dict[str, int] = {}
        self.syncs: dict[str, str] = {}
        self.views: dict[str, Readiness] = {}
        self.shims: dict[str, list[SimShim]] = defaultdict(list)
        self.events: list[tuple[float, Event]] = []
        self.said: list[str] = []
        self.shapes: dict[str, GroupShape] = {}
        self.draining: list[str] = []
        self.members: dict[str, dict[int, frozenset[str]]] = {}
        """Of external groups: incarnations by replica."""
        self.recovering = False
        self.forgotten: list[str] = []
        self.saved: dict[str, SavedGroup] = {}
        self.fleet: Fleet
        self.leases = FakeLeases()
        self.context = self.new_context(config)
        self.lock = 0
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._tasks: list[asyncio.Task[None]] = []
        self._scopes: list[anyio.CancelScope] = []
        self._test = asyncio.current_task()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self._loop.time() - self._began

    # ------------------------------------------------------------ what its parts share

    endpoint = identity = ""
    logs = token_file = Path("/nowhere")

    def new_context(self, config: Config) -> FleetContext:
        context = FleetContext(
            config=config,
            state=cast("StateDir", self),
            resources=Resources(),
            emit=self.emit,
            say=self.say,
            save=self.save,
            spawn=self.spawn,
            opened=cast("Coordinator", self),
            start_shim=self.start,
        )
        context.on_channel = lambda group: group in self.on_channel  # type: ignore[method-assign]  # the yard has no channels
        return context

    @property
    def config(self) -> Config:
        return self.context.config

    @property
    def resources(self) -> Resources:
        return self.context.resources

    def emit(self, event: Event) -> None:
        self.events.append((self.now, event))

    def say(self, text: str) -> None:
        self.said.append(text)

    def save(self, *, order: bool = False) -> bool:
        if "fleet" in vars(self):  # else it is being made
            self.saved = self.fleet.saved(self.now)
        return True

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.create_task(self._until_end(work))
        self._tasks.append(task)
        task.add_done_callback(self._look_at_end)

    async def _until_end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A scope ends it, as a task group does: anyio before 4.16 loses a cancellation
        by asyncio itself where a timeout ends at the same moment."""
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            await work()

    def _look_at_end(self, task: asyncio.Task[None]) -> None:
        """A bug in a replica's task must not have the test wait for ever."""
        if not task.cancelled() and task.exception() is not None and self._test is not None:
            self._test.cancel()

    def log_dir(self, group: str, replica: int, generation: int) -> Path:
        return Path("/nowhere")

    def start(self, spec: PartSpec, changed: Callable[[], None]) -> ShimHandle:
        name = f"{spec.group}/{spec.replica}"
        plan = self.lives.get(name) or self.lives.get(spec.group) or [Life()]
        born = self.shims[name]
        assert all(shim.state.gone for shim in born), "two generations of one replica at once"
        shim = SimShim(self, spec, changed, plan[min(len(born), len(plan) - 1)])
        born.append(shim)
        return cast("ShimHandle", shim)

    async def end(self) -> None:
        for scope in self._scopes:
            scope.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended  # also in place of the cancellation

    # ------------------------------------------------------------ the coordinator

    def joined(self, group: str) -> dict[int, frozenset[str]]:
        return self.members.get(group, {})

    def joins(self, name: str, *incarnations: str) -> None:
        """Members of a program that others start: all that its replica has now."""
        group, _, index = name.partition("/")
        members = self.members.setdefault(group, {})
        members.pop(int(index), None)
        if incarnations:
            members[int(index)] = frozenset(incarnations)
        self.context.wake_monitor()

    def forget(self, group: str, replica: int) -> None:
        self.forgotten.append(f"{group}/{replica}")

    def readiness(self, group: str, replica: int, generation: int, *, external: bool = False) -> Readiness:
        name = f"{group}/{replica}"
        shims = self.shims[name]
        started = replica in self.joined(group) if external else bool(shims) and shims[-1].state.main_pid is not None
        return self.views.get(name, Readiness(started, "" if started else "nobody joined"))

    def replica_ended(self, group: str, replica: int, generation: int, reason: str) -> None:
        self.syncs.pop(f"{group}/{replica}", None)

    def set_draining(self, group: str, replica: int, generation: int) -> None:
        self.draining.append(f"{group}/{replica}")

    def waits(self) -> dict[str, str]:
        return {}

    def busy(self, group: str, replica: int) -> str:
        return self.syncs.get(f"{group}/{replica}", "")

    def progress(self, group: str, replica: int) -> tuple[int, ...]:
        return (self.steps.get(f"{group}/{replica}", 0),)

    def set_group(self, group: str, shape: GroupShape) -> None:
        self.shapes[group] = shape

    # ------------------------------------------------------------ what tests ask

    def moves(self, name: str = "") -> list[tuple[float, str]]:
        """Time and new state of each step of a replica (or ``name state`` of all), to
        tenths of a second."""
        steps = [(at, one) for at, one in self.events if isinstance(one, Transition) and one.after != one.before]
        named = [(at, f"{one.group}/{one.replica}", one.after) for at, one in steps]
        return [(round(at, 1), state if name else f"{who} {state}") for at, who, state in named if name in ("", who)]

    @property
    def said_of_groups(self) -> list[str]:
        """What was said, without the lines about single replicas."""
        return [line for line in self.said if "/" not in line.partition(" ")[0]]

    def states(self) -> dict[str, str]:
        return {replica.name: replica.life.state for replica in self.fleet.all()}

    def told_at(self, name: str, generation: int = 0) -> list[tuple[float, float]]:
        """When a shim was told to stop, and how long after that it may kill."""
        return self.shims[name][generation].told


@asynccontextmanager
async def fleet(
    *groups: GroupConfig,
    lives: Mapping[str, list[Life]] | None = None,
    on_channel: set[str] | None = None,
    saved: Mapping[str, SavedGroup] | None = None,
    stop_when: tuple[str, ...] = (),
) -> AsyncIterator[tuple[Fleet, Yard]]:
    """A fleet that runs, until the end of the block. There is no jitter."""
    config = config_of(*groups, stop_when=stop_when)
    yard = Yard(config, lives or {})
    yard.on_channel = on_channel or set()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(group_module, "Restarts", partial(Restarts, rng=_NoJitter()))
    try:
        made = yard.fleet = Fleet(yard.context, saved=saved, wall=0.0)
        made.start()
        yield made, yard
        if not made.draining:
            # In a task: what the test has spawned comes first, also where wait_for
            # makes none (from Python 3.12 on).
            await asyncio.wait_for(asyncio.create_task(made.drain()), 1000)
    finally:
        monkeypatch.undo()
        await yard.end()


class _NoJitter(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return 0.0

"""A replica's life on fake shims, step by step.

Covers: supervisor/fleet/context.py, supervisor/fleet/generation_lifecycle.py,
supervisor/fleet/replica.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from replicas import errors
from replicas.config.structs import (
    Config,
    GroupConfig,
    HealthConfig,
    LogsConfig,
    ResourcesConfig,
    RestartConfig,
    RunConfig,
)
from replicas.coordinator import Coordinator, GroupShape, Readiness
from replicas.core.lives.lifecycle import Transition
from replicas.core.lives.placement import Share
from replicas.core.lives.restarts import Restarts
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.agent.shim_process import base_environment
from replicas.supervisor.fleet import generation_lifecycle
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.fleet.replica import Replica
from replicas.supervisor.fleet.resources import Resources
from replicas.supervisor.state.run_state import ShimRecord
from replicas.supervisor.state.state import StateDir
from replicas.supervisor.wire.orders import PartSpec
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, LogLoss, RankExit, Remains
from replicas.telemetry.events import Event, HeldUp, ReplicaExited
from replicas.telemetry.words import routine
from tests.support.waits import wait_until

OK = ExitReport("ok")


def config(tmp_path: Path, **changes: object) -> GroupConfig:
    values: dict[str, object] = {"name": "a", "command": ("x",), "cwd": tmp_path, "launcher": "exec", **changes}
    return GroupConfig(**values)  # type: ignore[arg-type]  # the tests give what the struct asks for


class FakeShim:
    """A shim that does what the test says."""

    node, local, stopping = "here", True, False
    over_at = math.inf

    def __init__(self, spec: PartSpec, changed: Callable[[], None]) -> None:
        self.spec = spec
        self.state = UNKNOWN
        self.told: list[object] = []
        self.losses: list[LogLoss] = []
        self.last_stacks: dict[str, str] = {}
        self._changed = changed

    def started(self) -> None:
        self.now(main_pid=100 + self.spec.node)

    def ended(self, report: ExitReport, *, gone: bool = True) -> None:
        self.now(report=report, gone=gone)

    def now(self, **changes: Any) -> None:
        self.state = self.state._replace(**changes)
        self._changed()

    def send_rendezvous(self, host: str, port: int) -> None:
        self.told.append((host, port))

    def stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        self.told.append(timeout_s)

    async def stacks(self) -> Mapping[str, str]:
        return {f"a/0/{self.spec.node}": "here"}

    def kill(self) -> None:
        self.told.append("kill")

    def unheard_s(self) -> float:
        return 0.0

    def abandon(self) -> None:
        self.told.append("abandon")


class FakeWorld:
    """Supervisor and coordinator in one."""

    endpoint = ""

    def __init__(self, folder: Path, *, on_channel: bool) -> None:
        run = RunConfig(name="test", state_dir=folder / "state")
        self.config = Config(schema_version=1, run=run, groups={}, logs=LogsConfig(keep=7))
        self.resources = Resources("here")
        self.state = StateDir(folder / "state", "test")
        self.view = Readiness(False, "nobody joined")
        self.shims: list[FakeShim] = []
        self.ended: list[tuple[str, int, int, str]] = []
        self.failed = asyncio.Event()
        self.open = True
        self.full = ""
        """The problem of the disk."""
        self.at_work = ""
        self.on_draining: Callable[[], None] = lambda: None
        self.fallen: list[str] = []
        self.said: list[str] = []
        self.moves: list[Transition] = []
        self.exits: list[ReplicaExited] = []
        self.held_up: list[HeldUp] = []
        self.context = FleetContext(
            config=self.config,
            state=self.state,
            resources=self.resources,
            emit=self.emit,
            say=self.said.append,
            save=self.save,
            spawn=cast("Any", None),
            opened=cast("Coordinator", self),
            start_shim=self.start,
        )
        self.context.on_channel = lambda group: on_channel  # type: ignore[method-assign]

    def save(self, *, order: bool = False) -> bool:
        self.state.run_state._problem = self.full
        return not self.full

    def readiness(self, group: str, replica: int, generation: int) -> Readiness:
        return self.view

    def replica_ended(self, group: str, replica: int, generation: int, reason: str) -> None:
        self.ended.append((group, replica, generation, reason))

    def size(self, group: str) -> int:
        return 1

    def waits_for(self, group: str, replica: int, *, first: bool) -> str:
        return "" if self.open or not first else "for b, 2 GPUs (0 free)"

    def restart_group_with(self, group: str, replica: int, text: str) -> None:
        self.fallen.append(text)

    def progressed(self, group: str, replica: int) -> bool | None:
        return None

    def emit(self, event: Event) -> None:
        if isinstance(event, ReplicaExited):
            self.exits.append(event)
        if isinstance(event, HeldUp):
            self.held_up.append(event)

    def set_group(self, group: str, shape: GroupShape) -> None: ...

    def set_draining(self, group: str, replica: int, generation: int) -> None:
        self.on_draining()

    def busy(self, group: str, replica: int) -> str:
        return self.at_work

    def progress(self, group: str, replica: int) -> tuple[int, ...]:
        return ()

    def on_transition(self, transition: Transition) -> None:
        self.moves.append(transition)
        if transition.after == "failed":
            self.failed.set()

    def start(self, spec: PartSpec, changed: Callable[[], None]) -> ShimHandle:
        self.shims.append(FakeShim(spec, changed))
        return cast("ShimHandle", self.shims[-1])


@asynccontextmanager
async def living(
    tmp_path: Path, *, on_channel: bool = False, full: str = "", **changes: object
) -> AsyncIterator[tuple[Replica, FakeWorld]]:
    world = FakeWorld(tmp_path, on_channel=on_channel)
    world.full = full
    world.state.acquire()
    group = config(tmp_path, restart=RestartConfig(max_restarts=1, initial_delay_s=0.0), **changes)
    shares = tuple(Share(group=group.name, node="here", gpus=(str(node),)) for node in range(group.nnodes))
    asks = msgspec.structs.replace(group, resources=ResourcesConfig(gpus=1))
    world.resources.plan(msgspec.structs.replace(world.config, groups={"a": asks}), Machine())
    world.resources.keep("a", 0, shares)
    replica = Replica(world.context, group, 0, world, Restarts(group.restart))
    task = asyncio.create_task(replica.run())
    try:
        await settle()
        yield replica, world
        replica.stop()
        for shim in world.shims:
            shim.ended(shim.state.report or ExitReport("stopped"))
        await asyncio.wait_for(task, 30)
    finally:
        task.cancel()
        world.state.release()


def state(replica: Replica) -> str:
    return replica.life.state


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.anyio
async def test_two_nodes_are_introduced_and_ready_when_both_have_started(tmp_path: Path) -> None:
    async with living(tmp_path, nnodes=2) as (replica, world):
        zero, one = world.shims
        zero.started()
        zero.state = zero.state._replace(rendezvous=("127.0.0.1", 5))
        await settle()
        assert one.told == [("127.0.0.1", 5)]
        replica.check(time.monotonic())
        assert state(replica) == "starting"
        one.started()
        replica.check(time.monotonic())
        assert state(replica) == "ready"
        assert replica.status(time.monotonic()).pid == 100


@pytest.mark.anyio
async def test_a_ready_replica_says_why_it_did_not_load_a_newer_version(tmp_path: Path) -> None:
    async with living(tmp_path, on_channel=True) as (replica, world):
        world.shims[0].started()
        world.view = Readiness(True, "policy: version 2 was not loaded: no weights for b", versions={"policy": 1})
        replica.check(time.monotonic())
        found = replica.status(time.monotonic())
        assert (found.state, found.reason) == ("ready", "policy: version 2 was not loaded: no weights for b")


@pytest.mark.anyio
async def test_a_new_generation_starts_only_when_the_old_one_is_gone(tmp_path: Path) -> None:
    async with living(tmp_path, nnodes=2) as (replica, world):
        zero, one = world.shims
        zero.ended(ExitReport("failed", ranks=(RankExit(0, 3),)))
        await settle()
        assert one.told == [10.0]
        assert world.ended == []
        one.ended(ExitReport("stopped"), gone=False)
        await settle()
        assert world.ended == [("a", 0, 1, "rank 0 exited with code 3")]
        assert world.fallen == ["rank 0 exited with code 3"]
        (exit_,) = world.exits
        assert (exit_.outcome, exit_.reason, exit_.ranks[0].code) == ("failed", "rank 0 exited with code 3", 3)
        assert len(world.shims) == 2
        one.ended(ExitReport("stopped"))
        await settle()
        assert len(world.shims) == 4
        assert replica.life.restarts == {"exit": 1}
        for shim in world.shims[2:]:
            shim.ended(ExitReport("lost", text="gone"))
        await settle()
        assert state(replica) == "failed"
        assert replica.life.reason == "gone; all restarts are used (1 in 600 s)"


HEALTH = HealthConfig(start_timeout_s=10, heartbeat_timeout_s=20, progress_timeout_s=30, load_deadline_s=40)
SICK = {
    "start_timeout": (False, Readiness(False, "rank 0 has not joined"), 11),
    "heartbeat_timeout": (True, Readiness(True, heartbeat_age_s=21), 0),
    "progress_timeout": (True, Readiness(True, heartbeat_age_s=1, progressed_s=31), 0),
    "load_failed": (True, Readiness(False, "half", heartbeat_age_s=1, partial="half"), 0),
}


@pytest.mark.anyio
@pytest.mark.parametrize("reason", SICK)
async def test_a_sick_replica_is_replaced(tmp_path: Path, reason: str) -> None:
    first_ready, view, later = SICK[reason]
    async with living(tmp_path, on_channel=True, health=HEALTH) as (replica, world):
        now = time.monotonic()
        world.view = Readiness(first_ready, "wait")
        replica.check(now)
        world.view = view
        replica.check(now)
        replica.check(now + later)
        assert state(replica) == "draining"
        assert world.shims[0].told == [10.0]
        world.shims[0].ended(OK)  # it ends well when asked to, which does not make it well
        await settle()
        assert replica.life.restarts == {reason: 1}
        assert replica.life.generation == 2


@pytest.mark.anyio
async def test_a_replica_that_does_not_load_in_time_is_replaced_unless_it_left(tmp_path: Path) -> None:
    async with living(tmp_path, on_channel=True, health=HEALTH) as (replica, world):
        now = time.monotonic()
        for left in (True, False):
            world.view = Readiness(True)
            replica.check(now)
            world.view = Readiness(False, "has version 1")
            replica.check(now)
            if left:
                replica.member_lost(0, "left")
            assert state(replica) == "starting"
            replica.check(now + 41)
            assert state(replica) == ("starting" if left else "draining")


@pytest.mark.anyio
@pytest.mark.parametrize("reported", [True, False])
async def test_a_kill_is_one_change_with_its_cause(tmp_path: Path, *, reported: bool) -> None:
    """The coordinator sees it first. A report that does not come is not awaited."""
    async with living(tmp_path, on_channel=True) as (replica, world):
        world.view = Readiness(True)
        replica.check(time.monotonic())
        world.moves.clear()
        world.view = Readiness(False, "policy: rank 0 is lost")
        replica.member_lost(0, "exited")
        replica.check(time.monotonic())
        assert state(replica) == "ready"
        if reported:
            world.shims[0].ended(ExitReport("failed", ranks=(RankExit(0, -9),)))
            await settle()
        else:
            replica.check(time.monotonic() + 3.0)
        told = [(one.before, one.after, one.reason, one.resume_s) for one in world.moves]
        killed = ("ready", "backoff", "rank 0 was killed by SIGKILL", 0.0)
        assert told[0] == (killed if reported else ("ready", "starting", "policy: rank 0 is lost", None))
        told_of_it: list[Event] = [*world.exits, *world.moves]
        assert [one for one in told_of_it if not routine(one)] == world.moves


@pytest.mark.anyio
async def test_a_frozen_member_ends_its_replica(tmp_path: Path) -> None:
    async with living(tmp_path, on_channel=True) as (replica, _):
        replica.member_lost(1, "exited")
        assert state(replica) == "starting"
        replica.member_lost(1, "lease")
        assert state(replica) == "draining"
        assert replica.life.reason == "rank 1 sent no heartbeat for 30 s"


@pytest.mark.anyio
async def test_a_shim_that_does_not_answer_is_killed_and_its_replica_replaced(tmp_path: Path) -> None:
    async with living(tmp_path, nnodes=2) as (replica, world):
        zero, one = world.shims
        one.now(silent_s=29.0)
        replica.check(time.monotonic())
        assert state(replica) == "starting"
        one.now(silent_s=31.0)
        replica.check(time.monotonic())
        assert state(replica) == "draining"
        assert (zero.told, one.told) == ([10.0], [10.0, "kill"])
        for shim in (zero, one):
            shim.ended(ExitReport("lost", text="the shim was killed"))
        await settle()
        assert replica.life.restarts == {"lost": 1}
        assert replica.current.last_exit == ""
        assert "node 1" in replica.life.reason


@pytest.mark.anyio
async def test_a_shim_that_does_not_end_is_killed_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.supervisor.fleet.generation.STUCK_S", 0.05)
    monkeypatch.setattr("replicas.supervisor.fleet.generation.PRESS_INTERVAL_S", 0.05)
    async with living(tmp_path, stop_timeout_s=0.0) as (replica, world):
        shim = world.shims[0]
        shim.started()
        replica.restart()
        await wait_until(lambda: shim.told.count("kill") > 3, "it is killed again")
        assert shim.told[0] == 0.0
        assert (state(replica), len(world.shims)) == ("draining", 1)
        shim.ended(ExitReport("lost", text="the shim was killed"))
        await wait_until(lambda: len(world.shims) == 2, "the next generation")
        assert replica.life.restarts == {"requested": 1}


@pytest.mark.anyio
async def test_a_process_that_takes_long_to_die_is_named_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.supervisor.fleet.generation.STUCK_S", 0.05)
    monkeypatch.setattr("replicas.supervisor.fleet.generation.PRESS_INTERVAL_S", 0.05)
    async with living(tmp_path) as (replica, world):
        shim = world.shims[0]
        shim.started()
        replica.check(time.monotonic())
        remains = Remains(time.time() - 60.0, ((7, "python serve.py"),))
        shim.now(remains=remains)
        shim.ended(ExitReport("lost", text="the shim was killed"), gone=False)
        await wait_until(lambda: state(replica) == "draining", "it drains")
        text = "the shim was killed; held up by process 7 (python serve.py): not dead 60 s after SIGKILL"
        assert replica.life.reason == text
        shim.now(remains=Remains(remains.since - 10.0, ((7, "python serve.py"), (8, ""))))
        await wait_until(lambda: len(world.held_up) == 2, "it is held up again")
        assert [(one.pid, one.holder) for one in world.held_up] == [
            (7, "process 7 (python serve.py)"),
            (8, "process 8 (dying)"),
        ]
        assert replica.status(0.0).reason.endswith("process 8 (dying): not dead 70 s after SIGKILL")
        await asyncio.sleep(0.2)  # several times the limits above
        assert "kill" not in shim.told, "it does what can be done"
        assert (state(replica), len(world.shims)) == ("draining", 1)
        shim.now(gone=True)
        await wait_until(lambda: len(world.shims) == 2, "the next generation")
        assert replica.life.restarts == {"lost": 1}


@pytest.mark.anyio
async def test_requests_in_each_state(tmp_path: Path) -> None:
    async with living(tmp_path) as (replica, world):
        world.shims[0].started()
        replica.restart()
        assert state(replica) == "draining"
        world.shims[0].ended(ExitReport("stopped"))
        await settle()
        assert (replica.life.generation, replica.life.restarts) == (2, {"requested": 1})
        world.shims[1].ended(OK)
        await settle()
        assert state(replica) == "finished"
        world.open = False
        replica.restart()
        await settle()
        assert state(replica) == "pending"
        assert replica.status(time.monotonic()).reason == "waits for b, 2 GPUs (0 free)"
        replica.stop()
        assert state(replica) == "drained"
        with pytest.raises(errors.UsageError, match="replica a/0 is being stopped for good"):
            replica.restart()


@pytest.mark.anyio
async def test_stopped_by_hand_it_rests_until_it_is_asked_to_start(tmp_path: Path) -> None:
    async with living(tmp_path, on_channel=True) as (replica, world):
        world.shims[0].started()
        world.at_work = "it loads version 1 of policy"
        replica.halt()
        replica.check(time.monotonic())
        assert (state(replica), world.shims[0].told) == ("draining", [])
        world.at_work = ""
        replica.on_sync_over()
        assert world.shims[0].told == [10.0]
        world.shims[0].ended(ExitReport("stopped"))
        await settle()
        assert (state(replica), replica.halted, replica.resting) == ("drained", True, True)
        assert replica.current.last_exit == "stopped"
        replica.restart()
        await settle()
        assert (state(replica), replica.life.generation, len(world.shims)) == ("starting", 2, 2)


@pytest.mark.anyio
async def test_a_channel_that_is_idle_at_once_cuts_no_work_of_another(tmp_path: Path) -> None:
    """The coordinator reports it while it is told of the drain."""
    async with living(tmp_path, on_channel=True, drain_timeout_s=30.0) as (replica, world):
        world.shims[0].started()
        world.at_work = "an operation on gossip has not ended"
        world.on_draining = replica.on_sync_over
        replica.halt()
        said = ["a/0: stopping it after its present work: an operation on gossip has not ended (30 s at most)"]
        assert (world.shims[0].told, world.said) == ([], said)
        replica.check(time.monotonic() + 31.0)
        assert world.shims[0].told == [10.0]
        assert world.said[1:] == [
            "a/0: stopping it now, as drain_timeout is over: an operation on gossip has not ended"
        ]


@pytest.mark.anyio
@pytest.mark.parametrize(("request_", "end"), [("halt", ("drained", "stopped")), ("fail", ("failed", "b/0 failed"))])
async def test_one_that_has_ended_waits_for_no_process(tmp_path: Path, request_: str, end: tuple[str, str]) -> None:
    """The time of its SIGKILL may still be to come."""
    async with living(tmp_path) as (replica, world):
        world.shims[0].started()
        replica.halt() if request_ == "halt" else replica.fail("b/0 failed")
        assert "get SIGKILL" in replica.status(time.monotonic()).reason
        world.shims[0].ended(ExitReport("stopped"))
        await settle()
        found = replica.status(time.monotonic())
        assert (found.state, found.reason, replica.waits) == (*end, "")


@pytest.mark.anyio
@pytest.mark.parametrize("asked", [True, False])
async def test_ranks_that_may_still_say_goodbye_are_not_declared_lost(tmp_path: Path, asked: bool) -> None:
    """Children of the main process that end after it, as they were asked to."""
    async with living(tmp_path) as (replica, world):
        world.shims[0].started()
        if asked:
            replica.halt()
        world.shims[0].ended(ExitReport("stopped" if asked else "failed", ranks=(RankExit(0, 1),)), gone=False)
        await settle()
        assert [reason for *_, reason in world.ended] == ([] if asked else ["rank 0 exited with code 1"])
        world.shims[0].now(gone=True)
        await settle()
        assert [reason for *_, reason in world.ended] == (["stopped"] if asked else ["rank 0 exited with code 1"])


@pytest.mark.anyio
async def test_a_change_of_mind_while_it_drains(tmp_path: Path) -> None:
    async with living(tmp_path, on_channel=True) as (replica, world):
        world.at_work = "it loads version 1 of policy"
        replica.halt()
        replica.restart()
        world.at_work = ""
        replica.check(time.monotonic())
        world.shims[0].ended(ExitReport("stopped"))
        await settle()
        assert (state(replica), replica.life.restarts) == ("starting", {"requested": 1})


@pytest.mark.anyio
@pytest.mark.parametrize("request_", ["stop", "halt"])
async def test_one_that_is_adopted_and_stopped_at_once_ends(tmp_path: Path, request_: str) -> None:
    """Its supervisor was killed while it was being scaled down, or stopped by hand."""
    world = FakeWorld(tmp_path, on_channel=False)
    group = config(tmp_path)
    replica = Replica(world.context, group, 0, world, Restarts(group.restart))
    record = ShimRecord(nonce="1", group="a", replica=0, generation=3)
    shim = world.start(cast("PartSpec", None), lambda: None)
    replica.adopt([record], [shim])
    getattr(replica, request_)()
    task = asyncio.create_task(replica.run())
    await settle()
    assert (state(replica), world.shims[0].told, len(world.shims)) == ("draining", [10.0], 1)
    world.shims[0].ended(ExitReport("stopped"))
    shim.changed()
    await settle()
    assert (state(replica), replica.halted, replica.over.is_set()) == (
        "drained",
        request_ == "halt",
        request_ == "stop",
    )
    task.cancel()


@pytest.mark.anyio
async def test_a_shim_that_cannot_be_started_ends_those_of_the_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_for_one(world: FakeWorld, spec: PartSpec, changed: Callable[[], None]) -> ShimHandle:
        if spec.node == 1 and spec.generation == 1:
            raise OSError("no memory")
        return start(world, spec, changed)

    start = FakeWorld.start
    monkeypatch.setattr(FakeWorld, "start", fails_for_one)
    async with living(tmp_path, nnodes=2) as (replica, world):
        (shim,) = world.shims
        assert (shim.told, world.fallen) == ([0.0], ["its shim, which starts the ranks, cannot be started: no memory"])
        shim.ended(ExitReport("stopped"))
        await settle()
        assert (replica.life.restarts, len(world.shims)) == ({"lost": 1}, 3)


@pytest.mark.anyio
async def test_nothing_starts_that_the_disk_has_not_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, says for what, and spends no restart."""
    monkeypatch.setattr(generation_lifecycle, "DISK_AGAIN_S", 0.01)
    async with living(tmp_path, full="No space left on device") as (replica, world):
        await asyncio.sleep(0.03)
        assert world.shims == []
        assert state(replica) == "starting"
        reason = replica.status(time.monotonic()).reason
        problem = f"{world.state.run_state.path}: No space left on device"
        assert reason == f"waits until the state folder can be written ({problem})"
        world.full = ""
        await wait_until(lambda: bool(world.shims), "a generation")
        world.shims[0].started()
        replica.check(time.monotonic())
        assert (state(replica), replica.life.generation, replica.life.restarts) == ("ready", 1, {})
        assert replica.status(time.monotonic()).reason == ""


@pytest.mark.anyio
async def test_one_that_is_stopped_before_its_turn_is_never_started(tmp_path: Path) -> None:
    world, group, turns = FakeWorld(tmp_path, on_channel=True), config(tmp_path), asyncio.Semaphore(0)
    world.context.turns = turns
    replica = Replica(world.context, group, 0, world, Restarts(group.restart))
    task = asyncio.create_task(replica.run())
    await settle()
    replica.halt()
    assert state(replica) == "draining"
    turns.release()
    await settle()
    assert (state(replica), world.shims, replica.current.last_exit) == ("drained", [], "stopped")
    replica.stop()
    await asyncio.wait_for(task, 30)


@pytest.mark.anyio
async def test_what_an_earlier_supervisor_was_ending_starts_again_at_no_cost(tmp_path: Path) -> None:
    async with living(tmp_path) as (replica, world):
        world.shims[0].stopping = True
        world.shims[0].ended(ExitReport("stopped"))
        await settle()
        assert (replica.life.restarts, world.exits[0].reason) == (
            {"requested": 1},
            "an earlier supervisor told it to stop",
        )


@pytest.mark.anyio
async def test_a_node_that_ends_well_leaves_the_health_of_the_others_as_it_is(tmp_path: Path) -> None:
    async with living(tmp_path, on_channel=True, nnodes=2, health=HEALTH) as (replica, world):
        now = time.monotonic()
        world.view = Readiness(True)
        replica.check(now)
        world.shims[0].ended(OK)
        await settle()
        world.view = Readiness(True, heartbeat_age_s=21)
        replica.check(now)
        assert (state(replica), world.shims[1].told) == ("draining", [10.0])


@pytest.mark.anyio
async def test_only_nodes_that_run_have_stacks(tmp_path: Path) -> None:
    async with living(tmp_path, nnodes=3) as (replica, world):

        async def never() -> Mapping[str, str]:
            raise TimeoutError

        world.shims[0].ended(OK)
        world.shims[1].stacks = never  # type: ignore[method-assign]  # its shim is frozen
        assert await replica.stacks() == {"a/0, node 1": "their shim does not answer", "a/0/2": "here"}


@pytest.mark.anyio
async def test_stacks_of_all_nodes(tmp_path: Path) -> None:
    async with living(tmp_path, nnodes=2) as (replica, world):
        assert await replica.stacks() == {"a/0/0": "here", "a/0/1": "here"}
        assert [shim.spec.env["CUDA_VISIBLE_DEVICES"] for shim in world.shims] == ["0", "1"]


@pytest.mark.anyio
async def test_a_rank_gets_its_own_identity_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "REPLICAS_RUN", "REPLICA_ID"):
        monkeypatch.setenv(name, "outer")
    monkeypatch.setenv("KEPT", "yes")
    async with living(tmp_path, env={"MINE": "1", "REPLICAS_RUN": "mine"}) as (_, world):
        env = base_environment() | world.shims[0].spec.env
    assert "RANK" not in env
    assert "MASTER_ADDR" not in env
    assert "TORCHELASTIC_RUN_ID" not in env
    wanted = {"REPLICAS_RUN": "test", "REPLICAS_GROUP": "a", "REPLICA_ID": "0", "REPLICA_NUM": "1"}
    assert {**wanted, "REPLICAS_GENERATION": "1", "KEPT": "yes", "MINE": "1"}.items() <= env.items()

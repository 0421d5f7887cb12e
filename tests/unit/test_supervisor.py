"""The supervisor's pure parts, and a replica's life on fake shims."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from replicas import errors
from replicas.config import GroupConfig, HealthConfig, RestartConfig
from replicas.coordinator import Readiness
from replicas.core.budget import RestartBudget
from replicas.core.lifecycle import Event, Transition
from replicas.supervisor import orders
from replicas.supervisor.causes import Cause, verdict
from replicas.supervisor.commands import resolve_command, tail
from replicas.supervisor.group import start_levels
from replicas.supervisor.node import rank_environment
from replicas.supervisor.orders import ExitReport, NodeSpec, RankExit
from replicas.supervisor.replica import Replica
from replicas.supervisor.state import AlreadySupervised, StateDir
from replicas.supervisor.words import line

OK = ExitReport("ok")


def config(tmp_path: Path, **changes: object) -> GroupConfig:
    values: dict[str, object] = {"name": "a", "command": ("x",), "cwd": tmp_path, "launcher": "exec", **changes}
    return GroupConfig(**values)  # type: ignore[arg-type]  # the tests give what the struct asks for


# ---------------------------------------------------------------- reports


def test_the_first_failure_counts_and_not_those_that_torchrun_stopped() -> None:
    stopped = RankExit(0, -signal.SIGTERM, at=1.0)
    second = RankExit(3, 1, text="ValueError: x", at=3.0)
    first = RankExit(2, -signal.SIGSEGV, text="Fatal Python error", at=2.0)
    reports = [ExitReport("failed", ranks=(second,)), ExitReport("failed", ranks=(first, stopped)), ExitReport("lost")]
    assert verdict(reports) == Cause("signal", "rank 2 was killed by SIGSEGV: Fatal Python error")
    assert verdict([OK, ExitReport("failed", ranks=(second,))]) == Cause(
        "exit", "rank 3 exited with code 1: ValueError: x"
    )
    killed = RankExit(1, -signal.SIGKILL, text="step 41", at=1.0)
    assert verdict([ExitReport("failed", ranks=(killed,))]) == Cause("signal", "rank 1 was killed by SIGKILL")
    assert verdict([OK, ExitReport("lost", text="torchrun died")]) == Cause("lost", "torchrun died")
    assert verdict([OK, OK]) is None


def test_messages_keep_their_content_and_others_are_refused() -> None:
    spec = NodeSpec("r", "g", 0, 1, 0, 2, 4, "exec", ("a", "b"), {"K": "v"}, "/", "/l", 1.5, "n")
    assert NodeSpec.of(json.loads(orders.encode(spec.message()))["spec"]) == spec
    report = ExitReport("failed", "text", (RankExit(1, -9, 5, "words", 2.0),))
    assert ExitReport.of(json.loads(orders.encode(report.message()))["report"]) == report
    for bad in (b"[]", b'{"type": 1}', b"{}"):
        with pytest.raises(ValueError, match="not a message"):
            orders.decode(bad)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        theirs.close()
        assert orders.send(ours, {"type": "x"}) is False
        assert orders.receive(ours) is None


def test_commands_of_python_run_in_this_interpreter() -> None:
    assert resolve_command(["train.py", "--x"]) == [sys.executable, "-u", "train.py", "--x"]
    assert resolve_command(["-m", "pkg"]) == [sys.executable, "-u", "-m", "pkg"]
    assert resolve_command(["vllm", "serve"]) == ["vllm", "serve"]


def test_tail_is_the_last_line_with_something_in_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("x" * 5000 + "\nTraceback\n  ValueError: boom  \n\n \n")
    assert tail(log) == "ValueError: boom"


# ---------------------------------------------------------------- config, environment, words, state


def test_groups_start_after_those_they_depend_on(tmp_path: Path) -> None:
    groups = {
        name: config(tmp_path, name=name, depends_on=deps) for name, deps in {"c": ("b",), "a": (), "b": ("a",)}.items()
    }
    assert start_levels(groups) == [["a"], ["b"], ["c"]]
    with pytest.raises(errors.UsageError, match="cycle"):
        start_levels({"a": config(tmp_path, depends_on=("a",))})


def test_a_rank_gets_its_own_identity_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "REPLICAS_RUN", "REPLICA_ID"):
        monkeypatch.setenv(name, "outer")
    monkeypatch.setenv("KEPT", "yes")
    env = rank_environment(config(tmp_path, env={"MINE": "1"}), 2, 3, replicas=4, shared={"REPLICAS_RUN": "inner"})
    assert "RANK" not in env
    assert "MASTER_ADDR" not in env
    assert "TORCHELASTIC_RUN_ID" not in env
    wanted = {"REPLICAS_RUN": "inner", "REPLICAS_GROUP": "a", "REPLICA_ID": "2", "REPLICA_NUM": "4"}
    assert {**wanted, "REPLICAS_GENERATION": "3", "KEPT": "yes", "MINE": "1"}.items() <= env.items()


def test_lines_name_the_log() -> None:
    step = Transition(
        group="a", replica=1, generation=2, event=Event.RETRY, before="ready", after="backoff", reason="rank 0 died"
    )
    text = line(step, resume_in_s=1.5, logs=Path("/run/logs"))
    assert text == "a/1: rank 0 died; starting again in 1.5 s; logs: /run/logs/a/1/gen-2"


def test_one_supervisor_of_a_state_folder(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path / "s", "r"), StateDir(tmp_path / "s", "r")
    first.acquire()
    with pytest.raises(AlreadySupervised, match=f'run "r" is already supervised by process {os.getpid()}'):
        second.acquire()
    first.write(endpoint="127.0.0.1:1", token="secret")
    assert first.token_file.stat().st_mode & 0o777 == 0o600
    assert json.loads(first.endpoint_file.read_text()) == {"endpoint": "127.0.0.1:1", "pid": os.getpid(), "run": "r"}
    (first.logs / "old").touch()
    first.release()
    assert not first.token_file.exists()
    assert not first.endpoint_file.exists()
    second.acquire()
    assert (tmp_path / "s" / "logs.previous" / "old").exists()
    assert not list(second.logs.iterdir())
    second.release()


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.UsageError, match=r"cannot use the state folder .*file/run: Not a directory"):
        StateDir(tmp_path / "file" / "run", "r").acquire()


# ---------------------------------------------------------------- a replica on fake shims


class FakeShim:
    """A shim that does what the test says."""

    def __init__(self, spec: NodeSpec, changed: Callable[[], None], lock: int) -> None:
        self.spec = spec
        self.main_pid: int | None = None
        self.rendezvous: tuple[str, int] | None = None
        self.report: ExitReport | None = None
        self.gone = asyncio.Event()
        self.swept = True
        self.told: list[object] = []
        self.silence_s = 0.0
        self._changed = changed

    def started(self) -> None:
        self.main_pid = 100 + self.spec.node
        self._changed()

    def ended(self, report: ExitReport, *, gone: bool = True) -> None:
        self.report = report
        if gone:
            self.gone.set()
        self._changed()

    def meet(self, host: str, port: int) -> None:
        self.told.append((host, port))

    def stop(self, timeout_s: float) -> None:
        self.told.append(timeout_s)

    def kill(self) -> None:
        self.told.append("kill")

    def silent_s(self, now: float) -> float:
        return self.silence_s

    def abandon(self) -> None:
        self.told.append("abandon")


class FakeWorld:
    """Supervisor and coordinator in one."""

    run = "test"

    def __init__(self, folder: Path, *, on_channel: bool) -> None:
        self.state = StateDir(folder / "state", "test")
        self.view = Readiness(False, "nobody joined")
        self.shims: list[FakeShim] = []
        self.ended: list[tuple[str, int, int, str]] = []
        self.failed = asyncio.Event()
        self.open = True
        self._channel = on_channel

    @property
    def overseer(self) -> FakeWorld:
        return self

    def readiness(self, group: str, replica: int, generation: int) -> Readiness:
        return self.view

    def replica_ended(self, group: str, replica: int, generation: int, reason: str) -> None:
        self.ended.append((group, replica, generation, reason))

    def environment(self) -> Mapping[str, str]:
        return {}

    def size(self, group: str) -> int:
        return 1

    def may_start(self, group: str) -> bool:
        return self.open

    def on_channel(self, group: str) -> bool:
        return self._channel

    def moved(self, transition: Transition, words: str) -> None:
        if transition.after == "failed":
            self.failed.set()

    def start(self, spec: NodeSpec, changed: Callable[[], None], lock: int) -> FakeShim:
        self.shims.append(FakeShim(spec, changed, lock))
        return self.shims[-1]


@asynccontextmanager
async def living(
    tmp_path: Path, *, on_channel: bool = False, **changes: object
) -> AsyncIterator[tuple[Replica, FakeWorld]]:
    world = FakeWorld(tmp_path, on_channel=on_channel)
    world.state.acquire()
    group = config(tmp_path, restart=RestartConfig(max_restarts=1, initial_delay_s=0.0), **changes)
    replica = Replica(group, 0, world, RestartBudget(group.restart), start_shim=world.start)
    task = asyncio.create_task(replica.run())
    try:
        await settle()
        yield replica, world
        replica.stop()
        for shim in world.shims:
            shim.ended(shim.report or ExitReport("stopped"))
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
        zero.rendezvous = ("127.0.0.1", 5)
        await settle()
        assert one.told == [("127.0.0.1", 5)]
        replica.check(time.monotonic())
        assert state(replica) == "starting"
        one.started()
        replica.check(time.monotonic())
        assert state(replica) == "ready"
        assert replica.status(time.monotonic()).pid == 100


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
        assert len(world.shims) == 2
        one.ended(ExitReport("stopped"))
        await settle()
        assert len(world.shims) == 4
        assert replica.life.restarts == {"exit": 1}
        for shim in world.shims[2:]:
            shim.ended(ExitReport("lost", text="gone"))
        await settle()
        assert state(replica) == "failed"
        assert replica.life.reason == "gone; no restart is left of 1 in 600 s"


HEALTH = HealthConfig(start_timeout_s=10, heartbeat_timeout_s=20, progress_timeout_s=30, load_deadline_s=40)
SICK = {
    "start_timeout": (False, Readiness(False, "rank 0 has not joined"), 11),
    "heartbeat_timeout": (True, Readiness(True, heartbeat_age_s=21), 0),
    "progress_timeout": (True, Readiness(True, heartbeat_age_s=1, progressed_s=31), 0),
    "load_timeout": (True, Readiness(False, "half", heartbeat_age_s=1, partial=True), 0),
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
        one.silence_s = 29.0
        replica.check(time.monotonic())
        assert state(replica) == "starting"
        one.silence_s = 31.0
        replica.check(time.monotonic())
        assert state(replica) == "draining"
        assert (zero.told, one.told) == ([10.0], [10.0, "kill"])
        for shim in (zero, one):
            shim.ended(ExitReport("lost", text="the shim was killed"))
        await settle()
        assert replica.life.restarts == {"lost": 1}
        assert replica.last_exit == ""
        assert replica.life.reason == "the shim of node 1 did not answer for 30 s"


@pytest.mark.anyio
async def test_a_shim_that_does_not_end_is_killed_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.supervisor.replica.STUCK_S", 0.05)
    async with living(tmp_path, stop_timeout_s=0.0) as (replica, world):
        world.shims[0].started()
        replica.restart()
        await asyncio.wait_for(world.failed.wait(), 30)
        assert world.shims[0].told == [0.0, "kill", "abandon"]
        assert replica.life.reason == "processes of it survive SIGKILL"


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
        replica.stop()
        assert state(replica) == "finished"
        with pytest.raises(errors.UsageError, match="replica a/0 is being stopped"):
            replica.restart()

"""Frozen sidecars and frozen forkservers are found and replaced; busy and paused ones
are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.linux import helper_process, stalls
from replicas.linux.processes import start_time
from replicas.sidecar.rank_side import forkserver_client
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.rank_side.sidecar_handle import SidecarDied, SidecarFailed
from replicas.sidecar.wire import TransferSpec
from replicas.weights.memory.arena import Arena, Slot
from tests.support.channels import channel_world
from tests.support.processes import name_of
from tests.support.runs import running
from tests.support.sidecars import LoopbackStore, children_of, gone, lane, shared_forkserver, start_forkserver
from tests.support.waits import eventually, wait_until

pytestmark = pytest.mark.anyio

FROZEN = rf"it gave no sign of life for {helper_process.SILENCE_S:g} s and was killed"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with shared_forkserver() as name:
        yield name


def slot_for(manifest: Manifest) -> Slot:
    slot = Arena(1, name="test").acquire(1, manifest)
    assert slot is not None
    return slot


# ---------------------------------------------------------------- sidecars


async def test_a_sidecar_frozen_in_mid_transfer_is_killed_long_before_the_deadline(server: str) -> None:
    manifest = Manifest((TensorSpec("x", "uint8", (128 << 20,)),))
    slots = [slot_for(manifest) for _ in range(3)]
    exits: list[str] = []
    async with lane(3, server) as three:
        for sidecar in three.sidecars:
            sidecar.on_exit = exits.append
        frozen = three.sidecars[2]
        roles = ["send", "receive", "receive"]
        specs = [TransferSpec(1, role, "image", manifest.encode(), ((0, 1, 2),), None, 100.0) for role in roles]  # type: ignore[arg-type]  # one of them
        started = time.monotonic()
        tasks = [
            asyncio.ensure_future(sidecar.transfer(spec, slot.buffer))
            for sidecar, spec, slot in zip(three.sidecars, specs, slots, strict=True)
        ]
        await asyncio.wait(tasks, timeout=0.02)
        os.kill(frozen.pid, signal.SIGSTOP)
        with pytest.raises(SidecarDied, match=FROZEN):
            await tasks[2]
        with pytest.raises((SidecarDied, SidecarFailed)):
            await tasks[0]  # its peer's connections were closed
        three.sidecars[1].kill()  # gloo may leave it waiting; in a channel the lane is dropped, which kills it
        with pytest.raises((SidecarDied, SidecarFailed)):
            await tasks[1]
        assert all([await sidecar.wait_dead() for sidecar in three.sidecars])
        assert time.monotonic() - started < 30
        assert any(FROZEN in reason for reason in exits)
        with pytest.raises(SidecarDied, match=FROZEN):
            await frozen.build(three.spec("late", 0))


async def test_idle_and_spare_sidecars_are_asked_too(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "IDLE_S", 0.2)
    async with lane(1, server) as alone:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        alone.sidecars[0].on_exit = ended.set_result
        os.kill(alone.sidecars[0].pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            assert FROZEN in await ended
        forkserver = alone.forkserver
        forkserver.prefork()
        await wait_until(lambda: forkserver._spare is not None, "there is a spare one")
        spare = forkserver._spare
        assert spare is not None
        await wait_until(lambda: name_of(spare.pid) == "replica-spare", "it has named itself")
        os.kill(spare.pid, signal.SIGSTOP)
        assert await spare.wait_dead(30)
        assert (await forkserver.fork()).usable  # a new one
        forkserver.prefork()
        await wait_until(lambda: forkserver._spare is not None, "there is another spare one")
        second = forkserver._spare
        assert second is not spare
        assert await forkserver.fork() is second
        assert forkserver._spare is None


async def test_one_that_is_stuck_answers_pings_and_has_its_whole_deadline(server: str) -> None:
    async with lane(2, server, build=False) as two:
        started = time.monotonic()
        with pytest.raises(SidecarFailed, match=r"rollout/0/0 did not join the group"):
            await two.sidecars[0].build(two.spec("alone", 0, timeout_s=4.0, names=("trainer/0/0", "rollout/0/0")))
        assert time.monotonic() - started >= 4.0 > helper_process.SILENCE_S


async def test_a_store_that_answers_nothing_costs_the_deadline(server: str) -> None:
    async with lane(1, server, build=False) as one:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            spec = one.spec("mute", 0, store_port=mute.getsockname()[1], timeout_s=3.0)
            with pytest.raises(SidecarDied, match=r"it did not answer within 3 s and was killed"):
                await one.sidecars[0].build(spec)
        assert await one.sidecars[0].wait_dead()


async def test_a_store_that_is_gone_costs_no_more_than_the_deadline(server: str) -> None:
    async with lane(1, server, build=False) as one:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else gets the port
            port = closed.getsockname()[1]
            started = time.monotonic()
            with pytest.raises(SidecarFailed, match=rf"cannot reach the store at 127\.0\.0\.1:{port}: .*refused"):
                await one.sidecars[0].build(one.spec("gone", 0, store_port=port, timeout_s=4.0))
            assert time.monotonic() - started < 20


async def test_a_store_that_comes_back_in_time_is_found(server: str) -> None:
    async with lane(1, server, build=False) as one:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as place:
            port = place.getsockname()[1]
        (sidecar,) = one.sidecars
        task = asyncio.ensure_future(sidecar.build(one.spec("back", 0, store_port=port, timeout_s=60.0)))
        await asyncio.wait([task], timeout=1.5)
        assert not task.done()
        store = LoopbackStore(port)
        assert await task < 60
        assert store.port == port


BUSY = "while True: pass"
CROWD = 4 * (os.cpu_count() or 1)


async def test_a_crowded_machine_makes_no_false_alarm(server: str) -> None:
    busy = [await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", BUSY) for _ in range(CROWD)]
    exits: list[str] = []
    manifest = Manifest((TensorSpec("x", "uint8", (96 << 20,)),))
    try:
        async with lane(3, server) as three:
            slots = [slot_for(manifest) for _ in range(3)]
            for sidecar in three.sidecars:
                sidecar.on_exit = exits.append
            began = time.monotonic()
            while time.monotonic() - began < 2 * helper_process.SILENCE_S:
                roles = ["send", "receive", "receive"]
                await asyncio.gather(
                    *(
                        sidecar.transfer(
                            TransferSpec(1, role, "image", manifest.encode(), ((0, 1, 2),), None, 60.0),  # type: ignore[arg-type]  # one of them
                            slot.buffer,
                        )
                        for sidecar, role, slot in zip(three.sidecars, roles, slots, strict=True)
                    )
                )
            assert exits == []
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            await process.wait()


PAUSED = """
import asyncio, sys, time
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.wire import GroupSpec

async def main():
    forkserver = await Forkserver.connect(sys.argv[1])
    sidecar = await forkserver.fork()
    sidecar.on_exit = lambda reason: print("ended", reason, flush=True)
    spec = GroupSpec("paused", "127.0.0.1", int(sys.argv[2]), 0, 2, "gloo", "127.0.0.1", 100.0)
    task = asyncio.ensure_future(sidecar.build(spec))  # its peer never comes: a request is under way all the time
    print(sidecar.pid, flush=True)
    while True:
        await asyncio.sleep(0.1)
        print("tick", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("whole", [True, False], ids=["machine", "rank"])
async def test_a_pause_of_the_rank_or_of_everything_kills_no_sidecar(server: str, whole: bool) -> None:
    store = LoopbackStore()
    rank = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", textwrap.dedent(PAUSED), server, str(store.port)), stdout=asyncio.subprocess.PIPE
    )
    assert rank.stdout is not None
    try:
        async with asyncio.timeout(60):
            sidecar = int(await rank.stdout.readline())
            while await said(rank) < helper_process.INTERVAL_S * 10 + 2:  # until a ping was due
                continue
            if whole:
                os.kill(sidecar, signal.SIGSTOP)
            rank.send_signal(signal.SIGSTOP)
            await asyncio.sleep(helper_process.SILENCE_S + 1.0)  # the pause itself
            rank.send_signal(signal.SIGCONT)
            if whole:
                os.kill(sidecar, signal.SIGCONT)
            for _ in range(int(10 * helper_process.SILENCE_S) + 10):
                assert await rank.stdout.readline() == b"tick\n"
        assert start_time(sidecar) is not None
    finally:
        rank.kill()
        await rank.wait()


_ticks: dict[int, int] = {}


async def said(rank: asyncio.subprocess.Process) -> int:
    """How many ticks it has printed."""
    assert rank.stdout is not None
    assert await rank.stdout.readline() == b"tick\n"
    _ticks[rank.pid] = _ticks.get(rank.pid, 0) + 1
    return _ticks[rank.pid]


# ---------------------------------------------------------------- through a channel


async def freeze_first(channel: Any, then: Callable[[], Awaitable[object]]) -> float:
    """SIGSTOP to the sidecar of ``channel`` at its next transfer; seconds from there
    until ``then`` has ended."""
    transfers = channel._transfers
    move, hit = transfers._move_through_lane, []

    async def through(lane: Any, *args: Any) -> Any:
        transfers._move_through_lane = move  # only the first one is hit
        hit.append(time.monotonic())
        os.kill(lane.sidecar.pid, signal.SIGSTOP)
        return await move(lane, *args)

    transfers._move_through_lane = through
    await then()
    return time.monotonic() - hit[0]


@pytest.mark.parametrize("whose", [0, 1])
async def test_a_frozen_sidecar_costs_its_rank_a_replacement_and_no_deadline(whose: int) -> None:
    async with channel_world({"deadline": "100s", "transport": "group"}) as world:
        members = await world.trainer_and_rollouts(2)
        trainer = members[0]

        async def publish(value: float) -> Any:
            pending = await asyncio.to_thread(trainer.publish, {"w": torch.full((1 << 20,), value)})
            return await pending

        await publish(1.0)
        seconds = await freeze_first(members[whose], lambda: publish(2.0))
        assert seconds < 30
        assert trainer.latest == 2
        with await members[1].receive() as update:
            assert dict(update)["w"].eq(2).all()
        assert {member.member.name for member in members_of(world)} == {"trainer/0/0", "rollout/0/0", "rollout/1/0"}


def members_of(world: Any) -> list[Any]:
    return [state for state in world.coordinator.engine.channels["policy"].roster if state.live]


# ---------------------------------------------------------------- forkservers


def torch_is_loading(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    return False


async def new_child(known: set[int], ready: Callable[[int], bool]) -> int:
    found: list[int] = []

    def look() -> bool:
        found[:] = [pid for pid in children_of(os.getpid()) - known if ready(pid)]
        return bool(found)

    await wait_until(look, "there is a helper process", timeout_s=60)
    return found[0]


@pytest.mark.parametrize(
    "moment", [lambda pid: name_of(pid) == "replica-forksrv", torch_is_loading], ids=["at once", "loading torch"]
)
async def test_a_helper_that_freezes_while_it_starts_is_replaced(
    moment: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stalls, "STOPPED_S", 1.0)
    before = children_of(os.getpid())
    task = asyncio.ensure_future(Forkserver.spawn())
    frozen = await new_child(before, moment)
    pidfd = os.pidfd_open(frozen)
    os.kill(frozen, signal.SIGSTOP)
    forkserver = await task
    assert await gone([pidfd])
    assert (await forkserver.fork()).usable
    assert (
        "starting another forkserver (try 2 of 3): the forkserver was stopped for 1 s while it started" in caplog.text
    )
    await forkserver.aclose()
    assert children_of(os.getpid()) == before


async def test_helpers_that_freeze_again_and_again_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "STOPPED_S", 0.5)
    before, started = children_of(os.getpid()), []
    start = forkserver_client._start_helper

    def start_frozen() -> tuple[socket.socket, subprocess.Popen[bytes]]:
        sock, process = start()
        process.send_signal(signal.SIGSTOP)
        started.append(process.pid)
        return sock, process

    monkeypatch.setattr(forkserver_client, "_start_helper", start_frozen)
    with pytest.raises(SidecarDied, match=r"stopped for 0\.5 s"):
        await Forkserver.spawn()
    assert len(started) == forkserver_client.HELPER_TRIES
    assert children_of(os.getpid()) == before


async def test_a_connection_waits_for_the_next_forkserver_when_the_first_dies_unanswered() -> None:
    name = f"replicas-test-{secrets.token_hex(8)}"
    first = start_forkserver(name)
    second = None
    try:
        await wait_until(lambda: name in Path("/proc/net/unix").read_text(), "it listens", timeout_s=60)
        first.send_signal(signal.SIGSTOP)
        task = asyncio.ensure_future(Forkserver.connect(name, timeout_s=60))
        await asyncio.wait([task], timeout=0.2)
        first.kill()
        await asyncio.to_thread(first.wait)
        second = start_forkserver(name)
        connection = await task
        assert (await connection.fork()).usable
        await connection.aclose()
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            await asyncio.to_thread(process.communicate)


def test_an_agent_replaces_a_forkserver_that_freezes_while_it_starts_and_later(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("import signal\nsignal.pause()\n")
    text = '[groups.a]\nlauncher = "exec"\ncommand = ["rank.py"]\n[channels.c]\npeers = ["a"]\n'
    with running(tmp_path, text) as run:
        first = run.find("sidecar.forkserver")
        os.kill(first, signal.SIGSTOP)
        rank = run.find("rank.py")
        second = run.find("sidecar.forkserver", besides=first)
        eventually(lambda: start_time(first) is None, "the frozen one is gone")
        eventually(lambda: torch_is_loading(second), "it loads torch", timeout_s=60)
        os.kill(second, signal.SIGSTOP)
        third = run.find("sidecar.forkserver", besides=second)
        eventually(lambda: start_time(second) is None, "the frozen one is gone")
        eventually(lambda: state_of(third) == "S" and torch_is_loading(third), "it is ready", timeout_s=60)
        os.kill(third, signal.SIGSTOP)
        run.find("sidecar.forkserver", besides=third)
        eventually(lambda: start_time(third) is None, "the frozen one is gone")
        assert start_time(rank) is not None
        assert run.status().groups[0].restarts == {}


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

"""Frozen sidecars and frozen forkservers are found and replaced; busy and paused ones
are left alone. (What a channel makes of it is in channel/test_channel_faults.py.)

Covers: sidecar/mailbox.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replicas.linux import helper_process, stalls
from replicas.linux.processes import start_time
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.rank_side.sidecar_handle import SidecarDied, SidecarFailed
from replicas.weights.memory.buffers import Buffer
from tests.support.processes import name_of
from tests.support.runs import running
from tests.support.sidecars import LoopbackStore, gone, kept_forkserver, lane
from tests.support.waits import eventually, wait_until

pytestmark = pytest.mark.anyio

FROZEN = rf"it did not respond for {helper_process.SILENCE_S:g} s and was killed"


def slots_for(nbytes: int, count: int) -> list[Buffer]:
    return [Buffer.allocate(nbytes, "test") for _ in range(count)]


# ---------------------------------------------------------------- sidecars


async def test_a_sidecar_frozen_in_mid_transfer_is_killed_long_before_the_deadline(server: str) -> None:
    slots = slots_for(128 << 20, 3)
    exits: list[str] = []
    async with lane(3, server) as three:
        for sidecar in three.sidecars:
            sidecar.on_exit = exits.append
        frozen = three.sidecars[2]
        started = time.monotonic()
        tasks = three.broadcast(slots, timeout_s=100.0)
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
        assert forkserver._spare is not None
        spare = await forkserver._spare
        await wait_until(lambda: name_of(spare.pid) == "replica-spare", "it has named itself")
        os.kill(spare.pid, signal.SIGSTOP)
        assert await spare.wait_dead(30)
        assert (await forkserver.fork()).usable  # a new one
        forkserver.prefork()
        assert forkserver._spare is not None
        second = await forkserver._spare
        assert second is not spare
        assert await forkserver.fork() is second
        assert forkserver._spare is None


async def test_one_that_is_stuck_answers_pings_and_has_its_whole_deadline(server: str) -> None:
    async with lane(2, server, build=False) as two:
        started = time.monotonic()
        with pytest.raises(SidecarFailed, match=r"rollout/0/0 did not join the process group"):
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
            with pytest.raises(
                SidecarFailed, match=rf"cannot reach the rendezvous store at 127\.0\.0\.1:{port} .*refused"
            ):
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
        await task
        assert store.port == port


BUSY = "while True: pass"
CROWD = 4 * (os.cpu_count() or 1)


async def test_a_crowded_machine_makes_no_false_alarm(server: str) -> None:
    busy = [await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", BUSY) for _ in range(CROWD)]
    exits: list[str] = []
    try:
        async with lane(3, server) as three:
            slots = slots_for(96 << 20, 3)
            for sidecar in three.sidecars:
                sidecar.on_exit = exits.append
            began = time.monotonic()
            while time.monotonic() - began < 2 * helper_process.SILENCE_S:
                await asyncio.gather(*three.broadcast(slots, timeout_s=60.0))
            assert exits == []
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            await process.wait()


PAUSED = """
import asyncio, sys, time
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.messages import GroupSpec

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


# ---------------------------------------------------------------- forkservers


def torch_is_loading(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    return False


@pytest.mark.parametrize(
    "moment", [lambda pid: name_of(pid) == "replica-forksrv", torch_is_loading], ids=["at once", "loading torch"]
)
async def test_one_that_freezes_while_it_starts_is_replaced(
    moment: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stalls, "STOPPED_S", 1.0)
    async with kept_forkserver() as kept:
        task = asyncio.ensure_future(Forkserver.connect(kept.address, timeout_s=60.0))
        await wait_until(lambda: bool(kept.pid) and moment(kept.pid), "it starts", timeout_s=60)
        pidfd = os.pidfd_open(frozen := kept.pid)
        os.kill(frozen, signal.SIGSTOP)
        forkserver = await task
        assert await gone([pidfd])
        assert (await forkserver.fork()).usable
        assert f"killing forkserver {frozen}, which starts helper processes: it was stopped for 1 s" in caplog.text
        forkserver.close()


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

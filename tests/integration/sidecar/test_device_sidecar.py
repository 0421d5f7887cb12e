"""Sidecars on device memory: a real forkserver, Gloo over loopback, and fake GPUs.

Covers: sidecar/rank_side/device_probe.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from replicas.errors import Preflight
from replicas.sidecar.rank_side.device_probe import prove_device
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.rank_side.sidecar_handle import SidecarDied, SidecarFailed
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.memory.buffers import Buffer
from tests.support.devices import fake_accelerator, far_accelerator
from tests.support.devices.device_memory import lingering_nbytes
from tests.support.devices.fake_accelerator import FakeAccelerator, fake_memory_nbytes
from tests.support.sidecars import lane, read_segments, segments_of, shared_forkserver
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

GPUS = ("FAKE-0", "FAKE-1", "FAKE-2")
MIB = 1 << 20


@contextlib.contextmanager
def gpus(name: str) -> Iterator[str]:
    """Fake GPUs in this process, and a forkserver that has them too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLICAS_ACCELERATOR", name)
        patch.setenv("FAKE_GPUS", ",".join(GPUS))
        with shared_forkserver() as server:
            yield server


@pytest.fixture(scope="module", params=[fake_accelerator.NAME, far_accelerator.NAME], ids=["in place", "staged"])
def either(request: pytest.FixtureRequest) -> Iterator[str]:
    with gpus(request.param) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with gpus(fake_accelerator.NAME) as server:
        yield server


def fake() -> FakeAccelerator:
    found = accelerator()
    assert isinstance(found, FakeAccelerator)
    return found


def slots_for(nbytes: int, count: int) -> list[Buffer]:
    return [Buffer.allocate(nbytes, "test", device=GPUS[rank]) for rank in range(count)]


# ---------------------------------------------------------------- what works


async def test_collectives_work_on_device_memory(either: str) -> None:
    async with lane(3, either, devices=GPUS) as three:
        given = [[torch.arange(6.0) * (rank + 1), torch.ones(3, dtype=torch.bfloat16)] for rank in range(3)]
        segments = segments_of(given[0])
        for inputs, outputs in await three.run("all_reduce", given, op="mean"):
            assert inputs.device
            found = read_segments(outputs, segments)
            assert torch.equal(found[0], torch.arange(6.0) * 2)
            assert torch.equal(found[1], torch.ones(3, dtype=torch.bfloat16))
        for _, outputs in await three.run("all_gather", given):
            assert torch.equal(read_segments(outputs, segments * 3)[4], torch.arange(6.0) * 3)
        _, outputs = (await three.run("gather", given, root=1))[1]
        assert torch.equal(read_segments(outputs, segments * 3)[2], torch.arange(6.0) * 2)
        shards = [[torch.full((2,), float(10 * rank + place)) for place in range(3)] for rank in range(3)]
        for place, (_, outputs) in enumerate(await three.run("reduce_scatter", shards)):
            assert torch.equal(
                read_segments(outputs, segments_of(shards[0]))[place], torch.full((2,), 30.0 + 3 * place)
            )
        await three.run("barrier", [[], [], []])


async def test_a_version_goes_from_gpu_to_gpu_behind_what_its_writer_has_enqueued(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = slots_for(9 * MIB + 5, 3)
    weights = torch.arange(9 * MIB + 5, dtype=torch.int64).to(torch.uint8)
    async with lane(3, either, devices=GPUS) as three:
        monkeypatch.setenv("FAKE_DELAY_S", "0.3")  # in this process
        for _ in range(2):
            weights += 1
            fake().copy([slots[0].tensor()], [weights])
            slots[0].record_write()
            await asyncio.gather(*three.broadcast(slots))
            assert all(torch.equal(slot.tensor(), weights) for slot in slots)


# ---------------------------------------------------------------- memory


async def test_memory_that_is_closed_is_let_go_of_everywhere(server: str) -> None:
    before = fake_memory_nbytes(os.getpid())
    async with lane(1, server, devices=GPUS[:1]) as alone:
        pid = alone.sidecars[0].pid
        ((inputs, outputs),) = await alone.run("all_gather", [[torch.ones(1 << 12)]])
        assert fake_memory_nbytes(pid) == inputs.nbytes + outputs.nbytes
        inputs.close()
        outputs.close()
        await alone.run("barrier", [[]])  # requests are handled in order
        assert fake_memory_nbytes(pid) <= 2, "two buffers of nothing"
        await wait_until(lambda: fake_memory_nbytes(os.getpid()) <= before, "its owner has freed it")


@pytest.mark.parametrize("freeze", [False, True])
async def test_a_sidecar_that_ends_in_mid_transfer_leaves_no_memory(server: str, freeze: bool) -> None:
    slots = slots_for(64 * MIB, 2)
    slots[0].tensor().fill_(3)
    async with lane(2, server, devices=GPUS[:2]) as two:
        os.kill(two.sidecars[1].pid, signal.SIGSTOP)  # so that it cannot be over before it is hit
        asked = two.broadcast(slots)
        await asyncio.wait(asked, timeout=0.1)
        started = time.monotonic()
        if not freeze:
            os.kill(two.sidecars[1].pid, signal.SIGKILL)
        with pytest.raises((SidecarFailed, SidecarDied)):
            await asyncio.gather(*asked)
        two.sidecars[0].kill()
        assert await two.sidecars[0].wait_dead()
        assert await two.sidecars[1].wait_dead()
        assert time.monotonic() - started < 20.0
        assert fake_memory_nbytes(two.sidecars[1].pid) == 0
        for slot in slots:
            slot.close()
        await wait_until(lambda: lingering_nbytes() == 0, "nobody has it open any more")
        again = slots_for(64 * MIB, 2)  # and everything works in a new lane
        again[0].tensor().fill_(4)
        async with lane(2, server, devices=GPUS[:2]) as other:
            await asyncio.gather(*other.broadcast(again))
        assert bool(again[1].tensor().eq(4).all())


# ---------------------------------------------------------------- at the join


async def test_a_sidecar_proves_that_it_can_open_its_ranks_memory(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.sidecar.rank_side.device_probe._proven", set())
    before = fake_memory_nbytes(os.getpid())
    forkserver = await Forkserver.connect(server)
    try:
        await prove_device(forkserver, GPUS[1], timeout_s=20.0)
        await wait_until(lambda: fake_memory_nbytes(os.getpid()) <= before, "nothing is left of the proof")
    finally:
        forkserver.close()


@pytest.mark.parametrize(
    ("name", "value", "said", "remedy"),
    [
        ("FAKE_FAULTS", "ipc", "forbidden", "--ipc=host"),
        ("FAKE_GPUS", "FAKE-7", "not visible", "CUDA_VISIBLE_DEVICES"),
        ("FAKE_FAULTS", "absent", "cannot use GPUs", "CUDA_VISIBLE_DEVICES"),
    ],
)
async def test_a_sidecar_that_cannot_open_memory_is_found_at_the_join(
    server: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str, remedy: str
) -> None:
    monkeypatch.setattr(
        "replicas.sidecar.rank_side.device_probe._proven", set()
    )  # other tests of this process have shown it
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        forkserver = await Forkserver.connect(server)  # whose sidecars get these variables
    try:
        with pytest.raises(Preflight, match=said) as caught:
            await prove_device(forkserver, GPUS[2], timeout_s=20.0)
        assert remedy in caught.value.hint
        assert 'staging = "host"' in caught.value.hint
    finally:
        forkserver.close()

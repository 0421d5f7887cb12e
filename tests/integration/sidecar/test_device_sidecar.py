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

import msgspec
import pytest
import torch

from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.core.versions.manifests import merge_parts
from replicas.errors import Preflight
from replicas.sidecar.rank_side.device_probe import prove_device
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.rank_side.sidecar_handle import SidecarDied, SidecarFailed
from replicas.sidecar.wire import TransferSpec
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.copies.digest import device_digest_of
from replicas.weights.feed import Feed, Shard
from replicas.weights.loading import views
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer
from replicas.weights.packing import stage
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


def slots_for(manifest: Manifest, count: int) -> list[Slot]:
    found = [Arena(1, name="test", device=GPUS[rank]).acquire(1, manifest) for rank in range(count)]
    return [slot for slot in found if slot is not None]


def image_spec(
    rank: int, manifest: Manifest, *, size: int = 3, digest: str = "", timeout_s: float = 30.0
) -> TransferSpec:
    role = "receive" if rank else "send"
    return TransferSpec(1, role, "image", manifest.encode(), (tuple(range(size)),), None, timeout_s, digest=digest)  # type: ignore[arg-type]


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


async def test_an_image_goes_from_gpu_to_gpu_behind_what_its_writer_has_enqueued(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest((TensorSpec("x", "int64", (9 * MIB // 8,)), TensorSpec("y", "int8", (5,))))
    slots = slots_for(manifest, 3)
    weights = torch.arange(9 * MIB + 5, dtype=torch.int64).to(torch.uint8)
    monkeypatch.setenv("FAKE_DELAY_S", "0.3")  # in this process
    async with lane(3, either, devices=GPUS) as three:
        for _ in range(2):
            weights += 1
            fake().copy([slots[0].data[: weights.numel()]], [weights])
            slots[0].buffer.record_write()
            asked = [
                sidecar.transfer(image_spec(rank, manifest), slots[rank].buffer)
                for rank, sidecar in enumerate(three.sidecars)
            ]
            results = await asyncio.gather(*asked)
            assert {result.image_digest for result in results} == {device_digest_of(slots[0].data)}
            assert all(torch.equal(slot.data[: weights.numel()], weights) for slot in slots)
        weights += 1
        fake().copy([slots[0].data[: weights.numel()]], [weights])
        specs = [
            msgspec.structs.replace(image_spec(rank, manifest), transfer=2, streaming=not rank) for rank in range(3)
        ]
        asked = [one.transfer(specs[rank], slots[rank].buffer) for rank, one in enumerate(three.sidecars)]
        moving = asyncio.gather(*asked)
        fake().synchronize()
        three.sidecars[0].progress(2, slots[0].data.numel())
        results = await moving
        assert {result.image_digest for result in results} == {"", device_digest_of(slots[2].data)}
        assert torch.equal(slots[2].data[: weights.numel()], weights)


async def test_parts_on_two_gpus_make_the_image_of_a_third(either: str) -> None:
    whole = torch.arange(3 * MIB // 8).view(-1, 64)
    halves = [
        {"x": Shard(whole[:, :32], (0, 0), tuple(whole.shape))},
        {"x": Shard(whole[:, 32:], (0, 32), tuple(whole.shape))},
    ]
    staged = [stage(Feed(half, mode="parts")) for half in halves]
    manifest = merge_parts([part.manifest for part in staged])
    buffers: list[Buffer] = []
    for rank, part in enumerate(staged):
        host = torch.empty(part.manifest.nbytes, dtype=torch.uint8)
        part.write(host)
        buffers.append(Buffer.allocate(host.numel(), "test", device=GPUS[rank]))
        buffers[-1].tensor().copy_(host)
    target = Buffer.allocate(manifest.image_nbytes, "test", device=GPUS[2])
    buffers.append(target)
    async with lane(3, either, devices=GPUS) as three:
        specs = [
            TransferSpec(
                1,
                "receive" if rank == 2 else "send",
                "parts",
                manifest.encode(),
                ((0, 1, 2), (1, 0, 2)),
                rank % 2,
                30.0,
            )
            for rank in range(3)
        ]
        results = await asyncio.gather(
            *[three.sidecars[rank].transfer(specs[rank], buffers[rank]) for rank in range(3)]
        )
    assert torch.equal(views(target.tensor(), manifest)["x"], whole)
    assert results[2].image_digest == device_digest_of(target.tensor()[manifest.data_offset :])
    assert results[2].part_digests == results[0].part_digests | results[1].part_digests
    assert results[0].part_digests[0] == device_digest_of(buffers[0].tensor())


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
    manifest = Manifest((TensorSpec("x", "uint8", (64 * MIB,)),))
    slots = slots_for(manifest, 2)
    slots[0].data.fill_(3)
    async with lane(2, server, devices=GPUS[:2]) as two:
        os.kill(two.sidecars[1].pid, signal.SIGSTOP)  # so that it cannot be over before it is hit
        asked = [
            asyncio.ensure_future(sidecar.transfer(image_spec(rank, manifest, size=2), slots[rank].buffer))
            for rank, sidecar in enumerate(two.sidecars)
        ]
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
            slot.buffer.close()
        await wait_until(lambda: lingering_nbytes() == 0, "nobody has it open any more")
        again = slots_for(manifest, 2)  # and everything works in a new lane
        again[0].data.fill_(4)
        async with lane(2, server, devices=GPUS[:2]) as other:
            moves = [
                one.transfer(image_spec(rank, manifest, size=2), again[rank].buffer)
                for rank, one in enumerate(other.sidecars)
            ]
            results = await asyncio.gather(*moves)
        assert results[0].image_digest == results[1].image_digest == device_digest_of(again[1].data)


# ---------------------------------------------------------------- at the join


async def test_a_sidecar_proves_that_it_can_open_its_ranks_memory(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.sidecar.rank_side.device_probe._proven", set())
    before = fake_memory_nbytes(os.getpid())
    forkserver = await Forkserver.connect(server)
    try:
        await prove_device(forkserver, GPUS[1], timeout_s=20.0)
        await wait_until(lambda: fake_memory_nbytes(os.getpid()) <= before, "nothing is left of the proof")
    finally:
        await forkserver.aclose()


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
        forkserver = await Forkserver.spawn()
    try:
        with pytest.raises(Preflight, match=said) as caught:
            await prove_device(forkserver, GPUS[2], timeout_s=20.0)
        assert remedy in caught.value.hint
        assert 'staging = "host"' in caught.value.hint
    finally:
        await forkserver.aclose()

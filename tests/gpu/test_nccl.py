"""Process groups of sidecars on one GPU, and weights of a GPU for those that have none.

Two or three ranks on one GPU are right and slow (NCCL takes them for as many hosts and
goes over loopback): correctness only. Alone a group is built as everywhere. On the fake
the same runs over Gloo.
"""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
import torch

from replicas.channel import Channel
from replicas.core.base.manifest import Manifest
from replicas.messages import OperationKind
from replicas.sidecar.rank_side.sidecar_handle import SidecarFailed
from replicas.weights.copies.digest import digest_of
from replicas.weights.feed import Feed
from replicas.weights.loading import views
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.packing import stage
from tests.gpu.card import BACKEND, DEVICE, REAL, as_host, bits, card, uuid
from tests.support.channels import channel_world
from tests.support.sidecars import Lane, lane, read_segments, segments_of
from tests.support.waits import wait_until

TIMEOUT_S = 90.0
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
STAGINGS = ("host", "device")

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


def on_gpu(seed: int) -> dict[str, torch.Tensor]:
    """Weights of several dtypes and shapes, in device memory."""
    torch.manual_seed(seed)
    made = {str(dtype): torch.randn(300, 70, device=DEVICE).to(dtype) for dtype in FLOATS}
    made["float8"] = torch.randn(33, device=DEVICE).to(torch.float8_e4m3fn)
    made["transposed"] = torch.randn(40, 50, device=DEVICE).t()
    made["bool"] = torch.randn(7, device=DEVICE) > 0
    made["scalar"] = torch.tensor(seed, device=DEVICE)
    made["empty"] = torch.zeros(0, 3, device=DEVICE)
    return made


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


async def build(made: Lane, prefix: str) -> None:
    specs = [made.spec(prefix, rank, backend=BACKEND, timeout_s=TIMEOUT_S) for rank in range(len(made.sidecars))]
    await asyncio.gather(*(one.build(spec) for one, spec in zip(made.sidecars, specs, strict=True)))


def slot_for(manifest: Manifest, staging: str) -> Slot:
    arena = Arena(1, name="gpu-test", device=uuid() if staging == "device" else "")
    slot = arena.acquire(1, manifest)
    assert slot is not None
    return slot


def fill(slot: Slot, weights: dict[str, torch.Tensor]) -> None:
    """With an image of these, as a writer that shares the memory with a sidecar."""
    image = slot.image
    assert image is not None
    packed = slot if not slot.buffer.device else slot_for(image, "host")
    stage(Feed(weights)).write(packed.data)
    if packed is not slot:
        card().copy([slot.data], [packed.data])
        card().synchronize()


def found_in(slot: Slot, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of an image."""
    return views(slot.buffer.readable(), manifest)


@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_sidecar_alone_builds_a_group_and_moves_what_was_on_the_gpu(staging: str) -> None:
    weights = on_gpu(1)
    manifest = stage(Feed(weights)).manifest.whole
    slot = slot_for(manifest, staging)
    fill(slot, weights)
    async with lane(1, build=False) as alone:
        await build(alone, "alone")
        await asyncio.gather(*alone.broadcast([slot.buffer], timeout_s=TIMEOUT_S))
        assert_same(found_in(slot, manifest), weights)
        given = [torch.arange(5.0, device=DEVICE), torch.ones(3, device=DEVICE, dtype=torch.bfloat16)]
        kinds: tuple[OperationKind, ...] = ("all_reduce", "broadcast", "all_gather", "reduce")
        for kind in kinds:
            ((inputs, outputs),) = await alone.run(kind, [given], root=0, timeout_s=TIMEOUT_S)
            found = read_segments(inputs if kind == "broadcast" else outputs, segments_of(given))
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, given, strict=True)), kind
        await alone.run("barrier", [[]], timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("size", [2, 3])
async def test_sidecars_share_one_gpu(size: int, staging: str) -> None:
    weights = on_gpu(2) | {"large": torch.randn(10 << 20, device=DEVICE)}  # more than one piece
    manifest = stage(Feed(weights)).manifest.whole
    slots = [slot_for(manifest, staging) for _ in range(size)]
    fill(slots[0], weights)
    async with lane(size, build=False) as several:
        await build(several, f"{size}")
        for _ in range(2):
            await asyncio.gather(*several.broadcast([slot.buffer for slot in slots], timeout_s=TIMEOUT_S))
            assert len({digest_of(slot.data, slot.digest_kind) for slot in slots}) == 1
        for slot in slots[1:]:
            assert_same(found_in(slot, manifest), weights)
        ones = [torch.full((5,), float(rank), device=DEVICE) for rank in range(size)]
        mean = torch.full((5,), (size - 1) / 2)
        for _, outputs in await several.run("all_reduce", [[one] for one in ones], op="mean", timeout_s=TIMEOUT_S):
            torch.testing.assert_close(read_segments(outputs, segments_of(ones[:1]))[0], mean)
        kinds: list[OperationKind] = ["send", "recv"]
        pairs = await several.run("send", [[ones[1]], []], order=(1, 0), kinds=kinds, timeout_s=TIMEOUT_S)
        assert torch.equal(read_segments(pairs[1][1], segments_of(ones[:1]))[0], torch.ones(5))
        _, outputs = (await several.run("gather", [[one] for one in ones], root=1, timeout_s=TIMEOUT_S))[1]
        found = read_segments(outputs, segments_of(ones[:1]) * size)
        assert [one.tolist() for one in found] == [[float(rank)] * 5 for rank in range(size)]
        with pytest.raises(SidecarFailed, match="cannot reduce") as caught:
            await several.run("all_reduce", [[torch.zeros(2).to(torch.float8_e4m3fn)]] * size, timeout_s=TIMEOUT_S)
        assert not caught.value.over
        await several.run("barrier", [[]] * size, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("staging", STAGINGS)
async def test_peers_reduce_tensors_of_one_gpu(staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"peers": ["peer"], "backend": BACKEND, "deadline": f"{TIMEOUT_S:.0f}s", "staging": staging}
    async with channel_world(settings, peer=2) as world:
        peers = []
        for index in range(2):
            for name, value in as_host(f"peer-{index}").items():
                monkeypatch.setenv(name, value)
            peers.append(await world.join("peer", index))
        for op, expected in (("sum", 3.0), ("mean", 1.5), ("min", 1.0), ("max", 2.0)):
            given = [torch.full((64, 3), index + 1.0, device=DEVICE).t() for index in range(2)]
            await asyncio.gather(
                *(peer.all_reduce(tensor, op) for peer, tensor in zip(peers, given, strict=True))  # type: ignore[arg-type]  # op is one of them
            )
            assert all(tensor.device.type == DEVICE and bool(tensor.eq(expected).all()) for tensor in given), op
        first, second = torch.arange(9, device=DEVICE), torch.zeros(9, dtype=torch.int64, device=DEVICE)
        await asyncio.gather(peers[0].send(first, "peer/1"), peers[1].recv(second, src="peer/0"))
        assert torch.equal(first, second)


class Policy(torch.nn.Module):
    """Tied parameters, a buffer, and more than one dtype."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.norm = torch.nn.LayerNorm(16).bfloat16()
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0))


@pytest.mark.parametrize("backend", ["auto", BACKEND])
async def test_a_model_on_the_gpu_arrives_bit_by_bit_on_the_host(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "NCCL_HOSTID", "one"
    )  # several on one GPU are refused with backend = "nccl", unless said on purpose
    torch.manual_seed(3)
    source, targets = Policy().to(DEVICE), [Policy(), Policy()]
    settings = {"backend": backend, "deadline": f"{TIMEOUT_S:.0f}s"}
    async with channel_world(settings, rollout=2) as world:
        trainer, *rollouts = await world.trainer_and_rollouts(2)
        for version in (1, 2):
            source.steps.add_(1)
            with torch.no_grad():
                source.embed.weight.mul_(1.1)
            pending = await asyncio.to_thread(trainer.publish, source)
            await asyncio.gather(*(load(*pair) for pair in zip(rollouts, targets, strict=True)))
            assert (await pending).version == version
            for target in targets:
                assert_same(dict(target.state_dict()), dict(source.state_dict()))


async def load(rollout: Channel, model: torch.nn.Module) -> None:
    update = await rollout.receive()

    def copy() -> None:
        with update:
            update.load_into(model)

    await asyncio.to_thread(copy)


CPU_TARGET = """
import sys
import torch
import replicas
from replicas.weights.copies.digest import digest_of

assert not torch.cuda.is_available()
endpoint, token = sys.argv[1:]
with replicas.join("policy", endpoint=endpoint, token=token, group="rollout", replica=0, rank=0, world_size=1) as channel:
    with channel.receive().wait(90) as update:
        for name, tensor in update:
            print(name, digest_of(tensor.contiguous().flatten().view(torch.uint8)))
"""


async def test_a_target_that_sees_no_gpu_gets_weights_of_the_gpu() -> None:
    weights = on_gpu(4)
    unseen = {"CUDA_VISIBLE_DEVICES": ""} if REAL else {"FAKE_FAULTS": "absent"}
    async with channel_world({"deadline": f"{TIMEOUT_S:.0f}s"}, rollout=1) as world:
        trainer = await world.join("trainer")
        where = (world.coordinator.endpoint, world.coordinator.token)
        target = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CPU_TARGET, *where),
            env={**os.environ, **unseen, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            await wait_until(lambda: len(trainer.members) == 2, "the target has joined", timeout_s=60.0)
            await (await asyncio.to_thread(trainer.publish, weights))
            async with asyncio.timeout(TIMEOUT_S):
                said, _ = await target.communicate()
        finally:
            if target.returncode is None:
                target.kill()
                await target.wait()
    assert target.returncode == 0
    found = dict(line.rsplit(" ", 1) for line in said.decode().splitlines())
    assert found == {name: digest_of(bits(tensor)) for name, tensor in weights.items()}

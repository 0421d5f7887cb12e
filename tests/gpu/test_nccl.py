"""The NCCL path, on one GPU. Skipped where there is none.

Two ranks on one GPU are right and slow (NCCL takes them for two hosts and goes over loopback): correctness only.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist

from replicas.channel import Channel
from replicas.core.manifest import Manifest
from replicas.messages import OperationKind
from replicas.sidecar.client import SidecarFailed, TransferResult, TransferSpec
from replicas.weights import Arena, Feed, Slot, digest_of, stage, views
from tests.support.channels import channel_world, wait_until
from tests.support.sidecars import Lane, lane, read_segments, segments_of

DEVICE = "cuda"
BACKEND = "nccl"
TIMEOUT_S = 90.0
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def has_gpu() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that is too old is told of by a warning
        return torch.cuda.is_available() and dist.is_nccl_available()


pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not has_gpu(), reason="needs a GPU and NCCL"),
]


@pytest.fixture(autouse=True)
def _one_gpu_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said on purpose, or the preflight refuses a second member on one GPU. Sidecars take another name each."""
    monkeypatch.setenv("NCCL_HOSTID", "replicas-test")


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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor, on the host."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


async def build(made: Lane, prefix: str) -> None:
    specs = [made.spec(prefix, rank, backend=BACKEND, timeout_s=TIMEOUT_S) for rank in range(len(made.sidecars))]
    await asyncio.gather(*(one.build(spec) for one, spec in zip(made.sidecars, specs, strict=True)))


def slot_for(manifest: Manifest) -> Slot:
    slot = Arena(1, name="gpu-test").acquire(1, manifest)
    assert slot is not None
    return slot


async def send_image(made: Lane, manifest: Manifest, slots: list[Slot]) -> list[TransferResult]:
    """From lane rank 0 to all others."""
    roles = ["send", *["receive"] * (len(slots) - 1)]
    specs = [
        TransferSpec(1, "send" if role == "send" else "receive", "image", manifest.encode(), (0,), None, TIMEOUT_S)
        for role in roles
    ]
    moves = zip(made.sidecars, specs, slots, strict=True)
    return await asyncio.gather(*(one.transfer(spec, slot.buffer) for one, spec, slot in moves))


async def test_a_sidecar_alone_builds_a_group_and_moves_what_was_on_the_gpu() -> None:
    weights = on_gpu(1)
    staged = stage(Feed(weights))
    manifest = staged.manifest.whole
    slot = slot_for(manifest)
    staged.write(slot.data)
    async with lane(1, build=False) as alone:
        await build(alone, "alone")
        (result,) = await send_image(alone, manifest, [slot])
        assert result.image_digest == digest_of(slot.data)
        assert_same(views(slot.buffer.tensor(), manifest), weights)
        given = [torch.arange(5.0, device=DEVICE), torch.ones(3, device=DEVICE, dtype=torch.bfloat16)]
        kinds: tuple[OperationKind, ...] = ("all_reduce", "broadcast", "all_gather", "reduce")
        for kind in kinds:
            ((inputs, outputs),) = await alone.run(kind, [given], root=0, timeout_s=TIMEOUT_S)
            found = read_segments(inputs if kind == "broadcast" else outputs, segments_of(given))
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, given, strict=True)), kind
        await alone.run("barrier", [[]], timeout_s=TIMEOUT_S)


async def test_two_sidecars_share_one_gpu() -> None:
    weights = on_gpu(2) | {"large": torch.randn(10 << 20, device=DEVICE)}  # more than one bucket
    staged = stage(Feed(weights))
    manifest = staged.manifest.whole
    slots = [slot_for(manifest), slot_for(manifest)]
    staged.write(slots[0].data)
    async with lane(2, build=False) as two:
        await build(two, "two")
        for _ in range(2):
            results = await send_image(two, manifest, slots)
            assert {result.image_digest for result in results} == {digest_of(slots[0].data)}
        assert_same(views(slots[1].buffer.tensor(), manifest), weights)
        ones = [torch.full((5,), value, device=DEVICE) for value in (1.0, 2.0)]
        for _, outputs in await two.run("all_reduce", [[one] for one in ones], op="mean", timeout_s=TIMEOUT_S):
            assert torch.equal(read_segments(outputs, segments_of(ones[:1]))[0], torch.full((5,), 1.5))
        kinds: list[OperationKind] = ["send", "recv"]
        pairs = await two.run("send", [ones[:1], []], order=(1, 0), kinds=kinds, timeout_s=TIMEOUT_S)
        assert torch.equal(read_segments(pairs[1][1], segments_of(ones[:1]))[0], torch.ones(5))
        with pytest.raises(SidecarFailed, match="cannot reduce") as caught:
            await two.run("all_reduce", [[torch.zeros(2).to(torch.float8_e4m3fn)]] * 2, timeout_s=TIMEOUT_S)
        assert not caught.value.over
        await two.run("barrier", [[], []], timeout_s=TIMEOUT_S)


async def test_peers_reduce_tensors_of_one_gpu() -> None:
    settings = {"peers": ["peer"], "backend": BACKEND, "deadline": f"{TIMEOUT_S:.0f}s"}
    async with channel_world(settings, peer=2) as world:
        peers = [await world.join("peer", index) for index in range(2)]
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
async def test_a_model_on_the_gpu_arrives_bit_by_bit_on_the_host(backend: str) -> None:
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


async def test_a_publish_waits_for_the_callers_stream() -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    factor = torch.full((4096, 4096), 1 / 4096, device=DEVICE)
    value = torch.ones(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    async with channel_world(rollout=1) as world:
        trainer, rollout = await world.trainer_and_rollouts()

        def publish() -> None:
            with torch.cuda.stream(stream):
                for _ in range(50):
                    value.copy_(value @ factor)  # ones stay ones, and the stream is busy
                value.add_(1)
                trainer.publish({"value": value})

        await asyncio.to_thread(publish)
        with await rollout.receive() as update:
            (found,) = dict(update).values()
            torch.testing.assert_close(found, torch.full_like(found, 2.0), rtol=0, atol=1e-2)


CPU_TARGET = """
import sys
import torch
import replicas
from replicas.weights import digest_of

assert not torch.cuda.is_available()
endpoint, token = sys.argv[1:]
with replicas.join("policy", endpoint=endpoint, token=token, group="rollout", replica=0, rank=0, world_size=1) as channel:
    with channel.receive().wait(90) as update:
        for name, tensor in update:
            print(name, digest_of(tensor.contiguous().flatten().view(torch.uint8)))
"""


async def test_a_target_that_sees_no_gpu_gets_weights_of_the_gpu() -> None:
    weights = on_gpu(4)
    async with channel_world({"deadline": f"{TIMEOUT_S:.0f}s"}, rollout=1) as world:
        trainer = await world.join("trainer")
        where = (world.coordinator.endpoint, world.coordinator.token)
        target = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CPU_TARGET, *where),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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

"""Publishing from a GPU: nobody's thread waits for the copies. With a fake one, whose
streams can be stopped."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from replicas import errors
from replicas.channel import Channel, Pending, Receipt
from replicas.channel.session import loop as session_loops
from tests.support.channels import ChannelWorld, channel_world
from tests.support.devices.fake_accelerator import NAME, FakeAccelerator
from tests.support.ranks import ELEMENTS
from tests.support.root import ROOT
from tests.support.waits import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300), pytest.mark.usefixtures("sidecars_too")]

WAIT_S = 60.0
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sidecars_too() -> Iterator[None]:
    """A session loop of this module's own, whose sidecars have the fake, too."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"REPLICAS_ACCELERATOR": NAME, "PYTHONPATH": path}.items():
            patch.setenv(name, value)
        patch.setattr(session_loops, "_current", None)
        yield
        session_loops.session_loop().close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    """What is enqueued on it is never done at once."""
    made = FakeAccelerator()
    monkeypatch.setenv("FAKE_DELAY_S", "1e-6")
    monkeypatch.setattr("replicas.weights.copies.accelerator._chosen", (os.getpid(), NAME, made))
    return made


@pytest.fixture(params=["host", "device"])
def staging(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stop(gpu: FakeAccelerator) -> threading.Event:
    """The default stream does nothing more until it is set."""
    going_on = threading.Event()
    gpu.launch(lambda: going_on.wait(WAIT_S))
    return going_on


def weights(value: float) -> Weights:
    return {"w": torch.full((ELEMENTS,), float(value)), "b": torch.full((7,), float(value))}


def overwrite(gpu: FakeAccelerator, given: Weights) -> None:
    """A training step."""
    gpu.launch(lambda: [tensor.fill_(-1) for tensor in given.values()])


async def publish(channel: Channel, given: object, *, hold: bool = True, deadline: float = 30) -> Pending[Receipt]:
    return await asyncio.to_thread(channel.publish, given, hold=hold, deadline=deadline)


async def load(channel: Channel) -> tuple[int, float]:
    """Its version, loaded into parameters on the GPU, and the one value that they all
    have."""
    target = weights(0)
    with await channel.receive(deadline=40) as update:
        await asyncio.to_thread(update.load_into, target)
        values = {value for tensor in target.values() for value in tensor.tolist()}
        values |= {value for _, tensor in update for value in tensor.tolist()}
    assert len(values) == 1, "a torn set of weights"
    return update.version, values.pop()


async def pair(world: ChannelWorld) -> tuple[Channel, Channel]:
    return await world.join("trainer"), await world.join("rollout")


async def test_publish_enqueues_the_copies_and_returns(gpu: FakeAccelerator, staging: str) -> None:
    async with channel_world({"staging": staging, "slots": 3}) as world:
        trainer, rollout = await pair(world)
        for value in (1, 2, 3):
            given = weights(value)
            going_on = stop(gpu)
            pending = await publish(trainer, given)
            overwrite(gpu, given)
            assert not pending.done()
            going_on.set()
            receipt = await pending
            assert (receipt.version, receipt.staging) == (value, staging)
            assert receipt.phases["hold"] > 0
            assert await load(rollout) == (value, value)
        assert len(gpu.pinned) == (0 if staging == "device" else 6), "each slot once here, and once where it is read"
        await without_hold(gpu, trainer, rollout)
        await from_an_iterable(gpu, trainer, rollout)
        await written_in_place(gpu, trainer, rollout)


async def without_hold(gpu: FakeAccelerator, trainer: Channel, rollout: Channel) -> None:
    """The stream goes on until a fence, or the next publish."""
    given = weights(4)
    going_on = stop(gpu)
    pending = await publish(trainer, given, hold=False)
    other = gpu.new_stream()
    trainer.fence(other)  # type: ignore[arg-type]  # a stream of the fake's
    with gpu.on_stream(other):
        overwrite(gpu, given)
    assert not pending.done()
    going_on.set()
    assert (await pending).phases.get("hold", 0.0) == 0
    assert await load(rollout) == (4, 4)

    given, going_on = weights(5), stop(gpu)
    second = await publish(trainer, given, hold=False)
    third = await publish(trainer, weights(6))
    overwrite(gpu, given)
    going_on.set()
    assert [(await one).version for one in (second, third)] == [5, 6]
    assert await load(rollout) == (6, 6)


async def from_an_iterable(gpu: FakeAccelerator, trainer: Channel, rollout: Channel) -> None:
    """It may free and overwrite what it gave."""

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(7).items():
            yield name, tensor
            overwrite(gpu, {name: tensor})

    assert (await (await publish(trainer, walk()))).version == 7
    assert await load(rollout) == (7, 7)


async def written_in_place(gpu: FakeAccelerator, trainer: Channel, rollout: Channel) -> None:
    given = weights(8)
    with await asyncio.to_thread(trainer.arena_like, given) as written:
        going_on = stop(gpu)
        gpu.copy([written[name][:] for name in given], list(given.values()))
        pending = await publish(trainer, written)
    assert not pending.done()
    going_on.set()
    assert (await pending).version == 8
    assert await load(rollout) == (8, 8)


async def test_a_gpu_that_fails_fails_the_publish(
    gpu: FakeAccelerator, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with channel_world({"staging": staging}) as world:
        trainer, rollout = await pair(world)
        assert (await (await publish(trainer, weights(1)))).version == 1
        monkeypatch.setenv("FAKE_FAULTS", "copy")
        pending = await publish(trainer, weights(2))
        await wait_until(pending.done, "it has failed")
        with pytest.raises(errors.WorldError, match="illegal memory access"):
            await publish(trainer, weights(3))  # nobody had waited for that one
        with pytest.raises(errors.WorldError, match="illegal memory access"):
            await pending
        assert rollout.latest == 1
        await asyncio.to_thread(trainer.close)


async def test_a_digest_that_fails_fails_the_publish_alone(
    gpu: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(data: torch.Tensor) -> str:
        raise torch.OutOfMemoryError(f"no room beside {data.numel()} bytes")

    async with channel_world({"staging": "device"}) as world:
        trainer, rollout = await pair(world)
        with monkeypatch.context() as patch:
            patch.setattr("replicas.weights.devices.device_copies.device_digest_of", fail)
            pending = await publish(trainer, weights(1))
            with pytest.raises(errors.NoCapacity, match="no room"):
                await pending
        await wait_until(lambda: not trainer._hub.arena.held(), "its slot is given back")
        receipt = await (await publish(trainer, weights(2)))
        assert await load(rollout) == (receipt.version, 2)


async def test_a_slot_belongs_to_the_copies_until_they_end(gpu: FakeAccelerator, staging: str) -> None:
    async with channel_world({"staging": staging}) as world:
        trainer, rollout = await pair(world)
        arena = trainer._hub.arena

        def filling() -> bool:
            return "filling" in [slot.state for slot in arena.slots]

        going_on = stop(gpu)
        pending = await publish(trainer, weights(1), deadline=1)
        with pytest.raises(errors.DeadlineExceeded):
            await pending  # a GPU that hangs costs no more than that
        assert filling()
        going_on.set()
        await wait_until(lambda: not filling(), "the slot is free")
        receipt = await (await publish(trainer, weights(2)))
        assert await load(rollout) == (receipt.version, 2)

        def walk() -> Iterator[tuple[str, torch.Tensor]]:
            yield "w", weights(3)["w"]
            raise RuntimeError("mine")

        going_on = stop(gpu)
        with pytest.raises(RuntimeError, match="mine"):
            await publish(trainer, walk())
        assert filling()
        going_on.set()
        await wait_until(lambda: not filling(), "the slot is free")
        receipt = await (await publish(trainer, weights(4)))
        assert await load(rollout) == (receipt.version, 4)


async def test_closing_waits_for_the_copies(gpu: FakeAccelerator, staging: str) -> None:
    async with channel_world({"staging": staging}) as world:
        trainer = await world.join("trainer")
        going_on = stop(gpu)
        await publish(trainer, weights(1))
        timer = threading.Timer(0.3, going_on.set)
        timer.start()
        await asyncio.to_thread(trainer.close, wait=False)
        assert going_on.is_set()
        timer.join(WAIT_S)
    await wait_until(lambda: not gpu.allocated, "its memory is given back")
    assert len(gpu.unpinned) == len(gpu.pinned)


async def test_a_broadcast_waits_for_the_copies(gpu: FakeAccelerator, staging: str) -> None:
    async with channel_world({"staging": staging, "transport": "group"}) as world:
        trainer, rollout = await pair(world)
        for value in (1, 2):
            given = weights(value)
            going_on = stop(gpu)
            pending = await publish(trainer, given)
            overwrite(gpu, given)
            going_on.set()
            assert (await pending).version == value
            assert await load(rollout) == (value, value)

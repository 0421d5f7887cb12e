"""Weights of the GPU in both stagings: to members on the same one, over a process
group, and in which order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gpu.card import REAL, backend_of
from tests.gpu.gpu_rank import GpuRank, GpuWorld, gpu_world

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

STAGINGS = ("host", "device")
TENSORS = 3
LATE = {} if REAL else {"FAKE_DELAY_S": "0.01"}
"""Of a trainer whose copies are done after the call; on a real GPU they are anyhow."""


async def trainer_and_rollout(world: GpuWorld, **environment: str) -> tuple[GpuRank, GpuRank]:
    trainer, rollout = await asyncio.gather(
        world.start("trainer", environment=environment), world.start("rollout", environment=environment)
    )
    return trainer, rollout


async def send(trainer: GpuRank, rollout: GpuRank, value: float, **how: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One version: what publishing and loading it said."""
    said, got = await asyncio.gather(trainer.ask("publish", value=value, **how), rollout.ask("load"))
    assert said["version"] == got["version"]
    assert said["lost"] == []
    return said, got


@pytest.mark.parametrize("staging", STAGINGS)
async def test_members_on_one_gpu_need_no_process_group(staging: str) -> None:
    async with gpu_world({"staging": staging}, rollout=1) as world:
        trainer, rollout = await trainer_and_rollout(world)
        for value in (1.5, 2.5, 3.5):  # more versions than slots
            said, got = await send(trainer, rollout, value)
            assert said["staging"] == staging
            assert said["held"] >= 0
            assert got["values"] == [value]
        _, seen = await asyncio.gather(trainer.ask("publish", value=4.5), rollout.ask("look"))
        assert seen["values"] == [4.5]
        assert seen["on card"] == (TENSORS if staging == "device" or not REAL else 0)
        assert world.lanes() == []
        assert (await trainer.ask("go_on"), await rollout.ask("go_on")) == (True, True)


@pytest.mark.parametrize("staging", STAGINGS)
async def test_weights_go_over_a_process_group_of_the_gpu(staging: str) -> None:
    async with gpu_world({"staging": staging, "transport": "group"}, rollout=2) as world:
        trainer, first, second = await world.start_all(("trainer", 0), ("rollout", 0), ("rollout", 1))
        for value in (1.5, 2.5, 3.5):
            said, *got = await asyncio.gather(
                trainer.ask("publish", value=value), first.ask("load"), second.ask("load")
            )
            assert said["lost"] == []
            assert [one["values"] for one in got] == [[value]] * 2
        assert world.lanes() == [(backend_of(staging), ["rollout/0/0", "rollout/1/0", "trainer/0/0"])]
        assert await trainer.ask("sidecars")
        assert (await trainer.ask("go_on"), await first.ask("go_on")) == (True, True)


@pytest.mark.parametrize("staging", STAGINGS)
async def test_weights_go_over_gloo_where_nccl_refuses_the_gpu(staging: str) -> None:
    async with gpu_world({"staging": staging, "transport": "group"}, rollout=1) as world:
        trainer, rollout = await trainer_and_rollout(world, NCCL_HOSTID="one", NCCL_MULTI_RANK_GPU_ENABLE="0")
        for value in (1.5, 2.5):
            _, got = await send(trainer, rollout, value)
            assert got["values"] == [value]
        assert world.lanes() == [("gloo", ["rollout/0/0", "trainer/0/0"])]


@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_version_outlives_its_trainer(staging: str) -> None:
    """What a rollout has mapped of the trainer's memory does not count as held: it has
    a copy of its own by then."""
    async with gpu_world({"staging": staging}, rollout=2) as world:
        trainer, rollout = await trainer_and_rollout(world)
        await send(trainer, rollout, 7.0)
        await trainer.kill()
        late = await world.start("rollout", 1)
        got = await late.ask("load")
        assert (got["version"], got["values"]) == (1, [7.0])


@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_trainer_writes_on_any_stream(staging: str) -> None:
    async with gpu_world({"staging": staging}, rollout=1) as world:
        trainer, rollout = await trainer_and_rollout(world, **LATE)
        value = 0.0
        for side in (True, False):
            for hold in (True, False):
                value += 1.0
                # What it writes behind the publish, or the fence, on the same stream
                # must not be in the version.
                said, got = await send(trainer, rollout, value, side=side, hold=hold, busy=0.05, then=-1.0)
                assert got["values"] == [value], (side, hold)
                assert said["now"] == [-1.0], (side, hold)


@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_publish_returns_before_the_stream_has_come_to_it(staging: str) -> None:
    async with gpu_world({"staging": staging}, rollout=1) as world:
        trainer, rollout = await trainer_and_rollout(world, **LATE)
        await send(trainer, rollout, 1.0)  # the memory of the slots is there, and pinned
        for side in (True, False):
            trainer.tell("start_publish", value=2.0 + side, side=side, busy=1.0)
            rollout.tell("load")
            done = await trainer.answer()
            assert not done, "it cannot have committed: the copies are behind a second of work"
            said, got = await asyncio.gather(trainer.ask("end_publish"), rollout.answer())
            assert got["values"] == [2.0 + side]
            assert said["held"] < 0.9, "the work before the copies is the trainer's own, and no part of the hold"

"""What a target reads, and when, through a real coordinator; all members in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from replicas.channel import Channel, Receipt
from replicas.coordinator import GroupShape
from tests.support.channels import channel_world, wait_until

pytestmark = pytest.mark.anyio


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


async def publish(channel: Channel, value: float, **options: Any) -> Receipt:
    return await (await asyncio.to_thread(channel.publish, weights(value), **options))


async def test_who_asks_ahead_of_time_stops_nobody_and_gets_the_newest() -> None:
    async with channel_world({"deadline": "10s"}) as world:
        trainer, rollout = await world.trainer_and_rollouts()
        ahead = rollout.receive()
        for version in range(1, 7):
            assert (await publish(trainer, version)).version == version
            await wait_until(ahead.done, f"version {version} or a newer one was granted")
        await wait_until(lambda: rollout.latest == 6, "the last commit is heard of")
        model = weights(0)
        with await ahead as update:
            update.load_into(model)
        assert (update.version, model["w"][0].item()) == (6, 6)


async def test_nor_does_one_rank_of_two_and_both_get_the_same() -> None:
    async with channel_world({"deadline": "10s"}, rollout=GroupShape(replicas=1, world_size=2)) as world:
        trainer = await world.join("trainer")
        ranks = [await world.join("rollout", 0, rank, 2) for rank in range(2)]
        ahead = ranks[0].receive()
        for version in range(1, 6):
            await publish(trainer, version)
        late = await ranks[1].receive()
        again = await ahead
        assert late.version == again.version >= 4  # the last commit may be on its way
        for update in (late, again):
            update.loaded()
        assert await trainer.loaded(late.version) == late.version

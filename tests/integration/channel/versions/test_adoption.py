"""Targets in processes of their own load a version together: one refuses a version, one
is killed in the midst.

Covers: channel/versions/loads.py.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch

from replicas.channel import Channel
from tests.support.channels import ChannelWorld, channel_world
from tests.support.ranks import RankProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]  # three processes import torch, one after the other


async def publish(trainer: Channel, value: int) -> None:
    pending = await asyncio.to_thread(trainer.publish, {"w": torch.full((1000,), float(value))}, meta={"value": value})
    assert (await pending).version == value


async def start(world: ChannelWorld, stack: AsyncExitStack, replica: int) -> RankProcess:
    found = await RankProcess.start(world.endpoint, world.coordinator.token, "rollout", replica)
    stack.push_async_callback(found.clean_up)
    return found


async def test_one_refuses_a_version_one_is_killed_and_the_others_stay_together() -> None:
    async with channel_world({"adopt_together": True}, rollout=3) as world, AsyncExitStack() as stack:
        trainer = await world.join("trainer")
        first, picky, victim = [await start(world, stack, replica) for replica in range(3)]
        await publish(trainer, 1)
        for target in (first, picky, victim):
            target.tell("load_until", version=1)
        assert [await target.answer() for target in (first, picky, victim)] == [[1]] * 3

        await publish(trainer, 2)
        for target in (first, victim):
            target.tell("load_until", version=2)
        assert await picky.ask("receive") == {"version": 2, "values": [2.0]}
        assert await first.still_at_it()
        assert await picky.ask("refuse", why="twos are not taken") == 1
        for target in (first, victim):
            answer = await target.answer()
            assert answer["error"] == "NotAdopted"
            assert "rollout/1 does not load it" in answer["text"]
            assert "twos are not taken" in answer["text"]

        await publish(trainer, 3)
        first.tell("load_until", version=3)
        for target in (picky, victim):
            assert (await target.ask("receive"))["version"] == 3
        victim.tell("adopt")
        assert await victim.still_at_it()
        await victim.kill()
        assert await first.still_at_it()
        assert await picky.ask("adopt") == 3
        assert await picky.ask("loaded") == 3
        assert await first.answer() == [3]

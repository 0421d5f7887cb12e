"""A coordinator that is stopped, or killed at the worst moment, and started again: publishes and receives go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import replicas
from replicas.channel import Channel, Receipt, Update
from tests.support.channels import POLICY
from tests.support.coordinator_process import CoordinatorProcess

pytestmark = pytest.mark.anyio


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(value)), "b": torch.full((3,), float(value))}


def value_of(update: Update) -> float:
    """The one value that all tensors must have."""
    values = {value for _, tensor in update for value in tensor.tolist()}
    assert len(values) == 1, "a torn set of weights"
    return values.pop()


async def publish(channel: Channel, value: float) -> Receipt:
    return await (await asyncio.to_thread(channel.publish, weights(value)))


async def load(channel: Channel) -> tuple[int, float]:
    with await channel.receive(deadline=40) as update:
        return update.version, value_of(update)


class World:
    """Members in this process, the coordinator in one of its own."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self.coordinator = coordinator
        self.joined: list[Channel] = []

    async def join(self, group: str, replica: int = 0, rank: int = 0, world_size: int = 1) -> Channel:
        def join() -> Channel:
            where: dict[str, Any] = {"endpoint": self.coordinator.endpoint, "token": self.coordinator.token}
            return replicas.join("policy", group=group, replica=replica, rank=rank, world_size=world_size, **where)

        self.joined.append(await asyncio.to_thread(join))
        return self.joined[-1]

    async def restarted(self) -> None:
        """It has killed itself at its moment, and is started again."""
        await self.coordinator.died()
        await self.coordinator.start()


@asynccontextmanager
async def world_of(state_dir: Path | None, config: dict[str, Any] | None = None, **groups: int) -> AsyncIterator[World]:
    """``groups``: ranks of each replica."""
    coordinator = CoordinatorProcess({**POLICY, **(config or {})}, groups, state_dir)
    world = World(coordinator)
    try:
        await coordinator.start()
        yield world
    finally:
        await asyncio.gather(*(asyncio.to_thread(channel.close, wait=False) for channel in world.joined))
        await coordinator.clean_up()


@pytest.fixture(params=["log", "no log"])
def state_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """With a decision log, and without."""
    return tmp_path if request.param == "log" else None


async def test_a_publish_outlives_its_coordinator_at_any_moment(state_dir: Path | None) -> None:
    async with world_of(state_dir) as world:
        trainer = await world.join("trainer")
        rollouts = [await world.join("rollout", replica) for replica in range(2)]
        await publish(trainer, 1)
        for rollout in rollouts:
            assert await load(rollout) == (1, 1.0)
        moments = ["publish begun", "admitting", "packed", "going", "first done", "decided", "telling", "told"]
        for version, moment in enumerate(moments, 2):
            asked = [rollout.receive() for rollout in rollouts]
            await world.coordinator.arm(moment)
            publishing = asyncio.create_task(publish(trainer, version))
            await world.restarted()
            receipt = await publishing
            assert (receipt.version, receipt.lost) == (version, ()), moment
            assert trainer.version == trainer.latest == version
            for pending in asked:
                with await pending as update:
                    assert (update.version, value_of(update)) == (version, version), moment
            assert await trainer.loaded(version, deadline=20) == version

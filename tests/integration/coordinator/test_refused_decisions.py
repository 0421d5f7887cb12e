"""While the disk refuses a decision, nobody is told of it, and other channels go on."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest
import torch

from replicas.coordinator import Coordinator
from replicas.core.base.ledger import Decision
from tests.support.channels import POLICY, ChannelWorld
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

CHANNELS: dict[str, Any] = {"policy": POLICY, "outer": {"peers": ["peer"], "deadline": "60s"}}


async def test_nobody_is_told_of_it_and_another_channel_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Coordinator(CHANNELS) as coordinator:
        world = ChannelWorld(coordinator, "policy")
        try:
            await _refuse_and_take(world, coordinator, monkeypatch)
        finally:
            await world.aclose()


async def _refuse_and_take(world: ChannelWorld, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rollout = await world.trainer_and_rollouts()
    peers = [await world.join("peer", index, channel="outer") for index in range(2)]
    await (await asyncio.to_thread(trainer.publish, {"w": torch.ones(4)}))
    watching = rollout.committed(after=1)
    refused: list[int] = []

    def refuse(decision: Decision) -> None:
        refused.append(decision.version)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(coordinator.engine.decisions, "append", refuse)
        second = await asyncio.to_thread(trainer.publish, {"w": torch.ones(4)})
        await wait_until(lambda: refused, "the second version is decided")
        newcomer = await world.join("rollout", 1)
        observer = await world.join("watcher", observe=True)
        assert (newcomer.latest, observer.latest, rollout.latest) == (1, 1, 1)
        [status] = [status for status in coordinator.channel_statuses() if status.name == "policy"]
        assert (status.committed_version, status.syncs) == (1, {"committed": 1})
        assert status.last_sync is not None
        assert status.last_sync.version == 1
        assert "No space left" in status.disk_problem
        values = [torch.tensor([1.0]), torch.tensor([3.0])]
        sums = [peer.all_reduce([value], op="sum") for peer, value in zip(peers, values, strict=True)]
        for done in sums:
            await done
        assert [value.item() for value in values] == [4.0, 4.0]
        assert set(refused) == {2}
        assert not watching.done()
        assert not second.done()
    receipt = await second
    assert receipt.version == 2
    assert receipt.seconds == pytest.approx(sum(receipt.phases.values()), abs=0.05)
    assert receipt.phases["commit"] > receipt.seconds / 2, receipt.phases
    assert await watching == 2
    await wait_until(lambda: observer.latest == newcomer.latest == 2, "all are told")
    [status] = [status for status in coordinator.channel_statuses() if status.name == "policy"]
    assert (status.committed_version, status.syncs, status.disk_problem) == (2, {"committed": 2}, "")

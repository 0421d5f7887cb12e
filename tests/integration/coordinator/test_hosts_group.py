"""A process group of members on several hosts (``transport = "group"``)."""

from __future__ import annotations

import asyncio

import pytest

from replicas.coordinator import GroupShape
from tests.integration.coordinator.test_hosts import GROUP, ONCE, Links, sync
from tests.support.channel.host_ranks import HostRank, HostWorld, host_world
from tests.support.machine.networks import why_no_hosts

pytestmark = pytest.mark.anyio

GROUP_TRIES, GROUP_RESTS_S = 10, 4.0


@pytest.fixture(autouse=True, scope="module")
def _hosts() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


async def synced_by_a_group(world: HostWorld, trainer: HostRank, targets: list[HostRank]) -> Links:
    """Sync until one process group has carried two versions; return the links of the
    second.

    On a busy machine it may not form in time: the members pull, and it is tried again.
    """
    was_there = False
    for seed in range(GROUP_TRIES):
        links = Links(world.hosts)
        await sync([trainer], targets, seed)
        is_there = world.sidecars() == [1] * len(world.hosts)
        if is_there and was_there:
            return links
        was_there = is_there
        if not is_there:
            await asyncio.sleep(GROUP_RESTS_S)
    raise AssertionError(f"no process group of all in {GROUP_TRIES} versions")


async def test_a_process_group_sends_every_byte_once() -> None:
    """A chain from the trainer through all hosts."""
    async with host_world(3, GROUP, rollout=GroupShape(2)) as world:
        trainer, targets = await world.trainer_and_rollouts(1, 2)
        links = await synced_by_a_group(world, trainer, targets)
        assert 1.0 <= links.sent()[0] < ONCE
        assert all(1.0 <= ratio < ONCE for ratio in links.received()[1:])

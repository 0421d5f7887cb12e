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


async def synced_by_a_group(world: HostWorld, sources: list[HostRank], targets: list[HostRank]) -> Links:
    """Sync until one process group has carried two versions; return the links of the
    second.

    On a busy machine it may not form in time: the members pull, and it is tried again.
    """
    was_there = False
    for seed in range(GROUP_TRIES):
        links = Links(world.hosts)
        await sync(sources, targets, seed)
        is_there = world.sidecars() == [1] * len(world.hosts)
        if is_there and was_there:
            return links
        was_there = is_there
        if not is_there:
            await asyncio.sleep(GROUP_RESTS_S)
    raise AssertionError(f"no process group of all in {GROUP_TRIES} versions")


@pytest.mark.parametrize("ranks", ["leader", "all"])
async def test_a_process_group_sends_every_byte_once(ranks: str) -> None:
    """A chain from the trainer, or from each of its ranks, through all hosts."""
    size = 2 if ranks == "all" else 1
    config = {**GROUP, "sources": [{"group": "trainer", "ranks": ranks}]}
    async with host_world(size + 2, config, trainer=GroupShape(1, size), rollout=GroupShape(2)) as world:
        joins = [
            *(world.join(rank, "trainer", 0, rank, size) for rank in range(size)),
            *(world.join(size + index, "rollout", index) for index in range(2)),
        ]
        members = await asyncio.gather(*joins)
        sources, targets = members[:size], members[size:]
        await world.live(size + 2)
        links = await synced_by_a_group(world, sources, targets)
        assert all(1.0 / size <= ratio < ONCE / size for ratio in links.sent()[:size])
        assert all(1.0 <= ratio < ONCE for ratio in links.received()[size:])

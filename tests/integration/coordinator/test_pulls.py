"""Members on several hosts that pull versions from each other (``transport = "tcp"``).

Covers: channel/session/carriers.py, channel/versions/carried.py,
core/moving/deliveries.py.
"""

from __future__ import annotations

import asyncio

import pytest

from replicas.coordinator import GroupShape
from tests.integration.coordinator.test_hosts import LITTLE, ONCE, Links, sync
from tests.support.channel.host_ranks import host_world
from tests.support.machine.networks import why_no_hosts

pytestmark = pytest.mark.anyio
TCP = {"transport": "tcp"}
FIRST = 21_700
"""A port for carriers; each host has its own."""


@pytest.fixture(autouse=True, scope="module")
def _hosts() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


async def test_one_member_of_a_host_pulls_and_the_others_map() -> None:
    async with host_world(2, TCP, rollout=GroupShape(3)) as world:
        trainer, targets = await world.trainer_and_rollouts(0, 1, 1)
        await sync([trainer], targets, 10)
        links = Links(world.hosts)
        await sync([trainer], targets, 20)
        here, there = links.sent()
        assert 1.0 <= here < ONCE
        assert there < LITTLE
        assert 1.0 <= links.received()[1] < ONCE
        assert world.sidecars() == [0, 0]


async def test_bytes_leave_the_trainers_host_once_however_many_hosts_there_are() -> None:
    async with host_world(4, TCP, rollout=GroupShape(3)) as world:
        trainer, targets = await world.trainer_and_rollouts(1, 2, 3)
        await sync([trainer], targets, 10)
        links = Links(world.hosts)
        await sync([trainer], targets, 20)
        assert 1.0 <= links.sent()[0] < ONCE
        assert all(1.0 <= ratio < ONCE for ratio in links.received()[1:])


async def test_a_leader_that_dies_leaves_its_host_to_another() -> None:
    async with host_world(2, TCP, rollout=GroupShape(3)) as world:
        trainer, targets = await world.trainer_and_rollouts(1, 1, 1)
        await sync([trainer], targets, 10)
        leader, *others = targets
        leader.kill()
        await sync([trainer], others, 20, lost=[leader.name])
        links = Links(world.hosts)
        await sync([trainer], others, 30, lost=[leader.name])
        assert 1.0 <= links.received()[1] < ONCE


async def test_an_encrypted_channel_through_fixed_ports() -> None:
    async with host_world(3, {**TCP, "encrypt": True}, carry_port=FIRST, rollout=GroupShape(3)) as world:
        trainer, targets = await world.trainer_and_rollouts(1, 1, 2)
        await sync([trainer], targets, 10)
        links = Links(world.hosts)
        await sync([trainer], targets, 20)
        assert 1.0 <= links.sent()[0] < ONCE
        assert all(1.0 <= ratio < ONCE for ratio in links.received()[1:])
        (channel,) = world.coordinator.engine.channels.values()
        listening = [state for state in channel.roster if state.carrier_port]
        assert {state.address for state in listening} == {host.address for host in world.hosts}
        assert {state.carrier_port - FIRST for state in listening} <= set(range(3))
        assert len({state.certificate_hash for state in listening}) == len(listening)
        assert world.sidecars() == [0, 0, 0]


@pytest.mark.parametrize("encrypt", [False, True])
async def test_every_source_rank_serves_its_own_part(encrypt: bool) -> None:
    """Two trainer ranks on two hosts, a target beside each, and one elsewhere."""
    config = {**TCP, "encrypt": encrypt, "sources": [{"group": "trainer", "ranks": "all"}]}
    async with host_world(3, config, trainer=GroupShape(1, 2), rollout=GroupShape(3)) as world:
        joins = [
            *(world.join(rank, "trainer", 0, rank, 2) for rank in range(2)),
            *(world.join(host, "rollout", host) for host in range(3)),
        ]
        first, second, *targets = await asyncio.gather(*joins)
        await world.live(5)
        await sync([first, second], targets, 10)
        links = Links(world.hosts)
        await sync([first, second], targets, 20)
        assert sum(links.sent()) < 2 * ONCE  # each part goes to two hosts
        assert 1.0 <= links.received()[2] < ONCE
        assert world.sidecars() == [0, 0, 0]


async def test_what_has_not_changed_is_not_sent_again() -> None:
    async with host_world(3, TCP, rollout=GroupShape(4)) as world:
        trainer, targets = await world.trainer_and_rollouts(0, 1, 2)
        await sync([trainer], targets, 10)
        links = Links(world.hosts)
        await sync([trainer], targets, 10)
        assert max(*links.sent(), *links.received()) < LITTLE
        late = await world.join(2, "rollout", 3)
        await world.live(5)
        links = Links(world.hosts)
        await sync([trainer], [*targets, late], 10)
        assert max(*links.sent(), *links.received()) < LITTLE

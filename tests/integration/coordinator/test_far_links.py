"""A target behind a long, slow link that loses packets, and hosts with IPv6 alone:
versions are pulled (``transport = "tcp"``), and the far one is in nobody's way.

Covers: carry/dialler.py, core/moving/paths.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from replicas.coordinator import GroupShape
from tests.integration.coordinator.test_hosts import sync
from tests.support.channel.host_ranks import HostRank, host_world
from tests.support.machine.cable import MBIT_NBYTES, Shape
from tests.support.machine.networks import Machine, why_no_hosts

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]
TCP = {"transport": "tcp"}
NBYTES = 18 << 20
FAR = Shape(20 * MBIT_NBYTES, 0.025, 0.01)
"""A version takes more than seven seconds."""
SOON_S = 7.0
"""Less than all bytes take at least."""
FEW = 0.05


@pytest.fixture(autouse=True, scope="module")
def _hosts() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


def came(host: Machine) -> float:
    return host.traffic().received / NBYTES


async def until_it_has(target: HostRank, seed: int, base: int = -1) -> None:
    while (await target.ask("receive_bytes", base=base))["seed"] != seed:
        pass


async def test_a_far_target_takes_deltas_and_a_near_one_is_not_held_up() -> None:
    """The far one has the first place in the order of hosts."""
    async with host_world(3, TCP, cables={1: FAR}, rollout=GroupShape(2)) as world:
        trainer, (far, near) = await world.chain()
        publishing = asyncio.create_task(trainer.ask("publish_bytes", seed=1, nbytes=NBYTES))
        await asyncio.gather(publishing, until_it_has(near, 1), until_it_has(far, 1))

        before = came(far.host)
        began = time.monotonic()
        publishing = asyncio.create_task(trainer.ask("publish_bytes", seed=2, nbytes=NBYTES, base=1))
        await asyncio.gather(until_it_has(near, 2, 1), until_it_has(far, 2, 1))
        assert time.monotonic() - began < SOON_S
        await publishing
        assert came(far.host) - before < FEW

        before = came(far.host)
        publishing = asyncio.create_task(trainer.ask("publish_bytes", seed=3, nbytes=NBYTES))
        await until_it_has(near, 3)
        assert came(far.host) - before < 0.95, "the near one does not wait until the far one has all bytes"
        assert (await publishing)["lost"] == [far.name]
        await until_it_has(far, 3)  # it is caught up

        before = came(far.host)
        publishing = asyncio.create_task(trainer.ask("publish_bytes", seed=4, nbytes=NBYTES, base=3))
        await asyncio.gather(publishing, until_it_has(near, 4, 3), until_it_has(far, 4, 3))
        assert came(far.host) - before < FEW, "a delta again"


async def test_hosts_with_ipv6_alone_pull_versions() -> None:
    async with host_world(3, TCP, ipv6=True, rollout=GroupShape(2)) as world:
        trainer, targets = await world.chain()
        await sync([trainer], targets, 10)
        before = [host.traffic() for host in world.hosts]
        await sync([trainer], targets, 20)
        moved = [host.traffic().since(earlier) for host, earlier in zip(world.hosts, before, strict=True)]
        assert moved[0].sent < 1.25 * (16 << 20), "the trainer's host sends it once"
        (channel,) = world.coordinator.engine.channels.values()
        assert {state.address for state in channel.roster if state.carrier_port} == {h.address for h in world.hosts}
        assert all(":" in host.address for host in world.hosts)
        assert world.sidecars() == [0, 0, 0]

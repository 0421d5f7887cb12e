"""Members on several hosts (namespaces of network, mounts and processes): who sends
bytes to whom, and how many; also over process groups (``transport = "group"``).
:mod:`tests.integration.coordinator.test_pulls` has more on pulls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from replicas.coordinator import GroupShape
from tests.support.channel.host_rank import ELEMENTS, TENSORS
from tests.support.channel.host_ranks import HostRank, HostWorld, host_world
from tests.support.machine.networks import Machine, Traffic, why_no_hosts
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

NBYTES = TENSORS * ELEMENTS * 4
ONCE = 1.25
"""The payload once, with headers of packets, and what else goes over the link."""
LITTLE = 0.25
GROUP = {"transport": "group"}
SLOW = "100mbit"
"""A version takes more than a second over such a link."""
SOON_S = 12.0
"""More than it takes to notice a holder that says nothing, and to pull all again."""


@pytest.fixture(autouse=True, scope="module")
def _hosts() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


async def sync(sources: list[HostRank], targets: list[HostRank], seed: int, lost: Sequence[str] = ()) -> None:
    """One version from all sources (each has a part) to all targets, which must find
    the right values.

    ``lost``: who may be left out.
    """
    parts = len(sources)
    moves = [one.ask("publish", seed=seed, part=part, parts=parts) for part, one in enumerate(sources)]
    receipts = await asyncio.gather(*moves)
    for receipt in receipts:
        assert set(receipt["lost"]) <= set(lost), receipt["reasons"]
    for reply in await asyncio.gather(*(one.ask("receive") for one in targets)):
        assert reply == {"version": receipts[0]["version"], "seed": seed}


class Links:
    """What has gone over the links of all hosts since it was made, as a multiple of the
    payload."""

    def __init__(self, machines: tuple[Machine, ...]) -> None:
        self._machines = machines
        self._before = [machine.traffic() for machine in machines]

    def traffic(self) -> list[Traffic]:
        return [machine.traffic().since(before) for machine, before in zip(self._machines, self._before, strict=True)]

    def sent(self) -> list[float]:
        return [traffic.sent / NBYTES for traffic in self.traffic()]

    def received(self) -> list[float]:
        return [traffic.received / NBYTES for traffic in self.traffic()]


async def came(host: Machine, links: Links, world: HostWorld, share: float) -> None:
    """Wait until so much of a version has come to a host."""
    at = world.hosts.index(host)
    await wait_until(lambda: links.received()[at] >= share, f"{share:.0%} of a version")


def slowed(stack: ExitStack, hosts: tuple[Machine, ...]) -> None:
    for host in hosts:
        stack.enter_context(host.limited(SLOW))


async def test_members_on_one_host_send_nothing() -> None:
    async with host_world(1, rollout=GroupShape(2)) as world:
        trainer, targets = await world.trainer_and_rollouts(0, 0)
        links = Links(world.hosts)
        for seed in (1, 2):
            await sync([trainer], targets, seed)
        assert links.sent()[0] < LITTLE
        assert world.sidecars() == [0]


async def test_every_source_rank_sends_its_own_part_between_hosts() -> None:
    """Two ranks of the trainer on two hosts; a target beside each, which maps the part
    of its own host."""
    trainer = [{"group": "trainer", "ranks": "all"}]
    async with host_world(2, {"sources": trainer}, trainer=GroupShape(1, 2), rollout=GroupShape(2)) as world:
        joins = [
            *(world.join(rank, "trainer", 0, rank, 2) for rank in range(2)),
            *(world.join(host, "rollout", host) for host in range(2)),
        ]
        first, second, *targets = await asyncio.gather(*joins)
        await world.live(4)
        await sync([first, second], targets, 10)
        links = Links(world.hosts)
        await sync([first, second], targets, 20)
        assert all(0.5 <= ratio < 0.5 * ONCE for ratio in links.sent())

"""Manifests of every size and number: many after each other, very large ones, over slow
links, after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas import Shard, errors
from replicas.channel import Channel, Receipt
from replicas.coordinator import GroupShape
from replicas.core.versions.fetching import PIECE_NBYTES
from replicas.messages.bounds import MANIFEST_NBYTES
from tests.support.channel.coordinator_process import CoordinatorProcess
from tests.support.channels import channel_world
from tests.support.machine.proxy import Proxy
from tests.support.waits import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

SLOW_NBYTES_PER_S = 200_000


def named(count: int, length: int, value: float = 1.0, start: int = 0) -> dict[str, torch.Tensor]:
    """So many small tensors, with names so long: all of the manifest is names."""
    tensors = torch.full((count, 2), value)
    return {f"{start + number:0{length}}": tensor for number, tensor in enumerate(tensors)}


async def publish(channel: Channel, weights: object, **more: Any) -> Receipt:
    return await (await asyncio.to_thread(lambda: channel.publish(weights, new_manifest=True, **more)))


async def test_many_manifests_in_turn_are_all_taken() -> None:
    """As with adapters: one that all others come between is used again and again; some
    come back after many others."""
    async with channel_world(rollout=2) as world:
        trainer, *rollouts = await world.trainer_and_rollouts(2)
        shapes = [*range(1, 21), *(one for other in range(2, 21) for one in (1, other)), 3]
        for count in shapes:
            receipt = await publish(trainer, named(count, 4, float(count)))
            assert (len(receipt.members), receipt.lost) == (2, ())
        for rollout in rollouts:
            with await rollout.receive() as update:
                assert len(dict(update)) == 3
        members = world.coordinator.engine.channels["policy"].roster
        assert {state.host for state in members} == {1}, "nobody was taken for another host"


async def test_a_manifest_of_36_mb_goes_through_and_one_above_the_limit_is_refused_in_the_call() -> None:
    async with channel_world({"deadline": "60s"}, rollout=1) as world:
        trainer, rollout = await world.trainer_and_rollouts(1)
        weights = named(10_000, 3_600, 2.0)
        assert (await publish(trainer, weights)).lost == ()
        with await rollout.receive() as update:
            assert len(dict(update)) == 10_000
        began = time.monotonic()
        with pytest.raises(
            errors.ManifestMismatch, match=rf"20,000 tensors and 7\d,\d+,\d+ bytes.*{MANIFEST_NBYTES:,}"
        ):
            await publish(trainer, named(20_000, 3_600))
        assert time.monotonic() - began < 20
        receipt = await publish(trainer, named(1, 3_600, 3.0))
        assert (receipt.version, receipt.lost) == (3, ())
        with await rollout.receive() as update:
            assert next(iter(dict(update).values()))[0] == 3.0


async def test_a_version_in_parts_with_a_large_manifest_outlives_its_coordinator(tmp_path: Path) -> None:
    """What the ranks say is small, what is made of it is not: a new coordinator has it
    from a holder all the same."""
    config = {"sources": [{"group": "trainer", "ranks": "all"}], "targets": ["rollout"], "deadline": "60s"}
    coordinator = CoordinatorProcess(config, {"trainer": 2}, tmp_path)
    await coordinator.start()
    joined: list[Channel] = []

    async def join(group: str, replica: int, rank: int = 0, world_size: int = 1) -> Channel:
        import replicas

        where: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token}
        identity: dict[str, Any] = {"group": group, "replica": replica, "rank": rank, "world_size": world_size}
        joined.append(await asyncio.to_thread(lambda: replicas.join("policy", **where, **identity)))
        return joined[-1]

    def part(rank: int) -> list[tuple[str, Shard]]:
        return [
            (name, Shard(tensor, (0,), (2,))) for name, tensor in named(3_000, 3_200, float(rank), 3_000 * rank).items()
        ]

    try:
        trainers = [await join("trainer", 0, rank, 2) for rank in range(2)]
        rollouts = [await join("rollout", replica) for replica in range(2)]
        receipts = await asyncio.gather(*(publish(trainer, part(rank)) for rank, trainer in enumerate(trainers)))
        assert [receipt.lost for receipt in receipts] == [(), ()]
        for rollout in rollouts:
            with await rollout.receive() as update:
                assert len(dict(update)) == 6_000
        await coordinator.kill()
        await coordinator.start()
        newcomer = await join("rollout", 2)
        with await newcomer.receive(deadline=60) as update:
            assert len(dict(update)) == 6_000
        assert [channel._hub.over for channel in joined] == [None] * 5
    finally:
        await asyncio.gather(*(asyncio.to_thread(channel.close, wait=False) for channel in joined))
        await coordinator.clean_up()


async def test_a_manifest_over_a_slow_link_holds_up_nobody_and_arrives() -> None:
    """3 MB at 200 kB/s take 16 s, which is more than the deadline."""
    async with channel_world({"deadline": "12s"}, rollout=GroupShape(2, 1)) as world, Proxy(world.endpoint) as link:
        trainer, healthy = await world.join("trainer"), await world.join("rollout", 0)
        await publish(trainer, named(3, 4))
        world.endpoint, link.nbytes_per_s = link.endpoint, SLOW_NBYTES_PER_S
        slow = await world.join("rollout", 1)
        await wait_until(lambda: slow.latest == 1, "it has heard of the first version")
        dials = link.connections
        large = await publish(trainer, named(1_000, 3_200, 2.0))
        assert large.lost == ("rollout/1/0",)
        assert large.seconds < 6.0, "it is left behind long before the deadline"
        with await healthy.receive() as update:
            assert len(dict(update)) == 1_000
        small = await publish(trainer, named(3, 4, 3.0))
        assert small.seconds < 6.0
        with await slow.receive(deadline=9) as update:
            assert update.version == small.version, "small ones go between the pieces of the large one"
        last = await publish(trainer, named(1_000, 3_200, 4.0))
        with await slow.receive(deadline=60) as update:
            assert (update.version, len(dict(update))) == (last.version, 1_000)
        assert link.connections == dials, "it was slow, and never dead"
        assert last.version == 4


async def test_a_source_behind_a_slow_link_is_alive_all_the_while() -> None:
    """What it says takes longer than its lease, in messages large and small."""
    shape = GroupShape(1, 1, heartbeat_timeout_s=2.5)
    async with channel_world({"deadline": "60s"}, rollout=1, trainer=shape) as world, Proxy(world.endpoint) as link:
        endpoint, world.endpoint = world.endpoint, link.endpoint
        trainer = await world.join("trainer")
        world.endpoint = endpoint
        rollout = await world.join("rollout")
        link.nbytes_per_s = SLOW_NBYTES_PER_S
        receipt = await publish(trainer, named(300, 3_200), meta={"note": "x" * 1_000_000})
        assert receipt.seconds > 2 * 2.5
        with await rollout.receive() as update:
            assert len(str(update.meta["note"])) == 1_000_000
        assert link.connections == 1


async def test_a_connection_that_breaks_costs_no_piece_that_has_arrived() -> None:
    async with channel_world({"deadline": "30s"}, rollout=1) as world, Proxy(world.endpoint) as link:
        trainer = await world.join("trainer")
        world.endpoint = link.endpoint
        rollout = await world.join("rollout")
        link.nbytes_per_s = 4 * SLOW_NBYTES_PER_S
        publishing = asyncio.create_task(publish(trainer, named(1_000, 3_200)))
        fetches = rollout._manifests._fetches
        await wait_until(
            lambda: fetches and len(next(iter(fetches.values()))[0]._data) > 8 * PIECE_NBYTES, "some of it"
        )
        (fetch, _), *_ = fetches.values()
        before = len(fetch._data)
        link.cut()
        await wait_until(lambda: len(fetch._data) > before, "more of it")
        assert fetches
        assert next(iter(fetches.values()))[0] is fetch
        receipt = await publishing
        assert receipt.lost == ()

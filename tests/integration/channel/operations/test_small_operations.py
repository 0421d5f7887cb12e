"""Small operations of real peers, one after another, also when a peer, a sidecar or a
call fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.channel import Channel, Pending, Receipt
from tests.support.channels import ChannelWorld, channel_world
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

PEERS = {"peers": ["peer"]}


async def outcomes(pendings: Sequence[Pending[Receipt]]) -> list[Any]:
    """Receipts or errors."""
    return await asyncio.wait_for(asyncio.gather(*pendings, return_exceptions=True), 60)


async def peers(world: ChannelWorld, count: int) -> list[Channel]:
    """Peers that have done a few operations."""
    channels = [await world.join("peer", replica) for replica in range(count)]
    for _ in range(8):
        await outcomes([channel.barrier() for channel in channels])
    return channels


def sidecars(channel: Channel) -> list[Any]:
    return [lane.sidecar for lane in channel._lanes._lanes.values() if lane.sidecar is not None]


async def test_every_size_and_kind() -> None:
    async with channel_world(PEERS, peer=3) as world:
        channels = await peers(world, 3)
        for numel in (1, 1000, 100_000):
            for dtype, op, wanted in (
                (torch.float32, "mean", 2),
                (torch.bfloat16, "sum", 6),
                (torch.int64, "max", 3),
                (torch.float16, "min", 1),
            ):
                tensors = [torch.full((numel,), replica + 1, dtype=dtype) for replica in range(3)]
                found = await outcomes(
                    [channel.all_reduce(tensor, op) for channel, tensor in zip(channels, tensors, strict=True)]  # type: ignore[arg-type]  # a valid op
                )
                assert all(tensor.eq(wanted).all() for tensor in tensors)
                assert [len(receipt.members) for receipt in found] == [3] * 3
                assert found[0].nbytes == tensors[0].nbytes
        tensors = [torch.full((5,), float(replica)) for replica in range(3)]
        await outcomes([channel.broadcast(tensor, "peer/1") for channel, tensor in zip(channels, tensors, strict=True)])
        assert all(tensor.eq(1).all() for tensor in tensors)
        await outcomes([channel.reduce(tensor, "peer/2") for channel, tensor in zip(channels, tensors, strict=True)])
        assert [tensor[0].item() for tensor in tensors] == [1, 1, 3]
        await outcomes([channel.barrier(step=7) for channel in channels])


async def test_many_calls_at_once_keep_their_order() -> None:
    async with channel_world(PEERS, peer=2) as world:
        channels = await peers(world, 2)
        tensors = [[torch.full((8,), float(number)) for number in range(20)] for _ in channels]
        pendings = [channel.all_reduce(tensors[i][n]) for n in range(20) for i, channel in enumerate(channels)]
        assert all(isinstance(found, Receipt) for found in await outcomes(pendings))
        for number in range(20):
            assert all(tensors[i][number].eq(2 * number).all() for i in range(2))


async def test_a_killed_sidecar_costs_a_second_attempt_and_nothing_else() -> None:
    async with channel_world(PEERS, peer=3) as world:
        channels = await peers(world, 3)
        tensors = [torch.full((64,), float(replica + 1)) for replica in range(3)]
        pendings = [channels[0].all_reduce(tensors[0], "mean")]
        os.kill(sidecars(channels[1])[0].pid, signal.SIGKILL)
        pendings += [
            channel.all_reduce(tensor, "mean") for channel, tensor in zip(channels[1:], tensors[1:], strict=True)
        ]
        found = await outcomes(pendings)
        assert [len(receipt.members) for receipt in found] == [3] * 3
        assert all(tensor.eq(2).all() for tensor in tensors)


async def test_a_peer_that_leaves_in_the_middle() -> None:
    async with channel_world(PEERS, peer=3) as world:
        channels = await peers(world, 3)
        tensors = [torch.full((64,), float(replica + 1)) for replica in range(3)]
        pendings = [channels[i].all_reduce(tensors[i], "mean") for i in (0, 2)]
        await asyncio.to_thread(channels[1].close)
        found = await outcomes(pendings)
        assert [[member.name for member in receipt.members] for receipt in found] == [["peer/0/0", "peer/2/0"]] * 2
        assert [tensors[i][0].item() for i in (0, 1, 2)] == [2, 2, 2]


async def test_peers_that_call_different_things_all_hear_of_it_at_once() -> None:
    async with channel_world(PEERS, peer=2) as world:
        channels = await peers(world, 2)
        for first, second in (
            (torch.ones(4), torch.ones(5)),
            (torch.ones(4), torch.ones(1_000_000)),
            (torch.ones(4), None),
        ):
            kept = first.clone()
            pendings = [channels[0].all_reduce(first)]
            pendings.append(channels[1].barrier() if second is None else channels[1].all_reduce(second))
            found = await outcomes(pendings)
            assert [type(error) for error in found] == [errors.RanksDisagree] * 2, found
            assert first.equal(kept)
            again = await outcomes([channel.barrier() for channel in channels])
            assert all(isinstance(one, Receipt) for one in again)


async def test_a_newcomer_and_other_kinds_of_calls() -> None:
    async with channel_world(PEERS, peer=2) as world:
        channels = await peers(world, 2)
        found = await outcomes([channel.all_gather(torch.ones(2)) for channel in channels])
        assert all(len(receipt.outputs) == 2 for receipt in found)
        channels.append(await world.join("peer", 2))
        live = world.coordinator.engine.channels["policy"].roster
        await wait_until(lambda: len(live.live) == 3, "the newcomer is live")
        tensors = [torch.full((3,), float(replica)) for replica in range(3)]
        found = await outcomes([channel.all_reduce(t) for channel, t in zip(channels, tensors, strict=True)])
        assert [len(receipt.members) for receipt in found] == [3] * 3
        assert all(tensor.eq(3).all() for tensor in tensors)


async def test_a_deadline_ends_an_operation_that_others_do_not_join() -> None:
    async with channel_world(PEERS, peer=2) as world:
        channels = await peers(world, 2)
        tensor = torch.ones(4)
        (found,) = await outcomes([channels[0].all_reduce(tensor, deadline=0.5)])
        assert isinstance(found, errors.DeadlineExceeded)
        assert found.members == ("peer/1/0",)
        assert tensor.eq(1).all()
        assert all(isinstance(one, Receipt) for one in await outcomes([channel.barrier() for channel in channels]))

"""Collectives between peers through a real coordinator, store and sidecars; all members
in this process.

What becomes of them when a peer, a sidecar or a call fails is in
test_small_operations.py (between two calls) and test_operation_faults.py (in the
middle of one).

Covers: sidecar/collective.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.channel import Channel, Pending, Receipt
from replicas.coordinator import GroupShape
from tests.support.channels import ChannelWorld, channel_world

pytestmark = pytest.mark.anyio

PEERS = {"peers": ["peer"]}


async def everyone(peers: list[Channel], call: Callable[[int, Channel], Pending[Receipt]]) -> list[Receipt]:
    return await asyncio.gather(*(call(index, peer) for index, peer in enumerate(peers)))


async def three(world: ChannelWorld) -> list[Channel]:
    return [await world.join("peer", index) for index in range(3)]


async def test_every_collective() -> None:
    async with channel_world(PEERS, peer=3) as world:
        peers = await three(world)
        members = [peer.member for peer in peers]

        for op, value in (("sum", 6.0), ("mean", 2.0), ("min", 1.0), ("max", 3.0)):
            given = [[torch.full((4, 4), index + 1.0), torch.full((), index + 1.0)] for index in range(3)]
            receipts = await everyone(peers, lambda i, p, op=op, given=given: p.all_reduce(given[i], op, step=None))  # type: ignore[misc]  # mypy cannot infer the defaults
            assert all(tensor.eq(value).all() for tensors in given for tensor in tensors), op
            assert receipts[0].members == tuple(members)

        one = [torch.full((5,), float(index)).bfloat16().t() for index in range(3)]
        await everyone(peers, lambda i, p: p.broadcast(one[i], "peer/1"))
        assert all(tensor.eq(1).all() for tensor in one)

        reduced = [torch.full((5,), index + 1, dtype=torch.int64) for index in range(3)]
        await everyone(peers, lambda i, p: p.reduce(reduced[i], members[2]))
        assert [tensor[0].item() for tensor in reduced] == [1, 2, 6]

        ragged = [torch.full((index + 1,), float(index)).to(torch.float8_e5m2) for index in range(3)]
        receipts = await everyone(peers, lambda i, p: p.all_gather(ragged[i]))
        for receipt in receipts:
            assert list(receipt.outputs) == members
            for index, member in enumerate(members):
                assert torch.equal(receipt.outputs[member][0].float(), ragged[index].float())

        out = [torch.zeros(2) for _ in range(3)]
        receipts = await everyone(peers, lambda i, p: p.gather(torch.ones(2) * i, "peer/0", out if i == 0 else None))
        assert [tensor[0].item() for tensor in out] == [0, 1, 2]
        assert [len(receipt.outputs) for receipt in receipts] == [3, 0, 0]
        assert receipts[0].outputs[members[2]][0] is out[2]

        parts = [torch.full((2,), float(index)) for index in range(3)]
        mine = torch.zeros(2)
        receipts = await everyone(
            peers, lambda i, p: p.scatter(parts if i == 1 else None, "peer/1", mine if i == 2 else None)
        )
        assert [receipt.tensors[0][0].item() for receipt in receipts] == [0, 1, 2]
        assert receipts[2].tensors[0] is mine

        receipts = await everyone(
            peers, lambda i, p: p.reduce_scatter([torch.full((3,), float(i + k)) for k in range(3)])
        )
        assert [receipt.tensors[0][0].item() for receipt in receipts] == [3, 6, 9]

        await everyone(peers, lambda i, p: p.barrier())


async def test_send_and_recv() -> None:
    async with channel_world(PEERS, peer=3) as world:
        first, second, third = await three(world)
        sent = [torch.arange(6).view(2, 3), torch.tensor(True)]
        receiving = second.recv(src="peer/0")
        await first.send(sent, dst=second.member)
        got = (await receiving).tensors
        assert torch.equal(got[0], sent[0])
        assert torch.equal(got[1], sent[1])
        place = torch.zeros(3)
        receiving = first.recv(place, src="peer/2/0")
        await third.send(torch.ones(3), dst="peer/0")
        assert (await receiving).tensors[0] is place
        assert place.sum() == 3
        wrong = torch.zeros(4)
        receiving, sending = first.recv(wrong, src="peer/1"), second.send(torch.ones(3), dst="peer/0")
        for pending in (receiving, sending):
            with pytest.raises(errors.RanksDisagree, match=r"float32\[3\].*float32\[4\]"):
                await pending
        assert wrong.sum() == 0


async def test_in_place_on_success_and_untouched_on_failure() -> None:
    async with channel_world(PEERS, peer=2) as world:
        peers = [await world.join("peer", index) for index in range(2)]
        given = torch.arange(12, dtype=torch.float32).view(3, 4)
        strided = given.t()[1:3]
        pending = peers[0].all_reduce(strided)
        other = torch.ones(2, 3)
        await peers[1].all_reduce(other)
        await pending
        assert torch.equal(strided, other)
        assert given[0].tolist() == [0, 2, 3, 3]

        odd = [torch.ones(3, dtype=torch.bool) for _ in peers]
        for pending in [peer.all_reduce(odd[i], deadline=10) for i, peer in enumerate(peers)]:
            with pytest.raises(errors.ReplicasError, match="cannot reduce bool"):
                await pending
        a, b = torch.ones(3), torch.ones(3)
        await everyone(peers, lambda i, p: p.all_reduce((a, b)[i]))
        assert a.sum() == b.sum() == 6


async def test_steps() -> None:
    async with channel_world(PEERS, peer=2) as world:
        peers = [await world.join("peer", index) for index in range(2)]
        await everyone(peers, lambda i, p: p.barrier(step=5))
        with pytest.raises(errors.Gone, match="step 5 has passed"):
            await peers[0].barrier(step=5)


@pytest.mark.parametrize(("ranks", "sums"), [("each", [1 + 3, 2 + 4]), ("all", [10, 10])])
async def test_lanes(ranks: str, sums: list[int]) -> None:
    config = {"peers": [{"group": "peer", "ranks": ranks}]}
    async with channel_world(config, peer=GroupShape(2, 2)) as world:
        peers = [await world.join("peer", replica, rank, 2) for replica in range(2) for rank in range(2)]
        given = [torch.tensor(float(index + 1)) for index in range(4)]
        await everyone(peers, lambda i, p: p.all_reduce(given[i]))
        assert [tensor.item() for tensor in given] == [*sums, *sums]


async def test_arguments_of_no_use() -> None:
    async with channel_world(PEERS, peer=GroupShape(1, 2)) as world:
        leader, other = [await world.join("peer", 0, rank, 2) for rank in range(2)]
        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: leader.all_reduce([]), "all_reduce was given no tensor"),
            (lambda: leader.all_reduce(3), "all_reduce was given a int"),  # type: ignore[arg-type]  # wrong on purpose
            (lambda: leader.all_reduce(torch.ones(1), op="avg"), "unknown op 'avg'"),  # type: ignore[arg-type]  # wrong on purpose
            (
                lambda: leader.all_reduce(torch.ones(1, dtype=torch.int32), op="mean"),
                "mean of torch.int32 is not defined",
            ),
            (lambda: leader.broadcast(torch.ones(1), src="peer"), "src must be a Member"),
            (lambda: leader.send(torch.empty(1, device="meta"), dst="peer/0"), "on the meta device"),
            (lambda: leader.publish({}), "publish: this rank is a peer"),
            (lambda: leader.receive(), "receive: this rank is a peer"),
            (lambda: other.barrier(), "only rank 0 of each replica takes part"),
        ]
        for call, text in cases:
            with pytest.raises(errors.UsageError, match=text):
                call()

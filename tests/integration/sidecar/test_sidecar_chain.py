"""Versions along chains of sidecars: everybody gets the bytes, and nobody hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import torch

from replicas.messages import Segment
from replicas.sidecar.rank_side.sidecar_handle import SidecarDied, SidecarFailed
from replicas.sidecar.wire import CollectiveSpec
from replicas.weights.memory.buffers import Buffer
from tests.support.sidecars import lane
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

SHORT_TIMEOUT_S = 8.0
MIB = 1 << 20


def slots_for(nbytes: int, count: int) -> list[Buffer]:
    """The first one with random bytes."""
    slots = [Buffer.allocate(nbytes, "test") for _ in range(count)]
    slots[0].tensor().random_(1, 256)
    return slots


async def test_a_version_goes_along_a_chain_in_any_order(server: str) -> None:
    source, *targets = slots_for(9 * MIB + 3, 4)
    async with lane(4, server) as four:
        for root, order in ((0, (0, 1, 2, 3)), (3, (2, 0, 3, 1)), (1, (1, 3, 0, 2))):
            for target in targets:
                target.tensor().zero_()
            slots = [*targets[:root], source, *targets[root:]]
            await asyncio.gather(*four.broadcast(slots, root=root, order=order))
            assert all(torch.equal(target.tensor(), source.tensor()) for target in targets)


async def test_memory_that_can_only_be_read_is_good_enough_to_send(server: str) -> None:
    source, *targets = slots_for(9 * MIB, 3)
    given = Buffer.adopt(os.open(source.path, os.O_RDONLY | os.O_CLOEXEC))
    async with lane(3, server) as three:
        for _ in range(2):
            await asyncio.gather(*three.broadcast([given, *targets]))
            assert all(torch.equal(target.tensor(), source.tensor()) for target in targets)
            source.tensor()[-1] += 1


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_member_of_a_chain_that_dies_in_mid_piece_ends_it_for_all(server: str, victim: int) -> None:
    """Gloo does not tell a member whose send is half done: its own deadline does (or
    the coordinator, which is not here)."""
    slots = slots_for(96 * MIB, 4)
    async with lane(4, server) as four:
        last = four.sidecars[3]
        os.kill(last.pid, signal.SIGSTOP)  # so that the others cannot finish, and wait for each other
        started = time.monotonic()
        moves = four.broadcast(slots, timeout_s=SHORT_TIMEOUT_S)
        await wait_until(lambda: int(slots[1].tensor()[0]), "the first byte has come", timeout_s=SHORT_TIMEOUT_S)
        os.kill(four.sidecars[victim].pid, signal.SIGKILL)
        os.kill(last.pid, signal.SIGCONT)
        found = await asyncio.gather(*moves, return_exceptions=True)
        assert time.monotonic() - started < 2 * SHORT_TIMEOUT_S
        assert all(isinstance(error, (SidecarFailed, SidecarDied)) for error in found), found
        assert all([await sidecar.wait_dead() for sidecar in four.sidecars])


@pytest.mark.parametrize("ranks", [(0, 2), (0, 0), (1, 0)])
async def test_members_that_do_not_fit_are_refused_and_harm_nothing(server: str, ranks: tuple[int, int]) -> None:
    (source,) = slots_for(MIB, 1)
    async with lane(2, server) as two:
        spec = CollectiveSpec(1, "broadcast", "sum", ranks, ((Segment("uint8", (MIB,)),),) * 2, 0, 0, 5.0)
        with pytest.raises(SidecarFailed, match=r"do not fit|is not rank 0") as caught:
            await two.sidecars[0].collective(spec, source, None)
        assert not caught.value.over
        await two.run("barrier", [[], []])

"""What members find out about each other before a group is built: addresses, agreement,
and that bytes arrive."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from replicas.messages import GroupSpec
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.rank_side.sidecar_handle import Sidecar, SidecarFailed
from replicas.sidecar.wire import CollectiveSpec
from replicas.weights.memory.buffers import Buffer
from tests.support.channel.remote_sidecars import remote_forkservers, remote_store
from tests.support.machine.networks import Machine, network, why_no_networks
from tests.support.sidecars import Lane, lane, read_segments, segments_of, write_segments

pytestmark = pytest.mark.anyio

NAMES = ("trainer/0/0", "rollout/0/0", "rollout/1/0")
DEADLINE_S = 60.0
SOON_S = 20.0
"""Far above the two seconds that a finding takes on a quiet machine, and far below the
deadline."""

_prefixes = itertools.count()


async def failures(builds: Sequence[Any]) -> list[SidecarFailed]:
    """What each of them failed with, soon."""
    started = time.monotonic()
    found = await asyncio.gather(*builds, return_exceptions=True)
    assert time.monotonic() - started < SOON_S
    assert all(isinstance(error, SidecarFailed) for error in found), found
    return [error for error in found if isinstance(error, SidecarFailed)]


def build(made: Lane, rank: int, prefix: str, **changes: Any) -> Any:
    spec = made.spec(prefix, rank, **{"names": NAMES, "timeout_s": DEADLINE_S, **changes})
    return made.sidecars[rank].build(spec)


# ---------------------------------------------------------------- on one machine


async def test_members_of_several_local_addresses_reach_each_other(server: str) -> None:
    addresses = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    async with lane(3, server, build=False) as three:
        await asyncio.gather(
            *(build(three, rank, "local", addresses=addresses, address=addresses[rank]) for rank in range(3))
        )
        await three.run("barrier", [[], [], []])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "nccl"}, r"builds a process group of backend (gloo|nccl), \S+ one of backend (gloo|nccl)"),
        ({"size": 2}, r"builds a process group of size (2|3), \S+ one of size (2|3)"),
        ({"size": 4}, r"builds a process group of size (3|4), \S+ one of size (3|4)"),
    ],
    ids=["backend", "smaller", "larger"],
)
async def test_members_that_build_different_groups(server: str, changes: dict[str, Any], message: str) -> None:
    async with lane(3, server, build=False) as three:
        odd = [{}, changes, {}]
        errors = await failures([build(three, rank, "odd", **odd[rank]) for rank in range(3)])
        for error in errors:
            assert error.kind == "Preflight"
            assert error.over
            assert "rollout/0/0" in error.members
            assert len(error.members) == 2
            assert "same version of this library" in error.hint
            assert re.search(message, str(error)), str(error)
        assert all([await sidecar.wait_dead() for sidecar in three.sidecars])


async def test_an_address_of_another_machine(server: str) -> None:
    addresses = ("127.0.0.1", "192.0.2.7", "127.0.0.1")
    async with lane(3, server, build=False) as three:
        errors = await failures(
            [build(three, rank, "foreign", addresses=addresses, address=addresses[rank]) for rank in range(3)]
        )
        for error in errors:
            assert str(error) == "rollout/0/0 cannot listen at its address 192.0.2.7 (Cannot assign requested address)"
            assert (error.kind, error.members) == ("Preflight", ("rollout/0/0",))
            assert "not through a tunnel" in error.hint


# ---------------------------------------------------------------- on several


@pytest.fixture(scope="module")
def _networks() -> None:
    reason = why_no_networks()
    if reason:
        pytest.skip(reason)


class MeetingWorld:
    """Three machines with a forkserver each, and a store that all of them reach."""

    def __init__(self, machines: list[Machine], forkservers: list[Forkserver], port: int) -> None:
        *self.machines, self.shared = machines
        self.forkservers = forkservers
        self.port = port

    async def build(self, addresses: Sequence[str] = ()) -> tuple[list[Sidecar], list[Any]]:
        """New sidecars, and what becomes of their group."""
        prefix = f"world-{next(_prefixes)}"
        places = tuple(addresses or (machine.address for machine in self.machines))
        sidecars = [await forkserver.fork() for forkserver in self.forkservers]
        return sidecars, [
            sidecar.build(
                GroupSpec(
                    prefix,
                    self.shared.address,
                    self.port,
                    rank,
                    len(sidecars),
                    "gloo",
                    places[rank],
                    DEADLINE_S,
                    names=NAMES,
                    addresses=places,
                )
            )
            for rank, sidecar in enumerate(sidecars)
        ]


@asynccontextmanager
async def machines() -> AsyncIterator[MeetingWorld]:
    with network(3) as made:
        async with remote_store(made[-1]) as port, remote_forkservers(made[:-1]) as forkservers:
            yield MeetingWorld(made, forkservers, port)


@pytest.mark.usefixtures("_networks")
async def test_machines_that_reach_each_other_and_then_do_not() -> None:
    async with machines() as world:
        sidecars, builds = await world.build()
        await asyncio.gather(*builds)
        await check_gather(sidecars)
        await check_two_apart(world)
        await check_one_cut_off(world)
        for error in await failures((await world.build(["127.0.0.1"] * 3))[1]):
            assert error.kind == "Preflight"
            assert error.members == ("trainer/0/0", "rollout/0/0")
            assert "have the same address 127.0.0.1 on two machines" in str(error)


async def check_two_apart(world: MeetingWorld) -> None:
    """Nobody can say which of the two it is up to."""
    first, second, _ = world.machines
    first.cut_off(second)
    for error in await failures((await world.build())[1]):
        assert error.members == ("trainer/0/0", "rollout/0/0")
        assert f"trainer/0/0 cannot be reached at {first.address} by rollout/0/0 at {second.address}" in str(error)
    first.join_again(second)


async def check_one_cut_off(world: MeetingWorld) -> None:
    first, lost, last = world.machines
    for machine in (first, last):
        machine.cut_off(lost)
    for error in await failures((await world.build())[1]):
        assert error.kind == "Preflight"
        assert error.members == ("rollout/0/0",)
        assert f"rollout/0/0 cannot be reached at {lost.address} by " in str(error)
        assert f"trainer/0/0 at {first.address}" in str(error)
        assert f"rollout/1/0 at {last.address}" in str(error)
        assert "open all TCP ports" in error.hint


async def check_gather(sidecars: Sequence[Sidecar]) -> None:
    given = [torch.arange(100.0) * rank for rank in range(len(sidecars))]
    segments = tuple(segments_of([tensor]) for tensor in given)
    inputs = [Buffer.allocate(1024, "test") for _ in given]
    outputs = [Buffer.allocate(4096, "test") for _ in given]
    for buffer, tensor in zip(inputs, given, strict=True):
        write_segments(buffer, [tensor])
    ranks = tuple(range(len(sidecars)))
    specs = [CollectiveSpec(1, "all_gather", "sum", ranks, segments, rank, -1, DEADLINE_S) for rank in ranks]
    moves = zip(sidecars, specs, inputs, outputs, strict=True)
    await asyncio.gather(*(sidecar.collective(spec, ours, theirs) for sidecar, spec, ours, theirs in moves))
    flat = [segment for one in segments for segment in one]
    for buffer in outputs:
        assert all(torch.equal(*pair) for pair in zip(read_segments(buffer, flat), given, strict=True))

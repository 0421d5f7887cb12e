"""Sidecars and members on a GPU that are killed or stopped in the middle of something:
the others' GPU goes on, and the memory of the dead comes back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.gpu.card import REAL, backend_of, given_back, used_nbytes
from tests.gpu.gpu_rank import GpuRank, GpuWorld, gpu_world
from tests.support.waits import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

STAGINGS = ("host", "device")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
MIB = 1 << 20
SLACK_NBYTES = 64 * MIB if REAL else 0
"""Much less than a process takes that uses the GPU."""
BIG = 8 << 20


def hit(pids: list[int], signum: int) -> None:
    """Sidecars of ranks that the test has started."""
    for pid in pids:
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)


async def used_when(world: GpuWorld, limit_nbytes: int, what: str) -> None:
    """The memory of the GPU is given back, while the coordinator in this process goes
    on."""
    await asyncio.to_thread(given_back, limit_nbytes, what)


def moving(world: GpuWorld) -> bool:
    return world.inside.coordinator.engine.channels["policy"].commits.main is not None


@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_sidecar_is_lost_while_weights_move(staging: str, signum: signal.Signals) -> None:
    async with gpu_world({"staging": staging, "transport": "group"}, rollout=1) as world:
        trainer, rollout = await world.start_all(("trainer", 0), ("rollout", 0))
        for value in (1.0, 2.0):
            await asyncio.gather(trainer.ask("publish", value=value), rollout.ask("load"))
        assert world.lanes() == [(backend_of(staging), ["rollout/0/0", "trainer/0/0"])]
        used, dead = await asyncio.to_thread(used_nbytes), await rollout.ask("sidecars")
        hit(dead, signal.SIGSTOP)  # so that the transfer cannot be over before it is hit
        assert await trainer.ask("start_publish", value=3.0) is False
        rollout.tell("load")
        await wait_until(lambda: moving(world), "the version moves")
        if signum != signal.SIGSTOP:
            hit(dead, signum)
        said, got = await asyncio.gather(trainer.ask("end_publish"), rollout.answer())
        assert said["lost"] == []
        assert got["values"] == [3.0]
        assert set(await rollout.ask("sidecars")).isdisjoint(dead)
        for rank in (trainer, rollout):
            assert await rank.ask("go_on") is True
        # New sidecars have taken the place of the dead one and its peer; what those had
        # must have come back.
        await used_when(world, used + SLACK_NBYTES, "after the death of a sidecar")


@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_sidecar_is_lost_while_peers_reduce(staging: str, signum: signal.Signals) -> None:
    async with gpu_world({"peers": ["peer"], "staging": staging}, peer=2) as world:
        peers = await world.start_all(("peer", 0), ("peer", 1))
        await reduce(peers, [1.0, 2.0])
        used, dead = await asyncio.to_thread(used_nbytes), await peers[1].ask("sidecars")
        hit(dead, signal.SIGSTOP)
        await asyncio.gather(
            *(peer.ask("post", value=value, numel=BIG) for peer, value in zip(peers, (3.0, 4.0), strict=True))
        )
        if signum != signal.SIGSTOP:
            hit(dead, signum)
        for outcome in await asyncio.gather(*(peer.ask("outcome") for peer in peers)):
            assert outcome == {"values": [3.5], "members": ["peer/0/0", "peer/1/0"]}
        for peer in peers:
            assert await peer.ask("go_on") is True
        await reduce(peers, [5.0, 6.0])
        assert set(await peers[1].ask("sidecars")).isdisjoint(dead)
        await used_when(world, used + SLACK_NBYTES + 2 * 4 * BIG * 4, "after the death of a sidecar")


async def reduce(peers: list[GpuRank], values: list[float]) -> None:
    """A small mean of all, which forms the lane if there is none."""
    await asyncio.gather(*(peer.ask("post", value=value, numel=8) for peer, value in zip(peers, values, strict=True)))
    for outcome in await asyncio.gather(*(peer.ask("outcome") for peer in peers)):
        assert outcome["values"] == [sum(values) / len(values)]


@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_member_that_is_killed_pins_no_memory_of_the_others(staging: str) -> None:
    before = await asyncio.to_thread(used_nbytes)
    async with gpu_world({"staging": staging}, rollout=1) as world:
        trainer = await world.start("trainer")
        await trainer.ask("publish", value=1.0)
        alone = await asyncio.to_thread(used_nbytes)
        for number in range(2):
            rollout = await world.start("rollout")
            assert (await rollout.ask("load"))["version"]
            trainer.tell("publish", value=2.0 + number)
            await rollout.kill()  # in the middle, or a little before or behind it
            assert "error" not in await trainer.answer()
            # It may have opened the trainer's slot; what is left is the trainer's
            # second slot, at most.
            await used_when(world, alone + SLACK_NBYTES + 2 * 13 * MIB, f"after kill {number}")
        assert await trainer.ask("go_on") is True
        await trainer.close()
        await used_when(world, before + (16 * MIB if REAL else 0), "after all have left")


@pytest.mark.parametrize("staging", STAGINGS)
async def test_nothing_leaks(staging: str) -> None:
    before = await asyncio.to_thread(used_nbytes)
    async with gpu_world({"staging": staging}, rollout=1) as world:
        trainer, rollout = await world.start_all(("trainer", 0), ("rollout", 0))
        await versions(trainer, rollout, 6)
        used = await asyncio.to_thread(used_nbytes)
        usage = [await rank.ask("usage") for rank in (trainer, rollout)]
        await versions(trainer, rollout, 20)
        await used_when(world, used, "after 20 more versions")
        for earlier, rank in zip(usage, (trainer, rollout), strict=True):
            later = await rank.ask("usage")
            assert later["fds"] <= earlier["fds"] + 2, (earlier, later)
            assert later["maps"] <= earlier["maps"] + 1, (earlier, later)
        await rollout.close()
        await trainer.close()
        await used_when(world, before + (16 * MIB if REAL else 0), "after all have left")


async def versions(trainer: GpuRank, rollout: GpuRank, count: int) -> None:
    """So many more, of which the rollout loads the last, and whatever it can get before
    that."""
    last = (await trainer.ask("version")) + count
    trainer.tell("publish_many", count=count)
    assert (await rollout.ask("load_many", version=last))[-1] == last
    assert await trainer.answer() == last

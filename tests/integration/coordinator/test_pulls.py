"""Members on several hosts that pull versions from each other: who gives to whom, and
what happens when carriers, links, ranks or the coordinator fail in the middle of it.

Covers: channel/session/carriers.py, channel/versions/carried.py,
core/moving/task.py.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from replicas.carry.blocks import BLOCK_NBYTES
from replicas.coordinator import GroupShape
from tests.chaos.syncs.supervisor_under_test import limit_memory
from tests.integration.coordinator.test_hosts import GROUP, LITTLE, NBYTES, ONCE, SOON_S, Links, came, slowed, sync
from tests.support.channel.host_ranks import HostRank, host_world
from tests.support.machine.networks import why_no_hosts
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio
FIRST = 21_700
"""A port for carriers; each host has its own."""
DEADLINE_S = 40.0
LAST_PLACE = NBYTES - 1
MOMENTS = (0.05, 0.5, 0.9)
"""Shares of a version that have reached a host when something fails."""


@pytest.fixture(autouse=True, scope="module")
def _hosts() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


async def test_one_member_of_a_host_pulls_and_the_others_map() -> None:
    async with host_world(2, rollout=GroupShape(3)) as world:
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
    async with host_world(4, rollout=GroupShape(3)) as world:
        trainer, targets = await world.trainer_and_rollouts(1, 2, 3)
        await sync([trainer], targets, 10)
        links = Links(world.hosts)
        await sync([trainer], targets, 20)
        assert 1.0 <= links.sent()[0] < ONCE
        assert all(1.0 <= ratio < ONCE for ratio in links.received()[1:])


async def test_a_leader_that_dies_leaves_its_host_to_another() -> None:
    async with host_world(2, rollout=GroupShape(3)) as world:
        trainer, targets = await world.trainer_and_rollouts(1, 1, 1)
        await sync([trainer], targets, 10)
        leader, *others = targets
        leader.kill()
        await sync([trainer], others, 20, lost=[leader.name])
        links = Links(world.hosts)
        await sync([trainer], others, 30, lost=[leader.name])
        assert 1.0 <= links.received()[1] < ONCE


async def test_an_encrypted_channel_through_fixed_ports() -> None:
    async with host_world(3, {"encrypt": True}, carry_port=FIRST, rollout=GroupShape(3)) as world:
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
    config = {"encrypt": encrypt, "sources": [{"group": "trainer", "ranks": "all"}]}
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
    async with host_world(3, rollout=GroupShape(4)) as world:
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


async def send(sources: HostRank, seed: int, nbytes: int, channel: str = "policy") -> asyncio.Task[dict[str, object]]:
    return asyncio.create_task(sources.ask("publish_bytes", seed=seed, nbytes=nbytes, channel=channel))


async def got(targets: list[HostRank], seed: int, nbytes: int, channel: str = "policy") -> None:
    for reply in await asyncio.gather(*(one.ask("receive_bytes", channel=channel) for one in targets)):
        assert (reply["seed"], reply["nbytes"]) == (seed if nbytes else -1, nbytes), channel


async def test_a_latecomer_pulls_from_a_target_and_leaves_the_trainer_alone() -> None:
    async with host_world(4, rollout=GroupShape(3)) as world:
        trainer, (first,) = await world.trainer_and_rollouts(1)
        await sync([trainer], [first], 10)
        links = Links(world.hosts)
        second = await world.join(2, "rollout", 1)
        assert (await second.ask("receive"))["seed"] == 10
        sent = links.sent()
        assert sent[0] < LITTLE
        assert 1.0 <= sent[1] < ONCE
        trainer.kill()
        third = await world.join(3, "rollout", 2)
        assert (await third.ask("receive"))["seed"] == 10


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_carrier_that_is_killed_at_any_byte_costs_nobody_the_version() -> None:
    """Of the trainer, of the host in the middle of the chain, of the last: 9 faults,
    each of which costs some seconds."""
    async with host_world(3, rollout=GroupShape(2)) as world:
        trainer, targets = await world.chain()
        await sync([trainer], targets, 10)
        with ExitStack() as stack:
            slowed(stack, world.hosts)
            seed = 20
            for victim in (trainer, *targets):
                for share in MOMENTS:
                    links = Links(world.hosts)
                    syncing = asyncio.create_task(sync([trainer], targets, seed))
                    await came((victim if victim is not trainer else targets[0]).host, links, world, share)
                    os.kill(victim.carrier(), signal.SIGKILL)
                    began = time.monotonic()
                    await syncing
                    assert time.monotonic() - began < SOON_S, (victim.name, share)
                    seed += 1


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("which", ["trainer", "middle", "last"])
async def test_a_carrier_that_is_frozen_is_replaced(which: str) -> None:
    async with host_world(3, rollout=GroupShape(2)) as world:
        trainer, targets = await world.chain()
        await sync([trainer], targets, 10)
        victim = {"trainer": trainer, "middle": targets[0], "last": targets[1]}[which]
        with ExitStack() as stack:
            slowed(stack, world.hosts)
            links = Links(world.hosts)
            syncing = asyncio.create_task(sync([trainer], targets, 20))
            await came((victim if victim is not trainer else targets[0]).host, links, world, 0.3)
            frozen = victim.carrier()
            os.kill(frozen, signal.SIGSTOP)
            began = time.monotonic()
            await syncing
            assert time.monotonic() - began < SOON_S
            assert victim.carrier() != frozen
        await sync([trainer], targets, 30)


@pytest.mark.slow
async def test_a_link_that_is_cut_in_the_chain_is_gone_round_and_known() -> None:
    """In one direction, or in both."""
    async with host_world(3, rollout=GroupShape(2)) as world:
        trainer, targets = await world.chain()
        await sync([trainer], targets, 10)
        one, other = world.hosts[1:]
        for seed, ways in ((20, [(one, other)]), (30, [(one, other), (other, one)])):
            with ExitStack() as stack:
                slowed(stack, world.hosts)
                links = Links(world.hosts)
                syncing = asyncio.create_task(sync([trainer], targets, seed))
                await came(other, links, world, 0.3)
                for way in ways:
                    way[0].cut_off(way[1])
                    stack.callback(way[0].join_again, way[1])
                began = time.monotonic()
                await syncing
                assert time.monotonic() - began < SOON_S
                began = time.monotonic()
                await sync([trainer], targets, seed + 1)
                assert time.monotonic() - began < 2 * NBYTES / 100e6 * 8 + 4.0, "it is tried again, at each version"


async def test_versions_of_any_size() -> None:
    async with host_world(3, rollout=GroupShape(2)) as world:
        trainer, targets = await world.chain()
        for seed, nbytes in enumerate((0, 1, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, 0, 7), 1):
            await got_all(trainer, targets, seed, nbytes)


async def test_readers_that_load_what_has_changed_hold_up_nobody() -> None:
    """One beside the trainer; elsewhere one that pulls, and one that maps."""
    async with host_world(2, rollout=GroupShape(3)) as world:
        trainer, targets = await world.trainer_and_rollouts(0, 1, 1)
        for version, places in enumerate(([], [5], [1, LAST_PLACE], []), start=1):
            sent = await trainer.ask("publish_changed", nbytes=NBYTES, places=places)
            assert sent == {"version": version, "lost": []}
            expected = {
                "version": version,
                "base": version - 1,
                "places": places if version > 1 else None,
                "right": True,
            }
            assert await asyncio.gather(*(one.ask("load_changed") for one in targets)) == [expected] * 3
        for version in (5, 6):  # the second one takes the memory of the version that all have loaded
            sent = await trainer.ask("publish_changed", nbytes=NBYTES, places=[version])
            assert sent == {"version": version, "lost": []}
        expected = {"version": 6, "base": 4, "places": None, "right": True}
        assert await asyncio.gather(*(one.ask("load_changed") for one in targets)) == [expected] * 3


async def test_channels_of_a_process_share_its_carrier() -> None:
    names = [f"channel{number}" for number in range(6)]
    async with host_world(3, channels=names, rollout=GroupShape(2)) as world:
        joins = [world.join(0, "trainer", 0, 0, 1, *names)]
        joins += [world.join(host, "rollout", host - 1, 0, 1, *names) for host in (1, 2)]
        trainer, *targets = await asyncio.gather(*joins)
        await world.live(3)
        for start in (1, 101):
            seeds = {name: start + number for number, name in enumerate(names)}
            for name, seed in seeds.items():  # a rank does one thing at a time: the pulls of all go on
                await (await send(trainer, seed, 1 << 20, name))
            for name, seed in seeds.items():
                await got(targets, seed, 1 << 20, name)
        assert [len(host.processes("replicas-carry")) for host in world.hosts] == [1, 1, 1]


@pytest.mark.slow
async def test_a_coordinator_that_is_started_again_in_the_middle_of_pulls(tmp_path: Path) -> None:
    async with host_world(3, state_dir=tmp_path, rollout=GroupShape(2)) as world:
        trainer, targets = await world.chain()
        await sync([trainer], targets, 10)
        with ExitStack() as stack:
            slowed(stack, world.hosts)
            for seed, share in enumerate(MOMENTS, 20):
                links = Links(world.hosts)
                syncing = asyncio.create_task(sync([trainer], targets, seed))
                await came(world.hosts[1], links, world, share)
                await world.restart()
                began = time.monotonic()
                await syncing
                assert time.monotonic() - began < SOON_S, share


@pytest.mark.slow
async def test_a_target_without_memory_is_left_out_and_caught_up() -> None:
    async with host_world(3, rollout=GroupShape(2)) as world:
        trainer, (full, other) = await world.chain()
        await got_all(trainer, [full, other], 1, 1 << 20)
        limit_memory(full.pid, 8 << 20)
        began = time.monotonic()
        publishing = await send(trainer, 2, 64 << 20)
        await got([other], 2, 64 << 20)
        assert set((await publishing)["lost"]) <= {full.name}  # type: ignore[call-overload]  # of JSON
        assert time.monotonic() - began < SOON_S
        limit_memory(full.pid, None)
        await got([full], 2, 64 << 20)


async def got_all(trainer: HostRank, targets: list[HostRank], seed: int, nbytes: int) -> None:
    receipt = await (await send(trainer, seed, nbytes))
    assert receipt["lost"] == [], (nbytes, receipt)
    await got(targets, seed, nbytes)


@pytest.mark.slow
async def test_carriers_end_with_their_ranks_however_these_end() -> None:
    async with host_world(3, rollout=GroupShape(2)) as world:
        trainer, targets = await world.chain()
        await sync([trainer], targets, 10)
        os.kill(targets[0].carrier(), signal.SIGSTOP)
        for one in (trainer, *targets):
            one.kill()
        await wait_until(
            lambda: not any(host.processes("replicas-carry") for host in world.hosts), "no carrier is left"
        )


@pytest.mark.slow
async def test_a_block_that_a_host_falsifies_comes_from_elsewhere() -> None:
    """One byte of the last block, in the memory of the target that a latecomer pulls
    from first: only that block is asked for again, of the trainer."""
    nbytes = 3 * BLOCK_NBYTES
    async with host_world(3, rollout=GroupShape(2)) as world:
        trainer, (liar,) = await world.trainer_and_rollouts(1)
        await got_all(trainer, [liar], 1, nbytes)
        falsify(liar.pid, nbytes)
        links = Links(world.hosts)
        last = await world.join(2, "rollout", 1)
        await got([last], 1, nbytes)
        assert links.received()[2] * NBYTES < nbytes + 1.3 * BLOCK_NBYTES, "more than one block came again"
        assert links.sent()[0] * NBYTES < 1.3 * BLOCK_NBYTES


def falsify(pid: int, nbytes: int) -> None:
    """Change a byte of the last block in each slot of a process, whatever is behind."""
    found: set[int] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:replicas" not in str(link.readlink()) or (known := link.stat()).st_size < nbytes:
            continue
        if known.st_ino not in found:  # a slot may be open twice
            with link.open("r+b") as file, mmap.mmap(file.fileno(), known.st_size) as memory:
                memory[known.st_size - BLOCK_NBYTES // 2] ^= 0xFF
            found.add(known.st_ino)
    assert found, "no slot is known"


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_process_group_that_fails_costs_nobody_the_version() -> None:
    """Whichever of its sidecars is killed or stops: what it did not bring is pulled;
    later versions have a process group again, once it has rested and no link is in
    doubt."""
    faults = ((0.05, signal.SIGKILL), (0.5, signal.SIGSTOP), (0.9, signal.SIGKILL))
    async with host_world(3, GROUP, rollout=GroupShape(2)) as world:
        trainer, targets = await world.chain()
        await sync([trainer], targets, 10)
        seeds = itertools.count(20)
        for victim in (trainer, *targets):
            for share, signum in faults:
                with ExitStack() as stack:
                    slowed(stack, world.hosts)
                    links = Links(world.hosts)
                    syncing = asyncio.create_task(sync([trainer], targets, next(seeds)))
                    await came((victim if victim is not trainer else targets[0]).host, links, world, share)
                    os.kill(victim.sidecar(), signum)
                    began = time.monotonic()
                    await syncing
                    assert time.monotonic() - began < SOON_S, (victim.name, share)
                async with asyncio.timeout(60):
                    while world.sidecars() != [1, 1, 1]:
                        await sync([trainer], targets, next(seeds))

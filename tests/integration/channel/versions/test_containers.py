"""Members in containers of one machine: what keeps them apart, and what does not."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys

import pytest

from tests.support.channel.mapping_world import MappingWorld, world_of
from tests.support.machine import denied
from tests.support.machine.memfds import memories
from tests.support.processes import children
from tests.support.ranks import RankProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

DENIED = (sys.executable, "-m", "tests.support.machine.denied")
CONTAINER = ("unshare", "--pid", "--ipc", "--uts", "--mount", "--mount-proc", "--fork", "--kill-child")


def _no_containers() -> bool:
    return os.geteuid() != 0 or subprocess.run([*CONTAINER, "true"], check=False, capture_output=True).returncode != 0


async def join(world: MappingWorld, group: str, replica: int, within: tuple[str, ...]) -> RankProcess:
    found = await RankProcess.start(world._endpoint, world._token, group, replica, within=within)
    world.ranks.append(found)
    return found


def no_group(world: MappingWorld) -> bool:
    """Nobody has a lane, so nothing went through a process group."""
    return len(world.channel.lanes) == 0


@pytest.mark.skipif(platform.machine() not in denied.CALLS, reason="its numbers of system calls are not known")
async def test_memory_is_shared_where_calls_into_other_processes_are_denied() -> None:
    async with world_of(rollout=2) as world:
        trainer, *targets = await asyncio.gather(
            join(world, "trainer", 0, DENIED), join(world, "rollout", 0, DENIED), join(world, "rollout", 1, DENIED)
        )
        for value in (1, 2, 3):
            published = await trainer.ask("publish", value=value)
            assert published["lost"] == []
            assert "map" in published["phases"]
            assert [await target.ask("load_into") for target in targets] == [[float(value)]] * 2
        assert no_group(world)


@pytest.mark.skipif(_no_containers(), reason="needs root to make namespaces")
async def test_containers_of_one_network_share_memory_whoever_is_killed() -> None:
    """Each member in namespaces of its own, of processes, mounts and IPC, but one that
    is beside the coordinator."""
    async with world_of(rollout=3) as world:
        trainer, near, *targets = await asyncio.gather(
            join(world, "trainer", 0, CONTAINER),
            join(world, "rollout", 0, ()),
            join(world, "rollout", 1, CONTAINER),
            join(world, "rollout", 2, CONTAINER + DENIED),
        )
        for value in (1, 2, 3):
            published = await trainer.ask("publish", value=value)
            assert published["lost"] == []
            assert "map" in published["phases"]
            for target in (near, *targets):
                assert await target.ask("load_into") == [float(value)]
        (inside,) = children(trainer.pid)
        (reader,) = children(targets[0].pid)
        mine = {inode for inode, memory in memories(inside).items() if memory.owned}
        theirs = memories(reader)
        assert mine >= theirs.keys()
        assert not any(memory.owned for memory in theirs.values())
        assert (await targets[0].ask("arena"))["kept"] == len(theirs) == 2, "mappings are kept for the next versions"

        assert (await trainer.ask("publish", value=4))["lost"] == []
        assert (await targets[0].ask("receive"))["values"] == [4.0]
        await trainer.kill()
        assert await targets[0].ask("again") == [4.0]
        await targets[0].ask("loaded")
        await targets[1].kill()
        world.ranks.remove(targets[1])
        again = await join(world, "trainer", 0, CONTAINER)
        late = await join(world, "rollout", 2, CONTAINER)
        for value in (5, 6):
            assert (await again.ask("publish", value=value))["lost"] == []
            for target in (near, targets[0], late):
                assert await target.ask("load_into") == [float(value)]
        assert no_group(world)
        (inside,) = children(again.pid)
        left = memories(reader).keys() - memories(inside).keys()
        assert not left, "what the killed one had is gone"

"""Ranks of one host, which map each other's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.channels import ChannelWorld, channel_world
from tests.support.machine.memfds import Memory, memories
from tests.support.processes import children
from tests.support.ranks import RankProcess
from tests.support.waits import wait_until

__all__ = ["MappingWorld", "looked_at", "owned", "world_of"]


class MappingWorld:
    """Ranks, of a coordinator in this process or in one of its own."""

    def __init__(self, endpoint: str, token: str, coordinator: ChannelWorld | None = None) -> None:
        self._endpoint = endpoint
        self._token = token
        self._inside = coordinator
        self.ranks: list[RankProcess] = []

    async def join(self, group: str, replica: int = 0, rank: int = 0, world_size: int = 1) -> RankProcess:
        found = await RankProcess.start(self._endpoint, self._token, group, replica, rank, world_size)
        self.ranks.append(found)
        return found

    async def trainer_and_rollouts(self, rollouts: int = 2) -> list[RankProcess]:
        joining = [self.join("trainer"), *(self.join("rollout", index) for index in range(rollouts))]
        return list(await asyncio.gather(*joining))

    @property
    def channel(self) -> Any:
        """What the coordinator knows of it."""
        assert self._inside is not None
        return self._inside.coordinator.engine.channels["policy"]

    def assert_no_group(self) -> None:
        """Nobody has a lane, nor a process that could be in one."""
        lanes = self.channel.lanes._lanes.values()
        assert [[member.name for member in lane.members] for lane in lanes] == []
        assert [children(rank.pid) for rank in self.ranks] == [[]] * len(self.ranks)

    async def packing(self, version: int) -> None:
        """Wait until this version has begun; that it waits for a slot then shows by its
        staying there."""

        def begun() -> bool:
            return any(one.version == version for one in self.channel.commits.publishes.without_verdict())

        await wait_until(begun, f"the publish of version {version} begins")

    async def lost(self, name: str) -> None:
        await wait_until(lambda: self.channel.roster.holder_of(name) is None, f"{name} is lost")


@asynccontextmanager
async def world_of(config: dict[str, Any] | None = None, **groups: Any) -> AsyncIterator[MappingWorld]:
    async with channel_world(config, **groups) as inside:
        world = MappingWorld(inside.endpoint, inside.coordinator.token, inside)
        try:
            yield world
        finally:
            await asyncio.gather(*(rank.clean_up() for rank in world.ranks))


def owned(rank: RankProcess) -> dict[int, Memory]:
    return {inode: memory for inode, memory in memories(rank.pid).items() if memory.owned}


def looked_at(rank: RankProcess) -> set[int]:
    """Memory of which it has private mappings."""
    return {inode for inode, memory in memories(rank.pid).items() if "rw-p" in memory.modes}

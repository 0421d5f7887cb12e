"""How long does it take to form a group again: after an epoch change, and after the
death of a sidecar?

Theory of operation
===================

Peers meet in barriers, which carry no bytes: what one takes longer than a later one of
the same group is the group's formation. At each size a further peer joins and leaves
again, so that the epoch changes twice; the first barrier of those that stay is
measured, from the last call to the last return, and then a later one. Then the sidecar
of one of them is killed, and the time from the kill to the end of the next barrier that
succeeds is measured, failed attempts included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.processes import Forkserver, forkservers
from bench.support import Rank, rank, until
from replicas import Coordinator

__all__ = ["SIZES", "GroupSample", "measure"]

SIZES = (2, 4, 8)


@dataclass(frozen=True)
class GroupSample:
    """Seconds."""

    members: int
    barrier_s: float
    rebuilt_s: float
    replaced_s: float


class Peers:
    """``ranks`` of which the last comes and goes."""

    def __init__(self, coordinator: Coordinator, ranks: list[Rank], servers: list[Forkserver]) -> None:
        self._coordinator = coordinator
        *self._ranks, self._guest = ranks
        self._servers = servers
        self._changed = asyncio.Event()
        coordinator.subscribe(lambda event: self._changed.set())

    async def assemble(self) -> None:
        for replica, one in enumerate(self._ranks):
            await self._join(one, replica)

    async def _join(self, one: Rank, replica: int) -> None:
        where = {"endpoint": self._coordinator.endpoint, "token": self._coordinator.token}
        await one.ask("join", replica=replica, **where)

    async def _live(self, count: int) -> None:
        def live() -> bool:
            (channel,) = self._coordinator.channel_statuses()
            return sum(member.state == "live" for member in channel.members) == count

        await until(live, self._changed, f"{count} peers are live")

    async def sample(self) -> GroupSample:
        size = len(self._ranks)
        await self._join(self._guest, size)
        await self._live(size + 1)
        await self._meet(*self._ranks, self._guest)
        await self._guest.ask("leave")
        await self._live(size)
        called, met = await self._meet(*self._ranks)
        again, met_again = await self._meet(*self._ranks)
        killed_at = self._servers[size - 1].kill_sidecar()
        _, replaced = await self._meet(*self._ranks)
        return GroupSample(size, met_again - again, met - called, replaced - killed_at)

    @staticmethod
    async def _meet(*ranks: Rank) -> tuple[float, float]:
        """A barrier of all: the last call, the last return."""
        replies = await asyncio.gather(*(one.ask("barrier") for one in ranks))
        return max(reply["began"] for reply in replies), max(reply["ended"] for reply in replies)


async def measure(repetitions: int, done: Callable[[GroupSample], None]) -> list[GroupSample]:
    """At every size, the sizes in turn in fresh processes."""
    samples: list[GroupSample] = []
    async with forkservers(max(SIZES) + 1) as servers:
        for size in SIZES:
            async with AsyncExitStack() as stack:
                channels = {"outer": {"peers": ["peer"]}}
                coordinator = await stack.enter_async_context(Coordinator(channels, groups={"peer": size}))
                starts = [
                    rank("startup_rank", f"peer {number}", REPLICAS_FORKSERVER=server.name, OMP_NUM_THREADS="1")
                    for number, server in enumerate(servers[: size + 1])
                ]
                ranks = [await stack.enter_async_context(start) for start in starts]
                await asyncio.gather(*(one.ask("loaded") for one in ranks))
                peers = Peers(coordinator, ranks, servers)
                await peers.assemble()
                for _ in range(repetitions):
                    samples.append(await peers.sample())
                    done(samples[-1])
    return samples

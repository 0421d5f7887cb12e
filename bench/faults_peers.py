"""Kill -9 of a peer during all-reduces: how long until the next good one, against
torchft and a restart?

Theory of operation
===================

Three fresh processes sum 4 MiB again and again. When one has sent the bytes of some
twenty operations it is killed, in the middle of the next. A contender's time ends when
both that are left have a sum of exactly two. The contenders:

* the library, which finds out by itself;
* torchft's two process groups for CPUs: ``ProcessGroupBabyGloo``, whose Gloo lives in a
  process of its own, as ours does, and so can be killed when it hangs; and
  ``ProcessGroupGloo`` in the rank itself, which cannot. Both are given the new store
  prefix, rank and size with the start of the run and reconfigure as soon as they fail:
  the lighthouse, quorum and heartbeats by which torchft finds out who is left would
  come on top;
* all three processes ended, and two new ones started, which import torch and form a
  plain Gloo group.

Without torchft installed its two are left out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from bench.processes import Forkserver, Progress, children_of, forkservers
from bench.support import Rank, rank, rotated
from replicas import Coordinator

__all__ = ["NBYTES", "PEERS", "PeerSample", "contenders", "measure"]

PEERS = 3
NBYTES = 4 << 20
WARM_UPS = 10
KILL_AFTER_NBYTES = 20 * NBYTES
TORCHFT = ("ProcessGroupBabyGloo", "ProcessGroupGloo")
_prefixes = itertools.count()


@dataclass(frozen=True)
class PeerSample:
    """Seconds: an undisturbed all-reduce, and from the kill until all have seen it
    fail, and to the next good one.

    ``failed_s`` is None where no call failed, as the operation was repeated over those
    that are left.
    """

    contender: str
    operation_s: float
    failed_s: float | None
    recovered_s: float


class Field:
    """What the contenders need: forkservers, and the port of a store for those that use
    one."""

    def __init__(self, servers: list[Forkserver], port: int) -> None:
        self.servers = servers
        self.port = port

    async def race(self, contender: str) -> PeerSample:
        async with AsyncExitStack() as stack:
            ranks = [await self._start(stack, number) for number in range(PEERS)]
            transports = await self._form(stack, contender, ranks)
            replies = await asyncio.gather(*(one.ask("reduce", times=WARM_UPS, size=PEERS) for one in ranks))
            operation_s = max(reply["seconds"] for reply in replies)
            *left, victim = ranks
            prefix = self._prefix()
            for number, one in enumerate(ranks):
                renew = {"port": self.port, "prefix": prefix, "rank": number, "size": PEERS - 1}
                await one.ask("outlive", size=PEERS, renew=None if contender == "restart" else renew)
            hit = await Progress(transports).reaches(KILL_AFTER_NBYTES, lambda: _kill(victim))
            ended = await asyncio.gather(*(one.hear() for one in left))
            failed_s = max(reply["failed_at"] for reply in ended) - hit.at
            at = await self._restart(stack, left) if contender == "restart" else max(reply["at"] for reply in ended)
            return PeerSample(contender, operation_s, failed_s if failed_s > 0 else None, at - hit.at)

    async def _start(self, stack: AsyncExitStack, number: int) -> Rank:
        environment = {"REPLICAS_FORKSERVER": self.servers[number].name, "OMP_NUM_THREADS": "1"}
        return await stack.enter_async_context(rank("peer_rank", f"peer {number}", **environment))

    async def _form(self, stack: AsyncExitStack, contender: str, ranks: list[Rank]) -> Callable[[], list[int]]:
        """Make a group of all; returns the processes that send the victim's bytes."""
        victim = ranks[-1]
        if contender == "library":
            channels = {"outer": {"peers": ["peer"]}}
            coordinator = await stack.enter_async_context(Coordinator(channels, groups={"peer": PEERS}))
            where: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token, "nbytes": NBYTES}
            await asyncio.gather(*(one.ask("channels", replica=number, **where) for number, one in enumerate(ranks)))
            return self.servers[PEERS - 1].sidecars
        if contender == "restart":
            await asyncio.gather(*(one.ask("plain", nbytes=NBYTES) for one in ranks))
        else:
            await asyncio.gather(*(one.ask("torchft", nbytes=NBYTES, kind=contender) for one in ranks))
        await self._renew(ranks)
        return lambda: [victim.pid, *children_of(victim.pid)]

    async def _renew(self, ranks: list[Rank]) -> None:
        where: dict[str, Any] = {"port": self.port, "prefix": self._prefix(), "size": len(ranks)}
        await asyncio.gather(*(one.ask("renew", rank=number, **where) for number, one in enumerate(ranks)))

    async def _restart(self, stack: AsyncExitStack, left: list[Rank]) -> float:
        """End those that are left, start as many anew; when they have their first
        sum."""
        for one in left:
            one.kill()
        ranks = [await self._start(stack, number) for number in range(len(left))]
        await asyncio.gather(*(one.ask("plain", nbytes=NBYTES) for one in ranks))
        await self._renew(ranks)
        replies = await asyncio.gather(*(one.ask("reduce", times=1, size=len(ranks)) for one in ranks))
        return max(float(reply["first"]) for reply in replies)

    @staticmethod
    def _prefix() -> str:
        return f"group-{next(_prefixes)}"


def _kill(victim: Rank) -> float:
    at = time.monotonic()
    victim.kill()
    return at


def contenders() -> list[str]:
    """By name; torchft's only where it is installed."""
    found = TORCHFT if importlib.util.find_spec("torchft") is not None else ()
    return ["library", *found, "restart"]


async def measure(repetitions: int, done: Callable[[PeerSample], None]) -> list[PeerSample]:
    samples: list[PeerSample] = []
    async with forkservers(PEERS) as servers, rank("peer_rank", "store", OMP_NUM_THREADS="1") as store:
        field = Field(servers, (await store.ask("host"))["port"])
        for repetition in range(repetitions):
            for contender in rotated(contenders(), repetition):
                samples.append(await field.race(contender))
                done(samples[-1])
    return samples

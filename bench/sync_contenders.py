"""The driver's side of everyone who moves weights in ``bench_sync.py``.

Theory of operation
===================

The library, the limit, plain Gloo and files run in the same processes, one source and
three targets, on the same weights in the same memory. torchft has processes of its own,
and so has Ray.

In each round the targets are told first and say that they wait; then the source is
told, and its clock begins. *Readable*: each target has read the first value of each
tensor. *Loaded*: each has all bytes in parameters of its own. After the clocks have
stopped, the digests of all bytes of source and targets are compared.

Two rounds of the library are measured apart, so that neither pays for the other: in one
the targets only read, in the other they load and report.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from bench.support import Rank, until
from replicas import Coordinator

__all__ = [
    "Contender",
    "Each",
    "Files",
    "Flat",
    "Library",
    "Limit",
    "Load",
    "Ray",
    "Read",
    "Times",
    "Torchft",
    "groups",
    "share",
]

Times = dict[str, float]
"""Seconds by what was reached: ``readable``, ``loaded``, ``held`` (the call has
returned), ``copied`` (in)."""


class Contender(ABC):
    """:ivar name: which it has in the results."""

    warm_ups = 1

    def __init__(self, name: str) -> None:
        self.name = name

    async def prepare(self, targets: int) -> None:
        """What it needs before its first round to so many."""
        return

    @abstractmethod
    async def sync(self, targets: int) -> Times:
        """One round. :class:`RuntimeError`: the targets have other bytes than the
        source."""


async def race(ranks: list[Rank], source: dict[str, Any], target: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Tell the targets, hear that they wait, tell the source; what all have said."""
    first, *rest = ranks
    await asyncio.gather(*(one.ask(**target) for one in rest))
    said, *replies = await asyncio.gather(first.ask(**source), *(one.hear() for one in rest))
    return said, replies


async def check(ranks: list[Rank]) -> None:
    """All must have equal bytes."""
    alike([reply["digest"] for reply in await asyncio.gather(*(one.ask("digest") for one in ranks))])


def alike(digests: list[str]) -> None:
    if len(set(digests)) != 1:
        raise RuntimeError(f"the targets have other bytes than the source, which comes first: {digests}")


def last(replies: list[Any], key: str) -> float:
    return max(float(reply[key]) for reply in replies)


class Library:
    """The channel that :class:`Read` and :class:`Load` use."""

    def __init__(self, coordinator: Coordinator, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.phases: list[dict[str, float]] = []
        self._coordinator = coordinator
        self._joined = 0
        self._published = False
        self._changed = asyncio.Event()
        coordinator.subscribe(lambda event: self._changed.set())

    async def grow(self, targets: int) -> None:
        """Until the source and so many targets are live, and have loaded the newest
        version."""
        where = {"endpoint": self._coordinator.endpoint, "token": self._coordinator.token}
        if not self._joined:
            await self.ranks[0].ask("join", group="trainer", replica=0, **where)
            self._joined = 1
        while self._joined < targets + 1:
            one = self.ranks[self._joined]
            await one.ask("join", group="rollout", replica=self._joined - 1, **where)
            self._joined += 1
            await until(lambda: self._live() == self._joined, self._changed, f"{one.name} is live")
            if self._published:
                await one.ask("receive")
                await one.hear()

    def _live(self) -> int:
        (channel,) = self._coordinator.channel_statuses()
        return sum(member.state == "live" for member in channel.members)

    async def publish(self, targets: int, then: str, share: float = 0.0) -> tuple[dict[str, Any], list[Any]]:
        said, replies = await race(self.ranks[: targets + 1], {"do": "publish", "share": share}, {"do": then})
        self._published = True
        self.phases.append(said["phases"])
        return said, replies


class Read(Contender):
    warm_ups = 3

    def __init__(self, library: Library, share: float = 0.0, name: str = "replicas, read") -> None:
        super().__init__(name)
        self._library, self._share = library, share

    async def prepare(self, targets: int) -> None:
        await self._library.grow(targets)

    async def sync(self, targets: int) -> Times:
        said, replies = await self._library.publish(targets, "read", self._share)
        digest = (await self._library.ranks[0].ask("digest"))["digest"]
        alike([digest, *(reply["digest"] for reply in replies)])
        return {"held": said["held"] - said["began"], "readable": last(replies, "readable") - said["began"]}


class Load(Contender):
    """``loaded``: it has been reported, too."""

    warm_ups = 3

    def __init__(self, library: Library) -> None:
        super().__init__("replicas, load")
        self._library = library

    async def prepare(self, targets: int) -> None:
        await self._library.grow(targets)

    async def sync(self, targets: int) -> Times:
        said, replies = await self._library.publish(targets, "receive")
        await check(self._library.ranks[: targets + 1])
        return {"held": said["held"] - said["began"], "loaded": last(replies, "reported") - said["began"]}


class Limit(Contender):
    """One copy in, and the targets' own copies out at once."""

    def __init__(self, ranks: list[Rank]) -> None:
        super().__init__("limit")
        self._ranks = ranks

    async def sync(self, targets: int) -> Times:
        ranks = self._ranks[: targets + 1]
        said, replies = await race(ranks, {"do": "copy_in", "targets": targets}, {"do": "copy_out"})
        await check(ranks)
        return {"copied": said["copied"] - said["began"], "loaded": last(replies, "loaded") - said["began"]}


async def share(ranks: list[Rank]) -> None:
    """Memory and pipes between the first and the others, for :class:`Limit` and
    :class:`Files`."""
    first, *rest = ranks
    said = await first.ask("share", targets=len(rest))
    where = {"pid": said["pid"], "memory": said["memory"]}
    await asyncio.gather(*(one.ask("reach", wake=wake, **where) for one, wake in zip(rest, said["wakes"], strict=True)))


class Flat(Contender):
    """One broadcast of one flat buffer, from parameters to parameters. It needs
    :func:`groups`."""

    def __init__(self, ranks: list[Rank], name: str = "Gloo, flat") -> None:
        super().__init__(name)
        self._ranks = ranks

    async def sync(self, targets: int) -> Times:
        return await self._broadcast(targets, "broadcast")

    async def _broadcast(self, targets: int, how: str) -> Times:
        ranks = self._ranks[: targets + 1]
        sending, receiving = ({"do": how, "size": targets + 1, "source": source} for source in (True, False))
        said, replies = await race(ranks, sending, receiving)
        await check(ranks)
        seconds = last([said, *replies], "ended") - said["began"]
        return {"readable": seconds, "loaded": seconds}


class Each(Flat):
    """A broadcast for each tensor, as the common call sites do."""

    def __init__(self, ranks: list[Rank]) -> None:
        super().__init__(ranks, "Gloo, per tensor")

    async def sync(self, targets: int) -> Times:
        return await self._broadcast(targets, "broadcast_each")


async def groups(ranks: list[Rank]) -> int:
    """A Gloo group of the first two, three, … of them; returns the port of their
    store."""
    port = (await ranks[0].ask("host"))["port"]
    for size in range(2, len(ranks) + 1):
        members = enumerate(ranks[:size])
        await asyncio.gather(*(one.ask("form", port=port, rank=number, size=size) for number, one in members))
    return int(port)


class Files(Contender):
    """A file in ``folder``, written by the source and read by all."""

    def __init__(self, ranks: list[Rank], kind: str, folder: str) -> None:
        super().__init__(kind)
        self._ranks = ranks
        self._path = Path(folder, kind)

    async def sync(self, targets: int) -> Times:
        ranks = self._ranks[: targets + 1]
        where = {"kind": self.name, "path": str(self._path)}
        said, replies = await race(ranks, {"do": "save", "targets": targets, **where}, {"do": "load", **where})
        self._path.unlink()
        await check(ranks)
        return {key: last(replies, key) - said["began"] for key in ("readable", "loaded")}


class Torchft(Contender):
    """Its ProcessGroupBabyGloo's broadcast of one flat buffer."""

    def __init__(self, ranks: list[Rank], port: int) -> None:
        super().__init__("torchft, flat")
        self._ranks = ranks
        self._port = port
        self._prefixes = itertools.count()

    async def prepare(self, targets: int) -> None:
        where = {"port": self._port, "prefix": f"torchft-{next(self._prefixes)}", "size": targets + 1}
        ranks = enumerate(self._ranks[: targets + 1])
        await asyncio.gather(*(one.ask("form", rank=number, **where) for number, one in ranks))

    async def sync(self, targets: int) -> Times:
        ranks = self._ranks[: targets + 1]
        said, replies = await race(ranks, {"do": "broadcast", "source": True}, {"do": "broadcast", "source": False})
        await check(ranks)
        seconds = last([said, *replies], "ended") - said["began"]
        return {"readable": seconds, "loaded": seconds}


class Ray(Contender):
    """``ray.put`` in one actor, ``ray.get`` in the others."""

    warm_ups = 4

    def __init__(self, rank: Rank) -> None:
        super().__init__("Ray, put and get")
        self._rank = rank

    async def sync(self, targets: int) -> Times:
        said = await self._rank.ask("sync", targets=targets)
        alike(said["digests"])
        return {key: said[key] - said["began"] for key in ("readable", "loaded")}

"""Faults in the middle of a publish: how long until those that are left have committed
it?

Theory of operation
===================

One trainer and three targets, each with a forkserver of its own, so that the sidecars
of a target are known. In each repetition, for each fault, in rotating order and with
another victim each time:

1. an undisturbed publish to all three;
2. a publish in which the victim is hit half-way. ``committed`` is when the trainer has
   its receipt and the version is readable at everyone who is left, counted from the
   hit;
3. an undisturbed publish to those who are left. Its phases ``transfer`` and ``verify``
   are the bare time to send them what they may still miss: a broadcast that broke is
   worth nothing, so that is all of it;
4. the victim's place is taken by a new process, which is caught up.

This is done for both *ways*. ``auto`` is the default: targets of one host map the slot,
and no byte is sent, so half-way is in the middle of the trainer's copy, and sidecars
have no part in it. With ``transport = "group"`` the bytes go through a process group,
and half-way is when the trainer's sidecar has sent half of what it must send.

Everyone who is left must end up with the trainer's bytes, and the receipt must name the
victim, or nobody when only a sidecar was hit; otherwise the run stops.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench.processes import Forkserver, Progress, forkservers, held, send
from bench.support import Rank, rank, rotated, until
from replicas import Coordinator
from replicas.coordinator import GroupShape

__all__ = ["DEADLINE_S", "FAULTS", "LEASE_S", "TARGETS", "WAYS", "Fault", "Sample", "measure"]

WAYS = ("auto", "group")

TARGETS = 3
DEADLINE_S = 20.0
LEASE_S = 10.0
SLOTS = 2
WARM_UPS = SLOTS + 1
AGAIN_S = 120.0
TRIES = 3
"""A publish that failed is made again: the version that counts is the one that is
committed in the end."""


@dataclass(frozen=True)
class Fault:
    """``number`` is sent to the target's rank, its sidecars, or both. ``limit_s``: the
    bar; beyond the bare time if so."""

    def happens(self, way: str) -> bool:
        return way == "group" or not self.of_sidecar

    name: str
    number: signal.Signals
    of_rank: bool
    of_sidecar: bool
    limit_s: float
    beyond: bool = False


FAULTS = (
    Fault("kill -9 of a target", signal.SIGKILL, True, False, 1.0, beyond=True),
    Fault("kill -9 of its sidecar", signal.SIGKILL, False, True, 1.0, beyond=True),
    Fault("SIGSTOP of both", signal.SIGSTOP, True, True, LEASE_S + 1.0),
    Fault("SIGSTOP of a target", signal.SIGSTOP, True, False, LEASE_S + 1.0),
    Fault("SIGSTOP of its sidecar", signal.SIGSTOP, False, True, DEADLINE_S + 1.0),
)


@dataclass(frozen=True)
class Sample:
    """One fault.

    :param sent: the part of its bytes that the trainer had sent at the hit; :param
        retries: by reason;
    :param failures: errors of publishes that failed before one was committed. The rest
        in seconds, see the header.
    """

    fault: str
    victim: int
    sent: float
    undisturbed_s: float
    committed_s: float
    bare_s: float
    retries: dict[str, int]
    failures: list[str]


class Place:
    """A member's place: its forkserver, and the process that has the place now."""

    def __init__(self, group: str, replica: int, server: Forkserver) -> None:
        self.group = group
        self.replica = replica
        self.server = server
        self._stack = AsyncExitStack()
        self._rank: Rank | None = None

    @property
    def name(self) -> str:
        return f"{self.group}/{self.replica}/0"

    @property
    def rank(self) -> Rank:
        assert self._rank is not None
        return self._rank

    async def start(self, quick: bool) -> dict[str, Any]:
        """A new process with the tensors in its memory."""
        environment = {"REPLICAS_FORKSERVER": self.server.name, "OMP_NUM_THREADS": "1"}
        self._rank = await self._stack.enter_async_context(rank("sync_rank", self.name, **environment))
        return await self._rank.ask("tensors", quick=quick, seed=self.replica)

    async def join(self, coordinator: Coordinator) -> None:
        where = {"endpoint": coordinator.endpoint, "token": coordinator.token}
        await self.rank.ask("join", group=self.group, replica=self.replica, **where)

    async def end(self) -> None:
        """Kill the process; nobody misses its last words."""
        if self._rank is not None:
            self._rank.kill()
            await self._stack.aclose()
            self._rank = None


class Fleet:
    """Everyone on the channel, and the publishes between them."""

    def __init__(self, coordinator: Coordinator, places: list[Place], way: str, nbytes: int, quick: bool) -> None:
        self._way = way
        self._coordinator = coordinator
        self._trainer, *self._targets = places
        self._nbytes = nbytes
        self._quick = quick
        self._to_send = nbytes if way == "group" else 0  # along a chain
        self._changed = asyncio.Event()
        coordinator.subscribe(lambda event: self._changed.set())

    async def assemble(self) -> None:
        places = (self._trainer, *self._targets)
        made = await asyncio.gather(*(place.start(self._quick) for place in places))
        if made[0]["nbytes"] != self._nbytes:
            raise RuntimeError(f"the set has {made[0]['nbytes']} bytes, not {self._nbytes}")
        for place in places:
            await place.join(self._coordinator)
        await self._all_live(len(places))
        for _ in range(WARM_UPS):
            await self.publish(self._targets)

    async def _all_live(self, count: int) -> None:
        def live() -> bool:
            (channel,) = self._coordinator.channel_statuses()
            return sum(member.state == "live" for member in channel.members) == count

        await until(live, self._changed, f"{count} members are live")

    async def publish(self, targets: list[Place]) -> dict[str, Any]:
        """An undisturbed publish; the trainer's reply, and ``ended``, when everyone can
        read it."""
        await asyncio.gather(*(place.rank.ask("receive") for place in targets))
        said, *replies = await asyncio.gather(self._trainer.rank.ask("publish"), *(p.rank.hear() for p in targets))
        self._check(said, [])
        return said | {"ended": max(said["committed"], *(reply["readable"] for reply in replies))}

    async def _undisturbed(self) -> dict[str, Any]:
        """Publish to all, again until the bytes go the way that is measured: after a
        broadcast that failed the next versions are pulled."""
        async with asyncio.timeout(AGAIN_S):
            while True:
                progress = Progress(self._trainer.server.sidecars)
                said = await self.publish(self._targets)
                if progress.nbytes >= self._to_send // 2:
                    return said
                await asyncio.sleep(1.0)

    async def hit(self, fault: Fault, number: int) -> Sample:
        """All four steps of the header."""
        victim = self._targets[number]
        undisturbed = await self._undisturbed()
        left = [place for place in self._targets if place is not victim or not fault.of_rank]
        before = self._retries()
        await asyncio.gather(*(place.rank.ask("receive") for place in self._targets))
        to_send = self._to_send
        progress = Progress(self._trainer.server.sidecars)
        await self._trainer.rank.tell("publish", tries=TRIES)
        with ExitStack() as stack:
            if not to_send:
                await asyncio.sleep(undisturbed["phases"]["pack"] / 2)
            hit = await progress.reaches(to_send // 2, lambda: self._strike(fault, victim, stack))
            said, *replies = await asyncio.gather(self._trainer.rank.hear(), *(p.rank.hear() for p in left))
        lost = [victim.name] if fault.of_rank else []
        self._check(said, lost if to_send else said["lost"] and lost)  # before it moves, nobody is lost on the way
        ended = max(said["committed"], *(reply["readable"] for reply in replies))
        await self._equal(left)
        if fault.of_rank:
            await victim.end()
            await self._all_live(1 + len(left))
        bare = await self.publish(left)
        if fault.of_rank:
            await self._replace(victim)
        after = self._retries()
        return Sample(
            fault=fault.name,
            victim=number,
            sent=hit.nbytes / to_send if to_send else 0.0,
            undisturbed_s=undisturbed["ended"] - undisturbed["began"],
            committed_s=ended - hit.at,
            bare_s=bare["phases"]["transfer"] + bare["phases"]["verify"] if to_send else 0.0,
            retries={reason: count - before.get(reason, 0) for reason, count in after.items()},
            failures=said["failures"],
        )

    @staticmethod
    def _strike(fault: Fault, victim: Place, stack: ExitStack) -> float:
        """At the end of ``stack`` those that were stopped go on, as far as they are
        still there."""
        pids = [victim.rank.pid] if fault.of_rank else []
        if fault.of_sidecar:
            pids += victim.server.sidecars()
        pidfds = stack.enter_context(held(pids))
        if fault.number == signal.SIGSTOP:
            stack.callback(send, pidfds, signal.SIGCONT)
        return send(pidfds, fault.number)

    async def _replace(self, victim: Place) -> None:
        await victim.start(self._quick)
        await victim.join(self._coordinator)
        await victim.rank.ask("receive")
        await victim.rank.hear()
        await self._all_live(1 + len(self._targets))
        await self.publish(self._targets)  # forms the group again, and warms the new arena's other slot

    def _retries(self) -> dict[str, int]:
        (channel,) = self._coordinator.channel_statuses()
        return dict(channel.retries)

    @staticmethod
    def _check(said: dict[str, Any], lost: list[str]) -> None:
        if said["lost"] != lost:
            raise RuntimeError(f"version {said['version']} lost {said['lost']}, not {lost}")

    async def _equal(self, targets: list[Place]) -> None:
        digests = await asyncio.gather(*(place.rank.ask("digest") for place in (self._trainer, *targets)))
        if len({reply["digest"] for reply in digests}) != 1:
            raise RuntimeError(f"the targets hold other bytes than the trainer: {digests}")


@asynccontextmanager
async def fleet(servers: list[Forkserver], way: str, nbytes: int, quick: bool) -> AsyncIterator[Fleet]:
    shape = {group: GroupShape(count, heartbeat_timeout_s=LEASE_S) for group, count in (("trainer", 1), ("rollout", 3))}
    settings: dict[str, Any] = {"sources": ["trainer"], "targets": ["rollout"], "slots": SLOTS}
    settings |= {"transport": way, "deadline": f"{DEADLINE_S:g}s"}
    groups = [("trainer", 0), *(("rollout", number) for number in range(TARGETS))]
    places = [Place(*identity, server) for identity, server in zip(groups, servers, strict=True)]
    async with Coordinator({"policy": settings}, groups=shape) as coordinator:
        try:
            yield Fleet(coordinator, places, way, nbytes, quick)
        finally:
            await asyncio.gather(*(place.end() for place in places))


async def measure(way: str, nbytes: int, quick: bool, repetitions: int, done: Callable[[Sample], None]) -> list[Sample]:
    """Every fault so many times; ``done`` hears of each. ``quick``: of the small set of
    tensors, which is ``nbytes``."""
    samples: list[Sample] = []
    faults = [fault for fault in FAULTS if fault.happens(way)]
    async with forkservers(1 + TARGETS) as servers, fleet(servers, way, nbytes, quick) as group:
        await group.assemble()
        for repetition in range(repetitions):
            for order, fault in enumerate(rotated(faults, repetition)):
                samples.append(await group.hit(fault, (repetition + order) % TARGETS))
                done(samples[-1])
    return samples

"""The driver's side of ``bench_hold.py``: one trainer, and targets that read while it
publishes.

Theory of operation
===================

With two cores or more, everything but the trainer keeps off one core, so that its main
thread always finds one: what is left between it and the others is the memory's
bandwidth, and what the library does in the trainer's own process.

*Held*. Each target has the newest version open and loads it into its own parameters
again and again, without a pause; meanwhile the trainer copies its weights, or publishes
them: one sample of each kind after another, in rotating order. After a publish the
targets let go of the old version and open the new one.

*Steps*. The trainer computes steps of fixed work, some tenths of a millisecond each:
alone; from the return of ``publish`` until its version has committed, and until all
targets have loaded it; and while the same processes copy as many bytes out of shared
memory with no library at all. One sample is the mean of the steps that lie in that
time, at least with a part.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from bench.support import Rank, rotated, until
from replicas import Coordinator

__all__ = ["KINDS", "SLOTS", "WINDOWS", "Scene", "Seconds", "within"]

SLOTS = 2
KINDS = ("memcpy", "loop", "foreach", "publish")
WINDOWS = ("alone", "commit", "load", "traffic")
ALONE_S = 0.3
Seconds = dict[str, list[float]]


def within(stamps: Sequence[float], began: float, ended: float) -> float:
    """The mean length of the steps between ``stamps`` that overlap with that time; of
    the next one when none does."""
    steps = [(earlier, later) for earlier, later in itertools.pairwise(stamps) if later > began]
    found = [later - earlier for earlier, later in steps if earlier < ended] or [steps[0][1] - steps[0][0]]
    return statistics.fmean(found)


class Scene:
    """:ivar cold_s: how long the first publish of all held the trainer."""

    def __init__(self, coordinator: Coordinator, ranks: list[Rank], what: str) -> None:
        self._coordinator = coordinator
        self._trainer, *self._targets = ranks
        self._what = what
        self._joined: list[Rank] = []
        self._changed = asyncio.Event()
        self.cold_s = 0.0
        coordinator.subscribe(lambda event: self._changed.set())

    async def prepare(self, cores: Sequence[int]) -> dict[str, Any]:
        await self._trainer.ask("spread", cores=list(cores))
        ranks = (self._trainer, *self._targets)
        made = await asyncio.gather(*(one.ask("fill", what=self._what, seed=seed) for seed, one in enumerate(ranks)))
        await self._trainer.ask("mirror", what=self._what)
        await self._join(self._trainer, "trainer", 0)
        said = await self._trainer.ask("publish")
        self.cold_s = said["held"] - said["began"]
        return made[0]

    async def _join(self, one: Rank, group: str, replica: int) -> None:
        where = {"endpoint": self._coordinator.endpoint, "token": self._coordinator.token}
        await one.ask("join", group=group, replica=replica, **where)

    async def grow(self, readers: int) -> None:
        """Until so many targets have the newest version open, and all slots are
        warm."""
        while len(self._joined) < readers:
            number = len(self._joined)
            one = self._targets[number]
            await self._join(one, "rollout", number)
            self._joined.append(one)
            await until(lambda: self._live() == len(self._joined) + 1, self._changed, f"{one.name} is live")
            await self._open([one])
        for _ in range(SLOTS + 1):
            await self._publish([])

    def _live(self) -> int:
        (channel,) = self._coordinator.channel_statuses()
        return sum(member.state == "live" for member in channel.members)

    @staticmethod
    async def _open(targets: Sequence[Rank]) -> None:
        await asyncio.gather(*(one.ask("open") for one in targets))
        await asyncio.gather(*(one.hear() for one in targets))

    # ----------------------------------------------------- how long the trainer is held

    async def held(self, repetition: int, samples: Seconds) -> None:
        """One sample of each kind."""
        for kind in rotated(KINDS, repetition):
            if kind == "publish":
                said = await self._publish(self._joined)
                seconds = said["held"] - said["began"]
            else:
                await self._read(self._joined)
                seconds = (await self._trainer.ask("copy", how=kind))["held"]
                await self._rest(self._joined)
            samples.setdefault(kind, []).append(seconds)

    async def _publish(self, busy: Sequence[Rank]) -> dict[str, Any]:
        """Publish while ``busy`` read the last version; all open the new one then."""
        await self._read(busy)
        said = await self._trainer.ask("publish")
        await self._rest(busy)
        await asyncio.gather(*(one.ask("close") for one in self._joined))
        await self._open(self._joined)
        return said

    @staticmethod
    async def _read(targets: Sequence[Rank]) -> None:
        await asyncio.gather(*(one.ask("busy") for one in targets))

    @staticmethod
    async def _rest(targets: Sequence[Rank]) -> None:
        await asyncio.gather(*(one.tell("stop") for one in targets))
        for _ in range(2):  # what "busy" replies at its end, and "stop"
            await asyncio.gather(*(one.hear() for one in targets))

    # ----------------------------------------------------- how much its steps slow down

    async def share(self) -> None:
        """Shared memory to copy out of."""
        said = await self._trainer.ask("share", targets=len(self._targets))
        where = {"pid": said["pid"], "memory": said["memory"]}
        wakes = zip(self._targets, said["wakes"], strict=True)
        await asyncio.gather(*(one.ask("reach", wake=wake, **where) for one, wake in wakes))

    async def steps(self, repetition: int, samples: Seconds, windows: Seconds) -> None:
        """One sample of each; ``windows``: how long that took."""
        for kind in rotated(("alone", "publish", "traffic"), repetition):
            if kind == "publish":
                found = await self._steps_after_publish()
            elif kind == "alone" or self._joined:
                found = {kind: await self._steps_beside(kind)}
            else:
                continue
            for name, (mean, lasted) in found.items():
                samples.setdefault(name, []).append(mean)
                windows.setdefault(name, []).append(lasted)

    async def _steps_beside(self, kind: str) -> tuple[float, float]:
        await self._trainer.ask("train")
        loop = asyncio.get_running_loop()
        if kind == "alone":
            began = loop.time()
            await asyncio.sleep(ALONE_S)
            ended = loop.time()
        else:
            replies = await asyncio.gather(*(one.ask("traffic") for one in self._joined))
            began, ended = min(one["began"] for one in replies), max(one["ended"] for one in replies)
        await self._trainer.tell("trained")
        stamps = (await self._trainer.hear())["stamps"]
        await self._trainer.hear()
        return within(stamps, began, ended), ended - began

    async def _steps_after_publish(self) -> dict[str, tuple[float, float]]:
        """Of the time until the commit, and until all have loaded; the targets keep the
        new version open again."""
        await asyncio.gather(*(one.ask("close") for one in self._joined))
        await asyncio.gather(*(one.ask("receive") for one in self._joined))  # all wait for it now
        _, *replies = await asyncio.gather(
            self._trainer.ask("publish_and_train"), *(one.hear() for one in self._joined)
        )
        await self._trainer.tell("trained")
        said = await self._trainer.hear()
        await self._trainer.hear()
        held, committed, stamps = said["held"], said["committed"], said["stamps"]
        found = {"commit": (within(stamps, held, committed), committed - held)}
        if replies:
            loaded = max(one["reported"] for one in replies)
            found["load"] = (within(stamps, held, max(held, loaded)), max(0.0, loaded - held))
            await self._trainer.ask("publish")  # they have loaded that version: another one to keep open
            await self._open(self._joined)
        return found

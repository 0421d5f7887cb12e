"""Does a late joiner hold up the trainer while it is caught up?

Theory of operation
===================

A trainer, a target that has the newest version, and a latecomer, which joins with cold
memory and pulls that version from the carrier of the target, or of the trainer if that
listens first (``transport = "group"``: members of one host map nothing). In turn, order
rotated:

* *alone*: the trainer computes steps of fixed work;
* *catch-up*: the same while the latecomer joins and is caught up; the steps between its
  call of ``join`` and the moment when it can read the version count;
* *other work*: the same while two plain processes broadcast as many bytes by Gloo,
  again and again. On a machine with few cores any traffic takes time away from the
  trainer; this is how much that is with no library at all.

The same three for ``publish``: how long the call holds the trainer, and how long until
it has committed. The publish is made when half of what the latecomer lacks is sent.

With two cores or more the trainer has one for itself, and everything else, its sidecar
and carrier too, shares the others: as many busy processes as cores would slow each
other down by any work at all. What is left is what the library does in the trainer's
process, and the memory's bandwidth.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from bench.processes import Progress, carriers_of, forkservers, one_core_left
from bench.support import Rank, rank, rotated, until
from replicas import Coordinator

__all__ = ["SETTINGS", "StallSample", "measure"]

SETTINGS = ("alone", "catch-up", "other work")
ALONE_S = 1.0
SLOTS = 2
LATECOMER = 1
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class StallSample:
    """Seconds. ``step_s``, ``worst_s``: median and longest step; ``lasted_s``: how long
    what went on beside them took."""

    setting: str
    step_s: float
    worst_s: float
    steps: int
    lasted_s: float
    held_s: float
    committed_s: float


class Scene:
    def __init__(self, coordinator: Coordinator, ranks: list[Rank], nbytes: int) -> None:
        self._coordinator = coordinator
        self._trainer, self._target, self._late, *self._pair = ranks
        self._nbytes = nbytes
        self._changed = asyncio.Event()
        coordinator.subscribe(lambda event: self._changed.set())

    @property
    def _where(self) -> dict[str, str]:
        return {"endpoint": self._coordinator.endpoint, "token": self._coordinator.token}

    async def prepare(self, quick: bool, core: int | None) -> None:
        if core is not None:
            await self._trainer.ask("pin", core=core)
        members = (self._trainer, self._target, self._late)
        await asyncio.gather(*(one.ask("tensors", quick=quick, seed=seed) for seed, one in enumerate(members)))
        await asyncio.gather(*(one.ask("buffers", nbytes=self._nbytes) for one in self._pair))
        port = (await self._pair[0].ask("host"))["port"]
        await asyncio.gather(
            *(one.ask("form", port=port, rank=number, size=2) for number, one in enumerate(self._pair))
        )
        await self._trainer.ask("join", group="trainer", replica=0, **self._where)
        await self._target.ask("join", group="rollout", replica=0, **self._where)
        for _ in range(SLOTS + 1):
            await self._publish(self._nothing)

    async def sample(self, setting: str) -> StallSample:
        beside = {"alone": self._wait, "catch-up": self._join_late, "other work": self._broadcast}[setting]
        await self._trainer.ask("train")
        began, ended = await beside(self._nothing)
        await self._trainer.tell("trained")
        stamps = (await self._trainer.hear())["stamps"]
        await self._trainer.hear()
        within = [later - earlier for earlier, later in itertools.pairwise(stamps) if later > began and earlier < ended]
        if setting == "catch-up":
            await self._leave_late()
        published = await self._publish(beside)
        if setting == "catch-up":
            await self._leave_late()
        return StallSample(
            setting=setting,
            step_s=statistics.median(within),
            worst_s=max(within),
            steps=len(within),
            lasted_s=ended - began,
            held_s=published["held"] - published["began"],
            committed_s=published["committed"] - published["began"],
        )

    async def _publish(self, beside: Callable[[Callable[[], Awaitable[None]]], Awaitable[Any]]) -> dict[str, Any]:
        """Publish in the middle of what ``beside`` does, and have the target load
        it."""
        said: dict[str, Any] = {}

        async def publish() -> None:
            said.update(await self._trainer.ask("publish"))

        await self._target.ask("receive")
        await beside(publish)
        await self._target.hear()
        return said

    # -------------------------------------------------- what goes on beside the trainer

    async def _nothing(self, middle: Callable[[], Awaitable[None]] | None = None) -> None:
        if middle is not None:
            await middle()

    async def _wait(self, middle: Callable[[], Awaitable[None]]) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await middle()
        await asyncio.sleep(ALONE_S)
        return began, loop.time()

    async def _join_late(self, middle: Callable[[], Awaitable[None]]) -> tuple[float, float]:
        """A latecomer; ``middle`` runs when half of what it lacks is sent."""
        progress = Progress(lambda: [*carriers_of(self._target.pid), *carriers_of(self._trainer.pid)])
        await self._late.tell("late", replica=LATECOMER, **self._where)
        await progress.reaches(self._nbytes // 2, lambda: 0.0)
        await middle()
        said = await self._late.hear(TIMEOUT_S)
        return said["began"], said["ended"]

    async def _leave_late(self) -> None:
        await self._late.ask("leave")
        await until(lambda: self._members() == 2, self._changed, "the latecomer has left")

    def _members(self) -> int:
        (channel,) = self._coordinator.channel_statuses()
        return len(channel.members)

    async def _broadcast(self, middle: Callable[[], Awaitable[None]]) -> tuple[float, float]:
        """As many bytes between two others, as often as it takes to fill the time of
        ``alone``; ``middle`` meanwhile."""
        source, target = self._pair
        inside = asyncio.ensure_future(middle())
        stamps: list[float] = []
        while not (inside.done() and stamps and stamps[-1] - stamps[0] >= ALONE_S):
            await target.ask("broadcast", size=2, source=False)
            said, reply = await asyncio.gather(source.ask("broadcast", size=2, source=True), target.hear())
            stamps += [said["began"], reply["ended"]]
        await inside
        return stamps[0], stamps[-1]


async def measure(nbytes: int, quick: bool, repetitions: int, done: Callable[[StallSample], None]) -> list[StallSample]:
    samples: list[StallSample] = []
    settings = {"sources": ["trainer"], "targets": ["rollout"], "slots": SLOTS, "transport": "group"}
    names = ("trainer", "target", "latecomer", "plain 0", "plain 1")
    async with AsyncExitStack() as stack:
        core = stack.enter_context(one_core_left())
        servers = await stack.enter_async_context(forkservers(3))
        coordinator = Coordinator({"policy": settings}, groups={"trainer": 1, "rollout": 2})
        await stack.enter_async_context(coordinator)
        forks = [{"REPLICAS_FORKSERVER": server.name} for server in servers] + [{}, {}]
        starts = [
            rank("stall_rank", name, OMP_NUM_THREADS="1", **fork) for name, fork in zip(names, forks, strict=True)
        ]
        scene = Scene(coordinator, [await stack.enter_async_context(start) for start in starts], nbytes)
        await scene.prepare(quick, core)
        for repetition in range(repetitions):
            for setting in rotated(SETTINGS, repetition):
                samples.append(await scene.sample(setting))
                done(samples[-1])
    return samples

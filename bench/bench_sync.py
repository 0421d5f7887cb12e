"""How long does a weight sync take on one host, and how long does it hold the trainer?

    python bench/bench_sync.py [--quick] [--repetitions N] [--threads N]

One source, then 1, 2 and 3 targets, each a process of its own, and 272 tensors of 269 MB in all (``bench/shapes.py``).
Measured from the call of ``publish`` to: its return, the version readable at every target, and loaded into every
target's own parameters. Beside it, in the same run and in rotating order: one copy of the same bytes in warm memory, and
a broadcast of one flat buffer by ProcessGroupGloo between as many plain processes. The first rounds, which allocate every
slot of the arenas and form the group, are kept apart as ``cold``.

All processes have the same number of torch threads; default: the cores divided by the members, at least 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Awaitable, Callable
from typing import Any

from bench.shapes import FULL, SMALL, nbytes_of
from bench.support import Rank, Spread, busy_ratio, machine, rotated, show, threads_for, together, until, write
from replicas import Coordinator

TARGETS = 3
SLOTS = 2
WARM_UPS = SLOTS + 1
LABELS = {
    "memcpy": "memory copy",
    "gloo": "Gloo, flat buffer",
    "held": "publish returns",
    "readable": "readable everywhere",
    "loaded": "loaded everywhere",
}
Samples = dict[str, list[float]]


class Library:
    """Trainer and rollouts on a channel."""

    def __init__(self, coordinator: Coordinator, ranks: list[Rank]) -> None:
        self._coordinator = coordinator
        self._trainer, *self._rollouts = ranks
        self._changed = asyncio.Event()
        self._published = False
        self.phases: list[dict[str, float]] = []
        coordinator.subscribe(lambda event: self._changed.set())

    async def join(self, rank: Rank, group: str, replica: int) -> None:
        where = {"endpoint": self._coordinator.endpoint, "token": self._coordinator.token}
        await rank.ask("join", group=group, replica=replica, **where)

    async def join_trainer(self) -> None:
        await self.join(self._trainer, "trainer", 0)

    async def add(self, number: int) -> None:
        """One more rollout, which has loaded the newest version."""
        await self.join(self._rollouts[number], "rollout", number)
        await until(lambda: self._live() == number + 2, self._changed, f"rollout {number} is live")
        if self._published:
            await self._rollouts[number].ask("receive")
            await self._rollouts[number].hear()

    def _live(self) -> int:
        (channel,) = self._coordinator.channel_statuses()
        return sum(member.state == "live" for member in channel.members)

    async def sync(self, targets: int, samples: Samples) -> None:
        """One version to all of them; they must end up with equal bytes."""
        rollouts = self._rollouts[:targets]
        await asyncio.gather(*(one.ask("receive") for one in rollouts))  # all wait for it now
        said, *replies = await asyncio.gather(self._trainer.ask("publish"), *(one.hear() for one in rollouts))
        self._published = True
        samples["held"].append(said["held"] - said["began"])
        samples["readable"].append(max(reply["readable"] for reply in replies) - said["began"])
        samples["loaded"].append(max(reply["loaded"] for reply in replies) - said["began"])
        self.phases.append(said["phases"])
        digests = await asyncio.gather(*(one.ask("digest") for one in (self._trainer, *rollouts)))
        if len({reply["digest"] for reply in digests}) != 1:
            raise RuntimeError(f"the targets hold other bytes than the trainer: {digests}")


class Plain:
    """Processes that share a Gloo group and nothing else."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks = ranks

    async def prepare(self, nbytes: int) -> None:
        await asyncio.gather(*(one.ask("buffers", nbytes=nbytes) for one in self._ranks))
        port = (await self._ranks[0].ask("host"))["port"]
        for size in range(2, len(self._ranks) + 1):
            ranks = enumerate(self._ranks[:size])
            await asyncio.gather(*(one.ask("form", port=port, rank=rank, size=size) for rank, one in ranks))

    async def broadcast(self, targets: int, samples: Samples) -> None:
        source, *rest = self._ranks[: targets + 1]
        await asyncio.gather(*(one.ask("broadcast", size=targets + 1, source=False) for one in rest))
        asks = (source.ask("broadcast", size=targets + 1, source=True), *(one.hear() for one in rest))
        said, *replies = await asyncio.gather(*asks)
        samples["gloo"].append(max(reply["ended"] for reply in (said, *replies)) - said["began"])

    async def memcpy(self, targets: int, samples: Samples) -> None:
        samples["memcpy"].append((await self._ranks[0].ask("memcpy"))["seconds"])


async def measure(library: Library, plain: Plain, repetitions: int) -> tuple[dict[int, Samples], Samples]:
    """All samples by number of targets and kind, and those of the first warm-ups of all."""
    results: dict[int, Samples] = {}
    cold: Samples = {}
    contenders: list[Callable[[int, Samples], Awaitable[None]]] = [library.sync, plain.broadcast, plain.memcpy]
    for targets in range(1, TARGETS + 1):
        await library.add(targets - 1)
        samples: Samples = {kind: [] for kind in LABELS}
        warm_ups: Samples = {kind: [] for kind in LABELS}
        for _ in range(WARM_UPS):
            for contender in contenders:
                await contender(targets, warm_ups)
        cold = cold or warm_ups
        library.phases.clear()
        for repetition in range(repetitions):
            for contender in rotated(contenders, repetition):
                await contender(targets, samples)
        results[targets] = samples
    return results, cold


async def run(quick: bool, repetitions: int, threads: int) -> None:
    busy, load = await busy_ratio(), os.getloadavg()
    nbytes = nbytes_of(SMALL if quick else FULL)
    channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"], "slots": SLOTS}}
    environment = {"OMP_NUM_THREADS": str(threads)}
    names = ["source", *(f"target {number}" for number in range(TARGETS))]
    async with (
        Coordinator(channels, groups={"trainer": 1, "rollout": TARGETS}) as coordinator,
        together("sync_rank", [f"member: {name}" for name in names], **environment) as members,
        together("sync_rank", [f"plain: {name}" for name in names], **environment) as others,
    ):
        library, plain = Library(coordinator, members), Plain(others)
        made = await asyncio.gather(*(one.ask("tensors", quick=quick, seed=seed) for seed, one in enumerate(members)))
        if made[0]["nbytes"] != nbytes:
            raise RuntimeError(f"the set has {made[0]['nbytes']} bytes, not {nbytes}")
        await plain.prepare(nbytes)
        await library.join_trainer()
        results, cold = await measure(library, plain, repetitions)
        await asyncio.gather(*(one.ask("leave") for one in members))
    facts = made[0] | {"busy_before": busy, "load": load, "quick": quick}
    report(results, cold, library.phases, facts)


def report(results: dict[int, Samples], cold: Samples, phases: list[dict[str, float]], facts: dict[str, Any]) -> None:
    table: list[list[str] | None] = []
    rows: list[dict[str, Any]] = []
    for targets, samples in results.items():
        spreads = {kind: Spread(found) for kind, found in samples.items()}
        for kind, spread in spreads.items():
            table.append([str(targets), LABELS[kind], *spread.cells(spreads["memcpy"], spreads["gloo"])])
            ratios = {f"ratio_to_{name}": spread.median / spreads[name].median for name in ("memcpy", "gloo")}
            rows.append({"targets": targets, "what": kind, **spread.report(), **ratios})
        table.append(None)
    medians = {phase: statistics.median(one[phase] for one in phases) for phase in phases[0]}
    shown = ", ".join(f"{phase} {seconds * 1e3:.0f}" for phase, seconds in medians.items())
    megabytes = facts["nbytes"] / 1e6
    show(
        f"Weight sync on one host: {facts['tensors']} tensors, {megabytes:.0f} MB bf16",
        ["to", "", "median", "range", "x copy", "x Gloo"],
        table,
        f"The first publish of all held the trainer {cold['held'][0]:.2f} s and was loaded after {cold['loaded'][0]:.2f} s."
        f"\nPhases at {max(results)} targets, ms: {shown}."
        f"\n{facts['threads']} torch thread(s) in each process; others used {facts['busy_before']:.0%} of the cores before.",
    )
    phase_key = f"phases_at_{max(results)}_targets_s"
    write("bench_sync", {"machine": machine(), **facts, "rows": rows, "cold_s": cold, phase_key: medians})


def main() -> None:
    parser = argparse.ArgumentParser(description="Weight sync on one host, against a memory copy and Gloo.")
    parser.add_argument("--quick", action="store_true", help="a ninth of the bytes, 3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 5")
    parser.add_argument("--threads", type=int, default=threads_for(TARGETS + 1), help="torch threads of each process")
    options = parser.parse_args()
    repetitions = options.repetitions or (3 if options.quick else 5)
    asyncio.run(run(options.quick, repetitions, options.threads))


if __name__ == "__main__":
    main()

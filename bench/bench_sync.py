"""How long does a weight sync take on one host?

    python bench/bench_sync.py [--quick] [--repetitions N] [--threads N] [--only SET …]

One source, then 1, 2 and 3 targets, each a process of its own: 272 tensors of 269 MB in
all, and 1 GiB in 8 tensors (``bench/shapes.py``). From the call of ``publish`` until
all targets can read the version, and until all have it in parameters of their own,
against (``sync_contenders.py`` says exactly what):

* the limit: one copy into warm shared memory, and as many copies out of it at once as
  there are targets;
* ProcessGroupGloo: a broadcast of one flat buffer, and one for each tensor;
* files in /dev/shm: torch.save with torch.load, and safetensors;
* torchft's ProcessGroupBabyGloo, and Ray's object store, where ``make bench-peers`` has
  installed them.

The order changes with every repetition. Ray's own processes need a part of a core even
when they do nothing: it comes at the end, with Gloo's flat broadcast beside it once
more, to which it is compared. All processes have the same number of threads
(OMP_NUM_THREADS), by default the cores divided by the members, at least 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from bench.peers import HOW, python_with
from bench.shapes import nbytes_of_set
from bench.support import (
    Rank,
    available_nbytes,
    busy_ratio,
    machine,
    rank,
    rotated,
    run_bench,
    scratch,
    threads_for,
    together,
    write,
)
from bench.sync_contenders import Contender, Each, Files, Flat, Library, Limit, Load, Ray, Read, Torchft, groups, share
from bench.sync_report import BESIDE_RAY, Results, report
from replicas import Coordinator

TARGETS = 3
SLOTS = 2
SETS = ("smollm2", "few", "moe")
SHARED_FOLDER = "/dev/shm"
ROOM_NBYTES = 1 << 30
"""Memory that is left to others."""


async def measure(contenders: Sequence[Contender], repetitions: int, results: Results) -> None:
    """Rounds of all to 1, 2 and 3 targets, in turn; the first ones of each are not
    counted."""
    for targets in range(1, TARGETS + 1):
        found = results.setdefault(targets, {})
        for contender in contenders:
            await contender.prepare(targets)
            for _ in range(contender.warm_ups):
                await contender.sync(targets)
        for repetition in range(repetitions):
            for contender in rotated(contenders, repetition):
                for reached, seconds in (await contender.sync(targets)).items():
                    found.setdefault(contender.name, {}).setdefault(reached, []).append(seconds)


class Field:
    """One set of tensors and everyone who moves it."""

    def __init__(self, what: str, threads: int, with_peers: bool) -> None:
        self.what = what
        self._with_peers = with_peers
        self.nbytes = nbytes_of_set(what)
        self.missing: dict[str, str] = {}
        self.results: Results = {}
        self.facts: dict[str, Any] = {}
        self.cold: dict[str, float] = {}
        self.phases: list[dict[str, float]] = []
        self._environment = {"OMP_NUM_THREADS": str(threads)}
        self._names = ["source", *(f"target {number}" for number in range(TARGETS))]

    async def run(self, repetitions: int) -> None:
        channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"], "slots": SLOTS}}
        async with (
            Coordinator(channels, groups={"trainer": 1, "rollout": TARGETS}) as coordinator,
            together("contest_rank", self._names, **self._environment) as ranks,
        ):
            made = [one.ask("fill", what=self.what, seed=seed) for seed, one in enumerate(ranks)]
            self.facts = (await asyncio.gather(*made))[0]
            port = await groups(ranks)
            await share(ranks)
            library = Library(coordinator, ranks)
            await library.grow(1)
            self.cold = await Load(library).sync(1)
            async with AsyncExitStack() as stack:
                contenders: list[Contender] = [Limit(ranks), Read(library), Load(library), Flat(ranks), Each(ranks)]
                folder = stack.enter_context(scratch(SHARED_FOLDER))
                contenders += [Files(ranks, kind, folder) for kind in self._formats()]
                contenders += await self._torchft(stack, port)
                library.phases.clear()
                await measure(contenders, repetitions, self.results)
            self.phases = library.phases
            async with AsyncExitStack() as stack:
                if ray := await self._ray(stack):
                    await measure([*ray, Flat(ranks, BESIDE_RAY)], repetitions, self.results)
            await asyncio.gather(*(one.ask("leave") for one in ranks))

    # --------------------------------------------------------- those who may be missing

    def _formats(self) -> list[str]:
        free = shutil.disk_usage(SHARED_FOLDER).free
        if free < self.nbytes + ROOM_NBYTES // 16:
            self.missing["files"] = f"{SHARED_FOLDER} has {free / 1e6:.0f} MB left"
            return []
        if python_with("safetensors") is None:
            self.missing["safetensors"] = f"not installed: {HOW}"
            return ["torch.save"]
        return ["torch.save", "safetensors"]

    def _interpreter(self, name: str, copies: float) -> str | None:
        """That which has the package, if memory for so many copies of the weights is
        left, too."""
        python = python_with(name)
        needed = int(self.nbytes * copies) + ROOM_NBYTES
        if not self._with_peers:
            self.missing[name] = "one set only, in a quick run"
        elif python is None:
            self.missing[name] = f"not installed: {HOW}"
        elif (available := available_nbytes()) < needed:
            self.missing[name] = f"{needed / 1e9:.0f} GB of memory needed, {available / 1e9:.0f} available"
        else:
            return python
        return None

    async def _torchft(self, stack: AsyncExitStack, port: int) -> list[Contender]:
        python = self._interpreter("torchft", TARGETS + 2)
        if python is None:
            return []
        ranks = await stack.enter_async_context(
            together("torchft_rank", [f"torchft: {name}" for name in self._names], python, **self._environment)
        )
        await asyncio.gather(*(one.ask("fill", what=self.what, seed=seed) for seed, one in enumerate(ranks)))
        stack.push_async_callback(_close, ranks)
        return [Torchft(ranks, port)]

    async def _ray(self, stack: AsyncExitStack) -> list[Contender]:
        python = self._interpreter("ray", TARGETS + 4)
        if python is None:
            return []
        folder = stack.enter_context(scratch())
        one = await stack.enter_async_context(rank("ray_rank", "Ray", python, **self._environment))
        stack.push_async_callback(_close, [one])
        try:
            await one.ask("start", what=self.what, targets=TARGETS, nbytes=self.nbytes, folder=folder)
        except RuntimeError as error:
            self.missing["ray"] = f"it did not start: {str(error).splitlines()[-1]}"
            return []
        return [Ray(one)]


async def _close(ranks: Sequence[Rank]) -> None:
    await asyncio.gather(*(one.ask("close") for one in ranks))


async def run(sets: Sequence[str], quick: bool, repetitions: int | None, threads: int) -> None:
    busy, load = await busy_ratio(), os.getloadavg()
    found: list[dict[str, Any]] = []
    for name in sets:
        field = Field(f"{name}-small" if quick else name, threads, with_peers=not quick or name == sets[0])
        await field.run(repetitions or (3 if quick or name == "few" else 5))
        found.append(report(field.results, field.facts, field.cold, field.phases, field.missing))
    facts = {"OMP_NUM_THREADS": threads, "busy_before": busy, "load": load, "quick": quick}
    write("bench_sync", {"machine": machine(), **facts, "sets": dict(zip(sets, found, strict=True))})


def main() -> None:
    parser = argparse.ArgumentParser(description="Weight sync on one host, against the limit, Gloo, files and others.")
    parser.add_argument("--quick", action="store_true", help="a ninth of the bytes, 3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 5; 3 of the large set")
    parser.add_argument("--threads", type=int, default=threads_for(TARGETS + 1), help="OMP_NUM_THREADS of each process")
    parser.add_argument(
        "--only", nargs="+", choices=SETS, default=SETS[:2], help="sets of tensors; default: all but moe"
    )
    options = parser.parse_args()
    run_bench(run(options.only, options.quick, options.repetitions, options.threads))


if __name__ == "__main__":
    main()

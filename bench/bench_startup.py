"""How long until a rank can work, and until a lost sidecar is replaced?

    python bench/bench_startup.py [--quick] [--repetitions N]

At 2 and 4 members, in fresh processes each time. Every rank has a sidecar forkserver that runs already, as the shim of a
supervisor gives it one. Measured: join (until it has returned in all ranks); from the first join to the end of the first
barrier (sessions, one sidecar each, their process group, the operation); a later barrier; and from kill -9 of one sidecar
to the end of the next barrier that succeeds, for which every member forks a new sidecar and the group is formed anew.
Beside it: starting as many Python processes that import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from contextlib import AsyncExitStack
from typing import Any

from bench.processes import Forkserver, forkservers
from bench.support import Rank, Spread, busy_ratio, machine, rank, show, until, write
from replicas import Coordinator

SIZES = (2, 4)
LABELS = {
    "torch": "start Python, import torch",
    "join": "join returns",
    "first": "join to first barrier",
    "later": "a later barrier",
    "replaced": "kill -9 to next barrier",
}
Samples = dict[str, list[float]]


async def once(coordinator: Coordinator, servers: list[Forkserver], samples: Samples) -> None:
    """Processes from their start to their end, one sample of each kind."""
    changed = asyncio.Event()
    coordinator.subscribe(lambda event: changed.set())
    size = len(servers)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        starts = [
            stack.enter_async_context(rank("startup_rank", f"peer {number}", REPLICAS_FORKSERVER=server.name))
            for number, server in enumerate(servers)
        ]
        ranks = [await start for start in starts]
        loaded = await asyncio.gather(*(one.ask("loaded") for one in ranks))
        samples["torch"].append(max(reply["at"] for reply in loaded) - began)
        where = {"endpoint": coordinator.endpoint, "token": coordinator.token}
        joins = await asyncio.gather(*(one.ask("join", replica=number, **where) for number, one in enumerate(ranks)))
        joined = min(reply["began"] for reply in joins)
        samples["join"].append(max(reply["joined"] for reply in joins) - joined)
        await until(lambda: _live(coordinator) == size, changed, "all peers are live")
        samples["first"].append((await meet(ranks))[1] - joined)
        started, ended = await meet(ranks)
        samples["later"].append(ended - started)
        killed_at = servers[-1].kill_sidecar()
        samples["replaced"].append((await meet(ranks))[1] - killed_at)
        await asyncio.gather(*(one.ask("leave") for one in ranks))


async def meet(ranks: list[Rank]) -> tuple[float, float]:
    """A barrier of all; from the last call to the last return."""
    replies = await asyncio.gather(*(one.ask("barrier") for one in ranks))
    return max(reply["began"] for reply in replies), max(reply["ended"] for reply in replies)


def _live(coordinator: Coordinator) -> int:
    (channel,) = coordinator.channel_statuses()
    return sum(member.state == "live" for member in channel.members)


async def run(quick: bool, repetitions: int) -> None:
    busy, load = await busy_ratio(), os.getloadavg()
    results: dict[int, Samples] = {size: {kind: [] for kind in LABELS} for size in SIZES}
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(forkservers(max(SIZES)))
        coordinators = {
            size: await stack.enter_async_context(Coordinator({"outer": {"peers": ["peer"]}}, groups={"peer": size}))
            for size in SIZES
        }
        for _ in range(repetitions):
            for size in SIZES:
                await once(coordinators[size], servers[:size], results[size])
    report(results, {"busy_before": busy, "load": load, "quick": quick})


def report(results: dict[int, Samples], facts: dict[str, Any]) -> None:
    table: list[list[str] | None] = []
    rows: list[dict[str, Any]] = []
    for size, samples in results.items():
        spreads = {kind: Spread(found) for kind, found in samples.items()}
        for kind, spread in spreads.items():
            table.append([str(size), LABELS[kind], *spread.cells(spreads["torch"])])
            rows.append({"members": size, "what": kind, **spread.report()})
        table.append(None)
    note = f"Others used {facts['busy_before']:.0%} of the cores before."
    show("Start-up of members on one host", ["of", "", "median", "range", "x torch"], table, note)
    write("bench_startup", {"machine": machine(), **facts, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up of members, and replacement of a sidecar.")
    parser.add_argument("--quick", action="store_true", help="3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 5")
    options = parser.parse_args()
    asyncio.run(run(options.quick, options.repetitions or (3 if options.quick else 5)))


if __name__ == "__main__":
    main()

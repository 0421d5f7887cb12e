"""How long until a rank can work, and until a lost sidecar is replaced? And what does a
sidecar cost?

    python bench/bench_startup.py [--quick] [--repetitions N]

At 2, 4 and 8 members, in fresh processes each time. Every rank has a sidecar forkserver
that runs already, as the shim of a supervisor gives it one. Measured:

* join, until it has returned in all ranks;
* a sidecar: in the first rank alone, from the request for its first one, with the
  connection to the forkserver, to that one's first answer; and for another one, forked
  on demand (a spare one answers sooner), as a replacement before it forms a group;
* from the first join to the end of the first barrier (sessions, one sidecar each, their
  process group, the operation), and how much of it was the group ("group formed": from
  the coordinator's word to all members' answers, with their sidecars);
* a later barrier; and from kill -9 of one sidecar to the end of the next barrier that
  succeeds, for which every member takes another sidecar and the group is formed anew;
* what is private to a sidecar (memory that no other process has, in
  ``/proc/PID/smaps``, without the buffers that it shares with its rank), and what a
  forkserver, its sidecar and its spare cost together (the sum of their PSS, in which
  what other processes have, too, counts in part).

Beside it: starting as many Python processes that import torch, and torchft's
ProcessGroupBabyGloo, first formed and formed anew, where it is installed (``make
bench-peers``).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.processes import Forkserver, children_of, forkservers
from bench.support import Bar, Rank, Spread, busy_ratio, in_words, machine, rank, run_bench, show, until, write
from replicas import Coordinator

SIZES = (2, 4, 8)
LABELS = {
    "torch": "start Python, import torch",
    "join": "join returns",
    "sidecar": "the first sidecar answers",
    "another": "another sidecar answers",
    "first": "join to first barrier",
    "formed": "group formed",
    "later": "a later barrier",
    "replaced": "kill -9 to next barrier",
    "torchft": "torchft: first configure, barrier",
    "torchft_again": "torchft: configure again, barrier",
    "private": "private memory of a sidecar",
    "tree": "PSS of a forkserver and its sidecars",
}
MEMORY = ("private", "tree")
READY_LIMIT_S = 0.5
REPLACED_LIMIT_S = 0.05
PRIVATE_LIMIT_NBYTES = 20 << 20
Samples = dict[str, list[float]]


class Scene:
    """What runs all the time: forkservers, a coordinator for each number of members, a
    store for torchft."""

    def __init__(self, servers: list[Forkserver], coordinators: dict[int, Coordinator], port: int) -> None:
        self.servers = servers
        self.coordinators = coordinators
        self.port = port
        self._prefixes = itertools.count()

    async def once(self, size: int, samples: Samples) -> None:
        """Processes from their start to their end, one sample of each kind."""
        servers, coordinator = self.servers[:size], self.coordinators[size]
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            starts = [
                stack.enter_async_context(rank("startup_rank", f"peer {number}", REPLICAS_FORKSERVER=server.name))
                for number, server in enumerate(servers)
            ]
            ranks = [await start for start in starts]
            loaded = await asyncio.gather(*(one.ask("loaded") for one in ranks))
            samples["torch"].append(max(reply["at"] for reply in loaded) - began)
            await _work(coordinator, servers, ranks, samples)
            if importlib.util.find_spec("torchft") is not None:
                for what in ("torchft", "torchft_again"):
                    samples[what].append(await self._torchft(ranks))
            await asyncio.gather(*(one.ask("leave") for one in ranks))

    async def _torchft(self, ranks: list[Rank]) -> float:
        where: dict[str, Any] = {"port": self.port, "prefix": f"group-{next(self._prefixes)}", "size": len(ranks)}
        replies = await asyncio.gather(*(one.ask("torchft", rank=number, **where) for number, one in enumerate(ranks)))
        return max(float(reply["seconds"]) for reply in replies)


async def _work(coordinator: Coordinator, servers: list[Forkserver], ranks: list[Rank], samples: Samples) -> None:
    changed = asyncio.Event()
    coordinator.subscribe(lambda event: changed.set())
    where = {"endpoint": coordinator.endpoint, "token": coordinator.token}
    joins = await asyncio.gather(*(one.ask("join", replica=number, **where) for number, one in enumerate(ranks)))
    joined = min(reply["began"] for reply in joins)
    samples["join"].append(max(reply["joined"] for reply in joins) - joined)
    await until(lambda: _live(coordinator) == len(ranks), changed, "all peers are live")
    waited = -time.monotonic()
    samples["sidecar"].append((await ranks[0].ask("sidecar"))["seconds"])
    await ranks[0].ask("sidecar")  # takes the spare one, if there is any
    samples["another"].append((await ranks[0].ask("sidecar"))["seconds"])
    waited += time.monotonic()
    first = await meet(ranks)
    samples["first"].append(max(reply["ended"] for reply in first) - joined - waited)
    samples["formed"].append(max(reply["form"] for reply in first))
    samples["later"].append(_seconds(await meet(ranks)))
    sidecars = [pid for server in servers for pid in server.sidecars()]
    samples["private"].append(max(private_nbytes(pid) for pid in sidecars))
    samples["tree"].append(max(sum(map(pss_nbytes, [one.pid, *children_of(one.pid)])) for one in servers))
    killed_at = servers[-1].kill_sidecar()
    samples["replaced"].append(max(reply["ended"] for reply in await meet(ranks)) - killed_at)


async def meet(ranks: list[Rank]) -> list[dict[str, Any]]:
    """A barrier of all."""
    return await asyncio.gather(*(one.ask("barrier") for one in ranks))


def _seconds(replies: Sequence[dict[str, Any]]) -> float:
    """From the last call to the last return."""
    return float(max(reply["ended"] for reply in replies) - max(reply["began"] for reply in replies))


def _live(coordinator: Coordinator) -> int:
    (channel,) = coordinator.channel_statuses()
    return sum(member.state == "live" for member in channel.members)


def private_nbytes(pid: int) -> int:
    """Memory of the process that no other one has, without buffers (memfds), which are
    there to be shared."""
    total, shared = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if " " in name:  # the head of a mapping: addresses, rights, ..., path
            shared = "/memfd:" in line
        elif not shared and name in ("Private_Clean", "Private_Dirty"):
            total += int(rest.split()[0]) * 1024
    return total


def pss_nbytes(pid: int) -> int:
    """Memory of the process, each page divided by the number of processes that have
    it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024


async def run(quick: bool, repetitions: int, sizes: Sequence[int]) -> None:
    busy, load = await busy_ratio(), os.getloadavg()
    results: dict[int, Samples] = {size: {kind: [] for kind in LABELS} for size in sizes}
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(forkservers(max(sizes)))
        coordinators = {
            size: await stack.enter_async_context(Coordinator({"outer": {"peers": ["peer"]}}, groups={"peer": size}))
            for size in sizes
        }
        store = await stack.enter_async_context(rank("startup_rank", "store"))
        scene = Scene(servers, coordinators, (await store.ask("host"))["port"])
        for _ in range(repetitions):
            for size in sizes:
                await scene.once(size, results[size])
    report(results, {"busy_before": busy, "load": load, "quick": quick})


def _rows(results: dict[int, Samples]) -> tuple[list[list[str] | None], list[dict[str, Any]]]:
    table: list[list[str] | None] = []
    rows: list[dict[str, Any]] = []
    for size, samples in results.items():
        for kind in [kind for kind in LABELS if samples[kind]]:
            found, unit = samples[kind], _mebibytes if kind in MEMORY else in_words
            spread, torch = Spread(found), Spread(samples["torch"])
            ratio = "" if kind in MEMORY else f"{spread.median / torch.median:.3f}"
            table.append(
                [str(size), LABELS[kind], unit(spread.median), f"{unit(min(found))} - {unit(max(found))}", ratio]
            )
            rows.append({"members": size, "what": kind, "median": spread.median, "samples": found})
        table.append(None)
    return table, rows


def _mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def bars(results: dict[int, Samples]) -> list[Bar]:
    """What is promised, of the medians with the most members (of a sidecar alone: of
    all)."""

    def worst(kind: str) -> float:
        return max(Spread(samples[kind]).median for samples in results.values())

    limits: list[tuple[str, str, float, Callable[[float], float]]] = [
        (f"join and first sidecar, s (limit {READY_LIMIT_S})", "ready", READY_LIMIT_S, lambda value: value),
        (f"another sidecar, ms (limit {REPLACED_LIMIT_S * 1e3:.0f})", "another", REPLACED_LIMIT_S, lambda v: v * 1e3),
        ("private memory of a sidecar, MiB (limit 20)", "private", PRIVATE_LIMIT_NBYTES, lambda v: v / 2**20),
    ]
    found = []
    for text, kind, limit, shown in limits:
        value = worst("join") + worst("sidecar") if kind == "ready" else worst(kind)
        found.append(Bar(text, shown(value), value <= limit))
    return found


def report(results: dict[int, Samples], facts: dict[str, Any]) -> None:
    table, rows = _rows(results)
    kept = bars(results)
    notes = [f"Others used {facts['busy_before']:.0%} of the cores before.", *(bar.line() for bar in kept)]
    if not any(samples["torchft"] for samples in results.values()):
        notes.append("torchft is not installed: make bench-peers")
    show("Start-up of members on one host", ["of", "", "median", "range", "x torch"], table, "\n".join(notes))
    bar_rows = [{"bar": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in kept]
    write("bench_startup", {"machine": machine(), **facts, "rows": rows, "bars": bar_rows})


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up of members, and replacement of a sidecar.")
    parser.add_argument("--quick", action="store_true", help="3 repetitions, without 8 members")
    parser.add_argument("--repetitions", type=int, default=None, help="default 5")
    parser.add_argument("--members", type=int, nargs="+", help="default 2 4 8; quick: 2 4")
    options = parser.parse_args()
    sizes = options.members or (SIZES[:2] if options.quick else SIZES)
    run_bench(run(options.quick, options.repetitions or (3 if options.quick else 5), sizes))


if __name__ == "__main__":
    main()

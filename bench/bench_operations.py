"""How long do small operations between peers take?

    python bench/bench_operations.py [--quick] [--repetitions N] [--only replicas gloo
    torchft]

Barriers, and all-reduces of 4 B to 4 MiB, among 2 and 4 members, one process each: by
channel operations (in a sidecar, all or nothing), by ProcessGroupGloo in the rank
itself, and by torchft's ProcessGroupBabyGloo (in a process of its own, without a
promise about who has a result after a failure). Each sample is the mean of many
operations, one after another, and of the slowest rank; who comes first changes with
every repetition. Sums are checked. "over" is what a channel takes more than Gloo in the
rank; the bars hold for barriers and for all-reduces up to 64 KiB.

What an operation through another process costs at least is measured beside it: "hop" is
half of a round trip of one byte between two processes that wait for each other, by a
Unix socket, with as many such pairs at once as there are members. An operation needs
eight one after another: caller, session thread, coordinator, session thread, sidecar,
session thread, coordinator, session thread, caller; and what Gloo takes between the
sidecars.

torchft takes part where it is installed (``make bench-peers``).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import os
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bench.processes import Forkserver, forkservers
from bench.support import Rank, Spread, busy_ratio, machine, rank, rotated, run_bench, show, write
from replicas import Coordinator

SIZES = (2, 4)
NBYTES = (0, 4, 4 << 10, 64 << 10, 1 << 20, 4 << 20)
SMALL_NBYTES = 64 << 10
LIMITS_S = {2: 0.004, 4: 0.004}
CONTENDERS = {"replicas": "replicas", "gloo": "Gloo, in the rank", "torchft": "torchft, subprocess"}
TIMES, TIMES_LARGE = 60, 15
WARM_UPS = 20
HOPS = 2000
Samples = dict[tuple[int, int, str], list[float]]


class Field:
    """Rank processes, and the groups that they form."""

    def __init__(self, coordinator: Coordinator, port: int, ranks: list[Rank]) -> None:
        self._coordinator = coordinator
        self._port = port
        self._ranks = ranks
        self._prefixes = itertools.count()

    async def form(self, contender: str, size: int) -> None:
        name = _name(contender, size)
        ranks = self._ranks[:size]
        where: dict[str, Any] = {"port": self._port, "prefix": f"group-{next(self._prefixes)}", "size": size}
        if contender == "replicas":
            where = {"endpoint": self._coordinator.endpoint, "token": self._coordinator.token, "group": f"of{size}"}
            calls = [one.ask("channel", name=name, replica=number, **where) for number, one in enumerate(ranks)]
        elif contender == "gloo":
            calls = [one.ask("plain", name=name, rank=number, **where) for number, one in enumerate(ranks)]
        else:
            calls = [one.ask("torchft", name=name, rank=number, **where) for number, one in enumerate(ranks)]
        await asyncio.gather(*calls)
        await self.measure(contender, size, 0, WARM_UPS)

    async def measure(self, contender: str, size: int, nbytes: int, times: int) -> float:
        """Seconds of one operation, of the slowest rank."""
        ask = {"name": _name(contender, size), "nbytes": nbytes, "times": times, "size": size}
        replies = await asyncio.gather(*(one.ask("measure", **ask) for one in self._ranks[:size]))
        return max(float(reply["seconds"]) for reply in replies)

    async def end(self, contender: str, size: int) -> None:
        await asyncio.gather(*(one.ask("close", name=_name(contender, size)) for one in self._ranks[:size]))


def _name(contender: str, size: int) -> str:
    return f"{contender} of {size}"


def _echo(sock: socket.socket) -> None:
    """Send back each byte until the other end closes."""
    while sock.recv(1):
        sock.sendall(b"x")
    os._exit(0)


def hop_s(pairs: int) -> float:
    """Half of a round trip between two processes, while ``pairs - 1`` others do the
    same."""
    ends: list[socket.socket] = []
    children: list[int] = []
    for _ in range(pairs):
        ours, theirs = socket.socketpair()
        child = os.fork()  # this process has one thread, and no torch
        if child == 0:
            ours.close()
            for end in ends:
                end.close()
            _echo(theirs)
        theirs.close()
        ends.append(ours)
        children.append(child)
    drivers = [_hopper(end) for end in ends[1:]]
    seconds = _hops(ends[0])
    for end in ends:
        end.close()
    for child in (*children, *drivers):
        os.waitpid(child, 0)
    return seconds


def _hopper(end: socket.socket) -> int:
    child = os.fork()
    if child == 0:
        _hops(end)
        os._exit(0)
    return child


def _hops(end: socket.socket) -> float:
    began = time.monotonic()
    for _ in range(HOPS):
        end.sendall(b"x")
        end.recv(1)
    return (time.monotonic() - began) / HOPS / 2


def contenders(wanted: Sequence[str]) -> list[str]:
    """By name; torchft only where it is installed."""
    found = [name for name in CONTENDERS if name in wanted]
    return [name for name in found if name != "torchft" or importlib.util.find_spec("torchft") is not None]


async def run(quick: bool, repetitions: int, wanted: Sequence[str]) -> None:
    names = contenders(wanted)
    hops = {size: Spread([hop_s(size) for _ in range(3)]) for size in SIZES}  # first: forks want no threads
    busy, load = await busy_ratio(), os.getloadavg()
    samples: Samples = {(size, nbytes, name): [] for size in SIZES for nbytes in NBYTES for name in names}
    async with AsyncExitStack() as stack:
        field = await _field(stack)
        for size in SIZES:
            for name in names:
                await field.form(name, size)
            for repetition in range(repetitions):
                for nbytes in NBYTES:
                    for name in rotated(names, repetition):
                        times = (TIMES if nbytes <= SMALL_NBYTES else TIMES_LARGE) // (3 if quick else 1)
                        samples[size, nbytes, name].append(await field.measure(name, size, nbytes, times))
            for name in names:
                await field.end(name, size)
    report(samples, hops, {"busy_before": busy, "load": load, "quick": quick, "torchft": _torchft()})


async def _field(stack: AsyncExitStack) -> Field:
    servers: list[Forkserver] = await stack.enter_async_context(forkservers(max(SIZES)))
    channels = {f"of{size}": {"peers": [f"of{size}"]} for size in SIZES}
    coordinator = await stack.enter_async_context(Coordinator(channels, groups={f"of{size}": size for size in SIZES}))
    store = await stack.enter_async_context(rank("operations_rank", "store", OMP_NUM_THREADS="1"))
    ranks = [
        await stack.enter_async_context(
            rank("operations_rank", f"peer {number}", REPLICAS_FORKSERVER=server.name, OMP_NUM_THREADS="1")
        )
        for number, server in enumerate(servers)
    ]
    return Field(coordinator, (await store.ask("host"))["port"], ranks)


def _torchft() -> str:
    try:
        return version("torchft")
    except PackageNotFoundError:
        return ""


def _what(nbytes: int) -> str:
    if not nbytes:
        return "barrier"
    for unit, text in ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")):
        if nbytes >= unit:
            return f"all_reduce {nbytes // unit} {text}"
    raise ValueError(nbytes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _cells(spread: Spread) -> list[str]:
    return [_ms(spread.median), f"{_ms(min(spread.samples))} - {_ms(max(spread.samples))}"]


def report(samples: Samples, hops: dict[int, Spread], facts: dict[str, Any]) -> None:
    table: list[list[str] | None] = []
    rows: list[dict[str, Any]] = []
    spreads = {key: Spread(found) for key, found in samples.items()}
    for size in SIZES:
        table.append([str(size), "hop", "between processes", *_cells(hops[size]), "", "", ""])
        rows.append({"members": size, "what": "hop", **hops[size].report()})
        for nbytes in NBYTES:
            gloo = spreads.get((size, nbytes, "gloo"))
            for name in [name for name in CONTENDERS if (size, nbytes, name) in spreads]:
                spread = spreads[size, nbytes, name]
                over = None if gloo is None or name == "gloo" else spread.median - gloo.median
                bar = LIMITS_S[size] if name == "replicas" and nbytes <= SMALL_NBYTES and over is not None else None
                kept = None if bar is None or over is None else over <= bar
                table.append(
                    [
                        str(size),
                        _what(nbytes),
                        CONTENDERS[name],
                        *_cells(spread),
                        "" if over is None else _ms(over),
                        "" if bar is None else f"< {_ms(bar)}",
                        "" if kept is None else "yes" if kept else "NO",
                    ]
                )
                row = {"members": size, "what": _what(nbytes), "nbytes": nbytes, "contender": name}
                rows.append({**row, **spread.report(), "over_s": over, "bar_s": bar, "kept": kept})
        table.append(None)
    note = f"Others used {facts['busy_before']:.0%} of the cores before."
    if not facts["torchft"]:
        note += " torchft is not installed: make bench-peers"
    show("One operation among peers", ["of", "", "by", "median", "range", "over Gloo", "bar", "kept"], table, note)
    write("bench_operations", {"machine": machine(), **facts, "note": note, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description="Latency of small operations between peers.")
    parser.add_argument("--quick", action="store_true", help="3 repetitions of a third of the operations")
    parser.add_argument("--repetitions", type=int, default=None, help="default 7")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    options = parser.parse_args()
    run_bench(run(options.quick, options.repetitions or (3 if options.quick else 7), options.only))


if __name__ == "__main__":
    main()

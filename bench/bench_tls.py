"""What does TLS cost a session's message, and a connection?

    python bench/bench_tls.py [--quick] [--repetitions N]

A coordinator with TLS and one without, each with one member in a process of its own.
The member says a heartbeat, the shortest message of all, and waits for its answer; the
figure is the time of the processor that this takes in both processes together. The two
take turns after few messages, as what others do on the machine changes the cost of
both; "TLS / plain" is the median of the ratios of neighbours. The bar holds for
messages. All processes keep to one core: on a virtual machine it costs as much as all
of TLS to wake another core, and the scheduler decides when that is needed.

"connection": a session's WebSocket opened and closed again, with the TLS handshake.

Bytes of weights do not pass the control port, with TLS or without.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack
from typing import Any

from bench.support import Bar, Rank, Spread, busy_ratio, machine, rank, rotated, run_bench, show, write

WAYS = ("off", "on")
MESSAGE, CONNECTION = "message", "connection"
KINDS = (MESSAGE, CONNECTION)
TIMES, CONNECTIONS, WARM_UPS = 200, 10, 500
REPETITIONS, QUICK = 60, 20
LIMIT = 1.7
Samples = dict[tuple[str, str], list[float]]
"""CPU seconds of coordinator and member, by what and by way."""


class Pair:
    """A coordinator and a member of it."""

    def __init__(self, coordinator: Rank, member: Rank) -> None:
        self._coordinator = coordinator
        self._member = member
        self._where: dict[str, Any] = {}

    async def begin(self, way: str) -> None:
        self._where = await self._coordinator.ask("serve", tls=way)
        await self._member.ask("join", **self._where)
        await self.measure(MESSAGE, WARM_UPS)

    async def measure(self, what: str, times: int) -> float:
        """CPU seconds for each time, of both."""
        before = await self._coordinator.ask("used")
        if what == CONNECTION:
            reply = await self._member.ask("shake_hands", times=times, **self._where)
        else:
            reply = await self._member.ask("talk", times=times)
        after = await self._coordinator.ask("used")
        here, there = float(reply["cpu_s"]), float(after["cpu_s"] - before["cpu_s"]) / times
        return here + there


async def run(quick: bool, repetitions: int) -> None:
    busy = await busy_ratio()
    samples: Samples = {(what, way): [] for what in KINDS for way in WAYS}
    async with AsyncExitStack() as stack:
        pairs: dict[str, Pair] = {}
        for way in WAYS:
            ranks = [
                await stack.enter_async_context(rank("tls_rank", f"{who}, TLS {way}", OMP_NUM_THREADS="1"))
                for who in ("coordinator", "member")
            ]
            pairs[way] = Pair(*ranks)
        await asyncio.gather(*(pair.begin(way) for way, pair in pairs.items()))
        for repetition in range(repetitions):
            for what in KINDS:
                for way in rotated(WAYS, repetition):
                    times = CONNECTIONS if what == CONNECTION else TIMES
                    samples[what, way].append(await pairs[way].measure(what, times))
    report(samples, {"busy_before": busy, "quick": quick})


def ratio_of(samples: Samples, what: str) -> float:
    """The median of TLS / plain of neighbours in time."""
    return statistics.median(on / off for on, off in zip(samples[what, "on"], samples[what, "off"], strict=True))


def bars(samples: Samples) -> list[Bar]:
    ratio = ratio_of(samples, MESSAGE)
    return [Bar(f"CPU of a message with TLS, times that without, at most {LIMIT}", ratio, ratio <= LIMIT)]


def report(samples: Samples, facts: dict[str, Any]) -> None:
    table: list[list[str] | None] = []
    rows: list[dict[str, Any]] = []
    for what in KINDS:
        ratio = ratio_of(samples, what)
        for way in WAYS:
            spread = Spread(samples[what, way])
            cells = [f"{value * 1e6:.0f} us" for value in (spread.median, min(spread.samples), max(spread.samples))]
            shown = f"{ratio:.2f}" if way == "on" else ""
            table.append([what, "TLS" if way == "on" else "plain", cells[0], f"{cells[1]} - {cells[2]}", shown])
            rows.append({"what": what, "tls": way == "on", **spread.report()})
        rows[-1]["ratio"] = ratio
        table.append(None)
    note = f"CPU of both processes. Others used {facts['busy_before']:.0%} of the cores before."
    show("A session with TLS and without", ["", "by", "median", "range", "TLS / plain"], table, note)
    kept = bars(samples)
    for bar in kept:
        print(bar.line())
    write(
        "bench_tls",
        {"machine": machine(), **facts, "rows": rows, "bars": [{"text": bar.text, "kept": bar.kept} for bar in kept]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What TLS costs a session.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help=f"default {REPETITIONS}")
    options = parser.parse_args()
    run_bench(run(options.quick, options.repetitions or (QUICK if options.quick else REPETITIONS)))


if __name__ == "__main__":
    main()

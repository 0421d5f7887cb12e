"""What does ``encrypt = true`` cost a version that another host pulls?

    python bench/bench_encryption.py [--quick] [--repetitions N]

Two carriers, each a process, on loopback: one serves 256 MiB, the other one pulls them,
in plain and in TLS by turns. "TLS / plain" is the median of the ratios of neighbours,
of time and of the processor's time of both processes. Loopback has no link that limits
plain text, so on a network TLS costs less of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import mmap
import os
import statistics
import time
import weakref
from pathlib import Path
from typing import Any

from bench.support import Spread, busy_ratio, machine, rotated, run_bench, show, write
from replicas.carry.rank_side import Carrier
from replicas.messages import HolderAddress
from replicas.trust.certificate import make_pem

NBYTES = 256 << 20
HERE = "127.0.0.1"
WAYS = ("plain", "TLS")
REPETITIONS, QUICK = 20, 5
TIMEOUT_S = 120.0
Samples = dict[str, list[tuple[float, float]]]
"""Seconds, and seconds of the processor, by way."""


class Memory:
    """A slot of random bytes."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.fd = os.memfd_create("bench-slot")
        os.ftruncate(self.fd, NBYTES)
        mapped = mmap.mmap(self.fd, NBYTES)
        for at in range(0, NBYTES, 1 << 20):
            mapped[at : at + (1 << 20)] = os.urandom(1 << 20)
        self.watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def cpu_s(*carriers: Carrier) -> float:
    """Of the processor, so far."""
    fields = [Path(f"/proc/{one.pid}/stat").read_bytes().rpartition(b")")[2].split() for one in carriers]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


async def run(quick: bool, repetitions: int) -> None:
    busy = await busy_ratio()
    samples: Samples = {way: [] for way in WAYS}
    source, taker = await asyncio.gather(Carrier.start(HERE), Carrier.start(HERE))
    try:
        for one in (source, taker):
            one.certify(make_pem())
        keys = itertools.count(1)
        packed, slot, numbers = Memory(next(keys)), Memory(next(keys)), itertools.count(1)

        async def pull(way: str) -> tuple[float, float]:
            number, secret, encrypt = next(numbers), os.urandom(32), way == "TLS"
            source.serve(number, secret, packed, (0, NBYTES), NBYTES, encrypt=encrypt)
            holder = HolderAddress("trainer/0/0", HERE, source.port, source.certificate_hash)
            began, before = time.monotonic(), cpu_s(source, taker)
            await taker.pull(number, secret, slot, (0, NBYTES), [holder], TIMEOUT_S, encrypt=encrypt)
            took = time.monotonic() - began, cpu_s(source, taker) - before
            for one in (source, taker):
                await one.withdraw(number, "over")
            return took

        for way in WAYS:
            await pull(way)
        for repetition in range(repetitions):
            for way in rotated(WAYS, repetition):
                samples[way].append(await pull(way))
    finally:
        for one in (source, taker):
            one.kill()
            await one.wait_dead()
    report(samples, {"busy_before": busy, "quick": quick})


def ratio_of(samples: Samples, index: int) -> float:
    """The median of TLS / plain of neighbours in time."""
    pairs = zip(samples["TLS"], samples["plain"], strict=True)
    return statistics.median(one[index] / other[index] for one, other in pairs if other[index])


def report(samples: Samples, facts: dict[str, Any]) -> None:
    table: list[list[str] | None] = []
    rows: list[dict[str, Any]] = []
    for index, what in enumerate(("time", "processor")):
        ratio = ratio_of(samples, index)
        for way in WAYS:
            spread = Spread([sample[index] for sample in samples[way]])
            low, high = min(spread.samples), max(spread.samples)
            shown = f"{ratio:.2f}" if way == "TLS" else ""
            table.append([what, way, f"{spread.median:.3f} s", f"{low:.3f} - {high:.3f} s", shown])
            rows.append({"what": what, "way": way, **spread.report()})
        rows[-1]["ratio"] = ratio
        table.append(None)
    note = f"Others used {facts['busy_before']:.0%} of the cores before."
    show("256 MiB pulled, with TLS and without", ["", "by", "median", "range", "TLS / plain"], table, note)
    write("bench_encryption", {"machine": machine(), **facts, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description="What TLS costs a pull.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help=f"default {REPETITIONS}")
    options = parser.parse_args()
    run_bench(run(options.quick, options.repetitions or (QUICK if options.quick else REPETITIONS)))


if __name__ == "__main__":
    main()

"""How long does a weight sync take between hosts, and how often do the bytes leave the
trainer's host?

    python bench/bench_hosts.py [--quick] [--repetitions N] [--rate R] [--transport tcp]
        [--hosts N ...] [--set NAME] [--only hosts|far]

Hosts are network, mount and process namespaces of this machine, joined by a bridge
(``tests/support/machine/networks.py``; needs root). A trainer on the first, and one or
two targets on each of 1, 2, 3 others. Measured from the call of ``publish`` until all
targets have read the first value of each tensor, against a broadcast of one flat buffer
of the same bytes by ProcessGroupGloo between one process on each host, and that after
one copy of the bytes at the sender: the least that leaves the trainer its weights to go
on with. All in the same processes, in turn, and once more with links that carry
``--rate`` each way: on one machine the CPU is the limit otherwise, between machines it
is the link.

All elements change with each version, and with ``--transport tcp`` once more as many as
a step of AdamW at 1e-6 changes of a trained model (``delta_trained.py``).

*On the link*: bytes that left the trainer's host, as a multiple of the payload; *into a
host*: the same, of what came into the one of the other hosts that received most. Both
with the headers of the packets.

``--only far``: a target behind a long link that loses packets (``hosts_far.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any

from bench.hosts_far import run_far
from bench.shapes import SETS, nbytes_of_set
from bench.support import Bar, Rank, Spread, busy_ratio, machine, rank, rotated, run_bench, show, write
from bench.sync_contenders import Contender, Library, Read, check, last, race
from replicas import Coordinator
from tests.support.machine.cable import FAR, MBIT_NBYTES, Shape
from tests.support.machine.networks import Machine, Network, hosts, why_no_hosts

HOSTS = (2, 3, 4)
LIBRARY, FEW, FEW_SHARE = "replicas", "replicas, 0.36 %", 0.0036
GLOO = "Gloo, flat"
COPY = "copy, then Gloo"
UNLIMITED = ""
SPEED = 0.9
"""Of Gloo's, that is promised between two hosts."""
FALL = 1.15
"""The most hosts may take this much longer than two, where the links are the limit."""
SENT = 1.05
"""Copies of the payload that may leave the trainer's host."""
PAIRED_MAX = 4
"""With more hosts there is one target on each."""


@dataclass
class Sample:
    seconds: float
    sent: float
    received: float


class Flat(Contender):
    """One broadcast of one flat buffer between the first ranks of so many hosts;
    ``how``: name of the rank's command."""

    def __init__(self, name: str, how: str, ranks: list[Rank]) -> None:
        super().__init__(name)
        self._how = how
        self._ranks = ranks

    async def sync(self, targets: int) -> dict[str, float]:
        sending, receiving = ({"do": self._how, "size": len(self._ranks), "source": source} for source in (True, False))
        said, replies = await race(self._ranks, sending, receiving)
        await check(self._ranks)
        return {"readable": last([said, *replies], "ended") - said["began"]}


async def form(ranks: Sequence[Rank], machines: Sequence[Machine]) -> None:
    """A Gloo group of one rank on each."""
    first = machines[0].address
    port = (await ranks[0].ask("host", address=first))["port"]
    where = {"port": port, "host": first, "size": len(ranks)}
    places = enumerate(zip(ranks, machines, strict=True))
    await asyncio.gather(*(one.ask("form", rank=at, address=place.address, **where) for at, (one, place) in places))


class Field:
    """So many hosts, with so many targets on each but the first."""

    def __init__(self, what: str, made: Network, each: int, transport: str) -> None:
        self._transport = transport
        self._what = what
        self._network = made
        self._each = each
        self._nbytes = nbytes_of_set(what)
        self.samples: dict[tuple[str, str], list[Sample]] = {}
        self.phases: dict[str, float] = {}

    async def run(self, repetitions: int, rates: Sequence[str]) -> None:
        machines = self._network.machines
        targets = (len(machines) - 1) * self._each
        channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"], "transport": self._transport}}
        address = self._network.address
        async with AsyncExitStack() as stack:
            coordinator = await stack.enter_async_context(
                Coordinator(channels, groups={"trainer": 1, "rollout": targets}, host=address, store_bind=address)
            )
            ranks = [await self._rank(stack, machines[0], "trainer")]
            for number, place in enumerate(machines[1:], 1):
                ranks += [await self._rank(stack, place, f"target on host {number}") for _ in range(self._each)]
            await asyncio.gather(*(one.ask("fill", what=self._what, seed=seed) for seed, one in enumerate(ranks)))
            library = Library(coordinator, ranks)
            firsts = [ranks[0], *ranks[1 :: self._each]]
            await form(firsts, machines)
            await library.grow(targets)
            plain = [Flat(GLOO, "broadcast", firsts), Flat(COPY, "broadcast_copy", firsts)]
            shares = {LIBRARY: 1.0, FEW: FEW_SHARE} if self._transport == "tcp" else {LIBRARY: 1.0}
            ours = [Read(library, share, name) for name, share in shares.items()]
            contenders: list[Contender] = [*ours, *plain]
            for rate in rates:
                with ExitStack() as limits:
                    for place in machines if rate else ():
                        limits.enter_context(place.limited(rate))
                    await self._measure(contenders, targets, repetitions, rate)
            keys = library.phases[-1]
            self.phases = {key: statistics.median(one.get(key, 0.0) for one in library.phases) for key in keys}
            await asyncio.gather(*(one.ask("leave") for one in ranks))

    async def _rank(self, stack: AsyncExitStack, place: Machine, name: str) -> Rank:
        return await stack.enter_async_context(rank("sync_rank", name, within=place.command(), OMP_NUM_THREADS="1"))

    async def _measure(self, contenders: Sequence[Contender], targets: int, repetitions: int, rate: str) -> None:
        for one in contenders:
            for _ in range(1 if rate else one.warm_ups):
                await one.sync(targets)
        for repetition in range(repetitions):
            for one in rotated(contenders, repetition):
                before = [place.traffic() for place in self._network.machines]
                seconds = (await one.sync(targets))["readable"]
                pairs = zip(self._network.machines, before, strict=True)
                ours, *theirs = [place.traffic().since(earlier) for place, earlier in pairs]
                received = max(traffic.received for traffic in theirs)
                sample = Sample(seconds, ours.sent / self._nbytes, received / self._nbytes)
                self.samples.setdefault((rate, one.name), []).append(sample)


def rows(each: int, count: int, field: Field, nbytes: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for (rate, name), samples in field.samples.items():
        spread = Spread([sample.seconds for sample in samples])
        gloo = statistics.median(sample.seconds for sample in field.samples[rate, GLOO])
        found.append(
            {
                "rate": rate,
                "targets_on_each": each,
                "hosts": count,
                "contender": name,
                **spread.report(),
                "bytes_per_s": nbytes / spread.median,
                "gloo_ratio": gloo / spread.median,
                "sent_ratio": statistics.median(sample.sent for sample in samples),
                "received_ratio": statistics.median(sample.received for sample in samples),
            }
        )
    return found


def bars(found: Sequence[dict[str, Any]], rate: str, counts: Sequence[int]) -> list[Bar]:
    def one(what: str, of: str, each: int, count: int) -> float:
        keys = {"rate": of, "targets_on_each": each, "hosts": count, "contender": LIBRARY}
        return next(float(row[what]) for row in found if keys.items() <= row.items())

    least = min(counts)
    speeds = [(limit or "no limit", one("gloo_ratio", limit, 1, least)) for limit in dict.fromkeys((UNLIMITED, rate))]
    sent = max(row["sent_ratio"] for row in found if row["contender"] == LIBRARY)
    into = max(row["received_ratio"] for row in found if row["contender"] == LIBRARY)
    kept = [
        *(
            Bar(
                f"{least} hosts, links of {limit}: at least {SPEED} of the speed of Gloo's flat broadcast",
                speed,
                speed >= SPEED,
            )
            for limit, speed in speeds
        ),
        Bar("into each host, the payload once (1.1 with headers)", into, into <= 1.1),
        Bar(f"out of the trainer's host, the payload once ({SENT} with headers)", sent, sent <= SENT),
    ]
    for count in counts if rate else ():
        if count > least:
            fall = one("median_s", rate, 1, count) / one("median_s", rate, 1, least)
            words = f"{count} hosts take at most {FALL} times as long as {least}, links of {rate}"
            kept.append(Bar(words, fall, fall <= FALL))
    return kept


def report(
    found: Sequence[dict[str, Any]], kept: Sequence[Bar], nbytes: int, phases: dict[str, float], most: int
) -> None:
    table: list[list[str] | None] = []
    previous: tuple[Any, ...] = ()
    for row in sorted(
        found, key=lambda row: (row["rate"], row["targets_on_each"], row["hosts"], row["contender"] == GLOO)
    ):
        group = (row["rate"], row["targets_on_each"])
        if previous and group != previous:
            table.append(None)
        previous = group
        cells = [row["rate"] or "no limit", f"{row['hosts']} x {row['targets_on_each']}", row["contender"]]
        cells += Spread(row["samples_s"]).cells()
        cells += [f"{row['bytes_per_s'] / 1e9:.2f}", f"{row['gloo_ratio']:.2f}"]
        table.append([*cells, f"{row['sent_ratio']:.2f}", f"{row['received_ratio']:.2f}"])
    shown = ", ".join(f"{phase} {seconds * 1e3:.0f}" for phase, seconds in phases.items())
    notes = [f"Phases at {most} hosts with one target each, ms: {shown}.", *(bar.line() for bar in kept)]
    columns = ["links", "hosts x targets", "", "median", "range", "GB/s", "x Gloo", "on the link", "into a host"]
    show(f"Weight sync between hosts: {nbytes / 1e6:.0f} MB bf16", columns, table, "\n".join(notes))


async def run(what: str, repetitions: int, rate: str, transport: str, counts: Sequence[int]) -> dict[str, Any]:
    nbytes = nbytes_of_set(what)
    found: list[dict[str, Any]] = []
    phases: dict[str, float] = {}
    for each in (1, 2):
        for count in counts:
            if each > 1 and count > PAIRED_MAX:
                continue
            with hosts(count) as made:
                field = Field(what, made, each, transport)
                await field.run(repetitions, [UNLIMITED, rate] if rate and each == 1 else [UNLIMITED])
            found += rows(each, count, field, nbytes)
            phases = field.phases if each == 1 else phases
    kept = bars(found, rate, counts)
    report(found, kept, nbytes, phases, max(counts))
    promised = [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in kept]
    return {"nbytes": nbytes, "rows": found, "phases_s": phases, "bars": promised}


async def run_parts(options: argparse.Namespace) -> None:
    reason = why_no_hosts()
    if reason:
        print(f"skipped: {reason}")
        return
    quick, repetitions = options.quick, options.repetitions or (3 if options.quick else 5)
    facts = {"machine": machine(), "busy_before": await busy_ratio(), "load": os.getloadavg()}
    what = f"{options.set}-small" if quick else options.set
    facts |= {"quick": quick, "set": what, "repetitions": repetitions}
    if options.only != "far":
        found = await run(what, repetitions, options.rate, options.transport, options.hosts)
        write("bench_hosts", {**facts, **found})
    if options.only != "hosts":
        shape = Shape(options.far_mbit * MBIT_NBYTES, options.delay / 2, options.loss)
        found = await run_far(what, 2 * repetitions, shape, f"{options.far_mbit} Mbit/s", options.congestion)
        write("bench_hosts_far", {**facts, **found, "repetitions": 2 * repetitions})


def main() -> None:
    parser = argparse.ArgumentParser(description="Weight sync between hosts, against Gloo, and the bytes on the link.")
    parser.add_argument("--quick", action="store_true", help="a ninth of the bytes, 3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 5")
    sets = [name for name in SETS if f"{name}-small" in SETS]
    parser.add_argument("--set", choices=sets, default="smollm2", help="of tensors (shapes.py); few: 1 GiB")
    parser.add_argument("--only", choices=("hosts", "far"), help="default: both parts")
    parser.add_argument("--rate", default="1gbit", help="of the limited links, in the words of tc; empty: without them")
    parser.add_argument("--transport", default="auto", help="of the channel")
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS, help="how many, the trainer's included")
    parser.add_argument("--far-mbit", type=int, default=round(FAR.rate_nbytes_s / MBIT_NBYTES), help="far: its rate")
    parser.add_argument("--delay", type=float, default=2 * FAR.delay_s, help="far: round trip, in seconds")
    parser.add_argument("--loss", type=float, default=FAR.loss, help="far: of the packets, each way")
    parser.add_argument("--congestion", default="", help="far: the hosts' default congestion control; empty: as here")
    run_bench(run_parts(parser.parse_args()))


if __name__ == "__main__":
    main()

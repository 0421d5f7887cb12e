"""How long until a fleet answers with a version that is promoted, or rolled back to?

    python bench/bench_steering.py [--quick] [--repetitions N] [--servers N]
        [--only one|hosts]

A trainer, and eight servers of one's own (``examples/own_engine``, with a model of 269
MB) behind their gates, on one host; then on three hosts, the trainer's and two with
four servers each (namespaces, needs root). Measured from the order to the last server's
first right answer to a request that demands the new version, which each server's
follower asks for every 2 ms. All weights of a version have one value; the first and
the last rows of each answer are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from typing import Any

from bench.support import Bar, Rank, Spread, busy_ratio, machine, rank, run_bench, show, write
from replicas import Coordinator
from tests.support.machine.networks import Machine, Network, hosts, why_no_hosts

NBYTES = 269_000_000
LIMIT_S = {"one": 1.0, "hosts": 1.5}
CHANNEL = {"sources": ["trainer"], "targets": ["server"], "follow": "promoted", "slots": 4}


async def _ranks(stack: AsyncExitStack, places: Sequence[Machine | None]) -> list[Rank]:
    names = ["trainer", *(f"server {number}" for number in range(len(places) - 1))]
    return [
        await stack.enter_async_context(
            rank("steering_rank", name, within=place.command() if place else (), OMP_NUM_THREADS="1")
        )
        for name, place in zip(names, places, strict=True)
    ]


async def measure(network: Network | None, servers: int, repetitions: int, nbytes: int) -> dict[str, list[float]]:
    """Return the samples of each order in seconds, and of what was moved in bytes."""
    address = network.address if network else "127.0.0.1"
    found: dict[str, list[float]] = {"promote": [], "rollback": [], "moved": []}
    places: list[Machine | None] = [None] * (servers + 1)
    if network:
        first, *others = network.machines
        places = [first, *(others[number % len(others)] for number in range(servers))]
    async with AsyncExitStack() as stack:
        groups = {"trainer": 1, "server": servers}
        coordinator = await stack.enter_async_context(
            Coordinator({"policy": CHANNEL}, groups=groups, host=address, store_bind=address)
        )
        trainer, *fleet = ranks = await _ranks(stack, places)
        about: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token, "nbytes": nbytes}
        asked = [one.ask("begin", kind="server", replica=number, **about) for number, one in enumerate(fleet)]
        await asyncio.gather(trainer.ask("begin", kind="trainer", **about), *asked)

        async def served(order: dict[str, Any], value: float) -> float:
            answers = await asyncio.gather(
                *(one.ask("answers", value=value, version=order["version"]) for one in fleet)
            )
            return float(max(answer["at"] for answer in answers) - order["began"])

        for value in range(1, repetitions + 2):
            await trainer.ask("publish", value=float(value))
            seconds = await served(await trainer.ask("promote"), float(value))
            if value == 1:  # warms up, and is what the first rollback leads to
                continue
            found["promote"].append(seconds)
            before = [place.traffic() for place in network.machines] if network else []
            found["rollback"].append(await served(await trainer.ask("rollback"), float(value - 1)))
            pairs = zip(network.machines, before, strict=True) if network else ()
            found["moved"].append(float(max((one.traffic().since(was).received for one, was in pairs), default=0)))
            await served(await trainer.ask("rollback"), float(value))  # so that the next one goes back to this
        await asyncio.gather(*(one.ask("end") for one in ranks[1:]))
    return found


def report(kind: str, servers: int, nbytes: int, found: dict[str, list[float]]) -> list[Bar]:
    limit = LIMIT_S[kind]
    rows = [[name, *Spread(found[name]).cells()] for name in ("promote", "rollback")]
    bars = [
        Bar(f"{name} to the last first answer, s (limit {limit:g})", found_s, found_s < limit)
        for name in ("promote", "rollback")
        for found_s in [statistics.median(found[name])]
    ]
    moved = statistics.median(found["moved"]) / nbytes
    bars.append(Bar("bytes moved by a rollback, of the version's (limit 0.01)", moved, moved < 0.01))
    title = {"one": "on one host", "hosts": "on two hosts"}[kind]
    show(
        f"{servers} servers of {nbytes / 1e6:.0f} MB {title}",
        ["", "median", "range"],
        rows,
        "\n".join(bar.line() for bar in bars),
    )
    return bars


async def run(options: argparse.Namespace) -> None:
    nbytes, repetitions = NBYTES // (9 if options.quick else 1), options.repetitions or (3 if options.quick else 7)
    facts = {"machine": machine(), "busy_before": await busy_ratio(), "load": os.getloadavg()}
    result: dict[str, Any] = {**facts, "nbytes": nbytes, "servers": options.servers}
    for kind in ("one", "hosts"):
        if options.only not in (None, kind):
            continue
        if kind == "hosts" and (reason := why_no_hosts()):
            print(f"skipped: {reason}")
            continue
        with hosts(3) if kind == "hosts" else nullcontext() as network:
            found = await measure(network, options.servers, repetitions, nbytes)
        bars = report(kind, options.servers, nbytes, found)
        result[kind] = {**found, "bars": [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]}
    write("bench_steering", result)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Until a fleet answers with a version that is promoted, or went back to."
    )
    parser.add_argument("--quick", action="store_true", help="a ninth of the bytes, 3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 7")
    parser.add_argument("--servers", type=int, default=8, help="default %(default)s")
    parser.add_argument("--only", choices=("one", "hosts"), help="default: both")
    run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    main()

"""How soon is a delta at a far target, and what does that cost those that are near?

    python bench/bench_hosts.py --only far [--delay S] [--loss SHARE] [--rate R]

A trainer, and on hosts of their own a near and a far target, or a far one alone. The
far one's cable has that round trip, loss (each way) and rate
(``tests/support/machine/cable.py``); the near one is behind it in the order of the
hosts, and before it. Versions of which 0.35 % of the elements change, measured from the
call of ``publish`` until each target has read the first value of each tensor: once all
have committed it. ``--congestion`` is the hosts' default; a carrier may know better.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from bench.shapes import nbytes_of_set
from bench.support import Bar, Rank, Spread, rank, show
from bench.sync_contenders import Library, alike
from replicas import Coordinator
from tests.support.machine.cable import Shape, far
from tests.support.machine.networks import Machine, hosts

SHARE = 0.0035
READABLE_S = 0.5
SCENES = {"far alone": ("far",), "near, far": ("near", "far"), "far, near": ("far", "near")}
"""Targets, in the order of their hosts."""
WARM_UPS = 2


async def scene(
    what: str, names: Sequence[str], shape: Shape, repetitions: int, congestion: str, share: float = SHARE
) -> dict[str, Any]:
    """Times to each target, and bytes into each host as a part of the payload."""
    channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"], "transport": "tcp"}}
    with ExitStack() as links:
        made = links.enter_context(hosts(1 + len(names)))
        for name, place in zip(names, made.machines[1:], strict=True):
            if name == "far":
                links.enter_context(far(made, place, shape))
        for place in made.machines if congestion else ():
            command = place._ip("sysctl", "-qw", f"net.ipv4.tcp_congestion_control={congestion}")
            subprocess.run(command, check=True)  # noqa: ASYNC221  # before anything runs
        async with AsyncExitStack() as stack:
            groups = {"trainer": 1, "rollout": len(names)}
            coordinator = Coordinator(channels, groups=groups, host=made.address, store_bind=made.address)
            await stack.enter_async_context(coordinator)
            ranks = [
                await _rank(stack, place, name) for name, place in zip(("trainer", *names), made.machines, strict=True)
            ]
            await asyncio.gather(*(one.ask("fill", what=what, seed=seed) for seed, one in enumerate(ranks)))
            library = Library(coordinator, ranks)
            await library.grow(len(names))
            found = await _measure(library, made.machines, what, names, repetitions, share)
            await asyncio.gather(*(one.ask("leave") for one in ranks))
    return found


async def _rank(stack: AsyncExitStack, place: Machine, name: str) -> Rank:
    return await stack.enter_async_context(rank("sync_rank", name, within=place.command(), OMP_NUM_THREADS="1"))


async def _measure(
    library: Library, machines: Sequence[Machine], what: str, names: Sequence[str], repetitions: int, share: float
) -> dict[str, Any]:
    nbytes = nbytes_of_set(what)
    times: dict[str, list[float]] = {name: [] for name in names}
    came: dict[str, list[float]] = {name: [] for name in names}
    lost = 0
    for repetition in range(-WARM_UPS, repetitions):
        before = [place.traffic() for place in machines]
        said, replies = await library.publish(len(names), "read", 1.0 if repetition == -WARM_UPS else share)
        digest = (await library.ranks[0].ask("digest"))["digest"]
        alike([digest, *(reply["digest"] for reply in replies)])
        if repetition < 0:
            continue
        lost += len(said["lost"])
        for name, reply, place, earlier in zip(names, replies, machines[1:], before[1:], strict=True):
            times[name].append(reply["readable"] - said["began"])
            came[name].append(place.traffic().since(earlier).received / nbytes)
    return {
        "times": {name: Spread(samples).report() for name, samples in times.items()},
        "received_ratio": {name: statistics.median(samples) for name, samples in came.items()},
        "lost": lost,
        "phases_s": library.phases[-1],
    }


async def run_far(what: str, repetitions: int, shape: Shape, rate: str, congestion: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for words, names in SCENES.items():
        found = await scene(what, names, shape, repetitions, congestion)
        for name in names:
            times = {**found["times"][name], "received_ratio": found["received_ratio"][name]}
            rows.append({"scene": words, "target": name, "lost": found["lost"], **times})
    slowest = max(row["median_s"] for row in rows)
    words = f"{SHARE:.2%} of {nbytes_of_set(what) / 1e6:.0f} MB, {rate}, round trip {2e3 * shape.delay_s:.0f} ms"
    words += f", {shape.loss:.0%} lost"
    kept = [
        Bar(f"{words}: readable everywhere, s (limit {READABLE_S})", slowest, slowest <= READABLE_S),
        Bar("targets left behind", float(sum(row["lost"] for row in rows)), not any(row["lost"] for row in rows)),
    ]
    table: list[list[str] | None] = []
    for row in rows:
        spread = Spread(row["samples_s"])
        trips = f"{spread.median / (2 * shape.delay_s):.1f}" if shape.delay_s else ""
        table.append([row["scene"], row["target"], *spread.cells(), trips, f"{row['received_ratio']:.2%}"])
    columns = ["targets", "", "readable", "range", "round trips", "into its host"]
    show(f"A delta to a far target: {words}", columns, table, "\n".join(bar.line() for bar in kept))
    bars = [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in kept]
    given = {"rate": rate, "delay_s": shape.delay_s, "loss": shape.loss, "congestion": congestion}
    return {"nbytes": nbytes_of_set(what), "share": SHARE, **given, "rows": rows, "bars": bars}

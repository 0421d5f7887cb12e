"""What does the supervisor itself cost, how fast is it, and what does it leave behind?

    python bench/bench_supervisor.py [--quick] [--repetitions N] [--only PART ...]

Four parts, each described in its own file: 10, 30 and 100 replicas of a trivial
command (``scale``, ``bench/supervisor_scale.py``), the memory of a rollout on a channel
(``channel``, ``bench/supervisor_channel.py``), kill -9 of a replica to its program
running again (``restart``, ``bench/supervisor_restart.py``), and the processes that
faults leave under ours, bare torchrun, supervisord and circus (``leftovers``,
``bench/supervisor_leftovers.py``). The last two of these take part where they are
installed (``make bench-peers``).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import supervisor_channel, supervisor_leftovers, supervisor_restart, supervisor_scale
from bench.peers import HOW
from bench.supervisor_channel import ChannelSample
from bench.supervisor_scale import ScaleSample, p99
from bench.support import Bar, Spread, busy_ratio, in_words, machine, scratch, show, write

PARTS = ("scale", "channel", "restart", "leftovers")
UP_LIMIT_S = 10.0
IDLE_LIMIT = 0.05
STATUS_LIMIT_S = 0.1
RESTART_LIMIT_S = 0.2
ROLLOUT_LIMIT = 25.0
"""MiB of a rollout that shares memory with its trainer, beyond its own program."""
RUN_LIMIT = 250.0
"""MiB of supervisor, store and the like."""
LINEAR_LIMIT = 1.5
"""How many times as much each replica from 30 to 100 may take to come up as each from
10 to 30."""


def told(sample: object) -> None:
    """Show that the run goes on."""
    print(str(sample)[:400], file=sys.stderr, flush=True)


def _report(title: str, columns: Sequence[str], table: list[list[str] | None], bars: list[Bar], note: str) -> list[Any]:
    show(title, columns, table, "\n".join([*(bar.line() for bar in bars), *filter(None, [note])]))
    return [{"bar": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]


# ------------------------------------------------------------ scale


def scale(folder: Path, quick: bool, repetitions: int) -> dict[str, Any]:
    samples: list[ScaleSample] = []
    for repetition in range(repetitions):
        for replicas in supervisor_scale.SIZES:
            samples.append(supervisor_scale.measure(folder / f"{repetition}-{replicas}", replicas))
            told(samples[-1])
    by_size = {size: [one for one in samples if one.replicas == size] for size in supervisor_scale.SIZES}
    table: list[list[str] | None] = [_scale_row(size, those) for size, those in by_size.items()]
    columns = (
        "replicas",
        "up",
        "down",
        "idle",
        "status p99",
        "metrics p99",
        "status p99, restarts",
        "memory",
        "processes",
    )
    parts = _parts(by_size[max(by_size)])
    bars = _report("Replicas of a trivial command", columns, table, _scale_bars(by_size), f"Idle at most: {parts}.")
    return {"samples": msgspec.to_builtins(samples), "bars": bars}


def _parts(samples: list[ScaleSample]) -> str:
    """By kind of process, the median part of a core."""
    kinds = sorted({kind for sample in samples for kind in sample.idle_parts})
    medians = {kind: Spread([sample.idle_parts.get(kind, 0.0) for sample in samples]).median for kind in kinds}
    return ", ".join(f"{kind} {part:.1%}" for kind, part in medians.items())


def _median(samples: Sequence[ScaleSample], value: Callable[[ScaleSample], float]) -> float:
    return Spread([value(sample) for sample in samples]).median


def _scale_row(size: int, samples: list[ScaleSample]) -> list[str]:
    return [
        str(size),
        in_words(_median(samples, lambda one: one.up_s)),
        in_words(_median(samples, lambda one: one.down_s)),
        f"{_median(samples, lambda one: one.idle):.1%}",
        in_words(_median(samples, lambda one: p99(one.status_s))),
        in_words(_median(samples, lambda one: p99(one.metrics_s))),
        in_words(_median(samples, lambda one: p99(one.hit_s))),
        f"{_median(samples, lambda one: one.memory_nbytes) / 2**20:.0f} MiB",
        str(round(_median(samples, lambda one: one.processes))),
    ]


def _scale_bars(by_size: dict[int, list[ScaleSample]]) -> list[Bar]:
    few, some, many = sorted(by_size)
    up = {size: _median(samples, lambda one: one.up_s) for size, samples in by_size.items()}
    memory = {size: _median(samples, lambda one: one.memory_nbytes) for size, samples in by_size.items()}
    idle = _median(by_size[many], lambda one: one.idle)
    status_s = _median(by_size[many], lambda one: p99(one.status_s))
    hit_s = _median(by_size[many], lambda one: p99(one.hit_s))
    first, later = (up[some] - up[few]) / (some - few), (up[many] - up[some]) / (many - some)
    growth = later / max(first, 1e-9)
    each = (memory[many] - memory[few]) / (many - few) / 2**20
    return [
        Bar(f"{many} replicas up, s (limit {UP_LIMIT_S:g})", up[many], up[many] < UP_LIMIT_S),
        Bar(f"{many} replicas idle, % of a core (limit {IDLE_LIMIT:.0%})", idle * 100, idle < IDLE_LIMIT),
        Bar(f"status p99, ms (limit {STATUS_LIMIT_S * 1e3:g})", status_s * 1e3, status_s < STATUS_LIMIT_S),
        Bar(f"the same during restarts, ms (limit {STATUS_LIMIT_S * 1e3:g})", hit_s * 1e3, hit_s < STATUS_LIMIT_S),
        Bar(f"a later replica takes x times an early one (limit {LINEAR_LIMIT:g})", growth, growth <= LINEAR_LIMIT),
        Bar("memory of each replica beside its command, MiB", each, True),
    ]


# ------------------------------------------------------------ channel


def channel(folder: Path, quick: bool, repetitions: int) -> dict[str, Any]:
    samples: list[ChannelSample] = []
    cases = list(itertools.product(supervisor_channel.TRANSPORTS, supervisor_channel.SIZES))
    for repetition in range(repetitions):
        for transport, rollouts in cases:
            samples.append(
                supervisor_channel.measure(folder / f"{repetition}-{transport}{rollouts}", transport, rollouts)
            )
            told(samples[-1])
    few, many = supervisor_channel.SIZES
    spreads = {
        case: Spread([one.memory_nbytes / 2**20 for one in samples if (one.transport, one.rollouts) == case])
        for case in cases
    }

    def each(transport: str) -> float:
        return (spreads[transport, many].median - spreads[transport, few].median) / (many - few)

    rest = spreads["auto", few].median - (few + 1) * each("auto")
    table: list[list[str] | None] = [[*map(str, case), f"{spread.median:.0f} MiB"] for case, spread in spreads.items()]
    limit = ROLLOUT_LIMIT
    bars = [
        Bar(f"memory of each rollout beside its program, MiB (limit {limit:g})", each("auto"), each("auto") <= limit),
        Bar(f"memory of the rest, MiB (limit {RUN_LIMIT:g})", rest, rest <= RUN_LIMIT),
        Bar("memory of each rollout with process groups, MiB", each("group"), True),
    ]
    rows = _report("A trainer and rollouts", ("transport", "rollouts", "memory"), table, bars, "")
    return {"samples": msgspec.to_builtins(samples), "bars": rows}


# ------------------------------------------------------------ restart


def restart(folder: Path, quick: bool, repetitions: int) -> dict[str, Any]:
    samples = supervisor_restart.measure(folder, repetitions, told)
    table: list[list[str] | None] = []
    bars: list[Bar] = []
    for launcher in dict.fromkeys(sample.launcher for sample in samples):
        mine = [sample for sample in samples if sample.launcher == launcher]
        spreads = {what: Spread([one.seconds for one in mine if one.what == what]) for what in (s.what for s in mine)}
        start = spreads["start"]
        for what, spread in spreads.items():
            words = "started by itself" if what == "start" else f"kill -9 of the {what}"
            beyond = "" if what == "start" else in_words(spread.median - start.median)
            table.append([launcher, words, *spread.cells(), beyond])
            if what != "start":
                over_s = spread.median - start.median
                text = f"{launcher}, {words}: beyond its own start, ms (limit {RESTART_LIMIT_S * 1e3:g})"
                bars.append(Bar(text, over_s * 1e3, over_s < RESTART_LIMIT_S))
        table.append(None)
    columns = ("launcher", "", "median", "range", "beyond")
    rows = _report("Kill of a replica to its program running again", columns, table, bars, "")
    return {"samples": msgspec.to_builtins(samples), "bars": rows}


# ------------------------------------------------------------ leftovers


def leftovers(folder: Path, quick: bool, repetitions: int) -> dict[str, Any]:
    kinds = supervisor_leftovers.KINDS[1:] if quick else supervisor_leftovers.KINDS
    samples = supervisor_leftovers.measure(folder, kinds, told)
    names = supervisor_leftovers.contenders()
    table: list[list[str] | None] = []
    for kind in kinds:
        for fault in supervisor_leftovers.FAULTS:
            found = {one.contender: one for one in samples if (one.kind, one.fault) == (kind, fault)}
            table.append([kind, fault, *(_left(found.get(name)) for name in names)])
        table.append(None)
    ours = sum(sample.left for sample in samples if sample.contender == "replicas")
    bars = [Bar("processes that ours left (limit 0)", ours, ours == 0)]
    note = "" if len(names) == 4 else f"Not everybody is installed: {HOW}."
    title = f"Processes of a torchrun job that are alive {supervisor_leftovers.AFTER_S:g} s later"
    rows = _report(title, ("ranks", "fault", *names), table, bars, note)
    return {"samples": msgspec.to_builtins(samples), "bars": rows}


def _left(sample: supervisor_leftovers.LeftoverSample | None) -> str:
    if sample is None:
        return ""
    took = "" if sample.took_s is None else f", ended in {sample.took_s:.0f} s"
    return f"{sample.left} of {sample.of}{took}"


# ------------------------------------------------------------ all


def run(parts: Sequence[str], quick: bool, repetitions: int) -> None:
    measures = {"scale": scale, "channel": channel, "restart": restart, "leftovers": leftovers}
    busy, load = asyncio.run(busy_ratio()), os.getloadavg()
    result: dict[str, Any] = {}
    with scratch() as folder:
        for part in parts:
            result[part] = measures[part](Path(folder) / part, quick, repetitions)
    facts = {"busy_before": busy, "load": load, "quick": quick, "repetitions": repetitions}
    print(f"Others used {busy:.0%} of the cores before.")
    write("bench_supervisor", {"machine": machine(), **facts, **result})


def main() -> None:
    parser = argparse.ArgumentParser(description="What the supervisor costs, and what it leaves behind.")
    parser.add_argument("--quick", action="store_true", help="1 repetition, stubborn ranks only")
    parser.add_argument("--repetitions", type=int, default=None, help="default 3")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all parts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run(options.only, options.quick, options.repetitions or (1 if options.quick else 3))


if __name__ == "__main__":
    main()

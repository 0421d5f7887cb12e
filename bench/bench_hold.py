"""How long does publish hold the trainer, and how much do its next steps slow down?

    python bench/bench_hold.py [--quick] [--repetitions N] [--only SET …]

With 0, 1 and 3 targets that read all the time, for the 272 tensors of a real model (269
MB), for 1 GiB in 8 tensors, and for 100,000 tensors of 256 bytes: the call of
``publish`` against one copy of the same bytes in warm memory, a Python loop of
``copy_``, and ``torch._foreach_copy_``, beside the same readers. Then, for the real
model, steps of fixed work between the return of ``publish`` and its commit, and until
all have loaded, against the same steps alone, and beside as many bytes copied by as
many other processes. How is described in ``hold_scene.py``. The order changes with
every repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from bench.hold_scene import KINDS, SLOTS, WINDOWS, Scene, Seconds
from bench.processes import one_core_left
from bench.support import Bar, Spread, busy_ratio, in_words, machine, run_bench, show, together, write
from replicas import Coordinator

READERS = (0, 1, 3)
SETS = ("smollm2", "few", "many")
STEPS_OF = "smollm2"
MANY = "many"
LIMIT_RATIO = 1.3
LABELS = {
    "memcpy": "memory copy",
    "loop": "loop of copy_",
    "foreach": "_foreach_copy_",
    "publish": "publish returns",
    "alone": "alone",
    "commit": "publish returned to commit",
    "load": "publish returned to loaded by all",
    "traffic": "as many bytes copied by others",
}
Rows = list[dict[str, Any]]


async def measure(what: str, repetitions: int, with_steps: bool, cores: Sequence[int]) -> dict[str, Any]:
    """All rows of one set of tensors."""
    channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"], "slots": SLOTS}}
    names = ("trainer", *(f"target {number}" for number in range(max(READERS))))
    held: Rows = []
    steps: Rows = []
    async with (
        Coordinator(channels, groups={"trainer": 1, "rollout": max(READERS)}) as coordinator,
        together("hold_rank", names, OMP_NUM_THREADS="1") as ranks,
    ):
        scene = Scene(coordinator, ranks, what)
        facts = await scene.prepare(cores)
        if with_steps:
            await scene.share()
        for readers in READERS:
            await scene.grow(readers)
            samples: Seconds = {}
            for repetition in range(repetitions):
                await scene.held(repetition, samples)
            held += held_rows(readers, samples, facts["tensors"])
            found: Seconds = {}
            windows: Seconds = {}
            for repetition in range(2 * repetitions if with_steps else 0):
                await scene.steps(repetition, found, windows)
            steps += step_rows(readers, found, windows)
        for one in ranks[1:]:
            await one.ask("close")
        await asyncio.gather(*(one.ask("leave") for one in ranks))
    return {**facts, "cold_s": scene.cold_s, "held": held, "steps": steps}


def held_rows(readers: int, samples: Seconds, tensors: int) -> Rows:
    """``copy_ratio``: how many times as long as one copy; ``each_s``: for each
    tensor."""
    copy = Spread(samples["memcpy"]).median
    found: Rows = []
    for kind in KINDS:
        spread = Spread(samples[kind])
        ratios = {"copy_ratio": spread.median / copy, "each_s": spread.median / tensors}
        found.append({"readers": readers, "what": kind, **spread.report(), **ratios})
    return found


def step_rows(readers: int, samples: Seconds, windows: Seconds) -> Rows:
    """``alone_ratio``: how many times as long as a step alone; ``lasted_s``: of the
    time in which the steps were."""
    found: Rows = []
    for kind in WINDOWS:
        if kind in samples:
            spread = Spread(samples[kind])
            ratio = spread.median / Spread(samples["alone"]).median
            lasted = Spread(windows[kind]).median
            found.append(
                {"readers": readers, "what": kind, **spread.report(), "alone_ratio": ratio, "lasted_s": lasted}
            )
    return found


def bars(name: str, rows: Rows) -> list[Bar]:
    """What is promised: a little more than one copy; for very many tensors than the
    bare loop."""
    medians = {(row["readers"], row["what"]): row["median_s"] for row in rows}
    kind = "loop" if name == MANY else "memcpy"
    found = []
    for readers in sorted({readers for readers, _ in medians}):
        ratio = medians[readers, "publish"] / medians[readers, kind]
        text = f"{name}, {readers} readers: held at most {LIMIT_RATIO} times as long as by a {LABELS[kind]}"
        found.append(Bar(text, ratio, ratio <= LIMIT_RATIO))
    return found


def report(name: str, result: dict[str, Any]) -> None:
    kept = bars(name, result["held"])
    result["bars"] = [{"bar": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in kept]
    notes = [f"The first publish of all held the trainer {in_words(result['cold_s'])}.", *(bar.line() for bar in kept)]
    title = f"How long publish holds the trainer: {result['tensors']} tensors, {result['nbytes'] / 1e6:.0f} MB bf16"
    table = [
        [
            str(row["readers"]),
            LABELS[row["what"]],
            *Spread(row["samples_s"]).cells(),
            f"{row['copy_ratio']:.2f}",
            f"{row['each_s'] * 1e6:.2f} µs",
        ]
        for row in result["held"]
    ]
    columns = ["readers", "", "median", "range", "x copy", "each tensor"]
    show(title, columns, _by_readers(table), "\n".join(notes))
    if result["steps"]:
        table = [
            [
                str(row["readers"]),
                LABELS[row["what"]],
                in_words(row["lasted_s"]),
                f"{row['median_s'] * 1e3:.3f} ms",
                f"{row['min_s'] * 1e3:.3f} - {row['max_s'] * 1e3:.3f} ms",
                f"{row['alone_ratio']:.2f}",
            ]
            for row in result["steps"]
        ]
        columns = ["targets", "", "lasted", "a step", "range", "x alone"]
        show("Training steps meanwhile", columns, _by_readers(table))


def _by_readers(table: list[list[str]]) -> list[list[str] | None]:
    found: list[list[str] | None] = []
    for row in table:
        if found and found[-1] is not None and found[-1][0] != row[0]:
            found.append(None)
        found.append(row)
    return found


async def run(sets: Sequence[str], quick: bool, repetitions: int) -> None:
    busy, load = await busy_ratio(), os.getloadavg()
    cores = sorted(os.sched_getaffinity(0))
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        core = stack.enter_context(one_core_left())
        for name in sets:
            what = f"{name}-small" if quick else name
            results[name] = await measure(what, repetitions, name == STEPS_OF, cores)
            report(name, results[name])
    facts = {"OMP_NUM_THREADS": 1, "busy_before": busy, "load": load, "quick": quick, "repetitions": repetitions}
    write("bench_hold", {"machine": machine(), **facts, "core_of_the_trainer": core, "sets": results})


def main() -> None:
    parser = argparse.ArgumentParser(description="How long publish holds the trainer, and what its next steps lose.")
    parser.add_argument("--quick", action="store_true", help="a part of the bytes, 3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 7 (twice as many of the steps)")
    parser.add_argument("--only", nargs="+", choices=SETS, default=SETS, help="sets of tensors; default: all")
    options = parser.parse_args()
    run_bench(run(options.only, options.quick, options.repetitions or (3 if options.quick else 7)))


if __name__ == "__main__":
    main()

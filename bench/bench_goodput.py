"""Which share of a run's time is useful when rollouts are killed or frozen?

    python bench/bench_goodput.py [--quick] [--repetitions N] [--only NAME ...]
    python bench/bench_goodput.py --draw docs/pictures/goodput.svg

Theory of operation
===================

A trainer and 8 rollouts (4 with ``--quick``) repeat one step: the rollouts generate a
batch, 4 samples for each of them, and any live one may make more; the trainer trains,
and syncs 16 MiB to all of them by the contender's own mechanism. Generating and
training are sleeps (0.25 s a sample, 0.25 s a step). Goodput is the number of steps
that a window of 120 s has, times what a step takes without faults when weights take no
time (1.25 s), as a share of the window. It begins when all rollouts have worked.

Faults hit rollouts only: three of four are kill -9, the fourth is a freeze of 5 s. They
come from a seed, and each contender gets the same. An hour is compressed into 24 s, so
a window has the faults of five hours; but what each one costs is not compressed: in a
real hour the loss is 150 times smaller, for every contender. "Lost by each" is what no
compression changes: the seconds of useful time that a fault cost.

Contenders: this library, warm (``preload = ["torch"]``) and cold; one torchrun job of
all processes, which broadcasts by Gloo and starts again from its last step; torchft's
manager, each process a replica group of its own. All have the kindest settings that we
found (:mod:`bench.goodput_contenders`): Gloo's timeout is 10 s, not 30 min; torchft's
dead are found after 1 s, not 5. verl and TRL are asked why they cannot run here.

A contender that hangs is ended after the window with what it has done by then, and one
that does not start has 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from bench.goodput_contenders import CONTENDERS, Running, left_out, make_field, releases
from bench.goodput_draw import draw
from bench.goodput_plan import (
    PERCENTS,
    Fault,
    Outcome,
    Plan,
    bars,
    faults,
    goodput,
    latest_end,
    lost_per_fault_s,
    median,
    torn_and_older,
    window_end,
)
from bench.support import ROOT, busy_ratio, machine, rotated, scratch, show, write
from bench.trees import Process, alive, send

QUICK = Plan(rollouts=4, window_s=60.0, hour_s=12.0)
QUICK_PERCENTS = (0, 10, 20)
WARM_STEPS = 3
WARM_S = 180.0
LOOK_S = 0.01


def lines(path: Path) -> list[list[Any]]:
    """Whole lines of JSON; a process that is killed may leave a part of one."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def rank_of(folder: Path, rollout: int) -> Process | None:
    """The process of a rollout that was the last to say that it runs."""
    note = folder / f"rollout-{rollout}"
    if not note.exists():
        return None
    pid, began = json.loads(note.read_text())
    return pid, began


def wait_until_warm(folder: Path, plan: Plan, running: Running) -> float:
    """Until some steps are done and all rollouts have worked for the last one; returns
    when that was completed, by the monotonic clock."""
    deadline = time.monotonic() + WARM_S
    while time.monotonic() < deadline:
        running.look()
        steps = lines(folder / "steps")
        if len(steps) >= WARM_STEPS:
            step, at = steps[-1]
            seen = [lines(folder / f"samples-{number}") for number in range(plan.rollouts)]
            if all(found and found[-1][0] >= step for found in seen):
                return float(at)
        time.sleep(10 * LOOK_S)
    raise RuntimeError(f"not all rollouts worked within {WARM_S:g} s")


def completed(folder: Path) -> list[float]:
    """When each step was completed; one that was made again counts once, and early."""
    first = {int(step): float(at) for step, at in reversed(lines(folder / "steps"))}
    return sorted(first.values())


def strike(folder: Path, plan: Plan, running: Running, began: float, plagues: Sequence[Fault]) -> int:
    """Let the window pass, with its faults; returns how many found their victim
    alive."""
    due: list[tuple[float, int, Process | int]] = [
        (began + one.at_s, signal.SIGKILL if one.kind == "kill" else signal.SIGSTOP, one.rollout) for one in plagues
    ]
    hits = 0
    while (now := time.monotonic()) < latest_end(plan, began):
        running.look()
        due.sort(key=lambda one: one[0])
        if due and due[0][0] <= now:
            _, signum, whom = due.pop(0)
            victim = rank_of(folder, whom) if isinstance(whom, int) else whom
            if victim is not None and alive([victim]):
                send(victim, signum)
                hits += signum != signal.SIGCONT
                if signum == signal.SIGSTOP:
                    due.append((now + plan.freeze_s, signal.SIGCONT, victim))
        elif now > began + plan.window_s and window_end(plan, completed(folder), began) is not None:
            break
        time.sleep(LOOK_S)
    return hits


def measure(folder: Path, contender: str, plan: Plan, percent: float, seed: int) -> Outcome:
    """One window of a contender."""
    make_field(folder, plan)
    plagues, hits, began, error = faults(plan, percent, seed), 0, 0.0, ""
    try:
        with CONTENDERS[contender](folder, plan) as running:
            began = wait_until_warm(folder, plan, running)
            hits = strike(folder, plan, running, began, plagues)
    except RuntimeError as failure:
        error = str(failure)
    done = completed(folder) if began else []
    ended = window_end(plan, done, began) or latest_end(plan, began)
    moments = [at for at in done if began <= at <= ended]
    values = [
        torn_and_older((low, high) for _, low, high, _ in lines(folder / f"samples-{number}"))
        for number in range(plan.rollouts)
    ]
    return Outcome(
        contender,
        percent,
        seed,
        goodput=goodput(plan, done, began),
        steps=max(0, len(moments) - 1),
        faults=len(plagues),
        hits=hits,
        longest_s=max((after - before for before, after in pairwise([*moments, ended])), default=ended - began),
        torn=sum(torn for torn, _ in values),
        older=sum(older for _, older in values),
        error=error,
    )


def report(outcomes: Sequence[Outcome], plan: Plan, percents: Sequence[float], names: Sequence[str]) -> None:
    rows: list[list[str] | None] = []
    for percent in percents:
        for name in names:
            found = [one for one in outcomes if (one.contender, one.percent) == (name, percent)]
            if not found:
                continue
            shares = [one.goodput for one in found]
            lost_s = lost_per_fault_s(outcomes, plan, name, percent)
            rows.append(
                [
                    f"{percent:g} %",
                    name,
                    f"{median(outcomes, name, percent):.3f}",
                    f"{min(shares):.3f} - {max(shares):.3f}",
                    f"{sum(one.hits for one in found)} of {sum(one.faults for one in found)}",
                    "" if lost_s is None else f"{lost_s:.1f} s",
                    str(sum(one.steps for one in found)),
                    f"{max(one.longest_s for one in found):.1f} s",
                    f"{sum(one.torn for one in found)}, {sum(one.older for one in found)}",
                ]
            )
        rows.append(None)
    columns = ["lost in an hour", "", "goodput", "range", "faults that hit", "lost by each"]
    show("Goodput", [*columns, "steps", "longest step", "torn, older"], rows)


def run(options: argparse.Namespace) -> None:
    plan, percents = (QUICK, QUICK_PERCENTS) if options.quick else (Plan(), PERCENTS)
    plan = Plan(**asdict(plan) | {name: value for name, value in options.plan.items() if value is not None})
    percents = options.percents or percents
    missing = left_out(ask=not options.only)
    names = [name for name in CONTENDERS if name not in missing and name in (options.only or CONTENDERS)]
    result: dict[str, Any] = {"machine": machine(), "busy_before": asyncio.run(busy_ratio()), "plan": asdict(plan)}
    result |= {"releases": releases(), "left_out": missing}
    outcomes: list[Outcome] = []
    with scratch() as name:
        for repetition in range(options.repetitions or (1 if options.quick else 3)):
            for percent in percents:
                for contender in rotated(names, repetition):
                    folder = Path(name) / f"{contender}-{percent:g}-{repetition}"
                    outcomes.append(measure(folder, contender, plan, percent, options.seed + repetition))
                    print(json.dumps(outcomes[-1].report()), flush=True)
    report(outcomes, plan, percents, names)
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}")
    kept = bars(outcomes)
    for bar in kept:
        print(f"{'kept' if bar.kept else 'FAIL'}  {bar.text}: {bar.figure:.3f}")
    result["outcomes"] = [one.report() for one in outcomes]
    result["medians"] = {name: {f"{p:g}": median(outcomes, name, p) for p in percents} for name in names}
    write("goodput", {**result, "bars": [{"text": one.text, "figure": one.figure, "kept": one.kept} for one in kept]})


def end(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends the benchmark as Ctrl-C does, with all that it has started."""
    sys.exit(128 + signum)


def main() -> None:
    parser = argparse.ArgumentParser(description="The useful share of a run's time under faults.")
    parser.add_argument("--quick", action="store_true", help="4 rollouts, windows of 40 s, 3 rates, one repetition")
    parser.add_argument("--repetitions", type=int, default=None, help="each with the next seed; default 3")
    parser.add_argument("--seed", type=int, default=1, help="of the first repetition's faults; default 1")
    parser.add_argument("--only", nargs="+", choices=[*CONTENDERS], help="these contenders")
    parser.add_argument("--percents", nargs="+", type=float, help="of the rollouts are lost in an hour")
    parser.add_argument("--rollouts", type=int, default=None)
    parser.add_argument("--window-s", type=float, default=None, help="length of a window; default 120")
    parser.add_argument("--hour-s", type=float, default=None, help="what stands for an hour of the rate; default 24")
    parser.add_argument("--draw", type=Path, metavar="SVG", help="draw the figure of the last run, and run nothing")
    options = parser.parse_args()
    if options.draw is not None:
        options.draw.write_text(draw(json.loads((ROOT / "bench-results" / "goodput.json").read_text())))
        return
    options.plan = {name: getattr(options, name) for name in ("rollouts", "window_s", "hour_s")}
    signal.signal(signal.SIGTERM, end)
    run(options)


if __name__ == "__main__":
    main()

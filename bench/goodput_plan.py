"""What a run of ``bench_goodput.py`` is given, which faults hit it, and what is made of
what it did: no process, no clock.

An hour of the rate of faults is compressed into ``hour_s``: a window of 120 s in which
an hour takes 24 s is hit as often as five hours are. What a fault costs is not
compressed, so all goodputs here are lower than those of real hours.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bench.support import Bar

__all__ = [
    "OURS",
    "PERCENTS",
    "Fault",
    "Outcome",
    "Plan",
    "bars",
    "faults",
    "goodput",
    "latest_end",
    "lost_per_fault_s",
    "median",
    "torn_and_older",
    "window_end",
]

PERCENTS = (0, 2, 5, 10, 20)
"""Share of the rollouts that is lost in an hour."""
OURS = ("warm", "cold")
FREEZE_EVERY = 4
"""One fault of so many freezes its victim; the others kill."""
OVERTIME_STEPS = 4
LEAST = 0.95
LEAST_AT = 10


@dataclass(frozen=True)
class Plan:
    """
    :ivar rollouts: their number; the trainer comes on top.
    :ivar per_step: samples of each rollout in a step without faults.
    :ivar generate_s: of a sample; ``train_s``: of a step. Both are slept.
    :ivar freeze_s: from SIGSTOP to SIGCONT.
    :ivar gloo_s: timeout of torchrun's collectives, longer than a freeze: a job that
        waits is back sooner than one that starts again.
    :ivar torchft_s: timeout of torchft's, shorter: it goes on without a frozen replica.
    """

    rollouts: int = 8
    per_step: int = 8
    generate_s: float = 0.25
    train_s: float = 0.5
    nbytes: int = 16 << 20
    window_s: float = 120.0
    hour_s: float = 24.0
    freeze_s: float = 5.0
    gloo_s: float = 10.0
    torchft_s: float = 3.0

    @property
    def batch(self) -> int:
        return self.rollouts * self.per_step

    @property
    def ideal_step_s(self) -> float:
        """Of a step without faults in which the weights take no time."""
        return self.per_step * self.generate_s + self.train_s


@dataclass(frozen=True)
class Fault:
    """``at_s``: seconds after the window has begun."""

    at_s: float
    rollout: int
    kind: Literal["kill", "freeze"]


def faults(plan: Plan, percent: float, seed: int) -> list[Fault]:
    """All that hit the rollouts in one window, the same for each contender.

    :param percent: share of the rollouts that is lost in an hour; above 0 there is one
        fault at least.
    """
    if not percent:
        return []
    count = max(1, round(plan.rollouts * percent / 100 * plan.window_s / plan.hour_s))
    chance = random.Random(f"{seed} {percent}")
    kinds: list[Literal["kill", "freeze"]] = ["kill"] * (count - count // FREEZE_EVERY)
    kinds += ["freeze"] * (count // FREEZE_EVERY)
    chance.shuffle(kinds)
    times = sorted(chance.uniform(0.0, plan.window_s) for _ in kinds)
    return [Fault(at, chance.randrange(plan.rollouts), kind) for at, kind in zip(times, kinds, strict=True)]


def window_end(plan: Plan, completed: Sequence[float], began: float) -> float | None:
    """When the window that began then is over, by the same clock; None: not yet known.

    That is when the step is complete which is under way after ``window_s``, so that no
    part of a step is cut off; of a contender that hangs, ``OVERTIME_STEPS`` ideal steps
    later.

    :param completed: when each step was, in their order.
    """
    return next((at for at in completed if at >= began + plan.window_s), None)


def latest_end(plan: Plan, began: float) -> float:
    """When the window of a contender that hangs is over."""
    return began + plan.window_s + OVERTIME_STEPS * plan.ideal_step_s


def goodput(plan: Plan, completed: Sequence[float], began: float) -> float:
    """The useful share of the window that began with a step that was completed then."""
    ended = window_end(plan, completed, began) or latest_end(plan, began)
    return sum(1 for at in completed if began < at <= ended) * plan.ideal_step_s / (ended - began)


def torn_and_older(values: Iterable[tuple[float, float]]) -> tuple[int, int]:
    """Count the samples of one rollout that were made with parts of two versions, and
    with an older one after a newer one.

    :param values: least and greatest value of all weights, sample by sample; a version
        has its step as each of its values.
    """
    torn = older = 0
    newest = -1.0
    for low, high in values:
        torn += low != high
        older += high < newest
        newest = max(newest, high)
    return torn, older


@dataclass(frozen=True)
class Outcome:
    """One window of one contender.

    :ivar hits: faults that found their victim alive; the others hit nothing.
    :ivar longest_s: the longest time without a step that was completed.
    :ivar error: why it was not measured, or "".
    """

    contender: str
    percent: float
    seed: int
    goodput: float
    steps: int
    faults: int
    hits: int
    longest_s: float
    torn: int
    older: int
    error: str = ""

    def report(self) -> dict[str, Any]:
        return asdict(self)


def median(outcomes: Iterable[Outcome], contender: str, percent: float) -> float | None:
    """The goodput of its repetitions; None: it has not run at this rate."""
    found = [one.goodput for one in outcomes if (one.contender, one.percent) == (contender, percent)]
    return statistics.median(found) if found else None


def lost_per_fault_s(outcomes: Sequence[Outcome], plan: Plan, contender: str, percent: float) -> float | None:
    """Seconds of useful time that a fault cost, against windows without faults: what no
    compression of hours changes. None: not measured at both rates, or nothing hit."""
    usual = median(outcomes, contender, 0)
    found = [one for one in outcomes if (one.contender, one.percent) == (contender, percent)]
    hits = sum(one.hits for one in found)
    if usual is None or not hits:
        return None
    return sum(usual - one.goodput for one in found) * plan.window_s / hits


def bars(outcomes: Sequence[Outcome]) -> list[Bar]:
    """What is promised of a warm run, as far as the outcomes tell."""
    found: list[Bar] = []
    if (share := median(outcomes, "warm", LEAST_AT)) is not None:
        found.append(Bar(f"goodput of warm at {LEAST_AT} % (at least {LEAST})", share, share >= LEAST))
    others = {one.contender for one in outcomes} - {*OURS}
    margins = [
        own - other
        for percent in sorted({one.percent for one in outcomes if one.percent})
        for name in others
        if (own := median(outcomes, "warm", percent)) is not None
        and (other := median(outcomes, name, percent)) is not None
    ]
    if margins:
        text = "warm above every contender at every rate with faults (least margin above 0)"
        found.append(Bar(text, min(margins), min(margins) > 0))
    wrong = sum(one.torn + one.older for one in outcomes if one.contender in OURS)
    found.append(Bar("samples of ours with torn weights, or older ones after newer (0)", wrong, not wrong))
    return found

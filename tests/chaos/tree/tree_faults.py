"""Faults for the supervisor alone: those of each process of its tree, of the disk, the
clock, and what operators ask for.

``kill``, ``pause`` (SIGSTOP, and SIGCONT ``pause_s`` later) and ``freeze`` (SIGSTOP
until the round is over) are signals to one process; ``exit`` has a rank end with code
3; ``flood`` has it write 20,000 lines at once; ``full`` leaves no room on the disk of
logs and state for ``pause_s``; ``jump`` sets the supervisor's wall clock. ``drain``
(SIGTERM), ``hurry`` (twice) and ``preempt`` (USR1) end the run, which is then started
again, as after ``kill supervisor``; ``stutter`` kills the next one too, ``pause_s``
after its start. ``restart`` and ``scale`` are commands; ``reload`` (HUP) reads a config
that is as before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ENDS_RUN", "PAIRS", "Fault", "deck"]

PROCESSES = ("supervisor", "store", "agent", "shim", "pump", "torchrun", "rank", "daemon")

PAIRS: tuple[tuple[str, str], ...] = (
    *(("kill", target) for target in PROCESSES),
    *(("pause", target) for target in PROCESSES),
    *(("freeze", target) for target in ("shim", "store")),
    ("exit", "rank"),
    ("flood", "rank"),
    ("full", "disk"),
    ("jump", "clock"),
    *((kind, "supervisor") for kind in ("stutter", "drain", "hurry", "preempt", "reload")),
    ("restart", "replica"),
    ("scale", "group"),
)

ENDS_RUN = {
    ("kill", "supervisor"): -9,
    ("stutter", "supervisor"): -9,
    ("drain", "supervisor"): 0,
    ("hurry", "supervisor"): 0,
    ("preempt", "supervisor"): 75,
}
"""With this exit code."""

RESTARTS = {(kind, target) for kind in ("kill", "freeze") for target in ("shim", "torchrun", "rank")} | {
    ("exit", "rank")
}
"""What costs the replica that it hits a restart."""

_LONG_PAUSE_S = 7.0
"""Of the supervisor: more than the heartbeat timeout of a shim."""
_JUMPS_S = (-86_400.0, -600.0, -5.0, 5.0, 600.0, 86_400.0)


@dataclass(frozen=True)
class Fault:
    """``at_s``: how long after the round's begin it comes. ``pick``: which of several
    victims, from 0 to 1; with ``same``, one of the replica that the fault before it has
    hit. ``jump_s``: of the clock.
    """

    kind: str
    target: str
    at_s: float
    pause_s: float
    pick: float
    same: bool
    jump_s: float

    @property
    def pair(self) -> tuple[str, str]:
        return self.kind, self.target

    @property
    def ends_run(self) -> bool:
        return self.pair in ENDS_RUN

    @property
    def restarts(self) -> bool:
        """Whether it costs the replica that it hits a restart."""
        return self.pair in RESTARTS

    @property
    def commands(self) -> bool:
        """Whether it is a command, which needs a supervisor that is there to take
        it."""
        return self.kind in ("restart", "scale", "reload")

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"


def deck(rng: random.Random, *, at_once: int, torchrun: bool, disk: bool, only: str = "") -> Iterator[list[Fault]]:
    """Rounds without end, of up to ``at_once`` faults: each pair comes before any comes
    again.

    Of those that come together one at most ends the run, and then none is a command.
    Half of them come at the very same time, the others while the run recovers from the
    first.

    :param disk: whether it can be filled. :param only: pairs with one of these,
        separated by commas, in their text.
    """
    left_out = (set() if torchrun else {"torchrun"}) | (set() if disk else {"disk"})
    pairs = [
        pair for pair in PAIRS if pair[1] not in left_out and any(one in " ".join(pair) for one in only.split(","))
    ]
    waiting: list[tuple[str, str]] = []
    while True:
        count = rng.choice([1, 1, *range(1, at_once + 1)])
        together: list[Fault] = []
        spread_s = rng.choice((0.0, 0.0, 0.05, 0.5))
        while len(together) < count:
            if not waiting:
                waiting = rng.sample(pairs, len(pairs))
            fault = _fault(rng, waiting[-1], rng.uniform(0.0, spread_s) if together else 0.0)
            if any(not _get_along(fault, other) for other in together):
                break
            waiting.pop()
            together.append(fault)
        yield together


def _get_along(one: Fault, other: Fault) -> bool:
    if one.pair == other.pair and one.target in ("supervisor", "store", "agent", "disk", "clock"):
        return False
    if {one.pair, other.pair} == {("pause", "store"), ("freeze", "store")}:
        return False  # the end of the pause thaws it
    ends = one.ends_run + other.ends_run
    paused = any(fault.pair == ("pause", "supervisor") for fault in (one, other))
    return ends < 2 and not ((ends or paused) and (one.commands or other.commands)) and not (ends and paused)


def _fault(rng: random.Random, pair: tuple[str, str], at_s: float) -> Fault:
    longer = _LONG_PAUSE_S * (pair == ("pause", "supervisor")) * rng.choice((0, 0, 1))
    longer += 3.0 * (pair[0] == "stutter") * rng.random()
    return Fault(
        *pair,
        at_s=at_s,
        pause_s=rng.uniform(0.2, 1.2) + longer,
        pick=rng.random(),
        same=rng.random() < 0.5,
        jump_s=rng.choice(_JUMPS_S),
    )

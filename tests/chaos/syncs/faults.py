"""The faults, the deck that a seed deals, and what each may cost.

``kill``, ``pause`` (SIGSTOP, and SIGCONT 0.5-1.5 s later), ``freeze`` (SIGSTOP until
the round is over) and ``abort`` are done *to* a process by a signal; ``exception`` and
``exit 0`` are ordered and done *by* it; ``memory full`` takes away the address space
beyond what it has; ``half-close``, ``delay`` and ``garbage`` are done to a session, or
to an open port; ``usurp``: another process joins with the identity of the guest (a
target that no supervisor watches over).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.chaos.syncs.moments import OUTER_MOMENTS

__all__ = ["PAIRS", "Cost", "Fault", "deck"]

RANKS = ("source rank", "target rank")
PROCESSES = (*RANKS, "sidecar", "forkserver", "pump", "torchrun", "shim", "store")

PAIRS: tuple[tuple[str, str], ...] = (
    *(("kill", target) for target in PROCESSES),
    *(("pause", target) for target in (*PROCESSES, "supervisor")),
    *(("freeze", target) for target in PROCESSES),
    *(("abort", target) for target in (*RANKS, "sidecar", "store")),
    *(("exception", target) for target in RANKS),
    *(("exit 0", target) for target in RANKS),
    *(("memory full", target) for target in (*RANKS, "sidecar", "forkserver")),
    ("half-close", "session"),
    ("delay", "session"),
    ("garbage", "session"),
    ("garbage", "control port"),
    ("garbage", "store port"),
    *((kind, "guest") for kind in ("kill", "freeze", "usurp")),
)

LASTING = ("forming", "packing", "mapping", "moving", "catching up", "idle")
"""Moments that last for some milliseconds, of which any may be chosen; the others are
there and gone."""

LONG_PAUSE_S = 5.0
"""More than the lease of a member."""

Cost = Literal["restart", "maybe", "nothing"]
"""To the replica that is hit; the others never pay."""


@dataclass(frozen=True)
class Fault:
    """``pick``: which of several possible victims, from 0 to 1. ``noise``: seed of
    random bytes."""

    kind: str
    target: str
    channel: str
    moment: str
    delay_s: float
    pause_s: float
    pick: float
    noise: int

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"

    @property
    def cost(self) -> Cost:
        """What it costs the replica that it hits."""
        if self.target == "forkserver":
            return "nothing"  # it is the node's: its sidecars are replaced, and no replica
        if self.kind == "memory full":
            return "maybe"  # nothing, if it asks for no memory meanwhile, or can do without
        fatal = self.kind in ("kill", "abort", "freeze", "exception", "exit 0")
        return "restart" if fatal and self.target in (*RANKS, "torchrun", "shim") else "nothing"

    @property
    def group(self) -> str:
        """Whose replicas can be its victims: ``source``, ``target``, or any."""
        return self.target.partition(" ")[0] if self.target in RANKS else ""


def deck(rng: random.Random, of_weights: Sequence[str], *, torchrun: bool, only: str = "") -> Iterator[Fault]:
    """Faults without end: each pair comes before any comes again, each moment of a pair
    before that one comes again.

    ``of_weights``: those of weights. ``only``: pairs and moments with this in their
    text.
    """
    pairs = [pair for pair in PAIRS if torchrun or pair[1] != "torchrun"]
    moments: dict[tuple[str, str], list[tuple[str, str]]] = {}
    every = [*(("policy", moment) for moment in of_weights), *(("outer", moment) for moment in OUTER_MOMENTS)]
    cards = [(*pair, *moment) for pair in pairs for moment in every if only in " ".join((*pair, *moment))]
    pairs = list(dict.fromkeys(card[:2] for card in cards))
    while True:
        for pair in rng.sample(pairs, len(pairs)):
            if not moments.get(pair):
                own = [card[2:] for card in cards if card[:2] == pair]
                moments[pair] = rng.sample(own, len(own))
            channel, moment = moments[pair].pop()
            yield Fault(
                *pair,
                channel=channel,
                moment=moment,
                delay_s=_delay_s(rng, pair[1], moment),
                pause_s=rng.uniform(0.5, 1.5) + LONG_PAUSE_S * (pair[1] == "supervisor") * rng.choice((0, 1)),
                pick=rng.random(),
                noise=rng.getrandbits(32),
            )


def _delay_s(rng: random.Random, target: str, moment: str) -> float:
    if target == "sidecar" and moment == "forming":
        return rng.uniform(0.01, 0.04)  # it is only being made
    return rng.uniform(0.0, 0.003) * (moment in LASTING)

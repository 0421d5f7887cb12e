"""Whether and when the replicas of a group start again after they ended badly. Pure:
the time is an argument.

Theory of operation
===================

Three rules are asked, in this order, each time a generation has ended and nobody asked
for that:

1. **The policy**: ``always``, ``on-failure`` or ``never``.
2. **Progress**: ``no_progress_cycles`` generations in a row that ended badly, and in
   which the replica came to no step or version that it had not reached before, are a
   crash loop that no restart mends. A generation that ran for a whole ``window_s`` is
   no part of a crash loop, whatever it reached. What is on no channel has no steps: for
   it there is no such rule.
3. **The budget** (:mod:`replicas.core.lives.budget`), which also gives the delay.

With ``strategy = "group"`` one replica that fails takes all others of its group with
it. That is one *incident*, whoever of them dies of it: it spends one restart, it is one
cycle, and all come back together, after one delay (:meth:`Restarts.resumed`).

Restarts that somebody asked for (an operator, a reload, a preemption) never come here,
and so spend nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replicas.config.structs import RestartConfig
from replicas.core.lives.budget import RestartBudget, wants_restart

__all__ = ["RestartVerdict", "Restarts"]

_ALL = 0
"""Whose restart it is counted as when the whole group restarts together."""


@dataclass(frozen=True, slots=True)
class RestartVerdict:
    """``delay_s``: start again after so long; None: never, because of ``rule``."""

    delay_s: float | None
    rule: str = ""


class Restarts:
    """The rules of one group, and what it has spent of them.

    :param config: the group's restart rules.
    :param rng: source of the jitter; a seeded one makes the delays reproducible.
    """

    def __init__(self, config: RestartConfig, *, rng: random.Random | None = None) -> None:
        self.config = config
        self.budget = RestartBudget(config, rng=rng)
        self.cycles: dict[int, int] = {}
        """Generations in a row without progress, by replica (or for the whole
        group)."""
        self._resume_at: float | None = None

    def use(self, config: RestartConfig) -> None:
        """The rules are these from now on; what has been spent remains so."""
        self.config = config
        self.budget.use(config)

    def key(self, replica: int) -> int:
        """Whose budget and cycles it is."""
        return _ALL if self.config.strategy == "group" else replica

    def ended(self, replica: int, *, ok: bool, progressed: bool | None, ran_s: float, now: float) -> RestartVerdict:
        """A generation has ended, and nobody asked for that.

        :param ok: every rank of it exited with code 0.
        :param progressed: it reached a new step or version; None: it has none to reach.
        :param ran_s: how long it ran.
        """
        if not wants_restart(self.config, ok=ok):
            return RestartVerdict(None, f"restart policy is {self.config.policy}")
        if self._resume_at is not None:
            return RestartVerdict(max(0.0, self._resume_at - now))
        whose = self.key(replica)
        limit = self.config.no_progress_cycles
        if ok or progressed is not False or ran_s >= self.config.window_s:
            self.cycles.pop(whose, None)
        else:
            self.cycles[whose] = self.cycles.get(whose, 0) + 1
            if 0 < limit <= self.cycles[whose]:
                return RestartVerdict(None, f"{self.cycles[whose]} generations in a row without a new step or version")
        delay_s = self.budget.take(whose, now=now)
        if delay_s is None:
            return RestartVerdict(
                None, f"no restart is left of {self.config.max_restarts} in {self.config.window_s:g} s"
            )
        if self.config.strategy == "group":
            self._resume_at = now + delay_s
        return RestartVerdict(delay_s)

    def resumed(self) -> None:
        """The replicas are being started again: the next failure is another
        incident."""
        self._resume_at = None

    def resume_in_s(self, now: float) -> float:
        """Seconds until the whole group comes back; 0 when no incident is open."""
        return 0.0 if self._resume_at is None else max(0.0, self._resume_at - now)

    def cycles_of(self, replica: int) -> int:
        """Generations in a row without progress of a replica, or of its whole group."""
        return self.cycles.get(self.key(replica), 0)

    @property
    def no_progress_remaining_ratio(self) -> float:
        """Share of ``no_progress_cycles`` that every replica has left, from 0 to 1;
        without such a rule 1."""
        limit = self.config.no_progress_cycles
        return max(0.0, 1.0 - max(self.cycles.values(), default=0) / limit) if limit else 1.0

    def spent(self, now: float) -> bool:
        """Whether something of the budget, or a cycle, is spent."""
        return bool(self.budget.ages(now) or self.cycles)

    def reset(self) -> None:
        """Someone says that what made them fail is mended: nothing is spent."""
        self.budget.reset()
        self.cycles.clear()
        self._resume_at = None

    def forget(self, replica: int) -> None:
        """The replica is no longer wanted; the restarts that it spent remain spent."""
        self.cycles.pop(replica, None)

    # --------------------------------------------------- over the death of a supervisor

    def restore(self, *, spent: Sequence[tuple[float, int]], cycles: Mapping[int, int], now: float) -> None:
        """Go on from what an earlier supervisor had spent.

        :param spent: age in seconds and replica of each restart in the window, as in
            :meth:`RestartBudget.ages`.
        """
        self.cycles = {replica: count for replica, count in cycles.items() if count}
        self.budget.restore(spent, now=now)

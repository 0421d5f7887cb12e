"""Decide whether and when the replicas of a group restart after they ended.

Three rules apply, in this order, each time a generation has ended without a request:

1. **The policy**: ``always``, ``on-failure`` or ``never``.
2. **Progress**: ``no_progress_cycles`` generations in a row that ended badly, and in
   which the replica reached no new step or version, are a crash loop that no restart
   fixes. A generation that ran for a whole ``window_s`` does not count. A replica on no
   channel has no steps: this rule does not apply to it.
3. **The budget** of the group: at most ``max_restarts`` in any ``window_s``. The delay
   doubles with each of the *replica's* restarts inside the window, from
   ``initial_delay_s`` to ``max_delay_s``, plus a jitter of up to ``initial_delay_s`` so
   that replicas that died together do not come back together.

With ``strategy = "group"`` a failed replica takes all others of its group with it. That
is one *incident*, however many replicas end: one restart, one cycle, and all come back
together, after one delay (:meth:`Restarts.resumed`). Times are arguments, in seconds of
a monotonic clock.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replicas.common.backoff import Backoff
from replicas.config.structs import RestartConfig

_ALL = 0
"""The key under which a restart of the whole group is counted."""


def wants_restart(config: RestartConfig, *, ok: bool) -> bool:
    """Return True if the group's policy restarts a replica after such an end.

    The budget is not looked at.

    :param ok: the generation ended well: every rank exited with code 0.
    """
    return config.policy == "always" or (config.policy == "on-failure" and not ok)


@dataclass(frozen=True, slots=True)
class RestartVerdict:
    """Whether a replica restarts.

    ``delay_s``: seconds until the restart, or None if it must not restart, for the
    reason ``rule``.
    """

    delay_s: float | None
    rule: str = ""


class Restarts:
    """The restart rules of one group of replicas, and the restarts that it has spent.

    A *cycle* is a generation that ended badly and made no progress.

    :param rng: source of the jitter; a seeded one makes the delays reproducible.
    """

    def __init__(self, config: RestartConfig, *, rng: random.Random | None = None) -> None:
        """Start with an unspent budget and no cycles.

        :param config: the group's rules.
        :param rng: source of the jitter; a seeded one makes the delays reproducible.
        """
        self._rng = random.Random() if rng is None else rng
        self._spent: deque[tuple[float, int]] = deque()
        """Time and replica of each restart in the window."""
        self.cycles: dict[int, int] = {}
        """Generations in a row without progress, by :meth:`key`."""
        self._resume_at: float | None = None
        self.use(config)

    def use(self, config: RestartConfig) -> None:
        """Replace the rules, as after a reload.

        Restarts and cycles already counted stay.
        """
        self.config = config
        self._backoff = Backoff(config.initial_delay_s, config.max_delay_s)

    def key(self, replica: int) -> int:
        """Return the key under which restarts and cycles of a replica are counted.

        That is its index, or 0 for all if the group restarts as a whole. A cycle is a
        generation without progress.
        """
        return _ALL if self.config.strategy == "group" else replica

    def ended(self, replica: int, *, ok: bool, progressed: bool | None, ran_s: float, now: float) -> RestartVerdict:
        """Judge whether a generation that has ended without a request is followed by
        another.

        Count a cycle without progress, and spend a restart of the group's budget if the
        verdict is to restart. Replicas of a group that restarts as a whole spend one
        together: until :meth:`resumed`, further ends count nothing.

        :param ok: every rank exited with code 0.
        :param progressed: whether it reached a new step or version; None if it has no
            steps.
        :param ran_s: for how many seconds it ran.
        :param now: when it ended, by a monotonic clock.
        :returns: ``delay_s``, seconds until the restart; or None, and the ``rule`` that
            forbids it.
        """
        config = self.config
        if not wants_restart(config, ok=ok):
            return RestartVerdict(None, f"restart policy is {config.policy}")
        if self._resume_at is not None:  # the incident was counted when its first replica ended
            return RestartVerdict(max(0.0, self._resume_at - now))
        whose = self.key(replica)
        if ok or progressed is not False or ran_s >= config.window_s:  # None: it has no steps, so it cannot lack them
            self.cycles.pop(whose, None)
        else:
            self.cycles[whose] = self.cycles.get(whose, 0) + 1
            if 0 < config.no_progress_cycles <= self.cycles[whose]:
                return RestartVerdict(None, f"{self.cycles[whose]} generations in a row without a new step or version")
        delay_s = self.spend_restart(whose, now=now)
        if delay_s is None:
            return RestartVerdict(None, f"all restarts are used ({config.max_restarts} in {config.window_s:g} s)")
        if config.strategy == "group":
            self._resume_at = now + delay_s
        return RestartVerdict(delay_s)

    def spend_restart(self, replica: int, *, now: float) -> float | None:
        """Spend one restart of the group's budget.

        Return the seconds to wait before it.

        Return None, and spend nothing, if the budget is used up.

        :param replica: a key as :meth:`key` returns; the delay doubles with each
            restart under it.
        :param now: the present time, by a monotonic clock.
        """
        if self.remaining(now) == 0:
            return None
        self._spent.append((now, replica))
        attempt = sum(other == replica for _, other in self._spent)
        jitter_s = self._rng.uniform(0.0, self._backoff.first_s)
        # jitter cannot exceed the limit either
        return min(self._backoff.after(attempt - 1) + jitter_s, self._backoff.max_s)

    def ages(self, now: float) -> list[tuple[float, int]]:
        """Return (seconds ago, key of the replica) of each restart that still counts.

        Those that are older than the budget's window are forgotten.
        """
        self.remaining(now)  # drops what is outside the window
        return [(max(0.0, now - at), replica) for at, replica in self._spent]

    def remaining(self, now: float) -> int:
        """Return the restarts left in the group's budget.

        Forget those older than its window.
        """
        while self._spent and self._spent[0][0] <= now - self.config.window_s:
            self._spent.popleft()
        return max(0, self.config.max_restarts - len(self._spent))

    def remaining_ratio(self, now: float) -> float:
        """Return the unspent share of the budget, 0 to 1; 1 for a budget of 0."""
        return self.remaining(now) / self.config.max_restarts if self.config.max_restarts else 1.0

    def resumed(self) -> None:
        """Record that the group was started as a whole, so that no restart of it is
        pending."""
        self._resume_at = None

    def resume_in_s(self, now: float) -> float:
        """Return the seconds until the group restarts as a whole; 0 if no such restart
        waits."""
        return 0.0 if self._resume_at is None else max(0.0, self._resume_at - now)

    def cycles_of(self, replica: int) -> int:
        """Return how many generations of the replica in a row made no progress."""
        return self.cycles.get(self.key(replica), 0)

    def spent(self, now: float) -> bool:
        """Return True if a restart in the window, or any cycle, is counted.

        A cycle is a generation without progress.
        """
        return bool(self.ages(now) or self.cycles)

    def reset(self) -> None:
        """Forget all spent restarts, cycles, and the pending restart of the group."""
        self._spent.clear()
        self.cycles.clear()
        self._resume_at = None

    def remove_replica(self, replica: int) -> None:
        """Forget the cycles of a replica that was removed; spent restarts stay."""
        self.cycles.pop(replica, None)

    def restore(self, *, spent: Sequence[tuple[float, int]], cycles: Mapping[int, int], now: float) -> None:
        """Replace the counts by those that an earlier supervisor has saved.

        :param spent: (seconds ago, key) of each restart, as of :meth:`ages`.
        :param cycles: generations in a row without progress, by :meth:`key`.
        :param now: the time from which the ages count.
        """
        self.cycles = {replica: count for replica, count in cycles.items() if count}
        # sorted, as popleft() takes the oldest
        self._spent = deque(sorted((now - max(0.0, age), replica) for age, replica in spent))

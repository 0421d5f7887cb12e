"""How often, and after which delay, the replicas of a group may be restarted. Pure: the
time is an argument.

The budget is the group's: at most ``max_restarts`` in any ``window_s``. The delay is
the replica's own: it doubles with each of *its* restarts inside the window, from
``initial_delay_s`` to ``max_delay_s``, plus a jitter of up to ``initial_delay_s`` so
that replicas that died together do not come back together. A replica that ran well for
a whole window starts over.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from replicas.common.backoff import Backoff
from replicas.config.structs import RestartConfig

__all__ = ["RestartBudget", "wants_restart"]


def wants_restart(config: RestartConfig, *, ok: bool) -> bool:
    """Whether the policy restarts a replica that ended well (``ok``) or badly, before
    any budget is asked."""
    return config.policy == "always" or (config.policy == "on-failure" and not ok)


class RestartBudget:
    """The restarts of one group in a sliding window.

    :param config: the group's restart rules.
    :param rng: source of the jitter; a seeded one makes the delays reproducible.
    """

    def __init__(self, config: RestartConfig, *, rng: random.Random | None = None) -> None:
        self._rng = random.Random() if rng is None else rng
        self._spent: deque[tuple[float, int]] = deque()
        self.use(config)

    def use(self, config: RestartConfig) -> None:
        """These are the rules from now on; what has been spent remains so."""
        self.config = config
        self._backoff = Backoff(config.initial_delay_s, config.max_delay_s)

    def take(self, replica: int, *, now: float) -> float | None:
        """Spend one restart of ``replica``: the seconds to wait first, or None when
        none is left (nothing is spent).

        :param now: seconds of a monotonic clock, never less than in an earlier call.
        """
        if self.remaining(now) == 0:
            return None
        self._spent.append((now, replica))
        return self._delay_s(sum(1 for _, other in self._spent if other == replica))

    def reset(self) -> None:
        """Nothing has been spent."""
        self._spent.clear()

    def ages(self, now: float) -> list[tuple[float, int]]:
        """Age in seconds and replica of each restart in the window: what
        :meth:`restore` takes in another process."""
        self.remaining(now)
        return [(max(0.0, now - at), replica) for at, replica in self._spent]

    def restore(self, ages: Sequence[tuple[float, int]], *, now: float) -> None:
        """Go on from what was spent elsewhere."""
        self._spent = deque(sorted((now - max(0.0, age), replica) for age, replica in ages))

    def remaining(self, now: float) -> int:
        """Restarts that are left at ``now``."""
        while self._spent and self._spent[0][0] <= now - self.config.window_s:
            self._spent.popleft()
        return max(0, self.config.max_restarts - len(self._spent))

    def remaining_ratio(self, now: float) -> float:
        """Share of the budget that is left, from 0 to 1; of a budget of none, nothing
        was ever spent: 1."""
        return self.remaining(now) / self.config.max_restarts if self.config.max_restarts else 1.0

    def _delay_s(self, attempt: int) -> float:
        jitter_s = self._rng.uniform(0.0, self._backoff.first_s)
        return min(self._backoff.after(attempt - 1) + jitter_s, self._backoff.max_s)

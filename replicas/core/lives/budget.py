"""The restart budget of a group, and the delay before each restart.

The budget is the group's: at most ``max_restarts`` in any ``window_s``. The delay is
the replica's own: it doubles with each of *its* restarts inside the window, from
``initial_delay_s`` to ``max_delay_s``, plus a jitter of up to ``initial_delay_s`` so
that replicas that died together do not come back together. A replica that ran well for
a whole window starts over. Pure: the time is an argument.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from replicas.common.backoff import Backoff
from replicas.config.structs import RestartConfig

__all__ = ["RestartBudget", "wants_restart"]


def wants_restart(config: RestartConfig, *, ok: bool) -> bool:
    """Return whether the policy restarts a replica, before any budget is checked.

    :param ok: it ended well.
    """
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
        """Replace the rules; restarts already spent stay spent."""
        self.config = config
        self._backoff = Backoff(config.initial_delay_s, config.max_delay_s)

    def take(self, replica: int, *, now: float) -> float | None:
        """Spend one restart of ``replica`` and return the seconds to wait first.

        None: no restart is left, and none is spent.

        :param now: seconds of a monotonic clock, never less than in an earlier call.
        """
        if self.remaining(now) == 0:
            return None
        self._spent.append((now, replica))
        return self._delay_s(sum(1 for _, other in self._spent if other == replica))

    def reset(self) -> None:
        """Forget all spent restarts."""
        self._spent.clear()

    def ages(self, now: float) -> list[tuple[float, int]]:
        """Return (age in seconds, replica) of each restart in the window.

        :meth:`restore` takes them in another process.
        """
        self.remaining(now)
        return [(max(0.0, now - at), replica) for at, replica in self._spent]

    def restore(self, ages: Sequence[tuple[float, int]], *, now: float) -> None:
        """Continue from restarts spent in another process."""
        self._spent = deque(sorted((now - max(0.0, age), replica) for age, replica in ages))

    def remaining(self, now: float) -> int:
        """Return the restarts left at ``now``."""
        while self._spent and self._spent[0][0] <= now - self.config.window_s:
            self._spent.popleft()
        return max(0, self.config.max_restarts - len(self._spent))

    def remaining_ratio(self, now: float) -> float:
        """Return the share of the budget left, from 0 to 1; 1 for a budget of none."""
        return self.remaining(now) / self.config.max_restarts if self.config.max_restarts else 1.0

    def _delay_s(self, attempt: int) -> float:
        jitter_s = self._rng.uniform(0.0, self._backoff.first_s)
        return min(self._backoff.after(attempt - 1) + jitter_s, self._backoff.max_s)

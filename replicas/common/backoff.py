"""Exponential backoff: delays that double with each failure, up to a limit.

For code that schedules its own retries; calls are retried by tenacity.
"""

from __future__ import annotations

from typing import NamedTuple

_DOUBLINGS_MAX = 900
"""More would overflow a float."""


class Backoff(NamedTuple):
    """Delays from ``first_s`` seconds, doubled with each failure, to ``max_s``."""

    first_s: float
    max_s: float

    def after(self, failures: int) -> float:
        """Return the delay in seconds before the next try, after ``failures`` in a row.

        It is ``first_s`` doubled for each failure, ``max_s`` at most; 0 failures give
        ``first_s``.
        """
        return min(self.max_s, self.first_s * 2.0 ** min(failures, _DOUBLINGS_MAX))

"""Delays that double from one failure to the next, where no tenacity retries a call."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Backoff"]

_DOUBLINGS_MAX = 900
"""More is no float any more."""


class Backoff(NamedTuple):
    """From ``first_s`` seconds, twice as long each time, to ``max_s``."""

    first_s: float
    max_s: float

    def after(self, failures: int) -> float:
        """Seconds to wait: ``first_s`` for none, and doubled for each failure."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures, _DOUBLINGS_MAX))

"""What a chaos run prints."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

__all__ = ["Report"]


class Report:
    """Times to recover, by fault and by moment; or another table than the one by
    moment, called ``second``."""

    def __init__(self, second: str = "moment") -> None:
        self._second = second
        self.by_fault: dict[str, list[float]] = defaultdict(list)
        self.by_moment: dict[str, list[float]] = defaultdict(list)
        self.late = 0
        self.rounds = 0

    def table(self) -> str:
        every = [seconds for times in self.by_fault.values() for seconds in times]
        if not every:
            return "no round was finished"
        head = f"{self.rounds} rounds"
        if self._second == "moment":
            head += f"; {self.late} moments did not come in time and were hit at another one"
        total = f"{'all':32}{_row(every)}"
        return "\n\n".join((head, _table("fault", self.by_fault), _table(self._second, self.by_moment), total))


def _table(title: str, times: Mapping[str, list[float]]) -> str:
    rows = [f"{title:32}{'tried':>6}{'median':>9}{'worst':>9}"]
    rows += [f"{name:32}{_row(seconds)}" for name, seconds in sorted(times.items())]
    return "\n".join(rows)


def _row(seconds: list[float]) -> str:
    return f"{len(seconds):6}{statistics.median(seconds):7.1f} s{max(seconds):7.1f} s"

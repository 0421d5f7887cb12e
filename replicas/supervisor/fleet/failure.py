"""Text of failure reports: last lines of failed ranks, and losses of log lines.

Only these reports show the last lines of a failed rank; the traceback that torchelastic
wrote is added where the log lacks it. Dropped lines are reported once for each replica,
place and reason; the events count them.
"""

from __future__ import annotations

from replicas.telemetry.events import Event, LogLinesDropped, ReplicaExited

__all__ = ["FailureReports"]

_MANY = 1000


class FailureReports:
    """Turns events into report texts; remembers which losses it has reported."""

    def __init__(self) -> None:
        self._said: set[tuple[str, int, str, str]] = set()

    def text(self, event: Event) -> str:
        """The report of this event, in one or more lines; empty: none."""
        match event:
            case ReplicaExited(outcome="failed"):
                return _last_words(event)
            case LogLinesDropped():
                return self._dropped(event)
            case _:
                return ""

    def _dropped(self, event: LogLinesDropped) -> str:
        key = (event.group, event.replica, event.where, event.reason)
        if key in self._said:
            return ""
        if len(self._said) >= _MANY:
            self._said.clear()
        self._said.add(key)
        name = f"{event.group}/{event.replica}"
        if event.where == "tee":
            return f"{name}: not all of its lines are shown here: {event.reason}; they are in its log"
        return f"{name}: lines of its log are being lost: {event.reason}"


def _last_words(event: ReplicaExited) -> str:
    parts = []
    for rank in event.ranks:
        if rank.lines:
            parts += [f"{event.group}/{event.replica}: the last lines of rank {rank.rank}:", *_indented(rank.lines)]
        if rank.error:
            parts += [f"{event.group}/{event.replica}: the error of rank {rank.rank}:"]
            parts += _indented(rank.error.rstrip("\n").split("\n"))
    return "\n".join(parts)


def _indented(lines: tuple[str, ...] | list[str]) -> list[str]:
    return [f"    | {line}" for line in lines]

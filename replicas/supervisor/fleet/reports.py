"""Human-readable lines about transitions, failed ranks, and losses of log lines.

Only the report of a failure shows the last lines of a rank; the traceback that
torchelastic wrote is added where the log lacks it.
"""

from __future__ import annotations

from pathlib import Path

from replicas.core.lives.lifecycle import ReplicaEvent, Transition
from replicas.telemetry.events import Event, LogLinesDropped, ReplicaExited

__all__ = ["FailureReports", "line"]

_MANY = 1000


def line(transition: Transition, *, resume_in_s: float, logs: Path) -> str:
    """One line about this transition; empty: it tells nothing new."""
    name = f"{transition.group}/{transition.replica}"
    again = f" (generation {transition.generation})" if transition.generation > 1 else ""
    reason = transition.reason
    folder = logs / transition.group / str(transition.replica) / f"gen-{transition.generation}"
    match transition.event:
        case ReplicaEvent.START | ReplicaEvent.BACKOFF_ELAPSED:
            return f"{name}: starting{again}"
        case ReplicaEvent.READY if transition.start_s is not None:
            return f"{name}: ready after {transition.start_s:.1f} s{again}"
        case ReplicaEvent.READY:
            return f"{name}: ready again{again}"
        case ReplicaEvent.HELD_UP:
            return f"{name}: {reason}"
        case ReplicaEvent.RETRY:
            when = f"in {resume_in_s:.1f} s" if resume_in_s else "now"
            return f"{name}: {reason}; starting again {when}; logs: {folder}"
        case ReplicaEvent.GIVE_UP:
            return f"{name}: failed: {reason}; logs: {folder}"
        case ReplicaEvent.FINISHED | ReplicaEvent.STOPPED:
            return f"{name}: {transition.event.value}"
        case ReplicaEvent.UNREADY:
            return f"{name}: not ready{': ' if reason else ''}{reason}"
        case ReplicaEvent.STOP | ReplicaEvent.RESTART | ReplicaEvent.RESET:
            return ""
        case _:
            return f"{name}: {reason}; stopping it"


class FailureReports:
    """Reports of failures; of losses, once for each replica, place and reason."""

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
    parts: list[str] = []
    for rank in event.ranks:
        for what, lines in (("last lines", rank.lines), ("error", rank.error.rstrip("\n").split("\n"))):
            if any(lines):
                parts.append(f"{event.group}/{event.replica}: the {what} of rank {rank.rank}:")
                parts += (f"    | {line}" for line in lines)
    return "\n".join(parts)

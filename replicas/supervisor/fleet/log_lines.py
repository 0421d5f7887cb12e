"""Describe a replica's transition in one line, with its log folder after a failure."""

from __future__ import annotations

from pathlib import Path

from replicas.core.lives.lifecycle import ReplicaEvent, Transition

__all__ = ["line"]


def line(transition: Transition, *, resume_in_s: float, logs: Path) -> str:
    """One line about this transition; empty: it tells nothing new.

    :param resume_in_s: seconds until the next generation, for a replica in backoff.
    :param logs: folder of the run's logs.
    """
    name = f"{transition.group}/{transition.replica}"
    generation = transition.generation
    again = f" (generation {generation})" if generation > 1 else ""
    reason = transition.reason
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
            return f"{name}: {reason}; starting again {when}; logs: {_folder(transition, logs)}"
        case ReplicaEvent.GIVE_UP:
            return f"{name}: failed: {reason}; logs: {_folder(transition, logs)}"
        case ReplicaEvent.FINISHED | ReplicaEvent.STOPPED:
            return f"{name}: {transition.event.value}"
        case ReplicaEvent.UNREADY:
            return f"{name}: not ready{': ' if reason else ''}{reason}"
        case ReplicaEvent.STOP | ReplicaEvent.RESTART | ReplicaEvent.RESET:
            return ""
        case _:
            return f"{name}: {reason}; stopping it"


def _folder(transition: Transition, logs: Path) -> Path:
    return logs / transition.group / str(transition.replica) / f"gen-{transition.generation}"

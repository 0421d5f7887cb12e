"""Lines for people: what happened to a replica, in one line that names the log to look
at."""

from __future__ import annotations

from pathlib import Path

from replicas.core.lives.lifecycle import Event, Transition

__all__ = ["line"]


def line(transition: Transition, *, resume_in_s: float, logs: Path) -> str:
    """One line about this step; empty for steps that tell nothing new.

    :param resume_in_s: seconds until the next generation, for a replica that waits for
        it.
    :param logs: folder of the run's logs.
    """
    name = f"{transition.group}/{transition.replica}"
    generation = transition.generation
    again = f" (generation {generation})" if generation > 1 else ""
    reason = transition.reason
    match transition.event:
        case Event.START | Event.BACKOFF_ELAPSED:
            return f"{name}: starting{again}"
        case Event.READY if transition.start_s is not None:
            return f"{name}: ready after {transition.start_s:.1f} s{again}"
        case Event.READY:
            return f"{name}: ready again{again}"
        case Event.HELD_UP:
            return f"{name}: {reason}"
        case Event.RETRY:
            when = f"in {resume_in_s:.1f} s" if resume_in_s else "now"
            return f"{name}: {reason}; starting again {when}; logs: {_folder(transition, logs)}"
        case Event.GIVE_UP:
            return f"{name}: failed: {reason}; logs: {_folder(transition, logs)}"
        case Event.FINISHED | Event.STOPPED:
            return f"{name}: {transition.event.value}"
        case Event.UNREADY:
            return f"{name}: not ready{': ' if reason else ''}{reason}"
        case Event.STOP | Event.RESTART | Event.RESET:
            return ""
        case _:
            return f"{name}: {reason}; stopping it"


def _folder(transition: Transition, logs: Path) -> Path:
    return logs / transition.group / str(transition.replica) / f"gen-{transition.generation}"

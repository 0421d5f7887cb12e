"""In which order groups start and end, and how many replicas of a group may be away at once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replicas import errors
from replicas.config import GroupConfig
from replicas.status import ReplicaState

__all__ = ["is_done", "is_good", "start_levels", "unmet", "within"]

GOOD: frozenset[ReplicaState] = frozenset({"ready", "finished"})


def start_levels(groups: Mapping[str, GroupConfig]) -> list[list[str]]:
    """Group names by level: each one depends on groups of earlier levels only. They start in this order, and end in reverse.
    A dependency that is not among them (any more: a reload has removed it) keeps nobody.

    :raises replicas.errors.UsageError: the dependencies have a cycle.
    """
    levels: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(groups):
        level = [
            name
            for name, group in groups.items()
            if name not in placed and placed.issuperset(one.group for one in group.depends_on if one.group in groups)
        ]
        if not level:
            raise errors.UsageError("depends_on has a cycle")
        levels.append(level)
        placed.update(level)
    return levels


def is_good(states: Sequence[ReplicaState]) -> bool:
    """Whether every replica is ready, or done."""
    return GOOD.issuperset(states)


def is_done(states: Sequence[ReplicaState]) -> bool:
    """Whether every replica has finished: a group that was scaled to none rests, and is not done."""
    return bool(states) and all(state == "finished" for state in states)


def unmet(group: GroupConfig, states: Mapping[str, Sequence[ReplicaState]]) -> list[str]:
    """The dependencies, as in the config, that keep ``group`` from starting.

    :param states: of every group's replicas. One that was stopped by hand must not be among the finished ones: it is not
        done (:attr:`replicas.supervisor.replica.Replica.standing`).
    """

    def met(name: str, condition: str) -> bool:
        found = states[name]
        return is_done(found) if condition == "finished" else is_good(found)

    return [str(one) for one in group.depends_on if not met(one.group, one.condition)]


def within(states: Mapping[int, ReplicaState], todo: Sequence[int], max_unavailable: int) -> list[int]:
    """Which of ``todo`` a rolling restart may end now, so that never more than ``max_unavailable`` are away by it.

    Replicas that are away anyway (not ready, not done) come first: to end them costs nothing.

    :param states: of all replicas of the group, by index.
    """
    away = {index for index, state in states.items() if state not in GOOD}
    free = [index for index in todo if index in away]
    room = max(0, max_unavailable - len(away))
    return free + [index for index in todo if index not in away][:room]

"""Start order and readiness of groups, and limits of rolling restarts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replicas import errors
from replicas.config.structs import Config, GroupConfig
from replicas.status import ReplicaState

GOOD: frozenset[ReplicaState] = frozenset({"ready", "finished"})
OVER: frozenset[ReplicaState] = frozenset({"failed", "finished"})


def start_levels(groups: Mapping[str, GroupConfig]) -> list[list[str]]:
    """Return the groups' names by level: each depends only on groups of earlier levels.

    The caller starts groups in this order, and ends them in reverse. A dependency on a
    missing group (a reload has removed it) is ignored.

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


def needed_replicas(min_ready: int | None, replicas: int) -> int:
    """Return how many replicas of a group must be ready or finished to be enough.

    :param min_ready: the configured number, of which at most ``replicas`` count; None:
        all.
    :param replicas: the size of the group.
    """
    return replicas if min_ready is None else min(min_ready, replicas)


def is_good(states: Sequence[ReplicaState], min_ready: int | None = None) -> bool:
    """Return True if enough of a group's replicas are ready or finished.

    :param states: of all replicas of the group.
    :param min_ready: how many are enough; None: all.
    """
    return sum(state in GOOD for state in states) >= needed_replicas(min_ready, len(states))


def is_done(states: Sequence[ReplicaState], min_ready: int | None = None) -> bool:
    """Return True if enough replicas (at least one) have finished, and the rest failed.

    A group that was scaled to 0 is idle, not done.

    :param states: of all replicas of the group.
    :param min_ready: how many are enough; None: all.
    """
    finished = states.count("finished")
    return is_over(states) and finished >= max(1, needed_replicas(min_ready, len(states)))


def is_over(states: Sequence[ReplicaState]) -> bool:
    """Return True if all of a group's replicas (one at least) have finished or failed.

    A drained replica counts as neither: an operator may still restart it.

    :param states: of all replicas of the group.
    """
    return bool(states) and OVER.issuperset(states)


def least_left(config: Config, group: GroupConfig) -> int:
    """Return how many replicas of a group must not have failed for the run to go on.

    That is ``min_ready``. Without it, 1 if a channel has the group as a target and
    ``on_failure`` is ``"replica"``: with none left, a source would publish to no target
    forever. Otherwise 0.
    """
    if group.min_ready is not None:
        return group.min_ready
    receives = any(group.name == party.group for channel in config.channels.values() for party in channel.targets)
    return 1 if receives and group.on_failure == "replica" else 0


def is_lost(states: Sequence[ReplicaState], least: int) -> bool:
    """Return True if so many replicas have failed that fewer than ``least`` can still
    run.

    :param states: of all replicas of the group.
    :param least: how many must be left, as of :func:`least_left`; with 0 never True.
    """
    return len(states) - states.count("failed") < min(least, len(states))


def unmet(
    group: GroupConfig, needed: Mapping[str, int | None], states: Mapping[str, Sequence[ReplicaState]]
) -> list[str]:
    """Return the dependencies that keep ``group`` from starting, as in its config: a
    name with its condition.

    Return [] if it may start.

    :param needed: for every group, how many replicas must be ready or done; None: all.
    :param states: of every group's replicas.
    """

    def met(name: str, condition: str) -> bool:
        """Return True if the group called ``name`` meets the condition.

        :param condition: ``finished``: enough of its replicas have finished. Any other:
            enough of them are ready or finished.
        """
        test = is_done if condition == "finished" else is_good
        return test(states[name], needed[name])

    return [str(one) for one in group.depends_on if not met(one.group, one.condition)]


def restartable_now(states: Mapping[int, ReplicaState], todo: Sequence[int], max_unavailable: int) -> list[int]:
    """Return the replicas of ``todo`` that a rolling restart may end now.

    Replicas that are down already (not ready, not done) come first: ending them costs
    nothing.

    :param states: of all replicas of the group, by index.
    :param todo: indices of the replicas that are still to be restarted.
    :param max_unavailable: limit of replicas that may be down at a time.
    """
    away = {index for index, state in states.items() if state not in GOOD}
    free = [index for index in todo if index in away]
    room = max(0, max_unavailable - len(away))
    return free + [index for index in todo if index not in away][:room]

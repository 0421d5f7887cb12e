"""A group: its replicas, and what outlives each of them."""

from __future__ import annotations

from collections.abc import Mapping

from replicas import errors
from replicas.config import GroupConfig
from replicas.core.budget import RestartBudget
from replicas.status import GroupStatus
from replicas.supervisor.replica import Replica

__all__ = ["Group", "start_levels"]


def start_levels(groups: Mapping[str, GroupConfig]) -> list[list[str]]:
    """Group names by level: each one depends on groups of earlier levels only. The dependencies must be acyclic."""
    levels: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(groups):
        level = [name for name, group in groups.items() if name not in placed and placed.issuperset(group.depends_on)]
        if not level:
            raise errors.UsageError("depends_on has a cycle")
        levels.append(level)
        placed.update(level)
    return levels


class Group:
    """A group's replicas, by index, and what outlives each of them."""

    def __init__(self, config: GroupConfig) -> None:
        self.config = config
        self.size = config.replicas
        self.replicas: dict[int, Replica] = {}
        self.budget = RestartBudget(config.restart)
        self.restarts: dict[str, int] = {}
        self.generations: dict[int, int] = {}

    def retire(self, replica: Replica) -> None:
        """Keep what must not be forgotten with a replica that is scaled away."""
        del self.replicas[replica.index]
        self.generations[replica.index] = replica.life.generation
        for reason, count in replica.life.restarts.items():
            self.restarts[reason] = self.restarts.get(reason, 0) + count

    def restarts_by_reason(self) -> dict[str, int]:
        totals = dict(self.restarts)
        for replica in self.replicas.values():
            for reason, count in replica.life.restarts.items():
                totals[reason] = totals.get(reason, 0) + count
        return totals

    @property
    def finished(self) -> bool:
        return all(replica.life.state == "finished" for replica in self.replicas.values())

    @property
    def good(self) -> bool:
        return all(replica.life.state in ("ready", "finished") for replica in self.replicas.values())

    def status(self, now: float) -> GroupStatus:
        """A snapshot; ``now`` in seconds of the monotonic clock."""
        return GroupStatus(
            name=self.config.name,
            launcher=self.config.launcher,
            world_size=self.config.world_size,
            replicas=tuple(replica.status(now) for _, replica in sorted(self.replicas.items())),
            restarts=self.restarts_by_reason(),
            restart_budget_remaining_ratio=self.budget.remaining_ratio(now),
        )

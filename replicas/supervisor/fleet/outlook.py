"""What of a plan would wait for room on the nodes of a run, before it is in use. Pure.

For ``replicas check``: all replicas of a config are placed, in the order of their
start, on the nodes that the status of a run names, as if these were empty. Groups that
never run at the same time (``depends_on = ["other:finished"]``) may have the same GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from replicas.config.structs import Config, GroupConfig
from replicas.core.lives.ordering import start_levels
from replicas.core.lives.placement import Offer, Share, place
from replicas.status import NodeStatus
from replicas.supervisor.fleet.resources import may_grow, need_of

__all__ = ["waiting"]


def waiting(config: Config, nodes: Iterable[NodeStatus]) -> dict[str, str]:
    """What each replica that fits nowhere waits for, in words, by its name.

    The labels of the supervisor's own machine are those of the config. External groups
    are placed by others.
    """
    offers = [_offer(config, node) for node in sorted(nodes, key=lambda one: not one.local) if node.state != "lost"]
    over = _over_before(config.groups)
    taken: dict[str, list[Share]] = {}
    found: dict[str, str] = {}
    for group in (config.groups[name] for names in start_levels(config.groups) for name in names):
        mine = taken.setdefault(group.name, [])
        for index in range(0 if group.external else group.replicas):
            there = [share for name, shares in taken.items() if name not in over[group.name] for share in shares]
            placed = place(need_of(group), offers, there)
            if isinstance(placed, str):
                found[f"{group.name}/{index}"] = placed
            else:
                mine.extend(placed)
    return found


def _offer(config: Config, node: NodeStatus) -> Offer:
    """What the node would offer: its GPUs have other names, and it knows no others."""
    return Offer(
        node=node.name,
        gpus=tuple(map(str, range(node.gpus))),
        cpus=None if node.local and not may_grow(config) else node.cpus,
        memory_nbytes=node.memory_nbytes,
        labels=config.cluster.labels if node.local else node.labels,
        open=node.state == "up",
    )


def _over_before(groups: Mapping[str, GroupConfig]) -> dict[str, frozenset[str]]:
    """The groups that have finished before each of them starts, by its name."""
    found: dict[str, frozenset[str]] = {}
    for name in (name for names in start_levels(groups) for name in names):
        before = groups[name].depends_on
        done = frozenset(one.group for one in before if one.condition == "finished")
        found[name] = done.union(*(found[one.group] for one in before))
    return found

"""Predict where the replicas of a plan would run and which would wait. Pure.

For ``replicas check``: place all replicas of a config, in their start order, on the
nodes of a run's status, as if those were empty. Groups that never run at the same time
(``depends_on = ["other:finished"]``) may have the same GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable

from replicas.config.structs import Config
from replicas.core.lives.ordering import start_levels
from replicas.core.lives.placement import Offer, Share, place
from replicas.status import NodeStatus
from replicas.supervisor.fleet.plans import may_grow, over_before
from replicas.supervisor.fleet.resources import need_of


def oddities(config: Config) -> list[str]:
    """Return, in words, parts of a valid plan that are probably mistakes, or []."""
    channels = config.channels.values()
    found = [
        f"channel {one.name} has no targets to receive its versions"
        for one in channels
        if one.sources and not one.targets
    ]
    on_channels = frozenset[str]().union(*(one.groups for one in channels))
    alone = [
        f"group {name} is on no channel: it shares no weights" for name in config.groups if name not in on_channels
    ]
    return found + (alone if channels else [])


def predict_placement(config: Config, nodes: Iterable[NodeStatus]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Place the replicas of a config on empty nodes, as a run would. Changes nothing.

    External groups are not placed. The supervisor's own machine has the labels of the
    config.

    :returns: by replica (``group/index``), the nodes of those placed, and why the
        others would wait.
    """
    offers = [_offer(config, node) for node in sorted(nodes, key=lambda one: not one.local) if node.state != "lost"]
    over = over_before(config.groups)
    taken: dict[str, list[Share]] = {}
    where: dict[str, tuple[str, ...]] = {}
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
                where[f"{group.name}/{index}"] = tuple(share.node for share in placed)
    return where, found


def _offer(config: Config, node: NodeStatus) -> Offer:
    """Return what an empty node offers to replicas, with invented names of GPUs.

    :param node: the node as in the status of a run.
    """
    return Offer(
        node=node.name,
        gpus=tuple(map(str, range(node.gpus))),
        cpus=None if node.local and not may_grow(config) else node.cpus,
        memory_nbytes=node.memory_nbytes,
        labels=config.cluster.labels if node.local else node.labels,
        open=node.state == "up",
    )

"""Predict where the replicas of a plan would run and which would wait. Pure.

For ``replicas check``: all replicas of a config are placed, in the order of their
start, on the nodes that the status of a run names, as if these were empty. Groups that
never run at the same time (``depends_on = ["other:finished"]``) may have the same GPUs.
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
    """What a valid plan says that its user hardly wants, in words."""
    channels = config.channels.values()
    found = [
        f"channel {one.name} has no targets: nobody receives its versions"
        for one in channels
        if one.sources and not one.targets
    ]
    on_channels = frozenset[str]().union(*(one.groups for one in channels))
    alone = [
        f"group {name} is on no channel: it shares no weights" for name in config.groups if name not in on_channels
    ]
    return found + (alone if channels else [])


def outlook(config: Config, nodes: Iterable[NodeStatus]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The nodes of each replica, and what each replica without a place waits for, in
    words; both by its name.

    The labels of the supervisor's own machine are those of the config. External groups
    are placed by others.
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
    """What the node would offer: its GPUs have other names, and it knows no others."""
    return Offer(
        node=node.name,
        gpus=tuple(map(str, range(node.gpus))),
        cpus=None if node.local and not may_grow(config) else node.cpus,
        memory_nbytes=node.memory_nbytes,
        labels=config.cluster.labels if node.local else node.labels,
        open=node.state == "up",
    )

"""Ask the agents of nodes what ``replicas doctor`` finds on their machines."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping

from msgspec.structs import replace

import replicas
from replicas.status import NodeStatus
from replicas.supervisor.agent.checks import Demand, Finding
from replicas.supervisor.agent.messages import Examine, Examined
from replicas.supervisor.fleet.cluster import Cluster

ANSWER_S = 40.0
"""A driver that hangs takes 25 s of it."""
_numbers = itertools.count(1)


async def examine(cluster: Cluster, demands: Mapping[str, Demand]) -> tuple[Finding, ...]:
    """The findings of these nodes, by what the run asks of each."""
    known = {node.name: node for node in cluster.status()}
    found = await asyncio.gather(*(_examine(cluster, known[name], demand) for name, demand in demands.items()))
    return tuple(replace(one, node=name) for name, each in zip(demands, found, strict=True) for one in each)


async def _examine(cluster: Cluster, node: NodeStatus, demand: Demand) -> tuple[Finding, ...]:
    if node.state in ("away", "lost"):
        text = f"{node.state}: nothing is heard of its agent for {node.heard_age_s:.0f} s"
        remedy = f"look at its machine, or forget it with: replicas drain --node {node.name}"
        return (Finding("node", "problem", text, remedy),)
    order = Examine(number=next(_numbers), demand=demand, supervisor=os.getpid() if node.local else 0)
    try:
        answer = await cluster.ask(node.name, order, Examined, ANSWER_S)
    except TimeoutError:
        text = f"its agent does not answer within {ANSWER_S:.0f} s"
        return (Finding("node", "problem", text, "see what the agent says, and that it is of this release"),)
    release = f"release {node.release}"
    if node.release == replicas.__version__:
        return (Finding("node", "ok", f"{node.state}, {release}"), *answer.findings)
    return (Finding("node", "note", f"{release}, and the supervisor's is {replicas.__version__}"), *answer.findings)

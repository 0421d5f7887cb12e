"""Decide which agents may join."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from replicas.core.lives.node_life import SILENT_S
from replicas.supervisor.agent.messages import PROTOCOL, Hello, Refused
from replicas.supervisor.fleet.handle import NodeEntry

NODES_MAX = 4096


def refusal(nodes: Mapping[str, NodeEntry], hello: Hello, *, local: bool) -> Refused | None:
    """Return why an agent may not join, as the message to send, or None if it may.

    :param nodes: all nodes of the run, by name.
    :param hello: the first message of the agent.
    :param local: it came through the run's own socket.
    """
    if hello.protocol != PROTOCOL:
        text = f"this agent speaks protocol {hello.protocol}, the supervisor {PROTOCOL}: install one release"
        return Refused(message=text)
    if hello.node not in nodes and len(nodes) >= NODES_MAX:
        return Refused(message=f"a run has {NODES_MAX:,} nodes at most", again=True)
    entry = nodes.get(hello.node)
    if entry is not None and entry.hello.incarnation != hello.incarnation:
        if entry.local != local:
            return Refused(message=f"{hello.node} is the supervisor's own node: give it another --name")
        if entry.life.state == "up" and asyncio.get_running_loop().time() - entry.life.heard_at < SILENT_S:
            return Refused(message=f"node {hello.node} has an agent already ({entry.hello.address})", again=True)
    return _offered_twice(nodes, hello)


def _offered_twice(nodes: Mapping[str, NodeEntry], hello: Hello) -> Refused | None:
    """Return a refusal if another agent of this machine offers the same GPUs, or None.

    :param nodes: all nodes of the run, by name. :param hello: of the agent that joins.
    """
    gpus = set(hello.machine.gpus if hello.machine is not None else ())
    for entry in nodes.values():
        beside = entry.name != hello.node and entry.hello.scope == hello.scope and not entry.life.over
        if beside and (shared := sorted(gpus.intersection(entry.machine.gpus))):
            text = (
                f"node {entry.name} is on the same machine and offers its GPUs {', '.join(shared)} already: "
                "give each agent its own CUDA_VISIBLE_DEVICES"
            )
            if entry.local:
                text += ", or set [cluster] local = false"
            return Refused(message=text, again=entry.life.state == "away")
    return None

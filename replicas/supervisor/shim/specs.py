"""Build the spec that a shim starts with: one node of one generation of a replica."""

from __future__ import annotations

import os
import secrets

from replicas import environ
from replicas.config.structs import GroupConfig, LogsConfig
from replicas.linux.processes import MARK
from replicas.linux.sockets import SocketAddress
from replicas.supervisor.fleet.environment import Host
from replicas.supervisor.fleet.node import Node, rank_environment
from replicas.supervisor.shim.orders import NodeSpec

__all__ = ["node_spec", "wants_tee"]


def wants_tee(logs: LogsConfig) -> bool:
    """True if the lines of ranks go to stderr."""
    return logs.tee == "always" or (logs.tee == "auto" and os.isatty(2))


def _door() -> SocketAddress:
    """New address of a forkserver; its name is public, and independent of the mark."""
    return SocketAddress(f"replicas-{secrets.token_hex(16)}", secrets.token_hex(16))


def node_spec(host: Host, group: GroupConfig, index: int, generation: int, node: int) -> NodeSpec:
    """The spec of node ``node``; each call gives it a new mark."""
    nonce = Node.nonce()
    folder = str(host.state.log_dir(group.name, index, generation))
    shared = {**host.environment(), environ.LOG_DIR: folder, MARK: nonce}
    forkserver = str(_door()) if host.on_channel(group.name) else ""
    if forkserver:
        shared[environ.FORKSERVER] = forkserver
    shared |= host.share(group.name, index, node)
    env = rank_environment(group, index, generation, replicas=host.size(group.name), shared=shared)
    return NodeSpec(
        run=host.config.run.name,
        group=group.name,
        replica=index,
        generation=generation,
        node=node,
        nnodes=group.nnodes,
        nproc_per_node=group.nproc_per_node,
        launcher=group.launcher,
        command=group.command,
        env=env,
        cwd=str(group.cwd),
        log_dir=folder,
        stop_timeout_s=group.stop_timeout_s,
        nonce=nonce,
        forkserver=forkserver,
        rendezvous_timeout_s=group.health.start_timeout_s,
        log_max_nbytes=host.config.logs.max_nbytes,
        log_keep=host.config.logs.keep,
        log_keep_generations=host.config.logs.keep_generations,
        tee=wants_tee(host.config.logs),
    )

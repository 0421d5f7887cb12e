"""Hooks for a scheduler that starts the supervisor, such as Slurm or Ray."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from replicas.config.structs import Config
from replicas.config.values import is_loopback
from replicas.supervisor.supervisor import Supervisor


class SchedulerHooks(NamedTuple):
    """Changes that a scheduler makes to a supervisor.

    :ivar adapt: returns the config to use for each config that is read.
    :ivar preempting: signals that announce a preemption, beside SIGUSR1.
    :ivar opened: called on the event loop when agents can join, before the store is up
        and replicas are started.
    :ivar renewed: called with new tokens valid and old ones not yet revoked.
    :ivar nodes: beginnings of the names of nodes that will join, if known.
    """

    adapt: Callable[[Config], Config] = lambda config: config
    preempting: frozenset[signal.Signals] = frozenset()
    opened: Callable[[Supervisor], None] = lambda supervisor: None
    renewed: Callable[[Supervisor], None] = lambda supervisor: None
    nodes: tuple[str, ...] = ()


def on_cluster(config: Config, address: str, min_nodes: int) -> Config:
    """Return a copy of the config in which agents offer all machines, this one too.

    A control port or store on loopback is moved to ``address``, the control port to any
    free port.

    :param address: of this machine, as the others reach it.
    :param min_nodes: number of nodes that must join before any replica starts.
    """
    control, store = config.control, config.store
    if is_loopback(control.host):
        control = replace(control, host=address, port=0)
    if is_loopback(store.bind):
        store = replace(store, bind=address)
    cluster = replace(config.cluster, local=False, min_nodes=min_nodes)
    return replace(config, control=control, store=store, cluster=cluster)


def invitation(supervisor: Supervisor) -> str:
    """Return the secret with which agents join the run: ``token@host:port``.

    The token is the operator token, which also admits to orders and output.
    """
    return f"{supervisor.coordinator.tokens.text('operator')}@{supervisor.endpoint}"

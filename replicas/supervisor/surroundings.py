"""What a scheduler that starts the supervisor, such as Slurm or Ray, needs of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from replicas.config.structs import Config
from replicas.config.values import is_loopback
from replicas.supervisor.supervisor import Supervisor


class Surroundings(NamedTuple):
    """What a scheduler changes about a supervisor.

    :ivar adapt: turns each config that is read into the config to use.
    :ivar preempting: signals that announce a preemption, beside SIGUSR1.
    :ivar opened: called on the event loop when agents can join, before the run's store
        is up and its replicas are started.
    :ivar renewed: called when other tokens are valid, and before old ones end.
    :ivar nodes: how the names of the nodes begin that will join, if that is known.
    """

    adapt: Callable[[Config], Config] = lambda config: config
    preempting: frozenset[signal.Signals] = frozenset()
    opened: Callable[[Supervisor], None] = lambda supervisor: None
    renewed: Callable[[Supervisor], None] = lambda supervisor: None
    nodes: tuple[str, ...] = ()


def on_cluster(config: Config, address: str, min_nodes: int) -> Config:
    """The config of a run whose machines are all offered by agents, this one too.

    Where ports would be open to this machine alone, they are open to the others.

    :param address: of this machine, at which the others reach it.
    :param min_nodes: number of nodes that come together, before any replica starts.
    """
    control, store = config.control, config.store
    if is_loopback(control.host):
        control = replace(control, host=address, port=0)
    if is_loopback(store.bind):
        store = replace(store, bind=address)
    cluster = replace(config.cluster, local=False, min_nodes=min_nodes)
    return replace(config, control=control, store=store, cluster=cluster)


def invitation(supervisor: Supervisor) -> str:
    """The secret with which agents join."""
    return f"{supervisor.coordinator.tokens.text('operator')}@{supervisor.endpoint}"

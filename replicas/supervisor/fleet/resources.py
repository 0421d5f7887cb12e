"""Assign nodes and GPUs to replicas.

:class:`Resources` is the ledger of the nodes that agents offer, this machine among them
(:mod:`replicas.core.lives.placement` chooses). A replica takes a place, with GPUs, for
each of its parts before it starts, or waits in ``pending``; it keeps them across
restarts while their nodes are there, and releases them when it has settled (finished,
failed, or scaled away) and no process of it is left. In a run in which any group asks
for GPUs, a group that does not ask sees none: so no GPU has two owners. Every rank of a
part sees all GPUs of the part, in order: rank ``LOCAL_RANK`` has those from
``LOCAL_RANK * gpus`` on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from replicas import errors
from replicas.common.sizes import some
from replicas.config.structs import Config, GroupConfig
from replicas.core.lives.lifecycle import RUNNING, Transition
from replicas.core.lives.placement import Need, Offer, Share, place
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.fleet.plans import may_grow

_LISTED = 8


class Resources:
    """The ledger of a run's nodes and GPUs, and the environment of each part's share.

    :param local: name of the node of this machine, which is always offered unless the
        config says otherwise.
    """

    def __init__(self, local: str = "local") -> None:
        self.local = local
        self.machine = Machine()
        """This machine."""
        self._machines: dict[str, Machine] = {local: self.machine}
        self._offers: dict[str, Offer] = {local: Offer(node=local)}
        self._held: dict[tuple[str, int], tuple[Share, ...]] = {}
        self._ending: dict[str, Share] = {}
        """Of processes that end, and belong to no replica."""
        self._managed = False
        self._grows = False
        self._min_nodes = 0
        """How many nodes must be there before the first share is taken."""
        self._asked = self._taken = False
        """Whether a share was asked for, and taken."""
        self.expected: tuple[str, ...] = ()
        """How the names of nodes begin that are to join at the start, where known."""

    def plan(self, config: Config, machine: Machine) -> None:
        """Take a config that fits; replicas keep what they hold until its release."""
        self.machine, self._grows = machine, may_grow(config)
        self._managed = any(group.resources.gpus for group in config.groups.values())
        self._min_nodes = 0 if self._taken else config.cluster.min_nodes
        if config.cluster.local:
            there = self._offers.get(self.local)
            self.offer(self.local, machine, config.cluster.labels, open=there is None or there.open)
        else:
            self.withdraw(self.local)

    # ------------------------------------------------------------ nodes

    def offer(self, node: str, machine: Machine, labels: Mapping[str, str], *, open: bool = True) -> None:
        """Add a node, or change what it offers; ``open``: it takes new replicas.

        The ranks of a run that has this machine only share its CPUs, however many.
        """
        self._machines[node] = machine
        self._offers[node] = Offer(
            node=node,
            gpus=machine.gpus,
            cpus=machine.cpus if self._grows or node != self.local else None,
            memory_nbytes=machine.memory_nbytes,
            labels=labels,
            open=open,
        )

    def open(self, node: str, is_open: bool) -> None:
        """Let a node that is offered take new replicas, or none."""
        if (there := self._offers.get(node)) is not None:
            self._offers[node] = msgspec.structs.replace(there, open=is_open)

    def labels(self, node: str) -> Mapping[str, str]:
        """The labels of a node; none: it is not offered."""
        there = self._offers.get(node)
        return there.labels if there is not None else {}

    def withdraw(self, node: str) -> None:
        """Remove a node; replicas keep what they hold of it until its release."""
        self._offers.pop(node, None)
        self._machines.pop(node, None)

    def node(self, group: str, index: int, part: int) -> str:
        """The node of this part of a replica; KeyError: it holds none."""
        return self._held[group, index][part].node

    def on(self, node: str) -> list[tuple[str, int]]:
        """Group and index of the replicas with a part on the node."""
        return sorted(key for key, shares in self._held.items() if any(share.node == node for share in shares))

    # ------------------------------------------------------------ shares

    def free_on(self, node: str) -> tuple[str, ...]:
        """GPUs of a node that no replica holds."""
        shares = [share for share in self._taken_shares() if share.node == node]
        taken = {gpu for share in shares for gpu in share.gpus}
        machine = self._machines.get(node)
        return tuple(gpu for gpu in machine.gpus if gpu not in taken) if machine is not None else ()

    def _taken_shares(self) -> list[Share]:
        return [*(share for held in self._held.values() for share in held), *self._ending.values()]

    @property
    def short(self) -> bool:
        """Whether replicas wait for nodes that are to join before the first start."""
        return self._asked and len(self._offers) < self._min_nodes

    def take(self, group: GroupConfig, index: int) -> str:
        """Give the replica a place for each part; return what it lacks, in words.

        It keeps its nodes while these are there, open and as it needs them.
        """
        if group.external:
            return ""
        self._asked = True
        if self.short:
            return f"{self._min_nodes} nodes ({len(self._offers)} there)"
        self._taken, self._min_nodes = True, 0
        need, key = need_of(group), (group.name, index)
        held = self._held.pop(key, ())
        if held and self._still_good(need, held):
            self._held[key] = held
            return ""
        found = place(need, list(self._offers.values()), self._taken_shares())
        if isinstance(found, str):
            return found
        self._held[key] = found
        return ""

    def too_few(self, within_s: float) -> errors.WorldError:
        """The error for nodes that have not joined in time."""
        there = sorted(self._offers)
        missing = [one for one in self.expected if not any(f"{node}-".startswith(f"{one}-") for node in there)]
        which = f", without {some(missing, _LISTED)}" if missing else f": {some(there, _LISTED)}" if there else ""
        return errors.WorldError(
            f"{len(there)} of {self._min_nodes} nodes (cluster.min_nodes) joined within {within_s:g} s{which}",
            hint="see what the agents of the others say; lower cluster.min_nodes, or raise cluster.join_timeout",
        )

    def keep(self, group: GroupConfig, index: int, shares: tuple[Share, ...]) -> None:
        """Note what a replica holds that an earlier supervisor has started."""
        self._taken, self._min_nodes = True, 0
        self._held[group.name, index] = shares

    def hold(self, name: str, share: Share) -> Callable[[], object]:
        """Hold a share for ending processes of no replica; return what frees it."""
        self._ending[name] = share
        return lambda: self._ending.pop(name, None)

    def shares(self, group: str, index: int) -> tuple[Share, ...]:
        return self._held.get((group, index), ())

    def placed(self, step: Transition) -> Transition:
        """Return the event; where a generation begins, with the nodes that it has."""
        nodes = tuple(share.node for share in self.shares(step.group, step.replica))
        return replace(step, nodes=nodes) if step.after == "starting" and step.before not in RUNNING else step

    def _still_good(self, need: Need, held: tuple[Share, ...]) -> bool:
        def good(share: Share) -> bool:
            offer = self._offers.get(share.node)
            fits = len(share.gpus) == need.gpus and share.memory_nbytes == (need.memory_nbytes or 0)
            return fits and offer is not None and offer.open and need.accepts(offer)

        return len(held) == need.parts and all(good(share) for share in held)

    def misplaced(self, group: GroupConfig, index: int) -> bool:
        """Return True if the replica holds a place that it would not be given now."""
        need, offers = need_of(group), (self._offers.get(share.node) for share in self.shares(group.name, index))
        return any(offer is not None and not need.accepts(offer) for offer in offers)

    def release(self, group: str, index: int) -> None:
        """Free the share of a replica that has settled and has no process left."""
        self._held.pop((group, index), None)

    def environment(self, group: GroupConfig, index: int, node: int = 0) -> dict[str, str]:
        """Variables for the processes of one part, which override all others."""
        variables: dict[str, str] = {}
        if self._managed:
            shares = self._held.get((group.name, index), ())
            share = shares[node] if node < len(shares) else None
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus if share is not None else ())
            machine = self._machines.get(share.node if share is not None else self.local, self.machine)
            if machine.gpu_order:
                variables["CUDA_DEVICE_ORDER"] = machine.gpu_order
        if group.resources.cpu_threads is not None:
            variables["OMP_NUM_THREADS"] = str(group.resources.cpu_threads)
        return variables


def need_of(group: GroupConfig) -> Need:
    """What each part of a replica of the group needs of its node."""
    return Need(
        group=group.name,
        parts=group.nnodes,
        gpus=(group.resources.gpus or 0) * group.nproc_per_node,
        cpus=(group.resources.cpu_threads or 0) * group.nproc_per_node,
        memory_nbytes=group.resources.memory_nbytes,
        labels=group.placement.labels,
        spread=group.placement.spread,
        per_node=group.placement.per_node,
    )

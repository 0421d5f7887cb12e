"""Assign nodes and GPUs to replicas.

:class:`Resources` is the ledger of the nodes that agents offer, including this machine
(:mod:`replicas.core.lives.placement` chooses). A replica takes a place, with GPUs, for
each of its parts before it starts, or waits in ``pending``. It keeps its places across
restarts while their nodes are there, and releases them when it has settled (finished,
failed, or scaled away) and its processes are gone. If any group of a run asks for GPUs,
groups that do not ask see none, so that no GPU has two owners. Every rank of a part
sees all GPUs of the part, in order: rank ``LOCAL_RANK`` has those from
``LOCAL_RANK * gpus`` on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from replicas import errors
from replicas.common.reason import Reason
from replicas.common.sizes import list_text
from replicas.config.structs import Config, GroupConfig
from replicas.core.lives.lifecycle import RUNNING, Transition
from replicas.core.lives.placement import Need, Offer, Share, place
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.fleet.plans import may_grow

_LISTED = 8


class Resources:
    """The ledger of a run's nodes, and of the shares that replicas hold of them.

    A *share* is what one part of a replica holds on one node: GPUs and memory.

    :param local: node name of this machine, which is offered unless the config excludes
        it.
    """

    def __init__(self, local: str = "local") -> None:
        """Begin with an empty offer of this machine, under its node name ``local``."""
        self.local = local
        self.machine = Machine()
        """This machine."""
        self._machines: dict[str, Machine] = {local: self.machine}
        self._offers: dict[str, Offer] = {local: Offer(node=local)}
        self._held: dict[tuple[str, int], tuple[Share, ...]] = {}
        self._ending: dict[str, Share] = {}
        """Shares of ending processes that belong to no replica."""
        self._managed = False
        self._grows = False
        self._min_nodes = 0
        """Number of nodes that must be there before the first share is taken."""
        self._asked = self._taken = False
        """True if a share was requested, and True if one was taken."""
        self.expected: tuple[str, ...] = ()
        """Beginnings of the names of nodes that should join at the start, if known."""

    def plan(self, config: Config, machine: Machine) -> None:
        """Apply a config's limits; offer this machine if the config includes it.

        Replicas keep their shares until a release.

        :param config: the config, which fits. :param machine: the resources of this
            machine.
        """
        self.machine, self._grows = machine, may_grow(config)
        self._managed = any(group.resources.gpus for group in config.groups.values())
        self._min_nodes = config.cluster.min_nodes
        if config.cluster.local:
            there = self._offers.get(self.local)
            self.offer(self.local, machine, config.cluster.labels, open=there is None or there.open)
        else:
            self.withdraw(self.local)

    # ------------------------------------------------------------ nodes

    def offer(self, node: str, machine: Machine, labels: Mapping[str, str], *, open: bool = True) -> None:
        """Add a node for replicas to be placed on, or change its offer.

        In a run on this machine only, CPUs are shared and do not limit placement.

        :param machine: the resources of the node.
        :param open: the node takes new replicas.
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

    def withdraw(self, node: str) -> None:
        """Remove a node. Replicas keep their shares (GPUs, memory) of it for now."""
        self._offers.pop(node, None)
        self._machines.pop(node, None)

    def on(self, node: str) -> list[tuple[str, int]]:
        """Return group and index of the replicas with a part on the node."""
        return sorted(key for key, shares in self._held.items() if any(share.node == node for share in shares))

    # ------------------------------------------------------------ shares

    def free_on(self, node: str) -> tuple[str, ...]:
        """Return the GPUs of a node that no replica, or ending process, holds."""
        shares = [share for share in self._taken_shares() if share.node == node]
        taken = {gpu for share in shares for gpu in share.gpus}
        offer = self._offers.get(node)
        return tuple(gpu for gpu in offer.gpus if gpu not in taken) if offer is not None else ()

    def _taken_shares(self) -> list[Share]:
        """Return the GPUs and memory that replicas and ending processes hold."""
        return [*(share for held in self._held.values() for share in held), *self._ending.values()]

    @property
    def short(self) -> bool:
        """True if replicas wait until ``min_nodes`` nodes of the config have joined."""
        return self._asked and not self._taken and len(self._offers) < self._min_nodes

    def assign_nodes(self, group: GroupConfig, index: int) -> Reason | None:
        """Give each part of the replica a share of a node, which it then holds.

        It keeps the shares that it has while their nodes are there, open and suitable.
        External replicas get none.

        :returns: None, or which nodes or GPUs are missing: the text after "waits for".
        """
        if group.external:
            return None
        self._asked = True
        if self.short:
            return f"{self._min_nodes} nodes ({len(self._offers)} there)"
        self._taken = True
        need, key = need_of(group), (group.name, index)
        held = self._held.pop(key, ())
        kept = held and self._still_good(need, held)
        found = held if kept else place(need, list(self._offers.values()), self._taken_shares())
        if isinstance(found, str):
            return found
        self._held[key] = found
        return None

    def too_few(self, within_s: float) -> errors.WorldError:
        """Return the error for nodes that have not joined in time.

        :param within_s: the time in which they should have joined, in seconds.
        """
        there = sorted(self._offers)
        missing = [one for one in self.expected if not any(f"{node}-".startswith(f"{one}-") for node in there)]
        named = list_text(missing or there, _LISTED)
        which = f", without {named}" if missing else f": {named}" if there else ""
        return errors.WorldError(
            f"{len(there)} of {self._min_nodes} nodes (cluster.min_nodes) joined within {within_s:g} s{which}",
            hint="see the logs of the other agents; lower cluster.min_nodes, or raise cluster.join_timeout",
        )

    def keep(self, group: str, index: int, shares: tuple[Share, ...]) -> None:
        """Record the shares that a running replica of an earlier supervisor holds.

        :param shares: node, GPUs and memory of each of its parts.
        """
        self._taken = True
        self._held[group, index] = shares

    def hold(self, name: str, share: Share) -> Callable[[], object]:
        """Hold a share for ending processes that belong to no replica.

        :param name: identifies the share.
        :returns: a function that frees the share.
        """
        self._ending[name] = share
        return lambda: self._ending.pop(name, None)

    def shares(self, group: str, index: int) -> tuple[Share, ...]:
        """Return node, GPUs and memory of each part of a replica; () if it has none."""
        return self._held.get((group, index), ())

    def placed(self, step: Transition) -> Transition:
        """Return the step with the replica's nodes, if a generation begins with it.

        Other steps (changes of a replica's state) are returned as they are.
        """
        nodes = tuple(share.node for share in self.shares(step.group, step.replica))
        return replace(step, nodes=nodes) if step.after == "starting" and step.before not in RUNNING else step

    def _still_good(self, need: Need, held: tuple[Share, ...]) -> bool:
        """Return True if shares that a replica holds suit it, on open nodes.

        :param need: what each part of the replica needs now.
        :param held: its shares, one for each part.
        """

        def good(share: Share) -> bool:
            """Return True if this share suits the need."""
            offer = self._offers.get(share.node)
            fits = len(share.gpus) == need.gpus and share.memory_nbytes == (need.memory_nbytes or 0)
            return fits and offer is not None and offer.open and need.accepts(offer)

        return len(held) == need.parts and all(good(share) for share in held)

    def misplaced(self, group: GroupConfig, index: int) -> bool:
        """Return True if the node of a part has lost labels that the group needs.

        :param index: of the replica.
        """
        need, offers = need_of(group), (self._offers.get(share.node) for share in self.shares(group.name, index))
        return any(offer is not None and not need.accepts(offer) for offer in offers)

    def release(self, group: str, index: int) -> None:
        """Free the GPUs and memory of a replica that has ended with its processes."""
        self._held.pop((group, index), None)

    def environment(self, group: GroupConfig, index: int, node: int = 0) -> dict[str, str]:
        """Return the variables of GPUs and threads for the processes of one part.

        ``CUDA_VISIBLE_DEVICES`` is among them if any group of the run asks for GPUs.

        :param index: of the replica.
        :param node: number of the part within the replica.
        """
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
    """Return what each part of a replica of the group needs of a node."""
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

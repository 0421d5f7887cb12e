"""Choose the node and the GPUs of each part of a replica. Pure.

An agent *offers* a node: GPUs, CPUs, memory and labels. A replica of ``nnodes`` has as
many *parts*, each one process tree on one node. :func:`place` finds a node for each
part of one replica, or says what is missing. It is deterministic: the same offers and
shares give the same places, so that a history can be repeated.

A node can take a part if it is open, has all labels and as many CPUs as the group asks
for, and has as many GPUs, and as much memory, as the part needs beyond the shares of
others. CPUs are shared: those that others use do not count. Among the nodes that fit,
``spread`` takes the node with the fewest parts of the same group, so that the loss of a
node costs the group little. Otherwise the parts are packed: the node that is left with
the fewest GPUs is taken, so that large replicas find room later. Ties go to the node
that was offered first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from replicas.common.sizes import count_text, size_text


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that a node offers for replicas; ``open``: it takes new parts.

    :ivar gpus: names for ``CUDA_VISIBLE_DEVICES``.
    :ivar cpus: None if the number of CPUs does not matter.
    :ivar memory_nbytes: host memory.
    """

    node: str
    gpus: tuple[str, ...] = ()
    cpus: int | None = None
    memory_nbytes: int = 0
    labels: Mapping[str, str] = {}
    open: bool = True


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that each of the ``parts`` of a replica needs.

    :ivar cpus: how many a node must have; they are not reserved.
    :ivar memory_nbytes: None if it has no limit; no memory is reserved then.
    :ivar spread: prefer nodes with few parts of the same group.
    :ivar per_node: most parts of the group on one node; None: any number.
    """

    group: str
    parts: int = 1
    gpus: int = 0
    cpus: int = 0
    memory_nbytes: int | None = None
    labels: Mapping[str, str] = {}
    spread: bool = False
    per_node: int | None = None

    def accepts(self, offer: Offer) -> bool:
        """Return True if a node may take a part at all: it has the labels and enough
        CPUs.

        GPUs and memory, which other parts may use now, are not looked at.
        """
        return self.has_labels(offer) and self.has_cpus(offer)

    def has_labels(self, offer: Offer) -> bool:
        """Return True if the node has all required labels."""
        return all(offer.labels.get(name) == value for name, value in self.labels.items())

    def has_cpus(self, offer: Offer) -> bool:
        """Return True if the node has enough CPUs, or their number does not matter."""
        return offer.cpus is None or offer.cpus >= self.cpus


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of a node that one part of a replica of ``group`` uses."""

    group: str
    node: str
    gpus: tuple[str, ...] = ()
    memory_nbytes: int = 0


class _Room:
    """Free resources of one node."""

    def __init__(self, offer: Offer, taken: Sequence[Share], group: str) -> None:
        """Compute what is left of a node's offer when others have taken their shares.

        :param taken: shares of parts that run on this node.
        :param group: the group whose parts are counted, against the limit ``per_node``.
        """
        used = {gpu for share in taken for gpu in share.gpus}
        self.offer = offer
        self.gpus = tuple(gpu for gpu in offer.gpus if gpu not in used)
        self.memory_nbytes = offer.memory_nbytes - sum(share.memory_nbytes for share in taken)
        self.parts = sum(share.group == group for share in taken)

    def fits(self, need: Need) -> bool:
        """Return True if GPUs, memory and ``per_node`` allow one more part here."""
        enough = len(self.gpus) >= need.gpus and self.memory_nbytes >= (need.memory_nbytes or 0)
        return enough and (need.per_node is None or self.parts < need.per_node)

    def give(self, need: Need) -> Share:
        """Subtract the resources of one part from this room, and return them as a
        share.

        The caller has checked :meth:`fits`.
        """
        gpus, self.gpus = self.gpus[: need.gpus], self.gpus[need.gpus :]
        memory_nbytes = need.memory_nbytes or 0
        self.memory_nbytes -= memory_nbytes
        self.parts += 1
        return Share(group=need.group, node=self.offer.node, gpus=gpus, memory_nbytes=memory_nbytes)


def place(need: Need, offers: Sequence[Offer], taken: Sequence[Share]) -> tuple[Share, ...] | str:
    """Choose nodes for all parts of a replica: return a share of a node for each part.

    Return instead a text of what is missing if they do not fit. Nothing is reserved:
    the caller adds the shares to ``taken`` of later calls.

    :param need: how many parts there are, and what each of them needs.
    :param offers: the nodes, in order of preference; only those that are open are used.
    :param taken: shares that other replicas have.
    """
    fitting = [offer for offer in offers if offer.open and need.accepts(offer)]
    rooms = [_Room(one, [share for share in taken if share.node == one.node], need.group) for one in fitting]
    shares: list[Share] = []
    while len(shares) < need.parts:
        free = [room for room in rooms if room.fits(need)]
        if not free:
            return _missing(need, offers, taken)
        # min() keeps the first of equals
        best = min(free, key=lambda room: room.parts if need.spread else len(room.gpus))
        shares.append(best.give(need))
    return tuple(shares)


def _missing(need: Need, offers: Sequence[Offer], taken: Sequence[Share]) -> str:
    """Return what the nodes lack for the replica, as text, such as "2 GPUs (1 free)".

    :param need: what each of its parts needs.
    :param offers: all nodes.
    :param taken: shares that other replicas have.
    """
    if not offers:
        return "a node: no agent has joined"
    with_labels = [offer for offer in offers if need.has_labels(offer)]
    marks = [f"{name}={value}" for name, value in sorted(need.labels.items())]
    if not with_labels:
        return f"a node{_having(marks)}"
    there = [offer for offer in with_labels if offer.open]
    if not there:
        return f"a node{_having(marks)} that is not being drained"
    able = [offer for offer in there if need.has_cpus(offer)]
    if not able:
        most = max(offer.cpus or 0 for offer in there)
        return f"{count_text(need.cpus, 'CPU')} (at most {most} on a node){_having(marks)}"
    if len(able) < len(there):
        marks.insert(0, count_text(need.cpus, "CPU"))
    rooms = [_Room(one, [s for s in taken if s.node == one.node], need.group) for one in able]
    return " and ".join(_wanted(need, rooms, named=len(offers) > 1)) + _having(marks)


def _wanted(need: Need, rooms: Sequence[_Room], *, named: bool) -> list[str]:
    """Return texts of what these nodes lack for the replica, one for each resource.

    :param rooms: the free resources of the nodes that have the labels and CPUs.
    :param named: whether the texts name the nodes.
    """
    wanted = []
    if need.per_node is not None and sum(max(0, need.per_node - room.parts) for room in rooms) < need.parts:
        wanted.append(f"a node with fewer than {need.per_node} of the group")
    if need.gpus:
        free = [f"{len(room.gpus)} free{f' on {room.offer.node}' if named else ''}" for room in rooms]
        each = f", {need.gpus} on each of {need.parts} nodes" if need.parts > 1 and named else ""
        wanted.append(f"{count_text(need.gpus * need.parts, 'GPU')}{each} ({', '.join(free)})")
    if need.memory_nbytes and not any(room.memory_nbytes >= need.memory_nbytes for room in rooms):
        most = max(room.memory_nbytes for room in rooms)
        wanted.append(f"{size_text(need.memory_nbytes)} of memory (at most {size_text(most)} free)")
    return wanted


def _having(marks: Sequence[str]) -> str:
    """Return " with " and the listed ``marks``, requirements such as "zone=a", as text.

    Return "" if there are none.
    """
    return f" with {', '.join(marks)}" if marks else ""

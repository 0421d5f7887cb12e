"""Which node each part of a replica runs on, and with which GPUs. Pure.

A *node* is what an agent offers: GPUs, memory and labels. A replica of ``nnodes`` has
as many *parts*, each one process tree on one node. :func:`place` finds a node for each
part of one replica, or says what is missing. It is deterministic: the same offers and
shares give the same places, so that a history can be repeated.

A node can take a part if it is open, has all labels that the group asks for, and has as
many GPUs, and as much memory, as the part needs beyond the shares of others. Among
these, ``spread`` takes the one with the fewest parts of the same group, so that the
loss of a node costs the group little; else the parts are packed: the one that is left
with the fewest GPUs, so that large replicas find room later. Ties go to the node that
was offered first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

__all__ = ["Need", "Offer", "Share", "place"]

_GIB = 1 << 30


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has for replicas; ``open``: it takes new parts.

    :ivar gpus: names for ``CUDA_VISIBLE_DEVICES``.
    :ivar memory_nbytes: host memory.
    """

    node: str
    gpus: tuple[str, ...] = ()
    memory_nbytes: int = 0
    labels: Mapping[str, str] = {}
    open: bool = True


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What each of the ``parts`` of a replica needs.

    :ivar memory_nbytes: None: it has no limit, and none is accounted for.
    :ivar spread: prefer nodes with few parts of the same group.
    :ivar per_node: most parts of the group on one node; None: any number.
    """

    group: str
    parts: int = 1
    gpus: int = 0
    memory_nbytes: int | None = None
    labels: Mapping[str, str] = {}
    spread: bool = False
    per_node: int | None = None

    def accepts(self, offer: Offer) -> bool:
        """Whether the node has all labels that are asked for."""
        return all(offer.labels.get(name) == value for name, value in self.labels.items())


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one part of a replica of ``group`` has of a node."""

    group: str
    node: str
    gpus: tuple[str, ...] = ()
    memory_nbytes: int = 0


class _Room:
    """What is left of one node."""

    def __init__(self, offer: Offer, taken: Sequence[Share], group: str) -> None:
        used = {gpu for share in taken for gpu in share.gpus}
        self.offer = offer
        self.gpus = tuple(gpu for gpu in offer.gpus if gpu not in used)
        self.memory_nbytes = offer.memory_nbytes - sum(share.memory_nbytes for share in taken)
        self.parts = sum(share.group == group for share in taken)

    def fits(self, need: Need) -> bool:
        enough = len(self.gpus) >= need.gpus and self.memory_nbytes >= (need.memory_nbytes or 0)
        return enough and (need.per_node is None or self.parts < need.per_node)

    def give(self, need: Need) -> Share:
        gpus, self.gpus = self.gpus[: need.gpus], self.gpus[need.gpus :]
        memory_nbytes = need.memory_nbytes or 0
        self.memory_nbytes -= memory_nbytes
        self.parts += 1
        return Share(group=need.group, node=self.offer.node, gpus=gpus, memory_nbytes=memory_nbytes)


def place(need: Need, offers: Sequence[Offer], taken: Sequence[Share]) -> tuple[Share, ...] | str:
    """A share for each part of a replica, or what is missing, in words.

    :param offers: the nodes, in the order in which they are preferred.
    :param taken: shares of other replicas.
    """
    fitting = [offer for offer in offers if offer.open and need.accepts(offer)]
    rooms = [_Room(one, [share for share in taken if share.node == one.node], need.group) for one in fitting]
    shares: list[Share] = []
    while len(shares) < need.parts:
        free = [room for room in rooms if room.fits(need)]
        if not free:
            return _missing(need, offers, taken)
        best = min(free, key=lambda room: room.parts if need.spread else len(room.gpus))
        shares.append(best.give(need))
    return tuple(shares)


def _missing(need: Need, offers: Sequence[Offer], taken: Sequence[Share]) -> str:
    if not offers:
        return "a node: no agent has joined"
    with_labels = [offer for offer in offers if need.accepts(offer)]
    labels = ", ".join(f"{name}={value}" for name, value in sorted(need.labels.items()))
    if not with_labels:
        return f"a node with {labels}"
    if not any(offer.open for offer in with_labels):
        return f"a node{f' with {labels}' if labels else ''} that is not being drained"
    rooms = [_Room(one, [s for s in taken if s.node == one.node], need.group) for one in with_labels if one.open]
    wanted = []
    if need.per_node is not None and sum(max(0, need.per_node - room.parts) for room in rooms) < need.parts:
        wanted.append(f"a node with fewer than {need.per_node} of the group")
    if need.gpus:
        free = [f"{len(room.gpus)} free{f' on {room.offer.node}' if len(offers) > 1 else ''}" for room in rooms]
        total = need.gpus * need.parts
        each = f", {need.gpus} on each of {need.parts} nodes" if need.parts > 1 and len(offers) > 1 else ""
        wanted.append(f"{total} GPU{'s' if total != 1 else ''}{each} ({', '.join(free)})")
    if need.memory_nbytes and not any(room.memory_nbytes >= need.memory_nbytes for room in rooms):
        most = max(room.memory_nbytes for room in rooms)
        wanted.append(f"{need.memory_nbytes / _GIB:.1f} GiB of memory (at most {most / _GIB:.1f} GiB free)")
    return " and ".join(wanted) + (f" with {labels}" if labels else "")

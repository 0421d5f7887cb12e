"""Find the heaviest set of groups that may run at the same time. Pure.

Theory of operation
===================

Two groups never run at the same time if one starts after the other has ended. That is a
partial order, and the set is its heaviest *antichain*. By Dilworth's theorem a minimum
cut yields it, in the network with these edges:

* source -> end of g, with the weight of g as capacity;
* start of g -> sink, with the weight of g as capacity;
* each moment -> each later moment, with unbounded capacity.

A cut splits the moments into a near side and a far side, and no moment on the near side
has a later one on the far side. It costs the weight of all groups less that of the
groups whose start is far and whose end is near: those have no order between them. So
the cheapest cut leaves the heaviest such set, in polynomial time; trying all sets would
double the time with each group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

__all__ = ["Moment", "peak"]

Moment = tuple[Literal["start", "end"], str]
_Node = Moment | Literal["source", "sink"]


def peak(names: Iterable[str], weights: Mapping[str, int], after: Mapping[Moment, Sequence[Moment]]) -> set[str]:
    """The heaviest set of groups of which none starts after the end of another.

    :param weights: of the groups, each above 0.
    :param after: the moments directly after each moment, of all groups, including those
        without weight. Acyclic.
    """
    names = list(names)
    rest: dict[_Node, dict[_Node, int]] = {"source": {}, "sink": {}}
    unbounded = sum(weights[name] for name in names) + 1

    def widen(one: _Node, other: _Node, width: int) -> None:
        rest.setdefault(one, {})[other] = width
        rest.setdefault(other, {}).setdefault(one, 0)

    for moment, later in after.items():
        for one in later:
            widen(moment, one, unbounded)
    for name in names:
        widen("source", ("end", name), weights[name])
        widen(("start", name), "sink", weights[name])
    while "sink" in (came := _reached(rest)):
        _push(rest, came)
    return {name for name in names if ("end", name) in came and ("start", name) not in came}


def _reached(rest: Mapping[_Node, Mapping[_Node, int]]) -> dict[_Node, _Node]:
    """Moments that the source reaches, each with its predecessor on a shortest path."""
    came: dict[_Node, _Node] = {"source": "source"}
    todo = deque[_Node](["source"])
    while todo and "sink" not in came:
        one = todo.popleft()
        for other, width in rest[one].items():
            if width and other not in came:
                came[other] = one
                todo.append(other)
    return came


def _push(rest: Mapping[_Node, dict[_Node, int]], came: Mapping[_Node, _Node]) -> None:
    """Send as much flow as fits along the path to the sink."""
    way: list[tuple[_Node, _Node]] = []
    node: _Node = "sink"
    while node != "source":
        way.append((came[node], node))
        node = came[node]
    width = min(rest[one][other] for one, other in way)
    for one, other in way:
        rest[one][other] -= width
        rest[other][one] += width

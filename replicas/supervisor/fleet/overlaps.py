"""Which groups weigh most of those that may run at the same time. Pure.

Theory of operation
===================

Two groups never run at once when the start of one comes after the end of the other.
That is a partial order, and what is looked for is its heaviest *antichain*. By
Dilworth's theorem it is left by a minimum cut, in the network

* source -> end of g, as wide as g weighs;
* start of g -> sink, as wide as g weighs;
* from each moment to those that come after it, without a bound.

A cut parts the moments into a near side and a far side, and nothing on the near side
has anything after it on the far side. It costs the weight of all groups less that of
the groups whose start is far and whose end is near: those have no order between them.
So the cheapest cut leaves the heaviest of such sets, in polynomial time; trying all
sets takes twice as long for each group more.
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
    :param after: what comes directly after a moment; of all groups, also those that
        weigh nothing. Without circles.
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
    """What can be reached from the source, each with where one came from, by the
    shortest way."""
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
    """As much as fits through the way to the sink."""
    way: list[tuple[_Node, _Node]] = []
    node: _Node = "sink"
    while node != "source":
        way.append((came[node], node))
        node = came[node]
    width = min(rest[one][other] for one, other in way)
    for one, other in way:
        rest[one][other] -= width
        rest[other][one] += width

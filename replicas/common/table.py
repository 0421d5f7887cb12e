"""State machines as transition tables.

A :class:`Table` is data: for each state the next ones, and the events that lead there.
It computes the next state, refuses any other event (always a bug of the caller), and
draws itself, so that the diagram in the documentation cannot differ from the code.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from replicas.errors import InternalError

__all__ = ["InvalidStep", "Table"]

S = TypeVar("S", bound=str)
E = TypeVar("E", bound=str)


class InvalidStep(InternalError):
    """An event that cannot happen in this state."""


class Table(Generic[S, E]):
    """The transition table of one state machine.

    :param what: the thing whose states these are, for messages and titles.
    :param start: initial states.
    :param steps: the next states of each state, with the events that lead there.
    """

    def __init__(self, what: str, start: tuple[S, ...], steps: Mapping[S, Mapping[S, tuple[E, ...]]]) -> None:
        self.what = what
        self.start = start
        self.rows = {
            (state, event): after for state, ends in steps.items() for after, events in ends.items() for event in events
        }

    @property
    def states(self) -> list[S]:
        """Every state, in the order in which the table names them."""
        named = [*self.start, *(state for (before, _), after in self.rows.items() for state in (before, after))]
        return list(dict.fromkeys(named))

    def next(self, state: S, event: E) -> S:
        """Return the state after ``event``.

        :raises InvalidStep: there is no such row.
        """
        after = self.rows.get((state, event))
        if after is None:
            possible = ", ".join(known for before, known in self.rows if before == state) or "nothing"
            raise InvalidStep(f"{self.what} that is {state} cannot take {event}; possible: {possible}")
        return after

    def allows(self, state: S, event: E) -> bool:
        """Return whether there is a row for ``event`` in ``state``."""
        return (state, event) in self.rows

    def final(self, state: S) -> bool:
        """Return whether ``state`` has no successor."""
        return all(before != state for before, _ in self.rows)

    def diagram(self) -> str:
        """Return the table as a Mermaid state diagram."""
        lines = ["stateDiagram-v2", *(f"    [*] --> {state}" for state in self.start)]
        edges: dict[tuple[S, S], list[E]] = {}
        for (before, event), after in self.rows.items():
            edges.setdefault((before, after), []).append(event)
        for (before, after), events in edges.items():
            names = ", ".join(cast("list[str]", events)).replace("_", " ")
            lines.append(f"    {before} --> {after}: {names}")
        lines += [f"    {state} --> [*]" for state in self.states if self.final(state)]
        return "\n".join(lines)

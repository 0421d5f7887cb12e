"""State machines as tables: what can happen in which state, and nothing else.

A table is data: rows of (state, event) → state. It moves a state on, refuses what it
has no row for (a bug of the caller, never a surprise of the world) and draws itself, so
that the picture in the documentation cannot differ from the code.
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
    """One machine.

    :param what: what it is the life of, for messages and titles.
    :param start: states in which such a thing may begin.
    :param rows: next state by (state, event).
    """

    def __init__(self, what: str, start: tuple[S, ...], rows: Mapping[tuple[S, E], S]) -> None:
        self.what = what
        self.start = start
        self.rows = dict(rows)

    @property
    def states(self) -> list[S]:
        """Every state, in the order in which the table names them."""
        named = [*self.start, *(state for (before, _), after in self.rows.items() for state in (before, after))]
        return list(dict.fromkeys(named))

    def next(self, state: S, event: E) -> S:
        """The state after ``event``.

        :raises InvalidStep: there is no such row.
        """
        after = self.rows.get((state, event))
        if after is None:
            possible = ", ".join(known for before, known in self.rows if before == state) or "nothing"
            raise InvalidStep(f"{self.what} that is {state} cannot take {event}; possible: {possible}")
        return after

    def allows(self, state: S, event: E) -> bool:
        """Whether there is a row for ``event`` in ``state``."""
        return (state, event) in self.rows

    def final(self, state: S) -> bool:
        """Whether nothing follows."""
        return all(before != state for before, _ in self.rows)

    def diagram(self) -> str:
        """The table as a Mermaid state diagram."""
        lines = ["stateDiagram-v2", *(f"    [*] --> {state}" for state in self.start)]
        edges: dict[tuple[S, S], list[E]] = {}
        for (before, event), after in self.rows.items():
            edges.setdefault((before, after), []).append(event)
        for (before, after), events in edges.items():
            names = ", ".join(cast("list[str]", events)).replace("_", " ")
            lines.append(f"    {before} --> {after}: {names}")
        lines += [f"    {state} --> [*]" for state in self.states if self.final(state)]
        return "\n".join(lines)

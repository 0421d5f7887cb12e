"""State machines as transition tables.

A :class:`Table` is data: for each state the next states, and the events that lead
there. It returns the next state, and refuses other events, which are bugs of the
caller. The diagrams in docs/protocol.md are drawn from it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from replicas.errors import InternalError

S = TypeVar("S", bound=str)
E = TypeVar("E", bound=str)
A = TypeVar("A", bound=str)


class InvalidStep(InternalError):
    """The state has no transition for this event."""


class Table(Generic[S, E]):
    """The transition table of one state machine: no present state, only the rules."""

    def __init__(self, what: str, start: tuple[S, ...], steps: Mapping[S, Mapping[S, tuple[E, ...]]]) -> None:
        """Turn ``steps`` into rows from (state, event) to the next state.

        Check nothing.

        :param what: the thing that has these states, for messages and titles.
        :param start: initial states.
        :param steps: the next states of each state, with the events that lead there.
        """
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
        """Return the state that follows ``state`` after ``event``; change nothing.

        :raises InvalidStep: ``event`` is not allowed in that state.
        """
        after = self.rows.get((state, event))
        if after is None:
            possible = ", ".join(known for before, known in self.rows if before == state) or "nothing"
            raise InvalidStep(f"{self.what} that is {state} cannot take {event}; possible: {possible}")
        return after

    def allows(self, state: S, event: E) -> bool:
        """Return True if :meth:`next` has a state for ``event`` in ``state``."""
        return (state, event) in self.rows

    def final(self, state: S) -> bool:
        """Return True if no event leads out of ``state``."""
        return all(before != state for before, _ in self.rows)


class StateMachine(Generic[S, E, A]):
    """A present state, ``now``, that follows a table, with actions at transitions."""

    def __init__(self, table: Table[S, E], actions: Mapping[tuple[S, E], tuple[A, ...]]) -> None:
        """Begin in the table's first initial state.

        :param actions: names of the actions, in order, by state and event; missing
            entries mean no action.
        """
        self._table, self._actions = table, actions
        self.now: S = table.start[0]

    def step(self, event: E) -> tuple[A, ...]:
        """Enter the state that follows :attr:`now` after ``event``.

        Return the actions of this transition, in order, for the caller to carry out;
        empty if it has none.

        :raises InvalidStep: the table does not allow the event in this state, which
            stays.
        """
        before, self.now = self.now, self._table.next(self.now, event)
        return self._actions.get((before, event), ())

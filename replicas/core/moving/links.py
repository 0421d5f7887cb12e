"""Links between hosts: which do not work, and when they are used again.

A link is a pair of addresses. A fault belongs to the link, not to a member: both ends
may work with all others. Members with one address have no link between them.

A link is *in doubt* when members could not connect over it, or a transfer stood still
while bytes were under way over it. Other links are then used as long as there are any,
so bytes go over a member that reaches both ends (:mod:`replicas.core.moving.paths`).
The doubt lasts longer each time. A publish that other members wait for does not try a
link in doubt; catch-up does, which delays no other member. A version that arrived over
the link ends the doubt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replicas.common.backoff import Backoff
from replicas.core.members.member_state import MemberState
from replicas.core.members.roster import Roster

Pairs = Iterable[tuple[str, str]]
"""Pairs of addresses, in either order."""

DOUBT = Backoff(2.0, 300.0)


@dataclass(slots=True)
class Doubt:
    """Something that failed, and is not used for a while: longer after each failure."""

    lasts: Backoff
    why: str = ""
    _count: int = 0
    _until: float = 0.0

    def note_failed(self, why: str, now: float) -> None:
        """Record a failure: the thing is not to be used for a while from now on.

        That time grows with each failure, until :meth:`note_worked`. Failures within it
        restart it, but do not make it grow.

        :param why: the failure, as text.
        :param now: when it happened.
        """
        self._count += not self.holds(now)
        self.why, self._until = why, now + self.lasts.after(self._count)

    def note_worked(self) -> None:
        """End the doubt, as the thing works; the next doubt is short again."""
        self._count, self._until = 0, 0.0

    def holds(self, now: float) -> bool:
        """Return True while the thing that failed is not to be used."""
        return now < self._until


class Links:
    """The links (pairs of addresses) of one channel that are avoided after a fault."""

    def __init__(self, roster: Roster) -> None:
        """Start without faults; the members' addresses are those of the roster."""
        self._roster = roster
        self._doubts: dict[frozenset[str], Doubt] = {}

    def __bool__(self) -> bool:
        """True if any link has had a fault that is not cleared."""
        return bool(self._doubts)

    def works(self, one: MemberState, other: MemberState, now: float) -> bool:
        """Return True if the link between two members is not in doubt."""
        doubt = self._doubts.get(frozenset((one.address, other.address)))
        return doubt is None or not doubt.holds(now)

    def why(self, state: MemberState) -> str:
        """Return why links of a member are in doubt, as text; "" if none is.

        Doubts that are over, but not cleared, count, too.
        """
        found = [doubt.why for link, doubt in self._doubts.items() if state.address in link]
        return "; ".join(dict.fromkeys(found))

    def doubt(self, pairs: Pairs, why: str, now: float) -> None:
        """Avoid links for a while: no connection was made, or no byte moved, over them.

        The time grows with each doubt of a link, until :meth:`clear_doubt`.

        :param pairs: the two addresses of each link.
        :param why: the failure, as text.
        """
        for link in _links(pairs):
            self._doubts.setdefault(link, Doubt(DOUBT)).note_failed(why, now)

    def clear_doubt(self, pairs: Pairs) -> None:
        """Use links again, as a version has arrived over them.

        :param pairs: the two addresses of each link.
        """
        for link in _links(pairs) & self._doubts.keys():
            del self._doubts[link]

    def tick(self) -> None:
        """Forget the doubts of links to addresses that no member has now."""
        if self._doubts:
            there = {state.address for state in self._roster}
            self._doubts = {link: doubt for link, doubt in self._doubts.items() if link <= there}


def _links(pairs: Pairs) -> set[frozenset[str]]:
    """Return the pairs as links; a pair of two equal addresses is not a link."""
    return {frozenset(pair) for pair in pairs if len(set(pair)) == 2}

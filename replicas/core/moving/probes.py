"""Finding whom it is up to when a process group fails although all its members are
alive.

Theory of operation
===================

Each of a set of pairs forms a lane of two, all at the same time, and moves a few bytes
through it. A pair that has not managed by :data:`PROBE_TIMEOUT_S` is *bad*. Up to
:data:`ALL_PAIRS` members every pair is tried, beyond that each member with the two
after it in a ring: still four pairs for each, enough to tell one that fails with
everybody from one that failed with that one.

The culprits explain the bad pairs: as long as there are any, the member with most of
them is one, and its pairs are explained. Between two equals (a single bad pair) it is
the one that is named later in ``members``: receivers come after the sender there, and
one receiver is of less weight to the others than the sender of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from replicas import errors
from replicas.core.moving.lanes import Lane, Lanes
from replicas.messages import Backend
from replicas.messages.identity import Member

__all__ = ["Probe", "culprits"]

PROBE_TIMEOUT_S = 4.0
ALL_PAIRS = 5


class Probe:
    """One round of pairs. ``on_end(culprits, now)`` is called once: why, by member.
    ``pairs``: those to try."""

    def __init__(
        self,
        lanes: Lanes,
        members: Sequence[Member],
        backend: Backend,
        now: float,
        on_end: Callable[[Mapping[Member, str], float], None],
        *,
        pairs: Sequence[tuple[Member, Member]] | None = None,
    ) -> None:
        self._lanes = lanes
        self._members = tuple(member for member in members if member in lanes.roster)
        self._on_end = on_end
        self._deadline = now + PROBE_TIMEOUT_S
        self._open: dict[str, Lane] = {}
        self._bad: dict[tuple[Member, Member], str] = {}
        self.over = False
        for pair in self._pairs() if pairs is None else pairs:
            lane = lanes.open(lanes.roster.states(pair), backend, now, PROBE_TIMEOUT_S, probe=True)
            self._open[lane.name] = lane
        self._end_if_done(now)

    def _pairs(self) -> list[tuple[Member, Member]]:
        members, count = self._members, len(self._members)
        if count <= ALL_PAIRS:
            return [(members[i], members[k]) for i in range(count) for k in range(i + 1, count)]
        return [(members[i], members[(i + step) % count]) for i in range(count) for step in (1, 2)]

    def with_member(self, member: Member) -> bool:
        """Whether it waits for a pair with this member."""
        return any(member in lane.members for lane in self._open.values())

    def formed(self, lane: Lane, now: float) -> None:
        """This pair works."""
        if self._open.pop(lane.name, None) is not None:
            self._lanes.close(lane)
            self._end_if_done(now)

    def failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        """This pair does not."""
        if self._open.pop(lane.name, None) is not None:
            self._bad[lane.members[0], lane.members[1]] = error.message
            self._lanes.close(lane)
            self._end_if_done(now)

    def lost(self, member: Member, now: float) -> None:
        """A member is gone: its pairs say nothing."""
        self._bad = {pair: why for pair, why in self._bad.items() if member not in pair}
        self._forget([lane for lane in self._open.values() if member in lane.members], now)

    def tick(self, now: float) -> None:
        """What has not formed by the deadline is bad."""
        if now > self._deadline:
            self._forget([lane for lane in self._open.values() if self._lanes.waits_for_store(lane)], now)
            for lane in list(self._open.values()):
                late = [member.name for member in lane.members if member not in lane.formed_by]
                text = f"no process group within {PROBE_TIMEOUT_S:g} s; missing: {', '.join(late)}"
                self.failed(lane, errors.DeadlineExceeded(text, phase="probe", members=late), now)

    def store_moved(self, now: float) -> None:
        """What is forming over the old store never will: that says nothing of its
        pair."""
        self._forget([lane for lane in self._open.values() if lane.state == "forming"], now)

    def _forget(self, lanes: Sequence[Lane], now: float) -> None:
        for lane in lanes:
            del self._open[lane.name]
            self._lanes.close(lane)
        self._end_if_done(now)

    def abandon(self) -> None:
        """Close every lane, and end without a word."""
        self.over = True
        for lane in self._open.values():
            self._lanes.close(lane)
        self._open.clear()

    def _end_if_done(self, now: float) -> None:
        if not self._open and not self.over:
            self.over = True
            self._on_end(culprits(self._members, self._bad), now)


def culprits(members: Sequence[Member], bad: Mapping[tuple[Member, Member], str]) -> dict[Member, str]:
    """The fewest members that explain the bad pairs (greedily), each with the reason of
    one of them."""
    left = dict(bad)
    found: dict[Member, str] = {}
    while left:
        worst = max(members, key=lambda member: (sum(member in pair for pair in left), members.index(member)))
        others = [other.name for pair in left if worst in pair for other in pair if other != worst]
        why = next(why for pair, why in left.items() if worst in pair)
        found[worst] = f"no process group of it works with {', '.join(sorted(others))}: {why}"
        left = {pair: why for pair, why in left.items() if worst not in pair}
    return found

"""Find the faulty member of a process group whose members are all alive.

Theory of operation
===================

Pairs of members form lanes of two, all at the same time, and move a few bytes through
them. A pair that has not succeeded within :data:`PROBE_TIMEOUT_S` is *bad*. Up to
:data:`ALL_PAIRS` members every pair is tried, beyond that each member with the next two
in a ring: still four pairs for each, enough to tell a member that fails with all others
from one that failed with that member only.

The culprits are chosen to explain the bad pairs: as long as any are left, the member in
most of them is a culprit, and its pairs are explained. A tie (a single bad pair) goes
to the member that is later in ``members``: receivers come after the sender there, and
losing one receiver costs less than losing the sender.
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
    """One round of pairs.

    :param pairs: those to try; None: chosen from ``members``.
    :param on_end: called once as ``on_end(culprits, now)``, with the reason by member.
    """

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
        """Return whether a pair with this member is still open."""
        return any(member in lane.members for lane in self._open.values())

    def formed(self, lane: Lane, now: float) -> None:
        """Note that this pair works."""
        if self._open.pop(lane.name, None) is not None:
            self._lanes.close(lane)
            self._end_if_done(now)

    def failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        """Note that this pair is bad."""
        if self._open.pop(lane.name, None) is not None:
            self._bad[lane.members[0], lane.members[1]] = error.message
            self._lanes.close(lane)
            self._end_if_done(now)

    def lost(self, member: Member, now: float) -> None:
        """Discard the pairs of a lost member: they prove nothing."""
        self._bad = {pair: why for pair, why in self._bad.items() if member not in pair}
        self._forget([lane for lane in self._open.values() if member in lane.members], now)

    def tick(self, now: float) -> None:
        """Mark the pairs bad that have not formed by the deadline."""
        if now > self._deadline:
            self._forget([lane for lane in self._open.values() if self._lanes.waits_for_store(lane)], now)
            for lane in list(self._open.values()):
                late = [member.name for member in lane.members if member not in lane.formed_by]
                text = f"no process group within {PROBE_TIMEOUT_S:g} s; missing: {', '.join(late)}"
                self.failed(lane, errors.DeadlineExceeded(text, phase="probe", members=late), now)

    def store_moved(self, now: float) -> None:
        """Discard pairs still forming over the old store: they prove nothing."""
        self._forget([lane for lane in self._open.values() if lane.state == "forming"], now)

    def _forget(self, lanes: Sequence[Lane], now: float) -> None:
        for lane in lanes:
            del self._open[lane.name]
            self._lanes.close(lane)
        self._end_if_done(now)

    def abandon(self) -> None:
        """Close every lane, and end without calling ``on_end``."""
        self.over = True
        for lane in self._open.values():
            self._lanes.close(lane)
        self._open.clear()

    def _end_if_done(self, now: float) -> None:
        if not self._open and not self.over:
            self.over = True
            self._on_end(culprits(self._members, self._bad), now)


def culprits(members: Sequence[Member], bad: Mapping[tuple[Member, Member], str]) -> dict[Member, str]:
    """Return the fewest members (found greedily) that explain the bad pairs.

    Each comes with the reason of one of its pairs.
    """
    left = dict(bad)
    found: dict[Member, str] = {}
    while left:
        worst = max(members, key=lambda member: (sum(member in pair for pair in left), members.index(member)))
        others = [other.name for pair in left if worst in pair for other in pair if other != worst]
        why = next(why for pair, why in left.items() if worst in pair)
        found[worst] = f"no process group of it works with {', '.join(sorted(others))}: {why}"
        left = {pair: why for pair, why in left.items() if worst not in pair}
    return found

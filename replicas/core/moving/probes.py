"""Find the faulty member of a process group whose members are all alive.

Theory of operation
===================

Pairs of members form lanes of two, all at the same time, and move a few bytes through
them. A pair that has not succeeded within :data:`PROBE_TIMEOUT_S` is *bad*. Up to
:data:`ALL_PAIRS` members every pair is tried, beyond that each member with the next two
in a ring: still four pairs for each, enough to tell a member that fails with all others
from one that failed with that member only. A pair with a lost member proves nothing;
nor does any pair when the store is replaced meanwhile.

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

__all__ = ["MAX_PROBES", "Probe", "culprits"]

OnEnd = Callable[[Mapping[Member, str] | None, float], None]

MAX_PROBES = 3
"""Of one transfer or operation."""
PROBE_TIMEOUT_S = 4.0
ALL_PAIRS = 5


class Probe:
    """One round of pairs.

    :param pairs: those to try; None: chosen from ``members``.
    :param on_end: called once as ``on_end(culprits, now)``, with the reason by member;
        None: nothing was proved.
    """

    def __init__(
        self,
        lanes: Lanes,
        members: Sequence[Member],
        backend: Backend,
        now: float,
        on_end: OnEnd,
        *,
        pairs: Sequence[tuple[Member, Member]] | None = None,
    ) -> None:
        self._lanes = lanes
        self._members = tuple(member for member in members if member in lanes.roster)
        self._on_end = on_end
        self._bad: dict[tuple[Member, ...], str] = {}
        self.over = False
        pairs = self._pairs() if pairs is None else pairs
        self._proves = not pairs
        self._open = [
            lanes.open(lanes.roster.states(pair), backend, self, now, PROBE_TIMEOUT_S, probe=True) for pair in pairs
        ]
        self._end_if_done(now)

    def _pairs(self) -> Sequence[tuple[Member, Member]]:
        members, count = self._members, len(self._members)
        if count <= ALL_PAIRS:
            return [(members[i], members[k]) for i in range(count) for k in range(i + 1, count)]
        return [(members[i], members[(i + step) % count]) for i in range(count) for step in (1, 2)]

    def lane_formed(self, lane: Lane, now: float) -> None:
        """Note that this pair works."""
        self._proves = True
        self._close(lane, now)

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        """Note that this pair is bad."""
        self._proves = True
        self._bad[lane.members] = error.message
        self._close(lane, now)

    def lane_void(self, lane: Lane, now: float) -> None:
        """Discard the pair of a lost member, or all pairs over a lost store."""
        if not all(member in self._lanes.roster for member in lane.members):
            self._close(lane, now)
        else:
            self.abandon()
            self._on_end(None, now)

    def _close(self, lane: Lane, now: float) -> None:
        self._open.remove(lane)
        self._lanes.close(lane)
        self._end_if_done(now)

    def abandon(self) -> None:
        """Close every lane, and end without calling ``on_end``."""
        self.over = True
        for lane in self._open:
            self._lanes.close(lane)

    def _end_if_done(self, now: float) -> None:
        if self._open or self.over:
            return
        self.over = True
        roster = self._lanes.roster
        bad = {pair: why for pair, why in self._bad.items() if all(member in roster for member in pair)}
        self._on_end(culprits(self._members, bad) if self._proves else None, now)


def culprits(members: Sequence[Member], bad: Mapping[tuple[Member, ...], str]) -> dict[Member, str]:
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

"""Progress of a process group, from the reports of its members while they move bytes.

Every member reports about once a second which bytes it has moved
(:class:`~replicas.messages.LaneMoved`). A group *stands still* when all members that
are not done have reported recently that nothing moves, for longer than a link may take
to recover. Slow bytes are not a failure, and a member without reports proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from replicas.messages import LaneMoved
from replicas.messages.identity import Member

STILL_S = 3.0
"""Without progress for this long, a lane stands still.

TCP resends a lost packet after 0.2, 0.6 and 1.4 s.
"""
STILL_TRIPS = 3.0
"""On a link with long round trips: without progress for this many of them."""
FRESH_S = 2.5
"""Older reports are ignored, in seconds."""


class LaneProgress:
    """Progress of the current attempt in one process group."""

    def __init__(self) -> None:
        """Start without reports."""
        self._reports: dict[Member, tuple[float, LaneMoved]] = {}
        """The last report of each member, with its time of arrival."""

    def restart(self) -> None:
        """Forget all reports: another attempt is measured from now on."""
        self._reports.clear()

    def moved(self, member: Member, message: LaneMoved, now: float) -> None:
        """Store a member's report, as the last one, with the time at which it came."""
        self._reports[member] = now, message

    def stands_still(self, awaited: Iterable[Member], now: float) -> bool:
        """Return True if no byte moves in the group, by reports that are recent at
        ``now``.

        :param awaited: members that are not done; each must have reported that nothing
            moves.
        """
        reports = [self._reports.get(member) for member in awaited]
        return bool(reports) and all(one is not None and now - one[0] <= FRESH_S and _still(one[1]) for one in reports)

    def held_up(self) -> set[tuple[Member, str]]:
        """Return the connections, as (member, peer address), on which bytes wait."""
        return {(member, address) for member, (_, last) in self._reports.items() for address in last.held_up}

    def still_s(self) -> float:
        """Return for how many seconds no byte has moved, by the last reports.

        Return 0 if there is no report.
        """
        return min((last.still_s for _, last in self._reports.values()), default=0.0)


def _still(last: LaneMoved) -> bool:
    """Return True if a member's report says that no byte has moved for too long."""
    return last.still_s >= max(STILL_S, STILL_TRIPS * last.rtt_s)

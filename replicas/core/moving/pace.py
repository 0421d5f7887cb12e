"""Progress of a process group, from what its members report while they move bytes.

Every member reports about once a second what it has moved
(:class:`~replicas.messages.LaneMoved`). A group *stands still* when all members that
are not done have reported lately that nothing moves, for longer than a link may take to
recover. Slow bytes are no failure, and a member that reports nothing proves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from replicas.messages import LaneMoved
from replicas.messages.identity import Member

STILL_S = 3.0
"""Without progress for this long, a lane stands still.

TCP resends a lost packet after 0.2, 0.6 and 1.4 s.
"""
STALL_S = 1.0
"""Without a byte for this long, no rate is trusted."""
STILL_TRIPS = 3.0
"""On a link with long round trips: this many of them."""
FRESH_S = 2.5
"""Older reports prove nothing."""
REPORTS = 4
"""Number of reports kept for each member."""
RATE_S = 0.7
"""A rate is measured over at least this time,"""
RATE_TRIPS = 10.0
"""and this many round trips, which a TCP connection needs to reach its rate."""


class _Reports:
    """The last reports of one member, each with its time of arrival."""

    def __init__(self) -> None:
        self.all: deque[tuple[float, LaneMoved]] = deque(maxlen=REPORTS)
        self.first_at = 0.0

    @property
    def at(self) -> float:
        return self.all[-1][0]

    @property
    def last(self) -> LaneMoved:
        return self.all[-1][1]

    @property
    def still(self) -> bool:
        return self.last.still_s >= max(STILL_S, STILL_TRIPS * self.last.rtt_s)

    def held_up(self) -> frozenset[str]:
        """Return the addresses that held it up in both of its last two reports."""
        if len(self.all) < 2 or self.at - self.first_at < RATE_TRIPS * self.last.rtt_s:
            return frozenset()
        return frozenset(self.all[-1][1].held_up) & frozenset(self.all[-2][1].held_up)

    def rate(self) -> float | None:
        """Return the highest recent receive rate in bytes a second; None: unknown."""
        found = [
            (later.received - earlier.received) / (end - start)
            for (start, earlier), (end, later) in zip(self.all, list(self.all)[1:], strict=False)
            if end - start >= RATE_S / 2
        ]
        known = self.at - self.first_at >= max(RATE_S, RATE_TRIPS * self.last.rtt_s)
        return max(found, default=None) if known else None


class Pace:
    """Progress of the current attempt in one process group."""

    def __init__(self) -> None:
        self._reports: dict[Member, _Reports] = {}

    def begin(self) -> None:
        """Start measuring another attempt."""
        self._reports.clear()

    def moved(self, member: Member, message: LaneMoved, now: float) -> None:
        reports = self._reports.setdefault(member, _Reports())
        reports.first_at = reports.first_at or now
        reports.all.append((now, message))

    def stands_still(self, awaited: Collection[Member], now: float) -> bool:
        """Return whether nothing moves at ``awaited``, the members not yet done."""
        return bool(awaited) and all(one is not None and one.still for one in map(self._fresh(now).get, awaited))

    def gets_on(self, awaited: Iterable[Member], now: float) -> bool:
        """Return whether any awaited member reports progress."""
        fresh = self._fresh(now)
        return any(member in fresh and not fresh[member].still for member in awaited)

    def held_up_lately(self, awaited: Iterable[Member], now: float) -> list[tuple[Member, str]]:
        """Return (member, peer address) of awaited members held up lately."""
        fresh = self._fresh(now)
        return [(one, address) for one in awaited if one in fresh for address in sorted(fresh[one].held_up())]

    def held_up(self) -> set[tuple[Member, str]]:
        """Return (member, peer address) where bytes under way are held up."""
        return {(member, address) for member, one in self._reports.items() for address in one.last.held_up}

    def still_s(self) -> float:
        """Return for how many seconds nothing has moved, by the last reports."""
        return min((one.last.still_s for one in self._reports.values()), default=0.0)

    def received(self, member: Member) -> int:
        """Return the bytes that ``member`` has received."""
        reports = self._reports.get(member)
        return reports.last.received if reports is not None else 0

    def stalls(self, member: Member) -> bool:
        """Return whether nothing moves at it now: its link may be slow or broken."""
        reports = self._reports.get(member)
        return reports is not None and reports.last.still_s >= STALL_S

    def rate(self, member: Member) -> float | None:
        """Return its receive rate in bytes a second; None: unknown."""
        reports = self._reports.get(member)
        return reports.rate() if reports is not None else None

    def _fresh(self, now: float) -> dict[Member, _Reports]:
        return {member: one for member, one in self._reports.items() if now - one.at <= FRESH_S}

"""How a process group gets on: what its members say while they are at work in it.

Every member tells about once a second what it has moved
(:class:`~replicas.messages.LaneMoved`). A group *stands still* when all of those that
are still waited for have said lately that nothing moves at them, for longer than a link
may take to come back: one of its links, or one of its members, is broken, although all
members can be heard. Bytes that move slowly are no failure. A member that says nothing
proves nothing; its silence is judged elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from replicas.messages import LaneMoved
from replicas.messages.identity import Member

__all__ = ["STILL_S", "Pace"]

STILL_S = 3.0
"""Nothing moves for so long: it stands still. A lost packet is sent again after 0.2,
0.6 and 1.4 s."""
STALL_S = 1.0
"""After so long without a byte no rate is believed."""
STILL_TRIPS = 3.0
"""On a link with long round trips: so many of them."""
FRESH_S = 2.5
"""What was said longer ago proves nothing any more."""
REPORTS = 4
"""So many of a member are kept."""
RATE_S = 0.7
"""A rate is that over at least so much time,"""
RATE_TRIPS = 10.0
"""and so many round trips: a connection needs them to find its rate."""


class _Reports:
    """The last ones of one member, each with the time when it came."""

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
        """By whom it was held up the last two times that it said something."""
        if len(self.all) < 2 or self.at - self.first_at < RATE_TRIPS * self.last.rtt_s:
            return frozenset()
        return frozenset(self.all[-1][1].held_up) & frozenset(self.all[-2][1].held_up)

    def rate(self) -> float | None:
        """Bytes a second that it receives: the most that was seen over some time; None:
        not known."""
        found = [
            (later.received - earlier.received) / (end - start)
            for (start, earlier), (end, later) in zip(self.all, list(self.all)[1:], strict=False)
            if end - start >= RATE_S / 2
        ]
        known = self.at - self.first_at >= max(RATE_S, RATE_TRIPS * self.last.rtt_s)
        return max(found, default=None) if known else None


class Pace:
    """Of one attempt in one group."""

    def __init__(self) -> None:
        self._reports: dict[Member, _Reports] = {}

    def begin(self) -> None:
        """Something else is moved from now on."""
        self._reports.clear()

    def moved(self, member: Member, message: LaneMoved, now: float) -> None:
        """A member says how far it is."""
        reports = self._reports.setdefault(member, _Reports())
        reports.first_at = reports.first_at or now
        reports.all.append((now, message))

    def stands_still(self, awaited: Collection[Member], now: float) -> bool:
        """Whether nothing moves any more. ``awaited``: members that have not said that
        they are done."""
        return bool(awaited) and all(one is not None and one.still for one in map(self._fresh(now).get, awaited))

    def gets_on(self, awaited: Iterable[Member], now: float) -> bool:
        """Whether some of those that are awaited say that something moves."""
        fresh = self._fresh(now)
        return any(member in fresh and not fresh[member].still for member in awaited)

    def held_up_lately(self, awaited: Iterable[Member], now: float) -> list[tuple[Member, str]]:
        """Of those that are awaited, in their order, who was held up lately, and by the
        link to which address."""
        fresh = self._fresh(now)
        return [(one, address) for one in awaited if one in fresh for address in sorted(fresh[one].held_up())]

    def held_up(self) -> set[tuple[Member, str]]:
        """Members with bytes under way that the network does not take, and to which
        address."""
        return {(member, address) for member, one in self._reports.items() for address in one.last.held_up}

    def still_s(self) -> float:
        """For how long nothing has moved, by what was said last."""
        return min((one.last.still_s for one in self._reports.values()), default=0.0)

    def received(self, member: Member) -> int:
        """Bytes that it has received."""
        reports = self._reports.get(member)
        return reports.last.received if reports is not None else 0

    def stalls(self, member: Member) -> bool:
        """Whether nothing moves at it just now: it is not known yet whether its link is
        slow or broken."""
        reports = self._reports.get(member)
        return reports is not None and reports.last.still_s >= STALL_S

    def rate(self, member: Member) -> float | None:
        """Bytes a second that it receives; None: not known."""
        reports = self._reports.get(member)
        return reports.rate() if reports is not None else None

    def _fresh(self, now: float) -> dict[Member, _Reports]:
        return {member: one for member, one in self._reports.items() if now - one.at <= FRESH_S}

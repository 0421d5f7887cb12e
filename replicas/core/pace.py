"""How a process group gets on: what its members say while they are at work in it.

Every member tells about once a second what it has moved (:class:`~replicas.messages.LaneMoved`). A group *stands still* when
all of those that are still waited for have said lately that nothing moves at them, for longer than a link may take to come
back: one of its links, or one of its members, is broken, although all members can be heard. Bytes that move slowly are no
failure. A member that says nothing proves nothing; its silence is judged elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from replicas.core.identity import Member
from replicas.messages import LaneMoved

__all__ = ["STILL_S", "Pace"]

STILL_S = 3.0
"""Nothing moves for so long: it stands still. A lost packet is sent again after 0.2, 0.6 and 1.4 s."""
STILL_TRIPS = 3.0
"""On a link with long round trips: so many of them."""
FRESH_S = 2.5
"""What was said longer ago proves nothing any more."""


@dataclass(slots=True)
class _Report:
    at: float
    message: LaneMoved

    @property
    def still(self) -> bool:
        return self.message.still_s >= max(STILL_S, STILL_TRIPS * self.message.rtt_s)


class Pace:
    """Of one attempt in one group."""

    def __init__(self) -> None:
        self._reports: dict[Member, _Report] = {}

    def begin(self) -> None:
        """Something else is moved from now on."""
        self._reports.clear()

    def moved(self, member: Member, message: LaneMoved, now: float) -> None:
        """A member says how far it is."""
        self._reports[member] = _Report(now, message)

    def stands_still(self, awaited: Collection[Member], now: float) -> bool:
        """Whether nothing moves any more. ``awaited``: members that have not said that they are done."""
        reports = [self._reports.get(member) for member in awaited]
        return bool(reports) and all(one is not None and one.still and now - one.at <= FRESH_S for one in reports)

    def held_up(self) -> set[tuple[Member, str]]:
        """Members with bytes under way that the network does not take, and to which address."""
        return {(member, address) for member, one in self._reports.items() for address in one.message.held_up}

    def still_s(self) -> float:
        """For how long nothing has moved, by what was said last."""
        return min((one.message.still_s for one in self._reports.values()), default=0.0)

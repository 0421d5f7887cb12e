"""Clients that scrape the metrics regularly, and have not yet seen how the run ended.

Pure: times are arguments, in seconds of any one monotonic clock.
"""

from __future__ import annotations

_CLIENTS = 8
_MISSED = 2
"""Intervals after which an absent client is no longer waited for."""
_LATE = 1.5
"""Intervals within which a regular client has come."""


class Scrapes:
    """The times of the last two scrapes of ``/metrics`` by each of the newest clients.

    Two servers that scrape for the same purpose are two clients.
    """

    def __init__(self) -> None:
        """Begin without clients: no scrape was seen yet."""
        self._times: dict[str, tuple[float, float]] = {}
        self._told: set[str] = set()

    def note_scrape(self, client: str, now: float, *, over: bool = False) -> None:
        """Record that a client has scraped the metrics at the time ``now``; forget the
        oldest of more than eight clients.

        :param client: its address. :param now: in seconds of a monotonic clock.
        :param over: whether that scrape showed how the run ended.
        """
        _, last = self._times.pop(client, (now, now))
        self._times[client] = last, now
        if over:
            self._told.add(client)
        while len(self._times) > _CLIENTS:
            first = next(iter(self._times))
            del self._times[first]
            self._told.discard(first)

    def due_s(self, now: float) -> float:
        """Return how many seconds the supervisor should wait with its exit, so that
        clients which scrape regularly see the run's end in one more scrape. Return 0 if
        all have seen it, or are so late that they probably do not come again.

        :param now: the present time, in seconds of a monotonic clock.
        """
        waits_s = 0.0
        for client, (before, last) in self._times.items():
            interval_s = last - before
            if client not in self._told and now - last < _MISSED * interval_s:
                waits_s = max(waits_s, _LATE * interval_s)
        return waits_s

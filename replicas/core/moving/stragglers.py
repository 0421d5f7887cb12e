"""Stragglers: leave out targets that are far away or slow.

Theory of operation
===================

*Slow members* are waited for, but with ``on_lost = "drop"`` no longer than a multiple
of the time that the others took. They are caught up at their own pace, and rejoin the
others after a delay that grows each time; until an attempt in which they were fast
enough, they get attempts of their own.

*Far members* would delay a broadcast before a byte moves: forming a process group takes
about twenty round trips. They are left out before a broadcast, by the round-trip times
that the kernel reports for their sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from replicas.common.backoff import Backoff
from replicas.common.sizes import size_text
from replicas.core.members.roster import Roster
from replicas.core.moving.task import Task
from replicas.messages.identity import Member

FAR_TRIP_S = 0.25
"""A member with a longer round trip is far, and left out of a publish's attempts.

It is caught up in attempts that have the time.
"""
PATIENCE = 2.0
"""Slow members are waited for by this multiple of the time that the others took,"""
PATIENCE_S = 3.0
"""or for this long."""
MEASURED_S = 1.2
"""Seconds after which the rate of a pull predicts its end.

They count from the begin of the attempt (a puller with a slow holder has found a better
one by then, :mod:`replicas.carry.pull`), and from the end of the first pull, which no
longer shares the links.
"""
FAR = 3.0
"""A host is left out if its rate predicts that it needs this many times too long."""
SLOW = Backoff(2.0, 300.0)


class Stragglers:
    """Finds members that are too slow or too far to be waited for in one transfer."""

    def __init__(self, roster: Roster, version: int, nbytes: int) -> None:
        """Start before the first pull has ended: no member is slow yet.

        :param version: number of the version that is transferred.
        :param nbytes: its size.
        """
        self._roster, self._version, self._nbytes = roster, version, nbytes
        self._first_at: float | None = None
        self._patience_s = 0.0

    def note_pulled(self, began_at: float, now: float) -> None:
        """Record that a pull has ended.

        The first sets how long the others are waited for.

        :param began_at: when the attempt of the pull began, by the clock of ``now``.
        """
        if self._first_at is None:
            self._first_at, self._patience_s = now, max(PATIENCE_S, PATIENCE * (now - began_at))

    def far(self, needers: Iterable[Member]) -> dict[Member, str]:
        """Return the members whose round trips are too long to form a group in time.

        Each comes with the reason as text. Members on a host that has the version are
        not far. Nothing is changed.

        :param needers: the members that are to get the version.
        """
        version = self._version
        here = {state.host for state in self._roster if version in state.held or version in state.parts}  # mapped there
        states = [state for state in self._roster.states(needers) if state.host not in here]
        trips = {state.host: state.rtt_s for state in states if state.rtt_s > FAR_TRIP_S}
        return {s.member: f"it is far: a round trip takes {trips[s.host]:.1f} s" for s in states if s.host in trips}

    def slow(self, late: Sequence[Task], needers: Iterable[Member], began_at: float, now: float) -> dict[Member, str]:
        """Return members of hosts for which the others would have to wait too long.

        Each comes with the reason as text. Return {} until a pull of the transfer has
        ended. Nothing is changed (:meth:`mark_slow`).

        :param late: the pulls of the attempt that have not ended.
        :param needers: all members that still need the version.
        :param began_at: when the attempt began, by the clock of ``now``.
        """
        first_at, host = self._first_at, self._roster.host
        if first_at is None:
            return {}
        why: dict[Member, str] = {}
        until = max(first_at, began_at) + self._patience_s
        for one in late:
            rate = one.rate() if now - max(began_at, first_at) > MEASURED_S else 0.0
            left_s = (self._nbytes - one.received) / rate if rate else 0.0
            if now > until or now + left_s > until + FAR * self._patience_s:
                why[one.member] = f"slow link: {size_text(rate)}/s, and others have had it for {now - first_at:.1f} s"
        hosts = set(map(host, why))
        return why | {m: "its host is slow" for m in needers if m not in why and host(m) in hosts}

    def suffice(self, others: Collection[Member]) -> bool:
        """Return True if the version can be committed with ``others`` alone: there is
        one, and there are ``min_targets`` replicas."""
        return len({(one.group, one.replica) for one in others}) >= max(1, self._roster.config.min_targets)

    def mark_slow(self, late: Collection[Member], others: Collection[Member], now: float) -> bool:
        """Mark the members ``late`` as slow, so that they are caught up on their own.

        They are admitted again after a delay that grows each time. Return False, and
        mark none, if there are none, or if ``others`` do not :meth:`suffice`.
        """
        if not late or not self.suffice(others):
            return False
        for state in self._roster.states(late):
            state.failures += 1
            state.slow, state.not_before = True, now + SLOW.after(state.failures)
        return True

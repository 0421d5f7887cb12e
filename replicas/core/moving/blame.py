"""Decide which member is at fault when a transfer fails while all are alive.

Theory of operation
===================

A lane that fails while all members are alive is formed once more. When that fails, too,
its members are probed in pairs (:mod:`replicas.core.moving.probes`), and the members
that explain the bad pairs are quarantined; the transfer goes on without them. No probe
is needed when the culprit is known: it no longer gives a sign of life, a preflight
names it, or it alone has bytes that differ from all the others. A giver is no culprit
as long as another member is named. A link that does not work is no member's fault: the
next attempt avoids it. When no culprit is found, one more attempt decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from replicas import errors
from replicas.core.ground import Ground
from replicas.core.moving.probes import MAX_PROBES, Probe
from replicas.messages import Backend
from replicas.messages.identity import Member

__all__ = ["Blame", "TransferVerdict"]


class TransferVerdict(Protocol):
    """The calls of :class:`Blame` on its transfer."""

    def again(self, reason: str, now: float) -> None: ...

    def exclude(self, members: set[Member], now: float, *, reason: str, why: str) -> None: ...

    def quarantine(self, culprits: Mapping[Member, str], now: float) -> None: ...

    def probe(self, now: float) -> bool: ...

    def give_up(self, error: errors.ReplicasError, now: float) -> None: ...

    def resume(self, now: float, reason: str) -> None: ...


class Blame:
    """Failures of one transfer.

    :ivar failures: of its lane in a row, while all members were alive.
    """

    def __init__(self, ground: Ground, transfer: TransferVerdict) -> None:
        self._ground = ground
        self._transfer = transfer
        self.failures = 0
        self._probes = 0
        self._probe: Probe | None = None

    @property
    def probing(self) -> Probe | None:
        """The probe in progress."""
        return self._probe

    def failed(
        self,
        error: errors.ReplicasError,
        lane: Sequence[Member],
        givers: Sequence[Member],
        backend: Callable[[], Backend],
        suspects: set[Member],
        wrong: set[Member],
        now: float,
    ) -> None:
        """Decide what follows an attempt that failed without a loss.

        :param lane: members of its lane.
        :param givers: members that give the version.
        :param wrong: members that alone have bytes other than the sender's.
        """
        if not suspects and self._ground.links.broken_within(lane):
            self._transfer.again("link", now)
            return
        self.failures += 1
        unreachable = _named(error, lane, givers)
        if suspects:
            self._transfer.exclude(suspects, now, reason="frozen", why="no sign of life")
        elif unreachable:
            self._blame(unreachable, now)
        elif self.failures == 1:
            self._transfer.again("failed", now)
        elif wrong:
            self._blame(dict.fromkeys(wrong, error.message), now)
        elif self.failures == 2 and self._probes < MAX_PROBES and len(lane) > 1:
            self._start_probe(lane, backend, now)
        else:
            self._transfer.give_up(error, now)

    def _blame(self, culprits: Mapping[Member, str], now: float) -> None:
        self._transfer.quarantine(culprits, now)
        self.failures = 0
        self._transfer.again("quarantined", now)

    def _start_probe(self, lane: Sequence[Member], backend: Callable[[], Backend], now: float) -> None:
        if not self._transfer.probe(now):
            return
        self._probes += 1
        probe = Probe(self._ground.lanes, lane, backend(), now, self._probed)
        if not probe.over:
            self._probe = probe

    def _probed(self, found: Mapping[Member, str] | None, now: float) -> None:
        """Quarantine the culprits that the pairs have shown, and resume."""
        self._probe, culprits = None, found or {}
        if culprits:
            self.failures = 0
        self._transfer.quarantine(culprits, now)
        self._transfer.resume(now, "quarantined" if culprits else "failed")

    def stop(self) -> None:
        """Abandon the probe."""
        if self._probe is not None:
            self._probe.abandon()
            self._probe = None


def _named(error: errors.ReplicasError, lane: Sequence[Member], givers: Sequence[Member]) -> dict[Member, str]:
    """Return the members that a preflight error names, without probing."""
    if not isinstance(error, errors.Preflight):
        return {}
    named = {member: error.message for member in lane if member.name in error.members}
    return {member: why for member, why in named.items() if member not in givers} or named

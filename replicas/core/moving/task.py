"""A task: the part of one member in an attempt, as a table of states.

Theory of operation
===================

A member *maps* the version, *pulls* it, *receives* it from a broadcast, or *sends* it
by that broadcast. Each task takes its own course::

    due ──its holder listens──▶ offered ──slot reserved──▶ taking ──▶ came ──▶ held
     ▲                             └──────────── failed ◀─────┘ no holder left   │
     └───────────────────────────────── wrong bytes ─────────────────────────────┘

Only a pull waits until its holders listen; all others are offered at once. *Came*: the
member has all bytes, and has reported their digest. *Held*: it is the digest of the
version, which may be known only later, as the publisher digests while it sends. If a
pull brought another digest, it is offered once more with the right one: the carrier
finds out which blocks are wrong, and asks another holder for those. What failed is left
to the next attempt, perhaps with another holder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from replicas.core.base.membership import DeliveryState
from replicas.core.moving.paths import Pulls
from replicas.messages import TransferDone
from replicas.messages.identity import Member

Way = Literal["map", "pull", "receive", "send", "serve"]
"""What a member does in an attempt; who serves has no task."""
OPEN: tuple[DeliveryState, ...] = ("due", "offered", "taking")
"""States of tasks that an attempt waits for."""


@dataclass(slots=True, eq=False)
class Task:
    """The work of one member in an attempt to move a version, and how far it is.

    :ivar pulls: by part, the members that send it.
    :ivar lenders: members of its host whose memory it reads, until it is *taking*.
    :ivar received: bytes so far.
    :ivar moved_at: when that grew.
    :ivar told_at: time of the last report.
    :ivar rates: bytes a second before each of the last two reports.
    :ivar reply: the member's report that all bytes have come; None before.
    :ivar judged: whether the offer named the digest, so that the carrier compares it.
    """

    member: Member
    way: Way
    pulls: Pulls = field(default_factory=dict)
    lenders: frozenset[Member] = frozenset()
    state: DeliveryState = "due"
    received: int = 0
    moved_at: float = 0.0
    told_at: float = 0.0
    rates: tuple[float, float] = (0.0, 0.0)
    reply: TransferDone | None = None
    judged: bool = False

    @property
    def in_group(self) -> bool:
        """True if the task is part of a broadcast: if one of these fails, all fail."""
        return self.way in ("receive", "send")

    @property
    def holders(self) -> frozenset[Member]:
        """All members that may send any part to this task's member."""
        return frozenset(holder for holders in self.pulls.values() for holder in holders)

    @property
    def givers(self) -> set[Member]:
        """Holders from which bytes have come: as the member has reported, or by
        broadcast."""
        received = self.reply.received if self.reply is not None else {}
        return {holder for holder in self.holders if holder.name in received or self.way == "receive"}

    def note_received(self, received: int, now: float) -> None:
        """Record how many bytes the member has received in all, and the rate since its
        last report."""
        self.rates = self.rates[1], max(0, received - self.received) / max(0.05, now - self.told_at)
        self.told_at = now
        if received > self.received:
            self.received, self.moved_at = received, now

    def rate(self) -> float:
        """Return the higher rate of the member's last two reports, in bytes a second.

        Return 0 if one of them is unknown or 0: a pull that has just begun or stood
        still may be switching to a better holder.
        """
        return max(self.rates) if all(self.rates) else 0.0

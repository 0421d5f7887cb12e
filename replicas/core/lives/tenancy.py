"""An agent's tenancy: the table of its life, and its end of a lease. Pure.

*Joining*: no supervisor has taken it yet. *Serving*: one has. *Leaving*: its node is
about to be taken away, and the supervisor moves the replicas. *Ending*: its lease is
over, so the replicas may be started elsewhere soon, and it ends everything; it must not
join meanwhile. *Rejoining*: nothing is left, and it offers its node anew. *Over*: it
ends what is left, and itself.

An agent that is leaving, or has no lease, does not rejoin: its lease ends it.
"""

from __future__ import annotations

from typing import Literal

from replicas.common.table import Table

TenancyState = Literal["joining", "serving", "leaving", "ending", "rejoining", "over"]
TenancyEvent = Literal["welcome", "leave", "lease_over", "empty", "end"]
"""``empty``: nothing is left of what ended with the lease. ``end``: an order, a second
signal, or nobody to serve."""

TENANCY: Table[TenancyState, TenancyEvent] = Table(
    "the tenancy of an agent",
    ("joining",),
    {
        "joining": {"serving": ("welcome",), "over": ("end",)},
        "serving": {"serving": ("welcome",), "leaving": ("leave",), "ending": ("lease_over",), "over": ("end",)},
        "leaving": {"leaving": ("welcome",), "over": ("end",)},
        "ending": {"rejoining": ("empty",), "over": ("end",)},
        "rejoining": {"serving": ("welcome",), "over": ("end",)},
    },
)


class Tenancy:
    """The agent's end of a lease. Times are seconds of any one monotonic clock.

    :ivar state: its place in :data:`TENANCY`.
    """

    def __init__(self) -> None:
        self.state: TenancyState = "joining"
        self.until: float | None = None
        """Time at which everything must begin to end; None: no limit."""
        self._lease_s = 0.0
        self._sent: dict[int, float] = {}
        self._number = 0

    def step(self, event: TenancyEvent) -> None:
        """Enter the next state."""
        self.state = TENANCY.next(self.state, event)

    @property
    def serves(self) -> bool:
        """True if a supervisor has taken the agent, and its lease has not ended."""
        return self.state in ("serving", "leaving")

    @property
    def ended(self) -> bool:
        """True if the agent ends."""
        return self.state == "over"

    @property
    def leased(self) -> bool:
        """True if the present supervisor has given it a lease."""
        return self._lease_s > 0

    def granted(self, lease_s: float, asked_at: float) -> None:
        """A supervisor has taken the agent, which had asked at ``asked_at``."""
        self._lease_s = lease_s
        self._sent.clear()  # beats to an earlier supervisor prove nothing to this one
        self.until = asked_at + lease_s if lease_s else None

    def beat(self, now: float) -> int:
        """The number of a beat that is sent now."""
        self._number += 1
        self._sent[self._number] = now
        return self._number

    def heard(self, number: int) -> None:
        """The supervisor has heard this beat."""
        sent_at = self._sent.pop(number, None)
        if sent_at is not None and self._lease_s:
            self.until = max(self.until or 0.0, sent_at + self._lease_s)  # counted from the sending: see lease_times
        # earlier beats cannot lengthen it
        self._sent = {other: at for other, at in self._sent.items() if other > number}

    def alone(self, now: float, patience_s: float) -> None:
        """The supervisor is gone: go on for ``patience_s``, at most until the lease
        ends."""
        left = now + patience_s
        self.until = left if self.until is None else min(self.until, left)  # being alone never lengthens a lease

    def over(self, now: float) -> bool:
        return self.until is not None and now >= self.until

"""The agent's side of its lease: the table of its states, and its deadline. Pure.

*Joining*: no supervisor has taken the agent yet. *Serving*: a supervisor has.
*Leaving*: the node is about to be taken away, and the supervisor moves the replicas.
*Ending*: the lease is over, so the replicas may be started elsewhere soon; the agent
ends everything, and must not join meanwhile. *Rejoining*: nothing is left, and the
agent offers its node again. *Over*: the agent ends the remaining processes, then
itself.

An agent that is leaving, or has no lease, does not rejoin: it ends with its lease.
"""

from __future__ import annotations

from typing import Literal

from replicas.common.table import Table

TenancyState = Literal["joining", "serving", "leaving", "ending", "rejoining", "over"]
TenancyEvent = Literal["welcome", "leave", "lease_over", "empty", "end"]
"""``empty``: everything that had to end with the lease is gone. ``end``: an order, a
second signal, or no supervisor to serve."""

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
    """The life of an agent at its supervisors: its state, and when its lease ends.

    Times are seconds of any one monotonic clock.

    :ivar state: its place in :data:`TENANCY`.
    """

    def __init__(self) -> None:
        """Start as ``joining``, without a lease; :attr:`until` sets no limit."""
        self.state: TenancyState = "joining"
        self.until: float | None = None
        """Time at which everything must begin to end; None if there is no limit."""
        self._lease_s = 0.0
        self._sent: dict[int, float] = {}
        self._number = 0

    def step(self, event: TenancyEvent) -> None:
        """Change the state (joining, serving, leaving, ...) by :data:`TENANCY`.

        The lease and :attr:`until` stay as they are.

        :raises replicas.common.table.InvalidStep: ``event`` cannot happen in this
            state, which stays.
        """
        self.state = TENANCY.next(self.state, event)

    @property
    def serves(self) -> bool:
        """True if a supervisor has taken the agent, and no lease has ended since."""
        return self.state in ("serving", "leaving")

    @property
    def ended(self) -> bool:
        """True if the state is final: the agent ends its processes and itself."""
        return self.state == "over"

    @property
    def leased(self) -> bool:
        """True if the present supervisor has given the agent a lease."""
        return self._lease_s > 0

    def granted(self, lease_s: float, asked_at: float) -> None:
        """Start a lease, in place of an earlier one.

        Set :attr:`until`, the time at which the agent must begin to end everything.

        :param lease_s: its seconds; 0: there is no lease, and no such time.
        :param asked_at: when the agent sent its request, from which the lease counts.
        """
        self._lease_s = lease_s
        self._sent.clear()  # beats to an earlier supervisor prove nothing to this one
        self.until = asked_at + lease_s if lease_s else None

    def next_beat(self, now: float) -> int:
        """Return the number of the beat (sign of life) that the caller sends now.

        Remember its time, from which :meth:`extend_lease` counts.
        """
        self._number += 1
        self._sent[self._number] = now
        return self._number

    def extend_lease(self, number: int) -> None:
        """Extend the lease, as the supervisor has acknowledged the beat of this number.

        It then ends ``lease_s`` after that beat was sent. An unknown number is ignored,
        and without a lease nothing changes.
        """
        sent_at = self._sent.pop(number, None)
        if sent_at is not None and self._lease_s:
            self.until = max(self.until or 0.0, sent_at + self._lease_s)  # counted from the sending: see lease_times
        # earlier beats cannot lengthen it
        self._sent = {other: at for other, at in self._sent.items() if other > number}

    def limit_without_supervisor(self, now: float, patience_s: float) -> None:
        """Set :attr:`until` to ``patience_s`` from now at the latest, as no supervisor
        is there.

        A lease that ends earlier is not lengthened.
        """
        left = now + patience_s
        self.until = left if self.until is None else min(self.until, left)  # this never lengthens a lease

    def over(self, now: float) -> bool:
        """Return True if :attr:`until` has come: the caller must now end everything."""
        return self.until is not None and now >= self.until

"""A node's life as its supervisor sees it, as two tables. Pure.

:data:`NODE` is the connection to the node's agent. *Up*: orders are sent as they come,
and the node may take new replicas. *Away*: the connection is closed, or no beat came
for :data:`SILENT_S`. Its replicas may still run, and do not fail because of it; an
agent that comes back is sent again the orders that it may have missed, and reports its
state. *Lost*: the lease is over, so the agent and its shims have ended everything by
now (:mod:`replicas.core.lives.lease_times`). *Drained*: its agent was told to end, and
nothing is left on the node, which is forgotten.

:data:`DUTY` is whether the node takes new replicas. *Open*: it does. *Draining*: its
replicas are moved elsewhere. *Released*: they were moved, and its agent was told to
end. An agent that offers the node again opens it; so does an operator who undoes the
drain.
"""

from __future__ import annotations

from typing import Literal

from replicas.common.table import Table
from replicas.core.lives.lease_times import BEAT_S, lost_after_s

SILENT_S = 3.5 * BEAT_S
"""A node that sends nothing for longer is away."""
NodeState = Literal["away", "up", "lost", "drained"]
NodeEvent = Literal["hello", "heard", "silent", "closed", "lease_over", "left"]
"""``heard``: a message has arrived on the old connection. ``left``: its agent was
released, and has ended."""

NODE: Table[NodeState, NodeEvent] = Table(
    "a node",
    ("away",),
    {
        "away": {"up": ("hello", "heard"), "away": ("closed",), "lost": ("lease_over",), "drained": ("left",)},
        "up": {"up": ("hello",), "away": ("silent", "closed"), "drained": ("left",)},
        "lost": {"up": ("hello",), "drained": ("left",)},
    },
)

Duty = Literal["open", "draining", "released", "over"]
DutyEvent = Literal["drain", "undrain", "anew", "release", "left"]
"""``anew``: another agent offers the node, or the same agent after its lease."""

DUTY: Table[Duty, DutyEvent] = Table(
    "the duty of a node",
    ("open",),
    {
        "open": {"open": ("undrain", "anew"), "draining": ("drain",), "released": ("release",)},
        "draining": {"draining": ("drain",), "open": ("undrain", "anew"), "released": ("release",)},
        "released": {"released": ("drain", "release"), "open": ("undrain", "anew"), "over": ("left",)},
    },
)


class NodeLife:
    """The supervisor's view of one node, as two states: its connection and its duty.

    They follow the tables :data:`NODE` and :data:`DUTY`. Times are seconds of any one
    monotonic clock.

    :param leased: whether silence alone makes the node away and lost. False on the
        supervisor's own machine: a silent agent is replaced there, and its end is
        always noticed.
    :ivar heard_at: time of the last message of its agent.
    :ivar lease_s: the lease of the agent, perhaps from an earlier supervisor.
    """

    def __init__(self, now: float, *, leased: bool) -> None:
        """Start as ``away`` and ``open``, with silence counted from ``now``.

        Open no connection.

        :param now: the time, by any one monotonic clock, of which all later times are.
        :param leased: whether silence alone makes the node away, and then lost.
        """
        self.state: NodeState = "away"
        self.duty: Duty = "open"
        self.leased, self.heard_at, self.lease_s = leased, now, 0.0

    def step(self, event: NodeEvent) -> bool:
        """Change the state (up, away, lost, ...) by the table :data:`NODE`.

        Return True if the new state differs from the old one.

        :raises replicas.common.table.InvalidStep: ``event`` cannot happen in this
            state, which stays.
        """
        before, self.state = self.state, NODE.next(self.state, event)
        return self.state != before

    def ask(self, event: DutyEvent) -> None:
        """Change the node's duty, whether it takes new replicas, by :data:`DUTY`.

        :raises replicas.common.table.InvalidStep: ``event`` cannot happen in this duty,
            which stays.
        """
        self.duty = DUTY.next(self.duty, event)

    def heard(self, now: float) -> bool:
        """Record that a message of the node's agent has come: silence counts from
        ``now``.

        Return True if the node was away; the message makes it up again. A lost node
        stays lost.
        """
        self.heard_at = now
        return self.state == "away" and self.step("heard")

    def due_event(self, now: float) -> Literal["", "silent", "lease_over"]:
        """Return the event that the agent's silence causes now, or "" for none.

        It changes nothing: the caller passes the event to :meth:`step`. Without
        ``leased`` silence causes none.
        """
        silent_s = now - self.heard_at
        if self.leased and self.state == "up" and silent_s > SILENT_S:
            return "silent"
        if self.leased and self.state == "away" and silent_s > lost_after_s(self.lease_s):
            return "lease_over"
        return ""

    @property
    def takes_replicas(self) -> bool:
        """True if the node is up and its duty is open, so that replicas may be placed
        on it."""
        return self.state == "up" and self.duty == "open"

    @property
    def over(self) -> bool:
        """True if the node is lost or drained: no process of the run is left on it."""
        return self.state in ("lost", "drained")

    @property
    def shown(self) -> Literal["up", "draining", "away", "lost"]:
        """The node's state for operators: ``draining`` if it is up but takes no new
        replicas, and ``lost`` also if it was drained to the end."""
        if self.state == "up" and self.duty != "open":
            return "draining"
        return "lost" if self.state == "drained" else self.state

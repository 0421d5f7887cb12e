"""A node's life as its supervisor sees it, as two tables. Pure.

:data:`NODE` is what is heard of the node's agent. *Up*: orders are sent as they come,
and the node may take new replicas. *Away*: the connection is closed, or no beat came
for :data:`SILENT_S`. Its replicas may run on, and are not judged by it; an agent that
comes back is told again what it may have missed, and says what it has. *Lost*: the
lease is over, so the agent and its shims have ended everything by now
(:mod:`replicas.core.lives.lease_times`). *Drained*: its agent was told to end, and
nothing is left of it; the node is forgotten.

:data:`DUTY` is whether the node takes new replicas. *Open*: it does. *Draining*: its
replicas are moved elsewhere. *Released*: they were, and its agent was told to end. An
agent that offers the node anew opens it; so does a person who undoes the drain.
"""

from __future__ import annotations

from typing import Literal

from replicas.common.table import Table
from replicas.core.lives.lease_times import BEAT_S, lost_after_s

SILENT_S = 3.5 * BEAT_S
"""A node of which nothing is heard for longer is away."""
NodeState = Literal["away", "up", "lost", "drained"]
NodeEvent = Literal["hello", "heard", "silent", "closed", "lease_over", "left"]
"""``heard``: what it said before has arrived after all. ``left``: its agent was
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
"""``anew``: another agent offers the node, or the same one after its lease."""

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
    """One node's place in both tables. Times are seconds of any one monotonic clock.

    :param leased: whether silence alone makes it away and lost. That of the
        supervisor's own machine is replaced instead: its end cannot be missed there.
    :ivar heard_at: when its agent was last heard.
    :ivar lease_s: the lease that the agent was given, which an earlier supervisor may
        have done.
    """

    def __init__(self, now: float, *, leased: bool) -> None:
        self.state: NodeState = "away"
        self.duty: Duty = "open"
        self.leased, self.heard_at, self.lease_s = leased, now, 0.0

    def step(self, event: NodeEvent) -> bool:
        """Enter the next state; return True if that is another one."""
        before, self.state = self.state, NODE.next(self.state, event)
        return self.state != before

    def ask(self, event: DutyEvent) -> None:
        """Enter the next duty."""
        self.duty = DUTY.next(self.duty, event)

    def heard(self, now: float) -> bool:
        """Note that a message has come; return True if the node was away."""
        self.heard_at = now
        return self.state == "away" and self.step("heard")

    def due(self, now: float) -> Literal["", "silent", "lease_over"]:
        """Return what the agent's silence has led to by now, or ""."""
        silent_s = now - self.heard_at
        if self.leased and self.state == "up" and silent_s > SILENT_S:
            return "silent"
        if self.leased and self.state == "away" and silent_s > lost_after_s(self.lease_s):
            return "lease_over"
        return ""

    @property
    def takes_replicas(self) -> bool:
        """True if the node is up, and not drained."""
        return self.state == "up" and self.duty == "open"

    @property
    def over(self) -> bool:
        """True if nothing of the run is left on the node."""
        return self.state in ("lost", "drained")

    @property
    def shown(self) -> Literal["up", "draining", "away", "lost"]:
        """Its state for people."""
        if self.state == "up" and self.duty != "open":
            return "draining"
        return "lost" if self.state == "drained" else self.state

"""Stragglers: abandon a lane that stands still or is late; leave out far or slow ones.

Theory of operation
===================

*A lane* is a chain, so one broken or slow link stops or slows all of its members. The
culprit is not searched: a lane in which nothing moves, or that has not delivered
everything in half of the time, is abandoned, and its members pull the version
(:mod:`replicas.core.moving.pull_tasks`), each at its own pace. Links on which bytes
were held up become doubtful (:mod:`replicas.core.moving.links`).

*Slow members* are waited for, but with ``on_lost = "drop"`` no longer than a multiple
of the time that the others took. They are caught up at their own pace, and rejoin the
others after a delay that grows each time; until an attempt in which they were fast
enough, they get attempts of their own.

*Far members* would delay the others before a byte moves: forming a process group takes
about twenty round trips. They are left out before an attempt with a lane, by the
round-trip times that the kernel reports for their sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from replicas.common.backoff import Backoff
from replicas.core.base.membership import TransferState
from replicas.core.moving.attempt import Attempt, Payload
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.moving.lanes import Lane
from replicas.messages.identity import Member

FAR_TRIP_S = 0.25
"""A member with a longer round trip is far, and left out of a publish's attempts.

It is caught up in attempts that have the time.
"""
PATIENCE = 2.0
"""Slow members are waited for by this multiple of the time that the others took,"""
PATIENCE_S = 3.0
"""or for this long."""
SLOW = Backoff(2.0, 300.0)


class Paced(Protocol):
    """The attributes of a transfer that its :class:`Stragglers` reads and writes."""

    payload: Payload
    attempt: Attempt
    state: TransferState
    lane: Lane | None
    deadline: float
    needers: set[Member]
    verified: set[Member]
    why: dict[Member, str]

    @property
    def drops(self) -> bool: ...


class Stragglers:
    """The stragglers of one transfer."""

    def __init__(self, context: ChannelContext, transfer: Paced) -> None:
        self._context = context
        self._transfer = transfer

    def tick(self, now: float) -> str:
        """Return why the lane of this attempt must be abandoned, or ""."""
        transfer = self._transfer
        lane, attempt = transfer.lane, transfer.attempt
        if transfer.state != "moving" or lane is None:
            return ""
        if lane.progress.stands_still(attempt.at_work, now):
            return self._stood_still(lane, now)
        if transfer.drops and now > attempt.began_at + (transfer.deadline - attempt.began_at) / 2:
            return "the process group had not delivered the version at half of the deadline"
        return ""

    def _stood_still(self, lane: Lane, now: float) -> str:
        pairs = {(self._context.roster.address(member), other) for member, other in lane.progress.held_up()}
        ends = {address for pair in pairs for address in pair}
        names = [member.name for member in lane.members if self._context.roster.address(member) in ends]
        names = names or [member.name for member in lane.members]
        text = f"no byte has moved for {lane.progress.still_s():.1f} s between {', '.join(names)}"
        self._context.links.doubt(pairs, text, now)
        return text

    def exclude_far(self, now: float) -> None:
        """Before an attempt, leave out members too far to form a group in time."""
        transfer, roster = self._transfer, self._context.roster
        if not transfer.drops:
            return
        version = transfer.payload.version
        here = {state.host for state in roster if version in state.held or version in state.parts}  # mapped there
        needers = [state for state in roster.states(transfer.needers) if state.host not in here]
        trips = {state.host: state.rtt_s for state in needers if state.rtt_s > FAR_TRIP_S}
        far = [state for state in needers if state.host in trips]
        self.exclude_slow({s.member: f"it is far: a round trip takes {trips[s.host]:.1f} s" for s in far}, now)

    def exclude_slow(self, late: Mapping[Member, str], now: float) -> bool:
        """Go on without slow members: catch them up alone, and later each time.

        Return False if there are none, or if the version could not be committed without
        them: at least one other member, and ``min_targets`` replicas, must be left.
        """
        transfer, roster = self._transfer, self._context.roster
        others = (transfer.needers | transfer.verified) - late.keys()
        replicas = {(member.group, member.replica) for member in others}
        if not late or not others or len(replicas) < roster.config.min_targets:
            return False
        for state in roster.states(late):
            state.failures += 1
            state.slow, state.not_before = True, now + SLOW.after(state.failures)
        transfer.why |= late
        transfer.needers -= late.keys()
        return True

    def slowest(self) -> list[str]:
        """Return the names of needers behind a held-up link."""
        lane = self._transfer.lane
        behind = {address for _, address in lane.progress.held_up()} if lane is not None else set()
        slow = [one for one in self._transfer.needers if self._context.roster.address(one) in behind]
        return sorted(member.name for member in slow)

"""React to a transfer that stands still or that one slow link holds up.

Theory of operation
===================

A lane is a chain, so one broken or slow link stops or slows all of its members; only
the member in front of that link reports that bytes are held up
(:mod:`replicas.core.moving.pace`).

*It stands still*: a failure while all members are alive. A link on which bytes were
held up becomes doubtful, and the next attempt avoids it
(:mod:`replicas.core.members.links`); without such a link,
:mod:`replicas.core.moving.blame` decides.

*One link is slow*, and much is left to send: the next attempt avoids it, so that the
other members get the version soon; members that only slow links reach get it
afterwards. A single link is at fault when the links before it in the chain are idle
meanwhile, or when the same members were much faster last time; otherwise all links may
be equally slow, and another route would gain nothing. Before any rate is known (the
first version), the member behind the slow link is moved to the end of the chain, once.

A link over which nothing comes may be broken rather than slow: that shows when the
whole lane stands still.

A slow link is no failure: members behind it are waited for, but with
``on_lost = "drop"`` no longer than some multiple of the time that the others took.
Their rate soon tells that they will not finish in time. They are caught up at their own
pace, and rejoin the others after a delay that grows each time; until an attempt in
which they were fast enough, they get attempts of their own.

*Far members* would delay the others before a byte moves: forming a process group takes
some twenty round trips. They are left out before an attempt, by the round-trip times
that the kernel reports for their sessions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.core.ground import Ground
from replicas.core.membership import TransferState
from replicas.core.moving.lanes import Lane
from replicas.core.moving.paths import TransferPlan
from replicas.core.moving.payload import Payload
from replicas.messages.identity import Member

__all__ = ["Pacing"]

LONG_S = 4.0
"""With less than this left to send, no route is changed."""
UNKNOWN_S = 6.0
"""The same limit while no rate of any link is known."""
FAR_TRIP_S = 0.25
"""Above this round trip a member is far, and left out of a publish's attempts.

A process group with it forms more slowly than the others should wait; it is caught up
in process groups that have the time.
"""
PATIENCE = 2.0
"""Slow members are waited for by this multiple of the time that the others took,"""
PATIENCE_S = 3.0
"""or for this long."""
UNUSUAL = 3.0
"""A rate this many times lower than before: a link has deteriorated."""
FAR = 3.0
"""A member this many times too slow in an earlier attempt is not measured again."""

SLOW = Backoff(2.0, 300.0)


class Paced(Protocol):
    """The part of a transfer that its :class:`Pacing` reads and calls."""

    payload: Payload
    plan: TransferPlan
    state: TransferState
    lane: Lane | None
    needers: set[Member]
    verified: set[Member]
    sent_to: set[Member]
    why: dict[Member, str]

    @property
    def at_work(self) -> list[Member]: ...

    @property
    def drops(self) -> bool: ...

    def again(self, reason: str, now: float) -> None: ...

    def failed_all_alive(self, error: errors.ReplicasError, now: float) -> None: ...

    def leave_slow(self, late: Mapping[Member, str], now: float) -> None: ...


class Pacing:
    """Pacing of one transfer. ``rates``: bytes a second of slow addresses."""

    def __init__(self, ground: Ground, transfer: Paced) -> None:
        self._ground = ground
        self._transfer = transfer
        self.rates: dict[str, float] = {}
        self._began_at = 0.0
        self._others_at: float | None = None

    def tick(self, now: float) -> None:
        """Check the progress, and start another attempt if that is better."""
        transfer = self._transfer
        if transfer.state != "moving" or transfer.lane is None:
            return
        awaited = transfer.at_work
        self._began_at = self._began_at or now
        if self._others_at is None and (transfer.sent_to or set(transfer.plan.receivers) - set(awaited)):
            self._others_at = now
        if transfer.lane.pace.stands_still(awaited, now):
            self._stood_still(transfer.lane, now)
        elif not self._avoid_slow_link(transfer.lane, awaited, now):
            self._leave_slow(transfer.lane, awaited, now)

    def _stood_still(self, lane: Lane, now: float) -> None:
        pairs = {(self._ground.roster.address(member), other) for member, other in lane.pace.held_up()}
        ends = {address for pair in pairs for address in pair}
        names = [member.name for member in lane.members if self._ground.roster.address(member) in ends]
        names = names or [member.name for member in lane.members]
        text = f"no byte has moved for {lane.pace.still_s():.1f} s between {', '.join(names)}"
        self._ground.links.doubt(pairs, text, now)
        if any(len(set(pair)) == 2 for pair in pairs):
            self._transfer.again("link", now)
        else:
            version = self._transfer.payload.version
            self._transfer.failed_all_alive(
                errors.SyncError(text, version=version, phase="transfer", members=names), now
            )

    # ------------------------------------------------------------ slow links

    def _avoid_slow_link(self, lane: Lane, awaited: Sequence[Member], now: float) -> bool:
        """Start another attempt if one link slows all others; return whether it did."""
        transfer, links = self._transfer, self._ground.links
        receivers = [member for member in transfer.plan.receivers if member in awaited]
        held_up = lane.pace.held_up_lately(awaited, now)
        if len(receivers) < 2 or not held_up:
            return False
        before, behind = held_up[0]  # first in the chain; later links carry only what this one lets through
        slow = [member for member in receivers if self._ground.roster.address(member) == behind]
        if not slow or len(slow) == len(receivers) or self._left_s(lane, slow[0]) < LONG_S:
            return False
        known = self._alone(held_up, lane) or self._unusual(lane, slow[0], receivers)
        if not known and not self._worth_a_try(lane, slow[0], receivers):
            return False
        rate = lane.pace.rate(slow[0]) or 0.0
        self.rates[behind] = rate
        if known:
            links.slow(
                [(self._ground.roster.address(before), behind)], f"{slow[0].name} takes {rate:,.0f} bytes/s", now
            )
        transfer.again("slow", now)
        return True

    def _alone(self, held_up: Sequence[tuple[Member, str]], lane: Lane) -> bool:
        """Return whether the links before it could carry more."""
        return len({address for _, address in held_up}) == 1 and held_up[0][0] != lane.members[0]

    def _worth_a_try(self, lane: Lane, slow: Member, receivers: Sequence[Member]) -> bool:
        """Return whether to try without this link once, on no more evidence.

        It may be the only slow one, for all that is known, and very much is left to
        send.
        """
        usual = any(self._ground.links.usual(self._ground.roster.address(member)) for member in receivers)
        return not (usual or self.rates) and self._left_s(lane, slow) >= UNKNOWN_S

    def _unusual(self, lane: Lane, slow: Member, receivers: Sequence[Member]) -> bool:
        """Return whether it is far slower than it was before with any of these."""
        usual = [self._ground.links.usual(self._ground.roster.address(member)) for member in receivers]
        known = [rate for rate in usual if rate]
        return bool(known) and (lane.pace.rate(slow) or 0.0) * UNUSUAL < min(known)

    def _leave_slow(self, lane: Lane, awaited: Collection[Member], now: float) -> None:
        """Go on without the members that would take too long."""
        transfer = self._transfer
        if self._others_at is None or not transfer.drops:
            return
        patience = max(PATIENCE_S, PATIENCE * (self._others_at - self._began_at))
        late: dict[Member, str] = {}
        for member in [member for member in transfer.plan.receivers if member in awaited]:
            if lane.pace.stalls(member):
                continue
            left_s = self._left_s(lane, member)
            far = FAR if lane.pace.rate(member) is None else 1.0
            if now + left_s > self._others_at + far * patience:
                rate = transfer.payload.nbytes / left_s if left_s else 0.0
                waited_s = now - self._others_at
                late[member] = f"it is slow: {rate:,.0f} bytes/s, and the others have had it for {waited_s:.1f} s"
        hosts = {self._ground.roster.host(member) for member in late}
        late |= {
            m: "its host is slow" for m in transfer.needers if m not in late and self._ground.roster.host(m) in hosts
        }
        if late and self._enough_without(late):
            self._note_slow(late, now)
            transfer.leave_slow(late, now)

    def leave_far(self, now: float) -> None:
        """Before an attempt, leave out members too far to form a group in time."""
        transfer, roster = self._transfer, self._ground.roster
        if not transfer.drops:
            return
        version = transfer.payload.version
        here = {state.host for state in roster if version in state.held or version in state.parts}  # it is mapped there
        needers = [state for state in roster.states(transfer.needers) if state.host not in here]
        trips = {state.host: state.rtt_s for state in needers if state.rtt_s > FAR_TRIP_S}
        far = {state.member: trips[state.host] for state in needers if state.host in trips}
        if not far or not self._enough_without(far):
            return
        for member, rtt_s in far.items():
            transfer.why[member] = f"it is far: a round trip takes {rtt_s:.1f} s"
        self._note_slow(far, now)
        transfer.needers -= far.keys()

    def _note_slow(self, members: Iterable[Member], now: float) -> None:
        """Mark the members slow: caught up alone, and back later, longer each time."""
        for state in self._ground.roster.states(members):
            state.failures += 1
            state.slow, state.not_before = True, now + SLOW.after(state.failures)

    def _enough_without(self, late: Collection[Member]) -> bool:
        """Return whether the version can be committed without the late members.

        At least one other member, and ``min_targets`` replicas, must be left.
        """
        others = (self._transfer.needers | self._transfer.verified) - set(late)
        replicas = {(member.group, member.replica) for member in others}
        return bool(others) and len(replicas) >= self._ground.roster.config.min_targets

    def _left_s(self, lane: Lane, member: Member) -> float:
        """Return the estimated seconds left; 0: unknown, or nothing comes at all."""
        nbytes = max(0, self._transfer.payload.nbytes - lane.pace.received(member))
        rate = lane.pace.rate(member)
        rate = self.rates.get(self._ground.roster.address(member)) if rate is None else rate
        if rate is None or not nbytes or lane.pace.stalls(member):
            return 0.0
        return nbytes / rate if rate else math.inf

    def slowest(self) -> list[str]:
        """Return the names of needers known to be slow or behind a held-up link."""
        lane = self._transfer.lane
        behind = {address for _, address in lane.pace.held_up()} if lane is not None else set()
        slow = [
            member for member in self._transfer.needers if self._ground.roster.address(member) in {*self.rates, *behind}
        ]
        return sorted(member.name for member in slow)

"""Pacing: find a transfer that stands still, or that a slow link or member holds up.

Theory of operation
===================

A lane is a chain, so one broken or slow link stops or slows all of its members; only
the member in front of that link reports that bytes are held up
(:mod:`replicas.core.moving.pace`).

*It stands still*: a link on which bytes were held up becomes doubtful, and the next
attempt avoids it (:mod:`replicas.core.moving.links`); without such a link it is a
failure while all members are alive.

*One link is slow*, and much is left to send: the next attempt avoids it, so that the
other members get the version soon; members that only slow links reach get it
afterwards. A single link is at fault when the links before it in the chain are idle
meanwhile, or when the same members were much faster last time; otherwise all links may
be equally slow, and another route would gain nothing. Before any rate is known (the
first version), the member behind the slow link is moved to the end of the chain, once.

A slow link is no failure: members behind it are waited for, but with
``on_lost = "drop"`` no longer than some multiple of the time that the others took. They
are caught up at their own pace, and rejoin the others after a delay that grows each
time; until an attempt in which they were fast enough, they get attempts of their own.

*Far members* would delay the others before a byte moves: forming a process group takes
some twenty round trips. They are left out before an attempt, by the round-trip times
that the kernel reports for their sessions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.core.base.membership import TransferState
from replicas.core.moving.attempt import Attempt, Payload
from replicas.core.moving.ground import Ground
from replicas.core.moving.lanes import Lane
from replicas.messages.identity import Member

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
    """What a transfer and its :class:`Pacing` share."""

    payload: Payload
    attempt: Attempt
    state: TransferState
    lane: Lane | None
    needers: set[Member]
    verified: set[Member]
    sent_to: set[Member]
    why: dict[Member, str]

    @property
    def drops(self) -> bool: ...


class Pacing:
    """Pacing of one transfer. ``rates``: bytes a second of slow addresses."""

    def __init__(self, ground: Ground, transfer: Paced) -> None:
        self._ground = ground
        self._transfer = transfer
        self.rates: dict[str, float] = {}
        self._began_at = 0.0
        self._others_at: float | None = None

    def tick(self, now: float) -> str | errors.ReplicasError:
        """Check the progress.

        :returns: why another attempt is better, or the failure of this one; "": none.
        """
        transfer = self._transfer
        lane, awaited = transfer.lane, transfer.attempt.at_work
        if transfer.state != "moving" or lane is None:
            return ""
        self._began_at = self._began_at or now
        if self._others_at is None and (transfer.sent_to or set(transfer.attempt.plan.receivers) - set(awaited)):
            self._others_at = now
        if lane.pace.stands_still(awaited, now):
            return self._stood_still(lane, now)
        return "slow" if self._avoids_slow_link(lane, awaited, now) or self._leaves_slow(lane, awaited, now) else ""

    def _stood_still(self, lane: Lane, now: float) -> str | errors.ReplicasError:
        pairs = {(self._ground.roster.address(member), other) for member, other in lane.pace.held_up()}
        ends = {address for pair in pairs for address in pair}
        names = [member.name for member in lane.members if self._ground.roster.address(member) in ends]
        names = names or [member.name for member in lane.members]
        text = f"no byte has moved for {lane.pace.still_s():.1f} s between {', '.join(names)}"
        self._ground.links.doubt(pairs, text, now)
        if any(len(set(pair)) == 2 for pair in pairs):
            return "link"
        return errors.SyncError(text, version=self._transfer.payload.version, phase="transfer", members=names)

    def _avoids_slow_link(self, lane: Lane, awaited: Sequence[Member], now: float) -> bool:
        """Return whether one link slows all others, and another attempt avoids it."""
        links, address = self._ground.links, self._ground.roster.address
        receivers = [member for member in self._transfer.attempt.plan.receivers if member in awaited]
        held_up = lane.pace.held_up_lately(awaited, now)
        if len(receivers) < 2 or not held_up:
            return False
        before, behind = held_up[0]  # first in the chain; later links carry only what this one lets through
        slow = [member for member in receivers if address(member) == behind]
        if not slow or len(slow) == len(receivers) or self._left_s(lane, slow[0]) < LONG_S:
            return False
        rate = lane.pace.rate(slow[0]) or 0.0
        usual = [usual for usual in map(links.usual, map(address, receivers)) if usual]
        alone = len({end for _, end in held_up}) == 1 and before != lane.members[0]  # links before it could carry more
        known = alone or (bool(usual) and rate * UNUSUAL < min(usual))
        if not known and (usual or self.rates or self._left_s(lane, slow[0]) < UNKNOWN_S):
            return False  # else it is tried once, on no more evidence
        self.rates[behind] = rate
        if known:
            links.slow([(address(before), behind)], f"{slow[0].name} takes {rate:,.0f} bytes/s", now)
        return True

    def _leaves_slow(self, lane: Lane, awaited: Collection[Member], now: float) -> bool:
        """Leave out the members that would take too long; False: none."""
        transfer, host = self._transfer, self._ground.roster.host
        if self._others_at is None or not transfer.drops:
            return False
        patience = max(PATIENCE_S, PATIENCE * (self._others_at - self._began_at))
        late: dict[Member, str] = {}
        for member in [member for member in transfer.attempt.plan.receivers if member in awaited]:
            left_s = self._left_s(lane, member)
            far = FAR if lane.pace.rate(member) is None else 1.0
            if not lane.pace.stalls(member) and now + left_s > self._others_at + far * patience:
                rate = transfer.payload.nbytes / left_s if left_s else 0.0
                waited_s = now - self._others_at
                late[member] = f"it is slow: {rate:,.0f} bytes/s, and the others have had it for {waited_s:.1f} s"
        hosts = set(map(host, late))
        late |= {m: "its host is slow" for m in transfer.needers if m not in late and host(m) in hosts}
        return self.leave(late, now)

    def leave_far(self, now: float) -> None:
        """Before an attempt, leave out members too far to form a group in time."""
        transfer, roster = self._transfer, self._ground.roster
        if not transfer.drops:
            return
        version = transfer.payload.version
        here = {state.host for state in roster if version in state.held or version in state.parts}  # it is mapped there
        needers = [state for state in roster.states(transfer.needers) if state.host not in here]
        trips = {state.host: state.rtt_s for state in needers if state.rtt_s > FAR_TRIP_S}
        far = [state for state in needers if state.host in trips]
        self.leave({s.member: f"it is far: a round trip takes {trips[s.host]:.1f} s" for s in far}, now)

    def leave(self, late: Mapping[Member, str], now: float) -> bool:
        """Go on without slow members: caught up alone, back later, longer each time.

        False: there are none, or the version could not be committed without them: at
        least one other member, and ``min_targets`` replicas, must be left.
        """
        transfer, roster = self._transfer, self._ground.roster
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
        address = self._ground.roster.address
        slow = [member for member in self._transfer.needers if address(member) in {*self.rates, *behind}]
        return sorted(member.name for member in slow)

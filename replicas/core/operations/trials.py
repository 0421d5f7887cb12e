"""Trials: test quarantined peers beside the others.

A quarantined peer is not readmitted to see whether it works now: the others would pay
for each failure. It is tried beside them, in pairs with each of them, and released when
all pairs work. Trials come at growing intervals: a part of the time since its
quarantine. One that proved nothing is tried again at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from replicas.core.ground import Ground
from replicas.core.members.member_state import MemberState
from replicas.core.moving.lanes import Probe
from replicas.core.operations.pairing import Pairing
from replicas.messages.identity import Member

__all__ = ["Trials"]

TRIAL_PAIRS = 8
"""A member is tried with up to this many of the others, evenly spread."""
TRIAL_MIN_S = 1.0
TRIAL_MAX_S = 30.0
TRIAL_PART = 0.1
"""Interval between trials, as a part of the time since its quarantine."""


class Trials:
    """The trials of one channel of peers."""

    def __init__(self, ground: Ground, pairing: Pairing) -> None:
        self._ground = ground
        self._pairing = pairing
        self._since: dict[Member, float] = {}
        """When each peer was quarantined."""
        self._trials: dict[Member, Probe] = {}

    def look(self, now: float) -> None:
        """Start due trials, and forget peers that are not quarantined any more."""
        roster = self._ground.roster
        here = {s.member: s for s in roster.apart.values() if s.standing == "quarantined" and s.is_peer}
        for member in [member for member in self._since if member not in here]:
            del self._since[member]
            if member in self._trials:
                self._trials.pop(member).abandon()
        for member, state in here.items():
            self._since.setdefault(member, now)
            if member not in self._trials and roster.admissible(state, now):
                self._try(state, now)

    def _try(self, state: MemberState, now: float) -> None:
        live = self._pairing.live(self._pairing.domain_of(state.member))
        live = [other for other in live if not self._ground.roster.suspect(other, now)]
        tried = [*live[:: -(-len(live) // TRIAL_PAIRS) or 1], state]
        members = [one.member for one in tried]
        pairs = [(other, state.member) for other in members[:-1]]
        backend = self._ground.lanes.backend(tried, on_device=False)
        trial = Probe(self._ground.lanes, members, backend, now, partial(self._tried, state), pairs=pairs)
        if not trial.over:
            self._trials[state.member] = trial

    def _tried(self, state: MemberState, culprits: Mapping[Member, str] | None, now: float) -> None:
        self._trials.pop(state.member, None)
        if culprits:
            state.note = next(iter(culprits.values()))
            state.not_before = now + min(TRIAL_MAX_S, max(TRIAL_MIN_S, TRIAL_PART * (now - self._since[state.member])))
        elif culprits is not None:
            self._ground.roster.release(state)

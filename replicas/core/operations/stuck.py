"""Find the culprit of stuck operations, and test quarantined peers beside the others.

Theory of operation
===================

**An operation is stuck** when it has failed twice with all its members alive, or once
in a way that would repeat (two members cannot reach each other, or no byte moves). It
is parked (:attr:`replicas.core.operations.operations.Operations.on_stuck`), pairs of
its members are probed, and the fewest members that explain the bad pairs are
quarantined: of the two ends of one bad link the less important one, which is neither
the root of the operation nor one that had worked before when the other had not. Then it
is run again over the others; without a culprit it is run once more. After
:data:`MAX_PROBES` it ends with the error.

**A trial.** A quarantined peer is not readmitted to see whether it works now: the
others would pay for each failure. It is tried beside them, in pairs with each of them,
and released when all pairs work. Trials come at growing intervals: a part of the time
since its quarantine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from replicas import errors
from replicas.core.ground import Ground
from replicas.core.members.member_state import MemberState
from replicas.core.moving.probes import Probe
from replicas.core.operations.operation import Operation
from replicas.core.operations.operations import Operations
from replicas.messages.identity import Member

__all__ = ["StuckOperations"]

MAX_PROBES = 3
"""Of one operation."""
TRIAL_PAIRS = 8
"""A member is tried with up to this many of the others, evenly spread."""
TRIAL_MIN_S = 1.0
TRIAL_MAX_S = 30.0
TRIAL_PART = 0.1
"""Interval between trials, as a part of the time since its quarantine."""


@dataclass(slots=True, eq=False)
class _Apart:
    """A quarantined peer.

    :ivar since: when it was quarantined.
    :ivar trial: the one in progress.
    """

    since: float
    trial: Probe | None = None


class StuckOperations:
    """The stuck operations of one channel of peers, and its trials."""

    def __init__(self, ground: Ground, operations: Operations) -> None:
        self._ground = ground
        self._operations = operations
        self._probes: dict[str, tuple[Operation, Probe]] = {}
        self._probed: dict[str, int] = {}
        self._apart: dict[Member, _Apart] = {}
        operations.on_stuck = self.take

    def take(self, operation: Operation, error: errors.ReplicasError, now: float) -> bool:
        """Probe for the culprit; False: tried too often, or no pairs to compare."""
        if isinstance(error, errors.InternalError) or operation.pairwise or len(operation.participants) < 2:
            return False
        count = self._probed.get(operation.ref, 0)
        if count >= MAX_PROBES:
            return False
        self._probed[operation.ref] = count + 1
        members = self._operations.faults.by_weight(operation)
        backend = self._operations.backend_of(operation)
        probe = Probe(self._ground.lanes, members, backend, now, partial(self._ended, operation))
        if not probe.over:
            self._probes[operation.ref] = (operation, probe)
        return not probe.over

    def _ended(self, operation: Operation, culprits: Mapping[Member, str] | None, now: float) -> None:
        self._probes.pop(operation.ref, None)
        for member, why in (culprits or {}).items():
            self._ground.quarantine(member, why, now)
        if operation in self._operations.running:
            self._operations.resume(operation, now)

    # ------------------------------------------------------------ trials

    def _try(self, state: MemberState, apart: _Apart, now: float) -> None:
        partners = self._partners(state, now)
        pairs = [(other.member, state.member) for other in partners]
        backend = self._ground.lanes.backend([*partners, state], on_device=False)
        end = partial(self._tried, state, apart)
        members = [other.member for other in partners] + [state.member]
        trial = Probe(self._ground.lanes, members, backend, now, end, pairs=pairs)
        apart.trial = None if trial.over else trial

    def _partners(self, state: MemberState, now: float) -> Sequence[MemberState]:
        pairing = self._operations.pairing
        live = [s for s in pairing.live(pairing.domain_of(state.member)) if not self._ground.roster.suspect(s, now)]
        return live[:: -(-len(live) // TRIAL_PAIRS) or 1]

    def _tried(self, state: MemberState, apart: _Apart, culprits: Mapping[Member, str] | None, now: float) -> None:
        apart.trial = None
        if culprits is None:
            return  # another one follows
        if not culprits:
            self._ground.roster.release(state)
            return
        state.note = next(iter(culprits.values()))
        state.not_before = now + min(TRIAL_MAX_S, max(TRIAL_MIN_S, TRIAL_PART * (now - apart.since)))

    def _look(self, now: float) -> None:
        """Start due trials, and forget peers that are not quarantined any more."""
        roster = self._ground.roster
        here = {s.member: s for s in roster.apart.values() if s.standing == "quarantined" and s.is_peer}
        for member in [member for member in self._apart if member not in here]:
            trial = self._apart.pop(member).trial
            if trial is not None:
                trial.abandon()
        for member, state in here.items():
            apart = self._apart.setdefault(member, _Apart(now))
            if apart.trial is None and roster.admissible(state, now):
                self._try(state, apart, now)

    # ----------------------------------------------------------- events of the channel

    def lost(self, now: float) -> None:
        """Drop the trial of a lost peer."""
        self._look(now)

    def tick(self, now: float) -> None:
        """Check deadlines; forget operations that have ended."""
        running = {operation.ref for operation in self._operations.running}
        self._probed = {ref: count for ref, count in self._probed.items() if ref in running}
        for ref in [ref for ref in self._probes if ref not in running]:
            self._probes.pop(ref)[1].abandon()
        self._look(now)

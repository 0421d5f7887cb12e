"""Links between hosts: which of them do not work, and when they are tried again.

Theory of operation
===================

A link is a pair of addresses, and a link is bad, not a member: both ends may work with
everybody else. So nobody is thrown out for one. Bytes go over somebody who reaches both
ends (:mod:`replicas.core.moving.paths`), and a member whom nobody reaches who has the
bytes is caught up as soon as somebody does. Members with one address have no link
between them.

A link is *broken* when members could not connect over it before they built a group
(:mod:`replicas.sidecar.meeting`), or when it was in doubt, and a transfer over it has
stood still again. Nothing uses it but *trials*: a group of two members, tried again
soon and then a little later each time, until one works. No publish suffers from finding
that out, and a link is in use again within seconds after it was healed.

A link is *in doubt* when bytes were under way over it in a transfer that stood still,
or that it slowed down: other ways are taken as long as there are any. Each time that
happens the doubt is longer. Versions that went over a link put an end to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.core.members.member_state import MemberState
from replicas.core.moving.lanes import Lane, Lanes
from replicas.core.moving.probes import Probe
from replicas.messages.identity import Member

__all__ = ["Links", "Pairs"]

Pairs = Iterable[tuple[str, str]]
"""Of addresses, in either order."""

TRIAL = Backoff(0.5, 2.0)
"""From the end of a trial that failed to the next one."""
TRIALS_AT_ONCE = 8
DOUBT = Backoff(2.0, 300.0)


@dataclass(slots=True)
class _Fault:
    """What is known against one link. ``count``: how often it was found out; ``tries``:
    trials that have failed since."""

    why: str = ""
    count: int = 0
    broken: bool = False
    doubt_until: float = 0.0
    tries: int = 0
    trial_at: float = 0.0
    trial: Probe | None = None


class Links:
    """The links of one channel."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._roster = lanes.roster
        self._faults: dict[frozenset[str], _Fault] = {}
        self._usual: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether anything is known against any of them."""
        return bool(self._faults)

    def works(self, one: MemberState, other: MemberState, now: float, *, surely: bool = False) -> bool:
        """Whether the link between two members may be used. ``surely``: and is not in
        doubt."""
        fault = self._faults.get(frozenset((one.address, other.address)))
        return fault is None or not (fault.broken or (surely and now < fault.doubt_until))

    def broken_within(self, members: Iterable[Member]) -> bool:
        """Whether the link between some two of these is broken."""
        addresses = {state.address for state in self._roster.states(members)}
        return any(fault.broken and link <= addresses for link, fault in self._faults.items())

    def why(self, state: MemberState) -> str:
        """What is known against the links of a member, in words."""
        found = [fault.why for link, fault in self._faults.items() if fault.broken and state.address in link]
        return "; ".join(dict.fromkeys(found))

    def usual(self, address: str) -> float:
        """Bytes a second that came to there with the last version; 0: not known."""
        return self._usual.get(address, 0.0)

    def took(self, address: str, nbytes: int, seconds: float) -> None:
        """A version came to there over a lane in so long."""
        self._usual[address] = nbytes / max(seconds, 0.05)

    # ------------------------------------------------------------ what is found out

    def broke(self, pairs: Pairs, why: str, now: float) -> None:
        """No connection can be made between these addresses."""
        for link in {frozenset(pair) for pair in pairs if len(set(pair)) == 2}:
            fault = self._found(link, why, now)
            if not fault.broken:
                fault.broken, fault.tries, fault.trial_at = True, 0, now + TRIAL.first_s

    def doubt(self, pairs: Pairs, why: str, now: float) -> None:
        """Bytes were under way between these addresses in a transfer that stood
        still."""
        links = {frozenset(pair) for pair in pairs if len(set(pair)) == 2}
        again = [link for link in links if link in self._faults and now < self._faults[link].doubt_until]
        for link in links:
            self._found(link, why, now)
        self.broke([(min(link), max(link)) for link in again], why, now)

    def slow(self, pairs: Pairs, why: str, now: float) -> None:
        """Bytes went so slowly between these addresses that others had to wait."""
        for link in {frozenset(pair) for pair in pairs if len(set(pair)) == 2}:
            self._found(link, why, now)

    def proved(self, pairs: Pairs) -> None:
        """A version has gone over these."""
        for pair in pairs:
            fault = self._faults.get(frozenset(pair))
            if fault is not None and not fault.broken:
                del self._faults[frozenset(pair)]

    def _found(self, link: frozenset[str], why: str, now: float) -> _Fault:
        fault = self._faults.setdefault(link, _Fault())
        if now >= fault.doubt_until and not fault.broken:
            fault.count += 1
        fault.why = why
        fault.doubt_until = now + DOUBT.after(fault.count)
        return fault

    # ------------------------------------------------------------ trials

    def tick(self, now: float) -> None:
        """Begin the trials that are due; forget links to where nobody is any more."""
        if len(self._usual) > 2 * len(self._roster):
            there = {state.address for state in self._roster}
            self._usual = {address: rate for address, rate in self._usual.items() if address in there}
        if not self._faults:
            return
        ends: dict[str, MemberState] = {}
        for state in self._roster:
            if not state.observes and not self._roster.suspect(state, now):
                ends.setdefault(state.address, state)
        there = {state.address for state in self._roster}
        for link, fault in list(self._faults.items()):
            if fault.trial is not None:
                fault.trial.tick(now)
            elif not link <= there:
                del self._faults[link]
        due = [
            link for link, fault in self._faults.items() if fault.broken and not fault.trial and now >= fault.trial_at
        ]
        room = TRIALS_AT_ONCE - sum(fault.trial is not None for fault in self._faults.values())
        due.sort(key=lambda link: self._faults[link].trial_at)
        for link in [link for link in due if link <= ends.keys()][: max(0, room)]:
            self._try(link, [ends[address].member for address in sorted(link)], now)

    def _try(self, link: frozenset[str], members: list[Member], now: float) -> None:
        trial = Probe(self._lanes, members, "gloo", now, partial(self._tried, link))
        if not trial.over:
            self._faults[link].trial = trial

    def _tried(self, link: frozenset[str], culprits: Mapping[Member, str], now: float) -> None:
        fault = self._faults[link]
        fault.trial = None
        if culprits:
            fault.tries += 1
            fault.trial_at = now + TRIAL.after(fault.tries)
        else:
            fault.broken = False
            fault.doubt_until = now + DOUBT.after(fault.count)

    @property
    def _trials(self) -> list[Probe]:
        return [fault.trial for fault in self._faults.values() if fault.trial is not None]

    def lane_formed(self, lane: Lane, now: float) -> None:
        for trial in self._trials:
            trial.formed(lane, now)

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        for trial in self._trials:
            trial.failed(lane, error, now)

    def store_moved(self, now: float) -> None:
        """What is tried over the old store never ends: it is tried again."""
        for fault in self._faults.values():
            if fault.trial is not None:
                fault.trial.abandon()
                fault.trial, fault.trial_at = None, now

    def lost(self, member: Member, now: float) -> None:
        """A member is gone: what it was tried with says nothing, and is tried with
        another one."""
        for fault in self._faults.values():
            if fault.trial is not None and fault.trial.with_member(member):
                fault.trial.abandon()
                fault.trial, fault.trial_at = None, now

"""Links between hosts: which of them do not work, and when they are tried again.

A link is a pair of addresses, and the link is bad, not a member: both ends may work
with all others. Bytes go over a member that reaches both ends
(:mod:`replicas.core.moving.paths`), and a member that no holder reaches is caught up as
soon as one does. Members with one address have no link between them.

A link is *broken* when members could not connect over it before they built a group
(:mod:`replicas.sidecar.meeting`), or when it was in doubt and a transfer over it has
stood still again. Only *trials* use it: a group of two members, tried again soon and
then a little later each time, until one works. So no publish pays for testing it.

A link is *in doubt* when a transfer stood still, or was slowed, while bytes were under
way over it: other links are used as long as there are any. Each time the doubt lasts
longer. Versions that went over the link end the doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from replicas.common.backoff import Backoff
from replicas.core.members.member_state import MemberState
from replicas.core.moving.lanes import Lanes, Probe
from replicas.messages.identity import Member

Pairs = Iterable[tuple[str, str]]
"""Pairs of addresses, in either order."""

TRIAL = Backoff(0.5, 2.0)
"""Delay from the end of a failed trial to the next one."""
TRIALS_AT_ONCE = 8
DOUBT = Backoff(2.0, 300.0)


@dataclass(slots=True)
class _Fault:
    """The fault of one link.

    :ivar count: how often it was found.
    :ivar tries: trials that have failed since.
    """

    why: str = ""
    count: int = 0
    broken: bool = False
    doubt_until: float = 0.0
    tries: int = 0
    trial_at: float = 0.0
    trial: Probe | None = None


class Links:
    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._roster = lanes.roster
        self._faults: dict[frozenset[str], _Fault] = {}
        self._usual: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether any link has a known fault."""
        return bool(self._faults)

    def works(self, one: MemberState, other: MemberState, now: float, *, surely: bool = False) -> bool:
        """Return whether the link between two members may be used.

        ``surely``: a link in doubt may not.
        """
        fault = self._faults.get(frozenset((one.address, other.address)))
        return fault is None or not (fault.broken or (surely and now < fault.doubt_until))

    def broken_within(self, members: Iterable[Member]) -> bool:
        """Return whether a link between two of these members is broken."""
        addresses = {state.address for state in self._roster.states(members)}
        return any(fault.broken and link <= addresses for link, fault in self._faults.items())

    def why(self, state: MemberState) -> str:
        """Return the reasons why links of a member are broken, as text."""
        found = [fault.why for link, fault in self._faults.items() if fault.broken and state.address in link]
        return "; ".join(dict.fromkeys(found))

    def usual(self, address: str) -> float:
        """Return the last receive rate of an address in bytes a second; 0: unknown."""
        return self._usual.get(address, 0.0)

    def took(self, address: str, nbytes: int, seconds: float) -> None:
        """Note that a version was received at this address over a lane."""
        self._usual[address] = nbytes / max(seconds, 0.05)

    # ------------------------------------------------------------ faults

    def broke(self, pairs: Pairs, why: str, now: float) -> None:
        """Mark links broken: no connection can be made between these addresses."""
        for link in _links(pairs):
            fault = self._found(link, why, now)
            if not fault.broken:
                fault.broken, fault.tries, fault.trial_at = True, 0, now + TRIAL.first_s

    def doubt(self, pairs: Pairs, why: str, now: float) -> None:
        """Mark links doubtful: a transfer with bytes on them stood still."""
        links = _links(pairs)
        again = [link for link in links if link in self._faults and now < self._faults[link].doubt_until]
        self.slow(pairs, why, now)
        self.broke([(min(link), max(link)) for link in again], why, now)

    def slow(self, pairs: Pairs, why: str, now: float) -> None:
        """Mark links doubtful: their slow bytes made other members wait."""
        for link in _links(pairs):
            self._found(link, why, now)

    def proved(self, pairs: Pairs) -> None:
        """Clear the doubt of links that a version has gone over."""
        for link in _links(pairs) & self._faults.keys():
            if not self._faults[link].broken:
                del self._faults[link]

    def _found(self, link: frozenset[str], why: str, now: float) -> _Fault:
        fault = self._faults.setdefault(link, _Fault())
        if now >= fault.doubt_until and not fault.broken:
            fault.count += 1
        fault.why = why
        fault.doubt_until = now + DOUBT.after(fault.count)
        return fault

    # ------------------------------------------------------------ trials

    def tick(self, now: float) -> None:
        """Start due trials; forget links to addresses that are gone."""
        crowded = len(self._usual) > 2 * len(self._roster)
        if not self._faults and not crowded:
            return
        there = {state.address for state in self._roster}
        if crowded:
            self._usual = {address: rate for address, rate in self._usual.items() if address in there}
        for link, fault in list(self._faults.items()):
            if fault.trial is None and not link <= there:
                del self._faults[link]
        if not any(fault.broken for fault in self._faults.values()):
            return
        ends: dict[str, MemberState] = {}
        for state in self._roster:
            if not state.observes and not self._roster.suspect(state, now):
                ends.setdefault(state.address, state)
        room = max(0, TRIALS_AT_ONCE - sum(fault.trial is not None for fault in self._faults.values()))
        due = [(f.trial_at, link) for link, f in self._faults.items() if f.broken and not f.trial and now >= f.trial_at]
        due.sort(key=lambda entry: entry[0])
        for link in [link for _, link in due if link <= ends.keys()][:room]:
            members = [ends[address].member for address in sorted(link)]
            self._faults[link].trial = Probe(self._lanes, members, "gloo", now, partial(self._tried, link))

    def _tried(self, link: frozenset[str], culprits: Mapping[Member, str] | None, now: float) -> None:
        fault = self._faults[link]
        fault.trial = None
        if culprits is None:
            fault.trial_at = now  # its store or a member was lost
        elif culprits:
            fault.tries += 1
            fault.trial_at = now + TRIAL.after(fault.tries)
        else:
            fault.broken = False
            fault.doubt_until = now + DOUBT.after(fault.count)


def _links(pairs: Pairs) -> set[frozenset[str]]:
    """Return the links between two addresses; members with one address have none."""
    return {frozenset(pair) for pair in pairs if len(set(pair)) == 2}

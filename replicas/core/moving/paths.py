"""Plan one attempt of a transfer: the giver of each member that needs the version.

Theory of operation
===================

On a host with a holder of the version, all other members *map* its memory. On a host
without a holder, a single member, its *leader* for this attempt, gets the version into
a slot of its own; the others of that host *wait*, and map the slot as soon as it is
full. So each host gets every byte once.

A leader *pulls*: from the leader before it, which serves the bytes that it has already
received, or else from the holder. So a pull concerns two members, and a slow or failing
one delays no other.

If the channel sends by process group, one holder *broadcasts* the version to the
leaders instead (:mod:`replicas.core.operations.running`). A process group connects
every pair of its members, so a link that does not work
(:mod:`replicas.core.moving.links`) keeps its two ends out of one group: leaders that do
not fit the holder and the leaders already chosen wait for the next attempt, as do slow
ones.

A version that exists only in parts at its source ranks (``ranks = "all"``) is assembled
by the leaders: each copies the parts that lie on its own host there, and pulls the
others. Memory that the coordinator *keeps* for lost members
(:class:`~replicas.core.members.hosts.Keeping`) can be mapped or copied on its host, but
not sent. Slow members come last; far ones follow near ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from replicas.core.members.member_state import MemberState
from replicas.messages.identity import Member

HOLDERS_MAX = 2
"""Holders named to a leader: more would only prolong its attempts."""
CHAIN_MAX = 2
"""Leaders before it that are named to a leader, the nearest first."""
FAR_S = 0.045
"""Members with a longer round trip to the coordinator come after the others. The bound
exceeds the 40 ms by which a kernel delays an acknowledgement."""
Works = Callable[[MemberState, MemberState], bool]
"""Returns whether the link between two members works."""
Pulls = dict[int, tuple[Member, ...]]
"""By part (:data:`IMAGE`: the whole): the members to pull it from, in order."""
IMAGE = -1


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Which member gets a version from which, in one attempt.

    :param mode: ``"image"``: from a holder; ``"parts"``: from the ranks of a source.
    :param maps: the lender of each member that maps.
    :param pulls: the holders of each leader that pulls; empty if all parts are on its
        host.
    :param broadcast: the holder that broadcasts the version, then the leaders that
        receive it.
    :param local: numbers of the parts that a leader copies on its own host.
    :param owners: of the parts, in order.
    :param waiting: members that wait for the next attempt.
    """

    mode: Literal["image", "parts"]
    maps: dict[Member, Member] = field(default_factory=dict)
    pulls: dict[Member, Pulls] = field(default_factory=dict)
    broadcast: tuple[Member, ...] = ()
    local: dict[Member, tuple[int, ...]] = field(default_factory=dict)
    owners: tuple[Member, ...] = ()
    waiting: frozenset[Member] = frozenset()

    @property
    def servers(self) -> tuple[Member, ...]:
        """Holders that others pull from, and that do not pull themselves, each once."""
        found = dict.fromkeys(one for parts in self.pulls.values() for holders in parts.values() for one in holders)
        return tuple(holder for holder in found if holder not in self.pulls)

    @property
    def givers(self) -> tuple[Member, ...]:
        """Members that give the version, also by memory that others of their host read.

        The one that broadcasts, or that is pulled from, comes first.
        """
        parts = {self.owners[part] for numbers in self.local.values() for part in numbers}
        return tuple(dict.fromkeys((*self.broadcast[:1], *self.servers, *sorted({*self.maps.values(), *parts}))))

    @property
    def serves_any(self) -> bool:
        """True if any member gets the version in this attempt."""
        return bool(self.maps or self.pulls or self.broadcast)

    def part_of(self, owner: Member) -> int:
        """Return the number of the part that ``owner`` serves; -1 for the whole."""
        return self.owners.index(owner) if self.mode == "parts" else IMAGE


def all_work(one: MemberState, other: MemberState) -> bool:
    """Return True for any two members: no link is in doubt."""
    return True


def plan(
    version: int,
    needers: Sequence[MemberState],
    holders: Sequence[MemberState],
    owners: Sequence[MemberState],
    filling: Member | None = None,
    kept: Collection[Member] = (),
    works: Works = all_work,
    *,
    by_group: bool = False,
) -> TransferPlan | None:
    """Plan how ``needers`` get the version; return None if no complete source is left.

    It changes and sends nothing.

    :param needers: the members that are to get it.
    :param holders: of the whole version, the preferred ones first.
    :param owners: of its parts, in order, if all of them are present; ignored if there
        is a holder.
    :param filling: the holder that is still filling its slot: members on its host wait
        until they can map the slot.
    :param kept: lost holders and owners of which only the kept memory is left.
    :param works: which links work.
    :param by_group: whether a holder of the whole version broadcasts it to the leaders.
    """
    ordered = sorted(needers, key=lambda state: (state.slow, state.rtt_s > FAR_S, state.host, state.member))
    if not holders:
        return _from_parts(version, ordered, owners, kept, works) if owners else None
    on_host = {state.host: state.member for state in reversed(holders) if version in state.places}
    maps = {state.member: on_host[state.host] for state in ordered if state.host in on_host}
    others = [state for state in ordered if state.host not in on_host]
    soon = {state.host for state in holders if state.member == filling}
    able = [state for state in holders if state.member not in kept]
    if needers and not maps and not able:
        return None
    leaders = _leaders([state for state in others if state.host not in soon])
    broadcast = _group(able, leaders, works) if by_group else ()
    pulled = {} if broadcast else {one: {IMAGE: givers} for one, givers in _pulls(able, leaders, works).items()}
    waiting = frozenset(state.member for state in others) - pulled.keys() - set(broadcast)
    return TransferPlan(mode="image", maps=maps, pulls=pulled, broadcast=broadcast, waiting=waiting)


def _from_parts(
    version: int, needers: Sequence[MemberState], owners: Sequence[MemberState], kept: Collection[Member], works: Works
) -> TransferPlan | None:
    """Plan how the leaders (one member for each host) assemble all parts.

    Return None if no leader can get them. The parameters are those of :func:`plan`.
    """
    there = {owner.host for owner in owners if owner.member in kept}
    leaders = _leaders([state for state in needers if there <= {state.host}])
    if needers and not leaders:
        return None
    readable = [(part, owner.host) for part, owner in enumerate(owners) if version in owner.places]
    local = {state.member: tuple(part for part, host in readable if host == state.host) for state in leaders}
    pulled = _pulled_parts(owners, leaders, local, works)
    return TransferPlan(
        mode="parts",
        pulls=pulled,
        local={member: numbers for member, numbers in local.items() if numbers and member in pulled},
        owners=tuple(owner.member for owner in owners),
        waiting=frozenset(state.member for state in needers) - pulled.keys(),
    )


def _pulled_parts(
    owners: Sequence[MemberState], leaders: Sequence[MemberState], local: Mapping[Member, tuple[int, ...]], works: Works
) -> dict[Member, Pulls]:
    """Return, by leader and part, the members that the leader pulls the part from.

    A leader is left out if any owner of a part on another host does not reach it.

    :param owners: of the parts, in order.
    :param leaders: one member of each host, which gets the version for the others.
    :param local: numbers of the parts that each leader copies on its own host.
    :param works: as of :func:`plan`.
    """

    def reached(leader: MemberState) -> bool:
        """Return True if the owners of all parts on other hosts reach the leader."""
        remote = (owner for part, owner in enumerate(owners) if part not in local[leader.member])
        return all(works(owner, leader) for owner in remote)

    able = [leader for leader in leaders if reached(leader)]
    pulls: dict[Member, Pulls] = {leader.member: {} for leader in able}
    for part, owner in enumerate(owners):
        remote = [leader for leader in able if part not in local[leader.member]]
        for member, givers in _pulls([owner], remote, works).items():
            pulls[member][part] = givers
    return pulls


def _leaders(states: Sequence[MemberState]) -> tuple[MemberState, ...]:
    """Return the first of ``states`` on each host: it gets the version for the
    others."""
    first: dict[int, MemberState] = {}
    for state in states:
        first.setdefault(state.host, state)
    return tuple(first.values())


def _pulls(
    able: Sequence[MemberState], leaders: Sequence[MemberState], works: Works
) -> dict[Member, tuple[Member, ...]]:
    """Return the members that each leader pulls from, the first choice first.

    These are a few leaders before it in the chain, none of them slow, and then the
    preferred holders. The first leader with a long round trip pulls from holders alone,
    and later ones from no leader before that one, as only holders have deltas for them.
    A leader that no holder reaches is left out.

    :param able: holders that can send, the preferred ones first.
    :param leaders: the members that pull, in the order of their chain.
    """
    pulls: dict[Member, tuple[Member, ...]] = {}
    before: list[MemberState] = []
    for leader in leaders:
        if leader.rtt_s > FAR_S and not any(state.rtt_s > FAR_S for state in before):
            before = []
        reached = list(islice((state for state in able if works(state, leader)), HOLDERS_MAX))
        if not reached:
            continue
        chain = list(islice((state for state in reversed(before) if works(state, leader)), CHAIN_MAX))
        pulls[leader.member] = tuple(state.member for state in (*chain, *reached))
        if not leader.slow:
            before.append(leader)
    return pulls


def _group(able: Sequence[MemberState], leaders: Sequence[MemberState], works: Works) -> tuple[Member, ...]:
    """Return the members of the broadcast: a holder, and the leaders that it reaches.

    Every two of them must have a working link. The first holder that reaches any leader
    is taken; slow leaders are in no group with others. Return () if there is none.
    """
    alike = [leader for leader in leaders if leader.slow == leaders[0].slow]
    for holder in able:
        found = [holder]
        for leader in alike:
            if all(works(one, leader) for one in found):
                found.append(leader)
        if len(found) > 1:
            return tuple(state.member for state in found)
    return ()

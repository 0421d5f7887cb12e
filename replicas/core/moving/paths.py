"""Plan one attempt of a transfer: the giver of each member that needs the version.

Theory of operation
===================

On a host with a holder of the version, all other members *map* its memory. On a host
without a holder, a single member, its *leader* for this attempt, *receives* the version
over the lane into a slot of its own; the others of that host *wait*, and map the slot
in the next attempt. So each host gets every byte once, and members that only map are in
no process group.

A leader *pulls* instead if no lane is wanted, or the lanes do not work: from the leader
before it, which serves the bytes that it has already received, or else from the holder.
So a pull concerns two members, and a slow or failing one delays no other.

A version that exists only in parts at its source ranks (``ranks = "all"``) is assembled
by the leaders: each copies the parts that lie on its own host there, and receives or
pulls the others. Memory that the coordinator *keeps* for lost members
(:class:`~replicas.core.members.hosts.Keeping`) can be mapped or copied on its host, but
not sent.

The lane is a chain for each part (:attr:`TransferPlan.routes`): the owner first, then
the leaders, in order of their hosts. A process group connects every pair of its
members, so a link that does not work (:mod:`replicas.core.moving.links`) keeps its two
ends out of one lane: leaders that do not fit the sender and the leaders already chosen
wait, and get the version in the next attempt from a new holder that reaches them. Slow
members share no lane with other receivers, and come last; far ones follow near ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
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
"""Returns whether two members may be in one lane."""
Pulls = dict[int, tuple[Member, ...]]
"""By part (:data:`IMAGE`: the whole): the members to pull it from, in order."""
IMAGE = -1


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One attempt.

    :param mode: ``"image"``: from a holder; ``"parts"``: from the ranks of a source.
    :param senders: members of the lane that send, in its order.
    :param receivers: the leaders, which fill slots of their own.
    :param maps: the lender of each member that maps.
    :param pulls: the holders of each leader that pulls; empty if all parts are on its
        host.
    :param routes: for each part (an image is one) the members that it passes through;
        empty if it need not be sent.
    :param local: numbers of the parts that a receiver copies on its own host.
    :param owners: of the parts, in order.
    :param waiting: members that wait for the next attempt.
    """

    mode: Literal["image", "parts"]
    senders: tuple[Member, ...] = ()
    receivers: tuple[Member, ...] = ()
    maps: dict[Member, Member] = field(default_factory=dict)
    pulls: dict[Member, Pulls] = field(default_factory=dict)
    routes: tuple[tuple[Member, ...], ...] = ()
    local: dict[Member, tuple[int, ...]] = field(default_factory=dict)
    owners: tuple[Member, ...] = ()
    waiting: frozenset[Member] = frozenset()

    @property
    def lane(self) -> tuple[Member, ...]:
        """Members of the process group to form, senders first."""
        routed = {member for route in self.routes for member in route}
        return (*self.senders, *(member for member in self.receivers if member in routed))

    @property
    def lenders(self) -> frozenset[Member]:
        """Members whose memory other members of their host read."""
        parts = {self.owners[part] for numbers in self.local.values() for part in numbers}
        return frozenset({*self.maps.values(), *parts})

    @property
    def servers(self) -> tuple[Member, ...]:
        """Holders that are pulled from, each once."""
        found = dict.fromkeys(
            holder for pulled in self.pulls.values() for holders in pulled.values() for holder in holders
        )
        return tuple(holder for holder in found if holder not in self.pulls)

    def part_of(self, owner: Member) -> int:
        """Return the part that a server has; :data:`IMAGE` for the whole."""
        return self.owners.index(owner) if self.mode == "parts" else IMAGE

    @property
    def givers(self) -> tuple[Member, ...]:
        """Members that give the version, senders first."""
        first = (*self.senders, *self.servers)
        return (*first, *sorted(self.lenders - set(first)))

    @property
    def concerned(self) -> tuple[Member, ...]:
        """All members with a task in this attempt."""
        return (*self.senders, *self.receivers, *self.maps, *self.pulls, *self.servers)


def plan(
    version: int,
    needers: Sequence[MemberState],
    holders: Sequence[MemberState],
    owners: Sequence[MemberState],
    filling: Member | None = None,
    kept: Collection[Member] = (),
    works: Works | None = None,
    *,
    pulls: bool = False,
) -> TransferPlan | None:
    """Plan how ``needers`` get the version; return None if no complete source is left.

    :param holders: of the whole version, the preferred ones first.
    :param owners: of its parts, in order, if all of them are present; ignored if there
        is a holder.
    :param filling: the holder that is still filling its slot: members on its host wait
        until they can map the slot.
    :param kept: lost holders and owners of which only the kept memory is left.
    :param works: which links work; None: all.
    :param pulls: whether leaders pull; else they receive over a lane.
    """
    ordered = sorted(needers, key=lambda state: (state.slow, state.rtt_s > FAR_S, state.host, state.member))
    if holders:
        return _from_holders(version, ordered, holders, filling, kept, works, pulls=pulls)
    if owners:
        return _from_parts(version, ordered, owners, kept, works, pulls=pulls)
    return None


def _from_holders(
    version: int,
    needers: Sequence[MemberState],
    holders: Sequence[MemberState],
    filling: Member | None,
    kept: Collection[Member],
    works: Works | None,
    *,
    pulls: bool,
) -> TransferPlan | None:
    on_host = {state.host: state.member for state in reversed(holders) if version in state.places}
    maps = {state.member: on_host[state.host] for state in needers if state.host in on_host}
    others = [state for state in needers if state.host not in on_host]
    soon = {state.host for state in holders if state.member == filling}
    able = [state for state in holders if state.member not in kept]
    leaders = _leaders([state for state in others if state.host not in soon]) if able else ()
    if needers and not maps and not able:
        return None
    if pulls:
        pulled = {member: {IMAGE: givers} for member, givers in _pulls(able, leaders, works).items()}
        waiting = frozenset(state.member for state in others) - pulled.keys()
        return TransferPlan(mode="image", maps=maps, pulls=pulled, waiting=waiting)
    senders, receivers = _reached(able, leaders, works)
    return TransferPlan(
        mode="image",
        senders=senders,
        receivers=receivers,
        maps=maps,
        routes=((*senders, *receivers),) if receivers else (),
        waiting=frozenset(state.member for state in others) - set(receivers),
    )


def _from_parts(
    version: int,
    needers: Sequence[MemberState],
    owners: Sequence[MemberState],
    kept: Collection[Member],
    works: Works | None,
    *,
    pulls: bool,
) -> TransferPlan | None:
    there = {owner.host for owner in owners if owner.member in kept}
    leaders = _leaders([state for state in needers if there <= {state.host}])
    if needers and not leaders:
        return None
    senders = [owner for owner in owners if owner.member not in kept]
    if not pulls:
        leaders = tuple(_fitting(senders, leaders, works))
    readable = [(part, owner.host) for part, owner in enumerate(owners) if version in owner.places]
    local = {state.member: tuple(part for part, host in readable if host == state.host) for state in leaders}
    if pulls:
        pulled = _pulled_parts(owners, leaders, local, works)
        return TransferPlan(
            mode="parts",
            pulls=pulled,
            local={member: numbers for member, numbers in local.items() if numbers and member in pulled},
            owners=tuple(owner.member for owner in owners),
            waiting=frozenset(state.member for state in needers) - pulled.keys(),
        )
    receivers = tuple(state.member for state in leaders)
    routes = []
    for part, owner in enumerate(owners):
        remote = tuple(member for member in receivers if part not in local[member])
        routes.append((owner.member, *remote) if remote else ())
    return TransferPlan(
        mode="parts",
        senders=tuple(route[0] for route in routes if route),
        receivers=receivers,
        routes=tuple(routes),
        local={member: numbers for member, numbers in local.items() if numbers},
        owners=tuple(owner.member for owner in owners),
        waiting=frozenset(state.member for state in needers) - set(receivers),
    )


def _pulled_parts(
    owners: Sequence[MemberState],
    leaders: Sequence[MemberState],
    local: Mapping[Member, tuple[int, ...]],
    works: Works | None,
) -> dict[Member, Pulls]:
    """Return the members that each leader pulls each part from.

    Leaders that the owners of all their parts do not reach are left out.
    """

    def reached(leader: MemberState) -> bool:
        remote = (owner for part, owner in enumerate(owners) if part not in local[leader.member])
        return works is None or all(works(owner, leader) for owner in remote)

    able = [leader for leader in leaders if reached(leader)]
    pulls: dict[Member, Pulls] = {leader.member: {} for leader in able}
    for part, owner in enumerate(owners):
        remote = [leader for leader in able if part not in local[leader.member]]
        for member, givers in _pulls([owner], remote, works).items():
            pulls[member][part] = givers
    return pulls


def _leaders(states: Sequence[MemberState]) -> tuple[MemberState, ...]:
    """Return the first member of each host."""
    first: dict[int, MemberState] = {}
    for state in states:
        first.setdefault(state.host, state)
    return tuple(first.values())


def _pulls(
    able: Sequence[MemberState], leaders: Sequence[MemberState], works: Works | None
) -> dict[Member, tuple[Member, ...]]:
    """Return the members that each leader pulls from: leaders before it, best holders.

    No leader pulls from a slow leader. The first far leader pulls from a holder: a
    leader takes bytes where its own link is fast, and then has no deltas for others.
    """
    pulls: dict[Member, tuple[Member, ...]] = {}
    before: list[MemberState] = []
    for leader in leaders:
        if leader.rtt_s > FAR_S and not any(state.rtt_s > FAR_S for state in before):
            before = []
        reached = [state for state in able if works is None or works(state, leader)][:HOLDERS_MAX]
        if not reached:
            continue
        chain = [state for state in reversed(before) if works is None or works(state, leader)][:CHAIN_MAX]
        pulls[leader.member] = tuple(state.member for state in (*chain, *reached))
        if not leader.slow:
            before.append(leader)
    return pulls


def _reached(
    able: Sequence[MemberState], leaders: Sequence[MemberState], works: Works | None
) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
    """Return the first holder that reaches any leader, and the leaders it sends to."""
    for holder in able if leaders else ():
        fitting = _fitting([holder], leaders, works)
        if fitting:
            return (holder.member,), tuple(state.member for state in fitting)
    return (), ()


def _fitting(
    senders: Sequence[MemberState], leaders: Sequence[MemberState], works: Works | None
) -> Sequence[MemberState]:
    """Return the leaders that can share a lane with the senders and with each other."""
    leaders = [leader for leader in leaders if leader.slow == leaders[0].slow]
    if works is None:
        return leaders
    if not all(works(one, other) for one, other in combinations(senders, 2)):
        return []
    found: list[MemberState] = []
    for leader in leaders:
        if all(works(leader, other) for other in (*senders, *found) if other is not leader):
            found.append(leader)
    return found

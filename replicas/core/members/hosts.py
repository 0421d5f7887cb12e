"""Find which members share memory, when lent memory is free, and which to keep.

Names and addresses do not prove that two members are on one host; shared memory does.
Each process has a *beacon*, a small memory with a nonce in it. Members with equal boot
id and user (and, for GPU memory, pid namespace) *may* be on one host; a newcomer gets
the beacons of a few such members of each known host
(:class:`~replicas.messages.Locate`), tries to open them, and reports which one it could
read. It is admitted when it has answered. A member is a host of its own, and receives
all bytes, if it can open none, does not answer in time, or later fails to map a slot of
that host, and always with ``transport = "group"``. The coordinator has a beacon, too.
With ``staging = "device"`` members are on one "host" if they also have the same GPU;
the coordinator has no beacon there.

**Lent memory.** The owner of a slot (a publisher, or the member that received a version
for its host) may write it again once no member has it mapped: readers hold locks on the
memory. But a lock does not say why it is held. So the coordinator sends
:class:`~replicas.messages.Released` to the owner of an older version when no responsive
member of its host has that version. A lock that is left then belongs to a process that
is frozen or cut off, and the owner retires the memory instead of waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field

from replicas.common.sizes import list_text
from replicas.core.base.effects import Effect, Keep, LetGo, Send
from replicas.core.members.member_state import Held, MemberState
from replicas.core.members.roster import Roster
from replicas.errors import Busy, ReplicasError
from replicas.messages import Beacon, LaneAhead, Locate, Located, Released, SlotPlace
from replicas.messages.identity import Member

LOCATE_S = 5.0
"""How long a newcomer may take to answer Locate. Only its own admission waits."""
NEWCOMERS_S = 1.0
"""How long a publish waits for that, so that new members take part in it."""
REPRESENTATIVES = 3
"""Number of members of one host whose beacons a newcomer tries."""

Place = tuple[str, int, int, str]
"""Boot id, pid namespace, user and GPU: equal on one host, but no proof of it.

Namespace and GPU count for GPU memory only, else they are 0 and "": descriptors of
other memory are passed over sockets.
"""


@dataclass(slots=True)
class _Search:
    """State of a newcomer's search for its host.

    :ivar hosts: of the beacons in the last Locate, in their order.
    :ivar tried: all hosts tried so far.
    """

    until: float
    hosts: list[int] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)


class Hosts:
    """Which members of a channel can map each other's memory: those of one *host*.

    Each host has a number.

    :param here: boot id and beacon of the coordinator's process, if it has memory to
        share.
    :ivar own: number of the coordinator's host; 0: it has none.
    """

    def __init__(self, roster: Roster, out: list[Effect], here: tuple[str, Beacon] | None) -> None:
        """Start without members; send nothing.

        :param out: the channel's effects, to which messages are added.
        :param here: boot id and beacon of the coordinator's process, if it can share
            memory with members; None: it cannot.
        """
        self._roster, self._out = roster, out
        self._shared = roster.config.transport != "group"
        self._by_device = roster.config.staging == "device"
        self._new = itertools.count(1).__next__
        self._members: dict[int, dict[Member, MemberState]] = {}
        self._searches: dict[Member, _Search] = {}
        self._unwarned: dict[Member, None] = {}
        """Members that do not know of another host yet, in the order of placing."""
        self._here = here if self._shared and not self._by_device else None
        self.own = self._new() if self._here is not None else 0

    def on(self, host: int) -> list[MemberState]:
        """Return the members on the host of this number."""
        return list(self._members.get(host, {}).values())

    def delays_publish(self, since: float, now: float) -> bool:
        """Return True if a publish is to wait until the hosts of newcomers are known.

        A newcomer is a target whose host is not known yet. A publish waits for a second
        at most, and only for newcomers that joined about a second ago or later. Nothing
        is changed.

        :param since: when the publish was ready to move, by the clock of ``now``.
        """
        if not self._searches or now >= since + NEWCOMERS_S:
            return False
        late = now + LOCATE_S - NEWCOMERS_S
        new = [member for member, search in self._searches.items() if search.until > late]
        return any(state.is_target and state.carries for state in self._roster.states(new))

    # ------------------------------------------------------------ finding the host

    def joined(self, state: MemberState, now: float) -> None:
        """Queue a request to a new member to try beacons, by which its host is found.

        It has 5 s from ``now`` to answer. If there are no beacons to try, it is a host
        of its own at once. Observers have no host, and get no request.
        """
        if not state.observes:
            self._search(state, _Search(now + LOCATE_S))

    def _search(self, state: MemberState, search: _Search) -> None:
        """Ask the member to try the beacons of hosts that it has not tried (Locate).

        If there are none, make the member a host of its own.

        :param search: what was tried so far; it is stored until the answer.
        """
        beacons, search.hosts = self._candidates(state, search.tried)
        if not beacons:
            self._put(state, self._new())
            return
        search.tried.update(search.hosts)
        self._searches[state.member] = search
        self._out.append(Send(state.member, Locate(tuple(beacons))))

    def located(self, state: MemberState, message: Located) -> None:
        """Handle a member's answer: put it on the host whose beacon it could read.

        Without a match, have it try hosts that have appeared since; if there are none,
        it is a host of its own. An answer that is not waited for is ignored.
        """
        search = self._searches.pop(state.member, None)
        if search is None:
            return
        found = search.hosts[message.found] if 0 <= message.found < len(search.hosts) else 0
        if found and (found == self.own or found in self._members):  # all members of that host may have left meanwhile
            self._put(state, found)
        else:
            self._search(state, search)

    def make_own_host(self, state: MemberState) -> None:
        """Move the member to a new host of its own, as it cannot map others' memory.

        It is sent all bytes from now on.
        """
        self._remove_member(state)
        self._put(state, self._new())

    def lost(self, state: MemberState) -> None:
        """Remove a lost member from its host, and forget its search for one."""
        self._searches.pop(state.member, None)
        self._unwarned.pop(state.member, None)
        self._remove_member(state)

    def tick(self, now: float) -> None:
        """Put each member that has not answered in time on a new host of its own.

        The answer is that to Locate, by which a member finds its host. Call regularly.
        """
        for member, search in list(self._searches.items()):
            state = self._roster.get(member)
            if now > search.until and state is not None:
                del self._searches[member]
                self._put(state, self._new())

    def _candidates(self, state: MemberState, tried: set[int]) -> tuple[list[Beacon], list[int]]:
        """Return the beacons to try for the member, and the number of each one's host.

        Two lists of equal length. A beacon is a small memory that proves a host.

        :param tried: hosts to leave out.
        """
        place = self._place(state)
        if place is None:
            return [], []
        found: list[tuple[Beacon, int]] = []
        if self._here is not None and self.own not in tried:
            boot_id, beacon = self._here
            found += [(beacon, self.own)] if (boot_id, 0, beacon.uid, "") == place else []
        for host, members in self._members.items():
            some = list(itertools.islice(members.values(), REPRESENTATIVES))
            if host not in tried and host != self.own and self._place(some[0]) == place:  # equal for all of a host
                found += [(other.hello.beacon, host) for other in some if other.hello.beacon is not None]
        return [beacon for beacon, _ in found], [host for _, host in found]

    def _place(self, state: MemberState) -> Place | None:
        """Return a key that is equal for members which may be on one host, from their
        Hellos.

        Return None if the member never shares memory.
        """
        hello = state.hello
        if not self._shared or hello.beacon is None or state.is_peer or (self._by_device and not hello.cuda_devices):
            return None
        namespace, gpu = (hello.process.pid_namespace, hello.cuda_devices[0]) if self._by_device else (0, "")
        return hello.process.boot_id, namespace, hello.beacon.uid, gpu

    def _put(self, state: MemberState, host: int) -> None:
        """Put the member on this host.

        If there are several hosts now, queue a notice (LaneAhead), once, to each member
        that is not a peer: they prepare to send bytes over the network.
        """
        state.host = host
        self._members.setdefault(host, {})[state.member] = state
        if not state.is_peer:
            self._unwarned[state.member] = None
        if len(self._members) > 1:  # more than one host: members prepare for lanes, or pulls
            self._out.extend(Send(member, LaneAhead()) for member in self._unwarned)
            self._unwarned.clear()

    def _remove_member(self, state: MemberState) -> None:
        """Take the member off its host, and forget a host without members."""
        members = self._members.get(state.host, {})
        members.pop(state.member, None)
        if not members:
            self._members.pop(state.host, None)
        state.host = 0

    # ------------------------------------------------------------ lent memory

    def release(self, latest: int, now: float, *, host: int | None = None) -> None:
        """Tell members which old versions in their memory are no longer read by others.

        For each version older than ``latest`` that no other responsive member of the
        host holds, queue Released to the owner of the memory: it may reuse the slot
        without waiting for locks.

        :param latest: the newest committed version.
        :param host: only owners on this host; None: all.
        """
        for owner in self._roster if host is None else self.on(host):
            for version in [version for version in owner.lent if version < latest] if owner.lent else ():
                others = (other for other in self.on(owner.host) if other is not owner)
                if not any(version in other.held and not self._roster.is_suspect(other, now) for other in others):
                    owner.lent.discard(version)
                    self._out.append(Send(owner.member, Released(version)))

    def readers(self, owners: Iterable[MemberState], latest: int) -> dict[str, set[int]]:
        """Return the members that keep the memory of ``owners`` in use, by name.

        Each comes with the versions, older than ``latest``, that it has mapped there.
        Return {} on a channel of GPU memory: its members copy, and map nothing.
        """
        pairs = [(one, other) for one in owners for other in self.on(one.host) if one is not other]
        kept = {other.member.name: one.lent & one.held.keys() & other.held.keys() for one, other in pairs}
        old = {name: {version for version in versions if version < latest} for name, versions in sorted(kept.items())}
        return {name: versions for name, versions in old.items() if versions and not self._by_device}

    def blame(self, error: ReplicasError, owners: Iterable[MemberState], latest: int) -> ReplicasError:
        """Add to a Busy error which members keep the slots of ``owners`` in use.

        Return the same object ``error``, changed; other errors stay as they are.

        :param latest: the newest committed version; only older ones are in the way.
        """
        if isinstance(error, Busy) and (readers := self.readers(owners, latest)):
            kept = [f"{name} has version {', '.join(map(str, sorted(held)))}" for name, held in readers.items()]
            error.message, error.members = f"{error.message}; {list_text(kept)}", tuple(readers)
        return error


class Keeping:
    """The memory of members that the coordinator keeps for one channel.

    A version that is committed before any target has it exists in the memory of its
    source only, and would be lost with it. So the coordinator *keeps* the newest
    committed version on its own host: it opens its slot (or the slots of all its parts,
    if there is no whole image) before any member learns of the commit, and closes it
    when a newer one is decided. That costs a descriptor for each slot, and no copy.

    When a member whose memory is kept is lost, a *stand-in* takes its place: the lost
    member's state, with the coordinator's descriptor as the place. Other members of
    that host map it, or copy their parts from it. It cannot send: other hosts get the
    version from the first member that has mapped it.
    """

    def __init__(self, channel: str, roster: Roster, hosts: Hosts, out: list[Effect]) -> None:
        """Start without memory; open nothing.

        :param channel: its name.
        :param hosts: tell which members are on the coordinator's host.
        :param out: the channel's effects, to which those that open memory are added.
        """
        self._channel, self._roster, self._hosts, self._out = channel, roster, hosts, out
        self._version = 0
        self._asked: dict[Member, MemberState] = {}
        self._kept: dict[Member, SlotPlace] = {}
        self._failed: set[Member] = set()
        self._stand_ins: dict[Member, MemberState] = {}

    def update_keepers(self, latest: int) -> None:
        """Have the newest committed version kept in the coordinator's process, if
        possible.

        Queue the effects that open its memory on this host, and that close what is kept
        of older versions.

        :param latest: the version with which those bytes were first published: the
            newest committed one, or an older one after a rollback.
        """
        if latest != self._version:
            self._out.extend(LetGo(self._channel, member) for member in self._asked)
            for known in (self._asked, self._kept, self._stand_ins):
                known.clear()
            self._failed.clear()
            self._version = latest
        if not latest or not self._hosts.own or self._asked:
            return
        here = [s for s in self._hosts.on(self._hosts.own) if latest in s.places and s.member not in self._failed]
        whole = sorted((s for s in here if latest in s.held), key=lambda state: (not state.is_source, state.member))
        for owner in whole[:1] or [state for state in here if latest in state.parts]:
            self._asked[owner.member] = owner
            self._out.append(Keep(self._channel, owner.member, owner.places[latest], latest))

    def kept(self, owner: Member, version: int, place: SlotPlace | None) -> None:
        """Record the result of a ``Keep`` effect, by which the engine has opened
        memory.

        If its owner was lost meanwhile, a stand-in takes its place. A result for
        another version than the newest, or for memory not asked for, is ignored.

        :param owner: the member whose memory it is.
        :param place: where the coordinator's process holds the memory; None: it could
            not, and is not asked again for this owner and version.
        """
        state = self._asked.get(owner)
        if version != self._version or state is None:
            return
        if place is None:
            self._failed.add(owner)
            del self._asked[owner]
            return
        self._kept[owner] = place
        if owner not in self._roster:  # it was lost while the shell opened its memory
            self._stand_in(state)

    def lost(self, state: MemberState) -> None:
        """Have the kept memory of a lost member, if any, stand in for the member.

        A *stand-in* is the lost member's state, with the coordinator's descriptor as
        the place of the memory. Do nothing if none is kept.
        """
        if state.member in self._kept:
            self._stand_in(state)
        self._failed.discard(state.member)

    def _stand_in(self, state: MemberState) -> None:
        """Store the stand-in of a lost member: a copy of its state that has only the
        kept memory."""
        version, member = self._version, state.member
        other = copy(state)
        other.host = self._hosts.own
        other.places = {version: self._kept[member]}
        other.held = Held({version: state.held[version]} if version in state.held else {})
        other.parts = {version} & state.parts
        other.lent = set()
        self._stand_ins[member] = other

    def stand_ins_with(self, version: int) -> list[MemberState]:
        """Return the stand-ins of lost members with ``version`` or a part of it.

        A stand-in is a lost member's state with memory that the coordinator keeps.
        """
        return list(self._stand_ins.values()) if version == self._version else []

    def member_or_stand_in(self, member: Member) -> MemberState | None:
        """Return the member's state; if it is lost, that of its stand-in, or None.

        A stand-in is a lost member's state with memory that the coordinator keeps.
        """
        return self._roster.get(member) or self._stand_ins.get(member)

    def serves(self, version: int, part_owners: Iterable[Member], needers: Iterable[MemberState]) -> bool:
        """Return True if any of ``needers`` can map ``version`` from memory kept here.

        That is memory of lost members on the coordinator's host. The host of a
        newcomer, if unknown yet, may be this one.

        :param part_owners: the owners of its parts; empty for a whole image.
        :param needers: members that lack the version.
        """
        kept = self.stand_ins_with(version)
        if not kept or not any(state.host in (0, self._hosts.own) for state in needers):
            return False
        owners = list(map(self.member_or_stand_in, part_owners))
        in_parts = bool(owners) and all(owner is not None and version in owner.parts for owner in owners)
        return in_parts or any(version in state.held for state in kept)

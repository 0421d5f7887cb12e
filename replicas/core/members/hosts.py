"""Which members are on the same host, and who still uses whose memory.

Theory of operation
===================

Members on one host read one memory: nothing is sent between them. That two are on one
host is *proven*, never inferred from names or addresses. Each process has a *beacon*, a
little memory with a nonce in it. Those whose boot id, pid namespace and user are equal
*may* be on one host; a newcomer is told the beacons of a few such members of each known
host (:class:`~replicas.messages.Locate`), tries to open them, and says which one it
could read. It is admitted when it has answered; one that can open none of them, does
not answer in time, or later fails to map what it should, is a host of its own, to which
everything is sent. With ``transport = "group"`` everybody is. The coordinator has a
beacon, too: its host is one of them, whether or not a member is on it.

With ``staging = "device"`` memory is a GPU's: members are on one "host" when that is
proven and they have the same GPU. The coordinator has none there.

**Memory that is lent.** The owner of a slot (a publisher, or the member that received a
version for its host) may write it again when nobody has it mapped any more. It learns
that from the kernel, not from here: readers hold locks on the memory. But a lock says
nothing about why it is held. So the owner of an older version is told
(:class:`~replicas.messages.Released`) when no member of its host that can be heard has
that version any more: what is locked then belongs to a process that is frozen or cut
off, and is put aside rather than waited for.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from replicas.core.effects import Effect, Send
from replicas.core.members.member_state import MemberState
from replicas.core.members.roster import Roster
from replicas.messages import Beacon, LaneAhead, Locate, Located, Released
from replicas.messages.identity import Member

__all__ = ["Hosts", "Place"]

LOCATE_S = 5.0
"""How long a newcomer is waited for to say on which host it is. Only itself waits: it
is not admitted before."""
REPRESENTATIVES = 3
"""Members of one host that a newcomer tries."""

Place = tuple[str, int, int]
"""Boot id, pid namespace, user: equal for all members of one host, and not only for
them."""


@dataclass(slots=True)
class _Search:
    """A newcomer that has been asked. ``hosts``: of the beacons that it was given last,
    in their order. ``tried``: all."""

    until: float
    hosts: list[int] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)


class Hosts:
    """The hosts of one channel, by number.

    :param shared: whether members may share memory at all (``transport = "auto"``).
    :param by_device: only those with one GPU do (``staging = "device"``).
    :param here: place and beacon of the coordinator's process, if it may share memory,
        too.
    :ivar own: number of the coordinator's host; 0: it has none.
    """

    def __init__(
        self,
        roster: Roster,
        out: list[Effect],
        *,
        shared: bool,
        by_device: bool = False,
        here: tuple[Place, Beacon] | None = None,
    ) -> None:
        self._roster = roster
        self._out = out
        self._shared = shared
        self._by_device = by_device
        self._count = 0
        self._members: dict[int, dict[Member, MemberState]] = {}
        self._searches: dict[Member, _Search] = {}
        self._warned: set[Member] = set()
        self._here = here if shared and not by_device else None
        self.own = self._new() if self._here is not None else 0

    def __len__(self) -> int:
        return len(self._members)

    def on(self, host: int) -> list[MemberState]:
        """The members of one host."""
        return list(self._members.get(host, {}).values())

    # ------------------------------------------------------------ who is where

    def joined(self, state: MemberState, now: float) -> None:
        """A member is new in the roster."""
        if not state.observes:
            self._search(state, _Search(now + LOCATE_S))

    def _search(self, state: MemberState, search: _Search) -> None:
        """Have it try the hosts that it has not tried; without any it is a host of its
        own."""
        beacons, search.hosts = self._candidates(state, search.tried)
        if not beacons:
            self._put(state, self._new())
            return
        search.tried.update(search.hosts)
        self._searches[state.member] = search
        self._out.append(Send(state.member, Locate(tuple(beacons))))

    def located(self, state: MemberState, message: Located) -> None:
        """It has looked. Others may have said meanwhile that they are elsewhere: then
        it looks there, too."""
        search = self._searches.pop(state.member, None)
        if search is None:
            return
        found = search.hosts[message.found] if 0 <= message.found < len(search.hosts) else 0
        if found and (found == self.own or found in self._members):
            self._put(state, found)
        else:
            self._search(state, search)

    def apart(self, state: MemberState) -> None:
        """It cannot map the others' memory: it is a host of its own from now on."""
        self._take(state)
        self._put(state, self._new())

    def lost(self, state: MemberState) -> None:
        """It is out of the roster."""
        self._searches.pop(state.member, None)
        self._warned.discard(state.member)
        self._take(state)

    def tick(self, now: float) -> None:
        """Those who have not answered are hosts of their own; owners learn what nobody
        uses any more."""
        for member, search in list(self._searches.items()):
            state = self._roster.get(member)
            if now > search.until and state is not None:
                del self._searches[member]
                self._put(state, self._new())

    def _candidates(self, state: MemberState, tried: set[int]) -> tuple[list[Beacon], list[int]]:
        place = self._place(state)
        if place is None:
            return [], []
        beacons: list[Beacon] = []
        hosts: list[int] = []
        if self._here is not None and (self._here[0], "") == place and self.own not in tried:
            beacons.append(self._here[1])
            hosts.append(self.own)
        for host, members in self._members.items():
            some = list(itertools.islice(members.values(), REPRESENTATIVES))
            if host in tried or host == self.own:
                continue
            if self._place(some[0]) == place:  # all members of a host are alike in this
                beacons += [other.hello.beacon for other in some if other.hello.beacon is not None]
                hosts += [host] * len(some)
        return beacons, hosts

    def _place(self, state: MemberState) -> tuple[Place, str] | None:
        """With the GPU, if that matters. None: it shares no memory."""
        hello = state.hello
        if not self._shared or hello.beacon is None or state.is_peer or (self._by_device and not hello.cuda_devices):
            return None
        device = hello.cuda_devices[0] if self._by_device else ""
        return (hello.process.boot_id, hello.process.pid_namespace, hello.beacon.uid), device

    def _new(self) -> int:
        self._count += 1
        return self._count

    def _put(self, state: MemberState, host: int) -> None:
        state.host = host
        self._members.setdefault(host, {})[state.member] = state
        if len(self._members) > 1 and not state.is_peer:
            self._warn([state.member] if self._warned else [m for members in self._members.values() for m in members])

    def _warn(self, members: list[Member]) -> None:
        """There is more than one host: lanes will be formed."""
        new = [member for member in members if member not in self._warned]
        self._warned.update(new)
        self._out.extend(Send(member, LaneAhead()) for member in new)

    def _take(self, state: MemberState) -> None:
        members = self._members.get(state.host, {})
        members.pop(state.member, None)
        if not members:
            self._members.pop(state.host, None)
        state.host = 0

    # ------------------------------------------------------------ whose memory is used

    def release(self, latest: int, now: float, *, host: int | None = None) -> None:
        """Tell the owners of older versions than ``latest`` which of them nobody uses
        any more: all, or those of a host."""
        for state in self._roster if host is None else self.on(host):
            for version in [version for version in state.lent if version < latest] if state.lent else ():
                if not self._used(state, version, now):
                    state.lent.discard(version)
                    self._out.append(Send(state.member, Released(version)))

    def _used(self, owner: MemberState, version: int, now: float) -> bool:
        """Whether another member of its host, one that can be heard, has it."""
        others = self._members.get(owner.host, {}).values()
        return any(
            version in other.held and not self._roster.suspect(other, now) for other in others if other is not owner
        )

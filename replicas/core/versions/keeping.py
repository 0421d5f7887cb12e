"""The newest committed version outlives its source: the coordinator's own process holds
its memory.

Theory of operation
===================

A version that is committed while no target has it lies in its source's memory alone,
and would be lost with it: a trainer that publishes once and dies before the first
rollout has joined. Therefore, on its own host, the coordinator *keeps* the newest
committed version: it opens the slot where it lies (all slots of its parts, when nobody
has it whole) before anybody is told of the commit, and lets go when a newer one is
decided. That costs a descriptor each, and no byte.

When a member whose memory is kept is lost, a *stand-in* takes its place: what was known
of it, with the coordinator's copy of the descriptor as the place. Others of that host
map it, or copy their parts from it, as they would have from the member itself. It
cannot send: those on other hosts get the version from the first who has mapped it.
Nothing is kept on other hosts: a version that must outlive its source there needs a
target that has it (``min_targets = 1``).

Who is on the coordinator's host is proven as always
(:mod:`replicas.core.members.hosts`): it has a beacon, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from replicas.core.effects import Effect, Keep, LetGo
from replicas.core.members.hosts import Hosts
from replicas.core.members.member_state import Held, MemberState
from replicas.core.members.roster import Roster
from replicas.messages import SlotPlace
from replicas.messages.identity import Member

__all__ = ["Keeping"]


class Keeping:
    """What the coordinator keeps of one channel. The shell answers each ``Keep`` by
    :meth:`kept`."""

    def __init__(self, channel: str, roster: Roster, hosts: Hosts, out: list[Effect]) -> None:
        self._channel = channel
        self._roster = roster
        self._hosts = hosts
        self._out = out
        self._version = 0
        self._asked: dict[Member, MemberState] = {}
        self._kept: dict[Member, SlotPlace] = {}
        self._failed: set[Member] = set()
        self._stand_ins: dict[Member, MemberState] = {}

    def look(self, latest: int) -> None:
        """Keep ``latest``, the newest committed version, if that has become possible,
        and no other one."""
        if latest != self._version:
            self._let_go()
            self._version = latest
        if not latest or not self._hosts.own or self._asked:
            return
        for owner in self._owners():
            self._asked[owner.member] = owner
            self._out.append(Keep(self._channel, owner.member, owner.places[self._version], self._version))

    def _owners(self) -> list[MemberState]:
        """Whose memory makes up the version: of one who has it whole, or else of all
        who have a part."""
        version = self._version
        here = [s for s in self._hosts.on(self._hosts.own) if version in s.places and s.member not in self._failed]
        whole = [s for s in here if version in s.held]
        if whole:
            return [min(whole, key=lambda state: (not state.is_source, state.member))]
        return [s for s in here if version in s.parts]

    def kept(self, owner: Member, version: int, place: SlotPlace | None) -> None:
        """The shell holds it at ``place`` now; None: it cannot."""
        state = self._asked.get(owner)
        if version != self._version or state is None:
            return
        if place is None:
            self._failed.add(owner)
            del self._asked[owner]
            return
        self._kept[owner] = place
        if owner not in self._roster:
            self._stand_in(state)

    def lost(self, state: MemberState) -> None:
        """The member is out of the roster, and still says on which host it was."""
        if state.member in self._kept:
            self._stand_in(state)
        self._failed.discard(state.member)

    def _stand_in(self, state: MemberState) -> None:
        version, member = self._version, state.member
        other = copy(state)
        other.host = self._hosts.own
        other.places = {version: self._kept[member]}
        other.held = Held({version: state.held[version]} if version in state.held else {})
        other.parts = {version} & state.parts
        other.lent = set()
        self._stand_ins[member] = other

    def of(self, version: int) -> list[MemberState]:
        """Those who stand in for lost members with ``version``, or a part of it."""
        return list(self._stand_ins.values()) if version == self._version else []

    def get(self, member: Member) -> MemberState | None:
        """Who stands in for a member that is lost."""
        return self._stand_ins.get(member)

    def serves(self, version: int, part_owners: Iterable[Member], needers: Iterable[MemberState]) -> bool:
        """Whether some of the ``needers`` can get ``version`` by what is kept for those
        who are lost.

        Of one that has just joined it is not known yet on which host it is: it may be
        this one.

        :param part_owners: who had its parts, if it was published in parts.
        """
        kept = self.of(version)
        if not kept or not any(state.host in (0, self._hosts.own) for state in needers):
            return False
        if any(version in state.held for state in kept):
            return True
        owners = [self.get(member) or self._roster.get(member) for member in part_owners]
        return bool(owners) and all(owner is not None and version in owner.parts for owner in owners)

    def _let_go(self) -> None:
        self._out.extend(LetGo(self._channel, member) for member in self._asked)
        for known in (self._asked, self._kept, self._stand_ins):
            known.clear()
        self._failed.clear()

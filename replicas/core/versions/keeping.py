"""Keep the newest committed version's memory open in the coordinator's process.

A version that is committed before any target has it exists in its source's memory
alone, and would be lost with it. Therefore, on its own host, the coordinator *keeps*
the newest committed version: it opens its slot (or the slots of all its parts, if there
is no whole image) before any member is told of the commit, and lets go when a newer one
is decided. That costs one descriptor for each slot, and no copy.

When a member whose memory is kept is lost, a *stand-in* takes its place: the lost
member's state, with the coordinator's descriptor as the place. Other members of that
host map it, or copy their parts from it. It cannot send: other hosts get the version
from the first member that has mapped it. Nothing is kept on other hosts.
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
    """The memory that the coordinator keeps for one channel."""

    def __init__(self, channel: str, roster: Roster, hosts: Hosts, out: list[Effect]) -> None:
        self._channel, self._roster, self._hosts, self._out = channel, roster, hosts, out
        self._version = 0
        self._asked: dict[Member, MemberState] = {}
        self._kept: dict[Member, SlotPlace] = {}
        self._failed: set[Member] = set()
        self._stand_ins: dict[Member, MemberState] = {}

    def look(self, latest: int) -> None:
        """Keep ``latest``, the newest committed version, if possible, and no other."""
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
        """Take the result of ``Keep``: its place in the shell; None: it failed."""
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
        """A member is out of the roster; its state still names its host."""
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
        """Return the stand-ins of lost members with ``version``, or a part of it."""
        return list(self._stand_ins.values()) if version == self._version else []

    def lender(self, member: Member) -> MemberState | None:
        """Return the member, or its stand-in if it is lost."""
        return self._roster.get(member) or self._stand_ins.get(member)

    def serves(self, version: int, part_owners: Iterable[Member], needers: Iterable[MemberState]) -> bool:
        """Return whether any of ``needers`` can get ``version`` from what is kept.

        The host of a newcomer may be unknown yet: it may be this one.
        """
        kept = self.of(version)
        if not kept or not any(state.host in (0, self._hosts.own) for state in needers):
            return False
        owners = list(map(self.lender, part_owners))
        in_parts = bool(owners) and all(owner is not None and version in owner.parts for owner in owners)
        return in_parts or any(version in state.held for state in kept)

"""Indices of a roster: no message of one member costs a walk over all members.

Theory of operation
===================

A sync to *n* members is some ten messages for each of them; a walk over all members at
each message would make it quadratic. So the lookups of each message use sets that are
kept up to date: members by name, by replica, by held version, and targets that lack a
version.

A member's held versions change in many places. So they are a
:class:`~replicas.core.members.member_state.Held`, a dict that reports versions that are
added and removed, and callers need not know that there is an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from replicas.core.members.member_state import MemberState
from replicas.messages import Hello
from replicas.messages.identity import Member

__all__ = ["RosterIndex", "preflight_shape"]


class RosterIndex:
    """The indices of one roster, which reports each member that it adds or removes.

    :ivar on_held: called as ``on_held(state)`` when its held versions have changed.
    """

    def __init__(self, shape_of: Callable[[Hello], object]) -> None:
        self._shape_of = shape_of
        self.by_name: dict[str, MemberState] = {}
        """All but observers."""
        self.apart: dict[Member, MemberState] = {}
        """Members that are neither live nor observing."""
        self.on_held: Callable[[MemberState], None] | None = None
        self._replicas: dict[tuple[str, int], dict[Member, MemberState]] = {}
        self._carriers: dict[Member, MemberState] = {}
        self._holders: dict[int, dict[Member, MemberState]] = {}
        self._holding_carriers: dict[int, int] = {}
        self._alike: dict[object, dict[Member, MemberState]] = {}

    def insert(self, state: MemberState) -> None:
        """Add a new member."""
        member = state.member
        if not state.observes:
            self.by_name[member.name] = state
            self.apart[member] = state
            self._replicas.setdefault((member.group, member.replica), {})[member] = state
            self._alike.setdefault(self._shape_of(state.hello), {})[member] = state
        if state.is_target and state.carries:
            self._carriers[member] = state

        def changed(version: int, held: bool) -> None:
            self._note(state, version, held)
            if self.on_held is not None:
                self.on_held(state)

        for version in state.held:
            self._note(state, version, True)
        state.held.on_change = changed

    def remove(self, state: MemberState) -> None:
        """Remove a member."""
        member = state.member
        state.held.on_change = None
        for version in state.held:
            self._note(state, version, False)
        self._carriers.pop(member, None)
        self.apart.pop(member, None)
        if self.by_name.get(member.name) is state:
            del self.by_name[member.name]
        if not state.observes:
            _discard(self._replicas, (member.group, member.replica), member)
            _discard(self._alike, self._shape_of(state.hello), member)

    def replica(self, group: str, replica: int) -> list[MemberState]:
        """Return the members of one replica, without observers."""
        return list(self._replicas.get((group, replica), {}).values())

    def holders(self, version: int) -> list[MemberState]:
        """Return members that hold the whole of ``version``."""
        return list(self._holders.get(version, {}).values())

    def lacking(self, version: int) -> list[MemberState]:
        """Return targets that carry bytes and lack ``version``; cheap if none do."""
        if self._holding_carriers.get(version, 0) == len(self._carriers):
            return []
        return [state for state in self._carriers.values() if version not in state.held]

    def others(self, hello: Hello) -> list[Hello]:
        """Return one Hello of each kind of members (see ``shape_of``), to compare with.

        No incarnation of the same identity is among them.
        """
        name = f"{hello.group}/{hello.replica}/{hello.rank}"
        found = []
        for states in self._alike.values():
            other = next((state for state in states.values() if state.member.name != name), None)
            if other is not None:
                found.append(other.hello)
        return found

    def _note(self, state: MemberState, version: int, held: bool) -> None:
        carries = state.member in self._carriers
        if held:
            self._holders.setdefault(version, {})[state.member] = state
            self._holding_carriers[version] = self._holding_carriers.get(version, 0) + carries
            return
        _discard(self._holders, version, state.member)
        self._holding_carriers[version] -= carries
        if version not in self._holders:
            del self._holding_carriers[version]


def _discard(of: dict[Any, dict[Member, MemberState]], key: object, member: Member) -> None:
    """Remove the member, and its entry if that is empty then."""
    states = of[key]
    states.pop(member, None)
    if not states:
        del of[key]


def preflight_shape(hello: Hello, *, carries: bool, by_device: bool) -> object:
    """Return the key by which preflight groups equal members: one of each is compared.

    :param by_device: whether each GPU counts, or only that there are some.
    """
    env: Mapping[str, str] = hello.nccl_env
    devices: Iterable[str] = hello.cuda_devices
    return (
        hello.torch_version,
        hello.nccl_version,
        frozenset(env.items()),
        tuple(devices) if by_device else bool(hello.cuda_devices),
        carries,
    )

"""Indices of a roster: the members that hold a version, the targets that lack it.

They are updated at each change, so that a look-up does not walk over all members.
"""

from __future__ import annotations

from collections import Counter

from replicas.core.members.member_state import MemberState
from replicas.messages.identity import Member


class Holders:
    """Index of the members of one roster by the versions that they hold."""

    def __init__(self) -> None:
        """Start without members."""
        self._carriers: dict[Member, MemberState] = {}
        """Targets that carry bytes."""
        self._of: dict[int, dict[Member, MemberState]] = {}
        self._carrying: Counter[int] = Counter()

    def insert(self, state: MemberState) -> None:
        """Add a member that joins the roster, with the versions that it holds."""
        if state.is_target and state.carries:
            self._carriers[state.member] = state
        for version in state.held:
            self.note(state, version, held=True)

    def remove(self, state: MemberState) -> None:
        """Remove a member, which leaves the roster, from all indices."""
        for version in state.held:
            self.note(state, version, held=False)
        self._carriers.pop(state.member, None)

    def note(self, state: MemberState, version: int, *, held: bool) -> None:
        """Enter that the member has got the whole version (``held``), or else that it
        dropped it."""
        carries = state.member in self._carriers
        if held:
            self._of.setdefault(version, {})[state.member] = state
            self._carrying[version] += carries  # bool as 0 or 1
            return
        self._of[version].pop(state.member, None)
        self._carrying[version] -= carries
        if not self._of[version]:
            del self._of[version], self._carrying[version]  # versions come and go for as long as the run

    def of(self, version: int) -> list[MemberState]:
        """Return the members that hold the whole of ``version``, in no order."""
        return list(self._of.get(version, {}).values())

    def lacking(self, version: int) -> list[MemberState]:
        """Return the targets, live or not, that receive bytes and lack ``version``.

        Targets whose leader alone receives bytes for them are left out.
        """
        if self._carrying[version] == len(self._carriers):  # all have it: the usual case, without a walk
            return []
        return [state for state in self._carriers.values() if version not in state.held]

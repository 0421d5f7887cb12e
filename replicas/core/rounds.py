"""Rounds: all ranks of a target replica load the same versions, in the same order.

Theory of operation
===================

A replica that wants new weights runs a *round*: the newest committed version at the moment when the first of its ranks
asks, provided that all its ranks are there and hold it. Every rank is granted that version when it asks, and the next
round opens only when all of them have loaded this one, so that two ranks are never more than the load itself apart.
The replica's loaded version is the one that *all* its ranks have loaded; while they differ it is 0 (*partial*). A rank
that is lost, or fails to load, voids the round: the next one brings every rank to the newest version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from replicas.core.effects import Effect, Emit, ReplicaLoaded, Send
from replicas.core.identity import Member
from replicas.core.roster import MemberState
from replicas.messages import Assigned, ReceiveAsk, ReceiveGrant

__all__ = ["ReplicaView", "Round", "Rounds"]


@dataclass(slots=True)
class Round:
    version: int = 0
    taken: set[Member] = field(default_factory=set)
    asks: dict[Member, ReceiveAsk] = field(default_factory=dict)
    loaded: int = 0
    """Version that the whole replica serves; 0: none, or not the same on all ranks."""
    partial: bool = False
    """A rank failed to load, and the replica has not loaded a whole version since."""


class ReplicaView(NamedTuple):
    """The members of one target replica that carry bytes, and how many of them there must be."""

    ranks: Sequence[MemberState]
    expected: int


class Rounds:
    """The rounds of every target replica of a channel."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._rounds: dict[tuple[str, int], Round] = {}

    def of(self, group: str, replica: int) -> Round:
        return self._rounds.setdefault((group, replica), Round())

    def all(self) -> list[tuple[tuple[str, int], Round]]:
        return list(self._rounds.items())

    def asks(self, member: Member) -> bool:
        """Whether the member waits for a grant."""
        return member in self.of(member.group, member.replica).asks

    def wants(self, member: Member, version: int) -> bool:
        """Whether it waits for ``version`` or an older one."""
        found = self.of(member.group, member.replica).asks.get(member)
        return found is not None and found.after < version

    def ask(self, member: Member, ask: ReceiveAsk) -> None:
        self.of(member.group, member.replica).asks[member] = ask

    def cancel_ask(self, member: Member, ask: int) -> None:
        asks = self.of(member.group, member.replica).asks
        if (found := asks.get(member)) is not None and found.ask == ask:
            del asks[member]

    def joined(self, state: MemberState, view: ReplicaView, out: list[Effect]) -> None:
        """A rank joined; under an earlier coordinator it may have loaded a version, or been assigned one."""
        round_ = self.of(state.member.group, state.member.replica)
        if state.from_before:
            round_.version = max(round_.version, state.hello.assigned, state.loaded)
            if state.hello.assigned > state.loaded:
                round_.taken.add(state.member)
        taken = set(round_.taken)
        self._settle(state.member, view, out)
        round_.taken = taken

    def loaded(self, state: MemberState, version: int, view: ReplicaView, out: list[Effect]) -> None:
        """This rank serves ``version`` now."""
        state.loaded = version
        self._settle(state.member, view, out)

    def failed(self, state: MemberState, view: ReplicaView, out: list[Effect]) -> None:
        """This rank may have loaded half of a version."""
        state.loaded = 0
        self.of(state.member.group, state.member.replica).partial = True
        self._settle(state.member, view, out)

    def lost(self, member: Member, view: ReplicaView, out: list[Effect]) -> None:
        """``view`` is without the lost member."""
        round_ = self.of(member.group, member.replica)
        round_.asks.pop(member, None)
        if not view.ranks:
            round_.partial = False
            round_.version = 0
        self._settle(member, view, out)

    def _settle(self, member: Member, view: ReplicaView, out: list[Effect]) -> None:
        round_ = self.of(member.group, member.replica)
        round_.taken.discard(member)
        versions = {state.loaded for state in view.ranks}
        loaded = versions.pop() if len(versions) == 1 and len(view.ranks) == view.expected else 0
        if loaded:
            round_.partial = False
        if loaded != round_.loaded:
            round_.loaded = loaded
            out.append(Emit(ReplicaLoaded(self._channel, member.group, member.replica, loaded)))

    def advance(self, view: ReplicaView, latest: int, out: list[Effect]) -> None:
        """Open a round if one is due, and grant what was asked."""
        if not view.ranks or not latest:
            return
        round_ = self.of(view.ranks[0].member.group, view.ranks[0].member.replica)
        wanted = any(ask.after < latest for ask in round_.asks.values())
        if wanted and round_.version != latest and not self._in_progress(round_, view):
            if len(view.ranks) < view.expected or not all(latest in state.held for state in view.ranks):
                return
            round_.version = latest
            out.extend(Send(state.member, Assigned(latest)) for state in view.ranks)
        self._grant(round_, view, out)

    @staticmethod
    def _in_progress(round_: Round, view: ReplicaView) -> bool:
        """Some rank has yet to load the round's version, and can."""
        if not round_.version or all(state.loaded == round_.version for state in view.ranks):
            return False
        if round_.taken:
            return True
        return not round_.partial and all(round_.version in state.held for state in view.ranks)

    @staticmethod
    def _grant(round_: Round, view: ReplicaView, out: list[Effect]) -> None:
        for state in view.ranks:
            ask = round_.asks.get(state.member)
            if ask is None or ask.after >= round_.version or state.loaded == round_.version:
                continue
            if round_.version in state.held:
                del round_.asks[state.member]
                round_.taken.add(state.member)
                out.append(Send(state.member, ReceiveGrant(ask.ask, round_.version)))

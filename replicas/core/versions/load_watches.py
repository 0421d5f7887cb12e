"""Watches: answer members that wait until all targets have loaded a version."""

from __future__ import annotations

from replicas import messages as wire
from replicas.core.base.effects import Effect, Send
from replicas.core.base.ledger import Ledger
from replicas.core.members.roster import Roster
from replicas.core.versions.load_rounds import LoadRounds
from replicas.core.versions.lockstep import Lockstep
from replicas.messages.bounds import texts_of
from replicas.messages.identity import Member


class LoadWatches:
    """Members' requests to be told when all targets have loaded a version (*watches*).

    Each member has one at most.
    """

    def __init__(
        self, roster: Roster, rounds: LoadRounds, adoption: Lockstep, ledger: Ledger, out: list[Effect]
    ) -> None:
        """Start without watches.

        :param rounds: tell which version each replica serves.
        :param adoption: decides which version all targets load together.
        :param ledger: tells which versions were rejected.
        :param out: the channel's effects, to which answers are added.
        """
        self._roster, self._rounds, self._adoption, self._out = roster, rounds, adoption, out
        self._ledger, self._seen = ledger, 0
        self._watches: dict[Member, wire.WatchLoaded] = {}
        self._loaded_once = 0

    def __len__(self) -> int:
        return len(self._watches)

    def lost(self, member: Member) -> None:
        """Forget the watch of a lost member."""
        self._watches.pop(member, None)

    def answer(self) -> None:
        """Queue the answers to watches that are decided: a member asks by a watch to be
        told when all targets have loaded a version.

        It is decided once they have, even if a target has left since, or once targets
        have refused the version and no other one is waited for.
        """
        loaded = self._rounds.loaded_by_all()
        decided = self._seen != self._ledger.changes
        self._seen = self._ledger.changes
        # a refusal may answer a watch of a version that no target loaded
        if loaded > self._loaded_once or (self._watches and (decided or self._rounds.refusals(1))):
            self._loaded_once = max(loaded, self._loaded_once)
            for member, watch in list(self._watches.items()):
                self.watch(member, watch)

    def watch(self, member: Member, watch: wire.WatchLoaded) -> None:
        """Answer a member's watch now, or store it in place of its earlier one.

        It is answered when no target is waited for, with the reasons of those that
        refused.

        :param watch: the request to be told when all targets have loaded a version.
        """
        refusals: dict[str, str] = {}
        if watch.version > self._loaded_once:
            rejected = self._ledger.why_rejected(watch.version)
            refusals = self._rounds.refusals(watch.version) | ({"the coordinator": rejected} if rejected else {})
            targets = (state for state in self._roster if state.is_target and state.carries)
            others = [state for state in targets if state.member.replica_name not in refusals]
            # no refusing replica loads it later; no target loads a rejected newest one
            waiting = not (rejected or self._adoption.is_rejected(watch.version)) and any(
                state.loaded < watch.version for state in others
            )
            if waiting or not refusals:
                self._watches[member] = watch
                return
        self._watches.pop(member, None)
        version = max(watch.version, self._loaded_once)
        self._out.append(Send(member, wire.WatchEnd(watch.watch, version, texts_of(refusals))))

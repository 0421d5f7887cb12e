"""Lockstep: either all targets of a channel load a version, or none does.

Theory of operation
===================

With ``adopt_together`` a target that was granted a version reports that it can load it
(``CanLoad``), and loads only when the coordinator has decided that the version is
*adopted* (``LoadDecided``). A version is decided once.

The first target that can load a version opens the *poll* on it. While the poll is open,
rounds grant its version only. The poll waits for every replica that is complete, is not
being drained, and has not reported; it does not wait for a replica whose ranks are
leaving, lost or starting again. A rank that has checked for its whole replica says so,
and the others need not report. The poll ends

* *adopted*, when no replica is left to wait for;
* *rejected*, when a replica refuses the version, drops it without a report, or waits
  for a version that this one is not (its ``at_least``): no target loads it, each keeps
  its own version, and is granted a newer one;
* *rejected*, when it is overtaken: a replica is granted a newer version that it can
  load, or asks for a version and no longer holds this one, as a newer one is committed;
* *adopted* at the channel's deadline, which begins with the first replica that can load
  it. Replicas that have not reported are *left behind*, as if they had refused it: each
  is not ready until it has loaded the version that the others serve.

*Latecomers.* Every target that gets an adopted version loads it. A replica that joins a
fleet that serves a version, or was left behind, is not waited for before it asks for a
version: its program may take long to start. A replica that serves no version waits for
the others without a deadline, as in a receive: it must not leave them behind.

*A new coordinator* learns from each member's Hello which version it knows adopted, and
which rejected, or has refused: so a decision that one member knows binds all. Members
that wait report again that they can load it.

*Cost.* All replicas are examined when a poll opens, and when a newer version is
committed meanwhile; otherwise only the sender of a message.
"""

from __future__ import annotations

import math

from replicas import errors
from replicas import messages as wire
from replicas.config.structs import ChannelConfig
from replicas.core.base.effects import Effect, Send
from replicas.core.members.history import History
from replicas.core.members.member_state import MemberState
from replicas.core.versions.load_rounds import LoadRounds, Newest
from replicas.messages.bounds import REASON_LENGTH, text_of
from replicas.messages.identity import Member

_KEPT = 16
"""Decisions of each kind that are kept: a target is rarely further behind."""
Key = tuple[str, int]
"""Group and index of a replica."""


class Lockstep:
    """The adoptions of one channel: decisions that all targets load a version.

    Without ``adopt_together`` it decides nothing.
    """

    def __init__(self, config: ChannelConfig, rounds: LoadRounds, history: History, out: list[Effect]) -> None:
        """Start without decisions.

        :param rounds: the load rounds, which grant versions to replicas.
        :param history: gets the reasons why replicas did not load a version.
        :param out: the channel's effects, to which answers are added.
        """
        self._config, self._rounds, self._history, self._out = config, rounds, history, out
        self._adopted, self._rejected = {0}, dict[int, str]()
        self._served = self._newest = self._candidate = Newest(0)
        """The newest adopted and committed versions, and the version of the poll."""
        self._waiting: set[Key] = set()
        """Replicas that have yet to report that they can load the candidate."""
        self._deadline = math.inf
        self._said: dict[Member, wire.CanLoad] = {}
        """Members that can load a version, and wait for the decision."""
        self._fresh: set[Member] = set()
        """Members of ``_said`` that must be answered."""
        self._asked: set[Key] = set()
        """Replicas that may lack the candidate, to be examined."""
        self._outside: set[Key] = set()
        """Replicas that are not waited for before they ask for a version."""
        self._told: dict[Key, int] = {}
        """The newest version that each replica was told to load, and did not refuse."""
        self._due = True

    @property
    def served(self) -> int:
        """The newest version that all targets are to load; 0 if there is none."""
        return self._served.version

    def is_rejected(self, version: int) -> bool:
        """Return True if targets will not load ``version``: it is newer than the one
        that they are to load, and the newest committed version was rejected."""
        return version > self.served and self._newest.version in self._rejected

    def waits(self, member: Member) -> bool:
        """Return True if the member can load a version, and waits for the decision."""
        return member in self._said

    def is_behind(self, group: str, replica: int) -> bool:
        """Return True if the replica serves an older version than the others do.

        Return False if it was told to load theirs, and has yet to do so.
        """
        loaded = self._rounds.of(group, replica).loaded
        return 0 < loaded < self.served > self._told.get((group, replica), 0)

    # ------------------------------------------------------------ reports of members

    def joined(self, state: MemberState) -> None:
        """Take over the decisions that a joining rank knows from another coordinator.

        A new replica of a fleet that serves a version is not waited for until it asks.
        """
        hello, key = state.hello, _key(state.member)
        if state.from_before:
            self._told[key] = max(self._told.get(key, 0), hello.adopted)
            self._adopt(Newest(min(hello.adopted, hello.latest)))
            self._reject(hello.unadopted, f"{state.member.name} has refused it, or was told so earlier")
        elif self.served:
            self._outside.add(key)
        self.touch(key)

    def lost(self, state: MemberState) -> None:
        """Forget the report of a target's rank, which is lost or does not load.

        The poll on a version (which asks all targets) no longer waits for that rank.
        """
        self._said.pop(state.member, None)
        self._told.pop(_key(state.member), None)
        self.touch(_key(state.member))

    def asked(self, state: MemberState, ask: wire.ReceiveAsk) -> None:
        """Record that a rank asks for a version: from now on its replica is waited for.

        If the rank waits for a newer version than that of the poll, reject the latter.
        """
        key = _key(state.member)
        self._outside.discard(key)
        self._asked.add(key)
        self.touch(key)
        if key in self._waiting and not self._candidate.meets(ask):
            self._reject(self._candidate.version, f"{state.member.replica_name} waits for a newer version")

    def can_load(self, state: MemberState, message: wire.CanLoad) -> None:
        """Record a rank's report that it can load a version.

        The rank waits for the decision.

        The answer is queued by :meth:`advance`.
        """
        self._said[state.member] = message
        self._fresh.add(state.member)
        self.touch(_key(state.member))

    def failed(self, state: MemberState, version: int, why: str) -> None:
        """Record that a rank does not load a version.

        If that is undecided, no target loads it.

        :param why: its reason, as text.
        """
        self.lost(state)
        if version > self.served:  # else it is decided, or refused by a target that was left behind
            self._reject(version, f"{state.member.replica_name} does not load it ({why})")

    def touch(self, key: Key) -> None:
        """Find out again whether the poll (the question to all targets whether they can
        load a version) waits for a replica.

        Call it after a join, a loss, a report, or the begin of a drain. The next
        :meth:`advance` may then decide.

        :param key: its group and index.
        """
        self._due = True
        if self._candidate.version:
            (self._waiting.add if self._is_awaited(key) else self._waiting.discard)(key)

    def _is_awaited(self, key: Key) -> bool:
        """Return True if the poll waits for a report of the replica.

        It does not if a rank is missing or draining, if all ranks have reported, or if
        the poll before went on without the replica.
        """
        view = self._rounds.view(*key)
        if key in self._outside or len(view.ranks) < view.expected or any(state.draining for state in view.ranks):
            return False
        found = (self._said.get(state.member) for state in view.ranks)
        said = [one for one in found if one is not None and one.version == self._candidate.version]
        return len(said) < len(view.ranks) and not any(one.whole for one in said)

    # ------------------------------------------------------------ decisions

    def advance(self, newest: Newest, now: float) -> Newest:
        """Take all decisions that are due.

        Return the newest version that rounds may grant.

        Queue the answers to the ranks that wait for them. Without ``adopt_together``
        return ``newest``, and do nothing.

        :param newest: the newest committed version.
        """
        if not self._config.adopt_together:
            return newest
        if newest != self._newest:
            self._newest, self._due = newest, True
            self._asked |= self._waiting
        while self._due or now > self._deadline:
            self._due = False
            self._answer()
            self._decide_if_due(now)
            self._asked.clear()
        if self._candidate.version:
            return self._candidate
        return self._served if newest.version in self._rejected else newest

    def _answer(self) -> None:
        """Queue the decisions to the ranks that wait for them.

        Open a poll if one of them can load a newer version.
        """
        fresh, self._fresh = sorted(self._fresh & self._said.keys()), set()
        polled, said = self._candidate.version, {self._said[member].version for member in fresh}
        said -= self._adopted | self._rejected.keys()
        ahead = max(polled, self.served, *said, 0)
        for version in (said | {polled}) - {ahead, 0}:
            self._reject(version, f"version {ahead} came before all targets could load it")
        if ahead > max(polled, self.served):
            self._candidate = self._newest if ahead == self._newest.version else Newest(ahead)
            self._asked = set(self._rounds.replicas)
            self._waiting = {key for key in self._asked if self._is_awaited(key)}
        for member in fresh:
            version = self._said[member].version
            if version in self._adopted:
                self._told[_key(member)] = version
            if version in self._adopted or version in self._rejected:
                del self._said[member]
                self._out.append(Send(member, wire.LoadDecided(version, self._error(version))))

    def _error(self, version: int) -> wire.WireError | None:
        """Return the error for ranks that wait for a rejected version; else None."""
        if (why := self._rejected.get(version)) is None:
            return None
        text = f"no target loads version {version}: {why}"
        error = errors.NotAdopted(text, channel=self._config.name, version=version, phase="load", unanimous=True)
        return wire.WireError.of(error)

    def _decide_if_due(self, now: float) -> None:
        """End the poll on a version if one of its ends has come; else do nothing.

        Reject the version if a replica can no longer get it. Adopt it (all targets load
        it) if all replicas have reported that they can, or at the deadline, which
        leaves out the others.
        """
        version = self._candidate.version
        leads = any(not self.served or self._rounds.of(*_key(member)).loaded for member in self._said)
        self._deadline = min(self._deadline, now + self._config.deadline_s) if version and leads else math.inf
        lacking = next((key for key in sorted(self._asked & self._waiting) if self._lacks(key)), None)
        if version and lacking is not None:
            why = f"version {self._newest.version} came before {lacking[0]}/{lacking[1]} could load it"
            self._reject(version, why)
        elif now > self._deadline or (version and self._said and not self._waiting):
            for group, replica in sorted(self._waiting):
                why = f"this replica did not report within {self._config.deadline_s:g} s that it can load it; all others did"
                self._rounds.left_behind(group, replica, version, why)
                self._history.unloaded.setdefault(f"{group}/{replica}", f"version {version}: {why}")
                self._outside.add((group, replica))
            self._adopt(self._candidate)

    def _lacks(self, key: Key) -> bool:
        """Return True if the replica waits for a version, but cannot get the poll's.

        It cannot if one of its ranks does not have the bytes, and a newer version is
        committed.
        """
        version, ranks = self._candidate.version, self._rounds.view(*key).ranks
        asks = self._newest.version > version and self._rounds.of(*key).asks
        return bool(asks) and any(not self._rounds.holds(state, version) for state in ranks)

    def _adopt(self, newest: Newest) -> None:
        """Decide that all targets load the version ``newest``, unless it was rejected.

        Nothing is sent: :meth:`_answer` does that.
        """
        if newest.version not in self._rejected:
            self._adopted = {*sorted(self._adopted)[1 - _KEPT :], newest.version}
            self._served = max(self._served, newest, key=lambda one: one.version)
            self._decided(newest.version)

    def _reject(self, version: int, why: str) -> None:
        """Decide that no target loads the version, unless it is decided already.

        :param why: the reason, as text, for the ranks that wait for it.
        """
        if version not in self._adopted and version not in self._rejected:
            known = {one: self._rejected[one] for one in sorted(self._rejected)[1 - _KEPT :]}
            self._rejected = {**known, version: text_of(why, REASON_LENGTH)}
            self._decided(version)

    def _decided(self, version: int) -> None:
        """End the poll (which asks all targets about one version) if this decision
        settles it.

        :meth:`_answer` tells the members that wait.
        """
        if self._candidate.version in (version, *self._adopted):
            self._candidate, self._waiting, self._deadline = Newest(0), set(), math.inf
        self._fresh |= self._said.keys()
        self._due = True


def _key(member: Member) -> Key:
    """Return group and index of the member's replica."""
    return member.group, member.replica

"""Load rounds: all ranks of a target replica load the same versions, in the same order.

A replica that wants new weights runs a *round*: the newest committed version at the
moment when the first of its ranks asks, provided that all its ranks are members and
hold it. Every rank is granted that version when it asks, and the next round opens only
when all of them have loaded this one, so that two ranks differ only for the time of a
load. The replica's loaded version is the one that *all* its ranks have loaded; while
they differ it is 0. A rank that is lost, or fails to load, voids the round. A rank that
*refuses* the version has loaded nothing of it: it keeps its version, and takes part in
the next round. The states are the table :data:`~replicas.core.base.membership.ROUND`.

A rank that asks has no update open: by asking it *gives back* a version that it was
granted and has not looked at. As long as no rank has looked at a round's version, or
loaded it, the round may take a newer one. A rank that has loaded it and left in good
order has begun it, too: the others of its life get the same version.

*At least.* A rank may ask for a version whose number, or a number in whose publisher's
``meta``, is not below a bound. A round opens only with a version that is enough for
**every** rank that waits by then. A rank whose bound is above a version that others
have begun to load *declines* it: it asks again, for a newer one, and waits. When all
ranks ask, so that none of them is loading it, the next round opens. While the ``meta``
of the newest version is unknown here, no bound on it is met.

*Again.* A rank whose own version meets its bound may ask for it again: a framework
repeats a step, say. As long as no newer version is committed, it is granted that one at
once, and so is every other rank of the replica that asks again, even if a newer one is
committed meanwhile: they are *owed* it until they have asked once more.

A round can advance only where a rank asks, and only when that replica, or the newest
version, has changed: only such replicas, which are *due*, are examined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from replicas.core.base.effects import Effect, LoadFailed, ReplicaLoaded, Send
from replicas.core.base.membership import ROUND, RoundEvent, RoundState
from replicas.core.members.member_state import MemberState
from replicas.core.versions.steps import number_in
from replicas.messages import Assigned, ReceiveAsk, ReceiveGrant
from replicas.messages.identity import Member


@dataclass(slots=True)
class LoadRound:
    """The present load of one version by all ranks of a target replica (a *round*)."""

    state: RoundState = "idle"
    version: int = 0
    """The version that all ranks load in this round; 0 before the first."""
    taken: set[Member] = field(default_factory=set)
    """Ranks that were granted it and have not reported the result yet."""
    asks: dict[Member, ReceiveAsk] = field(default_factory=dict)
    asks_same: set[Member] = field(default_factory=set)
    """Ranks whose ask is met by their own version."""
    owed: set[Member] = field(default_factory=set)
    """Ranks that get ``version`` if they ask again, as another rank did."""
    loaded: int = 0
    """The version that all ranks serve; 0 if they serve none, or differ."""
    failed: int = 0
    """The newest version that a rank has reported as not loaded."""
    failure: str = ""
    """The reason that this rank gave."""
    refused: bool = False
    """True if this rank refused the version, and loaded nothing of it."""
    done: int = 0
    """The version that a rank had loaded when it left in good order."""

    @property
    def partial(self) -> bool:
        """True if a rank failed to load, and the ranks have differed since."""
        return self.state == "partial"

    def move(self, event: RoundEvent) -> None:
        """Change the state by the table ``ROUND``; raise InvalidStep if it cannot."""
        self.state = ROUND.next(self.state, event)

    def assign(self, version: int) -> None:
        """Make ``version`` the one that all ranks load in this round."""
        self.move("assign")
        self.version = version
        self.owed.clear()

    def grant(self, member: Member) -> None:
        """Record that the rank may load the round's version now, and must report it."""
        self.move("grant")
        self.taken.add(member)


class Newest(NamedTuple):
    """The newest committed version (0 if none) and its ``meta`` (None if unknown)."""

    version: int
    meta: Mapping[str, object] | None = None

    def is_enough(self, ask: ReceiveAsk) -> bool:
        """Return True if the version reaches the lower bound in the rank's request."""
        return is_enough(ask.at_least, ask.key, self.version, self.meta or {})

    def meets(self, ask: ReceiveAsk) -> bool:
        """Return True if it is newer than the asking rank's, and at or above the
        bound."""
        return ask.after < self.version and self.is_enough(ask)


def is_enough(at_least: float, key: str, version: int, meta: Mapping[str, object]) -> bool:
    """Return True if the version's number is at least ``at_least``. With a ``key`` the
    number in its publisher's ``meta`` under that name counts instead; if there is none,
    return False."""
    found = number_in(meta, key) if key else version
    return found is not None and found >= at_least


class Served(NamedTuple):
    """The newest versions that targets may load; those in ``canary``: the candidate."""

    current: Newest
    candidate: Newest = Newest(0)
    canary: frozenset[tuple[str, int]] = frozenset()

    def of(self, key: tuple[str, int]) -> Newest:
        """Return the newest version that this replica may load."""
        return self.candidate if key in self.canary else self.current


class ReplicaView(NamedTuple):
    """The members of a target replica that carry bytes, and their expected number."""

    ranks: Sequence[MemberState]
    expected: int

    def begun(self, round_: LoadRound) -> bool:
        """Return True if a rank may have begun to load the round's version.

        That is a rank that was granted it, or serves it.
        """
        loaded = (round_.done, *(state.loaded for state in self.ranks))
        return bool(round_.taken) or round_.version in loaded


class LoadRounds:
    """The load rounds of every target replica of a channel."""

    def __init__(
        self,
        channel: str,
        view: Callable[[str, int], ReplicaView],
        out: list[Effect],
        content: Callable[[int], int] = lambda version: version,
    ) -> None:
        """Start without rounds. ``view`` returns the present ranks of a replica;
        ``content``: the version whose bytes a version has. ``out`` gets the effects."""
        self._channel, self.view, self._out, self._content = channel, view, out, content
        self._of_replica: dict[tuple[str, int], LoadRound] = {}
        self._due: set[tuple[str, int]] = set()
        self._due_served = Served(Newest(0))
        self._loaded: Counter[int] = Counter()
        """By version: how many ranks that carry bytes serve it."""

    def of(self, group: str, replica: int) -> LoadRound:
        """Return the replica's load round (not a copy); begin one if there is none."""
        return self._of_replica.setdefault((group, replica), LoadRound())

    @property
    def replicas(self) -> list[tuple[str, int]]:
        """Replicas that have, or had, ranks that carry bytes."""
        return list(self._of_replica)

    def _known(self, group: str, replica: int) -> LoadRound:
        """Return the replica's round, or an idle one, which is not stored."""
        return self._of_replica.get((group, replica), LoadRound())

    def touch(self, state: MemberState) -> None:
        """Have :meth:`take_due` return the replica of this rank, whose held versions or
        state have changed, if a rank of the replica waits for a version."""
        key = (state.member.group, state.member.replica)
        if self._known(*key).asks:
            self._due.add(key)

    def take_due(self, served: Served) -> list[tuple[str, int]]:
        """Return the replicas whose round may advance, in order; then none is due.

        :param served: the versions that targets may load; if they have changed, all
            replicas that ask are due.
        """
        if served != self._due_served:
            self._due_served = served
            self._due |= {key for key, round_ in self._of_replica.items() if round_.asks}
        due, self._due = sorted(self._due), set()
        return due  # sorted: the same history gives the same messages

    def holds(self, state: MemberState, version: int) -> bool:
        """Return True if the rank has the bytes of the version."""
        return self._content(version) in state.held

    def loaded_by_all(self) -> int:
        """Return the oldest version that any target rank serves; 0 if a rank serves
        none, or there is no rank."""
        return min(self._loaded, default=0)

    def _count(self, state: MemberState, change: int) -> None:
        """Add a rank to those that serve its version; remove it for ``change`` -1."""
        if state.is_target and state.carries:
            self._loaded[state.loaded] += change
            if not self._loaded[state.loaded]:
                del self._loaded[state.loaded]  # loaded_by_all() takes the least key

    def asks(self, member: Member) -> bool:
        """Return True if the member waits for the grant of a version."""
        return member in self._known(member.group, member.replica).asks

    def has_open_update(self, member: Member) -> bool:
        """Return True if the member was granted a version and has not reported its
        load."""
        return member in self._known(member.group, member.replica).taken

    def loading(self, group: str, replica: int) -> bool:
        """Return True if the replica's load of a version has begun and not ended."""
        round_ = self._known(group, replica)
        return round_.state == "loading" or bool(round_.taken)

    def wants(self, member: Member, version: int) -> bool:
        """Return True if the member waits for a version and this one is newer."""
        found = self._known(member.group, member.replica).asks.get(member)
        return found is not None and found.after < version

    def ask(self, member: Member, ask: ReceiveAsk) -> None:
        """Take a rank's request (*ask*) for a version, in place of its earlier one.

        It is answered by :meth:`advance`. By it the rank gives back a version that it
        was granted and has not loaded.
        """
        round_ = self.of(member.group, member.replica)
        round_.asks[member] = ask
        round_.taken.discard(member)
        ranks = self.view(member.group, member.replica).ranks
        if (ask.at_least or ask.key) and any(one.member == member and ask.after < one.loaded for one in ranks):
            round_.asks_same.add(member)
        else:
            round_.asks_same.discard(member)
            if member in round_.owed:
                round_.owed.clear()  # the rank asks for a newer one
        self._due.add((member.group, member.replica))

    def cancel_ask(self, member: Member, ask: int) -> None:
        """Withdraw a rank's request number ``ask``, and a grant not reported on yet."""
        round_ = self.of(member.group, member.replica)
        if (found := round_.asks.get(member)) is not None and found.ask == ask:  # else a newer ask has crossed this
            del round_.asks[member]
        round_.taken.discard(member)
        self._due.add((member.group, member.replica))

    def joined(self, state: MemberState) -> None:
        """Add a rank, with the version that an earlier coordinator assigned to it.

        Queue Assigned to ranks that hold that version, so that they keep it: that
        coordinator may have ended before all of them heard of it.
        """
        if not state.carries:
            return
        self._count(state, 1)
        round_ = self.of(state.member.group, state.member.replica)
        if state.from_before:
            assigned, reminded = max(state.hello.assigned, state.loaded), [state]
            if assigned > round_.version:
                round_.assign(assigned)
                reminded = list(self.view(state.member.group, state.member.replica).ranks)
            # a rank without the bytes cannot keep them
            for rank in reminded:
                if rank.loaded < round_.version and self.holds(rank, round_.version):
                    self._out.append(Send(rank.member, Assigned(round_.version)))
        self._recompute_loaded(round_, state.member)
        if state.from_before and state.hello.assigned > state.loaded:  # it may be loading it now
            round_.grant(state.member)

    def loaded(self, state: MemberState, version: int) -> None:
        """Record that a rank serves ``version`` now; the round may be complete then."""
        round_ = self._take_result(state, version)
        if round_ is not None:
            if version > round_.version:
                round_.assign(version)
            self._recompute_loaded(round_, state.member)

    def failed(self, state: MemberState, version: int, why: str, *, kept: bool = False) -> None:
        """Record that a rank failed to load ``version``, and queue an event of that.

        :param why: its reason, as text.
        :param kept: the rank refused it, and serves its own version unchanged.
        """
        round_ = self._take_result(state, state.loaded if kept else 0)
        if round_ is None:
            return
        self._note_failure(round_, state.member.group, state.member.replica, version, why, kept=kept)
        if not kept:
            round_.refused = False
            round_.move("load_failed")
        self._recompute_loaded(round_, state.member)

    def left_behind(self, group: str, replica: int, version: int, why: str) -> None:
        """Queue the event that a replica did not load a version which others load."""
        self._note_failure(self.of(group, replica), group, replica, version, why, kept=True)

    def _note_failure(self, round_: LoadRound, group: str, replica: int, version: int, why: str, *, kept: bool) -> None:
        """Store and report a failed load, if its version is the newest that failed.
        ``kept``: the rank refused the version, and has loaded nothing of it."""
        if version > round_.failed:  # of several ranks the first knows why
            round_.failed, round_.failure, round_.refused = version, f"version {version} was not loaded: {why}", kept
            self._out.append(LoadFailed(self._channel, group, replica, version, why, kept))

    def refusals(self, version: int) -> dict[str, str]:
        """Return why replicas refused this or a newer version, by replica name."""
        return {
            f"{group}/{replica}": round_.failure
            for (group, replica), round_ in self._of_replica.items()
            if round_.refused and round_.failed >= version
        }

    def _take_result(self, state: MemberState, version: int) -> LoadRound | None:
        """Set the version that the rank serves now; return its replica's round. Return
        None if the rank is not a target that carries bytes."""
        self._count(state, -1)
        state.loaded = version
        self._count(state, 1)
        if not (state.is_target and state.carries):
            return None
        round_ = self.of(state.member.group, state.member.replica)
        round_.taken.discard(state.member)
        return round_

    def lost(self, state: MemberState, *, in_order: bool) -> None:
        """Remove a lost rank, which is out of the roster; with the last, the round.
        ``in_order``: it left; the others of its life still load what it had loaded."""
        member = state.member
        self._count(state, -1)
        round_ = self.of(member.group, member.replica)
        round_.asks.pop(member, None)
        round_.taken.discard(member)
        round_.owed.discard(member)
        if in_order and state.carries:
            round_.done = max(round_.done, state.loaded)  # else another rank of its life could get a newer version
        if not self._recompute_loaded(round_, member).ranks:
            round_.move("emptied")
            del self._of_replica[member.group, member.replica]  # its next life begins with a new round

    def _recompute_loaded(self, round_: LoadRound, member: Member) -> ReplicaView:
        """Recompute the version that all ranks serve; emit an event if it changed.

        Return the present ranks of the replica.

        :param member: a rank of the replica.
        """
        if round_.asks:
            self._due.add((member.group, member.replica))
        view = self.view(member.group, member.replica)
        versions = {state.loaded for state in view.ranks}
        # while a rank is missing, the replica serves none
        loaded = versions.pop() if len(versions) == 1 and len(view.ranks) == view.expected else 0
        if loaded == round_.version > 0:
            if round_.state != "loaded":
                round_.move("loaded_by_all")
            if loaded >= round_.failed:
                round_.failed, round_.failure, round_.refused = 0, "", False
        elif round_.state == "loaded":
            round_.move("torn")
        elif loaded > 0 and round_.partial:
            round_.move("all_alike")
        if loaded != round_.loaded:
            round_.loaded = loaded
            load_s = max((state.load_s for state in view.ranks), default=0.0) if loaded else 0.0
            self._out.append(ReplicaLoaded(self._channel, member.group, member.replica, loaded, load_s))
        return view

    def advance(self, group: str, replica: int, newest: Newest) -> None:
        """Open a round for the newest version if the replica may; queue grants.

        :param newest: the newest version that the replica may load.
        """
        latest, view = newest.version, self.view(group, replica)
        if not view.ranks or not latest:
            return
        round_ = self.of(group, replica)
        if round_.state == "loading" and not view.begun(round_):
            round_.move("given_back")
        if round_.state != "loading" and any(state.draining for state in view.ranks):
            return  # ranks may load a version that others have begun with, but nothing new
        # a new version would make the ranks differ
        if round_.state == "loaded" and self._given_again(round_, view, latest):
            return
        asks = round_.asks.values()
        wanted = any(ask.after < latest for ask in asks) and all(newest.is_enough(ask) for ask in asks)
        if wanted and round_.version != latest and not self._in_progress(round_, view):
            # else some ranks would wait for bytes while others load
            if len(view.ranks) < view.expected or not all(self.holds(state, latest) for state in view.ranks):
                return
            round_.assign(latest)
            # all must keep it, whichever rank asks first
            self._out.extend(Send(state.member, Assigned(latest)) for state in view.ranks)
        if round_.state in ("idle", "loaded"):
            return
        for state in view.ranks:
            ask = round_.asks.get(state.member)
            # the rank declines it, or has loaded it
            if ask is None or ask.after >= round_.version or state.loaded == round_.version:
                continue
            if self.holds(state, round_.version):
                del round_.asks[state.member]
                round_.grant(state.member)
                self._out.append(Send(state.member, ReceiveGrant(ask.ask, round_.version)))

    def _given_again(self, round_: LoadRound, view: ReplicaView, latest: int) -> bool:
        """Grant the round's version again to ranks that serve it and ask for it.

        Return True if a rank is yet to ask: no other version may be granted before.

        :param latest: the newest version that the replica may load.
        """
        version = round_.version
        asking = [state for state in view.ranks if state.member in round_.asks and state.member in round_.asks_same]
        if asking and not round_.owed and version == latest:  # all are owed the version that the first of them gets
            round_.owed = {state.member for state in view.ranks}
        for state in asking:
            if state.member not in round_.owed:
                continue
            if not self.holds(state, version):  # its slot was evicted: all must go on to a newer one
                round_.owed.clear()
                break
            round_.owed.discard(state.member)
            round_.taken.add(state.member)
            ask = round_.asks.pop(state.member)
            self._out.append(Send(state.member, ReceiveGrant(ask.ask, version)))
        return bool(round_.owed)

    def _in_progress(self, round_: LoadRound, view: ReplicaView) -> bool:
        """Return True if a rank has yet to load the round's version, and can do so."""
        waiting = [state for state in view.ranks if state.loaded != round_.version]
        if round_.state in ("idle", "loaded") or not waiting or not view.begun(round_):
            return False
        if round_.taken:
            return True
        asks = [round_.asks.get(state.member) for state in waiting]
        # a rank never loads a version below its bound
        declined = all(ask is not None and ask.after >= round_.version for ask in asks)
        if declined and all(state.member in round_.asks for state in view.ranks):
            return False
        return not round_.partial and all(self.holds(state, round_.version) for state in waiting)

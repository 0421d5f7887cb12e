"""Serving: which version each member is told, and the canary of the newest.

Theory of operation
===================

A target may load a version when it was told that the version is committed. With
``follow = "newest"`` every member is told of each commit at once. With ``follow =
"promoted"`` a committed version is first the *candidate*: targets have its bytes,
verified, and go on with the *current* version; they are told of the candidate when it
is promoted. Sources and observers are told of each commit at once.

A *canary* is a few replicas of one group that are told of the candidate, and load it,
before the others. The candidate ends

* *promoted*: by an order, when the canary was healthy for ``soak``, or by a score;
* *rejected*: by an order or a score, or when a replica of the canary does not load it,
  or is lost while it serves it. Its reason is recorded, and no other target loads it;
* *replaced*: a newer version is committed, and is the candidate from then on.

A target exposes no older version after a newer one (I2). So when a version that a
target was told is rejected, the current version is committed again, with a new number
(:mod:`replicas.core.versions.recommits`), and all targets load that.

The decisions are in the ledger, the time since when the canary is healthy among them:
a new coordinator goes on with all of it. Only the choice of the replicas is made anew:
those that were told of the candidate come first.
"""

from __future__ import annotations

import math

from replicas import messages as wire
from replicas.config.structs import ChannelConfig
from replicas.core.base.effects import VersionDecided, What
from replicas.core.base.ledger import Ledger
from replicas.core.members.member_state import MemberState
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.versions.load_rounds import LoadRounds
from replicas.messages.bounds import REASON_LENGTH, text_of

Key = tuple[str, int]
"""Group and index of a replica."""


def due(ledger: Ledger, config: ChannelConfig, state: MemberState, canary: frozenset[Key]) -> int:
    """Return the newest version that a member is to know as committed; 0 if none.

    It changes nothing.

    :param canary: replicas that may load the candidate before the others.
    """
    if config.follow == "newest" or not state.is_target:
        return ledger.newest
    is_canary = (state.member.group, state.member.replica) in canary
    return max(ledger.current(), ledger.candidate() if is_canary else 0)


class Serving:
    """Tells a channel's members of commits; promotes or rejects its candidate.

    The *candidate* is the committed version that only its *canary*, a few replicas,
    loads so far.

    :ivar exposed: the newest version that any target was told, and may serve.
    :ivar canary: replicas that are told of the candidate.
    """

    def __init__(self, context: ChannelContext, rounds: LoadRounds) -> None:
        """Begin with no replica chosen as canary; send and decide nothing.

        :param context: the channel's members, decisions so far, and outbox.
        :param rounds: know which version each replica serves.
        """
        self._context, self._rounds, self._ledger = context, rounds, context.ledger
        self._config = context.config
        self.exposed = context.ledger.current()
        self.canary: frozenset[Key] = frozenset()
        self._chosen_for = 0

    # ------------------------------------------------------------ telling members

    def joined(self, state: MemberState, durable: Ledger) -> None:
        """Record which version a new member knows, from its Hello or its Welcome.

        :param durable: the decisions that are on disk, of which the Welcome tells.
        """
        known = due(durable, self._config, state, self.canary)
        new = known if durable.content(known) == known else 0
        self._note_told(state, state.hello.latest if state.from_before else new)

    def _note_told(self, state: MemberState, version: int) -> None:
        """Record that the member was told that ``version`` is committed.

        Send nothing.
        """
        state.told = version
        if state.is_target:
            self.exposed = max(self.exposed, version)

    def tell(self, state: MemberState) -> None:
        """Queue a Commit of the newest version that the member is to know, unless it
        was told that or a newer one."""
        version = due(self._ledger, self._config, state, self.canary)
        if version > state.told:
            self._note_told(state, version)
            known = self._ledger.versions[version]
            content = known.content if known.content != version else 0
            self._context.send(state.member, wire.Commit(version, known.digest, content))

    def tell_all(self) -> None:
        """Queue to each member the Commit that is due, if any."""
        for state in self._context.roster:
            self.tell(state)

    # ------------------------------------------------------------ the canary

    def choose_canary(self) -> None:
        """Choose the replicas that load the candidate, if any, before the others.

        Take replicas with all ranks: first those that were told of the candidate, then
        by number. Queue the Commit to them. Later calls keep the choice, and add to it
        while it has fewer replicas than configured.
        """
        candidate, config = self._ledger.candidate(), self._config.canary
        if config is None or not candidate:
            self.canary, self._chosen_for = frozenset(), 0
            return
        views = {key: self._rounds.view(*key) for key in self._rounds.replicas if key[0] == config.group}
        whole = [key for key, view in views.items() if view.ranks and len(view.ranks) == view.expected]
        wanted = max(config.replicas, math.ceil(round((config.share or 0.0) * len(views), 6)))
        kept = self.canary & views.keys() if self._chosen_for == candidate else frozenset[Key]()
        if self._chosen_for != candidate or len(kept) < wanted:
            told = {key for key in whole if any(state.told == candidate for state in views[key].ranks)}
            order = sorted(whole, key=lambda key: (key not in kept, key not in told, key))
            self.canary, self._chosen_for = frozenset(order[:wanted]), candidate
            self.tell_all()

    def advance(self, wall: float) -> None:
        """Take the decisions about the candidate that are due, such as its promotion.

        The candidate is the committed version that only its canary, a few replicas,
        loads.

        :param wall: seconds since 1970.
        """
        self.choose_canary()
        candidate, config = self._ledger.candidate(), self._config.canary
        if config is None or not candidate:
            return
        soaks = bool(self.canary) and all(self._rounds.of(*key).loaded == candidate for key in self.canary)
        if soaks != (self._ledger.soaking is not None):
            self._context.decide("soak", candidate, value=float(soaks), at=wall)
        since = self._ledger.soaking
        if config.promote == "healthy" and since is not None and wall >= since[1] + config.soak_s:
            self.promote(candidate, f"its canary was healthy for {config.soak_s:g} s")

    def failed(self, key: Key, version: int, why: str) -> None:
        """Reject the candidate if a replica of its canary did not load or keep it.

        :param key: group and index of that replica.
        :param why: the reason, as text.
        """
        if key in self.canary and version == self._ledger.candidate():
            self.reject(version, f"canary {key[0]}/{key[1]} failed with it ({why})")

    def lost(self, state: MemberState) -> None:
        """Reject the candidate if this lost rank of its canary loaded or served it."""
        key = state.member.group, state.member.replica
        round_ = self._rounds.of(*key) if key in self.canary else None
        if round_ is not None and state.member in round_.taken:
            self.failed(key, round_.version, f"lost while it loaded the version: {state.note}")
        elif state.loaded:
            self.failed(key, state.loaded, f"lost while it served the version: {state.note}")

    def scored(self, version: int, metric: str) -> None:
        """Promote or reject the candidate if the reported metric is what decides.

        :param metric: name of the score that has changed.
        """
        config, ledger = self._config.canary, self._ledger
        if config is None or config.promote != "scored" or metric != config.metric or version != ledger.candidate():
            return
        score = ledger.versions[version].scores[metric].value
        current = ledger.versions.get(ledger.current())
        before = current.scores.get(metric) if current is not None else None
        if config.min is not None and score < config.min:
            self.reject(version, f"{metric} {score:g} is below {config.min:g}")
        elif config.not_below_current_by is not None and before and score < before.value - config.not_below_current_by:
            limit = before.value - config.not_below_current_by
            self.reject(
                version, f"{metric} {score:g} is below {limit:g}; version {ledger.current()} has {before.value:g}"
            )
        else:
            self.promote(version, f"{metric} {score:g}")

    # ------------------------------------------------------------ decisions

    def promote(self, version: int, why: str) -> None:
        """Make the version current, and tell all targets, which then load it.

        :param why: the reason, for the event.
        """
        self._context.decide("promote", version)
        self.report("promoted", version, why=why)
        self.choose_canary()
        self.tell_all()

    def reject(self, version: int, why: str) -> None:
        """Decide that the version never becomes current.

        Record why, and emit an event; members are sent nothing.
        """
        self._context.decide("reject", version, why=text_of(why, REASON_LENGTH))
        self.report("rejected", version, why=why)

    @property
    def must_go_back(self) -> bool:
        """True if a target may serve a version that was rejected."""
        return self.exposed > max(self._ledger.current(), self._ledger.candidate())

    def report(self, what: What, version: int, *, name: str = "", value: float = 0.0, why: str = "") -> None:
        """Emit the event of a decision about a version.

        :param what: the kind of the decision.
        :param why: the reason, as text.
        :param name: of the lease, label or score that the decision is about, if any.
        :param value: its seconds, its version, or the score, as in the event.
        """
        why = text_of(why, REASON_LENGTH)
        self._context.emit(VersionDecided(self._config.name, version, what, name=name, value=value, why=why))

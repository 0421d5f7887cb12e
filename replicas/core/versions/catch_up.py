"""Catch-up: send the newest committed version to members that lack it.

One transfer at a time, concurrent with publishes, pulled from any holder, targets
first, to leave trainers alone. After a failure the next attempt comes
later, and from another holder if there is one: after :data:`REACH_S` if no byte came
(the links of the member are cut, say), else after a delay that grows. Members behind
slow links have a catch-up of their own, which delays no other member, and has no
deadline as long as bytes move. So have members that an earlier catch-up did not serve,
as each try of an unreachable member takes seconds.

No host gets the bytes of two versions at once. A publish that serves all hosts of a
catch-up ends it. Members on a host that a newer version serves are not caught up,
unless the version can be mapped there: a member that the publish does not serve maps
the newer version once it is committed. A catch-up that is slower than the publishing
ends all the same: its members are admitted at the next boundary, and once they have the
next version the older one is no longer needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.core.base.effects import CaughtUp
from replicas.core.members.member_state import MemberState
from replicas.core.moving.attempt import Payload
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.moving.transfer import PULL_TRIES, Transfer
from replicas.messages.identity import Member

RETRY = Backoff(1.0, 30.0)
REACH_S = 3.0
"""Seconds until the next try of a member that got no byte: such a try is cheap."""
Wanted = tuple[Payload, frozenset[str] | None]
"""A version, and the members that are to have it; None: all targets."""
Whom = Literal["new", "missed", "slow"]
"""Each kind of members has a catch-up; ``missed``: an earlier one failed."""
PATIENCE_S = 5.0
"""How long ready members wait for unready ones."""
MUTE_S, MUTE_TRIPS = 1.0, 4.0
"""How long a version that is no longer the newest is offered to members that do not
answer: seconds, and round trips to them. The next publish may need its slot."""


class CatchUp:
    """A catch-up of one channel: it sends the newest version to members that lack it.

    :param on_end: called with the payload at the end of each transfer.
    :param whom: the kind of members that it serves.
    """

    def __init__(self, context: ChannelContext, on_end: Callable[[Payload], None], whom: Whom) -> None:
        """Start without a transfer.

        :param on_end: called with the payload, its version and digest, as a transfer
            ends.
        :param whom: the members that it serves: new ones, those that missed it, or slow
            ones.
        """
        self._context, self._on_end, self._whom = context, on_end, whom
        self.transfer: Transfer | None = None
        self._bad_holder: Member | None = None
        self._unready: set[Member] = set()
        self._waits_since = self._began_at = 0.0

    def advance(self, wanted: Sequence[Wanted], main: Transfer | None, now: float) -> None:
        """Start a transfer if a member lacks a version that targets are to have.

        End the present one if no member needs its version now, or none answers.

        :param wanted: those versions that are known, the most urgent first: the newest
            committed one, or the one that is served and the candidate; then leased
            ones.
        :param main: the transfer of a publish, if one is under way.
        """
        if not wanted:
            return
        transfer, versions = self.transfer, [payload.version for payload, _ in wanted]
        if transfer is not None and transfer.payload.version not in versions:
            needers = self._context.roster.states(transfer.needers)
            mute_s = MUTE_S + MUTE_TRIPS * max((state.rtt_s for state in needers), default=0.0)
            if all(version in state.held for state in needers for version in versions[:1]):
                self._stop(transfer, now, superseded=True)
            elif transfer.is_unanswered and now > self._waits_since + mute_s:
                self._stop(transfer, now)
        for payload, members in wanted:
            if self.transfer is None:
                self._start(payload, members, main, now)

    def _start(self, payload: Payload, members: frozenset[str] | None, main: Transfer | None, now: float) -> None:
        """Start a transfer to the members that lack a version and can get it now.

        Do nothing if there are none, or if no member has the version.

        :param members: only these, by name; None: all targets.
        :param main: the transfer of a publish, whose hosts get nothing else meanwhile.
        """
        context, version = self._context, payload.version
        busy: frozenset[Member] = frozenset()
        hosts: set[int] = set()
        if main is not None:  # nothing else is sent to the hosts that a newer version serves
            busy = main.attempt.concerned | main.needers if main.payload is payload else busy
            hosts = self._hosts(main.needers | main.verified) - {s.host for s in context.roster.holders.of(version)}
        lacking = [s for s in self._lacking(version, now) if members is None or str(s.member) in members]
        waiting = [s for s in lacking if s.member not in busy and s.host not in hosts]
        held = any(version in s.held or version in s.parts for s in context.roster)
        if not waiting or not (held or context.keeping.serves(version, payload.part_owners, waiting)):
            return
        self.transfer = Transfer(
            context,
            payload,
            [state.member for state in waiting],
            kind="catch_up",
            deadline=now + context.config.deadline_s,
            on_end=self._ended,
            avoid=self._bad_holder,
            tries=1 if self._whom == "missed" else PULL_TRIES,
        )
        self._unready, self._waits_since, self._began_at = set(), now, now
        self.transfer.start(now)

    def _hosts(self, members: Iterable[Member]) -> set[int]:
        """Return the numbers of these members' hosts."""
        return {state.host for state in self._context.roster.states(members)}

    def end_if_served_by(self, main: Transfer, now: float) -> None:
        """End this catch-up if a publish's newer transfer serves all of its hosts.

        :param main: the transfer of the publish, which is about to start.
        """
        transfer = self.transfer
        if transfer is None or transfer.payload.version >= main.payload.version:
            return
        moves = bool(transfer.attempt.plan.pulls)
        if transfer.needers <= main.needers or (moves and self._hosts(transfer.needers) <= self._hosts(main.needers)):
            self._stop(transfer, now, superseded=True)

    def _stop(
        self, transfer: Transfer, now: float, error: errors.ReplicasError | None = None, *, superseded: bool = False
    ) -> None:
        """End the transfer, and report which members it has served.

        :param error: why it failed, if it did.
        :param superseded: it is no longer needed, so its members are not tried later.
        """
        transfer.stop(complete=superseded)
        self._ended(transfer, error, now, superseded=superseded)

    def _lacking(self, version: int, now: float) -> list[MemberState]:
        """Return the targets that lack the version and may be served now.

        Only those of the kind that this catch-up serves.
        """
        roster = self._context.roster
        due = [s for s in roster.holders.lacking(version) if _served_as(s) == self._whom and now >= s.retry_at]
        return [s for s in due if roster.available(s, now)]

    def tick(self, now: float) -> None:
        """Check the times of the transfer.

        End it at its deadline unless bytes move. After 5 s, leave out members that are
        not ready, if others can be served.
        """
        transfer = self.transfer
        if transfer is None:
            return
        if now > transfer.deadline and not transfer.attempt.is_moving(now):
            self._stop(transfer, now, errors.DeadlineExceeded("catch-up", phase="transfer"))
        elif transfer.attempt.unready and now > self._waits_since + PATIENCE_S:
            self._leave_unready(transfer, now)

    def _leave_unready(self, transfer: Transfer, now: float) -> None:
        """Leave out members whose slot is not ready, if other members can be served."""
        unready = transfer.attempt.unready & transfer.needers
        others = [s for s in self._lacking(transfer.payload.version, now) if s.member not in transfer.asked]
        if not unready or (unready == transfer.needers and not others):
            return
        self._unready |= unready
        self._waits_since = now
        if unready == transfer.needers:
            self._stop(transfer, now)
        else:
            transfer.exclude(unready, now, reason="refused", why="it was not ready to receive")

    def _ended(
        self, transfer: Transfer, error: errors.ReplicasError | None, now: float, *, superseded: bool = False
    ) -> None:
        """Report the members that a transfer has caught up, and set when others are
        tried again.

        :param error: why the transfer failed, or None.
        :param superseded: it was no longer needed: the others are not tried later for
            it.
        """
        context, self.transfer = self._context, None
        givers = transfer.attempt.plan.givers
        self._bad_holder = givers[0] if error is not None and givers else None
        self._on_end(transfer.payload)
        if transfer.verified:
            served = tuple(sorted(transfer.verified))
            moved = sum(transfer.moved_to.values()), dict(transfer.moved_to), dict(transfer.pulled)
            took_s = now - self._began_at
            context.emit(CaughtUp(context.config.name, transfer.payload.version, served, *moved, seconds=took_s))
        for state in context.roster:
            if state.member in transfer.verified or superseded:
                state.retry_at = 0.0 if state.member in transfer.verified else state.retry_at
            elif state.member in self._unready or isinstance(transfer.refused.get(state.member), errors.Busy):
                state.retry_at = now + RETRY.first_s
            elif state.member in transfer.asked and state.is_target:
                one = transfer.attempt.tasks.get(state.member)
                costly = one is not None and bool(one.reply or one.received)
                state.failures += costly
                state.retry_at = now + (RETRY.after(state.failures) if costly else REACH_S)


def _served_as(state: MemberState) -> Whom:
    """Return the kind of catch-up (new, missed or slow) that serves the member."""
    return "slow" if state.slow else "missed" if state.retry_at else "new"

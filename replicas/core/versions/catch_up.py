"""Catch-up: the newest committed version for members that lack it, beside everything
else.

One transfer at a time, over a lane of its own, from any holder, targets first, so that
trainers are left alone. Those that are quarantined are served one by one, when nobody
else waits; one that was served is released when its time is over, which is longer each
time. After a failure the next attempt comes later, and from another holder if there is
one. Whom nobody who has the version reaches is served as soon as somebody does.

Those behind slow links have a catch-up of their own, which holds up nobody, and takes
its time as long as bytes move.

No host gets the bytes of two versions at once. A publish that serves all hosts of those
who are being caught up ends that, and nobody is caught up on a host that a newer
version serves, unless its memory is there to be mapped: who is not among those that the
publish serves maps the newer version once it is committed.

A catch-up that is slower than the publishing ends all the same: its members are
admitted at the next boundary, the next version waits for them, and once they have that
one nobody needs the old one any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.core.effects import CaughtUp
from replicas.core.ground import Ground
from replicas.core.members.member_state import MemberState
from replicas.core.moving.payload import Payload
from replicas.core.moving.transfers import Transfer
from replicas.messages.identity import Member

__all__ = ["CatchUp"]

RETRY = Backoff(1.0, 30.0)
LOOK_S = 0.2
"""Between two looks whether somebody who has it reaches those who lack it by now."""
PATIENCE_S = 5.0
"""How long those who are ready wait for those who are not."""


class CatchUp:
    """A catch-up of one channel.

    :param on_end: called with what was sent, whoever got it.
    :param slow: of those that would hold up the others
        (:mod:`replicas.core.moving.pacing`).
    """

    def __init__(self, ground: Ground, on_end: Callable[[Payload], None], *, slow: bool = False) -> None:
        self._ground = ground
        self._on_end = on_end
        self._slow = slow
        self.transfer: Transfer | None = None
        self._bad_holder: Member | None = None
        self._unready: set[Member] = set()
        self._waits_since = 0.0
        self._look_at = 0.0

    def advance(self, payload: Payload | None, main: Transfer | None, now: float) -> None:
        """Begin if somebody lacks ``payload``, the newest committed version. ``main``:
        the transfer of a publish."""
        self._release(payload, now)
        if payload is None:
            return
        version = payload.version
        self._stop_if_outdated(version, now)
        if self.transfer is not None:
            return
        busy = main.concerned | main.needers if main is not None and main.payload is payload else frozenset()
        hosts = self._served_hosts(main) - {state.host for state in self._ground.roster.holders(version)}
        waiting = [s for s in self._lacking(version, now) if s.member not in busy and s.host not in hosts]
        alone = [state for state in waiting if state.standing == "quarantined"]
        needers = [state.member for state in waiting if state not in alone] or [state.member for state in alone[:1]]
        held = any(version in s.held or version in s.parts for s in self._ground.roster)
        if not needers or not (held or self._ground.keeping.serves(version, payload.part_owners, waiting)):
            return
        if now < self._look_at:
            return
        transfer = Transfer(
            self._ground,
            payload,
            needers,
            kind="catch_up",
            deadline=now + self._ground.config.deadline_s,
            on_end=self._ended,
            avoid=self._bad_holder,
        )
        if self._ground.links and not transfer.possible(now):
            self._look_at = now + LOOK_S
            return
        self.transfer = transfer
        self._unready, self._waits_since = set(), now
        self.transfer.start(now)

    def _served_hosts(self, main: Transfer | None) -> set[int]:
        """Hosts that a newer version serves: that is all that should be on its way
        there."""
        return self._hosts(main.needers | main.verified) if main is not None else set()

    def _hosts(self, members: Iterable[Member]) -> set[int]:
        return {state.host for state in self._ground.roster.states(members)}

    def served_by(self, main: Transfer, now: float) -> None:
        """All hosts to which an older version is under way get this newer one."""
        transfer = self.transfer
        if transfer is None or transfer.payload.version >= main.payload.version:
            return
        moves = bool(transfer.plan.receivers)
        if transfer.needers <= main.needers or (moves and self._hosts(transfer.needers) <= self._hosts(main.needers)):
            self._supersede(transfer, now)

    def _release(self, payload: Payload | None, now: float) -> None:
        """Who has been kept out for its time, and was served or lacks nothing, is tried
        again with the others."""
        for state in self._ground.roster.index.apart.values():
            lacks = payload is not None and state.carries and payload.version not in state.held
            waits = state.standing == "quarantined" and state.is_target and now >= state.not_before
            if waits and (state.served or not lacks):
                state.step("released")

    def _stop_if_outdated(self, version: int, now: float) -> None:
        transfer = self.transfer
        if transfer is None or transfer.payload.version >= version:
            return
        states = self._ground.roster.states(transfer.needers)
        if all(version in state.held for state in states):
            self._supersede(transfer, now)

    def _supersede(self, transfer: Transfer, now: float) -> None:
        """Nobody needs it any more; that it has not ended speaks against nobody."""
        transfer.stop(complete=True)
        self._ended(transfer, None, now, superseded=True)

    def _lacking(self, version: int, now: float) -> list[MemberState]:
        return [state for state in self._ground.roster.lacking(version) if self._lacks(state, version, now)]

    def _lacks(self, state: MemberState, version: int, now: float) -> bool:
        """Whether it is to be served now."""
        wants = state.is_target and state.carries and version not in state.held and now >= state.retry_at
        may = state.standing == "quarantined" or state.slow or now >= state.not_before
        return wants and state.slow == self._slow and may and self._ground.roster.available(state, now)

    def tick(self, now: float) -> None:
        """Give up at the deadline, and on those who do not get ready while others
        wait."""
        transfer = self.transfer
        if transfer is None:
            return
        if now > transfer.deadline and not transfer.gets_on(now):
            transfer.stop(complete=False)
            self._ended(transfer, errors.DeadlineExceeded("catch-up", phase="transfer"), now)
        elif transfer.unready and now > self._waits_since + PATIENCE_S:
            self._leave_unready(transfer, now)

    def _leave_unready(self, transfer: Transfer, now: float) -> None:
        unready = transfer.unready & transfer.needers
        others = [s for s in self._lacking(transfer.payload.version, now) if s.member not in transfer.asked]
        if not unready or (unready == transfer.needers and not others):
            return
        self._unready |= unready
        self._waits_since = now
        if unready == transfer.needers:
            transfer.stop(complete=False)
            self._ended(transfer, None, now)
        else:
            transfer.exclude(unready, now, reason="refused", why="it was not ready to receive")

    def _ended(
        self, transfer: Transfer, error: errors.ReplicasError | None, now: float, *, superseded: bool = False
    ) -> None:
        ground = self._ground
        self.transfer = None
        transfer.close_lane()
        self._bad_holder = transfer.givers[0] if error is not None and transfer.givers else None
        self._on_end(transfer.payload)
        if transfer.verified:
            served = tuple(sorted(transfer.verified))
            ground.emit(CaughtUp(ground.config.name, transfer.payload.version, served, transfer.moved_nbytes))
        for state in ground.roster:
            if state.member in transfer.verified:
                state.served = True
                continue
            if superseded or state.member in transfer.unreached:
                continue  # of the latter: it is looked for ways to it all the time
            if state.member in self._unready or isinstance(transfer.refused.get(state.member), errors.Busy):
                state.retry_at = now + RETRY.first_s
            elif state.member in transfer.asked and state.is_target:
                state.failures += 1
                state.retry_at = now + RETRY.after(state.failures)

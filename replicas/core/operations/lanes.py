"""Lanes: the process groups of a channel, as state.

A lane is formed once, over a fresh key prefix, by one sidecar of each of its members,
in rank order. It is *forming* until every member has reported success, then *formed*,
and *dead* for good after the first failure or loss: a new attempt is a new lane
(:data:`replicas.core.base.membership.LANE`).

A failure report is ignored while the lane forms over a store that has ended:
:class:`~replicas.core.operations.running.Operations` opens another lane over the next
store. A store to which a non-member writes is ended and replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from replicas import errors
from replicas.core.base.effects import Effect, ReplaceStore, Send, SidecarReplaced, SweepStore
from replicas.core.base.membership import LANE, LaneState
from replicas.core.members.member_state import MemberState
from replicas.core.members.roster import Roster
from replicas.core.operations.lane_progress import LaneProgress
from replicas.messages import Backend, GroupSpec, LaneDrop, LaneForm, LaneMoved
from replicas.messages.identity import Member

SECRET_NBYTES = 32
FORM_TIMEOUT_S = 20.0
FORM_TRIPS = 25.0
"""Round trips, one after another, that forming takes (to peers and the store)."""
LATE_S = 1.0
"""Members give up at their deadline; the coordinator this much later."""


def form_timeout(remaining_s: float, rtt_s: float = 0.0) -> float:
    """Return how many of the remaining seconds a process group may take to form.

    It is long enough for a forkserver that is still starting, and short enough to try
    again.

    :param remaining_s: seconds until the deadline of the operation.
    :param rtt_s: round-trip time to the farthest member.
    """
    enough_s = max(remaining_s / 4, min(5.0, remaining_s / 2), min(FORM_TRIPS * rtt_s, remaining_s))
    return min(FORM_TIMEOUT_S, enough_s)


@dataclass(slots=True, eq=False)
class Lane:
    """One process group.

    :ivar deadline: time by which it must have formed.
    :ivar store: address of the store over which it forms.
    :ivar progress: of its current work.
    """

    name: str
    prefix: str
    members: tuple[Member, ...]
    backend: Backend
    opened_at: float
    deadline: float
    store: tuple[str, int]
    state: LaneState = "forming"
    formed_by: set[Member] = field(default_factory=set)
    progress: LaneProgress = field(default_factory=LaneProgress)
    ranks: dict[Member, int] = field(init=False)

    def __post_init__(self) -> None:
        """Number the members in their order: these are their ranks in the group."""
        self.ranks = {member: rank for rank, member in enumerate(self.members)}

    def overdue_error(self) -> errors.DeadlineExceeded:
        """Return (do not raise) the error of a lane that has not formed in time.

        It names the members that have not reported.
        """
        late = [member.name for member in self.members if member not in self.formed_by]
        within_s = self.deadline - self.opened_at
        text = f"the process group did not form in {within_s:.1f} s: no answer from {', '.join(late)}"
        return errors.DeadlineExceeded(text, phase="form", members=late)


class Lanes:
    """All process groups (*lanes*) of a channel. Names are not reused within a term."""

    def __init__(
        self,
        roster: Roster,
        out: list[Effect],
        *,
        run: str,
        term: int,
        store: Callable[[], tuple[str, int]],
        secret: bytes = b"",
    ) -> None:
        """Start without lanes (process groups).

        :param out: the channel's effects, to which messages are added.
        :param run: name of the run; with ``term`` it makes store keys unique.
        :param store: returns the address of the present store.
        :param secret: the coordinator's secret, from which the lanes' secrets derive.
        """
        self.roster = roster
        self._out = out
        self._base = f"{run}/{roster.config.name}/{term}"
        self._store = store
        self._secret = secret
        self._lost: tuple[str, int] | None = None
        self._count = 0
        self._lanes: dict[str, Lane] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        """Iterate over the lanes, oldest first; they may be closed meanwhile."""
        return iter(list(self._lanes.values()))

    def open(self, states: Sequence[MemberState], backend: Backend, now: float, timeout_s: float) -> Lane:
        """Ask the members to form a process group (a lane) of all of them; do not wait.

        Queue LaneForm to each, with a new key prefix of the present store. Return the
        lane, which is forming; :meth:`formed` records the answers.

        :param states: the members, by rank.
        :param backend: ``gloo`` or ``nccl``.
        :param timeout_s: seconds for the members to form the group.
        """
        self._count += 1
        epoch = self.roster.epoch
        name = f"{epoch}.{self._count}"
        prefix = f"{self._base}/{epoch}/{self._count}"
        members = tuple(state.member for state in states)
        host, port = self._store()
        lane = Lane(name, prefix, members, backend, now, now + timeout_s + LATE_S, (host, port))
        self._lanes[name] = lane
        secret = self._secret_of(prefix)
        addresses = tuple(state.address for state in states)
        names = tuple(member.name for member in members)
        for rank, (member, address) in enumerate(zip(members, addresses, strict=True)):
            group = GroupSpec(prefix, host, port, rank, len(members), backend, address, timeout_s)
            group = msgspec.structs.replace(group, names=names, addresses=addresses, secret=secret)
            self._out.append(Send(member, LaneForm(name, group)))
        return lane

    def pull_secret(self, number: int) -> bytes:
        """Return the secret with which members pull in one attempt of a transfer.

        :param number: of the attempt.
        """
        return self._secret_of(f"{self._base}/pull/{number}")

    def _secret_of(self, what: str) -> bytes:
        """Return the secret that belongs to the name ``what``.

        It derives from the coordinator's secret, so nothing is stored.
        """
        return hashlib.blake2b(what.encode(), digest_size=SECRET_NBYTES, key=self._secret).digest()

    def formed(self, member: Member, name: str) -> None:
        """Record a member's report that it has joined the process group called
        ``name``.

        After the last member's report the lane is formed. Unknown lanes are ignored.
        """
        lane = self._lanes.get(name)
        if lane is None or lane.state != "forming" or member not in lane.ranks:
            return
        lane.formed_by.add(member)
        if len(lane.formed_by) == len(lane.members):
            lane.state = LANE.next(lane.state, "formed_by_all")

    def reported_failed(self, member: Member, name: str, error: errors.ReplicasError) -> Lane | None:
        """Return the lane that a member reports as failed, for the caller to close.

        Return None if the lane is unknown, or if its store has failed: then another
        lane follows. If a non-member has written to the store, queue its replacement.

        :param name: of the lane.
        :param error: what the member has reported.
        """
        lane = self._lanes.get(name)
        if lane is None or member not in lane.ranks:
            return None
        if not isinstance(error, errors.StoreTampered):
            return None if self.waits_for_store(lane) else lane
        if lane.state == "forming" and lane.store == self._store() != self._lost:
            self._lost = lane.store
            self._out.append(ReplaceStore(*lane.store))
        return None

    def overdue(self, now: float) -> list[Lane]:
        """Return the lanes that have not formed by their deadline; change none."""
        return [lane for lane in self if lane.state == "forming" and now > lane.deadline]

    def store_lost(self) -> None:
        """Record that the store has ended: forming lanes now wait for
        :meth:`store_moved`."""
        self._lost = self._store()

    def store_moved(self) -> list[Lane]:
        """Record that there is another store now; return the lanes that were forming.

        The caller replaces these by lanes over that store.
        """
        self._lost = None
        return [lane for lane in self if lane.state == "forming"]

    def waits_for_store(self, lane: Lane) -> bool:
        """Return True if the lane cannot form, as its store is gone or replaced."""
        return lane.state == "forming" and (lane.store == self._lost or lane.store != self._store())

    def moved(self, member: Member, message: LaneMoved, now: float) -> None:
        """Store a member's progress report of a lane; ignore unknown lanes."""
        lane = self._lanes.get(message.lane)
        if lane is not None and member in lane.ranks:
            lane.progress.moved(member, message, now)

    def close(self, lane: Lane, reason: str = "") -> None:
        """End a lane: queue the kill of its sidecars (its members' transfer processes),
        and the removal of its store keys.

        Do nothing if the lane is dead.

        :param reason: why it must be replaced, for an event; empty if its work was
            done.
        """
        if lane.state == "dead":
            return
        lane.state = LANE.next(lane.state, "close")
        del self._lanes[lane.name]
        here = [member for member in lane.members if member in self.roster]
        self._out.extend(Send(member, LaneDrop(lane.name)) for member in here)
        self._out.append(SweepStore(lane.prefix))
        if reason and here:
            self._out.append(SidecarReplaced(self.roster.config.name, reason, len(here)))

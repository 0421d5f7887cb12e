"""Lanes: the process groups of a channel, as state.

A lane is formed once, over a fresh key prefix, by one sidecar of each of its members,
in rank order. It is *forming* until every member has reported success, then *formed*,
and *dead* for good after the first failure or loss: a new attempt is a new lane
(:data:`replicas.core.base.membership.LANE`). A *probe* is a lane that only shows
whether its members can form one.

The object that opens a lane *owns* it (:class:`LaneOwner`), and is told of its end. A
failure report is ignored while the lane forms over a store that has ended: the owner
opens another lane over the next store. A store to which a non-member writes is ended
and replaced.

After a publish had to abandon a lane, the channel's lanes *rest*: versions are pulled
meanwhile, so that no publish waits for a transport that has just failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.core.base.effects import Effect, ReplaceStore, Send, SidecarReplaced, SweepStore
from replicas.core.base.membership import LANE, LaneState
from replicas.core.members.member_state import MemberState
from replicas.core.members.preflight import nccl_works
from replicas.core.members.roster import Roster
from replicas.core.moving.lane_progress import LaneProgress
from replicas.messages import Backend, LaneDrop, LaneForm, LaneMoved
from replicas.messages.identity import Member

SECRET_NBYTES = 32
FORM_TIMEOUT_S = 20.0
FORM_TRIPS = 25.0
"""Round trips, one after another, that forming takes (to peers and the store)."""
MAX_PROBES = 3
"""Per transfer or operation."""
PROBE_TIMEOUT_S = 4.0
REST = Backoff(1.0, 300.0)
"""How long versions are not sent over lanes after a lane was abandoned."""
ALL_PAIRS = 5


def form_timeout(remaining_s: float, rtt_s: float = 0.0) -> float:
    """Return how many of the remaining seconds a lane may take to form.

    It is long enough for a forkserver that is still starting, and short enough to try
    again.

    :param rtt_s: round-trip time to the farthest member.
    """
    enough_s = max(remaining_s / 4, min(5.0, remaining_s / 2), min(FORM_TRIPS * rtt_s, remaining_s))
    return min(FORM_TIMEOUT_S, enough_s)


class LaneOwner(Protocol):
    """The user of a lane, which is told of its events until the lane is dead."""

    def lane_formed(self, lane: Lane, now: float) -> None:
        """Every member has formed the lane."""

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        """The lane failed, or did not form in time, while all its members are alive."""

    def lane_void(self, lane: Lane, now: float) -> None:
        """The lane cannot form because its store is gone; no member is at fault."""


@dataclass(slots=True, eq=False)
class Lane:
    """One process group.

    :ivar deadline: time by which it must have formed.
    :ivar store: address of the store over which it forms.
    :ivar pace: progress of its current work.
    """

    name: str
    prefix: str
    members: tuple[Member, ...]
    backend: Backend
    owner: LaneOwner
    probe: bool
    opened_at: float
    deadline: float
    store: tuple[str, int]
    state: LaneState = "forming"
    formed_by: set[Member] = field(default_factory=set)
    formed_s: float = 0.0
    progress: LaneProgress = field(default_factory=LaneProgress)
    ranks: dict[Member, int] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {member: rank for rank, member in enumerate(self.members)}

    def overdue(self) -> errors.DeadlineExceeded:
        """Return the error of a lane that has not formed by its deadline."""
        late = [member.name for member in self.members if member not in self.formed_by]
        within_s = self.deadline - self.opened_at
        text = f"the process group did not form in {within_s:.1f} s"
        if self.probe:
            text = f"no process group within {within_s:g} s"
        phase = "probe" if self.probe else "form"
        return errors.DeadlineExceeded(f"{text}; missing: {', '.join(late)}", phase=phase, members=late)


class Lanes:
    """All lanes of a channel. Lane names are never used twice within a term."""

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
        """:param secret: the coordinator's secret, from which the lanes' secrets
        derive."""
        self.roster = roster
        self._out = out
        self._base = f"{run}/{roster.config.name}/{term}"
        self._store = store
        self._secret = secret
        self._lost: tuple[str, int] | None = None
        self._count = 0
        self._lanes: dict[str, Lane] = {}
        self._kept: Lane | None = None
        self._left = 0
        """Lanes that publishes have abandoned since one last worked."""
        self._rest_until = 0.0

    def __len__(self) -> int:
        return len(self._lanes)

    def of(self, owner: LaneOwner) -> list[Lane]:
        """Return the lanes of this owner, oldest first."""
        return [lane for lane in self._lanes.values() if lane.owner is owner]

    def backend(self, states: Sequence[MemberState], *, on_device: bool) -> Backend:
        """Return ``nccl`` if configured, or if all members can use it for GPU tensors.

        :param on_device: the tensors are on CUDA devices.
        """
        config = self.roster.config
        if config.backend == "gloo" or (config.backend == "nccl" and (config.peers or config.staging != "device")):
            return config.backend
        return "nccl" if on_device and nccl_works([state.hello for state in states]) else "gloo"

    def open(
        self,
        states: Sequence[MemberState],
        backend: Backend,
        owner: LaneOwner,
        now: float,
        timeout_s: float,
        *,
        grace_s: float = 0.0,
        probe: bool = False,
    ) -> Lane:
        """Ask every member to form a process group of all of them, in this order.

        :param grace_s: seconds from the members' deadline until the owner is told.
        """
        self._count += 1
        epoch = self.roster.epoch
        name = f"{epoch}.{self._count}"
        prefix = f"{self._base}/{epoch}/{self._count}"
        members = tuple(state.member for state in states)
        host, port = self._store()
        deadline = now + timeout_s + grace_s
        lane = Lane(name, prefix, members, backend, owner, probe, now, deadline, (host, port))
        self._lanes[name] = lane
        secret = self._secret_of(prefix)
        addresses = tuple(state.address for state in states)
        names = tuple(member.name for member in members)
        for rank, member in enumerate(members):
            form = LaneForm(
                lane=name,
                prefix=prefix,
                store_host=host,
                store_port=port,
                rank=rank,
                size=len(members),
                backend=backend,
                addresses=addresses,
                deadline_s=timeout_s,
                names=names,
                probe=probe,
                secret=secret,
            )
            self._out.append(Send(member, form))
        return lane

    def pull_secret(self, number: int) -> bytes:
        """Return the secret with which members pull in one attempt of a transfer."""
        return self._secret_of(f"{self._base}/pull/{number}")

    def _secret_of(self, what: str) -> bytes:
        return hashlib.blake2b(what.encode(), digest_size=SECRET_NBYTES, key=self._secret).digest()

    def formed(self, member: Member, name: str, now: float) -> None:
        """Note that a member has formed the lane; after the last one tell the owner."""
        lane = self._lanes.get(name)
        if lane is None or lane.state != "forming" or member not in lane.ranks:
            return
        lane.formed_by.add(member)
        if len(lane.formed_by) == len(lane.members):
            lane.state = LANE.next(lane.state, "formed_by_all")
            lane.formed_s = now - lane.opened_at
            lane.owner.lane_formed(lane, now)

    def reported_failed(self, member: Member, name: str, error: errors.ReplicasError) -> Lane | None:
        """Return the lane that a member reports as failed; None if its store failed.

        A store to which others wrote is replaced.
        """
        lane = self._lanes.get(name)
        if lane is None or member not in lane.ranks:
            return None
        if not isinstance(error, errors.StoreTampered):
            return None if self._waits_for_store(lane) else lane
        if lane.state == "forming" and lane.store == self._store() != self._lost:
            self._lost = lane.store
            self._out.append(ReplaceStore(*lane.store))
        return None

    def fail(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        """Tell the owner that the lane failed; close it if it is a kept lane."""
        if lane is self._kept:
            self.close(lane)
        else:
            lane.owner.lane_failed(lane, error, now)

    def tick(self, now: float) -> None:
        """Tell the owners of lanes that have not formed in time."""
        for lane in [lane for lane in self._lanes.values() if now > lane.deadline]:
            if self._waits_for_store(lane):
                lane.owner.lane_void(lane, now)
            elif lane.state == "forming":
                lane.owner.lane_failed(lane, lane.overdue(), now)

    def store_lost(self) -> None:
        """Note that the store has ended: forming lanes wait for the next store."""
        self._lost = self._store()

    def store_moved(self, now: float) -> None:
        """Tell the owners of forming lanes that a new store replaces theirs."""
        self._lost = None
        for lane in list(self._lanes.values()):
            if lane.state == "forming":
                lane.owner.lane_void(lane, now)

    def _waits_for_store(self, lane: Lane) -> bool:
        """Return whether the lane cannot form because its store is gone or replaced."""
        return lane.state == "forming" and (lane.store == self._lost or lane.store != self._store())

    def moved(self, member: Member, message: LaneMoved, now: float) -> None:
        """Store a member's progress report of a lane."""
        lane = self._lanes.get(message.lane)
        if lane is not None and member in lane.ranks:
            lane.progress.moved(member, message, now)

    def close(self, lane: Lane, reason: str = "") -> None:
        """Kill the lane's sidecars and sweep its keys.

        ``reason``: why it must be replaced; empty if its work was done.
        """
        if lane.state == "dead":
            return
        lane.state = LANE.next(lane.state, "close")
        del self._lanes[lane.name]
        if lane is self._kept:
            self._kept = None
        here = [member for member in lane.members if member in self.roster]
        self._out.extend(Send(member, LaneDrop(lane.name)) for member in here)
        self._out.append(SweepStore(lane.prefix))
        if reason and here:
            self._out.append(SidecarReplaced(self.roster.config.name, reason, len(here)))

    # ------------------------------------------------------------ between two transfers

    def keep(self, lane: Lane | None) -> None:
        """Keep this lane for the next transfer; close the lane that was kept before."""
        kept = self._kept
        if kept is not None and kept is not lane:
            self.close(kept)
        self._kept = lane if lane is not None and lane.state == "formed" else None
        if self._kept is not None:
            self._left = 0

    def note_abandoned(self, now: float) -> None:
        """Let lanes rest: a publish has abandoned a lane that did not work."""
        self._left += 1
        self._rest_until = now + REST.after(self._left)

    def is_resting(self, now: float) -> bool:
        """Return whether lanes rest because one was abandoned recently."""
        return now < self._rest_until

    def take_kept(self, members: tuple[Member, ...], backend: Backend, owner: LaneOwner) -> Lane | None:
        """Return the kept lane if it has exactly these members and this backend."""
        kept = self._kept
        if kept is None or (kept.members, kept.backend) != (members, backend):
            return None
        self._kept, kept.owner = None, owner
        return kept

    def lost(self, member: Member, now: float) -> None:
        """Close the kept lane, and end the probes, of a member out of the roster."""
        for lane in [lane for lane in self._lanes.values() if member in lane.ranks]:
            if lane is self._kept:
                self.close(lane)
            elif lane.probe:
                lane.owner.lane_void(lane, now)


class Probe:
    """Find the faulty member of a group whose members are all alive, by trying pairs.

    Pairs of members form lanes of two, all at the same time, and move a few bytes
    through them. A pair that has not succeeded within :data:`PROBE_TIMEOUT_S` is *bad*.
    Up to :data:`ALL_PAIRS` members every pair is tried, beyond that each member with
    the next two in a ring: still four pairs for each member, enough to tell a member
    that fails with all others from a member that failed with that one only. A pair with
    a lost member proves nothing; nor does any pair if the store is replaced meanwhile.

    :param pairs: pairs to try; None: chosen from ``members``.
    :param on_end: called once as ``on_end(culprits, now)``, with the reason by member,
        or None if nothing was proved.
    """

    def __init__(
        self,
        lanes: Lanes,
        members: Sequence[Member],
        backend: Backend,
        now: float,
        on_end: Callable[[Mapping[Member, str] | None, float], None],
        *,
        pairs: Sequence[tuple[Member, Member]] | None = None,
    ) -> None:
        self._lanes = lanes
        self._members = tuple(member for member in members if member in lanes.roster)
        self._on_end = on_end
        self._bad: dict[tuple[Member, ...], str] = {}
        self.over = False
        pairs = self._pairs() if pairs is None else pairs
        self._proves = not pairs
        self._open = [
            lanes.open(lanes.roster.states(pair), backend, self, now, PROBE_TIMEOUT_S, probe=True) for pair in pairs
        ]
        self._end_if_done(now)

    def _pairs(self) -> Sequence[tuple[Member, Member]]:
        members, count = self._members, len(self._members)
        if count <= ALL_PAIRS:
            return [(members[i], members[k]) for i in range(count) for k in range(i + 1, count)]
        return [(members[i], members[(i + step) % count]) for i in range(count) for step in (1, 2)]

    def lane_formed(self, lane: Lane, now: float) -> None:
        self._proves = True
        self._close(lane, now)

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        self._proves = True
        self._bad[lane.members] = error.message
        self._close(lane, now)

    def lane_void(self, lane: Lane, now: float) -> None:
        """Discard the pair of a lost member, or all pairs over a lost store."""
        if not all(member in self._lanes.roster for member in lane.members):
            self._close(lane, now)
        else:
            self.abandon()
            self._on_end(None, now)

    def _close(self, lane: Lane, now: float) -> None:
        self._open.remove(lane)
        self._lanes.close(lane)
        self._end_if_done(now)

    def abandon(self) -> None:
        """Close every lane, and end without calling ``on_end``."""
        self.over = True
        for lane in self._open:
            self._lanes.close(lane)

    def _end_if_done(self, now: float) -> None:
        if self._open or self.over:
            return
        self.over = True
        roster = self._lanes.roster
        bad = {pair: why for pair, why in self._bad.items() if all(member in roster for member in pair)}
        self._on_end(culprits(self._members, bad) if self._proves else None, now)


def culprits(members: Sequence[Member], bad: Mapping[tuple[Member, ...], str]) -> dict[Member, str]:
    """Return the fewest members that explain the bad pairs, each with a reason.

    As long as bad pairs are left, the member in most of them is a culprit, and its
    pairs are explained. In a tie (a single bad pair) the culprit is the member that is
    later in ``members``: receivers come after the sender there, and losing a receiver
    costs less.
    """
    left = dict(bad)
    found: dict[Member, str] = {}
    while left:
        worst = max(members, key=lambda member: (sum(member in pair for pair in left), members.index(member)))
        others = [other.name for pair in left if worst in pair for other in pair if other != worst]
        why = next(why for pair, why in left.items() if worst in pair)
        found[worst] = f"no process group of it works with {', '.join(sorted(others))}: {why}"
        left = {pair: why for pair, why in left.items() if worst not in pair}
    return found

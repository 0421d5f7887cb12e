"""Lanes: the process groups of a channel, as state.

A lane is formed once, over a fresh key prefix, by one sidecar of each of its members,
in rank order. It is *forming* until every member has reported success, then *formed*,
and *dead* for good after the first failure or loss: a new attempt is a new lane
(:data:`replicas.core.membership.LANE`). A *probe* is a lane that only shows whether its
members can form one.

A report about a lane that is forming over a store that has ended is no failure of the
lane or its members: the owner of the lane opens another over the next store. A store
that a non-member writes to is ended and replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replicas.core.effects import Effect, Emit, ReplaceStore, Send, SidecarReplaced, SweepStore
from replicas.core.members.member_state import MemberState
from replicas.core.members.roster import Roster
from replicas.core.membership import LANE, LaneState
from replicas.core.moving.pace import Pace
from replicas.messages import Backend, LaneDrop, LaneForm, LaneMoved
from replicas.messages.identity import Member

__all__ = ["Lane", "Lanes", "form_timeout"]

SECRET_NBYTES = 32
FORM_TIMEOUT_S = 20.0
FORM_TRIPS = 25.0
"""Forming takes this many round trips one after another (peers and the store)."""


def form_timeout(remaining_s: float, rtt_s: float = 0.0) -> float:
    """Return the time to form a lane, as a part of the deadline's remainder.

    It is long enough for a forkserver that is still starting, short enough to try
    again.

    :param rtt_s: round-trip time to the farthest member.
    """
    enough_s = max(remaining_s / 4, min(5.0, remaining_s / 2), min(FORM_TRIPS * rtt_s, remaining_s))
    return min(FORM_TIMEOUT_S, enough_s)


@dataclass(slots=True, eq=False)
class Lane:
    """One process group.

    :ivar store: where it forms.
    :ivar pace: progress of its current work.
    """

    name: str
    prefix: str
    members: tuple[Member, ...]
    backend: Backend
    opened_at: float
    deadline: float
    store: tuple[str, int] = ("", 0)
    state: LaneState = "forming"
    formed_by: set[Member] = field(default_factory=set)
    formed_s: float = 0.0
    pace: Pace = field(default_factory=Pace)
    ranks: dict[Member, int] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {member: rank for rank, member in enumerate(self.members)}

    def rank(self, member: Member) -> int:
        return self.ranks[member]


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
        """``secret``: the coordinator's own; the lanes' secrets derive from it."""
        self.roster = roster
        self._out = out
        self._base = f"{run}/{roster.config.name}/{term}"
        self._store = store
        self._secret = secret
        self._lost: tuple[str, int] | None = None
        self._count = 0
        self._lanes: dict[str, Lane] = {}
        self._kept: Lane | None = None
        self.replaced: dict[str, int] = {}
        """Sidecars killed because their lane failed, by reason."""

    def __len__(self) -> int:
        return len(self._lanes)

    def get(self, name: str) -> Lane | None:
        return self._lanes.get(name)

    def open(
        self, states: Sequence[MemberState], backend: Backend, now: float, timeout_s: float, *, probe: bool = False
    ) -> Lane:
        """Ask every member to form a process group of them all, in this order."""
        self._count += 1
        epoch = self.roster.epoch
        name = f"{epoch}.{self._count}"
        prefix = f"{self._base}/{epoch}/{self._count}"
        members = tuple(state.member for state in states)
        host, port = self._store()
        lane = Lane(name, prefix, members, backend, opened_at=now, deadline=now + timeout_s, store=(host, port))
        self._lanes[name] = lane
        secret = hashlib.blake2b(prefix.encode(), digest_size=SECRET_NBYTES, key=self._secret).digest()
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

    def formed(self, member: Member, name: str, now: float) -> Lane | None:
        """Note that a member has formed its part; return the lane if complete."""
        lane = self._lanes.get(name)
        if lane is None or lane.state != "forming" or member not in lane.ranks:
            return None
        lane.formed_by.add(member)
        if len(lane.formed_by) < len(lane.members):
            return None
        lane.state = LANE.next(lane.state, "formed_by_all")
        lane.formed_s = now - lane.opened_at
        return lane

    def tampered(self, lane: Lane) -> None:
        """Replace the lane's store: a member reports that others wrote to it."""
        if lane.state == "forming" and lane.store == self._store() != self._lost:
            self._lost = lane.store
            self._out.append(ReplaceStore(*lane.store))

    def store_lost(self) -> None:
        """Note that the store has ended."""
        self._lost = self._store()

    def store_moved(self) -> None:
        """Note that a new store has replaced it."""
        self._lost = None

    def waits_for_store(self, lane: Lane) -> bool:
        """Return whether the lane cannot form because its store is gone or replaced."""
        return lane.state == "forming" and (lane.store == self._lost or lane.store != self._store())

    def moved(self, member: Member, message: LaneMoved, now: float) -> None:
        """Store a member's progress report of a lane."""
        lane = self._lanes.get(message.lane)
        if lane is not None and member in lane.ranks:
            lane.pace.moved(member, message, now)

    def close(self, lane: Lane, reason: str = "") -> None:
        """Kill the lane's sidecars and sweep its keys.

        ``reason``: why it must be replaced; empty when its work was done.
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
            self.replaced[reason] = self.replaced.get(reason, 0) + len(here)
            self._out.append(Emit(SidecarReplaced(self.roster.config.name, reason, len(here))))

    # ------------------------------------------------------------ between two transfers

    def keep(self, lane: Lane | None) -> None:
        """Keep this lane for the next transfer; close the one kept before."""
        kept = self._kept
        if kept is not None and kept is not lane:
            self.close(kept)
        self._kept = lane if lane is not None and lane.state == "formed" else None

    def take(self, members: tuple[Member, ...], backend: Backend) -> Lane | None:
        """Return the kept lane, if it has exactly these members."""
        kept = self._kept
        if kept is None or (kept.members, kept.backend) != (members, backend):
            return None
        self._kept = None
        return kept

    def broke(self, lane: Lane) -> None:
        """Close the kept lane if a member reports that it is broken."""
        if lane is self._kept:
            self.close(lane)

    def lost(self, member: Member) -> None:
        """Close the kept lane if it has this member, which is out of the roster."""
        if self._kept is not None and member in self._kept.ranks:
            self.close(self._kept)

"""The lanes of operations: one for each domain and backend, kept for reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replicas.core.members.member_state import MemberState
from replicas.core.moving.lanes import Lane, LaneOwner, Lanes
from replicas.messages import Backend
from replicas.messages.identity import Member

__all__ = ["DomainLanes"]

LATE_S = 1.0
"""Sidecars end a process group at its deadline; the coordinator this much later."""

_Whose = int | tuple[Member, ...]
"""A domain, or a pair of its members apart from the others."""


class DomainLanes:
    """The lanes of operations. A lane serves only the members that formed it.

    A lane that is not wanted any more is *retired*, and closed when nothing runs in it.
    So is that of a pair as soon as its whole domain has one that works.
    """

    def __init__(self, lanes: Lanes, owner: LaneOwner) -> None:
        self._owner = owner
        self._roster = lanes.roster
        self._lanes = lanes
        self._current: dict[tuple[_Whose, Backend], Lane] = {}
        self._retired: list[Lane] = []

    def __iter__(self) -> Iterator[Lane]:
        return iter([*self._current.values(), *self._retired])

    def take(
        self,
        domain: int,
        wanted: Sequence[MemberState],
        *,
        within: bool,
        apart: bool,
        on_device: bool,
        now: float,
        timeout_s: float,
    ) -> Lane:
        """Return the lane of exactly the members ``wanted``, or a new one.

        :param within: a lane of more members, all of them live, will do.
        :param apart: a lane of their own, not that of the domain.
        :param on_device: the tensors are on CUDA devices.
        """
        backend = self._lanes.backend(wanted, on_device=on_device)
        members = tuple(state.member for state in wanted)
        key: tuple[_Whose, Backend] = (members if apart else domain, backend)
        lane = self._current.get(key)
        if lane is not None and lane.state != "dead":
            live = {state.member for state in self._roster.live}
            if lane.members == members or (within and set(members) <= set(lane.members) <= live):
                return lane
            self._retired.append(lane)
        lane = self._current[key] = self._lanes.open(wanted, backend, self._owner, now, timeout_s, grace_s=LATE_S)
        return lane

    def parted(self, pair: tuple[Member, ...]) -> bool:
        """Return whether the pair already has a formed lane of its own."""
        return any(whose == pair and lane.state == "formed" for (whose, _), lane in self._current.items())

    def close(self, lane: Lane, reason: str) -> None:
        """Close the lane. ``reason``: why it must be replaced; empty when done."""
        self._current = {key: kept for key, kept in self._current.items() if kept is not lane}
        self._retired = [kept for kept in self._retired if kept is not lane]
        self._lanes.close(lane, reason)

    def close_idle(self, busy: set[str]) -> None:
        """Close lanes not in ``busy`` that are unwanted or have members not live."""
        live = {state.member for state in self._roster.live}
        wanted = [lane for (whose, _), lane in self._current.items() if not self._spared(whose)]
        for lane in list(self):
            unwanted = lane not in wanted or lane.state == "dead" or not set(lane.members) <= live
            if unwanted and lane.name not in busy:
                self.close(lane, "")

    def _spared(self, whose: _Whose) -> bool:
        """Return whether it is a pair whose whole domain has a lane."""
        if not isinstance(whose, tuple):
            return False
        whole = [lane for (other, _), lane in self._current.items() if not isinstance(other, tuple)]
        return any(lane.state == "formed" and set(whose) <= set(lane.members) for lane in whole)

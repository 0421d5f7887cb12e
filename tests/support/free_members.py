"""Simulated members that run ahead in free lanes, with the sidecars of those lanes.

A turn of a lane moves in steps, each of which the test may take or not: a member's sidecar *enters* it by itself, in the
order of its calls; becomes *ready* once all have entered; has *voted*, and its rank applies the result, once all are ready
and were asked for the same. Whoever's sidecar dies knows only what it was before: ready, or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from replicas import messages as wire
from replicas.core.effects import Send
from replicas.core.free_lanes import FREE_KINDS
from replicas.core.identity import Member
from tests.support.channel_world import SimMember, World

__all__ = ["FreeMember", "FreeWorld", "SimLane"]


@dataclass(eq=False)
class SimTurn:
    """``entered``: what each one's sidecar was asked for."""

    entered: dict[Member, object] = field(default_factory=dict)
    ready: set[Member] = field(default_factory=set)
    applied: set[Member] = field(default_factory=set)


@dataclass(eq=False)
class SimLane:
    """One freedom of ``lane``. ``dead``: members whose sidecars are."""

    name: str
    lane: str
    number: int
    members: tuple[Member, ...]
    turns: dict[int, SimTurn] = field(default_factory=dict)
    dead: set[Member] = field(default_factory=set)

    def turn(self, number: int) -> SimTurn:
        return self.turns.setdefault(number, SimTurn())


@dataclass(eq=False)
class Ahead:
    """A call that runs ahead. ``posted``: the coordinator has been told."""

    number: int
    lane: SimLane
    message: wire.OperationPost
    posted: bool = False


class FreeMember(SimMember):
    """A rank that makes use of free lanes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lane: SimLane | None = None
        self.turns: dict[str, int] = {}
        self.done = 0
        self.newest: int | None = None
        self.ahead: list[Ahead] = []
        self.normal: set[int] = set()

    @property
    def free_world(self) -> FreeWorld:
        assert isinstance(self.world, FreeWorld)
        return self.world

    def post(
        self, kind: str, *, root: str = "", step: int | None = None, shape: tuple[int, ...] = (2,), **more: object
    ) -> int:
        number = super().post(kind, root=root, step=step, shape=shape, **more)
        message = self.outbox.pop()
        assert isinstance(message, wire.OperationPost)
        lane = self.lane
        stale = step is not None and self.newest is not None and step <= self.newest
        known = not root or root in {member.name for member in lane.members} if lane is not None else False
        if lane is None or kind not in FREE_KINDS or self.normal or stale or not known or message.unsettled:
            self._post_all()
            self.normal.add(number)
            self.outbox.append(message)
            return number
        turn = self.turns[lane.name] = self.turns.get(lane.name, 0) + 1
        self.newest = step if step is not None else self.newest
        self.ahead.append(Ahead(turn, lane, message))
        self.free_world.asked[self.member, lane.name, turn] = (kind, root, step, shape)
        self._enter()
        participants = lane.members
        go = wire.OperationGo(
            post=number,
            operation=-(lane.number * 1000 + turn),
            lane=lane.lane,
            participants=participants,
            lane_ranks=tuple(range(len(participants))),
            segments=(),
            root=-1,
            deadline_s=1.0,
            ref=f"{self.world.state.term}.{lane.name}.{turn}",
        )
        self.goes.append(go)
        return number

    def _enter(self) -> None:
        """The sidecar takes up the first turn that is not over."""
        if self.ahead and self.member not in self.ahead[0].lane.dead:
            first = self.ahead[0]
            what = self.free_world.asked[self.member, first.lane.name, first.number]
            first.lane.turn(first.number).entered.setdefault(self.member, what)

    # ------------------------------------------------------------ steps that the test takes

    def post_late(self) -> None:
        """The first turn takes long: tell the coordinator."""
        for ahead in self.ahead[:1]:
            self._tell(ahead)

    def _tell(self, ahead: Ahead) -> None:
        if not ahead.posted:
            ahead.posted = True
            self.outbox.append(msgspec.structs.replace(ahead.message, free=ahead.lane.name, turn=ahead.number))

    def _post_all(self) -> None:
        for ahead in self.ahead:
            self._tell(ahead)

    def get_ready(self) -> bool:
        """All have entered the turn: this one's sidecar has its result."""
        if not self.ahead or self.member in self.ahead[0].lane.dead:
            return False
        lane = self.ahead[0].lane
        turn = lane.turn(self.ahead[0].number)
        if set(turn.entered) != set(lane.members) or self.member in turn.ready:
            return False
        turn.ready.add(self.member)
        return True

    def vote(self) -> bool:
        """All are ready: this one's result is written."""
        if not self.ahead or self.member in self.ahead[0].lane.dead:
            return False
        ahead = self.ahead[0]
        turn = ahead.lane.turn(ahead.number)
        if turn.ready != set(ahead.lane.members):
            return False
        if len(set(turn.entered.values())) > 1:
            self.break_lane(mismatch=True)
            return True
        self.ahead.pop(0)
        turn.applied.add(self.member)
        self.done += 1
        post = ahead.message.post
        assert post not in self.ends
        receipt = wire.ReceiptData(0, ahead.lane.members, (), 0, 0.0, {})
        end = wire.OperationEnd(post, receipt)
        self.ends[post] = end
        self.seen.append(end)
        if ahead.posted:
            self.outbox.append(wire.OperationRan(post, "applied"))
        self._enter()
        return True

    def break_lane(self, *, mismatch: bool = False) -> None:
        """This one's sidecar is dead: what ran ahead is posted, and told how far it was."""
        lane = self.lane or (self.ahead[0].lane if self.ahead else None)
        if lane is None:
            return
        if self.member not in lane.dead:
            lane.dead.add(self.member)
            self.outbox.append(wire.LaneFailed(lane.lane, wire.WireError("SyncError", "the sidecar ended")))
        self._post_all()
        for ahead in self.ahead:
            ready = self.member in ahead.lane.turn(ahead.number).ready and not mismatch
            self.normal.add(ahead.message.post)
            self.outbox.append(wire.OperationRan(ahead.message.post, "ready" if ready else "failed"))
        self.ahead.clear()
        if self.lane is lane:
            self.lane = None

    # ------------------------------------------------------------ what its library does

    def handle(self, message: wire.FromCoordinator) -> None:
        if isinstance(message, wire.OperationEnd):
            self.normal.discard(message.post)
        if isinstance(message, wire.LaneDrop):
            for known in [known for known in self.free_world.sim_lanes.values() if known.lane == message.lane]:
                known.dead.add(self.member)
                if any(ahead.lane is known for ahead in self.ahead):
                    self.break_lane()
        super().handle(message)

    def _answer(self, message: wire.FromCoordinator) -> None:
        match message:
            case wire.LaneFree():
                self.lane = self.free_world.lane_of(message)
                self.done, self.newest = 0, message.step
            case wire.LaneRecall():
                self._post_all()
                turn = self.turns.get(message.free, 0)
                self.outbox.append(wire.LaneUsed(message.free, turn, self.done, self.newest, True))
                self.lane = None
            case _:
                super()._answer(message)


class FreeWorld(World):
    """Its members make use of free lanes. ``on_send``: sees each message of the coordinator as it leaves."""

    member_type = FreeMember

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sim_lanes: dict[str, SimLane] = {}
        self.asked: dict[tuple[Member, str, int], object] = {}
        self.on_send: Callable[[Member, wire.FromCoordinator], None] | None = None

    def lane_of(self, message: wire.LaneFree) -> SimLane:
        if message.free not in self.sim_lanes:
            lane = SimLane(message.free, message.lane, len(self.sim_lanes) + 1, message.participants)
            self.sim_lanes[message.free] = lane
        return self.sim_lanes[message.free]

    def sims(self) -> list[FreeMember]:
        return [sim for sim in self.members.values() if isinstance(sim, FreeMember)]

    def lose(self, sim: SimMember, reason: str = "exited") -> None:
        for lane in self.sim_lanes.values():
            lane.dead.add(sim.member)
        super().lose(sim, reason)

    def _collect(self) -> None:
        if self.on_send is not None:
            for effect in self.state.out:
                if isinstance(effect, Send):
                    self.on_send(effect.member, effect.message)
        super()._collect()

    def move_sidecars(self) -> bool:
        """Every sidecar goes as far as it can, also those of frozen ranks (which take no notice of it yet)."""
        moved = False
        for sim in self.sims():
            moved |= sim.get_ready()
        for sim in self.sims():
            moved |= sim.vote()
        for sim in self.sims():
            if sim.ahead and sim.ahead[0].lane.dead - {sim.member} and not moved:
                sim.break_lane()
                moved = True
        return moved

    def run(self, frozen: tuple[SimMember, ...] = ()) -> None:
        super().run(frozen)
        while self.move_sidecars():
            super().run(frozen)
        for sim in self.sims():
            sim.post_late()
        super().run(frozen)

"""Calls that run ahead in free lanes, in any interleaving with deaths, freezes, recalls, disagreement and new coordinators.

Nobody is told that a call failed, or made to run it again, when another one that is still with them has written its result.
Every call gets exactly one verdict. When the faults stop, everything comes to rest, and the next operation works for all.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas import messages as wire
from replicas.core import free_lanes
from replicas.core.identity import Member
from replicas.core.roster import GroupShape
from tests.support.channel_world import peer_config
from tests.support.free_members import FreeMember, FreeWorld

NAMES = tuple(f"peer/{replica}/0" for replica in range(3))


class FreeLanes(RuleBasedStateMachine):
    on_lost = "drop"

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(free_lanes, "STREAK", 1)
        self.patch.setattr(free_lanes, "STREAK_MAX", 2)
        config = peer_config(on_lost=self.on_lost)
        self.world = FreeWorld(config, {"peer": GroupShape(replicas=2, heartbeat_timeout_s=20.0)})
        self.world.on_send = self._sent
        self.frozen: set[FreeMember] = set()
        self.everyone: list[FreeMember] = []
        self.cut_off: dict[FreeMember, set[int]] = {}
        self.unsettled: dict[FreeMember, list[str]] = {}
        self.heard: dict[FreeMember, int] = {}
        self.steps = 0
        for name in NAMES:
            self._join(name)
        self._all("barrier")
        self.world.run()
        assert all(sim.lane is not None for sim in self.world.sims()), "the lane is not free"

    # ------------------------------------------------------------ helpers

    def _join(self, name: str) -> None:
        sim = self.world.join(name)
        assert isinstance(sim, FreeMember)
        self.everyone.append(sim)
        self.cut_off[sim], self.unsettled[sim], self.heard[sim] = set(), [], 0

    def _awake(self) -> list[FreeMember]:
        return [sim for sim in self.world.sims() if sim not in self.frozen]

    def _draw(self, data: st.DataObject) -> FreeMember:
        return data.draw(st.sampled_from(self._awake()))

    def _applied(self, sim: FreeMember) -> list[str]:
        """Refs of what was written there, newest last."""
        refs = {go.post: go.ref for go in sim.goes}
        return [refs[post] for post, end in sim.ends.items() if end.receipt is not None and post in refs]

    def _post(self, sim: FreeMember, kind: str, **more: Any) -> int:
        return sim.post(kind, applied=tuple(self._applied(sim)[-16:]), unsettled=tuple(self.unsettled[sim]), **more)

    def _all(self, kind: str, without: FreeMember | None = None, **more: Any) -> None:
        for sim in self._awake():
            if sim is not without:
                self._post(sim, kind, **more)

    def _appliers(self, ref: str) -> set[Member]:
        term, _, rest = ref.partition(".")
        lane, _, turn = rest.rpartition(".")
        known = self.world.sim_lanes.get(lane)
        if known is None or term != str(self.world.state.term):
            return set()
        return known.turn(int(turn)).applied

    def _sent(self, member: Member, message: wire.FromCoordinator) -> None:
        """The coordinator decides: nobody that is live may have applied what it gives up."""
        sim = self.world.members.get(member)
        if not isinstance(sim, FreeMember) or not isinstance(message, wire.OperationGo | wire.OperationEnd):
            return
        goes = [go for go in sim.goes if go.post == message.post and go.operation < 0]
        if not goes or (isinstance(message, wire.OperationEnd) and message.receipt is not None):
            return
        live = {state.member for state in self.world.state.roster.live}
        if member in live:
            assert not self._appliers(goes[-1].ref) & live, f"{member} gives up what another one has applied"

    # ------------------------------------------------------------ what happens

    @precondition(lambda self: self._awake())
    @rule(kind=st.sampled_from(["all_reduce", "barrier", "broadcast", "all_gather"]), data=st.data())
    def collective(self, kind: str, data: st.DataObject) -> None:
        without = self._draw(data) if data.draw(st.integers(0, 3)) == 0 else None
        self._all(kind, without, root=NAMES[0] if kind == "broadcast" else "")

    @precondition(lambda self: self._awake())
    @rule(data=st.data(), again=st.booleans())
    def tagged(self, data: st.DataObject, again: bool) -> None:
        self.steps += not again
        self._all("all_reduce", step=self.steps)

    @precondition(lambda self: len(self._awake()) > 1)
    @rule(data=st.data(), kinds=st.permutations(["all_reduce", "barrier", "all_gather"]))
    def disagree(self, data: st.DataObject, kinds: list[str]) -> None:
        other = self._draw(data)
        for sim in self._awake():
            self._post(sim, kinds[0] if sim is other else kinds[1], deadline_s=5.0)

    @precondition(lambda self: len(self._awake()) > 1)
    @rule(data=st.data())
    def pair(self, data: st.DataObject) -> None:
        give, take = data.draw(st.permutations(self._awake()))[:2]
        self._post(give, "send", root=take.member.name)
        if data.draw(st.booleans()):
            self._post(take, "recv", root=give.member.name, segments=())

    @precondition(lambda self: self.world.sims())
    @rule(data=st.data(), what=st.sampled_from(["ready", "vote", "late", "ready", "vote", "breaks"]))
    def sidecar(self, data: st.DataObject, what: str) -> None:
        sim = data.draw(st.sampled_from(self.world.sims()))
        if what == "ready":
            sim.get_ready()
        elif what == "vote":
            sim.vote()
        elif sim not in self.frozen:
            if what == "late":
                sim.post_late()
            else:
                sim.break_lane()

    @precondition(lambda self: len(self.world.sims()) > 1)
    @rule(data=st.data(), how=st.sampled_from(["dies", "leaves", "freezes", "breaks"]))
    def in_the_middle(self, data: st.DataObject, how: str) -> None:
        """All goes well for a while; everyone calls; the sidecars get to different points; one member has its fate."""
        self._calm()
        self._all("all_reduce")
        if data.draw(st.booleans()):
            self._all("all_reduce")
        for sim in data.draw(st.permutations(self.world.sims()))[: data.draw(st.integers(0, len(NAMES)))]:
            sim.get_ready()
        for sim in data.draw(st.permutations(self.world.sims()))[: data.draw(st.integers(0, len(NAMES)))]:
            sim.vote()
        sim = data.draw(st.sampled_from(self.world.sims()))
        if how == "freezes":
            self.frozen.add(sim)
        elif how == "breaks" and sim not in self.frozen:
            sim.break_lane()
        elif how in ("dies", "leaves"):
            self.frozen.discard(sim)
            self.world.lose(sim, "exited" if how == "dies" else "left")

    def _calm(self) -> None:
        """What was called before ends, and the lane is free again."""
        self.frozen.clear()
        for _ in range(8):
            if all(sim.lane is not None and not sim.ahead and not sim.normal for sim in self.world.sims()):
                return
            self.world.advance(11.0)
            self._all("barrier", deadline_s=5.0)
            self.world.advance(1.0)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        holder = self.world.state.roster.holder_of(name)
        if holder is not None:
            self.frozen = {sim for sim in self.frozen if sim.member != holder.member}
            for lane in self.world.sim_lanes.values():
                lane.dead.add(holder.member)
        self._join(name)

    @rule()
    def wake(self) -> None:
        self.frozen.clear()

    @precondition(lambda self: self._awake())
    @rule(data=st.data(), count=st.integers(1, 15))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            sim = self._draw(data)
            if data.draw(st.booleans()):
                self.world.up(sim)
            else:
                self.world.down(sim)

    @rule()
    def deliver_all(self) -> None:
        self.world.run(tuple(self.frozen))

    @rule(seconds=st.sampled_from([0.5, 4.5, 10.0, 25.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds, frozen=tuple(self.frozen))

    @precondition(lambda self: self.world.sims())
    @rule()
    def new_coordinator(self) -> None:
        """Turns that were ready are in doubt; others did not happen."""
        self._note()
        for sim in self.world.sims():
            for post in range(1, sim.posts + 1):
                goes = [go for go in sim.goes if go.post == post]
                if post in sim.ends or post in self.cut_off[sim]:
                    continue
                self.cut_off[sim].add(post)
                if goes and self._in_doubt(sim, goes[-1]):
                    self.unsettled[sim].append(goes[-1].ref)
            sim.ahead.clear()
            sim.normal.clear()
            sim.lane = None
        for lane in self.world.sim_lanes.values():
            lane.dead.update(lane.members)
        sims = self.world.restart()
        self.world.sim_lanes.clear()
        for other in sims:
            self.world.rejoin(other)

    def _in_doubt(self, sim: FreeMember, go: wire.OperationGo) -> bool:
        if go.operation >= 0:
            return True
        known = next(lane for lane in self.world.sim_lanes.values() if lane.number == -go.operation // 1000)
        return sim.member in known.turn(-go.operation % 1000).ready

    # ------------------------------------------------------------ what must hold

    def _note(self) -> None:
        for sim in self.everyone:
            for message in sim.seen[self.heard[sim] :]:
                if isinstance(message, wire.OperationSettled):
                    others = [other for other in self.everyone if message.ref in self._applied(other)]
                    assert not message.applied or others, "nobody has applied it"
                    here = [other for other in others if other.member in self.world.members]
                    assert message.applied or not here, "a member has applied it"
                    if message.ref in self.unsettled[sim]:
                        self.unsettled[sim].remove(message.ref)
            self.heard[sim] = len(sim.seen)

    @invariant()
    def one_truth(self) -> None:
        self._note()

    def teardown(self) -> None:
        self.frozen.clear()
        try:
            self._rest()
        finally:
            self.patch.undo()

    def _rest(self) -> None:
        self.world.advance(150.0)
        for sim in self.world.sims():
            missing = set(range(1, sim.posts + 1)) - set(sim.ends) - self.cut_off[sim]
            assert not missing, f"{sim.member} has no verdict for {missing}"
        for name in NAMES:
            if self.world.state.roster.holder_of(name) is None:
                self._join(name)
        self.world.advance(60.0)
        for _ in range(4):  # the first call may hear of what was missed, or of an earlier success
            posts = {sim: self._post(sim, "barrier", deadline_s=5.0) for sim in self.world.sims()}
            self.world.advance(20.0)
            self._note()
        for sim, post in posts.items():
            found = sim.ends[post].receipt
            assert found is not None, sim.ends[post]
            assert len(found.members) == len(NAMES)
        operations = self.world.state.operations
        assert operations.running == ()
        assert not any(operations.pairing._streams.values())
        assert not any(free.turns for free in operations.free._free.values())
        assert not operations.free._strays
        assert len(self.world.state.lanes) <= 1, "lanes pile up"


class RaisingFreeLanes(FreeLanes):
    on_lost = "raise"


FreeLanes.TestCase.settings = RaisingFreeLanes.TestCase.settings = settings(
    max_examples=3,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestFreeLanes = FreeLanes.TestCase
TestRaisingFreeLanes = RaisingFreeLanes.TestCase

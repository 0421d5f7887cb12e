"""Any interleaving of calls, deaths, freezes, failures, late answers, deadlines and new
coordinators keeps the promises.

Every call gets exactly one verdict. Those that take part in one operation get the same
receipt; one that succeeded for one of them succeeds for all of them. What a member
could not learn is settled truthfully. When the faults stop, everything comes to rest,
nothing is left behind, and the next operation works.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas import messages as wire
from replicas.core.members.roster import GroupShape
from replicas.messages.identity import Member
from tests.support.channel_world import SimMember, World, peer_config

NAMES = tuple(f"peer/{replica}/0" for replica in range(4))
COLLECTIVES = ("all_reduce", "broadcast", "gather", "barrier")


class Listening(World):
    """Checks at each success that everyone had said *done* to that very attempt."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.said_done: set[tuple[Member, int]] = set()

    def up(self, sim: SimMember) -> bool:
        waiting = {other: len(other.inbox) for other in self.members.values()}
        if sim.outbox and isinstance(sim.outbox[0], wire.OperationDone):
            self.said_done.add((sim.member, sim.outbox[0].operation))
        moved = super().up(sim)
        for other, count in waiting.items():
            for message in list(other.inbox)[count:]:
                if isinstance(message, wire.OperationEnd) and message.receipt is not None:
                    self._check(other, message.post, message.receipt)
        return moved

    def _check(self, sim: SimMember, post: int, receipt: wire.ReceiptData) -> None:
        goes = [m for m in (*sim.seen, *sim.inbox) if isinstance(m, wire.OperationGo) and m.post == post]
        assert goes[-1].participants == receipt.members
        for member in receipt.members:
            assert (member, goes[-1].operation) in self.said_done, f"{member} has not done its part"


class Peers(RuleBasedStateMachine):
    on_lost = "drop"

    def __init__(self) -> None:
        super().__init__()
        self.world = Listening(
            peer_config(on_lost=self.on_lost), {"peer": GroupShape(replicas=2, heartbeat_timeout_s=20.0)}
        )
        self.frozen: set[SimMember] = set()
        self.everyone: list[SimMember] = []
        self.applied: dict[SimMember, list[str]] = {}
        self.unsettled: dict[SimMember, list[str]] = {}
        self.cut_off: dict[SimMember, set[int]] = {}
        """Posts whose coordinator went away before it had said anything."""
        self.receipts: dict[str, wire.ReceiptData] = {}
        self.heard: dict[SimMember, int] = {}
        for name in NAMES[:3]:
            self._join(name)

    def _awake(self) -> list[SimMember]:
        return [sim for sim in self.world.members.values() if sim not in self.frozen]

    def _join(self, name: str) -> None:
        sim = self.world.join(name)
        self.everyone.append(sim)
        self.applied[sim], self.unsettled[sim], self.cut_off[sim], self.heard[sim] = [], [], set(), 0

    def _draw(self, data: st.DataObject) -> SimMember:
        return data.draw(st.sampled_from(self._awake()))

    # ------------------------------------------------------------ what happens

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        holder = self.world.state.roster.holder_of(name)
        if holder is not None:
            self.frozen.discard(self.world.members[holder.member])
        self._join(name)

    @precondition(lambda self: self.world.members)
    @rule(data=st.data(), reason=st.sampled_from(["exited", "left", "lease"]))
    def die(self, data: st.DataObject, reason: str) -> None:
        sim = data.draw(st.sampled_from(list(self.world.members.values())))
        self.frozen.discard(sim)
        self.world.lose(sim, reason)

    @precondition(lambda self: self._awake())
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        self.frozen.add(self._draw(data))

    @rule()
    def wake(self) -> None:
        self.frozen.clear()

    @precondition(lambda self: self._awake())
    @rule(data=st.data(), trouble=st.sampled_from(["", "stuck", "breaks"]))
    def trouble(self, data: st.DataObject, trouble: str) -> None:
        sim = self._draw(data)
        sim.stuck, sim.breaks = trouble == "stuck", trouble == "breaks"

    @rule(data=st.data())
    def link(self, data: st.DataObject) -> None:
        """The link of two breaks, or is mended."""
        pair = frozenset(data.draw(st.permutations(NAMES))[:2])
        self.world.bad_pairs ^= {pair}

    def _post(self, sim: SimMember, kind: str, **more: object) -> int:
        known = {"applied": tuple(self.applied[sim][-16:]), "unsettled": tuple(self.unsettled[sim])}
        return sim.post(kind, **known, **more)  # type: ignore[arg-type]  # by name

    @precondition(lambda self: self._awake())
    @rule(kind=st.sampled_from(COLLECTIVES), data=st.data(), deadline_s=st.sampled_from([2.0, 60.0]))
    def collective(self, kind: str, data: st.DataObject, deadline_s: float) -> None:
        root = data.draw(st.sampled_from(NAMES)) if kind in ("broadcast", "gather") else ""
        without = self._draw(data) if data.draw(st.integers(0, 3)) == 0 else None
        for sim in self._awake():
            if sim is not without:
                self._post(sim, kind, root=root, deadline_s=deadline_s)

    def _calm(self) -> None:
        """Everything that was called before ends."""
        self.frozen.clear()
        for sim in self.everyone:
            sim.stuck = sim.breaks = False
        self.world.advance(65.0)

    @precondition(lambda self: len(self.world.members) > 1)
    @rule(
        data=st.data(),
        kind=st.sampled_from(COLLECTIVES),
        ahead=st.integers(1, 2),
        how=st.sampled_from(["dies", "freezes", "fails", "goes on", "restarts"]),
    )
    def hang(self, data: st.DataObject, kind: str, ahead: int, how: str) -> None:
        """Everyone calls, and it hangs in some; one of these then has its fate; others
        go on and hear of the verdict."""
        self._calm()
        sims = self._awake()
        hanging = data.draw(st.permutations(sims))[: data.draw(st.integers(1, len(sims)))]
        root = data.draw(st.sampled_from(sims)).member.name if kind in ("broadcast", "gather") else ""
        for sim in hanging:
            sim.stuck = True
        for sim in sims:
            for _ in range(ahead):
                self._post(sim, kind, root=root)
        self.world.run()
        goes_on = data.draw(st.sets(st.sampled_from(hanging)))
        if how == "restarts":
            goes_on = set(hanging) if data.draw(st.booleans()) else goes_on
        for sim in [sim for sim in hanging if sim in goes_on and sim.goes]:
            sim.stuck = False
            for go in sim.goes[-ahead:]:
                sim.outbox.append(wire.OperationDone(go.operation))
            while self.world.up(sim):
                pass
        for sim in data.draw(st.permutations(sims))[: data.draw(st.integers(0, len(sims)))]:
            while self.world.down(sim):
                pass
        self._fate(hanging[0], how)

    def _fate(self, sim: SimMember, how: str) -> None:
        if how == "dies":
            self.world.lose(sim)
        elif how == "freezes":
            self.frozen.add(sim)
            self.world.advance(4.5, frozen=(sim,))
        elif how == "fails" and sim.goes:
            sim.stuck = False
            error = wire.WireError("SyncError", "connection reset", phase="transfer")
            sim.outbox.append(wire.OperationFailed(sim.goes[-1].operation, error))
        elif how == "restarts":
            self.new_coordinator()

    @precondition(lambda self: len(self._awake()) > 1)
    @rule(data=st.data())
    def pair(self, data: st.DataObject) -> None:
        give, take = data.draw(st.permutations(self._awake()))[:2]
        self._post(give, "send", root=take.member.name)
        if data.draw(st.booleans()):
            self._post(take, "recv", root=give.member.name, segments=())

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

    @precondition(lambda self: self._awake())
    @rule(data=st.data())
    def late_message(self, data: st.DataObject) -> None:
        """An answer to another attempt, or to nothing at all."""
        sim = self._draw(data)
        old = [go.operation for go in sim.goes[:-1]] or [9999]
        lanes = [go.lane for go in sim.goes[:-1]] or ["0.9"]
        error = wire.WireError("SyncError", "late")
        replies: list[wire.FromMember] = [
            wire.OperationDone(data.draw(st.sampled_from(old))),
            wire.OperationFailed(data.draw(st.sampled_from(old)), error),
            wire.LaneFormed(data.draw(st.sampled_from(lanes))),
            wire.LaneFailed(data.draw(st.sampled_from(lanes)), error),
        ]
        sim.outbox.append(data.draw(st.sampled_from(replies)))

    @rule(seconds=st.sampled_from([0.5, 4.5, 25.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds, frozen=tuple(self.frozen))

    @precondition(lambda self: self.world.members)
    @rule()
    def new_coordinator(self) -> None:
        """What was said to the old one and not answered is in doubt where *done* was
        said, else it did not happen."""
        self._note()
        sims = self.world.restart()
        for sim in sims:
            for post in range(1, sim.posts + 1):
                if post in sim.ends or post in self.cut_off[sim]:
                    continue
                self.cut_off[sim].add(post)
                goes = [go for go in sim.goes if go.post == post]
                if goes and not (sim.stuck or sim.breaks):
                    self.unsettled[sim].append(goes[-1].ref)
            sim.stuck = sim.breaks = False
            self.world.rejoin(sim)

    # ------------------------------------------------------------ what must hold

    def _note(self) -> None:
        """Take in what has arrived."""
        for sim in self.everyone:
            for message in sim.seen[self.heard[sim] :]:
                if isinstance(message, wire.OperationEnd):
                    self._ended(sim, message)
                elif isinstance(message, wire.OperationSettled):
                    self._settled(sim, message)
            self.heard[sim] = len(sim.seen)

    def _ended(self, sim: SimMember, end: wire.OperationEnd) -> None:
        goes = [go for go in sim.goes if go.post == end.post]
        if end.receipt is None:
            return
        assert goes, "a success of something that never began here"
        assert sim.member in end.receipt.members
        assert goes[-1].participants == end.receipt.members
        ref = goes[-1].ref
        assert self.receipts.setdefault(ref, end.receipt) == end.receipt, "two receipts of one operation"
        self.applied[sim].append(ref)

    def _settled(self, sim: SimMember, message: wire.OperationSettled) -> None:
        knowing = [other for other in self.everyone if message.ref in self.applied[other]]
        if message.applied:
            assert knowing, "nobody has applied it"
            self.applied[sim].append(message.ref)
        else:
            assert not any(other.member in self.world.members for other in knowing), "a member has applied it"
        if message.ref in self.unsettled[sim]:
            self.unsettled[sim].remove(message.ref)

    @invariant()
    def one_truth(self) -> None:
        self._note()
        for sim in self.everyone:
            assert len({(go.ref.split(".")[0], go.operation) for go in sim.goes}) == len(sim.goes), (
                "a number used twice"
            )
            for post, end in sim.ends.items():
                refs = {go.ref for go in sim.goes if go.post == post}
                assert len(refs) <= 1, "one post in two operations"
                for ref in refs:
                    found = self.receipts.get(ref)
                    if found is not None and sim.member in found.members:
                        assert end.error is None, "it failed here and succeeded elsewhere"

    def teardown(self) -> None:
        """The faults stop."""
        self.world.bad_pairs.clear()
        self._calm()
        self.world.advance(65.0)
        self._note()
        for sim in self.world.members.values():
            missing = set(range(1, sim.posts + 1)) - set(sim.ends) - self.cut_off[sim]
            assert not missing, f"{sim.member} has no verdict for {missing}"
        for name in NAMES:
            if self.world.state.roster.holder_of(name) is None:
                self._join(name)
        self.world.advance(60.0)
        for _ in range(3):  # the first call may hear of what was missed, or of an earlier success
            posts = {sim: self._post(sim, "barrier", deadline_s=5.0) for sim in self.world.members.values()}
            self.world.advance(7.0)
            self._note()
        for sim, post in posts.items():
            found = sim.ends[post].receipt
            assert found is not None, sim.ends[post]
            assert len(found.members) == len(NAMES)
        operations = self.world.state.operations
        assert operations.running == ()
        assert not any(operations.matching._streams.values())
        assert len(self.world.state.lanes) <= 1, "lanes pile up"


class RaisingPeers(Peers):
    on_lost = "raise"


Peers.TestCase.settings = RaisingPeers.TestCase.settings = settings(
    max_examples=4,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestPeers = pytest.mark.slow(Peers.TestCase)
TestRaisingPeers = pytest.mark.slow(RaisingPeers.TestCase)

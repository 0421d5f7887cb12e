"""Any interleaving of joins, deaths, freezes, publishes, receives, late messages,
members that cannot reach each other and coordinators that start again (with their
decision log or without, and told whom to expect or not) keeps the invariants.

I1: every publish ends. I2: a replica is granted committed versions only, each rank of
it the same ones in the same order, never an older one after a newer. I4: when the
faults stop, the next publish commits and every target holds it. With
``adopt_together`` no target loads a version before all have said that they can, a
version is decided once, and whoever waits is told (:class:`Adoptions` looks at each
decision).
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicas import messages as wire
from replicas.config.canary import CanaryConfig
from replicas.core.base.effects import SyncEnded
from replicas.core.base.ledger import Ledger
from replicas.core.members.roster import GroupShape
from replicas.core.versions.recovery import RECOVERY_S
from replicas.messages import version_orders as orders
from replicas.messages.version_orders import VersionOrder
from tests.support.channel.rosters import check_roster
from tests.support.channel_world import SimMember, World, channel_config

SOURCES = ("trainer/0/0", "trainer/1/0")
NAMES = (*SOURCES, "rollout/0/0", "rollout/0/1", "rollout/1/0", "rollout/1/1")
WORLD_SIZES = {"trainer": 1, "rollout": 2}
CONFIGS: tuple[dict[str, object], ...] = (
    {},
    {"staging": "device"},
    {"transport": "group"},
    {"adopt_together": True, "deadline_s": 20.0},
    {"adopt_together": True, "slots": 3},
    {"slots": 4},
    {"follow": "promoted", "slots": 4},
    {"follow": "promoted", "slots": 5, "canary": CanaryConfig(group="rollout")},
    {"follow": "promoted", "slots": 5, "canary": CanaryConfig(group="rollout", promote="healthy", soak_s=20.0)},
    {"follow": "promoted", "slots": 3, "canary": CanaryConfig(group="rollout", promote="scored", metric="m", min=0.0)},
)
VERSIONS = st.sampled_from(("current", "candidate", "previous", "mine", "1", "2", "3", "5", "9"))
ORDERS = st.one_of(
    st.builds(orders.Promote, version=VERSIONS),
    st.builds(orders.Reject, version=VERSIONS),
    st.builds(orders.Rollback, to=VERSIONS),
    st.builds(
        orders.Hold, version=VERSIONS, seconds=st.sampled_from((None, 10.0, 60.0)), name=st.sampled_from(("", "a"))
    ),
    st.builds(orders.Release, name=st.sampled_from(("a", "lease-1"))),
    st.builds(orders.Label, label=st.just("mine"), version=st.one_of(st.just(""), VERSIONS), move=st.booleans()),
    st.builds(orders.Score, version=VERSIONS, scores=st.just({"m": 1.0}) | st.just({"m": -1.0})),
)


class Channel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.grants: dict[tuple[str, int], list[int]] = {}
        self.frozen: set[SimMember] = set()
        self.away: list[SimMember] = []
        """Without a session since the coordinator started again."""
        self.committed: dict[str, int] = {}
        self.late = False
        """Somebody came later than a coordinator waits."""
        self.read: dict[SimMember, int] = {}
        self.ordered = 0
        self.rejected: set[int] = set()
        self.was_current = 0

    @initialize(config=st.sampled_from(CONFIGS))
    def begin(self, config: dict[str, object]) -> None:
        groups = {"rollout": GroupShape(replicas=2, world_size=2, heartbeat_timeout_s=20.0)}
        self.world = World(channel_config(**config), groups, machine="a")

    def _sims(self) -> list[SimMember]:
        return [sim for sim in self.world.members.values() if sim not in self.frozen]

    def _join(self, name: str, machine: str = "") -> None:
        self.away = [sim for sim in self.away if sim.member.name != name]
        before = {sim.member for sim in self.world.members.values()}
        group, replica, _ = name.split("/")
        gpus = (f"GPU-{machine}-{replica}",)  # the trainer and one replica share theirs, if they are on one machine
        address = f"10.0.0.{ord(machine)}" if machine else f"10.0.1.{NAMES.index(name)}"
        sim = self.world.join(name, world_size=WORLD_SIZES[group], machine=machine, address=address, cuda_devices=gpus)
        assert sim.member not in before

    @rule(name=st.sampled_from(NAMES), machine=st.sampled_from(("", "a", "b")))
    def join(self, name: str, machine: str) -> None:
        self._join(name, machine)

    @precondition(lambda self: self._sims())
    @rule(data=st.data(), unmappable=st.booleans())
    def shut_memory(self, data: st.DataObject, unmappable: bool) -> None:
        """From now on it cannot open the memory of others; or can again."""
        data.draw(st.sampled_from(self._sims())).unmappable = unmappable

    @precondition(lambda self: self.world.members)
    @rule(data=st.data(), reason=st.sampled_from(["exited", "left"]))
    def die(self, data: st.DataObject, reason: str) -> None:
        sim = data.draw(st.sampled_from(list(self.world.members.values())))
        self.frozen.discard(sim)
        self.world.lose(sim, reason)

    @precondition(lambda self: self._sims())
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        self.frozen.add(data.draw(st.sampled_from(self._sims())))

    @rule()
    def wake(self) -> None:
        self.frozen.clear()

    @rule(version=st.one_of(st.none(), st.integers(1, 40)))
    def publish(self, version: int | None) -> None:
        for sim in self._sims():
            if sim.member.group == "trainer":
                sim.pack(sim.publish(version))

    @rule()
    def stream(self) -> None:
        """Begin a publish that is sent while it is packed; it is filled, or fails,
        later or never."""
        for sim in self._sims():
            if sim.member.group == "trainer" and sim.machine and not sim.open:
                number = sim.publish()
                self.world.run(tuple(self.frozen))
                if number in sim.open and sim.open[number].version:
                    sim.stream(number)

    @rule(fails=st.booleans())
    def fill(self, fails: bool) -> None:
        for sim in self._sims():
            for number, publish in list(sim.open.items()):
                if sim.member.group == "trainer" and sim.machine and publish.version and not publish.packed:
                    if fails:
                        publish.packed = True
                        sim.outbox.append(wire.PackFailed(number, wire.WireError("SyncError", "mine")))
                    else:
                        sim.fill(number)

    @rule(data=st.data(), more=st.sampled_from((None, None, 0, 1, 2)))
    def ask(self, data: st.DataObject, more: int | None) -> None:
        """``more``: for so many more than the newest version, at least; all ranks of a
        replica may do so, or one."""
        targets = [sim for sim in self._sims() if sim.member.group == "rollout"]
        if targets:
            data.draw(st.sampled_from(targets)).ask(0 if more is None else self.world.state.commits.latest + more)

    @precondition(lambda self: self.world.config.adopt_together)
    @rule(data=st.data(), what=st.sampled_from(("refuse", "whole", "all ask")))
    def together(self, data: st.DataObject, what: str) -> None:
        targets = [sim for sim in self._sims() if sim.member.group == "rollout"]
        found = [sim for sim in targets if sim.unlooked or sim.candidate]
        if what == "all ask":
            for sim in targets:
                sim.ask()
        elif what == "whole" and targets:
            data.draw(st.sampled_from(targets)).whole = data.draw(st.booleans())
        elif what == "refuse" and found:
            data.draw(st.sampled_from(found)).keep_own("it has other shapes")

    @precondition(lambda self: self._sims())
    @rule(data=st.data(), what=st.sampled_from(("hesitate", "look", "give back", "give up")))
    def ahead_of_time(self, data: st.DataObject, what: str) -> None:
        """Ask, and look at what was granted later; or give it back for something
        newer."""
        sim = data.draw(st.sampled_from(self._sims()))
        match what:
            case "hesitate":
                sim.loads = False
            case "look":
                sim.loads = True
                sim.look()
            case "give back":
                sim.give_back()
            case "give up":
                sim.give_up()

    @precondition(lambda self: self._sims())
    @rule(data=st.data(), count=st.integers(1, 12))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            sims = self._sims()
            if not sims:
                return
            sim = data.draw(st.sampled_from(sims))
            if data.draw(st.booleans()):
                self.world.up(sim)
            else:
                self.world.down(sim)

    @precondition(lambda self: self._sims())
    @rule(data=st.data())
    def late_message(self, data: st.DataObject) -> None:
        """A reply of long ago: of another lane, another transfer, another publish."""
        sim = data.draw(st.sampled_from(self._sims()))
        error = wire.WireError("SyncError", "late")
        replies: list[wire.FromMember] = [
            wire.LaneFormed("0.999"),
            wire.LaneFailed("0.999", error),
            wire.TransferDone(9999, "digest-0", 0.1, 0.1),
            wire.TransferFailed(9999, error),
            wire.Packed(77, "", "cpu", 0.0, 0.0),
            wire.PackFailed(77, error),
            wire.OperationDone(9999),
        ]
        late = data.draw(st.sampled_from(replies))
        sim.outbox.append(late)

    @precondition(lambda self: self.world.members)
    @rule(keep_log=st.booleans(), forget=st.booleans(), told=st.booleans())
    def restart(self, keep_log: bool, forget: bool, told: bool) -> None:
        """``forget``: those without a session stay so for now; else they come back at
        once. ``told``: it knows whom to expect."""
        self.away += self.world.restart(keep_log=keep_log)
        if told:
            self.world.expect()
        if not forget:
            self.come_back(len(self.away))

    @rule()
    def told_later(self) -> None:
        self.world.expect()

    @precondition(lambda self: len(self._sims()) > 1)
    @rule(data=st.data(), silent=st.booleans())
    def one_is_slow_to_come_back(self, data: st.DataObject, silent: bool) -> None:
        """``silent``: it comes back, and does not say what is under way. The others
        publish meanwhile; and so has a trainer, whose number nobody else knows."""
        for name in SOURCES:
            if self.world.state.roster.holder_of(name) is None:
                self._join(name)
        self.world.run(tuple(self.frozen))
        slow = data.draw(st.sampled_from(self._sims()))
        if slow.member.group == "trainer":
            slow.publish()
            self.world.run(tuple(self.frozen))
        self.restart(keep_log=True, forget=True, told=True)
        self.away.remove(slow)
        self.come_back(len(self.away))
        if silent:
            self.world.rejoin(slow)
            self.frozen.add(slow)
        else:
            self.away.append(slow)
        self.publish(None)
        self.world.advance(0.5, frozen=tuple(self.frozen))
        self.frozen.discard(slow)
        self.come_back(len(self.away))
        self.world.run(tuple(self.frozen))

    @precondition(lambda self: self._sims())
    @rule(told=st.booleans())
    def a_source_has_not_heard_of_its_commit(self, told: bool) -> None:
        """Nor has anybody else, when the coordinator that has recorded it ends."""
        self.world.run(tuple(self.frozen))
        self.publish(None)
        before = len(self.world.decisions)
        for sim in self._sims() * 12:
            if len(self.world.decisions) == before:
                self.world.up(sim)
            if len(self.world.decisions) == before:
                self.world.down(sim)
                sim.pull_on(tuple(self.frozen))
        self.restart(keep_log=True, forget=False, told=told)

    @precondition(lambda self: self.away)
    @rule(count=st.integers(1, 5))
    def come_back(self, count: int) -> None:
        for _ in range(min(count, len(self.away))):
            sim = self.away.pop(0)
            if self.world.state.roster.holder_of(sim.member.name) is None:
                self.world.rejoin(sim)

    @precondition(lambda self: self.away)
    @rule()
    def one_away_dies(self) -> None:
        self.frozen.discard(self.away.pop(0))

    @rule(publishes=st.booleans())
    def source_elsewhere(self, publishes: bool) -> None:
        """A trainer comes on another machine than the coordinator's, and perhaps
        publishes; everything has its time."""
        self._join("trainer/0/0", "b")
        self.world.run(tuple(self.frozen))
        if publishes:
            self.publish(None)
            self.world.run(tuple(self.frozen))

    @rule(pair=st.lists(st.sampled_from(NAMES), min_size=2, max_size=2, unique=True))
    def cut(self, pair: list[str]) -> None:
        """No lane works between these; and, where both are there, nothing else."""
        self.world.bad_pairs.add(frozenset(pair))
        ends = {sim.address for sim in self.world.members.values() if sim.member.name in pair}
        if len(ends) > 1:
            self.world.cuts.add(frozenset(ends))

    @rule()
    def mend(self) -> None:
        self.world.bad_pairs.clear()
        self.world.cuts.clear()

    @rule(order=ORDERS, member=st.none() | st.integers(0, 5))
    def steer(self, order: VersionOrder, member: int | None) -> None:
        """By a person, or by a member."""
        sims = self._sims()
        self.ordered += 1
        sender = sims[member].member if member is not None and member < len(sims) else None
        tell = partial(self.world.replies.__setitem__, self.ordered)
        self.world.state.order(order, tell if sender is None else (sender, self.ordered), self.world.now)
        self.world._collect()

    @rule(seconds=st.sampled_from([0.5, 4.0, 25.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds, frozen=tuple(self.frozen))

    @invariant()
    def failed_publishes_are_never_committed(self) -> None:
        committed = {decision.version for decision in self.world.decisions}
        assert not committed & self.world.aborted

    @invariant()
    def the_end_of_a_publish_is_told_once(self) -> None:
        """By whichever coordinator; without a log a number may be used again."""
        records = [event.record for event in self.world.events if isinstance(event, SyncEnded)]
        committed = Counter(record.version for record in records if record.outcome == "committed")
        assert self.world.log_lost or max(committed.values(), default=1) == 1
        failed = Counter(record.version for record in records if record.version in self.world.aborted)
        told = all(count <= max(1, len(self.world.admitted[version])) for version, count in failed.items())
        assert self.world.log_lost or told

    @invariant()
    def nobody_takes_the_number_of_a_publish_under_way(self) -> None:
        """Unless its source came late."""
        recovery, sims = self.world.state.recovery, list(self.world.members.values())
        began, missing = recovery._started, self.away or not all(state.resumed for state in self.world.state.roster)
        if missing and not recovery.active and (began is None or self.world.now - began >= RECOVERY_S):
            self.late = True
        for sim in sims:
            news, self.read[sim] = sim.seen[self.read.get(sim, 0) :], len(sim.seen)
            admitted = {message.version for message in news if isinstance(message, wire.PublishAdmitted)}
            others = {one.version for other in (*sims, *self.away) if other is not sim for one in other.open.values()}
            assert self.late or not admitted & others

    @invariant()
    def nothing_is_kept_of_what_lies_on_a_gpu(self) -> None:
        assert not self.world.kept or self.world.config.staging == "host"

    @invariant()
    def indices_agree_with_the_members(self) -> None:
        check_roster(self.world.state.roster)

    @invariant()
    def grants_are_committed_and_grow(self) -> None:
        committed = {decision.version for decision in self.world.decisions}
        for sim in self.world.members.values():
            assert set(sim.granted) <= committed
            assert sim.granted == sorted(set(sim.granted))

    @invariant()
    def what_is_decided_stays(self) -> None:
        """A rejected version is never served to all, and what is served only grows."""
        ledger = self.world.ledger
        if self.world.log_lost:
            return
        self.rejected |= {number for number, known in ledger.versions.items() if known.rejected}
        assert ledger.current() not in self.rejected
        assert ledger.current() >= self.was_current
        self.was_current = ledger.current()

    @invariant()
    def a_label_points_to_a_committed_version(self) -> None:
        committed = {decision.version for decision in self.world.decisions}
        assert set(self.world.ledger.labels.values()) <= committed
        assert {lease.version for lease in self.world.ledger.leases.values()} <= committed

    @invariant()
    def what_is_leased_is_kept_by_all_that_are_told(self) -> None:
        state = self.world.state
        leased = {state.context.ledger.content(one.version) for one in state.context.ledger.leases.values()}
        newest = {state.context.ledger.content(state.commits.latest)}
        assert state.recovery.active or all(
            leased <= {*(one.labels.kept if one.labels is not None else ()), *newest} for one in state.roster
        )

    def the_file_that_is_written_anew_says_the_same(self) -> None:
        again = Ledger()
        for decision in self.world.ledger.decisions():
            again.apply(decision)
        again.changes = self.world.ledger.changes
        assert vars(again) == vars(self.world.ledger)

    @invariant()
    def a_version_is_decided_once(self) -> None:
        """For all targets alike, as long as no newer one has been decided."""
        sims = [*self.world.members.values(), *self.away]
        adopted = {version for sim in sims for version in sim.adopted}
        told = {version for sim in sims for version in sim.told_no}
        assert not {version for version in adopted & told if version == max(adopted)}

    @invariant()
    def ranks_of_a_replica_agree(self) -> None:
        for replica in range(2):
            ranks = [s for s in self.world.members.values() if s.member.replica_name == f"rollout/{replica}"]
            by_round = [s.granted for s in ranks]
            if len(by_round) == 2:
                common = set(by_round[0]) & set(by_round[1])
                first = [v for v in by_round[0] if v in common]
                assert first == [v for v in by_round[1] if v in common]

    def teardown(self) -> None:
        """The faults stop: everything must come to rest, and the next publish must
        reach everybody."""
        self.frozen.clear()
        self.mend()
        self.the_file_that_is_written_anew_says_the_same()
        for sim in (*self.world.members.values(), *self.away):
            sim.loads = True
            sim.look()
        self.come_back(len(self.away))
        self.world.advance(130.0)
        for name in NAMES:
            if self.world.state.roster.holder_of(name) is None:
                self._join(name)
        self.world.advance(130.0)
        assert not self.world.state.commits.publishes.without_verdict()
        assert self.world.state.commits.recommits.waiting is None
        for name in list(self.world.ledger.leases):
            self.steer(orders.Release(name=name), None)
        self.steer(orders.Label(label="mine", version=""), None)
        trainer = next(s for s in self.world.members.values() if s.member.group == "trainer")
        if self.world.state.links:
            trainer.pack(trainer.publish())  # there was no version that could show that they work again
            self.world.advance(60.0)
        number = trainer.publish()
        trainer.pack(number)
        self.world.advance(1.0)
        verdict = trainer.verdicts[number]
        assert verdict.receipt is not None, verdict
        assert len(verdict.receipt.members) == 4, [(s.member.name, s.standing, s.note) for s in self.world.state.roster]
        if self.world.config.follow == "promoted" and self.world.ledger.current() < verdict.receipt.version:
            self.steer(orders.Promote(version=str(verdict.receipt.version)), None)
        self.world.advance(1.0)
        for sim in self.world.members.values():
            if sim.member.group == "rollout":
                assert verdict.receipt.version in sim.held
                sim.give_up()
                sim.ask(verdict.receipt.version)
        self.world.advance(1.0)
        for sim in self.world.members.values():
            if sim.member.group == "rollout":
                sim.ask()
        self.world.advance(1.0)
        loaded = {self.world.state.load_rounds.of("rollout", replica).loaded for replica in range(2)}
        assert loaded == {verdict.receipt.version}
        assert len(self.world.state.lanes) <= 1, "lanes pile up"


Channel.TestCase.settings = settings(
    max_examples=10,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestChannel = Channel.TestCase

"""Ranks of a replica that join when they like, also when all others have published and
left, count their publishes alike: the k-th publish of each rank of a life gets the
same verdict, and none waits for a rank that has done its part.

A life is a generation of its own number, or one that others start, with the number of
the one before.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from replicas import messages as wire
from replicas.core.members.roster import GroupShape
from replicas.core.versions.publishes import KEPT_VERDICTS
from replicas.messages.identity import ProcessIdentity
from tests.support.channel_world import SimMember, World, channel_config

RANKS = range(3)


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(channel_config(), {"trainer": GroupShape(world_size=len(RANKS))})
        self.world.join("rollout/0/0")
        self.life = 1
        self.here: dict[int, SimMember] = {}
        self.made: dict[int, list[tuple[SimMember, int]]] = {rank: [] for rank in RANKS}
        """The publishes of each rank in this life, in order."""

    @initialize(numbered=st.booleans(), proven=st.booleans())
    def begin(self, numbered: bool, proven: bool) -> None:
        self.numbered, self.proof = numbered or proven, "shown" if proven else ""

    def _join(self, rank: int) -> None:
        generation = self.life if self.numbered else 1
        process = ProcessIdentity(1000 * self.life + rank, 1, "boot", 1)
        name = f"trainer/0/{rank}"
        sim = self.world.join(name, world_size=len(RANKS), generation=generation, process=process, proof=self.proof)
        self.here[rank] = sim

    def _publish(self, rank: int) -> None:
        sim = self.here[rank]
        number = sim.publish()
        if rank:
            sim.pack(number, manifest=None)
        else:
            sim.pack(number)
        self.made[rank].append((sim, number))

    @precondition(lambda self: len(self.here) < len(RANKS))
    @rule(data=st.data())
    def comes(self, data: st.DataObject) -> None:
        self._join(data.draw(st.sampled_from([rank for rank in RANKS if rank not in self.here])))

    @precondition(lambda self: self.here)
    @rule(data=st.data(), count=st.integers(1, 3))
    def publishes(self, data: st.DataObject, count: int) -> None:
        rank = data.draw(st.sampled_from(sorted(self.here)))
        ahead = len(self.made[rank]) - min(map(len, self.made.values()))
        for _ in range(min(count, KEPT_VERDICTS - ahead)):
            self._publish(rank)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        """In good order: with a verdict for all that it has published."""
        done = [rank for rank, sim in self.here.items() if not sim.open]
        if done:
            sim = self.here.pop(data.draw(st.sampled_from(sorted(done))))
            sim.outbox.append(wire.Bye())
            self.world.say_all(sim)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), count=st.integers(1, 12))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            sim = data.draw(st.sampled_from(list(self.world.members.values())))
            if data.draw(st.booleans()):
                self.world.up(sim)
            else:
                self.world.down(sim)

    @rule()
    def deliver_all(self) -> None:
        self.world.run()

    @precondition(lambda self: self.here)
    @rule()
    def dies(self) -> None:
        """The whole replica, and with it those that were yet to come."""
        for sim in self.here.values():
            self.world.lose(sim)
        self._next_life()

    @precondition(lambda self: self.proof)
    @rule()
    def is_replaced(self) -> None:
        """By the next generation; its members linger until that comes."""
        self._next_life()

    @rule()
    def ends(self) -> None:
        """Every rank does what any of them has done, and leaves."""
        self._finish()
        for sim in self.here.values():
            self.world.lose(sim, "left")
        self._next_life()

    def _next_life(self) -> None:
        self.life += 1
        self.here.clear()
        self.made = {rank: [] for rank in RANKS}

    def _finish(self) -> None:
        """The slowest ranks join last."""
        most = max(1, *map(len, self.made.values()))
        for rank in RANKS:
            if rank not in self.here:
                self._join(rank)
            while len(self.made[rank]) < most:
                self._publish(rank)
                self.world.run()
        self.world.run()
        for number in range(most):
            verdicts = [sim.verdicts.get(own) for sim, own in (self.made[rank][number] for rank in RANKS)]
            assert verdicts[0] is not None, "a publish waits for a rank that has done its part"
            assert verdicts[0].receipt is not None, verdicts
            versions = [one.receipt.version if one is not None and one.receipt is not None else 0 for one in verdicts]
            assert versions == versions[:1] * len(RANKS), versions

    def teardown(self) -> None:
        self._finish()


Lives.TestCase.settings = settings(
    max_examples=5,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestLives = Lives.TestCase

"""All targets of a channel load a version, or none does; in virtual time.

Covers: core/versions/lockstep.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.coordinator.readiness import ReadinessBook
from replicas.core.base.effects import LoadFailed
from replicas.core.versions import lockstep
from tests.support.channel_world import SimMember, World, channel_config

DEADLINE_S = 20.0


class Fleet:
    """A trainer and three targets of one rank, or more ranks, on one machine."""

    def __init__(self, targets: int = 3, ranks: int = 1, **changes: object) -> None:
        config = channel_config(adopt_together=True, deadline_s=DEADLINE_S, **changes)
        self.world = World(config, machine="a")
        self.ranks = ranks
        self.book = ReadinessBook()
        self.trainer = self.world.join("trainer/0/0", machine="a")
        self.targets = [self.join(replica, rank) for replica in range(targets) for rank in range(ranks)]
        self.world.run()

    def join(self, replica: int, rank: int = 0) -> SimMember:
        return self.world.join(f"rollout/{replica}/{rank}", world_size=self.ranks, machine="a")

    def publish(self) -> int:
        number = self.trainer.publish()
        self.trainer.pack(number)
        self.world.advance(1.0)
        receipt = self.trainer.receipt(number)
        return receipt.version

    def serve(self) -> int:
        """The next version, served by all."""
        version = self.publish()
        self.ask()
        assert self.loaded() == [version] * len(self.targets)
        return version

    def ask(self, *targets: SimMember, at_least: int = 0) -> None:
        for sim in targets or self.targets:
            sim.ask(at_least)
        self.world.run()

    def hesitate(self, *targets: SimMember) -> None:
        """They look at what they are granted, and say nothing yet."""
        for sim in targets:
            sim.loads = False

    def say(self, *targets: SimMember) -> None:
        for sim in targets:
            sim.loads = True
            sim.look()
        self.world.run()

    def refuse(self, target: SimMember, why: str = "it has other shapes") -> None:
        target.keep_own(why)
        target.loads = True
        self.world.run()

    def loaded(self) -> list[int]:
        return [sim.loaded for sim in self.targets]

    def failures(self, version: int) -> dict[int, str]:
        """Why replicas did not load it, by their index."""
        events = [one for one in self.world.events if isinstance(one, LoadFailed) and one.version == version]
        return {one.replica: one.reason for one in events}

    def unready(self) -> dict[int, str]:
        found = (
            (index, self.book.of([self.world.state], "rollout", index, 1, self.ranks, self.world.now))
            for index in range(len(self.targets) // self.ranks)
        )
        return {index: one.reason for index, one in found if not one.ready}


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_none_loads_before_all_can(fleet: Fleet) -> None:
    first, second, third = fleet.targets
    fleet.hesitate(second, third)
    fleet.publish()
    fleet.ask()
    assert fleet.loaded() == [0, 0, 0]
    assert fleet.world.state.waits(first.member), "it makes no progress, and need not"
    fleet.say(second)
    assert fleet.loaded() == [0, 0, 0]
    fleet.say(third)
    assert fleet.loaded() == [1, 1, 1]
    assert not fleet.unready()
    assert fleet.serve() == 2


def test_one_that_has_not_asked_yet_is_waited_for(fleet: Fleet) -> None:
    fleet.serve()
    fleet.publish()
    fleet.ask(*fleet.targets[:2])
    assert fleet.loaded() == [1, 1, 1]
    fleet.ask(fleet.targets[2])
    assert fleet.loaded() == [2, 2, 2]


@pytest.mark.parametrize("first", [False, True])
def test_what_one_refuses_none_loads_and_all_go_on_with_the_next(fleet: Fleet, first: bool) -> None:
    """``first``: before another one has said that it can load it."""
    fleet.serve()
    fleet.hesitate(*(fleet.targets if first else fleet.targets[1:]))
    fleet.publish()
    fleet.ask()
    fleet.refuse(fleet.targets[1])
    fleet.say(*fleet.targets)
    assert fleet.loaded() == [1, 1, 1]
    for index in (0, 2):
        assert fleet.failures(2)[index].endswith("rollout/1 does not load it (it has other shapes)")
    assert not fleet.unready()
    fleet.ask()
    assert fleet.loaded() == [1, 1, 1], "they wait for a newer one"
    fleet.publish()
    assert fleet.loaded() == [3, 3, 3]


def test_who_comes_to_a_rejected_version_later_waits_for_the_next(fleet: Fleet) -> None:
    fleet.serve()
    fleet.hesitate(fleet.targets[1])
    fleet.publish()
    fleet.ask(*fleet.targets[:2])
    fleet.refuse(fleet.targets[1])
    fleet.targets.append(fleet.join(3))
    fleet.world.advance(1.0)
    fleet.ask(*fleet.targets[2:])
    assert [sim.granted for sim in fleet.targets[2:]] == [[1], []]
    fleet.ask(*fleet.targets[:2])
    assert fleet.publish() == 3
    assert fleet.loaded() == [3, 3, 3, 3]


@pytest.mark.parametrize("reason", ["exited", "left", "lease"])
def test_one_that_is_gone_is_not_waited_for(fleet: Fleet, reason: str) -> None:
    fleet.hesitate(fleet.targets[2])
    fleet.publish()
    fleet.ask()
    fleet.world.lose(fleet.targets.pop(), reason)
    fleet.world.run()
    assert fleet.loaded() == [1, 1]


def test_those_that_waited_may_be_gone(fleet: Fleet) -> None:
    fleet.hesitate(*fleet.targets[1:])
    fleet.publish()
    fleet.ask()
    fleet.world.lose(fleet.targets.pop(0))
    fleet.world.advance(3 * DEADLINE_S)
    assert fleet.loaded() == [0, 0], "nobody waits for them"
    fleet.say(*fleet.targets)
    assert fleet.loaded() == [1, 1]


def test_one_that_is_being_drained_is_not_waited_for(fleet: Fleet) -> None:
    fleet.publish()
    fleet.ask(*fleet.targets[:2])
    assert fleet.loaded() == [0, 0, 0]
    fleet.world.state.set_draining("rollout", 2, 1, fleet.world.now)
    fleet.world._collect()
    fleet.world.run()
    assert fleet.loaded() == [1, 1, 0]


def test_one_that_says_nothing_is_left_behind_at_the_deadline(fleet: Fleet) -> None:
    fleet.serve()
    slow = fleet.targets[2]
    fleet.hesitate(slow)
    fleet.publish()
    fleet.ask()
    fleet.world.advance(DEADLINE_S - 1.0)
    assert fleet.loaded() == [1, 1, 1]
    assert not fleet.unready()
    fleet.world.advance(2.0)
    assert fleet.loaded() == [2, 2, 1]
    assert fleet.failures(2)[2].startswith("this replica did not report within 20 s that it can load it")
    assert fleet.unready()[2].startswith(
        "version 1 of policy loaded, others serve 2; channel policy, version 2 was not"
    )
    fleet.publish()
    fleet.ask(*fleet.targets[:2])
    assert fleet.loaded() == [3, 3, 1], "it is not waited for a second time"
    fleet.say(slow)
    assert slow.loaded == 2, "that is decided"
    assert list(fleet.unready()) == [2]
    fleet.ask(slow)
    assert fleet.loaded() == [3, 3, 3]
    assert not fleet.unready()
    assert fleet.serve() == 4, "it is waited for again"


def test_the_receipt_and_the_watch_say_who_was_left_behind(fleet: Fleet) -> None:
    fleet.serve()
    fleet.hesitate(fleet.targets[2])
    fleet.publish()
    fleet.ask()
    fleet.trainer.outbox.append(wire.WatchLoaded(1, 2))
    fleet.world.advance(DEADLINE_S + 1.0)
    ends = [message for message in fleet.trainer.seen if isinstance(message, wire.WatchEnd)]
    assert [list(end.failed) for end in ends] == [["rollout/2"]]
    number = fleet.trainer.publish()
    fleet.trainer.pack(number)
    fleet.world.advance(1.0)
    receipt = fleet.trainer.receipt(number)
    assert list(receipt.not_loaded) == ["rollout/2"]


def test_the_watch_of_a_version_that_none_loads_ends_with_the_reason(fleet: Fleet) -> None:
    """Also while a target has not asked for a version, and so has refused nothing."""
    fleet.serve()
    fleet.publish()
    fleet.trainer.outbox.append(wire.WatchLoaded(1, 2))
    fleet.hesitate(fleet.targets[0])
    fleet.ask(fleet.targets[0])
    fleet.refuse(fleet.targets[0])
    (end,) = [message for message in fleet.trainer.seen if isinstance(message, wire.WatchEnd)]
    assert end.failed == {"rollout/0": "version 2 was not loaded: it has other shapes"}
    fleet.publish()
    fleet.trainer.outbox.append(wire.WatchLoaded(2, 2))
    fleet.ask()
    assert fleet.loaded() == [3, 3, 3]
    assert [end.failed for end in fleet.trainer.seen if isinstance(end, wire.WatchEnd)][1:] == [{}]


def test_a_watch_of_what_is_served_waits_for_a_latecomer_while_a_newer_one_is_rejected(fleet: Fleet) -> None:
    fleet.serve()
    fleet.publish()
    fleet.hesitate(fleet.targets[0])
    fleet.ask(fleet.targets[0])
    fleet.refuse(fleet.targets[0])
    fleet.targets.append(fleet.join(3))
    fleet.trainer.outbox.append(wire.WatchLoaded(1, 1))
    fleet.world.run()
    assert all(not end.failed for end in fleet.trainer.seen if isinstance(end, wire.WatchEnd))


def test_a_refusal_after_the_others_have_loaded_it_makes_unready(fleet: Fleet) -> None:
    fleet.serve()
    fleet.hesitate(fleet.targets[2])
    fleet.publish()
    fleet.ask()
    fleet.world.advance(DEADLINE_S + 1.0)
    fleet.refuse(fleet.targets[2])
    assert fleet.loaded() == [2, 2, 1]
    assert list(fleet.unready()) == [2]
    fleet.ask()
    fleet.publish()
    assert fleet.loaded() == [3, 3, 3]
    assert not fleet.unready()


# ---------------------------------------------------------------- latecomers


def test_a_latecomer_loads_what_the_others_serve(fleet: Fleet) -> None:
    fleet.serve()
    fleet.targets.append(fleet.join(3))
    fleet.world.advance(1.0)
    fleet.ask(fleet.targets[3])
    assert fleet.loaded() == [1, 1, 1, 1]


def test_a_latecomer_that_has_not_asked_is_not_waited_for(fleet: Fleet) -> None:
    fleet.serve()
    late = fleet.join(3)
    fleet.world.advance(1.0)
    assert fleet.serve() == 2
    fleet.targets.append(late)
    fleet.publish()
    fleet.ask(*fleet.targets[:3])
    assert fleet.loaded() == [3, 3, 3, 0]
    fleet.ask(late)
    assert fleet.loaded() == [3, 3, 3, 3]


def test_a_latecomer_to_an_open_version_waits_and_leaves_nobody_behind(fleet: Fleet) -> None:
    fleet.serve()
    fleet.publish()
    fleet.targets.append(fleet.join(3))
    fleet.world.advance(1.0)
    fleet.ask(fleet.targets[3])
    fleet.world.advance(3 * DEADLINE_S)
    assert fleet.loaded() == [1, 1, 1, 0], "they compute for long, and serve meanwhile"
    assert list(fleet.unready()) == [3]
    fleet.ask(*fleet.targets[:3])
    assert fleet.loaded() == [2, 2, 2, 2]


def test_one_that_comes_back_is_waited_for_when_it_can_load(fleet: Fleet) -> None:
    fleet.serve()
    fleet.world.lose(fleet.targets.pop())
    fleet.publish()
    fleet.targets.append(fleet.join(2))
    fleet.world.advance(1.0)
    fleet.hesitate(fleet.targets[2])
    fleet.ask(fleet.targets[2])
    fleet.ask(*fleet.targets[:2])
    assert fleet.loaded() == [1, 1, 0]
    fleet.say(fleet.targets[2])
    assert fleet.loaded() == [2, 2, 2]


# ---------------------------------------------------------------- newer versions


def test_all_are_granted_what_the_first_can_load(fleet: Fleet) -> None:
    fleet.serve()
    for sim in fleet.targets:
        sim.assigned = 2  # they keep it
    fleet.publish()
    fleet.ask(fleet.targets[0])
    fleet.publish()
    fleet.ask(*fleet.targets[1:])
    assert fleet.loaded() == [2, 2, 2]
    fleet.ask()
    assert fleet.loaded() == [3, 3, 3]


def test_a_version_that_another_no_longer_holds_is_overtaken(fleet: Fleet) -> None:
    fleet.serve()
    fleet.publish()
    fleet.ask(fleet.targets[0])
    fleet.publish()
    assert fleet.loaded() == [1, 1, 1], "those that have not asked may hold it"
    fleet.ask(fleet.targets[1])
    assert fleet.failures(2)[0].endswith("version 3 came before rollout/1 could load it")
    fleet.ask()
    assert fleet.loaded() == [3, 3, 3]


def test_the_newer_of_two_that_targets_can_load_is_decided(fleet: Fleet) -> None:
    fleet.serve()
    first, second, third = fleet.targets
    fleet.hesitate(*fleet.targets)
    fleet.publish()
    fleet.ask(first)
    fleet.publish()
    fleet.ask(second, third)
    fleet.say(first)
    fleet.say(second)
    assert fleet.failures(2)[0].endswith("version 3 came before all targets could load it")
    fleet.say(third)
    fleet.ask(first)
    assert fleet.loaded() == [3, 3, 3]


def test_a_version_that_is_not_enough_for_one_is_loaded_by_none(fleet: Fleet) -> None:
    fleet.serve()
    fleet.publish()
    fleet.ask(fleet.targets[0])
    fleet.ask(fleet.targets[1], at_least=3)
    assert fleet.failures(2)[0].endswith("rollout/1 waits for a newer version")
    fleet.ask()
    fleet.publish()
    assert fleet.loaded() == [3, 3, 3]


# ---------------------------------------------------------------- ranks


def test_all_ranks_of_a_replica_say_it() -> None:
    fleet = Fleet(targets=2, ranks=2)
    fleet.hesitate(fleet.targets[3])
    fleet.publish()
    fleet.ask()
    assert fleet.loaded() == [0, 0, 0, 0]
    fleet.say(fleet.targets[3])
    assert fleet.loaded() == [1, 1, 1, 1]


def test_one_rank_says_it_for_all() -> None:
    fleet = Fleet(targets=2, ranks=2)
    for rank in (0, 2):
        fleet.targets[rank].whole = True
    fleet.publish()
    fleet.ask(fleet.targets[0], fleet.targets[2])
    assert fleet.loaded() == [1, 0, 1, 0]
    fleet.ask(fleet.targets[1], fleet.targets[3])
    assert fleet.loaded() == [1, 1, 1, 1]


def test_a_replica_without_one_of_its_ranks_is_not_waited_for() -> None:
    fleet = Fleet(targets=2, ranks=2)
    fleet.publish()
    fleet.ask(*fleet.targets[:2])
    assert fleet.loaded() == [0, 0, 0, 0]
    fleet.world.lose(fleet.targets.pop())
    fleet.world.run()
    assert fleet.loaded() == [1, 1, 0]


# ---------------------------------------------------------------- a new coordinator


def come_back(fleet: Fleet, *gone: SimMember) -> None:
    sims = fleet.world.restart()
    for sim in sims:
        if sim not in gone:
            fleet.world.rejoin(sim)
    fleet.world.advance(5.0)


def test_those_that_wait_say_it_again_to_a_new_coordinator(fleet: Fleet) -> None:
    fleet.serve()
    fleet.hesitate(fleet.targets[2])
    fleet.publish()
    fleet.ask()
    come_back(fleet)
    assert fleet.loaded() == [1, 1, 1]
    fleet.say(fleet.targets[2])
    assert fleet.loaded() == [2, 2, 2]
    assert fleet.serve() == 3


def test_the_deadline_begins_again_with_a_new_coordinator(fleet: Fleet) -> None:
    fleet.serve()
    fleet.hesitate(fleet.targets[2])
    fleet.publish()
    fleet.ask()
    come_back(fleet)
    fleet.world.advance(DEADLINE_S + 1.0)
    assert fleet.loaded() == [2, 2, 1]
    come_back(fleet)
    assert list(fleet.unready()) == [2], "the next one knows it"


def told_to_one(fleet: Fleet) -> None:
    """Decide, and let one target hear of it before the coordinator ends."""
    for sim in fleet.targets:
        fleet.world.say_all(sim)
    while fleet.world.down(fleet.targets[0]):
        pass
    come_back(fleet)


def test_what_one_was_told_to_load_all_load(fleet: Fleet) -> None:
    fleet.serve()
    fleet.hesitate(*fleet.targets)
    fleet.publish()
    fleet.ask()
    for sim in fleet.targets:
        sim.loads = True
        sim.look()
    told_to_one(fleet)
    assert fleet.loaded() == [2, 2, 2]


def test_what_one_was_told_to_load_another_can_no_longer_refuse_for_all(fleet: Fleet) -> None:
    fleet.serve()
    fleet.hesitate(fleet.targets[2])
    fleet.publish()
    fleet.ask()
    fleet.world.now += DEADLINE_S + 1.0
    for sim in (fleet.trainer, *fleet.targets):
        fleet.world.state.roster.note_heard(sim.member, fleet.world.now)
    fleet.world.state.tick(fleet.world.now)
    fleet.world._collect()
    told_to_one(fleet)
    fleet.refuse(fleet.targets[2])
    assert fleet.loaded() == [2, 2, 1]
    assert list(fleet.unready()) == [2]


@pytest.mark.parametrize("told", [False, True])
def test_what_one_was_told_not_to_load_none_loads(fleet: Fleet, told: bool) -> None:
    """Or nobody was told that one has refused it."""
    fleet.serve()
    fleet.hesitate(fleet.targets[2])
    fleet.publish()
    fleet.ask()
    fleet.targets[2].keep_own("it has other shapes")
    fleet.targets[2].loads = True
    if told:
        told_to_one(fleet)
    else:
        come_back(fleet)
    assert fleet.loaded() == [1, 1, 1]
    fleet.ask()
    fleet.publish()
    assert fleet.loaded() == [3, 3, 3]


def test_one_that_does_not_come_back_is_not_waited_for(fleet: Fleet) -> None:
    fleet.serve()
    fleet.hesitate(fleet.targets[2])
    fleet.publish()
    fleet.ask()
    come_back(fleet, fleet.targets.pop())
    assert fleet.loaded() == [2, 2]


# ---------------------------------------------------------------- what no library does


def test_a_version_that_is_not_committed_is_not_decided(fleet: Fleet) -> None:
    fleet.targets[0].outbox.append(wire.CanLoad(7))
    fleet.trainer.outbox.append(wire.CanLoad(1))
    fleet.world.run()
    assert not fleet.world.state.waits(fleet.targets[0].member)
    assert fleet.serve() == 1


def test_decisions_of_long_ago_are_forgotten(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_KEPT", 2)
    for _ in range(3):
        fleet.serve()
        fleet.hesitate(fleet.targets[0])
        fleet.publish()
        fleet.ask()
        fleet.refuse(fleet.targets[0])
    state = fleet.world.state.lockstep
    assert (state.served, sorted(state._adopted), sorted(state._rejected)) == (5, [3, 5], [4, 6])
    for version in (1, 2):
        fleet.targets[1].outbox.append(wire.CanLoad(version))
        fleet.world.run()
        answer = fleet.targets[1].seen[-1]
        assert isinstance(answer, wire.LoadDecided)
        assert answer.error is not None, "the others serve another one"

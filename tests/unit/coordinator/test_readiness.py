"""When a replica counts as ready, as the coordinator sees it.

Covers: coordinator/readiness.py.
"""

from __future__ import annotations

from replicas import messages as wire
from replicas.coordinator.readiness import Readiness, ReadinessBook
from replicas.core.members.roster import GroupShape
from tests.support.channel_world import SimMember, World


class Book:
    def __init__(self, world_size: int = 1, machine: str = "") -> None:
        self.world = World(groups={"rollout": GroupShape(replicas=2, world_size=world_size)}, machine=machine)
        self._book = ReadinessBook()
        self._world_size = world_size

    def join(self, name: str, *, generation: int = 1, machine: str = "") -> SimMember:
        return self.world.join(name, world_size=self._world_size, generation=generation, machine=machine)

    def of(self, group: str = "rollout", *, generation: int = 1, external: bool = False) -> Readiness:
        channels = [self.world.state]
        return self._book.of(channels, group, 0, generation, self._world_size, self.world.now, external=external)

    def commit(self) -> None:
        trainer = next(s for s in self.world.members.values() if s.member.group == "trainer")
        trainer.pack(trainer.publish())
        self.world.run()


def test_before_the_first_version_joining_with_all_ranks_is_enough() -> None:
    book = Book(world_size=2)
    assert book.of().reason == "rank 0, 1 has not joined channel policy"
    book.join("rollout/0/0")
    assert book.of().reason == "rank 1 has not joined channel policy"
    book.join("rollout/0/1")
    assert book.of().ready


def test_a_rank_that_was_lost_is_not_said_to_have_never_joined() -> None:
    book = Book(world_size=2)
    one = book.join("rollout/0/0")
    book.world.state.lose(one.member, "exited", book.world.now)
    assert book.of().reason == "rank 1 has not joined channel policy; rank 0 is lost from channel policy"
    assert book.of(generation=2).reason == "rank 0, 1 has not joined channel policy"


def test_ranks_whose_heartbeats_are_late_are_named() -> None:
    book = Book(world_size=2)
    book.join("rollout/0/0")
    one = book.join("rollout/0/1")
    book.world.now += 3.0
    assert book.of().silent == ()
    book.world.state.roster.note_heard(one.member, book.world.now)
    book.world.now += 1.0
    assert (book.of().silent, book.of().heartbeat_age_s) == ((0,), 4.0)


def test_a_late_target_is_ready_when_it_has_loaded_the_newest_and_stays_so() -> None:
    book = Book()
    book.join("trainer/0/0")
    book.commit()
    target = book.join("rollout/0/0")
    assert book.of().reason == "no version of policy loaded yet (newest: 1)"
    target.ask()
    book.world.run()
    assert book.of().ready
    assert book.of().versions == {"policy": 1}
    book.commit()
    assert book.of().ready, "lag is not unreadiness"


def test_what_is_seen_of_a_replicas_ranks() -> None:
    book = Book()
    book.join("trainer/0/0")
    target = book.join("rollout/0/0")
    book.commit()
    target.ask()
    while not target.granted:
        assert book.world.up(target) or book.world.down(target)
    state = book.world.state.roster.get(target.member)
    assert state is not None
    state.granted_at = book.world.now
    book.world.now += 3.0
    assert (target.granted, book.of().open_s) == ([1], {"policy": 3.0})
    book.world.run()
    view = book.of()
    assert (view.open_s, view.slots, view.step) == ({}, {"policy": 1}, None)
    assert [*view.pids] == [0]


def test_the_first_that_joins_when_nobody_else_is_left_is_ready_with_the_version_that_is_kept() -> None:
    """At no moment before: what depends on it would be started."""
    book = Book(machine="a")
    trainer = book.join("trainer/0/0", machine="a")
    book.commit()
    book.world.lose(trainer)
    target = book.join("rollout/0/0", machine="a")
    target.ask()
    reason = "no version of policy loaded yet (newest: 1)"
    assert book.of().reason == reason, "it may be on the host where the version is kept"
    while not target.granted:
        assert book.of().reason == reason
        assert book.world.down(target) or book.world.up(target)
    book.world.run()
    assert book.of().ready
    assert book.of().versions == {"policy": 1}


def test_when_it_turns_out_to_be_elsewhere_it_is_ready_with_nothing() -> None:
    book = Book(machine="a")
    trainer = book.join("trainer/0/0", machine="a")
    book.commit()
    book.world.lose(trainer)
    book.join("rollout/0/0", machine="b")
    assert not book.of().ready
    book.world.run()
    assert book.of().ready, "nobody can ever give it version 1"


def test_a_target_that_loads_more_slowly_than_its_trainer_publishes_is_ready_all_the_same() -> None:
    book = Book()
    book.join("trainer/0/0")
    book.commit()
    target = book.join("rollout/0/0")
    target.loads = False
    target.ask()
    book.world.run()
    book.commit()
    assert book.of().reason == "no version of policy loaded yet (newest: 2)"
    target.outbox.append(wire.Loaded(1, 5.0))
    book.world.run()
    assert book.of().ready, "version 1 was the newest when it asked"
    assert book.of().versions == {"policy": 1}


def test_a_restarted_target_starts_over() -> None:
    book = Book()
    book.join("trainer/0/0")
    target = book.join("rollout/0/0")
    book.commit()
    target.ask()
    book.world.run()
    book.world.lose(target)
    assert not book.of().ready
    again = book.join("rollout/0/0", generation=2)
    assert not book.of(generation=2).ready
    again.ask()
    book.world.run()
    assert book.of(generation=2).ready


def test_a_failed_load_is_partial() -> None:
    book = Book()
    book.join("trainer/0/0")
    target = book.join("rollout/0/0")
    book.commit()
    target.ask()
    book.world.run()
    error = wire.WireError("SyncError", "boom")
    book.world.state.receive(target.member, wire.LoadFailed(1, error), book.world.now)
    assert not book.of().ready
    assert "version 1 was not loaded: boom" in book.of().partial


def test_a_rank_that_leaves_a_version_half_loaded_has_not_done_its_part() -> None:
    """Between its failed load and the end of its process it must not look ready."""
    book = Book()
    book.join("trainer/0/0")
    book.commit()
    target = book.join("rollout/0/0")
    target.loads = False
    target.ask()
    book.world.run()
    error = wire.WireError("SyncError", "boom")
    book.world.state.receive(target.member, wire.LoadFailed(1, error), book.world.now)
    book.world.lose(target, "left")
    assert book.of().reason == "rank 0 has not joined channel policy"


def test_a_replica_that_refuses_a_version_is_ready_with_its_own_and_says_why() -> None:
    book = Book()
    book.join("trainer/0/0")
    target = book.join("rollout/0/0")
    book.commit()
    target.ask()
    book.world.run()
    target.loads = False
    book.commit()
    target.ask()
    book.world.run()
    target.keep_own("no weights for b")
    book.world.run()
    found = book.of()
    assert found.ready
    assert not found.partial
    assert found.reason == "channel policy, version 2 was not loaded: no weights for b"


def test_a_rank_that_left_in_good_order_has_done_its_part() -> None:
    book = Book()
    trainer = book.join("trainer/0/0")
    assert book.of("trainer").ready
    book.world.lose(trainer, "left")
    assert book.of("trainer").ready
    assert not book.of("trainer", generation=2).ready


def test_waiting_for_others_is_no_lack_of_progress() -> None:
    book = Book()
    target = book.join("rollout/0/0")
    book.world.advance(40.0)
    assert book.of().progressed_s == 40.0
    target.ask()
    book.world.run()
    assert book.of().progressed_s is None


def test_a_group_on_no_channel_is_ready() -> None:
    assert Book().of("router").ready


def test_when_the_newest_version_died_with_all_its_holders_a_target_need_not_wait_for_it() -> None:
    book = Book()
    trainer = book.join("trainer/0/0")
    target = book.join("rollout/0/0")
    book.commit()
    book.world.lose(target)
    book.join("rollout/0/0")
    assert not book.of().ready, "the trainer still has it"
    book.world.lose(trainer)
    assert book.of().ready, "its source may be waiting for it"


def test_ranks_that_wait_in_vain_for_one_that_has_left_are_stranded() -> None:
    book = Book(world_size=2)
    trainer = book.world.join("trainer/0/0")
    first, second = book.join("rollout/0/0"), book.join("rollout/0/1")
    book.commit()
    for rank in (first, second):
        rank.ask()
    book.world.run()
    assert book.of().ready
    book.world.lose(second, "left")
    first.ask()
    book.world.advance(10.0)
    assert book.of().ready, "there is nothing newer: it may be at its end, too"
    book.commit()
    assert trainer.verdicts[2].receipt is not None
    readiness = book.of()
    assert (readiness.ready, readiness.stranded) == (False, True)
    assert readiness.reason == "rank 0 waits for version 2 of policy, other ranks have left"
    book.world.lose(first, "left")
    assert book.of().ready, "it has done its part"


def test_programs_of_others_number_their_generations_as_they_like() -> None:
    book = Book(world_size=2)
    book.join("trainer/0/0")
    first = [book.join("rollout/0/0", generation=7), book.join("rollout/0/1", generation=1)]
    assert book.of(generation=1, external=True).ready
    assert not book.of(generation=1).ready
    for sim in first:
        book.world.lose(sim, "left")
    book.commit()
    book.join("rollout/0/0", generation=3)
    assert book.of(generation=2, external=True).ready, "rank 1 has left in order: it is not expected"
    book.world.state.start_new_life("rollout", 0, book.world.now)
    assert book.of(generation=2, external=True).reason == "rank 1 has not joined channel policy"
    book.join("rollout/0/1", generation=3)
    assert book.of(generation=2, external=True).reason == "no version of policy loaded yet (newest: 1)"

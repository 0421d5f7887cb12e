"""What a channel does with a replica that is being ended: its sync may finish, and
nothing new waits for it.

Covers: core/draining.py.
"""

from __future__ import annotations

from replicas import messages as wire
from replicas.common.reason import Reason
from replicas.core.base.effects import ReplicaIdle
from replicas.core.members.roster import GroupShape
from tests.support.channel_world import SimMember, World, peer_config


def world_of(*names: str, world_size: int = 1) -> tuple[World, list[SimMember]]:
    """``world_size``: ranks of a target replica."""
    world = World()
    sims = [world.join(name, world_size=world_size if name.startswith("rollout") else 1) for name in names]
    world.run()
    return world, sims


def drain(world: World, group: str, replica: int) -> Reason | None:
    """Ask for the end of the replica; what it is in the middle of."""
    world.state.set_draining(group, replica, 1, world.now)
    world._collect()
    return world.state.drains.busy(group, replica)


def idle(world: World) -> list[str]:
    """Replicas that were said to have finished their sync."""
    return [f"{one.group}/{one.replica}" for one in world.events if isinstance(one, ReplicaIdle)]


def commit(world: World, trainer: SimMember, **options: tuple[SimMember, ...]) -> wire.PublishEnd:
    number = trainer.publish()
    trainer.pack(number)
    world.run(**options)
    return trainer.verdicts[number]


def test_one_that_does_nothing_may_end_at_once() -> None:
    world, _ = world_of("trainer/0/0", "rollout/0/0")
    assert drain(world, "rollout", 0) is None
    assert idle(world) == ["rollout/0"]


def test_a_version_goes_on_without_it_and_nobody_is_lost() -> None:
    world, (trainer, one, two) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    drain(world, "rollout", 1)
    end = commit(world, trainer, frozen=(two,))
    assert end.receipt is not None
    assert (end.receipt.lost, [member.name for member in end.receipt.members]) == ((), ["rollout/0/0"])
    assert (one.held, two.held) == ({1}, set())
    world.advance(60)
    world.run()
    assert two.held == set(), "it is neither caught up nor taken back"
    assert {state.member.name for state in world.state.roster.live} == {"trainer/0/0", "rollout/0/0"}


def test_a_transfer_that_is_under_way_finishes() -> None:
    world, (trainer, one, two) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    number = trainer.publish()
    trainer.pack(number)
    world.run(frozen=(two,))
    assert drain(world, "rollout", 1) == "version 1 of policy is being transferred"
    assert idle(world) == []
    world.run()
    assert one.held == two.held == {1}
    assert trainer.verdicts[number].receipt is not None
    assert idle(world) == ["rollout/1"]


def test_a_source_ends_after_its_publish() -> None:
    world, (trainer, _) = world_of("trainer/0/0", "rollout/0/0")
    number = trainer.publish()
    world.run()
    assert drain(world, "trainer", 0) == "it publishes version 1 of policy"
    trainer.pack(number)
    world.run()
    assert trainer.verdicts[number].receipt is not None
    assert idle(world) == ["trainer/0"]


def test_all_ranks_load_what_one_has_begun_to_load_and_nothing_newer() -> None:
    world, (trainer, one, two) = world_of("trainer/0/0", "rollout/0/0", "rollout/0/1", world_size=2)
    commit(world, trainer)
    one.loads = False
    one.ask()
    world.run()
    assert one.granted == [1]
    assert drain(world, "rollout", 0) == "it loads version 1 of policy"
    two.ask()
    one.outbox.append(wire.Loaded(1, 0.1))
    world.run()
    assert two.granted == [1]
    assert idle(world) == ["rollout/0"]
    commit(world, trainer)
    one.asked = False
    one.ask()
    world.run()
    assert one.granted == [1], "nothing new is begun"


def test_what_was_granted_to_nobody_is_not_begun() -> None:
    world, (trainer, one, two) = world_of("trainer/0/0", "rollout/0/0", "rollout/0/1", world_size=2)
    commit(world, trainer)
    assert drain(world, "rollout", 0) is None
    one.ask()
    two.ask()
    world.run()
    assert (one.granted, two.granted) == ([], [])


def test_the_next_generation_is_none_of_it() -> None:
    world, (trainer, _) = world_of("trainer/0/0", "rollout/0/0")
    drain(world, "rollout", 0)
    commit(world, trainer)
    again = world.join("rollout/0/0", generation=2)
    world.run()
    again.ask()
    world.run()
    assert again.granted == [1]


def test_a_peer_ends_between_two_operations() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=2)})
    one, two = world.join("peer/0/0"), world.join("peer/1/0")
    world.run()
    one.post("all_reduce", step=1)
    world.run()
    assert drain(world, "peer", 0) == "an operation on outer has not ended"
    two.post("all_reduce", step=1)
    world.run()
    assert (len(one.ends), idle(world)) == (1, ["peer/0"])


def test_a_peer_that_was_not_admitted_yet_waits_for_no_operation() -> None:
    """It never will be: its first call would hold up a run's end to its deadline."""
    world = World(peer_config(), {"peer": GroupShape(replicas=2)})
    one, two = world.join("peer/0/0"), world.join("peer/1/0")
    world.run()
    one.post("all_reduce", step=1)
    world.lose(two)
    world.state.set_draining("peer", 1, 2, world.now)
    again = world.join("peer/1/0", generation=2)
    again.post("all_reduce", step=2)
    world.run()
    assert again.member not in {state.member for state in world.state.roster.live}
    world.state.set_draining("peer", 1, 2, world.now)
    world._collect()
    assert world.state.drains.busy("peer", 1) is None
    assert idle(world) == ["peer/1"]


def test_how_far_a_replica_has_ever_come() -> None:
    world, (trainer, target) = world_of("trainer/0/0", "rollout/0/0")
    marks = world.state.marks
    before = marks.of("rollout", 0)
    commit(world, trainer)
    assert marks.of("trainer", 0) == (-1, 1, 0)
    target.ask()
    world.run()
    assert marks.of("rollout", 0) == (-1, 1, 0) > before
    target.outbox.append(wire.Progress(9))
    world.run()
    target.outbox.append(wire.Progress(4))  # again, from a checkpoint
    world.run()
    assert marks.of("rollout", 0) == (9, 1, 0)
    marks.drop_replicas("rollout", 0)
    assert marks.of("rollout", 0) == before


def test_a_rank_that_joins_only_now_comes_too_late_for_anything() -> None:
    world, (trainer, one) = world_of("trainer/0/0", "rollout/0/0", world_size=2)
    drain(world, "rollout", 0)
    late = world.join("rollout/0/1", world_size=2)
    number = trainer.publish()
    trainer.pack(number)
    world.run(frozen=(late,))
    world.advance(60)
    world.run()
    assert late.held == one.held == set()
    assert late.member not in {state.member for state in world.state.roster.live}
    assert trainer.verdicts[number].receipt is not None, "nobody has waited for it"


def test_one_that_leaves_while_it_finishes_is_not_called_idle() -> None:
    world, (trainer, one, two) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    number = trainer.publish()
    trainer.pack(number)
    world.run(frozen=(two,))
    assert drain(world, "rollout", 1)
    world.lose(two)
    assert world.state.drains.busy("rollout", 1) is None
    world.run()
    assert (idle(world), one.held) == ([], {1})


def test_one_that_has_not_joined_yet_is_draining_when_it_does() -> None:
    world, (trainer,) = world_of("trainer/0/0")
    assert drain(world, "rollout", 0) is None
    late = world.join("rollout/0/0")
    commit(world, trainer)
    assert (idle(world), late.held) == ([], set())


def test_the_transfer_of_others_does_not_hold_it_up() -> None:
    world, (trainer, one, two) = world_of("trainer/0/0", "rollout/0/0", "rollout/1/0")
    assert drain(world, "rollout", 1) is None
    number = trainer.publish()
    trainer.pack(number)
    world.run(frozen=(one,))
    assert world.state.commits.main is not None
    assert world.state.drains.busy("rollout", 1) is None
    assert world.state.drains.busy("rollout", 0) == "version 1 of policy is being transferred"
    assert two.held == set()


def test_a_drain_that_is_over_lets_members_and_those_that_join_take_part_again() -> None:
    world, (trainer, one) = world_of("trainer/0/0", "rollout/0/0")
    drain(world, "rollout", 0)
    world.state.start_new_life("rollout", 0, world.now)
    end = commit(world, trainer)
    assert end.receipt is not None
    assert [member.name for member in end.receipt.members] == ["rollout/0/0"]
    drain(world, "rollout", 0)
    world.lose(one)
    world.state.start_new_life("rollout", 0, world.now)
    world.join("rollout/0/0")
    world.run()
    end = commit(world, trainer)
    assert end.receipt is not None
    assert [member.name for member in end.receipt.members] == ["rollout/0/0"]

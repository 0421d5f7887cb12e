"""A life of a replica is a generation, or each of its ranks once, and not whoever is a
member at the moment. Ranks of it may join when the others have left.

Covers: core/members/history.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import MemberLost
from replicas.core.members.roster import GroupShape
from tests.support.channel_world import SimMember, World, channel_config, peer_config

TWO = {"trainer": GroupShape(world_size=2)}


def publish(world: World, sim: SimMember) -> wire.PublishEnd:
    """Publish, and return the verdict that comes without a further word of others."""
    number = sim.publish()
    sim.pack(number, manifest=None) if sim.member.rank else sim.pack(number)
    world.run()
    return sim.verdicts[number]


def leave(world: World, sim: SimMember) -> None:
    sim.outbox.append(wire.Bye())
    world.run()


def test_a_rank_that_joins_when_the_others_have_published_and_left_gets_their_verdicts() -> None:
    world = World(groups=TWO)
    leader = world.join("trainer/0/0", world_size=2)
    verdicts = [publish(world, leader) for _ in range(2)]
    leave(world, leader)
    late = world.join("trainer/0/1", world_size=2)
    assert [publish(world, late) for _ in range(2)] == verdicts
    assert [decision.version for decision in world.decisions] == [1, 2]


def test_so_it_does_when_each_of_them_joins_twice() -> None:
    world, verdicts = World(groups=TWO), []
    process = {rank: world.join(f"rollout/{rank}/0").hello.process for rank in range(2)}  # some process
    for rank in range(2):
        for _ in range(2):
            sim = world.join(f"trainer/0/{rank}", world_size=2, process=process[rank])
            verdicts.append(publish(world, sim))
            leave(world, sim)
    assert verdicts[:2] == verdicts[2:]


def test_a_generation_that_a_supervisor_has_started_is_one_life_although_a_rank_dies() -> None:
    world = World(groups=TWO)
    leader = world.join("trainer/0/0", world_size=2, proof="shown")
    verdict = publish(world, leader)
    world.lose(leader, "exited")  # without a word, as by os._exit
    assert publish(world, world.join("trainer/0/1", world_size=2, proof="shown")) == verdict
    assert world.join("trainer/0/1", world_size=2, proof="shown", generation=2).publish() == 2


@pytest.mark.parametrize("how", ["generation", "lost", "process"])
def test_the_next_life_counts_on(how: str) -> None:
    """Those that others start have the same generation each time."""
    world = World(groups=TWO)
    leader = world.join("trainer/0/0", world_size=2)
    publish(world, leader)
    if how == "lost":
        world.lose(leader, "exited")
    else:
        leave(world, leader)
    generation = 2 if how == "generation" else 1
    if how == "process":
        leader = world.join("trainer/0/0", world_size=2)
        other = world.join("trainer/0/1", world_size=2)
    else:
        other = world.join("trainer/0/1", world_size=2, generation=generation)
        leader = world.join("trainer/0/0", world_size=2, generation=generation)
    assert publish(world, leader).receipt is not None
    assert publish(world, other) == leader.verdicts[2]


def test_under_a_new_coordinator_a_late_rank_goes_on_with_the_others() -> None:
    world = World(groups=TWO)
    leader = world.join("trainer/0/0", world_size=2)
    publish(world, leader)
    world.restart()
    world.rejoin(leader)
    world.advance(4.0)
    late = world.join("trainer/0/1", world_size=2)
    verdict = publish(world, leader)
    assert publish(world, late) == verdict


def peers() -> World:
    return World(peer_config("all"), {"peer": GroupShape(replicas=2, world_size=2)})


def test_the_ranks_of_a_peer_take_part_in_an_operation_of_all_together() -> None:
    world = peers()
    first = [world.join(f"peer/0/{rank}", world_size=2) for rank in range(2)]
    for rank in range(2):
        world.join(f"peer/1/{rank}", world_size=2)
    world.run()
    for sim in list(world.members.values())[2:]:
        world.lose(sim)
    one = world.join("peer/1/0", world_size=2, generation=2)
    posts = [sim.post("barrier") for sim in (*first, one)]
    world.run()
    assert [member.name for member in first[0].ends[posts[0]].receipt.members] == ["peer/0/0", "peer/0/1"]  # type: ignore[union-attr]  # it succeeds
    assert posts[2] not in one.ends, "it waits for the other rank of its replica"
    other = world.join("peer/1/1", world_size=2, generation=2)
    for sim in (*first, other):
        sim.post("barrier")
    world.run()
    receipts = [sim.ends[sim.posts].receipt for sim in (*first, one, other)]
    assert receipts[0] is not None
    assert receipts == [receipts[0]] * 4
    assert len(receipts[0].members) == 4


def test_a_peer_that_waits_for_its_own_ranks_says_so() -> None:
    world = peers()
    for rank in range(2):
        world.join(f"peer/0/{rank}", world_size=2)
    world.join("peer/1/1", world_size=2)
    world.lose(world.join("peer/1/0", world_size=2))
    for sim in list(world.members.values()):
        world.lose(sim) if sim.member.replica else None
    one = world.join("peer/1/0", world_size=2, generation=2)
    post = one.post("barrier", deadline_s=5.0)
    world.advance(7.0)
    error = one.ends[post].error
    assert error is not None
    assert "peer/1/1" in error.message


def test_what_a_rank_has_loaded_when_it_leaves_is_for_the_others_of_its_life() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "leader"),)))
    trainer = world.join("trainer/0/0")
    ranks = [world.join(f"rollout/0/{rank}", world_size=2) for rank in range(2)]
    publish(world, trainer)
    ranks[0].ask()
    world.run()
    leave(world, ranks[0])
    publish(world, trainer)
    ranks[1].ask()
    world.run()
    assert [sim.granted for sim in ranks] == [[1], [1]]


def proven(world: World, name: str, generation: int) -> SimMember:
    """A rank that a supervisor has started in this generation."""
    return world.join(name, world_size=2, generation=generation, proof="shown")


def test_a_newer_generation_of_a_source_counts_from_one_number_while_the_older_lingers() -> None:
    world = World(groups=TWO)
    old = [proven(world, f"trainer/0/{rank}", 1) for rank in range(2)]
    for sim in old:
        publish(world, sim)
    leader = proven(world, "trainer/0/0", 2)
    verdicts = [publish(world, leader) for _ in range(2)]
    late = proven(world, "trainer/0/1", 2)
    assert [publish(world, late) for _ in range(2)] == verdicts
    assert [verdict.receipt.version for verdict in verdicts if verdict.receipt] == [2, 3]


def test_a_newer_generation_of_a_peer_takes_part_with_all_its_ranks_although_the_older_lingers() -> None:
    world = peers()
    first = [world.join(f"peer/0/{rank}", world_size=2) for rank in range(2)]
    for rank in range(2):
        proven(world, f"peer/1/{rank}", 1)
    world.run()
    one = proven(world, "peer/1/0", 2)
    assert [event.member.name for event in world.events if isinstance(event, MemberLost)] == ["peer/1/0", "peer/1/1"]
    posts = [sim.post("barrier") for sim in (*first, one)]
    world.run()
    assert posts[2] not in one.ends, "it waits for the other rank of its generation"
    receipt = first[0].ends[posts[0]].receipt
    assert receipt is not None
    assert [member.name for member in receipt.members] == ["peer/0/0", "peer/0/1"]


def test_a_newer_generation_may_differ_in_shape_from_the_one_that_lingers() -> None:
    world = World(groups=TWO)
    world.join("trainer/0/1", world_size=2, proof="shown", torch_version="2.9.0")
    sim = world.join("trainer/0/0", world_size=1, generation=2, proof="shown", torch_version="2.10.0")
    assert [member.name for member in world.members] == [sim.member.name]


def test_a_rank_that_others_start_again_belongs_to_the_life_that_goes_on() -> None:
    """Also with a number of its own: the other rank does not join again."""
    world = peers()
    for name in ("peer/0/0", "peer/0/1", "peer/1/0", "peer/1/1"):
        world.join(name, world_size=2)
    world.run()
    world.join("peer/1/0", world_size=2, generation=2)
    posts = {sim: sim.post("barrier") for sim in world.members.values()}
    world.run()
    receipts = [sim.ends[post].receipt for sim, post in posts.items()]
    assert receipts == receipts[:1] * 4
    assert receipts[0] is not None

"""A group of peers that fails although everybody is alive: it is probed in pairs, and
the culprit waits until it works with the others."""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.core.base.effects import MemberQuarantined
from replicas.core.members.roster import GroupShape
from replicas.core.moving.lanes import culprits
from replicas.messages.identity import Member
from tests.support.channel_world import SimMember, World, peer_config


def quarantined(world: World) -> list[str]:
    return [event.member.name for event in world.events if isinstance(event, MemberQuarantined)]


def probes(sim: SimMember) -> int:
    return sum(isinstance(message, wire.LaneForm) and message.probe for message in sim.seen)


def cut_off(world: World, victim: SimMember) -> None:
    """Nothing goes between the victim and anyone."""
    for other in world.members.values():
        if other is not victim:
            world.bad_pairs.add(frozenset((victim.member.name, other.member.name)))


def test_peers_go_on_without_one_that_works_with_nobody_and_try_again_with_it_later() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=4)})
    sims = [world.join(f"peer/{index}/0") for index in range(4)]
    cut_off(world, sims[2])
    posts = [sim.post("all_reduce") for sim in sims]
    world.advance(1.0)
    for sim, post in zip(sims, posts, strict=True):
        end = sim.ends[post]
        if sim is sims[2]:
            assert end.error is not None
            assert "no process group of it works" in end.error.message
        else:
            assert end.receipt is not None
            assert [member.replica for member in end.receipt.members] == [0, 1, 3]
            assert "no process group of it works" in end.receipt.reasons["peer/2/0"]
    assert quarantined(world) == ["peer/2/0"]
    world.bad_pairs.clear()
    world.advance(5.0)
    posts = [sim.post("all_reduce") for sim in sims]
    world.advance(1.0)
    receipts = [sim.ends[post].receipt for sim, post in zip(sims, posts, strict=True)]
    assert all(receipt is not None and len(receipt.members) == 4 for receipt in receipts)
    assert len(world.state.lanes) == 1


def test_in_a_large_group_each_is_probed_with_four_others_and_the_culprit_is_found() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=7)})
    sims = [world.join(f"peer/{index}/0") for index in range(7)]
    cut_off(world, sims[3])
    posts = [sim.post("all_reduce") for sim in sims]
    world.run()
    assert quarantined(world) == ["peer/3/0"]
    assert [probes(sim) for sim in sims] == [4] * 7
    receipts = [sim.ends[post].receipt for sim, post in zip(sims, posts, strict=True) if sim is not sims[3]]
    assert all(receipt is not None and len(receipt.members) == 6 for receipt in receipts)


def members(count: int) -> list[Member]:
    return [Member("rollout", index, 0) for index in range(count)]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ([], []),
        ([(0, 1)], [1]),
        ([(0, 2), (1, 2), (2, 3)], [2]),
        ([(0, 1), (0, 2), (0, 3)], [0]),
        ([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)], [0, 1]),
    ],
)
def test_the_fewest_members_explain_the_bad_pairs(bad: list[tuple[int, int]], expected: list[int]) -> None:
    who = members(4)
    found = culprits(who, {(who[a], who[b]): "refused" for a, b in bad})
    assert sorted(member.replica for member in found) == expected


def test_a_peer_that_dies_while_it_is_tried_leaves_no_lane_behind() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=4)})
    sims = [world.join(f"peer/{index}/0") for index in range(4)]
    cut_off(world, sims[2])
    for sim in sims:
        sim.post("all_reduce")
    world.advance(0.5)
    assert quarantined(world) == ["peer/2/0"]
    for _ in range(20):
        if len(world.state.lanes) > 1:
            break
        world.advance(0.5, frozen=tuple(sims))
    assert len(world.state.lanes) > 1
    world.lose(sims[2])
    world.run()
    assert len(world.state.lanes) == 1
    assert len(world.swept) == len(set(world.swept))

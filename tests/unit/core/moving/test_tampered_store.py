"""Somebody who is no member writes into the store: no member is to blame, and a new
store takes its place.

Covers: core/operations/lanes.py.
"""

from __future__ import annotations

import pytest

from replicas.core.base.effects import Effect, MemberLost
from replicas.core.members.roster import GroupShape
from replicas.core.operations.lanes import SECRET_NBYTES, Lanes
from replicas.messages import LaneForm
from tests.support.channel_world import SimMember, World, channel_config, peer_config

STORE = ("127.0.0.1", 1)


def peers(count: int = 3) -> tuple[World, list[SimMember]]:
    world = World(peer_config(), {"peer": GroupShape(replicas=count)})
    return world, [world.join(f"peer/{replica}/0") for replica in range(count)]


def left_out(world: World) -> list[str]:
    return [event.member.name for event in world.events if isinstance(event, MemberLost)]


def new_store(world: World) -> None:
    world.store = (world.store[0], world.store[1] + 1)
    world.state.store_moved(world.now)
    world.advance(0.5)


def ends(sims: list[SimMember], posts: list[int]) -> list[str]:
    found = [sim.ends.get(post) for sim, post in zip(sims, posts, strict=True)]
    return ["" if end is None else "ok" if end.error is None else end.error.kind for end in found]


def test_peers_go_on_over_a_new_store() -> None:
    world, sims = peers()
    world.tampering = True
    posts = [sim.post("all_reduce") for sim in sims]
    world.advance(0.5)
    assert world.replaced == [STORE]  # once, though each of them says so
    assert ends(sims, posts) == [""] * 3
    world.tampering = False
    new_store(world)
    assert ends(sims, posts) == ["ok"] * 3
    assert left_out(world) == []


def test_peers_are_all_there_after_a_store_that_never_comes_clean() -> None:
    world, sims = peers()
    world.tampering = True
    posts = [sim.post("all_reduce", deadline_s=30.0) for sim in sims]
    for _ in range(11):
        world.advance(2.5)
        new_store(world)
    assert len(world.replaced) > 5
    assert ends(sims, posts) == ["DeadlineExceeded"] * 3
    assert left_out(world) == []
    world.tampering = False
    again = [sim.post("all_reduce") for sim in sims]
    world.advance(0.5)
    assert ends(sims, again) == ["ok"] * 3


@pytest.mark.parametrize("comes_clean", [True, False])
def test_nobody_is_left_out_of_a_publish(comes_clean: bool) -> None:
    """Who waits for a lane pulls once there is another store, or its time to form is
    over."""
    world = World(channel_config(transport="group"), {"rollout": GroupShape(replicas=2)})
    trainer = world.join("trainer/0/0", machine="a")
    rollouts = [world.join(f"rollout/{replica}/0", machine=f"host-{replica}") for replica in range(2)]
    world.advance(0.5)
    world.tampering = True
    number = trainer.publish(deadline_s=30.0)
    trainer.pack(number)
    world.advance(1.0)
    assert world.replaced
    assert not trainer.verdicts
    if comes_clean:
        world.tampering = False
        new_store(world)
    else:
        world.advance(8.0)  # longer than a lane may take to form
    assert trainer.verdicts[number].error is None
    assert all(1 in rollout.held for rollout in rollouts)
    assert left_out(world) == []


def test_a_store_that_is_down_says_nothing_of_members_either() -> None:
    """While it is being replaced nobody can reach it."""
    world, sims = peers()
    world.state.lanes.store_lost()
    world.refused_by_store = True
    posts = [sim.post("all_reduce", deadline_s=60.0) for sim in sims]
    world.advance(25.0)
    assert ends(sims, posts) == [""] * 3
    assert left_out(world) == []
    world.refused_by_store = False
    new_store(world)
    assert ends(sims, posts) == ["ok"] * 3
    assert left_out(world) == []


def test_each_lane_has_a_secret_of_its_own() -> None:
    def forms(secret: bytes) -> list[LaneForm]:
        world, sims = peers()
        states = [state for state in world.state.roster if state.live]
        assert len(states) == len(sims)
        world.state.roster.epoch = 1
        out: list[Effect] = []
        lanes = Lanes(world.state.roster, out, run="run", term=1, store=lambda: STORE, secret=secret)
        for _ in range(2):
            lanes.open(states, "gloo", 0.0, 5.0)
        return [message for effect in out if isinstance(message := getattr(effect, "message", None), LaneForm)]

    first, other = forms(b"a" * SECRET_NBYTES), forms(b"b" * SECRET_NBYTES)
    assert [len({form.group.secret for form in first if form.lane == lane}) for lane in ("1.1", "1.2")] == [1, 1]
    assert len({form.group.secret for form in first + other}) == 4
    assert {len(form.group.secret) for form in first} == {SECRET_NBYTES}

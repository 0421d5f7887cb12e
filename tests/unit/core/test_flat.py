"""Nothing piles up in a channel's state: many rounds leave as many objects as few."""

from __future__ import annotations

import gc
import types
from collections import Counter

import pytest

from replicas import messages as wire
from replicas.core.channel_state import ChannelState
from replicas.core.operations import matching
from tests.support.channel_world import World, peer_config

WARM_UP, ROUNDS = 60, 160
KEPT = 32
"""In place of 256, so that the warm-up fills the longest list that is kept: verdicts of
operations."""
SHARED = (
    int,
    float,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
)


def census(state: ChannelState) -> Counter[str]:
    """Objects that can be reached from a channel's state, by type, and what its
    containers hold."""
    seen: set[int] = set()
    found: Counter[str] = Counter()
    todo: list[object] = [state]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, SHARED):
            continue
        seen.add(id(one))
        found[type(one).__name__] += 1
        if isinstance(one, list | dict | set | frozenset | tuple):
            found["items"] += len(one)
        todo += gc.get_referents(one)
    return found


def growth(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    return {name: number - before[name] for name, number in after.items() if number - before[name] > 20}


def weights_round(world: World, index: int) -> None:
    """A publish, a member that comes, is served and goes in one of four ways, and a
    source that comes back."""
    trainer = next(sim for sim in world.members.values() if sim.member.name == "trainer/0/0")
    steady = next(sim for sim in world.members.values() if sim.member.name == "rollout/0/0")
    guest = world.join("rollout/1/0", generation=index)
    guest.ask()
    steady.ask()
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    guest.mute = index % 4 == 1
    trainer.pack(trainer.publish())
    world.run()
    if index % 4 == 2:
        world.join("rollout/1/0", generation=index)
    if index % 5 == 3:
        world.lose(trainer)
        world.join("trainer/0/0", generation=index)
    for sim in [sim for sim in world.members.values() if sim.member.replica == 1]:
        world.lose(sim, "left" if index % 4 == 3 else "exited")
    for sim in world.members.values():  # slots are few: older versions make room
        for version in sorted(sim.held)[:-2]:
            sim.held.discard(version)
            sim.outbox.append(wire.Dropped(version))
    world.advance(1.0)
    world.events.clear()
    world.swept.clear()


@pytest.mark.slow
def test_a_channel_of_weights_stays_as_small_as_it_is() -> None:
    world = World()
    world.join("trainer/0/0")
    world.join("rollout/0/0")
    for index in range(1, WARM_UP):
        weights_round(world, index)
    before = census(world.state)
    for index in range(WARM_UP, ROUNDS):
        weights_round(world, index)
    assert world.decisions[-1].version > ROUNDS
    assert growth(before, census(world.state)) == {}


def test_a_channel_of_peers_stays_as_small_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "KEPT_VERDICTS", KEPT)
    world = World(peer_config())
    steady = [world.join(f"peer/{index}/0") for index in range(2)]

    def play(index: int) -> None:
        guest = world.join("peer/2/0", generation=index)
        for sim in (*steady, guest):
            sim.post("all_reduce")
        guest.mute = index % 3 == 1
        world.run()
        if index % 4 == 2:
            steady[0].post("send", root="peer/1/0")
            steady[1].post("recv", root="peer/0/0")
        steady[0].post("all_reduce", step=index, deadline_s=0.5)
        world.run()
        world.lose(guest, "left" if index % 2 else "exited")
        steady[1].post("all_reduce", step=index, deadline_s=0.5)
        world.advance(2.0)
        world.events.clear()
        world.swept.clear()

    for index in range(1, KEPT + WARM_UP):
        play(index)
    before = census(world.state)
    for index in range(KEPT + WARM_UP, KEPT + ROUNDS):
        play(index)
    assert growth(before, census(world.state)) == {}

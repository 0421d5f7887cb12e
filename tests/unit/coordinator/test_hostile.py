"""A member that holds the token and says anything at any time: it may spoil its own
day, and nobody else's.

Covers: messages/from_coordinator.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas import errors
from replicas import messages as wire
from tests.support.channel.hostile import any_hello, any_message
from tests.support.channel_world import SimMember, World, peer_config

SOME = st.lists(st.tuples(st.sampled_from(["say", "say", "say", "run", "time"]), any_message()), max_size=15)


def hostile(world: World, name: str) -> SimMember:
    """A member that is alive and ignores what it is told."""
    bad = world.join(name)
    bad.mute = True
    bad.handle = lambda message: None  # type: ignore[method-assign]  # the simulated rank checks what it is told
    return bad


def play(world: World, bad: SimMember, history: list[tuple[str, wire.FromMember]]) -> None:
    """Its messages, with what the others do and time in between."""
    for step, message in history:
        if step == "say" and bad.member in world.members:
            bad.outbox.append(message)
            world.up(bad)
        elif step == "run":
            world.run(frozen=(bad,))
        else:
            world.advance(1.0)
    world.run(frozen=(bad,))


@settings(max_examples=5, deadline=None)
@given(SOME, SOME)
def test_a_hostile_target(before: list[tuple[str, wire.FromMember]], during: list[tuple[str, wire.FromMember]]) -> None:
    world = World()
    trainer, good = world.join("trainer/0/0"), world.join("rollout/0/0")
    bad = hostile(world, "rollout/1/0")
    play(world, bad, before)
    number = trainer.publish()
    trainer.pack(number)
    good.ask()
    play(world, bad, during)
    world.advance(61.0)
    assert number in trainer.verdicts, "a publish without a verdict"
    world.lose(bad)
    last = trainer.publish()
    trainer.pack(last)
    world.advance(40.0)
    receipt = trainer.verdicts[last].receipt
    assert receipt is not None, trainer.verdicts[last].error
    assert good.commits[-1] == receipt.version
    good.ask()
    world.advance(5.0)
    assert good.granted[-1] == receipt.version


@settings(max_examples=5, deadline=None)
@given(SOME, SOME)
def test_a_hostile_second_source(
    before: list[tuple[str, wire.FromMember]], during: list[tuple[str, wire.FromMember]]
) -> None:
    world = World()
    trainer, good = world.join("trainer/0/0"), world.join("rollout/0/0")
    bad = hostile(world, "trainer/1/0")
    play(world, bad, before)
    number = trainer.publish()
    trainer.pack(number)
    play(world, bad, during)
    world.advance(200.0)
    assert number in trainer.verdicts, "a publish without a verdict"
    world.lose(bad)
    world.run()
    last = trainer.publish()
    trainer.pack(last)
    world.advance(40.0)
    receipt = trainer.verdicts[last].receipt
    assert receipt is not None or "manifest" in str(trainer.verdicts[last].error), trainer.verdicts[last].error
    if receipt is not None:
        assert good.commits[-1] == receipt.version


@settings(max_examples=5, deadline=None)
@given(SOME, SOME)
def test_a_hostile_peer(before: list[tuple[str, wire.FromMember]], during: list[tuple[str, wire.FromMember]]) -> None:
    world = World(peer_config())
    good = [world.join(f"peer/{index}/0") for index in range(2)]
    bad = hostile(world, "peer/2/0")
    play(world, bad, before)
    posts = [(sim, sim.post("all_reduce")) for sim in good]
    play(world, bad, during)
    world.advance(61.0)
    for sim, post in posts:
        assert post in sim.ends, "an operation without an end"
    world.lose(bad)
    again = [(sim, sim.post("all_reduce")) for sim in good]
    world.advance(10.0)
    for sim, post in again:
        assert sim.ends[post].receipt is not None, sim.ends[post].error


@settings(max_examples=8, deadline=None)
@given(st.lists(any_hello(), max_size=6), st.booleans())
def test_hellos_that_lie(hellos: list[wire.Hello], published: bool) -> None:
    """Each is taken or refused with an error of ours, and the channel goes on without
    them."""
    world = World()
    if published:
        first = world.join("trainer/0/0")
        world.join("rollout/0/0")
        first.pack(first.publish())
        world.run()
    for hello in hellos:
        try:
            state, _ = world.state.join(hello, "127.0.0.1", world.now)
        except errors.ReplicasError:
            continue
        world.state.welcome(state, 0)
        world.advance(0.5)
    for state in list(world.state.roster):
        world.state.lose(state.member, "exited", world.now)
    world.advance(30.0)
    world.members.clear()
    trainer, good = world.join("trainer/0/0"), world.join("rollout/0/0")
    number = trainer.publish()
    trainer.pack(number)
    world.advance(10.0)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None, trainer.verdicts[number].error
    assert good.commits[-1] == receipt.version


@pytest.mark.parametrize("version", [3, 10**12])
def test_nobody_can_have_loaded_what_was_never_committed(version: int) -> None:
    """A watch of another member must not be answered by a lie."""
    world = World()
    trainer, bad = world.join("trainer/0/0"), world.join("rollout/0/0")
    trainer.outbox.append(wire.WatchLoaded(1, 3))
    world.run()
    bad.outbox.append(wire.Loaded(version, 0.0))
    world.run()
    assert not [message for message in trainer.seen if isinstance(message, wire.WatchEnd)]
    assert world.state.load_rounds.of("rollout", 0).loaded == 0

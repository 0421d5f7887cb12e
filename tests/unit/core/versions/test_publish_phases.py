"""Where the time of a publish goes: to the rank, target or disk that it waited for.

Covers: core/versions/publishes.py, core/base/effects.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import Effect, Send, SyncEnded, with_commit
from replicas.core.members.roster import GroupShape
from replicas.messages.identity import Member
from replicas.status import SyncRecord
from tests.support.channel_world import SimMember, World, channel_config

ALL = channel_config(sources=(ChannelRole("trainer", "all"),))
TWO = {"trainer": GroupShape(world_size=2)}


def record(world: World) -> SyncRecord:
    (found,) = [event.record for event in world.events if isinstance(event, SyncEnded)]
    assert found.seconds == pytest.approx(sum(found.phases.values()), abs=0.3), found.phases
    return found


def longest(found: SyncRecord) -> str:
    return max(found.phases, key=lambda name: found.phases[name])


@pytest.mark.parametrize("machine", ["a", "b"], ids=["mapping", "pulling"])
def test_a_frozen_target_is_named_and_not_the_disk(machine: str) -> None:
    world = World(channel_config(transport="tcp"))
    trainer = world.join("trainer/0/0", machine="a", address="10.0.0.1")
    world.join("rollout/0/0", machine="a", address="10.0.0.1")
    frozen = world.join("rollout/1/0", machine=machine, address="10.0.0.1" if machine == "a" else "10.0.0.2")
    world.run()
    trainer.pack(trainer.publish())
    world.run(frozen=(frozen,))
    world.advance(6.0, frozen=(frozen,))
    found = record(world)
    assert (found.outcome, found.lost, found.slowest) == ("committed", ("rollout/1/0",), "rollout/1/0")
    assert longest(found) == "acknowledge"
    assert found.phases["acknowledge"] > 2.0
    assert found.phases["commit"] == 0.0
    assert trainer.receipt(1).phases == found.phases


def test_a_target_that_answers_last_is_the_slowest() -> None:
    world = World()
    trainer = world.join("trainer/0/0", machine="a")
    slow, _ = world.join("rollout/0/0", machine="a"), world.join("rollout/1/0", machine="a")
    world.run()
    trainer.pack(trainer.publish())
    world.run(frozen=(slow,))
    world.advance(0.5, frozen=(slow,))
    world.run()
    found = record(world)
    assert (found.lost, found.slowest) == ((), "rollout/0/0")
    assert found.phases["acknowledge"] == pytest.approx(0.5, abs=0.15)


def both(world: World) -> tuple[SimMember, SimMember]:
    first, second = (world.join(f"trainer/0/{rank}", world_size=2) for rank in (0, 1))
    world.join("rollout/0/0")
    world.run()
    return first, second


def test_a_rank_that_calls_late() -> None:
    world = World(ALL, TWO)
    first, second = both(world)
    first.pack(first.publish(), manifest=None)
    world.run()
    world.advance(3.0)
    second.pack(second.publish())
    world.run()
    assert longest(found := record(world)) == "begin"
    assert found.phases["begin"] == pytest.approx(3.0, abs=0.15)


def test_a_rank_that_gathers_long_before_it_has_a_slot() -> None:
    world = World(ALL, TWO)
    first, second = both(world)
    first.pack(first.publish(), manifest=None)
    number = second.publish()
    world.run()
    world.advance(3.0)
    second.pack(number)
    world.run()
    assert longest(found := record(world)) == "pack"
    assert found.phases["pack"] == pytest.approx(3.0, abs=0.25)


def test_targets_that_have_not_joined() -> None:
    world = World(channel_config(min_targets=2))
    trainer, _ = world.join("trainer/0/0"), world.join("rollout/0/0")
    trainer.pack(trainer.publish())
    world.advance(3.0)
    world.join("rollout/1/0")
    world.advance(0.5)
    assert longest(record(world)) == "queue"


def test_a_slot_that_is_filled_while_it_is_sent() -> None:
    world = World(channel_config(transport="tcp"))
    trainer = world.join("trainer/0/0", machine="a", address="10.0.0.1")
    world.join("rollout/0/0", machine="a", address="10.0.0.1")
    frozen = world.join("rollout/1/0", machine="b", address="10.0.0.2")
    world.run()
    number = trainer.publish()
    world.run()
    trainer.stream(number)
    world.run(frozen=(frozen,))
    world.advance(1.0)
    trainer.fill(number)
    world.run()
    assert record(world).phases["acknowledge"] == pytest.approx(0.0, abs=0.15), "the targets waited for the source"


@pytest.mark.parametrize(("error", "phase"), [("wait", "wait"), ("pack", "pack"), ("elsewhere", "pack")])
def test_a_failure_is_in_the_phase_that_its_error_names(error: str, phase: str) -> None:
    world = World()
    trainer, _ = world.join("trainer/0/0"), world.join("rollout/0/0")
    number = trainer.publish()
    world.run()
    world.advance(3.0)
    trainer.outbox.append(wire.PackFailed(number, wire.WireError("Busy", "no free slot", phase=error)))
    world.run()
    assert longest(record(world)) == phase


def test_a_rank_that_never_calls() -> None:
    world = World(ALL, TWO)
    first, _ = both(world)
    first.pack(first.publish(deadline_s=3.0))
    world.advance(4.0)
    assert longest(record(world)) == "begin"


def test_the_write_of_the_decision_is_the_commit_alone() -> None:
    phases, members = {"acknowledge": 1.0, "commit": 0.0}, (Member("rollout", 0, 0),)
    receipt = wire.ReceiptData(
        epoch=1, members=members, lost=(), nbytes=1, seconds=1.0, phases=phases, version=4, digest="d"
    )
    ended = SyncRecord(version=4, outcome="committed", seconds=1.0, nbytes=1, phases=phases)
    others: list[Effect] = [
        Send(members[0], wire.Commit(4, "d")),
        SyncEnded("policy", SyncRecord(version=5, outcome="committed", seconds=1.0, nbytes=1, phases=phases)),
        SyncEnded("policy", SyncRecord(version=4, outcome="busy", seconds=1.0, nbytes=1, phases=phases)),
        Send(members[0], wire.PublishEnd(1, error=wire.WireError("Busy", "x"))),
    ]
    end, told, *rest = with_commit(
        [Send(members[0], wire.PublishEnd(1, receipt)), SyncEnded("policy", ended), *others], 4, 0.5
    )
    assert rest == others
    assert isinstance(end, Send)
    assert isinstance(end.message, wire.PublishEnd)
    assert end.message.receipt is not None
    assert isinstance(told, SyncEnded)
    for one in (end.message.receipt, told.record):
        assert (one.seconds, one.phases) == (1.5, {"acknowledge": 1.0, "commit": 0.5})

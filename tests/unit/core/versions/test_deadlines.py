"""What the verdict of a publish says when its deadline has passed, or another reason
ended it before all was done."""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import Read
from replicas.core.base.manifest import PartManifest, TensorSpec
from tests.support.channel_world import SimMember, World, channel_config


class Unready(SimMember):
    """One that never has a slot to receive into."""

    def _answer(self, message: wire.FromCoordinator) -> None:
        if not isinstance(message, wire.TransferOffer):
            super()._answer(message)


class SlowReader(World):
    """A coordinator that has not read any manifest yet."""

    def _read(self, effect: Read) -> None:
        self.unread = effect


def publish(trainer: SimMember, deadline_s: float) -> int:
    number = trainer.publish(deadline_s=deadline_s)
    trainer.pack(number)
    return number


def test_members_that_have_not_come_back_to_a_new_coordinator() -> None:
    world = World()
    trainer, _ = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(trainer, 60.0)
    world.run()
    world.restart()
    world.rejoin(trainer)
    world.run()
    trainer.outbox.append(wire.PublishBegin(2, 2, 1.0, resumed=True))
    trainer.pack(2)
    world.advance(2.0)
    error = trainer.error(2)
    assert (error.kind, error.phase) == ("DeadlineExceeded", "queue")
    assert "reconnect" in error.message


@pytest.mark.parametrize("packed", [True, False])
def test_a_version_that_was_committed_before_the_coordinator_was_replaced(packed: bool) -> None:
    """Its source comes back so late that its time is up before all others are back: it
    must not be told that a version has failed that targets serve."""
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(trainer, 60.0)
    world.run()
    assert target.commits == [1]
    world.restart()
    world.rejoin(trainer)
    world.run()
    trainer.verdicts.clear()
    trainer.outbox.append(wire.PublishBegin(1, 1, 1.0, resumed=True))
    if packed:
        trainer.pack(1)
    world.advance(4.0)
    receipt = trainer.verdicts[1].receipt
    assert receipt is not None, trainer.verdicts[1].error
    assert receipt.version == 1


def test_a_manifest_that_is_still_being_read() -> None:
    world = SlowReader()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    number = publish(trainer, 3.0)
    world.advance(4.0)
    error = trainer.error(number)
    assert (error.kind, error.phase) == ("DeadlineExceeded", "queue")
    assert "its list of tensors" in error.message
    assert not any(isinstance(message, wire.TransferOffer) for message in target.seen)


def test_an_earlier_version_that_is_not_done() -> None:
    world = World(channel_config(on_lost="raise"))
    first, second, target = world.join("trainer/0/0"), world.join("trainer/1/0"), world.join("rollout/0/0")
    target.mute = True
    publish(first, 60.0)
    world.run()
    number = publish(second, 2.0)
    world.advance(3.0)
    error = second.error(number)
    assert (error.kind, error.phase) == ("Busy", "queue")
    assert not first.verdicts


def test_a_target_that_has_no_slot_free() -> None:
    world = World()
    world.member_type = Unready
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    trainer._answer = lambda message: SimMember._answer(trainer, message)  # type: ignore[method-assign]  # it is ready
    number = publish(trainer, 5.0)
    world.advance(6.0)
    error = trainer.error(number)
    assert (error.kind, error.phase, error.members) == ("Busy", "offer", (target.member.name,))


def with_an_open_update() -> tuple[World, SimMember]:
    """Version 2 is the newest, and one of two targets beside the source has version 1
    open."""
    world = World(machine="a")
    trainer = world.join("trainer/0/0", machine="a")
    reader, other = world.join("rollout/1/0", machine="a"), world.join("rollout/0/0", machine="a")
    reader.loads = False
    for _ in range(2):
        reader.ask()
        world.run()
        publish(trainer, 60.0)
        world.run()
    assert (reader.held, other.held) == ({1, 2}, {2})
    return world, trainer


def test_a_source_without_a_free_slot_hears_who_has_its_memory() -> None:
    world, trainer = with_an_open_update()
    number = trainer.publish()
    busy = wire.WireError("Busy", "no free slot for version 3", members=("trainer/0/0",))
    trainer.outbox.append(wire.PackFailed(number, busy))
    world.run()
    error = trainer.error(number)
    assert (error.kind, error.members) == ("Busy", ("rollout/1/0",))
    assert error.message == "no free slot for version 3; rollout/1/0 has version 1"


def test_a_failure_of_another_kind_blames_no_reader() -> None:
    world, trainer = with_an_open_update()
    number = trainer.publish()
    trainer.outbox.append(wire.PackFailed(number, wire.WireError("NoCapacity", "no memory")))
    world.run()
    assert trainer.error(number).message == "no memory"


def test_a_target_without_a_free_slot_hears_who_has_its_memory() -> None:
    """It has received for its host, where another target has an older version open."""
    world = World(channel_config(on_lost="raise"))
    trainer, holder, reader = world.join("trainer/0/0"), *(world.join(f"rollout/{n}/0", machine="b") for n in (0, 1))
    reader.loads, holder.assigned = False, 1
    for _ in range(2):
        reader.ask()
        world.run()
        publish(trainer, 60.0)
        world.run()
    holder.mute = True  # it has no slot free
    number = publish(trainer, 5.0)
    world.advance(6.0)
    error = trainer.error(number)
    assert (error.kind, error.phase) == ("Busy", "offer")
    assert "rollout/1/0 has version 1" in error.message


def test_the_deadline_commits_what_some_targets_have() -> None:
    world = World()
    trainer = world.join("trainer/0/0", machine="a")
    near, far = world.join("rollout/0/0", machine="a"), world.join("rollout/1/0", machine="b")
    world.run()
    far.stuck = far.quiet = trainer.stuck = trainer.quiet = True
    number = publish(trainer, 1.0)
    world.advance(2.0)
    receipt = trainer.receipt(number)
    assert receipt.members == (near.member,)
    assert receipt.reasons == {"rollout/1/0": "it had not received all of it by the deadline"}
    assert near.commits == far.commits == [1]
    assert far.held == set()


def test_the_first_of_two_ranks_that_could_not_pack_gives_the_reason() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)))
    ranks = [world.join(f"trainer/0/{rank}", world_size=2) for rank in range(2)]
    numbers = [rank.publish() for rank in ranks]
    world.run()
    for rank, number in zip(ranks, numbers, strict=True):
        rank.outbox.append(wire.PackFailed(number, wire.WireError("NoCapacity", f"none left at {rank.member.rank}")))
    world.run()
    errors = [rank.error(number) for rank, number in zip(ranks, numbers, strict=True)]
    assert {error.message for error in errors} == {"none left at 0"}
    assert world.state.commits.publishes.without_verdict() == []


def test_a_publish_of_which_no_rank_has_bytes() -> None:
    world = World()
    trainer = world.join("trainer/0/0")
    number = trainer.publish()
    trainer.pack(number, manifest=None)
    world.run()
    error = trainer.error(number)
    assert (error.kind, error.message) == ("InternalError", "publish 1 of trainer/0 has no bytes")
    assert world.decisions == []


def test_a_version_that_its_only_holder_dropped_before_it_was_full() -> None:
    world = World()
    trainer = world.join("trainer/0/0")
    number = trainer.publish()
    world.run()
    trainer.stream(number)
    world.run()
    trainer.outbox.append(wire.Dropped(1))
    trainer.outbox.append(wire.Filled(number, 0.1, "digest-1", 0.01, wire.SlotPlace(1, 3, 1, 16, 1)))
    world.run()
    error = trainer.error(number)
    assert (error.kind, error.phase) == ("PeersLost", "commit")
    assert (world.decisions, world.aborted) == ([], {1})


def test_a_slot_that_is_full_before_any_target_is_there() -> None:
    world = World(channel_config(min_targets=1))
    trainer = world.join("trainer/0/0", machine="a")
    number = trainer.publish()
    world.run()
    trainer.stream(number)
    world.run()
    trainer.fill(number)
    world.run()
    assert not trainer.verdicts
    target = world.join("rollout/0/0", machine="b")
    world.run()
    receipt = trainer.receipt(number)
    assert (receipt.digest, target.held) == ("digest-1", {1})


@pytest.mark.parametrize("fault", ["early", "twice"])
def test_who_says_that_it_has_a_version_before_it_was_sent_is_not_believed(fault: str) -> None:
    """In a process group all go on together; who pulls may be done at any time."""
    world = World(channel_config(transport="group"))
    world.member_type = Unready
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    number = publish(trainer, 30.0)
    world.run()
    offer = next(message for message in target.seen if isinstance(message, wire.TransferOffer))
    for _ in range(1 + (fault == "twice")):
        target.outbox.append(wire.TransferDone(offer.transfer, "digest-1", 0.1, 0.01))
    world.run()
    assert [state.member for state in world.state.roster.holders.of(1)] == [trainer.member]
    assert number not in trainer.verdicts


def test_a_manifest_of_many_pieces_is_asked_for_window_by_window() -> None:
    large = PartManifest(tuple(TensorSpec(f"layers.{index}.weight", "float32", (4,)) for index in range(6000)))
    world = World()
    trainer, _ = world.join("trainer/0/0"), world.join("rollout/0/0")
    number = trainer.publish()
    trainer.pack(number, manifest=large)
    world.run()
    assert trainer.receipt(number)
    asks = [message.offset for message in trainer.seen if isinstance(message, wire.ManifestAsk)]
    assert len(asks) > 1
    assert asks == sorted(set(asks))
    assert asks[0] == 0
    assert len(large.encode()) > asks[-1]

"""Manifests as the coordinator sees them: fetched, read beside the loop, refused; and
members that read them slowly."""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base import manifest as manifest_module
from replicas.core.base.manifest import PartManifest, Piece, TensorSpec
from replicas.core.members.roster import GroupShape
from replicas.core.versions.fetching import Cache, pieces
from replicas.core.versions.recovery import RECOVERY_S
from tests.support.channel_world import MANIFEST, SimMember, World, channel_config

OTHER = PartManifest(tensors=(TensorSpec("other", "float32", (4,)),))


def new_manifest(trainer: SimMember, manifest: PartManifest) -> int:
    """A publish that may have other tensors than the one before."""
    number = trainer.publish()
    begin = trainer.outbox.pop()
    assert isinstance(begin, wire.PublishBegin)
    trainer.outbox.append(wire.PublishBegin(begin.publish, begin.version, begin.deadline_s, new_manifest=True))
    trainer.pack(number, manifest=manifest)
    return number


def committed(trainer: SimMember, number: int) -> bool:
    return trainer.verdicts[number].receipt is not None


def test_a_manifest_is_fetched_once_and_again_when_it_was_thrown_away() -> None:
    world = World()
    trainer, _ = world.join("trainer/0/0"), world.join("rollout/0/0")
    world.state.commits.manifests._encoded = Cache(1)  # only the newest is kept
    for manifest, asked in [(MANIFEST, 1), (MANIFEST, 1), (OTHER, 2), (MANIFEST, 3), (MANIFEST, 3), (OTHER, 4)]:
        number = new_manifest(trainer, manifest)
        world.run()
        assert committed(trainer, number)
        assert sum(isinstance(message, wire.ManifestAsk) for message in trainer.seen) == asked


def test_what_was_packed_waits_for_its_manifest_and_what_is_said_of_it_behind_it() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="b")
    world.run()
    number = trainer.publish()
    world.run()
    trainer.stream(number)
    trainer.fill(number)
    while world.up(trainer):  # Packed and Filled, and the manifest is not there yet
        pass
    assert not world.state.commits.publishes.queue
    world.run()
    assert committed(trainer, number)
    assert target.held == {1}


@pytest.mark.parametrize("answer", [b"", b"something else"])
def test_a_manifest_that_cannot_be_had_fails_its_publish_and_no_other(answer: bytes) -> None:
    world = World()
    bad, good, _ = world.join("trainer/0/0"), world.join("trainer/1/0"), world.join("rollout/0/0")
    number = bad.publish()
    bad.pack(number)
    bad.manifests = {MANIFEST.hash: answer}
    other = good.publish()
    good.pack(other)
    world.run()
    error = bad.error(number)
    assert (error.kind, "trainer/0/0" in error.message) == ("ManifestMismatch", True)
    assert committed(good, other)
    bad.pack(again := bad.publish())
    world.run()
    assert committed(bad, again)


def test_parts_that_are_too_large_together_fail_their_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's own is small enough for it to say so."""
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)))
    world.groups["trainer"] = GroupShape(1, 2)
    ranks = [world.join(f"trainer/0/{rank}", world_size=2) for rank in range(2)]
    world.join("rollout/0/0")
    specs = [TensorSpec(f"{rank}" * 100, "float32", (4,)) for rank in range(2)]
    parts = [PartManifest((spec,), (), (Piece(0, (0,), (4,), 0),)) for spec in specs]
    monkeypatch.setattr(manifest_module, "MANIFEST_NBYTES", max(part.encoded_nbytes for part in parts))
    for expected in ("ManifestMismatch", ""):
        numbers = [rank.publish() for rank in ranks]
        for rank, number, part in zip(ranks, numbers, parts, strict=True):
            rank.pack(number, manifest=part)
        world.run()
        for rank, number in zip(ranks, numbers, strict=True):
            error = rank.verdicts[number].error
            assert (error.kind if error is not None else "") == expected
        monkeypatch.undo()


def test_a_holder_whose_manifest_is_of_no_use_is_not_asked_again() -> None:
    """A new coordinator has it from the next one."""
    world = World()
    trainer = world.join("trainer/0/0")
    targets = [world.join(f"rollout/{index}/0") for index in range(2)]
    trainer.pack(trainer.publish())
    world.run()
    sims = world.restart()
    for sim in sims:
        if sim in targets:
            world.rejoin(sim)
    bad, good = targets
    handle = bad.handle

    def handle_badly(message: wire.FromCoordinator) -> None:
        if isinstance(message, wire.ManifestAsk):
            bad.outbox.append(wire.ManifestPiece(message.manifest_hash, 0, 3, b"bad"))
        else:
            handle(message)

    bad.handle = handle_badly  # type: ignore[method-assign]  # it has gone mad
    world.advance(2 * RECOVERY_S)
    late = world.join("rollout/2/0")
    world.advance(5.0)
    assert any(isinstance(message, wire.Describe) for message in good.seen)
    assert late.held == {1}


@pytest.mark.parametrize(("deadline_s", "left_behind"), [(12.0, True), (60.0, False)])
def test_who_reads_a_manifest_too_slowly_is_left_behind_at_once(deadline_s: float, left_behind: bool) -> None:
    """One that will have it in half of the time is waited for; the others do not wait
    for one that will not."""
    world = World(groups={"rollout": GroupShape(2)})
    trainer = world.join("trainer/0/0", machine="a")
    slow, _ = (world.join(f"rollout/{index}/0", machine="a") for index in range(2))
    world.run()
    slow.mute = True
    number = trainer.publish(deadline_s=deadline_s)
    trainer.pack(number)
    world.run()
    encoded = MANIFEST.whole.encode()
    began = world.now
    for offset in range(0, len(encoded), len(encoded) // 17):  # it takes 17 s
        slow.outbox.append(wire.ManifestAsk(MANIFEST.whole.hash, offset, 1))
        world.advance(1.0)
        if number in trainer.verdicts:
            break
    else:
        offer = next(message for message in reversed(slow.seen) if isinstance(message, wire.TransferOffer))
        slow.mute = False
        slow.handle(offer)
        world.run()
    receipt = trainer.receipt(number)
    assert receipt.lost == (("rollout/0/0",) if left_behind else ())
    assert (world.now - began <= 4.0) == left_behind
    assert all(len(piece.data) == 1 for piece in slow.seen if isinstance(piece, wire.ManifestPiece))


def test_who_asks_for_what_is_not_known_is_told() -> None:
    world = World()
    target = world.join("rollout/0/0")
    world.run()
    ask = wire.ManifestAsk("no such", 0, 100)
    target.outbox.append(ask)
    world.run()
    assert target.seen[-1] == pieces(ask, None)[0]


def test_a_manifest_that_is_no_good_fails_no_publish_that_waits_for_another_one() -> None:
    world = World()
    bad, good, _ = world.join("trainer/0/0"), world.join("trainer/1/0"), world.join("rollout/0/0")
    world.run()
    numbers = [trainer.publish() for trainer in (bad, good)]
    world.run()
    for trainer, number in zip((bad, good), numbers, strict=True):
        trainer.pack(number)
    bad.manifests = {MANIFEST.hash: b"something else"}
    while world.up(bad) or world.up(good):  # both are packed, and neither manifest is there yet
        pass
    world.run()
    error = bad.error(numbers[0])
    assert error.kind == "ManifestMismatch"
    assert committed(good, numbers[1])


def test_the_same_tensors_cut_in_another_way_are_no_new_manifest() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)), {"trainer": GroupShape(1, 2)})
    ranks = [world.join(f"trainer/0/{rank}", world_size=2) for rank in range(2)]
    target = world.join("rollout/0/0")
    spec = TensorSpec("weight", "float32", (4,))
    for cut in (2, 1):
        boxes = ((0, cut), (cut, 4 - cut))
        numbers = [rank.publish() for rank in ranks]
        for rank, number, (offset, extent) in zip(ranks, numbers, boxes, strict=True):
            rank.pack(number, manifest=PartManifest((spec,), (), (Piece(0, (offset,), (extent,), 0),)))
        world.run()
        assert committed(ranks[0], numbers[0])
    assert target.commits == [1, 2]

"""What a member does on its own host: it finds out where it is, maps what others hold,
and lets go of it again.

Covers: channel/versions/transfers.py, channel/versions/manifest_exchange.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch

from replicas import messages as wire
from replicas.memory import beacon
from replicas.weights.copies.digest import digest_of
from replicas.weights.memory.arena import Arena, Slot
from tests.support.channel.scripted import MANIFEST, ScriptedWorld

pytestmark = pytest.mark.anyio


@pytest.fixture
def lender() -> Iterator[Arena]:
    """The arena of another member; that it is of this very process makes no
    difference."""
    arena = Arena(2)
    yield arena
    arena.close()


def fill(arena: Arena, version: int) -> Slot:
    slot = arena.acquire(version, MANIFEST)
    assert slot is not None
    slot.data.view(torch.float32).fill_(float(version))
    arena.hold(slot, digest_of(slot.data))
    return slot


def offer(number: int, version: int, place: wire.SlotPlace | None, digest: str = "digest") -> wire.TransferOffer:
    return wire.TransferOffer(number, version, "map", "image", MANIFEST.hash, {"n": version}, 5.0, digest, place)


async def mapped(world: ScriptedWorld, slot: Slot, number: int = 1) -> wire.TransferDone:
    world.tell(offer(number, slot.version, slot.place, slot.digest))
    done: wire.TransferDone = await world.session.next(wire.TransferDone)
    return done


async def test_a_version_is_mapped_read_and_let_go_of(target: ScriptedWorld, lender: Arena) -> None:
    first = fill(lender, 1)
    done = await mapped(target, first)
    assert (done.transfer, done.image_digest) == (1, first.digest)
    assert done.place is not None
    assert done.place.inode == first.place.inode
    target.tell(wire.Commit(1, first.digest))
    pending = target.receiver.receive(None)
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, 1))
    update = await pending
    assert update.meta == {"n": 1}
    views = dict(update)
    views["w"][0] = 9.0
    assert first.data.view(torch.float32).tolist() == [1.0] * 4, "what a reader writes stays with it"
    del views

    lender.free(first)
    second = fill(lender, 2)
    assert second is not first, "the memory of an open update is not written to"
    await mapped(target, second, 2)
    target.tell(wire.Commit(2, second.digest))
    lender.released(1)
    update.loaded()
    assert (await target.session.next(wire.Dropped)).version == 1
    assert sorted(target.hub.arena.held()) == [2]
    assert not target.slots(), "nothing of its own was needed"


async def test_nothing_is_mapped_that_is_not_there(target: ScriptedWorld, lender: Arena) -> None:
    slot = fill(lender, 1)
    place = slot.place
    gone = msgspec.structs.replace(place, pid=2**22 + 1)  # beyond any pid that can be
    other = msgspec.structs.replace(place, inode=place.inode + 1)
    lender.free(slot)
    refilled = lender.acquire(2, MANIFEST)
    assert refilled is slot
    for number, wrong in enumerate((gone, other, place), 1):
        target.tell(offer(number, 1, wrong))
        failed = await target.session.next(wire.TransferFailed)
        assert (failed.transfer, failed.error.kind) == (number, "Gone")
    lender.hold(refilled, "another")
    target.tell(offer(4, 1, place))
    failed = await target.session.next(wire.TransferFailed)
    assert failed.error.kind == "Gone"
    assert "was replaced by another version" in failed.error.message
    target.tell(offer(5, 1, None))
    assert (await target.session.next(wire.TransferFailed)).error.kind == "InternalError"
    assert not target.hub.arena.held()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
async def test_a_shortage_says_nothing_about_the_host(
    target: ScriptedWorld, lender: Arena, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of other errors the coordinator would conclude that the two share no memory, for
    good."""
    slot = fill(lender, 1)

    def scarce(pid: int, fd: int, **only: int) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("replicas.memory.held_memory.open_plain", scarce)
        target.tell(offer(1, 1, slot.place, slot.digest))
        failed = await target.session.next(wire.TransferFailed)
    assert failed.error.kind == "NoCapacity"
    assert os.strerror(number) in failed.error.message
    assert (await mapped(target, slot, 2)).image_digest == slot.digest


async def test_an_offer_without_a_digest_has_it_computed(target: ScriptedWorld, lender: Arena) -> None:
    slot = fill(lender, 1)
    target.tell(offer(1, 1, slot.place, digest=""))
    assert (await target.session.next(wire.TransferDone)).image_digest == slot.digest


async def test_a_version_that_was_discarded_is_let_go_of(target: ScriptedWorld, lender: Arena) -> None:
    slot = fill(lender, 1)
    await mapped(target, slot)
    target.tell(wire.Discard(1))
    assert not target.hub.arena.held()
    lender.free(slot)
    assert lender.acquire(2, MANIFEST) is slot


async def test_a_second_offer_of_a_held_version_takes_the_new_place(target: ScriptedWorld, lender: Arena) -> None:
    await mapped(target, fill(lender, 1))
    other = Arena(1)
    try:
        slot = fill(other, 1)
        done = await mapped(target, slot, 2)
        assert done.place is not None
        assert done.place.inode == slot.place.inode
        assert len(target.hub.arena.foreign) == 1
    finally:
        other.close()


async def test_a_mapped_version_is_lent_on(target: ScriptedWorld, lender: Arena) -> None:
    done = await mapped(target, fill(lender, 1))
    lender.close()
    late = ScriptedWorld("target", 2)
    try:
        late.tell(offer(1, 1, done.place))
        assert (await late.session.next(wire.TransferDone)).transfer == 1
        hello = late.hub.update_hello(late.hello)
        assert [(held.version, held.place is not None) for held in hello.held] == [(1, True)]
    finally:
        await late.end()


async def test_a_new_coordinator_hears_what_was_lent() -> None:
    world = ScriptedWorld("source", 2)
    arena = world.hub.arena
    fill(arena, 1)
    arena.release(1)
    assert world.hub.update_hello(world.hello).lent == (1,)
    await world.end()


# ---------------------------------------------------------------- where one is


async def test_who_can_be_read_is_on_this_host(target: ScriptedWorld) -> None:
    own = beacon.own_beacon()
    assert own == beacon.own_beacon()
    forged = msgspec.structs.replace(own, nonce="0" * len(own.nonce))
    nowhere = msgspec.structs.replace(own, pid=2**22 + 1, door="")
    target.tell(wire.Locate((forged, nowhere, own)))
    assert (await target.session.next(wire.Located)).found == 2
    target.tell(wire.Locate((forged, nowhere)))
    assert (await target.session.next(wire.Located)).found == -1


async def test_of_two_questions_for_the_host_the_newer_one_is_answered(
    target: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, knocking = threading.Event(), threading.Event()

    def slow(beacons: tuple[wire.Beacon, ...]) -> int:
        if len(beacons) == 2:
            begun.set()
            assert knocking.wait(20)
        return len(beacons)

    monkeypatch.setattr("replicas.channel.session.hub.find", slow)
    own = beacon.own_beacon()
    target.tell(wire.Locate((own, own)))
    assert await asyncio.to_thread(begun.wait, 20)
    target.tell(wire.Locate((own, own, own)))
    assert (await target.session.next(wire.Located)).found == 3
    knocking.set()
    target.tell(wire.Locate((own,)))
    assert (await target.session.next(wire.Located)).found == 1, "the first question is over"


async def test_a_descriptor_that_would_block_is_not_opened(target: ScriptedWorld) -> None:
    read, write = os.pipe()
    try:
        pipe = msgspec.structs.replace(beacon.own_beacon(), fd=read)
        async with asyncio.timeout(5):
            target.tell(wire.Locate((pipe,)))
            assert (await target.session.next(wire.Located)).found == -1
    finally:
        os.close(read)
        os.close(write)

"""Slots.

Covers: weights/memory/arena.py.
"""

from __future__ import annotations

import random
import threading

import pytest
import torch
from safetensors.torch import load_file

from replicas.core.base.manifest import Manifest, PartManifest, Piece, TensorSpec
from replicas.errors import Gone
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer
from replicas.weights.memory.pool import SPARE_BEATS
from tests.support.channel.memory import MANIFEST, fill, memory_left, statistics

OTHER = Manifest((TensorSpec("x", "float32", (9,)),))


def test_a_slot_is_a_safetensors_file() -> None:
    arena = Arena(1, name="test")
    slot = fill(arena, 1)
    slot.data.view(torch.float32).copy_(torch.arange(8.0))
    assert torch.equal(load_file(slot.buffer.path)["x"], torch.arange(8.0))
    arena.close()


def test_a_part_slot_has_no_header() -> None:
    manifest = PartManifest((TensorSpec("x", "float32", (8,)),), (), (Piece(0, (4,), (4,), 0),))
    arena = Arena(1, name="test")
    slot = arena.acquire(1, manifest)
    assert slot is not None
    assert slot.image is None
    assert slot.data.numel() == slot.buffer.nbytes == 16
    arena.close()


def test_the_oldest_version_that_nobody_needs_makes_room() -> None:
    dropped: list[int] = []
    arena = Arena(3, name="test", on_drop=dropped.append)
    one, two, three = fill(arena, 1), fill(arena, 2), fill(arena, 3)
    arena.pin(one)
    arena.protected.add(2)
    slot = arena.acquire(4, MANIFEST)
    assert slot is three
    assert dropped == [3]
    assert arena.acquire(5, MANIFEST) is None  # pinned, protected, filling
    arena.unpin(one)
    assert arena.acquire(5, MANIFEST) is one
    assert dropped == [3, 1]
    assert arena.find(1) is None
    assert arena.find(2) is two
    assert arena.held() == {2: two.digest}
    arena.close()


def test_memory_is_reused_when_it_fits_exactly() -> None:
    arena = Arena(2, name="test")
    first = arena.acquire(1, MANIFEST)
    second = arena.acquire(2, OTHER)
    assert first is not None
    assert second is not None
    keys = first.buffer.key, second.buffer.key
    arena.free(first)
    arena.free(second)
    again = arena.acquire(3, OTHER)
    assert again is second
    assert again.buffer.key == keys[1]
    changed = arena.acquire(4, OTHER)
    assert changed is first
    assert changed.buffer.key not in keys
    assert changed.buffer.nbytes == OTHER.image_nbytes
    arena.close()


class Prepares:
    """Looks at all slots of an arena from another thread while a buffer is closed."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.raised, self.over = arena, list[Exception](), threading.Event()

    def buffer_closed(self, key: int) -> None:
        thread = threading.Thread(target=self._run)
        thread.start()
        self.over.wait(0.05)  # it may wait for this thread's lock, which is as good

    def _run(self) -> None:
        try:
            self.arena.prepare(OTHER.image_nbytes)
            self.arena.lent()
        except Exception as error:  # noqa: BLE001  # whatever it is: the test fails by it
            self.raised.append(error)
        self.over.set()


def test_no_other_thread_sees_memory_that_is_replaced() -> None:
    arena = Arena(2, name="test")
    slot = arena.acquire(1, MANIFEST)
    assert slot is not None
    arena.free(slot)
    other = Prepares(arena)
    slot.buffer.watchers.add(other)
    assert arena.acquire(2, OTHER) is slot
    assert other.over.wait(30)
    assert other.raised == []
    arena.close()


def test_a_waiter_is_told_when_a_slot_may_be_had() -> None:
    changes: list[None] = []
    arena = Arena(1, name="test", on_change=lambda: changes.append(None))
    slot = fill(arena, 1)
    arena.pin(slot)
    arena.pin(slot)
    arena.unpin(slot)
    assert changes == []
    arena.unpin(slot)
    assert len(changes) == 1
    arena.free(slot)
    assert len(changes) == 2
    arena.close()


def test_closing_leaves_memory_that_is_being_written_until_it_is_freed() -> None:
    arena = Arena(2, name="test")
    fill(arena, 1)
    writing = arena.acquire(2, MANIFEST)
    assert writing is not None
    arena.close()
    writing.data.fill_(1)
    assert arena.acquire(3, MANIFEST) is None
    arena.free(writing)
    assert not memory_left()


def test_memory_goes_with_an_arena_that_nobody_closed() -> None:
    arena = Arena(2, name="test")
    fill(arena, 1)
    arena.acquire(2, MANIFEST)
    assert memory_left()
    del arena
    assert not memory_left()


@pytest.mark.parametrize("misuse", ["hold", "pin", "unpin"])
def test_misuse_is_refused(misuse: str) -> None:
    arena = Arena(1, name="test")
    slot = arena.slots[0]
    with pytest.raises(ValueError, match="<Slot 0 free"):
        {"hold": lambda: arena.hold(slot, ""), "pin": lambda: arena.pin(slot), "unpin": lambda: arena.unpin(slot)}[
            misuse
        ]()


def test_threads_never_get_the_same_slot() -> None:
    arena = Arena(4, name="test")
    taken: list[int] = []
    barrier = threading.Barrier(8)

    def take(version: int) -> None:
        barrier.wait()
        slot = arena.acquire(version, MANIFEST)
        if slot is not None:
            taken.append(slot.index)

    threads = [threading.Thread(target=take, args=(version,)) for version in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [0, 1, 2, 3]
    for slot in arena.slots:
        arena.free(slot)
    arena.close()


# ---------------------------------------------------------------- readers


def reader_of(slot: Slot) -> Buffer:
    """As another member of this host would."""
    return Buffer.open(slot.place, slot.version)


def test_an_own_view_that_is_kept_never_changes_and_its_memory_comes_back() -> None:
    arena = Arena(1, name="test")
    slot = fill(arena, 1)
    first = slot.buffer
    view = first.private()[MANIFEST.data_offset :].view(torch.float32)
    fill(arena, 2)
    assert view.tolist() == [1.0] * 8
    assert statistics(arena)[3:5] == (1, 0)
    second = slot.buffer.private()
    del view
    fill(arena, 3)
    assert slot.buffer is first
    assert statistics(arena)[3:5] == (1, 0)
    del second
    arena.close()
    assert not memory_left()


def test_a_version_that_nobody_reads_is_rather_evicted() -> None:
    arena = Arena(2, name="test")
    one, two = fill(arena, 1), fill(arena, 2)
    view = one.buffer.private()
    assert fill(arena, 3) is two
    assert arena.find(1) is one
    assert statistics(arena).retired == 0
    del view
    arena.close()


def test_no_more_memory_is_left_to_readers_than_there_are_slots() -> None:
    arena = Arena(2, name="test")
    views = []
    for version in range(1, 5):
        views.append(fill(arena, version).buffer.private())
    assert statistics(arena) == (2, 2, 0, 2, 0, 4 * MANIFEST.image_nbytes, 0)
    assert arena.acquire(5, MANIFEST) is None
    assert arena.in_use() == (
        "the 2 slots have version 3 (kept), version 4 (kept); 2 older buffers are still mapped by readers"
    )
    assert [float(view[MANIFEST.data_offset :].view(torch.float32)[0]) for view in views] == [1.0, 2.0, 3.0, 4.0]
    views.pop(0)
    fill(arena, 5)
    views.clear()
    arena.close()


def test_memory_that_no_slot_needs_is_closed_after_a_while() -> None:
    arena = Arena(1, name="test")
    view = fill(arena, 1).buffer.private()
    fill(arena, 2)
    del view
    for version in range(3, 3 + SPARE_BEATS):
        fill(arena, version)
        assert statistics(arena)[3:5] == (0, 1)
    fill(arena, 100)
    fill(arena, 101)
    assert statistics(arena)[3:5] == (0, 0)
    arena.close()


def test_a_slot_whose_version_is_read_elsewhere_is_not_given_away() -> None:
    dropped: list[int] = []
    arena = Arena(2, name="test", on_drop=dropped.append)
    one, two = fill(arena, 1), fill(arena, 2)
    first, second = reader_of(one), reader_of(two)
    assert arena.acquire(3, MANIFEST) is None
    assert dropped == []
    Buffer.open(one.place, 1).close()  # it can still be had
    second.close()
    assert fill(arena, 3) is two
    arena.free(one)
    assert arena.acquire(4, MANIFEST) is two
    assert dropped == [2, 3]
    first.close()
    arena.close()


def test_released_versions_are_not_waited_for() -> None:
    changes: list[None] = []
    arena = Arena(1, name="test", on_change=lambda: changes.append(None))
    slot = fill(arena, 1)
    reader = reader_of(slot)
    arena.released(9)
    assert arena.acquire(2, MANIFEST) is None
    changes.clear()
    arena.released(1)
    assert changes == [None]
    fill(arena, 2)
    assert statistics(arena).retired == 1
    again = reader_of(slot)
    assert arena.acquire(3, MANIFEST) is None  # that was about version 1
    assert float(reader.readable()[MANIFEST.data_offset :].view(torch.float32)[0]) == 1.0
    reader.close()
    again.close()
    fill(arena, 3)
    arena.close()


def test_a_failed_filling_is_offered_to_nobody() -> None:
    arena = Arena(1, name="test")
    slot = fill(arena, 1)
    place = slot.place
    again = arena.acquire(2, MANIFEST)
    assert again is slot
    with pytest.raises(Gone):
        Buffer.open(place, 1)
    arena.free(slot)
    with pytest.raises(Gone):
        Buffer.open(place, 1)
    with pytest.raises(Gone):
        Buffer.open(slot.place, 2)
    arena.close()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_readers_do_no_view_ever_changes(seed: int) -> None:
    chance, arena, version = random.Random(seed), Arena(2, name="test"), 0
    readers: list[Buffer] = []
    views: list[tuple[int, torch.Tensor]] = []
    for _ in range(400):
        match chance.choice(["publish", "publish", "open", "view", "close", "drop", "released"]):
            case "publish":
                slot = arena.acquire(version + 1, MANIFEST)
                if slot is None:
                    continue
                version += 1
                slot.data.view(torch.float32).fill_(version)
                arena.hold(slot, "")
                arena.protected = {version}
            case "open" if version:
                slot = arena.find(version)
                assert slot is not None
                readers.append(reader_of(slot))
            case "view" if readers:
                reader = chance.choice(readers)
                views.append((reader.offered, reader.private()[MANIFEST.data_offset :].view(torch.float32)))
            case "close" if readers:
                readers.pop(chance.randrange(len(readers))).close()
            case "drop" if views:
                views.pop(chance.randrange(len(views)))
            case "released":
                arena.released(chance.randint(1, version + 1))
        assert all(bool((view == number).all()) for number, view in views)
        assert all(float(reader.readable()[-4:].view(torch.float32)) == reader.offered for reader in readers)
        assert statistics(arena).retired <= 2
    for reader in readers:
        reader.close()
    views.clear()
    fill(arena, version + 1)
    assert statistics(arena).retired == 0
    arena.close()
    del slot, reader
    readers.clear()
    assert not memory_left()


# ---------------------------------------------------------------- memory of others


def foreign(arena: Arena, owner: Arena, version: int) -> Slot:
    slot = owner.find(version) or fill(owner, version)
    return arena.adopt(version, MANIFEST, reader_of(slot), f"digest {version}")


def test_a_foreign_slot_is_held_beside_the_own_ones() -> None:
    owner, arena = Arena(2, name="test"), Arena(1, name="test")
    own = fill(arena, 1)
    slot = foreign(arena, owner, 2)
    assert slot.foreign
    assert slot.state == "held"
    assert list(arena.slots) == [own]
    assert list(arena.foreign) == [slot]
    assert arena.find(2) is slot
    assert arena.held() == {1: "digest 1", 2: "digest 2"}
    assert arena.images() == {1: MANIFEST, 2: MANIFEST}
    assert slot.data.view(torch.float32).tolist() == [2.0] * 8
    assert repr(slot) == "<Slot 2 foreign held version=2 pins=0>"
    fill(arena, 3)
    assert arena.find(2) is slot
    owner.close()
    arena.close()
    assert not memory_left()


def test_a_foreign_slot_goes_when_nobody_needs_it() -> None:
    dropped: list[int] = []
    owner, arena = Arena(4, name="test"), Arena(1, name="test", on_drop=dropped.append)
    two, three, four = (foreign(arena, owner, version) for version in (2, 3, 4))
    arena.protected = {2}
    arena.pin(four)
    arena.trim()
    assert dropped == [3]
    assert list(arena.foreign) == [two, four]
    arena.unpin(four)
    assert dropped == [3, 4]
    assert three.state == four.state == "closed"
    arena.pin(two)
    arena.unpin(two)
    assert list(arena.foreign) == [two]
    arena.free(two)
    assert dropped == [3, 4]
    assert arena.held() == {}
    for version in range(5, 9):  # nobody holds any of the four
        fill(owner, version)
    owner.close()
    arena.close()


def test_adopting_keeps_the_mapping_for_the_next_version() -> None:
    owner, arena = Arena(1, name="test"), Arena(1, name="test")
    address = 0
    for version in (1, 2, 3):
        slot = foreign(arena, owner, version)
        assert address in (0, slot.data.data_ptr())
        assert slot.data.view(torch.float32)[0] == version
        address = slot.data.data_ptr()
        arena.trim()
    assert statistics(arena).kept == 1
    owner.close()
    arena.trim()
    assert statistics(arena).kept == 0
    arena.close()


def test_what_is_adopted_wrongly_is_let_go() -> None:
    owner, arena = Arena(1, name="test"), Arena(1, name="test")
    foreign(arena, owner, 1)
    buffer = reader_of(owner.slots[0])
    with pytest.raises(ValueError, match="version 1 is in memory here already"):
        arena.adopt(1, MANIFEST, buffer)
    assert buffer.fd == -1
    arena.close()
    buffer = reader_of(owner.slots[0])
    with pytest.raises(Gone, match="the memory of this channel is closed"):
        arena.adopt(2, MANIFEST, buffer)
    assert buffer.fd == -1
    fill(owner, 2)
    owner.close()


def test_closing_leaves_what_is_read_until_it_is_let_go() -> None:
    owner, arena = Arena(1, name="test"), Arena(1, name="test")
    own, slot = fill(arena, 1), foreign(arena, owner, 2)
    arena.pin(own)
    arena.pin(slot)
    arena.close()
    assert slot.data.view(torch.float32)[0] == 2
    assert owner.acquire(3, MANIFEST) is None
    arena.unpin(slot)
    arena.unpin(own)
    assert (own.state, slot.state) == ("closed", "closed")
    fill(owner, 3)
    owner.close()
    assert not memory_left()


def test_a_version_that_is_released_while_it_is_read_goes_with_its_last_reader() -> None:
    changes: list[None] = []
    arena = Arena(2, name="test", on_change=lambda: changes.append(None))
    one, _ = fill(arena, 1), fill(arena, 2)
    arena.pin(one)
    assert arena.release(1)
    assert not arena.release(1)
    assert [slot.state for slot in arena.slots] == ["leaving", "held"]
    assert arena.held() == {2: "digest 2"}
    assert arena.find(1) is None
    assert changes == []
    arena.unpin(one)
    assert arena.release(2)
    assert [slot.state for slot in arena.slots] == ["free", "free"]
    assert len(changes) == 2
    assert arena.in_use() == "none"
    arena.close()

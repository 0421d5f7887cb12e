"""Buffers: one's own, and those of others, opened through /proc.

Covers: linux/files.py, weights/memory/buffers.py, weights/memory/mappings.py.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from replicas.errors import Gone, NoCapacity, WorldError
from replicas.memory.held_memory import Living
from replicas.messages import SlotPlace
from replicas.weights.memory import mappings
from replicas.weights.memory.buffers import Buffer
from replicas.weights.memory.mappings import KEPT_USES, KeptMappings
from tests.support.channel.memory import memory_left


def offered(value: int = 5, nbytes: int = 64) -> Buffer:
    """A buffer that is offered as version 1."""
    buffer = Buffer.allocate(nbytes, "test")
    assert buffer.claim() == "claimed"
    buffer.tensor().fill_(value)
    buffer.offer(1)
    return buffer


def refill(buffer: Buffer, value: int) -> None:
    assert buffer.claim() == "claimed"
    buffer.tensor().fill_(value)
    buffer.offer(buffer.serial + 1)


def test_a_buffer_is_shared_and_a_private_view_is_not() -> None:
    buffer = Buffer.allocate(10_000, "test")
    shared, private = buffer.tensor(), buffer.private()
    shared.fill_(7)
    assert private[9_999] == 7
    private[0] = 1
    assert shared[0] == 7
    assert Path(buffer.path).stat().st_size == 10_000
    assert not os.get_inheritable(buffer.fd)
    buffer.close()


def test_a_mapping_outlives_its_buffer_and_nothing_outlives_the_mapping() -> None:
    buffer = Buffer.allocate(4096, "test")
    tensor = buffer.tensor()
    buffer.close()
    buffer.close()
    tensor.fill_(3)
    assert memory_left()
    del tensor
    assert not memory_left()
    with pytest.raises(ValueError, match="closed"):
        buffer.tensor()


def test_a_descriptor_from_elsewhere_is_the_same_memory() -> None:
    buffer = Buffer.allocate(64, "test")
    other = Buffer.adopt(os.dup(buffer.fd))
    buffer.tensor().fill_(5)
    assert other.nbytes == 64
    assert bool((other.tensor() == 5).all())
    buffer.close()
    other.close()


def test_an_empty_buffer_has_an_empty_tensor() -> None:
    buffer = Buffer.allocate(0, "test")
    assert buffer.tensor().numel() == 0
    assert buffer.private().numel() == 0
    buffer.close()


def test_watchers_hear_of_the_end_once() -> None:
    class Watcher:
        def __init__(self) -> None:
            self.keys: list[int] = []

        def buffer_closed(self, key: int) -> None:
            self.keys.append(key)

    watcher, buffer = Watcher(), Buffer.allocate(1, "test")
    buffer.watchers.add(watcher)
    buffer.close()
    buffer.close()
    assert watcher.keys == [buffer.key]


def test_memory_that_runs_out_while_allocating_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(NoCapacity, match=r"4 KiB.*No space left"):
        Buffer.allocate(4096, "test")
    assert not memory_left()


def test_a_descriptor_that_can_only_be_read_makes_a_buffer_that_can_only_be_read() -> None:
    buffer = offered()
    other = Buffer.adopt(os.open(buffer.path, os.O_RDONLY))
    with pytest.raises(ValueError, match="belongs to another process"):
        other.tensor()
    assert bool((other.readable() == 5).all())
    buffer.close()
    other.close()


def test_somebody_elses_memory_is_opened_to_read() -> None:
    buffer = offered()
    other = Buffer.open(buffer.place, 1)
    assert (other.nbytes, other.writable, other.offered) == (64, False, 1)
    assert not os.get_inheritable(other.fd)
    assert bool((other.readable() == 5).all())
    assert other.readable().data_ptr() != buffer.readable().data_ptr()
    private = other.private()
    private[3] = 1
    assert buffer.tensor()[3] == 5
    with pytest.raises(ValueError, match="belongs to another process"):
        other.tensor()
    other.close()
    buffer.close()
    del private
    assert not memory_left()


def test_a_reader_passes_it_on_after_its_owner_has_closed_it() -> None:
    buffer = offered()
    first = Buffer.open(buffer.place, 1)
    buffer.close()
    second = Buffer.open(first.place, 1)
    first.close()
    assert bool((second.readable() == 5).all())
    second.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pid": 0, "door": ""}, "is gone"),
        ({"fd": 1 << 20}, "is gone"),
        ({"inode": 1}, "is gone"),
        ({"nbytes": 65}, "is gone"),
        ({"serial": 2}, "was replaced by another version"),
    ],
)
def test_what_is_not_there_any_more_is_gone(change: dict[str, Any], why: str) -> None:
    buffer = offered()
    with pytest.raises(Gone, match=f"version 1 in the memory of process .* {why}"):
        Buffer.open(msgspec.structs.replace(buffer.place, **change), 1)
    assert buffer.claim() == "claimed"  # whoever was refused holds nothing
    buffer.close()


def test_a_descriptor_that_is_another_file_now_is_not_touched() -> None:
    """To open a pipe would wait for its other end."""
    buffer = offered()
    reading, writing = os.pipe()
    place = msgspec.structs.replace(buffer.place, fd=reading)
    with pytest.raises(Gone):
        Buffer.open(place, 1)
    inode = os.fstat(reading).st_ino
    with pytest.raises(Gone):
        Buffer.open(SlotPlace(os.getpid(), reading, inode, 0, 1), 1)
    os.close(reading)
    os.close(writing)
    buffer.close()


def test_memory_that_is_or_was_refilled_is_gone() -> None:
    buffer = offered()
    place = buffer.place
    assert buffer.claim() == "claimed"
    with pytest.raises(Gone, match="is being replaced"):
        Buffer.open(place, 1)
    buffer.tensor().fill_(6)
    buffer.abandon()
    with pytest.raises(Gone, match="was replaced"):
        Buffer.open(place, 1)
    refill(buffer, 7)
    with pytest.raises(Gone, match="was replaced"):
        Buffer.open(place, 1)
    Buffer.open(buffer.place, 2).close()
    buffer.close()


def test_memory_that_may_not_be_opened_is_not_said_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    buffer = offered()
    place = msgspec.structs.replace(buffer.place, door="")  # whose thread would be refused as well
    with (
        monkeypatch.context() as patch,
        pytest.raises(WorldError, match=r"cannot be mapped: .*denied.*as one user") as caught,
    ):
        patch.setattr(os, "open", refuse)
        Buffer.open(place, 1)
    assert type(caught.value) is WorldError
    buffer.close()


def test_the_owner_knows_who_is_in_the_way() -> None:
    buffer = offered()
    one, two = Buffer.open(buffer.place, 1), Buffer.open(buffer.place, 1)
    private = one.private()
    another = one.private()
    assert buffer.claim() == "held"
    one.close()
    one.close()
    assert buffer.claim() == "held"
    two.close()
    assert buffer.claim() == "in sight"
    del private
    assert buffer.claim() == "in sight"
    assert buffer.offered == 1  # a claim that failed changes nothing
    Buffer.open(buffer.place, 1).close()
    view = another[3:5]
    del another
    assert buffer.claim() == "in sight"
    del view
    assert buffer.claim() == "claimed"
    buffer.close()


def test_our_own_views_count_too() -> None:
    buffer = offered()
    private = buffer.private()
    assert buffer.claim() == "in sight"
    del private
    assert buffer.claim() == "claimed"
    buffer.close()


def test_reading_by_ourselves_is_in_nobodys_way() -> None:
    buffer = offered()
    other = Buffer.open(buffer.place, 1)
    tensor = other.readable()
    other.close()
    refill(buffer, 9)
    assert tensor[0] == 9  # a shared mapping shows whatever is there
    buffer.close()


def test_a_sidecars_copy_of_the_descriptor_leaves_the_locks_alone() -> None:
    buffer = offered()
    reader = Buffer.open(buffer.place, 1)
    Buffer.adopt(os.dup(reader.fd)).close()
    assert buffer.claim() == "held"
    reader.close()
    assert buffer.claim() == "claimed"
    Buffer.adopt(os.dup(buffer.fd)).close()
    buffer.tensor().fill_(1)
    buffer.offer(2)
    buffer.close()


def test_a_kept_mapping_costs_nothing_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, kept = offered(), KeptMappings()
    one = Buffer.open(buffer.place, 1)
    one.keep_mappings_in(kept)
    address = one.readable().data_ptr()
    one.close()
    refill(buffer, 6)
    two = Buffer.open(buffer.place, 2)
    two.keep_mappings_in(kept)
    monkeypatch.setattr(mappings, "map_readable", None)
    assert two.readable().data_ptr() == address
    assert two.readable()[0] == 6
    two.close()
    kept.sweep([])
    assert len(kept) == 1
    inode = buffer.place.inode
    buffer.close()
    kept.sweep([inode])
    assert len(kept) == 1  # a slot that is held still needs it
    kept.sweep([])
    assert len(kept) == 0
    assert not memory_left()


def test_a_finaliser_may_close_a_buffer_while_mappings_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, buffer = KeptMappings(), offered()
    buffer.show()
    reader = Buffer.open(buffer.place, 1)
    reader.keep_mappings_in(kept)
    reader.readable()
    readers = [reader]
    del reader

    def collect(place: SlotPlace) -> bool:
        readers.clear()  # the last reference: its finaliser runs here
        return False

    monkeypatch.setattr(mappings, "is_there", collect)
    sweep = threading.Thread(target=kept.sweep, args=([],), daemon=True)
    sweep.start()
    sweep.join(30)
    assert not sweep.is_alive()
    assert len(kept) == 0
    buffer.close()
    assert not memory_left()


def test_a_pinned_mapping_is_unpinned_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    unpinned: list[int] = []

    class Pin:
        def close(self) -> None:
            unpinned.append(1)

    kept, buffer = KeptMappings(), offered()
    reader = Buffer.open(buffer.place, 1)
    reader.keep_mappings_in(kept)
    reader.readable()
    mapping = kept._find(buffer.place.inode, 64)
    assert mapping is not None
    mapping._pin = cast("Any", Pin())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        kept.drop(buffer.place.inode)
    assert unpinned == [1]
    del mapping
    reader.close()
    buffer.close()


def test_mappings_that_are_not_used_for_long_are_not_kept() -> None:
    kept, buffers = KeptMappings(), [offered(number) for number in range(KEPT_USES + 1)]
    for buffer in buffers:
        other = Buffer.open(buffer.place, 1)
        other.keep_mappings_in(kept)
        other.readable()
        other.close()
        kept.sweep([])
    assert len(kept) == KEPT_USES
    assert kept._find(buffers[0].place.inode, 64) is None
    assert kept._find(buffers[1].place.inode, 65) is None
    assert kept._find(buffers[1].place.inode, 64) is not None
    kept.close()
    assert len(kept) == 0
    for buffer in buffers:
        buffer.close()


def test_a_living_set_forgets_who_has_died_and_runs_no_python_for_it() -> None:
    class Thing:
        pass

    living: Living[Thing] = Living()
    kept, gone = Thing(), Thing()
    for thing in (kept, gone, gone):
        living.add(thing)
    assert {*living} == {kept, gone}
    lines: list[str] = []
    sys.settrace(lambda frame, event, argument: lines.append(frame.f_code.co_name))
    try:
        del gone, thing
    finally:
        sys.settrace(None)
    assert lines == []
    assert [*living] == [kept]
    living.add(kept)
    assert len(living._known) == 2


def test_one_that_is_opened_without_a_lock_holds_up_nobody_and_tells_when_it_is_refilled() -> None:
    owner = offered(5)
    with closing(Buffer.open(owner.place, 1, lock=False)) as reader:
        assert reader.origin == owner.place
        assert reader.readable().tolist() == [5] * 64
        told = [reader.unchanged]
        assert owner.claim() == "claimed"
        told.append(reader.unchanged)
        owner.offer(2)
        assert [*told, reader.unchanged] == [True, False, False]
    with pytest.raises(Gone, match="was replaced by another version"):
        Buffer.open(msgspec.structs.replace(owner.place, serial=1), 1, lock=False)
    owner.close()

"""Buffers on a GPU: what is said of the page is said of the memory, and memory outlives
those who have it open.

Covers: weights/copies/accelerator.py, weights/devices/device_buffers.py.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator

import pytest
import torch

from replicas import environ
from replicas.common.sizes import size_text
from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.errors import Gone, NoCapacity, Preflight, UsageError, WorldError
from replicas.memory.held_memory import MemoryHolder
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.copies.digest import digest_of
from replicas.weights.devices.device_buffers import PAGE_NBYTES
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer
from replicas.weights.memory.mappings import KeptMappings
from tests.support.channel.memory import Child, memory_left, statistics
from tests.support.devices.device_memory import lingering_nbytes
from tests.support.devices.fake_accelerator import NAME, FakeAccelerator, fake_memory_nbytes

GPU = "FAKE-0"
MANIFEST = Manifest((TensorSpec("x", "float32", (8,)),))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAccelerator]:
    monkeypatch.setenv(environ.ACCELERATOR, NAME)
    monkeypatch.delenv("FAKE_GPUS", raising=False)
    found = accelerator()
    assert isinstance(found, FakeAccelerator)
    yield found
    assert lingering_nbytes() == 0
    assert not memory_left()
    assert fake_memory_nbytes(os.getpid()) == 0


def offered(nbytes: int = 1000, version: int = 7) -> Buffer:
    buffer = Buffer.allocate(nbytes, "test", device=GPU)
    assert buffer.claim() == "claimed"
    buffer.tensor().fill_(version)
    buffer.offer(version)
    return buffer


def test_the_file_is_a_page_and_the_bytes_are_on_the_device(gpu: FakeAccelerator) -> None:
    buffer = offered()
    place = buffer.place
    assert (place.device, place.nbytes, buffer.nbytes, gpu.allocated) == (GPU, PAGE_NBYTES, 1000, 1000)
    with pytest.raises(UsageError, match="staging"):
        _ = buffer.path
    other = Buffer.open(place, 7)
    assert (other.nbytes, other.device, other.writable) == (1000, GPU, False)
    assert other.readable().eq(7).all()
    copied = other.private()
    with pytest.raises(ValueError, match="belongs to another process"):
        other.tensor()
    assert buffer.claim() == "held"
    other.close()
    assert buffer.claim() == "claimed"
    buffer.tensor().fill_(1)
    assert copied.eq(7).all()
    with pytest.raises(Gone):
        Buffer.open(place, 7)
    buffer.close()
    with pytest.raises(Gone):
        Buffer.open(place, 7)


def test_a_sidecar_writes_in_place() -> None:
    buffer = Buffer.allocate(64, "test", device=GPU)
    theirs = Buffer.adopt(os.dup(buffer.fd), GPU)
    theirs.tensor().fill_(5)
    assert buffer.readable().eq(5).all()
    assert buffer.claim() == "claimed"  # who shares the descriptor holds nothing
    theirs.close()
    buffer.close()


def test_memory_is_freed_when_nobody_has_it_open_any_more(gpu: FakeAccelerator) -> None:
    buffer = Buffer.allocate(64, "test", device=GPU)
    theirs = Buffer.adopt(os.dup(buffer.fd), GPU)
    seen = theirs.tensor().fill_(5)
    buffer.close()
    assert lingering_nbytes() == 64
    theirs.close()  # a tensor over it is left
    assert lingering_nbytes() == 64
    assert seen.eq(5).all()
    del seen
    assert lingering_nbytes() == 0
    assert gpu.allocated == 0


class _Reader:
    def __init__(self, buffer: Buffer) -> None:
        self._place = buffer.place
        self._buffer: Buffer | None = None

    def __call__(self, word: str) -> object:
        match word:
            case "open" | "open forbidden":
                os.environ["FAKE_FAULTS"] = "ipc" if "forbidden" in word else ""
                self._buffer = Buffer.open(self._place, 7)
                return int(self._buffer.readable()[0])
            case _:
                assert self._buffer is not None
                return int(self._buffer.readable()[-1])


def test_readers_that_are_killed_hold_memory_no_longer(gpu: FakeAccelerator) -> None:
    buffer = offered()
    child = Child(_Reader(buffer))
    try:
        answer = child.ask("open forbidden")
        assert answer.startswith("WorldError")
        assert "--ipc=host" in answer
        assert child.ask("open") == "7"
        buffer.close()
        assert lingering_nbytes() == 1000
        assert child.ask("read") == "7"
        child.kill()
        assert lingering_nbytes() == 0
        assert gpu.allocated == 0
    finally:
        child.kill()


def test_a_forked_child_frees_nothing(gpu: FakeAccelerator) -> None:
    buffer = offered()

    def close(_: str) -> str:
        buffer.close()
        return "closed"

    child = Child(close)
    try:
        assert child.ask("close") == "closed"
    finally:
        child.kill()
    assert buffer.readable().eq(7).all()
    assert Buffer.open(buffer.place, 7).private().eq(7).all()
    buffer.close()
    assert (lingering_nbytes(), gpu.allocated) == (0, 0)


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff\xff", bytes(PAGE_NBYTES), b"\x01\x00\x00\x00\x80"])
def test_a_page_that_leads_nowhere_is_refused(content: bytes) -> None:
    fd = os.memfd_create("test")
    os.write(fd, content)
    with pytest.raises(WorldError, match="does not lead"):
        Buffer.adopt(fd, GPU)


def test_only_visible_devices_can_be_used(monkeypatch: pytest.MonkeyPatch, gpu: FakeAccelerator) -> None:
    buffer = offered()
    with pytest.raises(WorldError, match="is on GPU FAKE-0, not on FAKE-1"):
        Buffer.adopt(os.dup(buffer.fd), "FAKE-1")
    monkeypatch.setenv("FAKE_GPUS", "FAKE-1")
    other = Buffer.adopt(os.dup(buffer.fd), GPU)
    with pytest.raises(WorldError, match="not visible") as caught:
        other.readable()
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint
    with pytest.raises(Preflight):
        gpu.select(GPU)
    other.close()
    monkeypatch.setenv("FAKE_FAULTS", "absent")
    monkeypatch.setattr("replicas.weights.copies.accelerator._chosen", (0, "", None))
    with pytest.raises(WorldError, match="cannot use GPUs"):
        Buffer.allocate(10, "test", device=GPU)
    monkeypatch.undo()
    buffer.close()


@pytest.mark.parametrize("who", ["rank", "sidecar"])
def test_reads_wait_for_what_the_rank_has_enqueued(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeAccelerator, who: str
) -> None:
    buffer = Buffer.allocate(4, "test", device=GPU)
    reader = buffer if who == "rank" else Buffer.adopt(os.dup(buffer.fd), GPU)
    monkeypatch.setenv("FAKE_DELAY_S", "0.0001")
    found, busy = torch.zeros(4, dtype=torch.uint8), threading.Event()
    gpu.launch(lambda: busy.wait(30))
    gpu.copy([buffer.tensor()], [torch.full((4,), 9, dtype=torch.uint8)])
    buffer.record_write()
    with gpu.on_side_stream():
        reader.wait_for_write()
        gpu.copy([found], [reader.readable()])
        done = gpu.event()
        done.record()
    assert not done.query()
    assert not found.any()
    busy.set()
    done.synchronize()
    assert found.eq(9).all()
    reader.close()
    buffer.close()


def test_an_event_that_never_happens_holds_up_nobody_but_sidecars(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeAccelerator
) -> None:
    monkeypatch.setenv("FAKE_DELAY_S", "0.0001")
    buffer, never = offered(4), threading.Event()
    sidecar, other = Buffer.adopt(os.dup(buffer.fd), GPU), Buffer.open(buffer.place, 7)
    with gpu.on_stream(gpu.new_stream()):  # stands for another process
        gpu.launch(lambda: never.wait(30))
        buffer.record_write()
    for one in (sidecar, other):
        with pytest.raises(ValueError, match="only the owner"):
            one.record_write()
    other.wait_for_write()
    gpu.synchronize()
    never.set()
    for one in (sidecar, other, buffer):
        one.close()


def fill(arena: Arena, version: int) -> Slot:
    slot = arena.acquire(version, MANIFEST)
    assert slot is not None
    slot.data.view(torch.float32).fill_(version)
    arena.hold(slot, digest_of(slot.data, slot.digest_kind))
    return slot


def test_an_arena_on_a_device(gpu: FakeAccelerator) -> None:
    arena = Arena(1, name="test", device=GPU)
    slot = fill(arena, 1)
    assert (arena.pool.device, slot.buffer.device, slot.digest_kind, slot.digest[0]) == (GPU, GPU, "device", "d")
    assert slot.data.view(torch.float32).eq(1).all()
    reader = arena.borrow(slot.place, 1)
    assert arena.acquire(2, MANIFEST) is None
    arena.released(1)  # its reader is frozen: the memory is left to it
    second = fill(arena, 2)
    assert statistics(arena).retired == 1
    assert reader.readable()[MANIFEST.data_offset :].view(torch.float32).eq(1).all()
    reader.close()
    fill(arena, 3)
    assert second.version == 3
    arena.close()
    assert (lingering_nbytes(), gpu.allocated) == (0, 0)


def test_a_device_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = MANIFEST.image_nbytes
    monkeypatch.setenv("FAKE_MEMORY_NBYTES", str(nbytes))
    monkeypatch.setattr("replicas.weights.devices.device_buffers._LINGER_LOOK_S", 0.01)
    arena = Arena(2, name="test", device=GPU)
    arena.pool.retire(Buffer.allocate(nbytes, "test", device=GPU))
    slot = fill(arena, 1)  # what is spare is used
    arena.protected = {1}
    with pytest.raises(NoCapacity, match="bytes free"):
        arena.acquire(2, MANIFEST)
    reader = arena.borrow(slot.place, 1)
    arena.close()
    with pytest.raises(NoCapacity, match=re.escape(size_text(nbytes))):
        Buffer.allocate(1, "test", device=GPU)
    reader.close()


def test_what_is_on_a_device_is_not_kept_by_others() -> None:
    buffer = offered()
    keeper = MemoryHolder()
    assert keeper.keep("key", buffer.place, 7) is None
    buffer.close()


def test_host_memory_is_pinned_once(monkeypatch: pytest.MonkeyPatch, gpu: FakeAccelerator) -> None:
    gpu.pinned.clear()
    buffer = Buffer.allocate(4096, "test")
    assert gpu.owns(buffer.tensor())
    assert buffer.pin()
    assert buffer.pin()
    assert gpu.pinned == [4096]
    assert not gpu.owns(buffer.tensor())
    buffer.claim()
    buffer.offer(1)
    kept = KeptMappings()
    for _ in range(2):
        reader = Buffer.open(buffer.place, 1)
        reader.keep_mappings_in(kept)
        assert reader.pin()
        reader.close()
    assert gpu.pinned == [4096, 4096]
    before = len(gpu.unpinned)
    kept.close()
    buffer.close()
    assert len(gpu.unpinned) == before + 2
    monkeypatch.setenv("FAKE_FAULTS", "register")
    refused = Buffer.allocate(4096, "test")
    assert not refused.pin()
    assert not refused.pin()
    refused.close()


def test_memory_made_ahead_is_pinned_on_request(gpu: FakeAccelerator) -> None:
    gpu.pinned.clear()
    arena = Arena(1, name="test")
    arena.pool.pinning = True
    arena.prepare(1 << 20)
    arena.pool.claim_buffer(1 << 20, 1).close()
    assert gpu.pinned == [1 << 20]
    arena.close()


def test_the_environment_must_name_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("nowhere", "replicas.nowhere:Cuda", "replicas.weights.devices.cuda:Nothing", "replicas.errors:Gone"):
        monkeypatch.setenv(environ.ACCELERATOR, wrong)
        with pytest.raises(UsageError, match=environ.ACCELERATOR):
            accelerator()

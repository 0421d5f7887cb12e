"""Buffers and slots."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from replicas.core.manifest import Manifest, PartManifest, Piece, TensorSpec
from replicas.errors import NoCapacity
from replicas.weights import Arena, Buffer, Slot, digest_of
from replicas.weights import arena as arena_module
from replicas.weights.capacity import available_nbytes

MANIFEST = Manifest((TensorSpec("x", "float32", (8,)),))
OTHER = Manifest((TensorSpec("x", "float32", (9,)),))


def filled(arena: Arena, version: int) -> Slot:
    slot = arena.acquire(version, MANIFEST)
    assert slot is not None
    slot.data.fill_(version)
    arena.hold(slot, digest_of(slot.data))
    return slot


def memory_left() -> bool:
    """Whether this process still has any buffer called "test", as a descriptor or as a mapping."""
    gc.collect(0)
    names = [str(path.readlink()) if path.is_symlink() else "" for path in Path("/proc/self/fd").iterdir()]
    return any("memfd:test" in name for name in names) or "memfd:test" in Path("/proc/self/maps").read_text()


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


def test_too_much_memory_is_a_clear_error_beforehand() -> None:
    available, _ = available_nbytes()
    with pytest.raises(NoCapacity, match=r"the buffer 'weights' needs \d+ bytes, but .* leaves \d+"):
        Buffer.allocate(available * 2, "weights")


def test_memory_that_runs_out_while_allocating_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(NoCapacity, match=r"'test' of 4096 bytes cannot be allocated: .*No space left"):
        Buffer.allocate(4096, "test")
    assert not memory_left()


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "pod/box").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (proc / "self/cgroup").write_text("0::/pod/box\n")
    (groups / "pod/box/memory.max").write_text("max\n")
    (groups / "pod/box/memory.current").write_text("10\n")
    assert available_nbytes(proc=proc, cgroup_root=groups) == (8000 * 1024, "the machine's memory")
    (groups / "pod/memory.max").write_text("5000000\n")
    (groups / "pod/memory.current").write_text("4000000\n")
    (groups / "pod/memory.stat").write_text("anon 3\ninactive_file 100000\nactive_file 50000\n")
    assert available_nbytes(proc=proc, cgroup_root=groups) == (1150000, "the memory limit of cgroup /pod/box")


def test_a_slot_is_a_safetensors_file() -> None:
    arena = Arena(1, name="test")
    slot = filled(arena, 1)
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
    one, two, three = filled(arena, 1), filled(arena, 2), filled(arena, 3)
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


def test_a_waiter_is_told_when_a_slot_may_be_had() -> None:
    changes: list[None] = []
    arena = Arena(1, name="test", on_change=lambda: changes.append(None))
    slot = filled(arena, 1)
    arena.pin(slot)
    arena.pin(slot)
    arena.unpin(slot)
    assert changes == []
    arena.unpin(slot)
    assert len(changes) == 1
    arena.free(slot)
    assert len(changes) == 2
    arena.close()


def test_a_slot_that_cannot_be_had_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int, what: str) -> None:
        raise NoCapacity("no")

    arena = Arena(1, name="test")
    with monkeypatch.context() as patch, pytest.raises(NoCapacity):
        patch.setattr(arena_module, "check_capacity", refuse)
        arena.acquire(1, MANIFEST)
    assert arena.slots[0].state == "free"
    assert arena.acquire(1, MANIFEST) is arena.slots[0]
    arena.close()


def test_closing_leaves_memory_that_is_being_written_until_it_is_freed() -> None:
    arena = Arena(2, name="test")
    filled(arena, 1)
    writing = arena.acquire(2, MANIFEST)
    assert writing is not None
    arena.close()
    writing.data.fill_(1)
    assert arena.acquire(3, MANIFEST) is None
    arena.free(writing)
    assert not memory_left()


def test_memory_goes_with_an_arena_that_nobody_closed() -> None:
    arena = Arena(2, name="test")
    filled(arena, 1)
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

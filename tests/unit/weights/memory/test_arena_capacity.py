"""How much memory there is, and what is said when it is too little.

Covers: weights/memory/pool.py.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from pathlib import Path

import pytest

from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.errors import NoCapacity
from replicas.weights.memory import buffers, pool
from replicas.weights.memory.arena import Arena
from replicas.weights.memory.buffers import RESERVE_NBYTES, Buffer, available_nbytes, check_capacity
from tests.support.channel.memory import MANIFEST, fill, memory_left, statistics

LARGE = Manifest((TensorSpec("x", "float32", (1 << 18,)),))  # just enough to be made ahead of time


def workers() -> list[threading.Thread]:
    """The background threads of the arenas."""
    return [thread for thread in threading.enumerate() if thread.name == "test memory"]


def join_workers() -> None:
    for thread in workers():
        thread.join(30)
    assert not workers()


def test_too_much_memory_is_a_clear_error_beforehand() -> None:
    available, _ = available_nbytes()
    with pytest.raises(NoCapacity, match=r"'weights' needs [0-9.]+ GiB, but .* leaves [0-9.]+ .iB"):
        Buffer.allocate(available * 2, "weights")


def test_the_limit_of_the_size_of_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(NoCapacity, match=r"ulimit -f unlimited"):
            Buffer.allocate(2 << 20, "weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
    assert available_nbytes(proc=proc, cgroup_root=groups) == (1150000, "memory.max of cgroup /pod")
    odd = groups / os.fsdecode(b"\xff")
    (groups / "pod").rename(odd)
    (proc / "self/cgroup").write_bytes(b"0::/\xff/box\n")
    assert available_nbytes(proc=proc, cgroup_root=groups) == (1150000, r"memory.max of cgroup /\udcff")


def test_slowing_down_counts_as_a_limit(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "self/cgroup").write_text("0::/\n")
    for name, text in {"max": "9000000", "high": "7000000", "current": "1000000"}.items():
        (groups / f"memory.{name}").write_text(f"{text}\n")
    assert available_nbytes(proc=proc, cgroup_root=groups) == (6000000, "memory.high of cgroup /")


def test_a_limit_of_version_1_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "memory/box").mkdir(parents=True)
    (proc / "self/cgroup").write_text("4:cpu,memory:/box\n3:pids:/other\n0::/\n")
    (groups / "memory/box/memory.limit_in_bytes").write_text("5000\n")
    (groups / "memory/box/memory.usage_in_bytes").write_text("2000\n")
    assert available_nbytes(proc=proc, cgroup_root=groups) == (3000, "memory.limit_in_bytes of cgroup /box")


def test_a_large_buffer_leaves_something_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "available_nbytes", lambda: (2 * RESERVE_NBYTES, "the test"))
    check_capacity(RESERVE_NBYTES, "a buffer")
    with pytest.raises(
        NoCapacity, match=r"a buffer needs .* but the test leaves .* kept for others \(free memory, raise"
    ):
        check_capacity(RESERVE_NBYTES + 1, "a buffer")
    check_capacity(RESERVE_NBYTES - 1, "a small one")


def test_what_others_take_meanwhile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of a cgroup there is no error but a kill: it is looked at again
    between the pieces."""
    left = [1 << 30, 1 << 30, 100]
    monkeypatch.setattr(buffers, "available_nbytes", lambda: (left.pop(0), "the test"))
    monkeypatch.setattr(buffers, "_ALLOCATE_NBYTES", 4096)
    with pytest.raises(NoCapacity, match="needs 4 KiB, but the test leaves 100 B"):
        Buffer.allocate(8192, "test")
    assert not memory_left()


def test_a_slot_that_cannot_be_had_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int, what: str) -> None:
        raise NoCapacity("no")

    arena = Arena(1, name="test")
    with monkeypatch.context() as patch, pytest.raises(NoCapacity):
        patch.setattr(buffers, "check_capacity", refuse)
        arena.acquire(1, MANIFEST)
    assert arena.slots[0].state == "free"
    assert arena.acquire(1, MANIFEST) is arena.slots[0]
    arena.close()


def test_the_first_slot_must_fit_and_the_others_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nbytes = LARGE.image_nbytes
    monkeypatch.setattr(pool, "available_nbytes", lambda: (nbytes * 2, "the test"))
    arena = Arena(3, name="test")
    with caplog.at_level(logging.WARNING, logger="replicas.weights"):
        fill(arena, 1, LARGE)
        fill(arena, 2, LARGE)
    assert [record.getMessage() for record in caplog.records] == [
        f"test: going on with 2 of 3 slots of {nbytes} bytes: the test leaves {nbytes * 2}. "
        "Free memory, raise the limit, or lower `slots`"
    ]
    arena.close()


def test_memory_is_made_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(3, name="test")
    fill(arena, 1, LARGE)
    join_workers()
    assert statistics(arena).spare == 2
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "allocate", None)  # nothing more is needed
        fill(arena, 2, LARGE)
        fill(arena, 3, LARGE)
    assert statistics(arena) == (3, 3, 0, 0, 0, 3 * LARGE.image_nbytes, 0)
    arena.close()


def test_small_memory_is_not() -> None:
    arena = Arena(3, name="test")
    arena.prepare(MANIFEST.image_nbytes)
    fill(arena, 1)
    assert statistics(arena).spare == 0
    assert not workers()
    arena.close()


class Slow:
    """Allocation that goes on when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.entered = threading.Event()
        self.go = threading.Event()
        self._real = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self._allocate)

    def _allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self.calls += 1
        self.entered.set()
        assert self.go.wait(30)
        self._real(fd, offset, nbytes)


def test_what_is_just_being_made_is_waited_for_and_not_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, slow = Arena(1, name="test"), Slow(monkeypatch)
    arena.prepare(LARGE.image_nbytes)
    arena.prepare(LARGE.image_nbytes)
    assert slow.entered.wait(30)
    taker = threading.Thread(target=fill, args=(arena, 1, LARGE))
    taker.start()
    slow.go.set()
    taker.join(30)
    assert arena.held() == {1: "digest 1"}
    assert slow.calls == 1
    join_workers()
    arena.close()


def test_closing_ends_what_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, slow = Arena(2, name="test"), Slow(monkeypatch)
    arena.prepare(LARGE.image_nbytes)
    assert slow.entered.wait(30)
    arena.close()
    slow.go.set()
    join_workers()
    assert slow.calls == 1
    assert not memory_left()


def test_an_arena_that_nobody_closed_stops_making_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, slow = Arena(2, name="test"), Slow(monkeypatch)
    arena.prepare(LARGE.image_nbytes)
    assert slow.entered.wait(30)
    del arena
    slow.go.set()
    join_workers()
    assert slow.calls == 1
    assert not memory_left()


def test_memory_that_cannot_be_made_ahead_is_missed_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena(2, name="test")
    with caplog.at_level(logging.INFO, logger="replicas.weights"), monkeypatch.context() as patch:
        patch.setattr(buffers, "available_nbytes", lambda: (100, "the test"))
        arena.prepare(LARGE.image_nbytes)
        join_workers()
        assert "going on without memory allocated ahead of time: the buffer 'test-1' needs" in caplog.text
        with pytest.raises(NoCapacity, match="the test leaves 100"):
            arena.acquire(1, LARGE)
    fill(arena, 1, LARGE)
    arena.close()


def test_memory_of_another_size_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(2, name="test")
    arena.prepare(LARGE.image_nbytes)
    join_workers()
    assert statistics(arena).spare == 2

    def available() -> tuple[int, str]:
        return (100 if statistics(arena).spare else 1 << 20), "the test"

    monkeypatch.setattr(buffers, "available_nbytes", available)
    fill(arena, 1)
    assert statistics(arena).spare == 0
    arena.close()

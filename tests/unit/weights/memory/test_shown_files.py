"""Files of versions that were handed out: read-only for all, and never filled again.

Covers: linux/mapped.py, linux/seals.py.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import replicas
from replicas.coordinator import GroupShape
from replicas.errors import NoCapacity, UsageError, WorldError
from replicas.linux import seals
from replicas.linux.mapped import mappers
from replicas.testing import FakeRun
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer
from tests.support.channel.memory import MANIFEST, Child, memory_left, statistics

OFFSET = MANIFEST.data_offset


def _by_safe_open(path: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        found: torch.Tensor = file.get_tensor("x")
    return found


def _by_torch(path: str) -> torch.Tensor:
    return torch.from_file(path, shared=False, size=MANIFEST.image_nbytes, dtype=torch.uint8)[OFFSET:]


def _by_numpy(path: str) -> torch.Tensor:
    return torch.from_numpy(np.memmap(path, mode="c", dtype=np.uint8, offset=OFFSET))


def _by_mmap(path: str) -> torch.Tensor:
    with open(path, "rb") as file:  # noqa: PTH123  # as a user would
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)[OFFSET:]


WAYS: dict[str, Callable[[str], torch.Tensor]] = {
    "load_file": lambda path: load_file(path)["x"],
    "safe_open": _by_safe_open,
    "torch.from_file": _by_torch,
    "np.memmap": _by_numpy,
    "mmap": _by_mmap,
}


def fill(arena: Arena, version: int) -> Slot:
    """As a publisher does: without a sidecar."""
    slot = arena.acquire(version, MANIFEST, alone=True)
    assert slot is not None, arena.in_use()
    slot.data.view(torch.float32).fill_(version)
    arena.hold(slot, "")
    return slot


def numbers(tensor: torch.Tensor) -> list[float]:
    return tensor.view(torch.float32).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_what_was_mapped_never_changes_and_its_memory_is_freed_after_it(way: str) -> None:
    arena = Arena(1, name="test")
    slot = fill(arena, 1)
    first = slot.buffer.key
    kept = WAYS[way](slot.buffer.show())
    for version in (2, 3):
        assert fill(arena, version) is slot
    assert numbers(kept) == [1.0] * 8
    assert slot.buffer.key != first
    assert len(mappers({*arena.pool.still_mapped._nbytes})[os.getpid()]) == 1
    arena.close()
    assert memory_left()
    del kept
    assert not memory_left()


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_others_is_left_by_its_owner_too(way: str) -> None:
    """Also when the reader has closed it: another process may have the file."""
    owner = Arena(1, name="test")
    slot = fill(owner, 1)
    reader = Buffer.open(slot.place, 1)
    kept = WAYS[way](reader.show())
    assert owner.acquire(2, MANIFEST) is None  # it is held
    reader.close()
    for version in (2, 3):
        fill(owner, version)
    assert numbers(kept) == [1.0] * 8
    assert (statistics(owner).retired, statistics(owner).nbytes) == (0, MANIFEST.image_nbytes)
    owner.close()


def test_the_mapping_of_what_is_never_filled_again_is_not_kept() -> None:
    owner, arena = Arena(1, name="test"), Arena(1, name="test")
    for version, shown in ((1, False), (2, True), (3, False)):
        slot = fill(owner, version)
        foreign = arena.adopt(version, MANIFEST, Buffer.open(slot.place, version))
        assert numbers(foreign.data) == [float(version)] * 8
        if shown:
            foreign.buffer.show()
        arena.trim()
        assert statistics(arena).kept == (not shown)
    owner.close()
    arena.close()


def test_a_reader_that_is_killed_has_still_shown_it() -> None:
    arena = Arena(1, name="test")
    slot = fill(arena, 1)
    place, first = slot.place, slot.buffer.key

    def show(word: str) -> str:
        Buffer.open(place, 1).show()
        return "shown"

    child = Child(show)
    assert child.ask("show") == "shown"
    child.kill()
    assert fill(arena, 2).buffer.key != first
    arena.close()


def writers(path: str) -> dict[str, Callable[[], object]]:
    def mapped() -> object:
        with open(path, "r+b") as file:  # noqa: PTH123  # as a user would
            return mmap.mmap(file.fileno(), 0)

    return {
        "np.memmap": lambda: np.memmap(path, mode="r+"),
        "np.memmap anew": lambda: np.memmap(path, mode="w+", shape=(8,)),
        "torch.from_file": lambda: torch.from_file(path, shared=True, size=8, dtype=torch.uint8),
        "mmap": mapped,
        "write": lambda: Path(path).write_bytes(b"other"),
        "shorten": lambda: os.truncate(path, 8),
    }


@pytest.mark.parametrize("to_copy", [False, True])
@pytest.mark.parametrize("by_owner", [False, True])
def test_nobody_can_write_to_the_file(by_owner: bool, to_copy: bool) -> None:
    arena = Arena(1, name="test")
    slot = fill(arena, 1)
    reader = slot.buffer if by_owner else Buffer.open(slot.place, 1)
    ways = writers(reader.show(to_copy=to_copy))
    child = Child(lambda way: ways[way]())  # torch leaks the descriptor of a file that it could not map
    for way in ways:
        assert "Operation not permitted" in child.ask(way)
    child.kill()
    assert numbers(slot.data) == [1.0] * 8
    if not by_owner:
        reader.close()
    arena.close()


def test_memory_that_was_shown_to_be_copied_is_filled_again() -> None:
    arena = Arena(1, name="test")
    slot = fill(arena, 1)
    first = slot.buffer.key
    for version in (2, 3):
        reader = Buffer.open(slot.place, version - 1)
        assert numbers(load_file(reader.show(to_copy=True))["x"]) == [version - 1.0] * 8
        reader.close()
        assert fill(arena, version).buffer.key == first
    assert numbers(load_file(slot.buffer.show())["x"]) == [3.0] * 8
    assert slot.buffer.claim() == "shown"  # for good
    arena.close()


def test_memory_that_a_sidecar_fills_is_open_to_it_until_it_is_shown() -> None:
    arena = Arena(1, name="test")
    slot = arena.acquire(1, MANIFEST)
    assert slot is not None
    Buffer.adopt(os.dup(slot.buffer.fd)).tensor()[OFFSET:].view(torch.float32).fill_(1)
    arena.hold(slot, "")
    first = slot.buffer.key
    kept = load_file(slot.buffer.show(to_copy=True))["x"]  # as the next sidecar could not fill it, it is shown for good
    sender = Buffer.adopt(os.dup(slot.buffer.fd))
    assert numbers(sender.readable()[OFFSET:]) == [1.0] * 8
    with pytest.raises(ValueError, match="closed to writers"):
        sender.tensor()
    sender.close()
    again = arena.acquire(2, MANIFEST)
    assert again is slot
    assert slot.buffer.key != first
    Buffer.adopt(os.dup(slot.buffer.fd)).tensor()[OFFSET:].view(torch.float32).fill_(2)
    assert numbers(kept) == [1.0] * 8
    arena.close()


def test_a_sidecar_gets_other_memory_than_its_rank_has_filled_alone() -> None:
    arena = Arena(1, name="test")
    first = fill(arena, 1).buffer.key
    view = arena.slots[0].buffer.private()
    fill(arena, 2)
    del view  # the first buffer is a spare one now
    slot = arena.acquire(3, MANIFEST)
    assert slot is not None
    assert slot.buffer.key > first + 1
    assert not slot.buffer.closed_to_writers
    arena.close()


def test_a_file_that_cannot_be_sealed_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, flags: int = 0) -> int:
        raise PermissionError(13, "Permission denied")

    arena = Arena(1, name="test")
    reader = Buffer.open(fill(arena, 1).place, 1)
    with (
        monkeypatch.context() as patch,
        pytest.raises(WorldError, match=r"cannot be made read-only.*Permission denied"),
    ):
        patch.setattr(seals, "reopen", refuse)
        reader.show()
    assert not reader.shown
    reader.close()
    arena.close()


def test_who_keeps_every_version_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, kept = Arena(1, name="test"), []
    caplog.set_level(logging.WARNING, "replicas.weights")
    for version in range(1, 4):
        kept.append(load_file(fill(arena, version).buffer.show())["x"])
    looking = arena.pool.still_mapped._looking
    if looking is not None:
        looking.join(30)
    (text,) = caplog.messages
    mapped = f"2 older versions (0 MiB) whose `path` was read are still mapped by process {os.getpid()} ("
    assert text.startswith(f"test: {mapped}")
    assert mapped in arena.in_use()

    def no_more(nbytes: int, name: str, **options: object) -> Buffer:
        raise NoCapacity("there is no more", hint="")

    monkeypatch.setattr(Buffer, "allocate", no_more)
    with pytest.raises(NoCapacity, match="there is no more; 3 older versions"):
        arena.acquire(4, MANIFEST)
    kept.clear()
    assert "older" not in arena.in_use()
    arena.close()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_readers_do_nothing_they_keep_ever_changes(seed: int) -> None:
    """Through the public calls: readers keep what they were given beyond the block."""
    kept: list[tuple[int, torch.Tensor]] = []
    failures: list[BaseException] = []

    def read(channel: replicas.Channel, chance: random.Random) -> None:
        try:
            for _ in range(8):
                with channel.receive(deadline=30).wait() as update:
                    way = chance.choice([*WAYS, "tensors", "path_to_copy"])
                    if way == "tensors":
                        tensor = update.tensors()["x"]
                    elif way == "path_to_copy":
                        tensor = load_file(update.path_to_copy)["x"].clone()
                    else:
                        tensor = WAYS[way](update.path).view(torch.float32)
                    kept.append((update.version, tensor))
                if chance.random() < 0.5:
                    del kept[0]
        except BaseException as error:  # noqa: BLE001  # the test's thread raises it
            failures.append(error)

    with FakeRun(groups={"rollout": GroupShape(2)}) as run:
        trainer = run.join("trainer")
        readers = [
            threading.Thread(target=read, args=(run.join("rollout", index), random.Random(10 * seed + index)))
            for index in range(2)
        ]
        for thread in readers:
            thread.start()
        version = 0
        while any(thread.is_alive() for thread in readers):
            version += 1
            trainer.publish({"x": torch.full((8,), float(version))}, deadline=30).wait()
            assert all(bool((tensor == number).all()) for number, tensor in [*kept])
    assert not failures
    assert all(bool((tensor == number).all()) for number, tensor in kept)


def test_the_path_of_an_update_that_has_ended_is_refused() -> None:
    with FakeRun() as run:
        trainer, target = run.join("trainer"), run.join("rollout")
        trainer.publish({"x": torch.ones(3)}).wait()
        with target.receive().wait() as update:
            pass
        with pytest.raises(UsageError, match="has ended"):
            print(update.path)

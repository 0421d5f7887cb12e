"""Memory that is read by other processes, which may end in any way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from replicas.errors import Gone
from replicas.memory.held_memory import MemoryHolder
from replicas.messages import SlotPlace
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer
from replicas.weights.memory.mappings import KeptMappings
from tests.support.channel.memory import MANIFEST, Child, fill, statistics
from tests.support.machine.memfds import memories


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1, name="test")
    yield arena
    arena.close()


class Reader:
    """In its process: opens the memory, keeps a private view, lets go."""

    def __init__(self, slot: Slot) -> None:
        self._place = slot.place
        self._buffer: Buffer | None = None
        self._view: torch.Tensor | None = None

    def __call__(self, word: str) -> object:
        match word:
            case "open":
                self._buffer = Buffer.open(self._place, 1)
            case "view":
                assert self._buffer is not None
                self._view = self._buffer.private()[MANIFEST.data_offset :].view(torch.float32)
            case "close":
                assert self._buffer is not None
                self._buffer.close()
            case "drop":
                self._view = None
            case "nobody":
                os.setuid(65534)
            case "look":
                assert self._view is not None
                return self._view.tolist()
        return "done"


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(answer: Callable[[str], object]) -> Child:
        children.append(Child(answer))
        return children[-1]

    yield start
    for one in children:
        one.kill()


def test_a_slot_is_not_reused_while_another_process_holds_it(arena: Arena, child: Callable[..., Child]) -> None:
    slot = fill(arena, 1)
    reader = child(Reader(slot))
    assert reader.ask("open") == "done"
    arena.free(slot)
    assert arena.acquire(2, MANIFEST) is None
    assert arena.in_use() == f"the 1 slots have version 1 (read by process {reader.pid})"
    assert reader.ask("close") == "done"
    assert fill(arena, 2) is slot


def test_readers_of_a_version_that_stays_anyway_are_not_blamed(arena: Arena, child: Callable[..., Child]) -> None:
    """The newest version is protected: all read it, and the supervisor keeps it for
    members that are lost."""
    slot = fill(arena, 1)
    assert child(Reader(slot)).ask("open") == "done"
    arena.protected = {1}
    assert arena.in_use() == "the 1 slots have version 1 (kept)"


def test_kill_9_of_a_reader_releases_what_it_holds(arena: Arena, child: Callable[..., Child]) -> None:
    slot = fill(arena, 1)
    reader = child(Reader(slot))
    assert reader.ask("open") == "done"
    assert reader.ask("view") == "done"
    assert arena.acquire(2, MANIFEST) is None
    reader.kill()
    assert fill(arena, 2) is slot
    assert statistics(arena).retired == 0


def test_a_view_that_outlives_its_update_never_changes(arena: Arena, child: Callable[..., Child]) -> None:
    slot = fill(arena, 1)
    reader = child(Reader(slot))
    for word in ("open", "view", "close"):
        assert reader.ask(word) == "done"
    first = slot.buffer
    for version in (2, 3, 4):
        assert fill(arena, version) is slot
    assert slot.buffer is not first
    assert reader.ask("look") == str([1.0] * 8)
    assert arena.in_use().endswith("; 1 older buffers are still mapped by readers")
    assert statistics(arena).retired == 1
    assert reader.ask("drop") == "done"
    fill(arena, 5)
    assert statistics(arena)[3:5] == (0, 1)


def test_a_frozen_reader_is_not_waited_for_once_nobody_needs_the_version(
    arena: Arena, child: Callable[..., Child]
) -> None:
    slot = fill(arena, 1)
    reader = child(Reader(slot))
    for word in ("open", "view"):
        assert reader.ask(word) == "done"
    assert arena.acquire(2, MANIFEST) is None
    arena.released(1)
    fill(arena, 2)
    assert arena.in_use().endswith(f"; 1 older buffers are still mapped by readers, held by process {reader.pid}")
    assert reader.ask("look") == str([1.0] * 8)
    reader.kill()
    fill(arena, 3)
    assert statistics(arena).retired == 0


class Owner:
    """In its process: holds version 7, and says where."""

    def __init__(self) -> None:
        self._arena = Arena(1, name="test")

    def __call__(self, word: str) -> object:
        return msgspec.json.encode(fill(self._arena, 7).place).decode()


def place_of(owner: Child) -> SlotPlace:
    return msgspec.json.decode(owner.ask("fill"), type=SlotPlace)


def test_a_version_survives_its_owner(child: Callable[..., Child], arena: Arena) -> None:
    owner = child(Owner())
    slot = arena.adopt(7, MANIFEST, Buffer.open(place_of(owner), 7))
    owner.kill()
    assert slot.data.view(torch.float32).tolist() == [7.0] * 8
    second = Buffer.open(slot.place, 7)
    assert bool((second.private()[MANIFEST.data_offset :].view(torch.float32) == 7).all())
    second.close()


def test_an_owner_that_has_ended_is_gone(child: Callable[..., Child]) -> None:
    owner = child(Owner())
    place = place_of(owner)
    owner.kill(reap=False)
    with pytest.raises(Gone, match=r"version 7"):
        Buffer.open(place, 7)
    owner.kill()
    with pytest.raises(Gone, match="is gone"):
        Buffer.open(place, 7)


def test_a_forked_child_of_a_reader_keeps_its_view_and_not_the_version(
    arena: Arena, child: Callable[..., Child]
) -> None:
    """Like a DataLoader worker, forked while an update is open."""
    slot = fill(arena, 1)
    buffer = Buffer.open(slot.place, 1)
    view: torch.Tensor | None = buffer.private()
    worker = child(lambda word: buffer.close() if word == "close" else "nothing")
    assert worker.ask("close") == "None"
    assert arena.acquire(2, MANIFEST) is None  # the child's close is not ours
    buffer.close()
    assert view is not None
    del view
    before = slot.buffer
    fill(arena, 2)
    assert slot.buffer is not before
    worker.kill()
    fill(arena, 3)
    assert statistics(arena).retired == 0


def test_a_forked_child_keeps_no_memory_of_ours(child: Callable[..., Child]) -> None:
    """A DataLoader's worker that outlives a model would keep it, and with its
    descriptors the locks."""
    arena = Arena(2, name="replicas-fork")
    for version in (1, 2):
        slot = fill(arena, version)
    keeper, kept = MemoryHolder(), KeptMappings()
    assert keeper.keep("newest", slot.place, 2) is not None
    foreign = Buffer.open(slot.place, 2)
    foreign.keep_mappings_in(kept)
    foreign.readable()
    worker = child(lambda word: word)
    assert worker.ask("there") == "there"
    assert memories(worker.pid, "replicas-fork") == {}
    assert len(memories(os.getpid(), "replicas-fork")) == 2
    assert foreign.readable()[MANIFEST.data_offset :].view(torch.float32).tolist() == [2.0] * 8
    foreign.close()
    kept.close()
    keeper.close()
    arena.close()


def test_a_forked_child_keeps_what_the_user_has(arena: Arena, child: Callable[..., Child]) -> None:
    view = fill(arena, 1).data.view(torch.float32)
    worker = child(lambda word: str(view.tolist()))
    assert worker.ask("read") == str([1.0] * 8)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_another_user_cannot_map_and_is_told_so(arena: Arena, child: Callable[..., Child]) -> None:
    reader = child(Reader(fill(arena, 1)))
    assert reader.ask("nobody") == "done"
    answer = reader.ask("open")
    assert answer.startswith("WorldError: version 1 in the memory of process")
    assert "Permission denied" in answer
    assert fill(arena, 2)

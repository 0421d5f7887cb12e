"""Copies that a device makes while the caller goes on: with a fake device, whose
streams lag behind.

Covers: weights/devices/device_copies.py, weights/writable.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch

from replicas.errors import ManifestMismatch, SyncError, UsageError, WorldError
from replicas.weights.copies.digest import device_digest_of, digest_of
from replicas.weights.devices.device_copies import CopyOptions, DeviceCopies
from replicas.weights.feed import Feed
from replicas.weights.loading import load_image, views
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.packing import Packer, Packing, packing_of, stage
from replicas.weights.writable import WritableSlot
from tests.support.devices.device_memory import lingering_nbytes
from tests.support.devices.fake_accelerator import NAME, FakeAccelerator

WAIT_S = 60.0
GPU = "FAKE-0"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAccelerator]:
    """One whose copies lag behind."""
    made = FakeAccelerator()
    monkeypatch.setenv("REPLICAS_ACCELERATOR", NAME)
    monkeypatch.setenv("FAKE_DELAY_S", "1e-6")
    monkeypatch.setattr("replicas.weights.copies.accelerator._chosen", (os.getpid(), NAME, made))
    yield made
    lingering_nbytes()  # what was closed is given back by now


def gate(gpu: FakeAccelerator) -> threading.Event:
    """The current stream does nothing more until it is set."""
    opened = threading.Event()
    gpu.launch(lambda: opened.wait(WAIT_S))
    return opened


def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(3, 5), "b": torch.full((7,), 2.0), "n": torch.arange(4)}


class Publish:
    """One packing: the slot, and the copies as they were begun."""

    def __init__(self, given: object, *, device: str = "", hold: bool = True, packer: Packer | None = None) -> None:
        self.begun: list[Any] = []
        self.told: list[int] = []
        self.feed = Feed(given)
        self.packer = packer or Packer()
        self.manifest = self.packer.plan(self.feed)
        assert self.manifest is not None
        self.arena = Arena(1, name="copies", device=device)
        slot = self.arena.acquire(1, self.manifest)
        assert slot is not None
        self.slot: Slot = slot
        self.hold = hold

    def pack(self, feed: Feed | None = None) -> Packing:
        assert self.manifest is not None
        feed = feed or self.feed
        return self.packer.pack(
            feed, self.manifest, self.slot, self.told.append, hold=self.hold, begun=self.begun.append
        )

    def found(self) -> dict[str, list[float]]:
        assert self.manifest is not None
        tensors = views(self.slot.buffer.readable(), self.manifest)
        return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


def lists(given: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in given.items()}


def outcome(future: Future[float]) -> float:
    return future.result(WAIT_S)


@pytest.mark.parametrize("device", ["", GPU])
@pytest.mark.parametrize("form", ["at once", "walked"])
def test_the_stream_may_change_what_was_published(gpu: FakeAccelerator, device: str, form: str) -> None:
    given = weights()
    expected = lists(given)
    publish = Publish(given, device=device)
    opened = gate(gpu)
    if form == "at once":
        packing = publish.pack()
    else:

        def walk() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in given.items():
                yield name, tensor
                gpu.launch(lambda tensor=tensor: tensor.fill_(-1))  # type: ignore[misc]  # it infers no default

        packing = publish.pack(Feed(walk()))
    assert packing.copies is publish.begun[0]
    assert not packing.copies.copied.done()
    gpu.launch(lambda: [tensor.fill_(-2) for tensor in given.values()])
    opened.set()
    assert outcome(packing.copies.copied) > 0
    assert publish.found() == expected
    data = publish.slot.data
    assert packing.digest.result(WAIT_S) == (device_digest_of(data) if device else digest_of(data))
    assert publish.told[-1] == data.numel()
    assert gpu.pinned == ([] if device else [publish.slot.buffer.nbytes])


@pytest.mark.parametrize("device", ["", GPU])
def test_an_iterable_may_change_the_current_stream(gpu: FakeAccelerator, device: str) -> None:
    given = weights()
    other = gpu.new_stream()

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        with gpu.on_stream(other):
            opened = gate(gpu)
            yield "a", given["a"]
        yield "b", given["b"]
        gates.append(opened)
        yield "n", given["n"]

    gates: list[threading.Event] = []
    publish = Publish(given, device=device)
    packing = publish.pack(Feed(walk()))
    assert packing.copies is not None
    third = threading.Event()
    with gpu.on_stream(gpu.new_stream()):
        packing.copies.fence()
        gpu.launch(lambda: [tensor.fill_(-1) for tensor in given.values()])
        gpu.launch(third.set)
    assert not packing.copies.copied.done()
    gates[0].set()
    outcome(packing.copies.copied)
    assert third.wait(WAIT_S)
    assert publish.found() == lists(weights())


@pytest.mark.parametrize("device", ["", GPU])
def test_aside_the_stream_goes_on_at_once_and_a_fence_makes_it_wait(gpu: FakeAccelerator, device: str) -> None:
    given = weights()
    opened = gate(gpu)
    gpu.launch(lambda: [tensor.add_(1) for tensor in given.values()])  # before the publish, on the caller's stream
    publish = Publish(given, device=device, hold=False)
    packing = publish.pack()
    assert packing.copies is not None
    other, changed = gpu.new_stream(), threading.Event()
    with gpu.on_stream(other):
        packing.copies.fence()
        gpu.launch(lambda: [tensor.fill_(-1) for tensor in given.values()])
        gpu.launch(changed.set)
    assert not packing.copies.copied.done()
    opened.set()
    assert outcome(packing.copies.copied) == 0
    assert changed.wait(WAIT_S)
    assert publish.found() == {name: [value + 1 for value in values] for name, values in lists(weights()).items()}


def test_what_is_in_host_memory_is_copied_at_once(gpu: FakeAccelerator) -> None:
    for device in ("", GPU):
        given = weights()
        gpu.host(given["b"])
        publish = Publish(given, device=device)
        opened = gate(gpu)
        packing = publish.pack()
        assert packing.copies is not None
        given["b"].fill_(-1)  # no stream is asked
        opened.set()
        outcome(packing.copies.copied)
        assert publish.found() == lists(weights())


def test_weights_on_the_cpu_alone_are_left_to_the_processor(gpu: FakeAccelerator) -> None:
    given = weights()
    for tensor in given.values():
        gpu.host(tensor)
    publish = Publish(given)
    assert publish.pack().copies is None
    assert publish.found() == lists(given)
    assert not gpu.pinned
    walked = Publish(given)
    packing = walked.pack(Feed(iter(given.items())))
    assert packing.copies is not None  # nobody knew what would come
    assert outcome(packing.copies.copied) == 0
    assert walked.found() == lists(given)
    assert not gpu.pinned


def test_private_copies_go_to_a_device_slot(gpu: FakeAccelerator) -> None:
    given = weights()
    staged = stage(Feed(iter(given.items())))
    slot = Arena(1, device=GPU).acquire(1, staged.manifest)
    assert slot is not None
    packing = staged.write(slot.data, CopyOptions(slot.buffer))
    assert packing.copies is not None
    outcome(packing.copies.copied)
    assert lists(views(slot.buffer.readable(), staged.manifest)) == lists(given)


def test_a_memory_that_cannot_be_pinned_serves_all_the_same(
    gpu: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULTS", "register")
    publish = Publish(weights())
    packing = publish.pack()
    assert packing.copies is not None
    outcome(packing.copies.copied)
    assert publish.found() == lists(weights())


@pytest.mark.parametrize("device", ["", GPU])
def test_a_device_that_fails_ends_the_copies_with_a_typed_error(
    gpu: FakeAccelerator, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    publish = Publish(weights(), device=device)
    monkeypatch.setenv("FAKE_FAULTS", "copy")
    packing = publish.pack()
    assert packing.copies is not None
    with pytest.raises(WorldError, match="illegal memory access"):
        outcome(packing.copies.copied)
    if device:
        with pytest.raises(WorldError):
            packing.digest.result(WAIT_S)
    else:
        assert packing.digest.cancelled()
    assert publish.told == []


def test_copies_end_before_a_failed_walk_gives_the_slot_back(gpu: FakeAccelerator) -> None:
    given = weights()
    publish = Publish(given)

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", given["a"]
        yield "b", given["b"].double()
        yield "n", given["n"]

    feed = Feed(walk())
    opened = gate(gpu)
    with pytest.raises(ManifestMismatch, match="'b'"):
        publish.pack(feed)
    assert feed.finished
    (copies,) = publish.begun
    assert not copies.copied.done()
    opened.set()
    with pytest.raises(SyncError, match="given up"):
        outcome(copies.copied)
    assert publish.found()["a"] == lists(given)["a"]  # what had been enqueued was not cut off


def test_an_exception_of_a_walk_that_has_no_text_arrives_as_it_is(gpu: FakeAccelerator) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", weights()["a"]
        raise Silent

    publish = Publish(weights())
    with pytest.raises(Silent):
        publish.pack(Feed(walk()))
    (copies,) = publish.begun
    with pytest.raises(SyncError, match=r"Silent: .*ZeroDivisionError"):
        outcome(copies.copied)


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("device", ["", GPU])
def test_what_has_arrived_is_told_batch_by_batch(
    gpu: FakeAccelerator, monkeypatch: pytest.MonkeyPatch, device: str, hold: bool
) -> None:
    monkeypatch.setattr("replicas.weights.devices.device_copies.DEVICE_NBYTES", 128)
    monkeypatch.setattr("replicas.weights.copies.copying.PROGRESS_NBYTES", 1)
    given = {str(number): torch.full((number, 5), float(number)) for number in range(9)}
    publish = Publish(given, device=device, hold=hold)
    packing = publish.pack()
    assert packing.copies is not None
    outcome(packing.copies.copied)
    assert packing.digest.result(WAIT_S)
    assert publish.found() == lists(given)
    assert len(publish.told) > 5
    assert publish.told == sorted(set(publish.told))
    assert publish.told[-1] == publish.slot.data.numel()


def test_bytes_that_never_came_are_an_error(gpu: FakeAccelerator) -> None:
    data = gpu.allocate(64, GPU).tensor
    with (
        pytest.raises(ValueError, match="40 bytes"),
        DeviceCopies(gpu, torch.zeros(64, dtype=torch.uint8), CopyOptions()) as one,
    ):
        one.put(torch.empty(24, dtype=torch.uint8), data[:24], 0, 24)
        one.finish()


# ---------------------------------------------------------------- written in place


def test_a_slot_on_the_device_is_written_in_place(gpu: FakeAccelerator) -> None:
    given = weights()
    publish = Publish(given, device=GPU)
    assert publish.manifest is not None
    written = WritableSlot(publish.slot, publish.manifest, partial(publish.arena.free, publish.slot))
    taken = dict(written)
    for name, tensor in given.items():
        gpu.copy([written[name][:]], [tensor])  # the tensor itself is emptied, when it is taken
    written.mark_taken()
    slot = written.slot
    assert all(not tensor.numel() for tensor in taken.values())
    packing = written.digest()
    assert packing.copies is not None
    outcome(packing.copies.copied)
    assert packing.digest.result(WAIT_S) == device_digest_of(slot.data)
    assert publish.found() == lists(given)
    with pytest.raises(UsageError):
        slot.buffer.path  # noqa: B018  # it raises


def test_pinned_memory_that_was_written_in_place_is_waited_for(gpu: FakeAccelerator) -> None:
    publish = Publish(weights())
    assert packing_of(publish.slot).copies is None
    assert publish.slot.buffer.pin()
    source = torch.full((publish.slot.data.numel(),), 7, dtype=torch.uint8)
    gpu.copy([publish.slot.data], [source])
    packing = packing_of(publish.slot)
    assert packing.copies is not None
    outcome(packing.copies.copied)
    assert packing.digest.result(WAIT_S) == digest_of(source)


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize("device", ["", GPU])
def test_loading_enqueues_all_and_waits_once(gpu: FakeAccelerator, device: str) -> None:
    given = weights()
    publish = Publish(given, device=device)
    packing = publish.pack()
    assert packing.copies is not None
    outcome(packing.copies.copied)
    assert publish.manifest is not None
    target = {"a": torch.zeros(3, 5, dtype=torch.float16), "b": torch.zeros(7), "n": torch.zeros(4, dtype=torch.int64)}
    gpu.host(target["b"])
    for _ in range(2):
        for tensor in target.values():
            tensor.zero_()
        buffer = publish.slot.buffer
        load_image(target, buffer.readable(), publish.manifest.whole, on_device=buffer.pin)
        assert lists(target) == lists(given)
    assert len(gpu.pinned) == (0 if device else 1)
    publish.arena.free(publish.slot)
    publish.arena.close()
    assert len(gpu.unpinned) == len(gpu.pinned)

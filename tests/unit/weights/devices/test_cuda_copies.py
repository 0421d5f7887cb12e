"""Many copies at once between a device and the host, and within it; here both are host
memory.

Covers: weights/devices/cuda_copies.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replicas.weights.devices import cuda_copies
from replicas.weights.devices.cuda_copies import SMALL_NBYTES, enqueue

SHAPES: list[tuple[torch.dtype, tuple[int, ...]]] = [
    (torch.float32, (3, 5)),
    (torch.float32, (SMALL_NBYTES // 4,)),
    (torch.float32, (7,)),
    (torch.float32, ()),
    (torch.float32, (0, 2)),
    (torch.bfloat16, (4, 3)),
    (torch.bfloat16, (5,)),
    (torch.uint8, (3,)),
    (torch.bool, (2, 2)),
]


class Memory:
    """A slot, and as many tensors each of which has memory of its own, on the
    device."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in SHAPES)
        self.data = torch.zeros(nbytes + 64, dtype=torch.uint8)
        self.slot: list[torch.Tensor] = []
        start = 0
        for dtype, shape in SHAPES:
            end = start + torch.Size(shape).numel() * dtype.itemsize
            self.slot.append(self.data[start:end].view(dtype).view(shape))
            start = end
        self.own = [(torch.randn(shape) * 9).to(dtype) for dtype, shape in SHAPES]

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() != self.data.untyped_storage().data_ptr()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[set[Any], set[Any]]]]:
    """Dtypes of the destinations and the sources of each launch of many copies."""
    made: list[tuple[set[Any], set[Any]]] = []
    real = torch._foreach_copy_

    def note(destinations: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
        made.append(({one.dtype for one in destinations}, {one.dtype for one in sources}))
        real(destinations, sources, non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    yield made
    assert all(len(to) == len(source) == 1 for to, source in made), "torch would write garbage, or copy one by one"


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other.to(one.dtype)) for one, other in zip(found, expected, strict=True))


def test_small_tensors_of_a_slot_are_one_transfer(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    alone: list[int] = []
    real = cuda_copies._to_host

    def note(to: torch.Tensor, source: torch.Tensor) -> None:
        alone.append(to.nbytes)
        real(to, source)

    monkeypatch.setattr(cuda_copies, "_to_host", note)
    enqueue(memory.slot, memory.own, memory.on_device)
    assert same(memory.slot, memory.own)
    assert alone == [SMALL_NBYTES, 60]  # the large one, and the one before it
    assert len(calls) == 2  # of each dtype of which there are several
    assert memory.data[-64:].eq(0).all()


def test_and_from_it_to_parameters_of_other_dtypes(calls: list[Any]) -> None:
    memory = Memory()
    enqueue(memory.slot, memory.own, memory.on_device)
    found = [torch.zeros(one.shape, dtype=one.dtype) for one in memory.own]
    found[2], found[5] = torch.zeros(7, dtype=torch.float64), torch.zeros(3, 4).t()
    found[1] = torch.zeros(SMALL_NBYTES // 4, dtype=torch.float16)
    enqueue(found, memory.slot, memory.on_device)
    assert same(found, memory.own)


def test_without_room_on_the_device_they_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "_room", lambda nbytes, device: None)
    memory = Memory()
    enqueue(memory.slot, memory.own, memory.on_device)
    assert same(memory.slot, memory.own)
    found = [torch.zeros(one.shape, dtype=torch.float64) for one in memory.own]
    enqueue(found, memory.slot, memory.on_device)
    assert same(found, memory.own)


def test_within_the_device_dtypes_are_kept_apart(calls: list[Any]) -> None:
    sources = [torch.randn(4, 6).bfloat16() for _ in range(4)]
    sources[1] = torch.randn(6, 4).bfloat16().t()
    targets = [
        torch.zeros(4, 6, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.float32)
    ]
    enqueue(targets, sources, lambda tensor: True)
    assert same(targets, sources)
    assert len(calls) == 1
    with torch.inference_mode():
        engine = torch.zeros(4, 6)
    enqueue([engine], sources[:1], lambda tensor: True)
    assert same([engine], sources[:1])


def test_lazy_signs_and_conjugates_are_resolved_on_the_device() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    sources = [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j, 3 - 4j]).conj().imag]
    assert sources[1].is_neg()
    targets = [memory[:16].view(torch.complex64), memory[16:24].view(torch.float32)]
    enqueue(targets, sources, lambda tensor: tensor.untyped_storage().data_ptr() != memory.data_ptr())
    assert targets[0].tolist() == [1 - 2j, 3 + 4j]
    assert targets[1].tolist() == [-2, 4]

"""Operations on tensors on a GPU, with a fake one whose streams lag behind: a missing
wait shows as wrong values.

Covers: channel/operations/results.py, channel/operations/scratch.py.
"""

from __future__ import annotations

import threading

import pytest
import torch

from replicas.channel.operations.results import OperationCall
from replicas.channel.operations.scratch import (
    Scratch,
    call_point,
    copy_out,
    gpu_of,
    read_segments,
    segments_of,
    write_segments,
)
from replicas.errors import NoCapacity
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.devices import device_buffers
from replicas.weights.memory.buffers import Buffer
from tests.support.devices import fake_accelerator
from tests.support.devices.fake_accelerator import FakeAccelerator

GPU = "FAKE-0"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    monkeypatch.setenv("REPLICAS_ACCELERATOR", f"{fake_accelerator.NAME}")
    monkeypatch.setenv("FAKE_DELAY_S", "0.005")
    found = accelerator()
    assert isinstance(found, FakeAccelerator)
    found.synchronize()
    device_buffers._lingering.sweep()  # what earlier tests have closed
    return found


def filled(buffer: Buffer, tensors: tuple[torch.Tensor, ...]) -> list[list[float]]:
    """What is in the buffer for whoever waits for its writer."""
    gpu = accelerator()
    assert gpu is not None
    with gpu.on_side_stream(GPU):
        buffer.wait_for_write()
        gpu.synchronize(GPU)
    return [place.tolist() for place in read_segments(buffer, segments_of(tensors))]


def settles(gpu: FakeAccelerator, nbytes: int) -> bool:
    """Whether so much is allocated, as soon as what was closed is freed: then its
    thread ends."""
    thread = device_buffers._lingering._thread
    if thread is not None:
        thread.join(20)
    return gpu.allocated == nbytes


def test_inputs_are_copied_behind_the_caller_and_before_what_it_does_next(gpu: FakeAccelerator) -> None:
    tensors = (torch.zeros(3), torch.zeros(2, 2).t())
    scratch = Scratch("test", GPU)
    buffer = scratch.take_buffer(100)
    for tensor in tensors:
        gpu.launch(lambda tensor=tensor: tensor.fill_(5.0))  # type: ignore[misc]  # mypy cannot infer the default
    write_segments(buffer, segments_of(tensors), tensors, gpu_of(tensors))
    for tensor in tensors:
        gpu.launch(lambda tensor=tensor: tensor.fill_(7.0))  # type: ignore[misc]  # the same
    assert filled(buffer, tensors) == [[5.0] * 3, [[5.0, 5.0]] * 2]
    gpu.synchronize()
    assert tensors[0].tolist() == [7.0] * 3
    scratch.give(buffer)
    scratch.close()


def test_what_lies_in_host_memory_is_read_before_the_call_returns(gpu: FakeAccelerator) -> None:
    near, far = torch.ones(3), torch.ones(3)
    gpu.host(near)
    buffer = Buffer.allocate(4096, "test", device=GPU)
    write_segments(buffer, segments_of((near, far)), (near, far), gpu_of((near, far)))
    near.zero_()
    assert filled(buffer, (near, far)) == [[1.0] * 3] * 2
    buffer.close()


def test_results_are_written_behind_what_the_caller_had_under_way(gpu: FakeAccelerator) -> None:
    target, seen = torch.zeros(4), torch.zeros(4)
    result = torch.ones(4)
    buffer = Buffer.allocate(4096, "test", device=GPU)
    write_segments(buffer, segments_of((result,)), (result,), GPU)
    gpu.synchronize()
    gpu.copy([torch.empty(4)], [torch.empty(4)])  # it takes its time
    gpu.launch(lambda: seen.copy_(target))
    point = call_point(GPU)
    results = read_segments(buffer, segments_of((result,)))
    writer = threading.Thread(target=copy_out, args=(GPU, (target,), results, buffer, (point,)))
    writer.start()
    writer.join()
    assert target.tolist() == [1.0] * 4, "done when it returns"
    assert seen.tolist() == [0.0] * 4, "the caller's work found what was there at the call"
    buffer.close()


def test_an_operation_knows_where_its_tensors_are(gpu: FakeAccelerator) -> None:
    near = torch.zeros(2)
    gpu.host(near)
    assert (OperationCall("barrier").gpu, OperationCall("barrier").device) == ("", "cpu")
    assert OperationCall("all_reduce", (near,)).device == "cpu"
    mixed = OperationCall("all_reduce", (near, torch.zeros(2)))
    assert (mixed.gpu, mixed.device, mixed.quick) == (GPU, "cuda", False)
    mixed.order_after_stream()
    assert len(mixed.called) == 1


def test_scratch_memory_of_a_gpu_is_kept_sparingly(gpu: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpu.allocated
    scratch = Scratch("test", GPU)
    buffers = [scratch.take_buffer(8000) for _ in range(4)]
    for buffer in buffers[:3]:
        scratch.give(buffer)
    assert settles(gpu, before + 3 * 8192), "two are kept, and one is in use"
    scratch.give(buffers[3], spoiled=True)
    assert settles(gpu, before + 2 * 8192), "a process died at work on it"
    monkeypatch.setenv("FAKE_MEMORY_NBYTES", str(before + 3 * 8192))
    large = scratch.take_buffer(20_000)
    assert settles(gpu, before + 20_480), "those that are kept make room"
    with pytest.raises(NoCapacity):
        scratch.take_buffer(20_000)
    scratch.give(large)
    scratch.close()
    assert settles(gpu, before)

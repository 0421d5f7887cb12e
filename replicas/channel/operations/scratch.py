"""Reusable buffers for the tensors of operations: fresh pages are slow.

They are in host memory or, for operations on GPU tensors with ``staging = "device"``,
on the rank's GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from replicas.channel.operations.tensor_copies import copy_in
from replicas.common.waits import locked
from replicas.core.versions.manifest import segment_layout
from replicas.errors import NoCapacity
from replicas.messages import Segment
from replicas.weights.copying import copy_elements
from replicas.weights.memory.arena import Buffer
from replicas.weights.tensors import dtype_name, torch_dtype, typed

__all__ = ["Scratch", "read_segments", "segments_of", "write_segments"]

KEPT = 6
KEPT_ON_DEVICE = 2
PAGE_NBYTES = 4096


class Scratch:
    """A few buffers, kept for the next operation. Thread-safe.

    :param device: UUID of the GPU that they are on; empty: host memory.
    """

    def __init__(self, name: str, device: str = "") -> None:
        self._name = name
        self._device = device
        self._cap = KEPT_ON_DEVICE if device else KEPT
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []
        self._closed = False

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes``.

        :raises replicas.errors.NoCapacity: the memory is not there.
        """
        found = self.take_idle(nbytes)
        if found is not None:
            return found
        try:
            return self._allocate(nbytes)
        except NoCapacity:
            if not self._drop_idle():
                raise
            return self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> Buffer:
        name, wanted = f"{self._name}-scratch", _rounded(nbytes)
        return Buffer.allocate(wanted, name, device=self._device)

    def take_idle(self, nbytes: int) -> Buffer | None:
        """A used buffer, or None if there is none of about this size. Never slow."""
        return locked(self._lock, self._take_idle, _rounded(nbytes))

    def _take_idle(self, wanted: int) -> Buffer | None:
        fitting = [buffer for buffer in self._idle if wanted <= buffer.nbytes <= 2 * wanted]
        if not fitting:
            return None
        best = min(fitting, key=lambda buffer: buffer.nbytes)
        self._idle.remove(best)
        return best

    def give(self, buffer: Buffer | None, *, spoiled: bool = False) -> None:
        """Take ``buffer`` back. It must not be in use any more.

        :param spoiled: a process ended while it worked on the buffer. On a GPU the next
            writer cannot learn when that work is over, so the buffer is freed.
        """
        if buffer is None:
            return
        too_many = locked(self._lock, self._give, buffer, spoiled)
        if too_many is not None:
            too_many.close()

    def _give(self, buffer: Buffer, spoiled: bool) -> Buffer | None:
        if self._closed or (spoiled and self._device):
            return buffer
        self._idle.append(buffer)
        return self._idle.pop(0) if len(self._idle) > self._cap else None

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    def _drop_idle(self) -> bool:
        """Free the idle buffers; returns whether there were any."""
        idle = locked(self._lock, self._forget_idle)
        for buffer in idle:
            buffer.close()
        return bool(idle)

    def _forget_idle(self) -> list[Buffer]:
        idle, self._idle = self._idle, []
        return idle


def _rounded(nbytes: int) -> int:
    return max(PAGE_NBYTES, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)


def segments_of(tensors: Sequence[torch.Tensor]) -> tuple[Segment, ...]:
    """Dtypes and shapes of tensors, as sent to other members.

    :raises replicas.errors.ManifestMismatch: a dtype that cannot be moved.
    """
    return tuple(Segment(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)


def write_segments(buffer: Buffer, segments: Sequence[Segment], tensors: Sequence[torch.Tensor], gpu: str = "") -> None:
    """Copy ``tensors`` (any strides and device) to their places in ``buffer``.

    :param gpu: UUID of the GPU that some of them are on. Copies into a buffer on that
        GPU are queued on this thread's stream.
    """
    places = read_segments(buffer, segments)
    if gpu:
        buffer.wait_for_write()
        copy_in(gpu, places, tensors)
        buffer.record_write()
        return
    for place, tensor in zip(places, tensors, strict=True):
        copy_elements(place, tensor.detach())


def read_segments(buffer: Buffer, segments: Sequence[Segment]) -> tuple[torch.Tensor, ...]:
    """Views of ``buffer``, one per segment."""
    offsets, _ = segment_layout(segments)
    data = buffer.tensor()
    return tuple(
        typed(data, offset, torch_dtype(segment.dtype), segment.shape)
        for offset, segment in zip(offsets, segments, strict=True)
    )

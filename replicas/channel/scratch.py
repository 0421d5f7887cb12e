"""Memory for the tensors of operations: buffers that are used again, because fresh pages are slow."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from replicas.core.manifest import segment_layout
from replicas.messages import Segment
from replicas.weights.arena import Buffer
from replicas.weights.layout import copy_elements
from replicas.weights.tensors import dtype_name, torch_dtype, typed

__all__ = ["Scratch", "read_segments", "segments_of", "write_segments"]

KEPT = 6
PAGE_NBYTES = 4096


class Scratch:
    """A few buffers, kept for the next operation. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []
        self._closed = False

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes``.

        :raises replicas.errors.NoCapacity: the memory is not there.
        """
        return self.take_idle(nbytes) or Buffer.allocate(_rounded(nbytes), f"{self._name}-scratch")

    def take_idle(self, nbytes: int) -> Buffer | None:
        """A buffer that was used before; None when there is none of about this size. Never slow."""
        wanted = _rounded(nbytes)
        with self._lock:
            fitting = [buffer for buffer in self._idle if wanted <= buffer.nbytes <= 2 * wanted]
            if not fitting:
                return None
            best = min(fitting, key=lambda buffer: buffer.nbytes)
            self._idle.remove(best)
            return best

    def give(self, buffer: Buffer | None) -> None:
        """Take ``buffer`` back. Nobody may be using it any more."""
        if buffer is None:
            return
        with self._lock:
            if not self._closed:
                self._idle.append(buffer)
                buffer = self._idle.pop(0) if len(self._idle) > KEPT else None
        if buffer is not None:
            buffer.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for buffer in idle:
            buffer.close()


def _rounded(nbytes: int) -> int:
    return max(PAGE_NBYTES, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)


def segments_of(tensors: Sequence[torch.Tensor]) -> tuple[Segment, ...]:
    """How tensors are described to others.

    :raises replicas.errors.ManifestMismatch: a dtype that cannot be moved.
    """
    return tuple(Segment(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)


def write_segments(buffer: Buffer, segments: Sequence[Segment], tensors: Sequence[torch.Tensor]) -> None:
    """Copy ``tensors`` (any strides and device) to their places in ``buffer``."""
    for place, tensor in zip(read_segments(buffer, segments), tensors, strict=True):
        copy_elements(place, tensor.detach())


def read_segments(buffer: Buffer, segments: Sequence[Segment]) -> tuple[torch.Tensor, ...]:
    """Views of ``buffer``, one a segment."""
    offsets, _ = segment_layout(segments)
    data = buffer.tensor()
    return tuple(
        typed(data, offset, torch_dtype(segment.dtype), segment.shape)
        for offset, segment in zip(offsets, segments, strict=True)
    )

"""Reusable buffers for the tensors of operations, and the copies into and out of them.

Fresh pages are slow, so a few buffers are kept. They are in host memory or, for
operations on GPU tensors with ``staging = "device"``, on the rank's GPU.

If a tensor is on a GPU, copies *in* run on the caller's own stream, so that they read
the tensors as that stream leaves them. Copies into GPU memory are only queued (a reader
waits for its buffer's event); for copies from or into host memory the caller waits.
Copies *out* run on another thread, which waits for them, and another stream, behind the
work queued on the caller's stream at the call (:func:`call_point`): when the
operation's Pending resolves, every stream may read the results.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch

from replicas.common.waits import locked
from replicas.core.base.manifest import segment_layout
from replicas.errors import ManifestMismatch, NoCapacity, UsageError
from replicas.messages import Segment
from replicas.weights.copies.accelerator import Accelerator, Event, accelerator, device_of
from replicas.weights.copies.copying import copy_elements
from replicas.weights.copies.tensors import alias_of, dtype_name, torch_dtype, typed, why_unusable, written_as_bits
from replicas.weights.memory.buffers import Buffer

KEPT = 6  # more than the open operations of a program
KEPT_ON_DEVICE = 2  # GPU memory is scarce
PAGE_NBYTES = 4096


class Scratch:
    """Pool of a few idle buffers on GPU ``device`` or in host memory. Thread-safe."""

    def __init__(self, name: str, device: str = "") -> None:
        """Start without buffers; allocate nothing.

        :param name: prefix of the names of the memory.
        :param device: UUID of the GPU; "" for host memory.
        """
        self._name = name
        self._device = device
        self._cap = KEPT_ON_DEVICE if device else KEPT
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []
        self._closed = False

    def take_buffer(self, nbytes: int) -> Buffer:
        """Remove an idle buffer of at least ``nbytes`` and return it, or allocate one.

        The caller owns the buffer until :meth:`give`.

        :raises NoCapacity: there is no memory, though all idle buffers were freed.
        """
        found = self.take_idle(nbytes)
        if found is not None:
            return found
        allocate = partial(Buffer.allocate, _rounded(nbytes), f"{self._name}-scratch", device=self._device)
        try:
            return allocate()
        except NoCapacity:
            if not self._drop_idle():
                raise
            return allocate()

    def take_idle(self, nbytes: int) -> Buffer | None:
        """Remove and return an idle buffer of ``nbytes`` to twice that, or None."""
        return locked(self._lock, self._take_idle, _rounded(nbytes))

    def _take_idle(self, wanted: int) -> Buffer | None:
        """Under the lock: remove and return the smallest buffer from ``wanted`` bytes
        to twice that; None if there is none."""
        # leave much larger buffers for operations that need them
        fitting = [buffer for buffer in self._idle if wanted <= buffer.nbytes <= 2 * wanted]
        if not fitting:
            return None
        best = min(fitting, key=lambda buffer: buffer.nbytes)
        self._idle.remove(best)
        return best

    def give(self, buffer: Buffer | None, *, spoiled: bool = False) -> None:
        """Return ``buffer``, which is no longer in use, to the pool; None does nothing.

        :param spoiled: a process died while it worked on the buffer. On a GPU the
            buffer is freed, because the next writer cannot know when that work ends.
        """
        if buffer is None:
            return
        too_many = locked(self._lock, self._give, buffer, spoiled)
        if too_many is not None:
            too_many.close()

    def _give(self, buffer: Buffer, spoiled: bool) -> Buffer | None:
        """Under the lock: put ``buffer`` into the pool; return one to free, or None.

        If the pool is closed, or on a GPU with ``spoiled`` (a process died while it
        worked on the buffer), ``buffer`` does not join the pool and is returned. If the
        pool has too many buffers now, the oldest is returned.
        """
        if self._closed or (spoiled and self._device):
            return buffer
        self._idle.append(buffer)
        return self._idle.pop(0) if len(self._idle) > self._cap else None

    def close(self) -> None:
        """Free the idle buffers; buffers returned later are freed immediately."""
        self._closed = True
        self._drop_idle()

    def _drop_idle(self) -> bool:
        """Free the idle buffers; return True if there were any."""
        idle = locked(self._lock, self._forget_idle)
        for buffer in idle:
            buffer.close()
        return bool(idle)

    def _forget_idle(self) -> list[Buffer]:
        """Under the lock: empty the pool, and return its idle buffers."""
        idle, self._idle = self._idle, []
        return idle


def _rounded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages, at least a page."""
    return max(PAGE_NBYTES, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)


def segments_of(tensors: Sequence[torch.Tensor]) -> tuple[Segment, ...]:
    """Return dtype and shape of each tensor, as sent to other members."""
    return tuple(Segment(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)


def usable(tensors: Sequence[torch.Tensor], segments: Sequence[Segment | torch.Tensor]) -> list[torch.Tensor]:
    """Return plain aliases of the caller's tensors, after a check that they are usable.

    :param segments: the shapes that the tensors must have, as at the call.
    :raises UsageError: a tensor has no memory, or another shape.
    """
    aliases = list(map(alias_of, tensors))
    for number, (tensor, segment) in enumerate(zip(aliases, segments, strict=True)):
        why = why_unusable(tensor)
        if not why and tuple(tensor.shape) != tuple(segment.shape):
            why = f"has shape {list(tensor.shape)}, and had {list(segment.shape)} at the call"
        if why:
            raise UsageError(f"tensor {number} of the operation {why}", hint="keep its memory until the Pending ends")
    return aliases


def write_segments(buffer: Buffer, segments: Sequence[Segment], tensors: Sequence[torch.Tensor], gpu: str = "") -> None:
    """Copy each tensor to its place in ``buffer``, laid out as ``segments``.

    :param gpu: UUID of the GPU of the tensors: copy on this thread's current stream,
        and wait only for copies that involve host memory; readers of the buffer wait
        for the others. Empty: copy on the CPU.
    :raises UsageError: a tensor has no memory.
    """
    places, tensors = read_segments(buffer, segments), usable(tensors, segments)
    device = device_of(gpu) if gpu else None
    buffer.wait_for_write()
    if copy_each(places, tensors, load=False, device=device) and device is not None:
        device.synchronize(gpu)
    buffer.record_write()


def read_segments(buffer: Buffer, segments: Sequence[Segment]) -> tuple[torch.Tensor, ...]:
    """Return a view of ``buffer`` for each segment, with its dtype and shape."""
    offsets, _ = segment_layout(segments)
    data = buffer.tensor()
    return tuple(
        typed(data, offset, torch_dtype(segment.dtype), segment.shape)
        for offset, segment in zip(offsets, segments, strict=True)
    )


def gpu_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return the UUID of the GPU of the first tensor on a GPU, or ""."""
    found = accelerator()
    if found is None:
        return ""
    return next((uuid for uuid in map(found.uuid_of, tensors) if uuid), "")


def call_point(gpu: str) -> Event:
    """Return a new event behind the work queued on this thread's current stream.

    :param gpu: UUID of the GPU.
    """
    point = device_of(gpu).event(gpu)
    point.record()
    return point


def copy_out(
    gpu: str, targets: Sequence[torch.Tensor], results: Sequence[torch.Tensor], source: Buffer, after: Sequence[Event]
) -> None:
    """Copy ``results`` to ``targets`` on a side stream of ``gpu``, and wait.

    :param gpu: UUID of the GPU of the targets; empty: copy on the CPU.
    :param results: views of the buffer ``source``.
    :param after: events that the copy on a GPU waits for.
    :raises UsageError: a target has no memory, or another shape.
    """
    if not gpu:
        copy_each(usable(targets, results), results, load=True)
        return
    device = device_of(gpu)
    with device.on_side_stream(gpu):
        for event in after:
            event.wait()
        source.wait_for_write()
        tensors = usable(targets, results)  # the program may have changed them since the call
        copy_each(tensors, results, load=True, device=device)
        device.synchronize(gpu)


def copy_each(
    destinations: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    load: bool,
    device: Accelerator | None = None,
) -> bool:
    """Copy pairs on the host, and enqueue those with a tensor on the ``device``.

    Copies on the host use threads, and are waited for. The enqueued ones, on the
    current stream, are not.

    :param load: True if the destinations are the user's, False if the sources are.
    :param device: the accelerator that some tensors are on; None: all are on the host.
    :returns: True if an enqueued copy involves host memory.
    :raises UsageError: a tensor has lost its memory.
    """
    enqueued: list[tuple[torch.Tensor, torch.Tensor]] = []
    with_host = False
    for number, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        if device is not None and (device.owns(destination) or device.owns(source)):
            enqueued.append(written_as_bits(destination, source))
            with_host = with_host or not (device.owns(destination) and device.owns(source))
            continue
        try:
            copy_elements(destination, source, load=load, name=str(number))
        except ManifestMismatch as error:
            raise UsageError(error.message, hint=error.hint) from error
    if device is not None and enqueued:
        device.copy(*zip(*enqueued, strict=True))
    return with_host

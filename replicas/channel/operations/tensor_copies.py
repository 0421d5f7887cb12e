"""Copies between the caller's tensors and scratch buffers, if any of them is on a GPU.

Theory of operation
===================

*In* runs on the caller's own stream, so that it reads the tensors as that stream leaves
them. Copies into GPU memory are only queued (a reader waits for its buffer's event).
Copies from or into host memory are waited for.

*Out* runs on another thread, on a stream of its own, behind the work that was queued on
the caller's stream at the call (:func:`call_point`), and is waited for: when the
operation's Pending resolves, every stream may read the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.weights.copying import copy_elements
from replicas.weights.devices.accelerator import Event, accelerator, device_of
from replicas.weights.memory.buffers import Buffer
from replicas.weights.tensors import written_as_bits

__all__ = ["call_point", "copy_in", "copy_out", "gpu_of"]


def gpu_of(tensors: Sequence[torch.Tensor]) -> str:
    """UUID of the GPU of the first tensor that is on one; empty: all in host memory."""
    found = accelerator()
    if found is None:
        return ""
    return next((uuid for uuid in map(found.uuid_of, tensors) if uuid), "")


def call_point(gpu: str) -> Event:
    """An event behind the work queued on this thread's current stream."""
    point = device_of(gpu).event(gpu)
    point.record()
    return point


def copy_in(gpu: str, places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy the caller's ``tensors`` to ``places``, at least one of them on ``gpu``.

    On the caller's thread.
    """
    device = device_of(gpu)
    if _copy(places, tensors):
        device.synchronize(gpu)


def copy_out(
    gpu: str, targets: Sequence[torch.Tensor], results: Sequence[torch.Tensor], source: Buffer, after: Sequence[Event]
) -> None:
    """Copy ``results`` in ``source`` to ``targets`` after the events, and wait."""
    device = device_of(gpu)
    with device.on_side_stream(gpu):
        for event in after:
            event.wait()
        source.wait_for_write()
        _copy(targets, results)
        device.synchronize(gpu)


def _copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
    """Copy or queue each pair; returns whether a queued copy involves host memory.

    Pairs with both sides in host memory are copied at once.
    """
    device = accelerator()
    if device is None:
        raise ValueError("there is no accelerator")
    enqueued: list[tuple[torch.Tensor, torch.Tensor]] = []
    with_host = False
    for destination, source in zip(destinations, sources, strict=True):
        on_device = device.owns(destination), device.owns(source)
        if any(on_device):
            enqueued.append(written_as_bits(destination.detach(), source.detach()))
            with_host = with_host or not all(on_device)
        else:
            copy_elements(destination.detach(), source.detach())
    if enqueued:
        device.copy(*zip(*enqueued, strict=True))
    return with_host

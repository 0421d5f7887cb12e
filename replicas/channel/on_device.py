"""Slots on a GPU: copies within it.

Theory of operation
===================

Members that share a GPU do not send a version to each other, and none of them keeps a view of another's memory: that ends
with the process that has lent it. Each copies it into a slot of its own, at the speed of the GPU's memory, and says what the
digest of its copy is. The other's memory is open, and held by its locks, only while that takes.

All of this runs on worker threads, on a stream of ours. A copy is over when these return, also when they raise.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from replicas import errors
from replicas.core.manifest import Manifest
from replicas.messages import SlotPlace
from replicas.weights.accelerator import device_of
from replicas.weights.arena import Arena, Slot
from replicas.weights.digest import digest_of
from replicas.weights.parts import part_pairs, scatter_parts

__all__ = ["Copied", "copy_image", "copy_part"]


class Copied(NamedTuple):
    """How long it took, and what came of it."""

    copy_s: float
    verify_s: float
    digest: str


def copy_image(arena: Arena, place: SlotPlace, slot: Slot, device: str) -> Copied:
    """Fill ``slot`` with the image that another member has at ``place``, on the same GPU.

    :raises replicas.errors.Gone: it is not there any more.
    :raises replicas.errors.WorldError: it cannot be opened here, or the GPU has failed.
    """
    started = time.monotonic()
    source = arena.borrow(place, slot.version)
    try:
        wanted, found = slot.buffer.nbytes, source.nbytes
        if wanted != found:
            raise errors.InternalError(f"version {slot.version} has {wanted} bytes, the memory that has it {found}")
        shared = source.readable()
        gpu = device_of(device)
        with gpu.on_side_stream(device):
            try:
                slot.buffer.begin_write()
                source.begin_read()
                gpu.copy([slot.buffer.tensor()], [shared])
                slot.buffer.end_write()
            finally:
                gpu.synchronize(device)
        del shared
    finally:
        source.close()
    copied = time.monotonic()
    digest = digest_of(slot.data, slot.digest_kind)
    return Copied(copied - started, time.monotonic() - copied, digest)


def copy_part(arena: Arena, manifest: Manifest, place: SlotPlace, slot: Slot, device: str) -> None:
    """Put the part that another member has at ``place`` to its places in the image in ``slot``."""
    source = arena.borrow(place, slot.version)
    try:
        if not device:
            scatter_parts(manifest, place.part, source.readable(), slot.data)
            return
        gpu = device_of(device)
        with gpu.on_side_stream(device):
            try:
                slot.buffer.begin_write()
                source.begin_read()
                pairs = list(part_pairs(manifest, place.part, source.readable(), slot.data))
                gpu.copy([one for one, _ in pairs], [one for _, one in pairs])
                slot.buffer.end_write()
            finally:
                gpu.synchronize(device)
            del pairs
    finally:
        source.close()

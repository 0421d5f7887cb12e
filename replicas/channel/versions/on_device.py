"""Slots on a GPU: copies within it.

Theory of operation
===================

Members that share a GPU do not send a version to each other, and none of them keeps a
view of another's memory: that ends with the process that has lent it. Each copies it
into a slot of its own, at the speed of the GPU's memory, and says what the digest of
its copy is. The other's memory is open, and held by its locks, only while that takes.

All of this runs on worker threads, on a stream of ours. A copy is over when these
return, also when they raise.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from replicas import errors
from replicas.core.versions.manifest import Manifest
from replicas.messages import SlotPlace
from replicas.weights.devices.accelerator import device_of
from replicas.weights.digest import digest_of
from replicas.weights.memory.arena import Arena, Buffer, Slot
from replicas.weights.memory.parts import part_pairs, scatter_parts

__all__ = ["Copied", "copy_image", "copy_part"]

END_S = 3.0
"""How long the end of a process is waited for that has begun to end."""
_Pair = tuple[torch.Tensor, torch.Tensor]


class Copied(NamedTuple):
    """How long it took, and what came of it."""

    copy_s: float
    verify_s: float
    digest: str


def copy_image(arena: Arena, place: SlotPlace, slot: Slot, device: str, digest: str) -> Copied:
    """Fill ``slot`` with the image that another member has at ``place``, on the same
    GPU.

    :param digest: which the copy must have; empty: not known.
    :raises replicas.errors.Gone: it is not there any more.
    :raises replicas.errors.WorldError: it cannot be opened here, or the GPU has failed.
    :raises replicas.errors.SyncError: what was found there is something else.
    """
    started = time.monotonic()
    with _lent(place, slot.version):
        source = arena.borrow(place, slot.version)
        try:
            wanted, found = slot.buffer.nbytes, source.nbytes
            if wanted != found:
                raise errors.InternalError(f"version {slot.version} has {wanted} bytes, the memory that has it {found}")
            _copy(slot, source, device, lambda shared: [(slot.buffer.tensor(), shared)])
        finally:
            source.close()
        copied = time.monotonic()
        found_digest = digest_of(slot.data, slot.digest_kind)
        if digest and found_digest != digest:
            what = f"the copy of version {slot.version} on GPU {device} is not what process {place.pid} has"
            raise errors.SyncError(what, phase="verify", version=slot.version)
    return Copied(copied - started, time.monotonic() - copied, found_digest)


def copy_part(arena: Arena, manifest: Manifest, place: SlotPlace, slot: Slot, device: str) -> None:
    """Put the part that another member has at ``place`` to its places in the image in
    ``slot``; errors as above."""
    with _lent(place, slot.version):
        source = arena.borrow(place, slot.version)
        try:
            if device:
                _copy(slot, source, device, lambda shared: list(part_pairs(manifest, place.part, shared, slot.data)))
            else:
                scatter_parts(manifest, place.part, source.readable(), slot.data)
        finally:
            source.close()


def _copy(slot: Slot, source: Buffer, device: str, pairs: Callable[[torch.Tensor], list[_Pair]]) -> None:
    """Copy to the first of each pair the second. ``pairs``: made of the memory that is
    read, which nobody keeps."""
    gpu = device_of(device)
    found = pairs(source.readable())
    with gpu.on_side_stream(device):
        try:
            gpu.copy([one for one, _ in found], [one for _, one in found])
        finally:
            gpu.synchronize(device)


@contextmanager
def _lent(place: SlotPlace, version: int) -> Iterator[None]:
    """What fails because the process has ended whose memory it is, is Gone: nothing is
    wrong with this one."""
    try:
        yield
    except (RuntimeError, errors.WorldError, errors.SyncError) as error:
        if _is_there(place):
            raise
        _await_end(place.pid)
        if isinstance(error, errors.Gone):
            raise
        what = f"version {version} in the memory of process {place.pid} was lost with that process"
        raise errors.Gone(what, version=version) from error


def _is_there(place: SlotPlace) -> bool:
    try:
        return Path(f"/proc/{place.pid}/fd/{place.fd}").stat().st_ino == place.inode
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # it may not be looked at
        return True


def _await_end(pid: int) -> None:
    """A process that ends has closed its files, and may take a while to give its GPU
    back; only then is it known to be lost. Until then nobody has a better place to
    offer. One that has files has not ended."""
    try:
        if any(Path(f"/proc/{pid}/fd").iterdir()):
            return
        pidfd = os.pidfd_open(pid)
    except OSError:  # it has ended, or is none of ours
        return
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll(END_S * 1000)
    finally:
        os.close(pidfd)

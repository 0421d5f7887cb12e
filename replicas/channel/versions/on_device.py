"""Copies between slots of members that share a GPU.

Members that share a GPU do not send a version to each other, nor keep a view of each
other's memory, which ends with the process that owns it. Each copies the version into a
slot of its own, at the speed of the GPU's memory, and reports the digest of its copy.
The other member's memory is mapped and locked only during the copy.

All of this runs on worker threads, on a side stream. A copy is over when these
functions return or raise.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from replicas import errors
from replicas.core.base.manifest import Manifest
from replicas.messages import SlotPlace
from replicas.weights.copies.accelerator import device_of
from replicas.weights.copies.copying import copy_pairs
from replicas.weights.copies.digest import digest_of
from replicas.weights.loading import piece_pairs
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer

END_S = 3.0
"""Seconds to wait for the end of a process that has begun to end."""
_Pair = tuple[torch.Tensor, torch.Tensor]


def copy_image(arena: Arena, place: SlotPlace, slot: Slot, device: str, digest: str) -> tuple[str, float, float]:
    """Fill ``slot`` with another member's image at ``place``, on the same GPU.

    :param digest: expected digest, or "" if unknown.
    :returns: digest, seconds of the copy, seconds of the digest.
    :raises Gone: the image is no longer there.
    :raises WorldError: it cannot be opened, or the GPU has failed.
    :raises SyncError: the digest is wrong.
    """
    started = time.monotonic()
    with _gone_if_owner_ended(place, slot.version):
        with closing(arena.borrow(place, slot.version)) as source:
            wanted, found = slot.buffer.nbytes, source.nbytes
            if wanted != found:
                raise errors.InternalError(f"version {slot.version} has {wanted} bytes, but its memory {found}")
            _copy(slot, source, device, lambda shared: [(slot.buffer.tensor(), shared)])
        copied = time.monotonic()
        found_digest = digest_of(slot.data, slot.digest_kind)
        if digest and found_digest != digest:
            what = f"the copy of version {slot.version} on GPU {device} differs from the image of process {place.pid}"
            raise errors.SyncError(what, phase="verify", version=slot.version)
    return found_digest, copied - started, time.monotonic() - copied


def copy_part(arena: Arena, manifest: Manifest, place: SlotPlace, slot: Slot, device: str) -> None:
    """Copy another member's part into the image in ``slot``; see :func:`copy_image`."""
    with _gone_if_owner_ended(place, slot.version), closing(arena.borrow(place, slot.version)) as source:
        if device:
            pieces = (manifest.parts or ())[place.part]
            _copy(slot, source, device, lambda shared: list(piece_pairs(manifest, pieces, shared, slot.data)))
        else:
            put_part(manifest, place.part, source.readable(), slot)


def put_part(manifest: Manifest, part: int, source: torch.Tensor, slot: Slot, device: str = "") -> None:
    """Copy a part (-1: a whole image) from host memory (uint8) into ``slot``."""
    pairs = (
        [(slot.data, source)]
        if part < 0
        else list(piece_pairs(manifest, (manifest.parts or ())[part], source, slot.data))
    )
    if device:
        _copy_pairs_on(device, pairs)
    else:
        copy_pairs(pairs)


def take_out(slot: Slot, target: torch.Tensor, device: str) -> None:
    """Copy the data of a complete slot on a GPU into host memory."""
    _copy_pairs_on(device, [(target, slot.data)])


def _copy(slot: Slot, source: Buffer, device: str, pairs: Callable[[torch.Tensor], list[_Pair]]) -> None:
    """Copy the second tensor of each pair to the first.

    ``pairs`` makes the pairs from the source's memory, and keeps no reference to it.
    """
    _copy_pairs_on(device, pairs(source.readable()))


def _copy_pairs_on(device: str, pairs: list[_Pair]) -> None:
    gpu = device_of(device)
    with gpu.on_side_stream(device):
        try:
            gpu.copy([one for one, _ in pairs], [one for _, one in pairs])
        finally:
            gpu.synchronize(device)


@contextmanager
def _gone_if_owner_ended(place: SlotPlace, version: int) -> Iterator[None]:
    """Turn an error into Gone if the process that owns the memory has ended."""
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
    except OSError:  # no permission to look
        return True


def _await_end(pid: int) -> None:
    """Wait until an ending process has ended, so that its members count as lost.

    It has closed its files, and may take a while to release its GPU; before its end
    the coordinator has no better place to offer.
    """
    try:
        if any(Path(f"/proc/{pid}/fd").iterdir()):
            return
        pidfd = os.pidfd_open(pid)
    except OSError:  # it has ended, or belongs to another user
        return
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll(END_S * 1000)
    finally:
        os.close(pidfd)

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
from collections.abc import Iterator
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

END_S = 3.0
"""Seconds to wait for the end of a process that has begun to end."""


def copy_image(arena: Arena, place: SlotPlace, slot: Slot, device: str, digest: str) -> tuple[str, float, float]:
    """Copy another member's version at ``place`` into ``slot``, both on GPU ``device``.

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
            _copy_pairs(device, [(slot.buffer.tensor(), source.readable())])
        copied = time.monotonic()
        found_digest = digest_of(slot.data, slot.digest_kind)
        if digest and found_digest != digest:
            what = f"the copy of version {slot.version} on GPU {device} differs from its source in process {place.pid}"
            raise errors.SyncError(what, phase="verify", version=slot.version)
    return found_digest, copied - started, time.monotonic() - copied


def copy_part(arena: Arena, manifest: Manifest, place: SlotPlace, slot: Slot, device: str) -> None:
    """Copy one part of a version out of another member's memory into ``slot``; wait.

    :param manifest: of the version: tells where the part's pieces belong.
    :param place: the memory that has the part; its ``part`` is the part's number.
    :param device: UUID of the GPU that both are on; "" for host memory.
    :raises Gone: the part is no longer there.
    :raises WorldError: it cannot be opened, or the GPU has failed.
    """
    with _gone_if_owner_ended(place, slot.version), closing(arena.borrow(place, slot.version)) as source:
        put_part(manifest, place.part, source.readable(), slot, device)


def put_part(manifest: Manifest, part: int, source: torch.Tensor, slot: Slot, device: str = "") -> None:
    """Copy a part of a version from ``source`` (uint8) into ``slot``, and wait.

    :param part: its number in the manifest; -1 if ``source`` is the whole version.
    :param device: UUID of the slot's GPU; "" for host memory.
    """
    if part < 0:
        _copy_pairs(device, [(slot.data, source)])
    else:
        _copy_pairs(device, list(piece_pairs(manifest, (manifest.parts or ())[part], source, slot.data)))


def take_out(slot: Slot, target: torch.Tensor, device: str) -> None:
    """Copy the data of a slot on GPU ``device`` to ``target``, in host memory; wait."""
    _copy_pairs(device, [(target, slot.data)])


def _copy_pairs(device: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (destination, source) pairs, and wait.

    :param device: UUID of the GPU on whose side stream to copy; "" for host memory.
    """
    if not device:
        copy_pairs(pairs)
        return
    gpu = device_of(device)
    with gpu.on_side_stream(device):
        try:
            gpu.copy([one for one, _ in pairs], [one for _, one in pairs])
        finally:
            gpu.synchronize(device)


@contextmanager
def _gone_if_owner_ended(place: SlotPlace, version: int) -> Iterator[None]:
    """Context manager: turn an error of the block into Gone if the memory's owner died.

    After such an error first wait, for 3 s at most, for the end of the process. Any
    other error passes unchanged.

    :param place: the memory that the block reads. :param version: for the error.
    """
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
    """Return True if the process of ``place`` still has that memory open.

    Return True, too, if this process has no permission to see that. Does not block.
    """
    try:
        return Path(f"/proc/{place.pid}/fd/{place.fd}").stat().st_ino == place.inode
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # no permission to look
        return True


def _await_end(pid: int) -> None:
    """Wait up to 3 s for the end of a process that has closed its files.

    It may take a while to release its GPU, and its members count as lost after that
    only. Returns immediately if the process is not ending.
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

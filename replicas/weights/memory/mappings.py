"""Mappings of shared memory as tensors, populated without the GIL.

Theory of operation
===================

The first touch of a page through a new mapping costs a page fault, and an allocation if
no process has touched the page yet: together ten times the copy. ``madvise`` does both
for many pages at once. It is called through ctypes, which releases the GIL;
``mmap.madvise`` does not.

Every mapping is made through a *file description of its own* (the file is reopened),
because Python's mmap keeps a duplicate of the descriptor: a buffer's locks must end
with the buffer, not with the last tensor.

*Kept mappings.* An owner alternates between a few buffers, and a reader maps each of
them again and again. A mapping for reading shows all later writes of the owner, so it
can be reused: :class:`KeptMappings` keeps it, and the next mapping of the same file
(the same inode) costs nothing. A kept mapping keeps memory alive that its owner may
have closed. Therefore a mapping that no held slot uses is dropped when the owner's
descriptor is no longer that file, or when it was not used for :data:`KEPT_USES`
versions. A file whose mapping is kept cannot end, so its inode number is not reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy
import torch

from replicas.common.waits import locked
from replicas.linux import locks
from replicas.linux.files import reopen
from replicas.memory.living import Living
from replicas.messages import SlotPlace
from replicas.weights.devices.accelerator import Accelerator, Registration

__all__ = ["KEPT_USES", "KeptMappings", "map_private", "map_readable", "map_shared"]

KEPT_USES = 8
"""A kept mapping is dropped after this many uses of others."""

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module of Python 3.11 has no names for them
_MADV_POPULATE_WRITE = 23
_POPULATE_NBYTES = 32 << 20
_UNPIN_S = 30.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_shared(fd: int, nbytes: int, check: Callable[[], None]) -> torch.Tensor:
    """Map shared memory for reading and writing, with all its pages.

    ``check`` is called every few megabytes, and may raise.
    """
    own = reopen(fd, os.O_RDWR)
    try:
        mapping = mmap.mmap(own, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(own)
    tensor = _bytes_of(mapping)
    _populate(tensor.data_ptr(), nbytes, _MADV_POPULATE_WRITE, check)
    return tensor


def _bytes_of(mapping: object) -> torch.Tensor:
    """A tensor over memory, which it keeps alive.

    Any thread may write to it, whatever inference mode this thread is in.
    """
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8)


def map_readable(fd: int, nbytes: int) -> torch.Tensor:
    """Map shared memory for reading, with all its pages; writing is a SIGSEGV."""
    own = reopen(fd)
    try:
        mapping = mmap.mmap(own, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(own)
    address = numpy.frombuffer(mapping, dtype=numpy.uint8).ctypes.data
    # torch has no read-only tensors, and warns about buffers that report themselves as
    # read-only; this array does not.
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.mapping = mapping  # type: ignore[attr-defined]  # lives as long as the array, which the tensor keeps
    tensor = _bytes_of(array)
    _populate(address, nbytes, _MADV_POPULATE_READ, lambda: None)
    return tensor


def map_private(fd: int, nbytes: int) -> torch.Tensor:
    """Map copy-on-write, marked as mapped while it lives, here or in a forked child.

    It is not populated: faulting pages in as they are read costs less.
    """
    own = reopen(fd)
    try:
        locks.mark(own, locks.MAPPED)
        # The mapping keeps a duplicate of `own`, and so the mark, until it is gone.
        mapping = mmap.mmap(own, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(own)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _populate(address: int, nbytes: int, advice: int, check: Callable[[], None]) -> None:
    for start in range(0, nbytes, _POPULATE_NBYTES):
        check()
        if _libc.madvise(address + start, min(_POPULATE_NBYTES, nbytes - start), advice):
            number = ctypes.get_errno()
            if number != errno.EINVAL:
                raise OSError(number, os.strerror(number))
            return  # a kernel before 5.14 has no such advice; pages then come at first touch


class _Kept:
    def __init__(self, tensor: torch.Tensor, place: SlotPlace, used: int) -> None:
        self.tensor = tensor
        self.place = place
        self.used = used
        self.pin: Registration | None = None
        self.pin_refused = self.dropped = False
        self.pinning = threading.Lock()  # not the shared lock: pinning takes as long as a copy

    def drop(self) -> Registration | None:
        self.dropped = True
        return self.pin


class KeptMappings:
    """Kept read-only mappings, by inode. Thread-safe."""

    _living: Living[KeptMappings] = Living()

    def __init__(self) -> None:
        self._living.add(self)
        self._lock = threading.Lock()
        self._kept: dict[int, _Kept] = {}
        self._uses = 0
        self._unpinning: list[threading.Thread] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, inode: int, nbytes: int) -> torch.Tensor | None:
        """The kept mapping of this file, or None."""
        return locked(self._lock, self._find, inode, nbytes)

    def _find(self, inode: int, nbytes: int) -> torch.Tensor | None:
        kept = self._kept.get(inode)
        if kept is None or kept.tensor.numel() != nbytes:
            return None
        self._uses += 1
        kept.used = self._uses
        return kept.tensor

    def keep(self, place: SlotPlace, tensor: torch.Tensor) -> None:
        """Keep the mapping of the file at ``place``."""
        _unpin([locked(self._lock, self._keep, place, tensor)])

    def _keep(self, place: SlotPlace, tensor: torch.Tensor) -> Registration | None:
        self._uses += 1
        if self._closed:
            return None
        before = self._kept.get(place.inode)
        self._kept[place.inode] = _Kept(tensor, place, self._uses)
        return None if before is None else before.drop()

    def pin(self, inode: int, tensor: torch.Tensor, device: Accelerator) -> bool | None:
        """Pin the kept mapping of this file for copies to ``device``.

        It stays pinned while it is kept. False: it cannot be pinned; None: ``tensor``
        is not kept.
        """
        kept = self._kept.get(inode)
        return None if kept is None or kept.tensor is not tensor else locked(kept.pinning, self._pin, kept, device)

    def _pin(self, kept: _Kept, device: Accelerator) -> bool | None:
        if kept.pin is not None or kept.pin_refused:
            return kept.pin is not None
        pin = device.register(kept.tensor, read_only=True)
        if locked(self._lock, self._pinned, kept, pin):
            return pin is not None
        if pin is not None:
            pin.close()
        return None

    @staticmethod
    def _pinned(kept: _Kept, pin: Registration | None) -> bool:
        if not kept.dropped:
            kept.pin, kept.pin_refused = pin, pin is None
        return not kept.dropped

    def sweep(self, needed: Iterable[int]) -> None:
        """Drop mappings no longer needed; ``needed``: inodes of the held slots."""
        wanted = set(needed)
        pins: list[Registration | None] = []
        with self._lock:
            for inode, kept in list(self._kept.items()):
                if inode not in wanted and (self._uses - kept.used >= KEPT_USES or not _is_there(kept.place)):
                    pins.append(self._kept.pop(inode).drop())
        if any(pins):  # the caller must not wait
            thread = threading.Thread(target=_unpin, args=(pins,), name="replicas unpin", daemon=True)
            thread.start()
            self._unpinning = [*(one for one in self._unpinning if one.is_alive()), thread]

    def close(self) -> None:
        """Drop all mappings, and keep none from now on."""
        with self._lock:
            self._closed = True
            pins = [kept.drop() for kept in self._kept.values()]
            self._kept.clear()
        _unpin(pins)
        for thread in self._unpinning:
            thread.join(_UNPIN_S)

    def forget(self) -> None:
        """Drop all mappings in a forked child; the pins are the parent's, and stay."""
        self._lock, self._kept, self._unpinning, self._closed = threading.Lock(), {}, [], True


def _forget_all() -> None:
    for kept in list(KeptMappings._living):
        kept.forget()


os.register_at_fork(after_in_child=_forget_all)


def _unpin(pins: Iterable[Registration | None]) -> None:
    for pin in pins:
        if pin is not None:
            pin.close()


def _is_there(place: SlotPlace) -> bool:
    """Whether the owner still has this file under that descriptor."""
    with contextlib.suppress(OSError):  # the process has ended, or its /proc cannot be read
        return Path(f"/proc/{place.pid}/fd/{place.fd}").stat().st_ino == place.inode
    return False

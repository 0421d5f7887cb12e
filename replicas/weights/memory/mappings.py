"""Mappings of shared memory as tensors: populated without the GIL, and kept for reuse.

Theory of operation
===================

The first touch of a page through a new mapping costs a page fault, and an allocation if
no process has touched it yet: together ten times the copy. ``madvise`` does both for
many pages in one call, through ctypes, which releases the GIL; ``mmap.madvise`` does
not.

Every mapping has a *file description of its own* (the file is reopened), because
Python's mmap keeps a duplicate of the descriptor: a buffer's locks must end with the
buffer, not with the last tensor.

*Kept mappings.* A reader maps the few buffers of an owner repeatedly. A mapping for
reading shows all later writes of the owner, so :class:`KeptMappings` keeps it for the
next mapping of the same file (the same inode). This keeps memory alive that its owner
may have closed. So a mapping that no held slot uses is dropped when the owner's
descriptor is no longer that file, or when it was not used for :data:`KEPT_USES`
versions. A file whose mapping is kept cannot end, so its inode number is not reused.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import operator
import os
import threading
from collections.abc import Callable, Iterable

import numpy
import torch

from replicas.common.sizes import size_text
from replicas.common.waits import locked
from replicas.errors import NoCapacity
from replicas.linux import locks
from replicas.linux.files import reopen
from replicas.linux.scarce import SCARCE, describe_limit
from replicas.memory.held_memory import Living, is_there
from replicas.messages import SlotPlace
from replicas.weights.copies.accelerator import Accelerator, Registration

KEPT_USES = 8
"""A kept mapping is dropped after this many uses of others."""

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module of Python 3.11 has no names for them
_MADV_POPULATE_WRITE = 23
_POPULATE_NBYTES = 32 << 20  # between two checks whether to stop
_UNPIN_S = 30.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """Mapped memory as a tensor, pinned at most once.

    :ivar read_only: writing to it is a SIGSEGV.
    :ivar kept: place of the memory, if a :class:`KeptMappings` keeps and unpins it.
    :ivar used: the number of its last use there.
    """

    def __init__(self, tensor: torch.Tensor, *, read_only: bool = False) -> None:
        """Keep a tensor over mapped memory; pin nothing.

        :param tensor: uint8 of shape ``[nbytes]``.
        """
        self.tensor = tensor
        self.kept: SlotPlace | None = None
        self.used = 0
        self.read_only = read_only
        self._pin: Registration | None = None
        self._refused = False
        self._pinning = threading.Lock()

    @property
    def pinned(self) -> bool:
        """True if the memory is pinned."""
        return self._pin is not None

    def pin(self, device: Accelerator) -> bool:
        """Pin the memory for copies with a device; takes about as long as a copy.

        Return True if it is pinned, also if it was before; False if that is impossible.
        """
        return locked(self._pinning, self._register, device)

    def _register(self, device: Accelerator) -> bool:
        """Pin the memory, at most once; return True if it is pinned. Needs the lock."""
        if self._pin is None and not self._refused:
            self._pin = device.register(self.tensor, read_only=self.read_only)
            self._refused = self._pin is None
        return self.pinned

    def unpin(self) -> None:
        """Unpin the memory, if it is pinned; no copy may be in flight."""
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.close()


def map_shared(fd: int, nbytes: int, check: Callable[[], None] = lambda: None) -> Mapping:
    """Map a file for reading and writing, as a tensor, and touch all its pages.

    Blocks for that. The caller still owns ``fd``.

    :param check: called every 32 MiB; may raise to stop.
    :raises NoCapacity: a limit of memory or mappings is reached.
    """
    tensor = _bytes_of(_mapped(fd, nbytes, os.O_RDWR, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
    _populate(tensor.data_ptr(), nbytes, _MADV_POPULATE_WRITE, check)
    return Mapping(tensor)


def map_readable(fd: int, nbytes: int) -> Mapping:
    """Map a file for reading, as a tensor of bytes, and touch all its pages.

    Blocks for that. A write to the tensor is a SIGSEGV. The caller still owns ``fd``.

    :raises NoCapacity: a limit of memory or mappings is reached.
    """
    mapping = _mapped(fd, nbytes, os.O_RDONLY, mmap.MAP_SHARED, mmap.PROT_READ)
    address = numpy.frombuffer(mapping, dtype=numpy.uint8).ctypes.data
    # torch has no read-only tensors, and warns about read-only buffers; this array does
    # not report that it is one.
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.mapping = mapping  # type: ignore[attr-defined]  # the tensor keeps the array, and this the mapping
    tensor = _bytes_of(array)
    _populate(address, nbytes, _MADV_POPULATE_READ, lambda: None)
    return Mapping(tensor, read_only=True)


def map_private(fd: int, nbytes: int) -> torch.Tensor:
    """Map a file copy-on-write, as a tensor; its pages are read at their first use.

    While the tensor lives, the file's owner sees that it is mapped (a flag on the
    file).

    :raises NoCapacity: a limit of memory or mappings is reached.
    """
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    return torch.frombuffer(_mapped(fd, nbytes, os.O_RDONLY, mmap.MAP_PRIVATE, prot, flag=True), dtype=torch.uint8)


def _mapped(fd: int, nbytes: int, mode: int, flags: int, prot: int, *, flag: bool = False) -> mmap.mmap:
    """Map a file, through a descriptor of its own, which keeps no lock of ``fd``.

    :param mode: for :func:`os.open`; ``flags`` and ``prot`` are those of ``mmap``.
    :param flag: flag the file as mapped while the mapping lives.
    :raises NoCapacity: a limit of memory or mappings is reached.
    """
    try:
        own = reopen(fd, mode)
        try:
            if flag:  # the mapping keeps a duplicate of `own`, and so the flag, until it is gone
                locks.flag(own, locks.MAPPED)
            return mmap.mmap(own, nbytes, flags=flags, prot=prot)
        finally:
            os.close(own)
    except OSError as error:
        if error.errno not in SCARCE:
            raise
        raise _too_little(nbytes, error) from error


def _too_little(nbytes: int, error: OSError) -> NoCapacity:
    """Return the error for memory that cannot be mapped.

    It names the limit and remedy.
    """
    why, remedy = describe_limit(error)
    return NoCapacity(f"{size_text(nbytes)} of shared memory cannot be mapped: {why}", hint=remedy)


def _bytes_of(mapping: object) -> torch.Tensor:
    """Return a uint8 tensor over ``mapping``, which it keeps alive."""
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _populate(address: int, nbytes: int, advice: int, check: Callable[[], None]) -> None:
    """Have the kernel allocate and map all pages now, in steps of 32 MiB. Blocks.

    :param address: of the first page. :param advice: the ``madvise`` constant, for
        reading or for writing. :param check: called before each step; may raise to
        stop.
    :raises NoCapacity: too little memory is left. :raises OSError: another error.
    """
    for start in range(0, nbytes, _POPULATE_NBYTES):
        check()
        if _libc.madvise(address + start, min(_POPULATE_NBYTES, nbytes - start), advice):
            number = ctypes.get_errno()
            if number == errno.ENOMEM:
                raise _too_little(nbytes, OSError(number, os.strerror(number)))
            if number != errno.EINVAL:
                raise OSError(number, os.strerror(number))
            return  # a kernel before 5.14 lacks this advice; pages then come at first touch


class KeptMappings:
    """Read-only mappings of others' memory, kept for reuse, by inode. Thread-safe."""

    _living: Living[KeptMappings] = Living(operator.methodcaller("close_after_fork"))

    def __init__(self) -> None:
        """Begin with no mapping kept."""
        self._living.add(self)
        self._lock = threading.RLock()  # a finaliser may close a buffer within any method
        self._kept: dict[int, Mapping] = {}
        self._uses = 0
        self._unpinning: list[threading.Thread] = []
        self._closed = False

    def __len__(self) -> int:
        """Return how many mappings are kept."""
        return len(self._kept)

    def map(self, fd: int, place: SlotPlace) -> Mapping:
        """Return a mapping of another process's file: a kept one, or one of ``fd``.

        A new one is kept for later calls. The caller closes ``fd`` in both cases.

        :param place: where the file is; its inode identifies it.
        """
        found = locked(self._lock, self._find, place.inode, place.nbytes)
        if found is None:
            found = map_readable(fd, place.nbytes)
            before = locked(self._lock, self._keep, place, found)
            if before is not None:
                before.unpin()
        return found

    def _find(self, inode: int, nbytes: int) -> Mapping | None:
        """Return the kept mapping of this file, or None; counts as a use.

        Needs the lock.
        """
        kept = self._kept.get(inode)
        if kept is None or kept.tensor.numel() != nbytes:
            return None
        self._uses += 1
        kept.used = self._uses
        return kept

    def _keep(self, place: SlotPlace, mapping: Mapping) -> Mapping | None:
        """Keep a mapping, unless this is closed; needs the lock.

        Return an older mapping of the same inode, which the caller must unpin, or None.
        """
        self._uses += 1
        if self._closed:
            return None
        before = self._kept.get(place.inode)
        if before is not None:
            before.kept = None
        self._kept[place.inode] = mapping
        mapping.kept, mapping.used = place, self._uses
        return before

    def sweep(self, needed: Iterable[int]) -> None:
        """Drop mappings of no further use, and unpin them on a new thread.

        They are those whose file its owner has closed, or which were not used for
        :data:`KEPT_USES` versions.

        :param needed: inodes of files whose mappings stay in any case.
        """
        wanted = set(needed)
        dropped: list[Mapping] = []
        with self._lock:
            for inode, kept in list(self._kept.items()):
                if inode in wanted:
                    continue
                place = kept.kept
                old = self._uses - kept.used >= KEPT_USES or place is None or not is_there(place)
                if old and self._kept.pop(inode, None) is not None:  # else a finaliser has dropped it
                    dropped.append(kept)
                    kept.kept = None
        self._let_go(dropped)

    def drop(self, inode: int) -> None:
        """Forget the mapping of the file ``inode``, which will not be filled again.

        Unpin it on a new thread.
        """
        with self._lock:
            found = self._kept.pop(inode, None)
            if found is not None:
                found.kept = None
        self._let_go([found] if found is not None else [])

    def _let_go(self, dropped: list[Mapping]) -> None:
        """Unpin mappings that were dropped, on a new thread, as that takes long."""
        if any(one.pinned for one in dropped):  # unpinning takes long
            thread = threading.Thread(target=_unpin, args=(dropped,), name="replicas unpin", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread left; better slow than pinned for ever
                _unpin(dropped)
                return
            self._unpinning = [*(one for one in self._unpinning if one.is_alive()), thread]

    def close(self) -> None:
        """Drop and unpin all mappings, and keep none from now on.

        Wait for the unpinning.
        """
        with self._lock:
            self._closed = True
            dropped = list(self._kept.values())
            self._kept.clear()
            for one in dropped:
                one.kept = None
        _unpin(dropped)
        for thread in self._unpinning:
            thread.join(_UNPIN_S)

    def close_after_fork(self) -> None:
        """Drop all mappings in a forked child; the pins are the parent's, and stay."""
        self._lock, self._kept, self._unpinning, self._closed = threading.RLock(), {}, [], True


def _unpin(mappings: Iterable[Mapping]) -> None:
    """Unpin all these mappings; blocks, about as long as a copy of them takes."""
    for mapping in mappings:
        mapping.unpin()

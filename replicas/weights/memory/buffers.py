"""Anonymous shared memory: one's own, and that of others on the same host.

Theory of operation
===================

A :class:`Buffer` is a memfd: it has no name in any file system, so that nothing is left
when every process that has it is killed. Its pages are allocated at once
(``posix_fallocate``: a clean error in place of a SIGBUS later) and mapped at once (the
first touch of a page is ten times slower than the next).

Sidecars get its descriptor, and so share it. Other members *open* it
(:meth:`Buffer.open`) through ``/proc`` of the process that has it, read-only, and get
locks of their own (see :mod:`replicas.linux.locks`). Such a buffer is for reading: by
ourselves through :meth:`Buffer.readable`, which is never handed out, and by users
through :meth:`Buffer.private`.

The bytes may be in the memory of a GPU in place of the file:
:mod:`replicas.weights.devices.device_buffers`. The file is a page then that tells how
to open them, and everything about locks is as it is here.

The owner *claims* its buffer before it writes, *offers* it when a version is complete
in it, and asks before the next claim whether somebody's mapping of it is still alive.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
from collections.abc import Callable
from typing import ClassVar, Literal, Protocol

import torch

from replicas.common.waits import locked
from replicas.errors import NoCapacity
from replicas.linux import locks
from replicas.memory.kept import hold
from replicas.memory.living import Living
from replicas.messages import SlotPlace
from replicas.weights.devices.accelerator import Accelerator, Registration, accelerator
from replicas.weights.memory.capacity import check_capacity
from replicas.weights.memory.mappings import KeptMappings, map_private, map_readable, map_shared

__all__ = ["AllocationStopped", "Buffer", "BufferWatcher", "Claim", "DeviceKind"]

_ALLOCATE_NBYTES = 64 << 20

Claim = Literal["claimed", "held", "in sight"]


class AllocationStopped(Exception):  # not an error: somebody asked for it
    """``stop`` said so."""


class BufferWatcher(Protocol):
    """Someone who has a mapping of a buffer in another process."""

    def buffer_closed(self, key: int) -> None: ...


class DeviceKind(Protocol):
    """Makes buffers whose bytes are on a GPU."""

    def allocate_on(self, device: str, nbytes: int, name: str, *, stop: Callable[[], bool]) -> Buffer:
        """See :meth:`Buffer.allocate`."""

    def adopted(self, fd: int, device: str, *, writable: bool) -> Buffer:
        """See :meth:`Buffer.adopt`."""


class Buffer:
    """Anonymous shared memory.

    :ivar fd: its descriptor (close-on-exec), owned by this object.
    :ivar nbytes: how many bytes it has.
    :ivar device: UUID of the GPU on which the bytes are; empty: they are in the file.
    :ivar key: a number that no other buffer of this process ever has.
    :ivar watchers: told (``buffer_closed(key)``, on the closing thread) when it is
        closed; held weakly.
    :ivar writable: False for the memory of somebody else.
    :ivar serial: how often it has been filled.
    :ivar offered: the version that came of the last time, for others to hold; 0: none.
    :ivar released: nobody who can be heard of still needs that version.
    :cvar on_device: set by :mod:`replicas.weights.devices.device_buffers`, which is
        above this module.
    """

    on_device: ClassVar[DeviceKind]
    _keys = itertools.count(1)
    _living: Living[Buffer] = Living()
    device = ""

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        """``fd`` is owned from now on. Its locks are left alone: they may be those of
        the process that it came from."""
        self.fd = fd
        self.nbytes = nbytes
        self.key = next(self._keys)
        self.watchers: Living[BufferWatcher] = Living()
        self.writable = writable
        self.serial = 0
        self.offered = 0
        self.released = False
        self._locks_in = 0
        self._lock = threading.Lock()
        self._mapped: torch.Tensor | None = None
        self._origin: SlotPlace | None = None
        self._kept: KeptMappings | None = None
        self._pin: Registration | None = None
        self._pin_refused = False
        self._pinning = threading.Lock()
        self._living.add(self)

    @staticmethod
    def allocate(nbytes: int, name: str, *, stop: Callable[[], bool] = lambda: False, device: str = "") -> Buffer:
        """A new buffer whose pages are all there. ``name`` shows in ``/proc/PID/maps``.

        :param stop: asked every few megabytes whether to give up.
        :param device: UUID of the GPU on which it is to be.
        :raises NoCapacity: the machine, the cgroup or the GPU has less than ``nbytes``
            left.
        :raises AllocationStopped: ``stop`` said so.
        """
        if device:
            return Buffer.on_device.allocate_on(device, nbytes, name, stop=stop)
        what = f"the buffer {name!r}"
        check_capacity(nbytes, what)
        buffer = Buffer(os.memfd_create(name[:200], os.MFD_CLOEXEC), nbytes)
        buffer._locks_in = os.getpid()

        def check() -> None:
            if stop():
                raise AllocationStopped

        try:
            for start in range(0, nbytes, _ALLOCATE_NBYTES):
                check()
                check_capacity(nbytes - start, what)  # others allocate, too
                os.posix_fallocate(buffer.fd, start, min(_ALLOCATE_NBYTES, nbytes - start))
            if nbytes:
                buffer._mapped = map_shared(buffer.fd, nbytes, check)
        except (OSError, ValueError) as error:
            buffer.close()
            raise NoCapacity(f"{what} of {nbytes} bytes cannot be allocated: {error}") from error
        except BaseException:
            buffer.close()
            raise
        return buffer

    @staticmethod
    def adopt(fd: int, device: str = "") -> Buffer:
        """A buffer that came as a descriptor from another process; ``fd`` is owned from
        now on.

        :param device: UUID of the GPU on which it is.
        :raises WorldError: what the descriptor tells of memory on a GPU cannot be used
            here.
        """
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        if device:
            return Buffer.on_device.adopted(fd, device, writable=writable)
        return Buffer(fd, os.fstat(fd).st_size, writable=writable)

    @staticmethod
    def open(place: SlotPlace, version: int) -> Buffer:
        """The memory of another process on this host, held: it cannot be refilled until
        it is closed.

        That the process is the one that is meant must be known beforehand.

        :param place: as its owner, or another one that holds it, has named it.
        :param version: what is in it, for texts.
        :raises Gone: the process has ended, or the memory is not there any more, or is
            used for something else.
        :raises WorldError: it cannot be opened here, though it may be there.
        """
        fd = hold(place, version)
        buffer: Buffer
        if place.device:
            buffer = Buffer.on_device.adopted(fd, place.device, writable=False)
        else:
            buffer = Buffer(fd, place.nbytes, writable=False)
        buffer._locks_in = os.getpid()
        buffer.serial, buffer.offered, buffer._origin = place.serial, version, place
        return buffer

    # ------------------------------------------------------------ for the owner

    def claim(self) -> Claim:
        """Before writing: nobody can come and hold it from now on, and nobody looks at
        it.

        "held": somebody holds what is in it. "in sight": nobody does, but a private
        mapping of it may be alive somewhere, this process included. Nothing has changed
        then.
        """
        if not locks.hold_exclusive(self._open_fd):
            return "held"
        if self._in_sight():
            locks.let_go(self.fd)
            return "in sight"
        if self.offered:
            locks.unmark(self.fd, self.serial)
        self.offered, self.released = 0, False
        return "claimed"

    def abandon(self) -> None:
        """Undo a claim: there is nothing in it."""
        locks.let_go(self._open_fd)

    def offer(self, version: int) -> None:
        """``version`` is complete in it: others may come and hold it."""
        self.serial += 1
        locks.mark(self._open_fd, self.serial)
        self.offered, self.released = version, False
        locks.let_go(self.fd)

    def _in_sight(self) -> bool:
        try:
            return locks.marked(self.fd, locks.MAPPED)
        except (
            OSError
        ):  # no such locks here: nobody else can have mapped it, and our own users know until when they may
            return False

    # ------------------------------------------------------------ for all

    @property
    def place(self) -> SlotPlace:
        """Where others of this host can open it."""
        fd = self._open_fd
        status = os.fstat(fd)
        return SlotPlace(os.getpid(), fd, status.st_ino, status.st_size, self.serial, device=self.device)

    @property
    def path(self) -> str:
        """A path that opens this buffer as a file, while this process lives and the
        buffer is open.

        :raises UsageError: it is on a GPU.
        """
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def tensor(self) -> torch.Tensor:
        """The shared bytes to read and write, uint8 of shape ``[nbytes]``; the mapping
        lives as long as a tensor uses it.

        :raises ValueError: it is somebody else's memory, or closed.
        """
        if not self.writable:
            raise ValueError("the buffer is the memory of somebody else: it can only be read")
        return self.readable()

    def readable(self) -> torch.Tensor:
        """The shared bytes, uint8 of shape ``[nbytes]``. To write to those of a buffer
        that is not writable is a SIGSEGV."""
        mapped = self._mapped
        return locked(self._lock, self._map) if mapped is None else mapped

    def _map(self) -> torch.Tensor:
        if self._mapped is None:
            fd = self._open_fd
            if not self.nbytes:
                self._mapped = torch.empty(0, dtype=torch.uint8)
            elif self.writable:
                self._mapped = map_shared(fd, self.nbytes, lambda: None)
            else:
                self._mapped = self._map_readable(fd)
        return self._mapped

    def private(self) -> torch.Tensor:
        """A copy-on-write view, uint8 of shape ``[nbytes]``, on a GPU a copy: writes
        stay with the caller.

        What it shows stays as it is for as long as a tensor uses it, also when the
        buffer was closed.
        """
        fd = self._open_fd
        return map_private(fd, self.nbytes) if self.nbytes else torch.empty(0, dtype=torch.uint8)

    def pin(self) -> bool:
        """Pin its mapping, so that copies between it and a GPU hold nobody up; False
        where that cannot be.

        Once: it stays pinned until it is closed, or for somebody else's memory as long
        as the mapping is kept. It takes about as long as a copy. The buffer must not be
        closed while a copy is under way.
        """
        found = accelerator()
        if found is None or not self.nbytes:
            return False
        return locked(self._pinning, self._pin_for, found)

    def _pin_for(self, device: Accelerator) -> bool:
        if self._pin is not None or self._pin_refused:
            return self._pin is not None
        mapped = self.readable()
        if self._kept is not None and self._origin is not None:
            pinned = self._kept.pin(self._origin.inode, mapped, device)
            if pinned is not None:
                return pinned
        if self._pin is None and not self._pin_refused and self.fd >= 0:
            self._pin = device.register(mapped, read_only=not self.writable)
            self._pin_refused = self._pin is None
        return self._pin is not None

    @property
    def pinned(self) -> bool:
        """Whether :meth:`pin` has pinned it."""
        return self._pin is not None

    # ------------------------------------ order, on a GPU; nothing to do in host memory

    def record_write(self) -> None:
        """The owner's work that writes to it is enqueued, on this thread's current
        stream."""

    def wait_for_write(self) -> None:
        """Order this thread's current stream behind the recorded write, in the owner's
        process and in its sidecars."""

    def keep_mappings_in(self, kept: KeptMappings) -> None:
        """Where the mapping of somebody else's memory outlives this buffer, for the
        next one of the same memory."""
        self._kept = kept

    def close(self) -> None:
        """Let go of it; the memory goes when the last mapping and the last descriptor
        anywhere have gone."""
        fd, self.fd = self.fd, -1
        self._mapped = None
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.close()
        if fd < 0:
            return
        if self._locks_in == os.getpid():  # a forked child shares the locks, and must not end them
            locks.let_go(fd)
            if self.offered:
                locks.unmark(fd, self.serial)
        os.close(fd)
        for watcher in list(self.watchers):
            watcher.buffer_closed(self.key)

    def __del__(self) -> None:
        self.close()

    def forget(self) -> None:
        """This is a forked child (a DataLoader's worker, say): it must keep neither the
        memory nor its locks.

        Tensors that the user has of it stay valid. Memory on a GPU is not inherited,
        and its page is left as it is.
        """
        fd, self.fd, self._mapped, self._kept, self._pin = self.fd, -1, None, None, None
        if fd >= 0:
            os.close(fd)

    @property
    def _open_fd(self) -> int:
        if self.fd < 0:
            raise ValueError("the buffer is closed")
        return self.fd

    def _map_readable(self, fd: int) -> torch.Tensor:
        if self._kept is None or self._origin is None:
            return map_readable(fd, self.nbytes)
        found = self._kept.find(self._origin.inode, self.nbytes)
        if found is None:
            found = map_readable(fd, self.nbytes)
            self._kept.keep(self._origin, found)
        return found


def _forget_all() -> None:
    for buffer in list(Buffer._living):
        if not buffer.device:
            buffer.forget()


os.register_at_fork(after_in_child=_forget_all)

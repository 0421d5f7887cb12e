"""Buffers whose bytes are in the memory of a GPU.

Theory of operation
===================

The memfd of a :class:`DeviceBuffer` is one page: on which device the bytes are, how
many, and the handles by which other processes open the memory and an event. Whoever may
open the page may so open the memory, by CUDA IPC, and all that is said of the file (its
locks, places, claims, offers, retirement) is said of the memory. It is one allocation
of the driver's own, not of torch's allocator, so that no setting of that one
(``expandable_segments``) can make it unshareable.

*Order.* Writers and readers of one buffer are in several processes and on any streams.
Locks keep them apart, and each waits on the host for its own work on the device before
it says that it is done: a reader before it drops its lock or pin, a sidecar before it
answers, a writer before it offers a version. So no stream waits for a reader. Only what
a rank gives its sidecar for an operation may still be under way: the event of the page
is recorded behind it (:meth:`~DeviceBuffer.record_write`, by the owner alone), and the
sidecar's stream waits for it (:meth:`~DeviceBuffer.wait_for_write`), as does the rank's
before the next write.

An event of a process that was killed may never happen, and a stream that waits for it
stands still for ever (https://github.com/pytorch/pytorch/pull/15974). So only sidecars
wait for an event of another process: they are killed at their deadline.

*The end.* Memory that was freed by its owner must not be used by anybody: on a GPU this
is no harmless read of old bytes, but may end the reader's context. So whoever opens the
memory marks the page (:data:`~replicas.linux.locks.OPENED`) by a description of its
own, until the last tensor over it is gone, and the mark ends with the process. An owner
that closes its buffer while it is marked, or held, frees the memory only when it is
neither any more (:class:`_Lingering`). When the owner's process ends, the memory does,
too, whoever has it open; therefore what is only opened never counts as holding a
version.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import threading
from collections.abc import Callable

import msgspec
import torch

from replicas.common.decoding import MALFORMED
from replicas.errors import NoCapacity, UsageError, WorldError
from replicas.linux import locks
from replicas.linux.files import reopen
from replicas.weights.devices.accelerator import DeviceMemory, Event, device_of
from replicas.weights.memory.buffers import AllocationStopped, Buffer

__all__ = ["PAGE_NBYTES", "DeviceBuffer"]

PAGE_NBYTES = 4096
"""Size of the page: all that host memory it takes."""

_MAGIC = "replicas-device-1"
_LENGTH = struct.Struct("<I")
_LINGER_LOOK_S = 0.1
_END_S = 10.0


class _Page(msgspec.Struct, frozen=True):
    """What the file says. ``memory``, ``written``: handles; ``nbytes``: of the
    memory."""

    magic: str
    uuid: str
    nbytes: int
    memory: bytes
    written: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Page).decode


class DeviceBuffer(Buffer):
    """Memory of a GPU that processes of one host share. Made by
    :meth:`Buffer.allocate`, ``open`` and ``adopt``.

    Its tensors are on the device. What the host is told of them must be waited for, as
    for all work on a GPU.
    """

    def __init__(self, fd: int, page: _Page, *, writable: bool) -> None:
        """``fd`` is owned from now on."""
        super().__init__(fd, page.nbytes, writable=writable)
        self.device = page.uuid
        self._page = page
        self._memory: DeviceMemory | None = None
        self._written: Event | None = None

    @classmethod
    def allocate_on(
        cls, device: str, nbytes: int, name: str, *, stop: Callable[[], bool] = lambda: False
    ) -> DeviceBuffer:
        """See :meth:`Buffer.allocate`."""
        if stop():
            raise AllocationStopped
        _lingering.sweep()
        gpu = device_of(device)
        try:
            memory = gpu.allocate(nbytes, device)
        except NoCapacity as error:
            left = _lingering.nbytes()
            if not left:
                raise
            more = f"{error.message}; {left} bytes of ours are freed when other processes close them"
            raise NoCapacity(more, hint=error.hint) from error
        try:
            written = gpu.event(device, interprocess=True)
            page = _Page(_MAGIC, device, nbytes, memory.handle, written.handle)
            buffer = cls(_write_page(page, name), page, writable=True)
        except BaseException:
            memory.close()
            raise
        buffer._locks_in = os.getpid()
        buffer._memory, buffer._written = memory, written
        return buffer

    @classmethod
    def adopted(cls, fd: int, device: str, *, writable: bool) -> DeviceBuffer:
        """The buffer to which a page leads. The memory itself is opened when it is
        first used; ``fd`` is owned from now on.

        :raises WorldError: it is no such page, or of another device.
        """
        try:
            return cls(fd, _read_page(fd, device), writable=writable)
        except BaseException:
            os.close(fd)
            raise

    @property
    def path(self) -> str:
        raise UsageError(
            f"the version is in the memory of GPU {self.device}, which has no path",
            hint='set staging = "host" on the channel for engines that load files',
        )

    def readable(self) -> torch.Tensor:
        """The shared bytes, uint8 of shape ``[nbytes]``, on the device. Nobody may
        write to those of a buffer that is not writable.

        :raises WorldError: the memory cannot be opened here.
        """
        with self._lock:
            return self._open_memory().tensor

    def private(self) -> torch.Tensor:
        """A copy of the bytes, on the device; it is complete."""
        shared, gpu = self.readable(), device_of(self.device)
        copied = shared.clone()
        gpu.synchronize(self.device)
        return copied

    def pin(self) -> bool:
        """It is on the device: nothing to pin."""
        return False

    def record_write(self) -> None:
        if self._locks_in != os.getpid() or self._origin is not None:
            raise ValueError("only the owner of device memory records what it writes")
        with self._lock:
            self._open_event().record()

    def wait_for_write(self) -> None:
        if self._origin is None:  # what others offer is complete
            with self._lock:
                self._open_event().wait()

    def close(self) -> None:
        """Let go of it. The memory goes when nobody else has it open or holds it, and
        no tensor over it is left here.

        Work on it that this process has enqueued must be over.
        """
        fd, memory, written = self.fd, self._memory, self._written
        owner = fd >= 0 and bool(memory and memory.handle) and self._locks_in == os.getpid()
        page = os.dup(fd) if owner else -1
        super().close()
        self._memory = self._written = None
        if memory is None:
            return
        if owner:
            _lingering.add(_Leftover(page, memory, written))
        else:
            memory.close()

    def _open_memory(self) -> DeviceMemory:
        if self._memory is None:
            fd = self._open_fd
            mark = _Mark(fd)
            try:
                self._memory = device_of(self.device).open(
                    self._page.memory, self.nbytes, self.device, on_free=mark.close
                )
            except BaseException:
                mark.close()
                raise
        return self._memory

    def _open_event(self) -> Event:
        if self._written is None:
            self._open_memory()  # whose mark keeps the event alive, too
            self._written = device_of(self.device).open_event(self._page.written, self.device)
        return self._written


Buffer.on_device = DeviceBuffer


class _Mark:
    """Says of a page that the memory is open in this process, by a description of its
    own."""

    def __init__(self, fd: int) -> None:
        self._fd = reopen(fd)
        try:
            locks.mark(self._fd, locks.OPENED)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _write_page(page: _Page, name: str) -> int:
    encoded = _encode(page)
    if len(encoded) + _LENGTH.size > PAGE_NBYTES:
        raise ValueError(f"the handles of the accelerator need {len(encoded)} bytes, and a page has {PAGE_NBYTES}")
    fd = os.memfd_create(name[:200], os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, PAGE_NBYTES)
        os.pwrite(fd, _LENGTH.pack(len(encoded)) + encoded, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_page(fd: int, device: str) -> _Page:
    raw = os.pread(fd, PAGE_NBYTES, 0)
    try:
        (length,) = _LENGTH.unpack_from(raw)
        page = _decode(raw[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, *MALFORMED) as error:
        raise WorldError(f"the memory does not lead to GPU {device}: {error}") from error
    if page.magic != _MAGIC or page.nbytes < 0:
        raise WorldError(
            f"the memory does not lead to GPU {device}: it is of kind {page.magic!r}",
            hint="use the same release of this library everywhere",
        )
    if page.uuid != device:
        raise WorldError(f"the memory is on GPU {page.uuid}, not on {device}")
    return page


class _Leftover:
    """Memory whose buffer is closed. ``page``: a descriptor of the description that its
    owner had."""

    def __init__(self, page: int, memory: DeviceMemory, written: Event | None) -> None:
        self._page = page
        self._memory = memory
        self._written = written  # others must not use one that is destroyed

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def end(self) -> bool:
        """Free it, if nobody has it open or holds it; nobody can come to it from then
        on."""
        if not locks.hold_exclusive(self._page):
            return False
        with contextlib.suppress(OSError):  # a kernel without such locks: it cannot be opened from elsewhere either
            if locks.marked(self._page, locks.OPENED):
                return False
        self._memory.close()
        self._written = None
        os.close(self._page)
        return True


class _Lingering:
    """Memory that was closed. A thread frees it, because the driver waits then for all
    work of the device, and so does whoever needs new memory. Others may have it open:
    the kernel tells nobody when a lock ends, so the thread looks from time to time, as
    long as there is any. It is over before the interpreter ends, which would end it
    inside torch: that aborts the process. What is left then goes with the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage in this very thread may close a buffer
        self._sweeping = threading.RLock()  # the same
        self._left: list[_Leftover] = []
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def add(self, leftover: _Leftover) -> None:
        with self._lock:
            self._left.append(leftover)
            if self._thread is None and not self._ending.is_set():
                self._thread = threading.Thread(target=self._watch, name="replicas device memory", daemon=True)
                self._thread.start()

    def sweep(self) -> bool:
        """Free what nobody has open any more; False: something is left."""
        with self._sweeping:
            with self._lock:
                left, self._left = self._left, []
            still = [one for one in left if not one.end()]
            with self._lock:
                self._left += still
                return not self._left

    def stop(self) -> None:
        """At the end of the process: nothing is freed any more."""
        self._ending.set()
        thread = self._thread
        if thread is not None:
            thread.join(_END_S)

    def forget(self) -> None:
        """This is a forked child: nothing of it is ours, and nobody has the locks."""
        self._lock, self._sweeping = threading.RLock(), threading.RLock()
        self._left, self._thread, self._ending = [], None, threading.Event()

    def nbytes(self) -> int:
        with self._sweeping:
            self.sweep()
            return sum(one.nbytes for one in self._left)

    def _watch(self) -> None:
        while not self._ending.is_set():
            self.sweep()
            with self._lock:
                if not self._left:
                    self._thread = None
                    return
            self._ending.wait(_LINGER_LOOK_S)


_lingering = _Lingering()
os.register_at_fork(after_in_child=_lingering.forget)
atexit.register(_lingering.stop)

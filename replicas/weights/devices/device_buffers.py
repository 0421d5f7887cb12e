"""Buffers in GPU memory, shared between processes through CUDA IPC.

Theory of operation
===================

The memfd of a :class:`DeviceBuffer` is one page with the device, the size, and the
handles by which other processes open the memory and an event. A process that may open
the page may open the memory. All locks, places, claims, offers and retirements of the
file apply to the memory.

*Order.* Locks separate writers and readers, and each waits on the host for its own
device work before it reports completion, so no stream waits for a reader. Only memory
that a rank gives its sidecar for an operation may have work in flight: the owner
records the page's event after that work, and the sidecar's stream waits for it, as does
the rank's before the next write. An event of a killed process may never be reached, and
a stream that waits for it hangs for ever
(https://github.com/pytorch/pytorch/pull/15974). So only sidecars, which are killed at
their deadline, wait for events of another process.

*The end.* Use of memory that its owner has freed may end the reader's context. So a
process that opens the memory flags the page (:data:`~replicas.linux.locks.OPENED`), by
a file description of its own, until the last tensor over it is gone; the flag ends with
the process. If the page is flagged or locked when its owner closes the buffer, the
memory is freed once it is neither (:class:`_Lingering`). The memory ends with its
owner's process even while it is open elsewhere, so opening it never counts as holding a
version.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from replicas.common.decoding import MALFORMED
from replicas.common.sizes import size_text
from replicas.errors import NoCapacity, UsageError, WorldError
from replicas.linux import locks
from replicas.linux.files import reopen
from replicas.weights.copies.accelerator import DeviceMemory, Event, device_of
from replicas.weights.memory.buffers import Buffer

PAGE_NBYTES = 4096
"""Size of the page, the buffer's only host memory."""

_MAGIC = "replicas-device-1"
_LENGTH = struct.Struct("<I")
_LINGER_LOOK_S = 0.1
_END_S = 10.0


class _Page(msgspec.Struct, frozen=True):
    """The content of a GPU buffer's file; memory and written are IPC handles."""

    magic: str
    uuid: str
    nbytes: int
    memory: bytes
    written: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Page).decode


class DeviceBuffer(Buffer):
    """GPU memory that processes of one host share.

    Made by :meth:`Buffer.allocate`, ``open`` and ``adopt``. Its tensors are on the
    device: wait for work on them before announcing it to other processes.
    """

    def __init__(self, fd: int, page: _Page, *, writable: bool) -> None:
        """Take over ``fd``, the page (a small file that describes the GPU memory).

        Map no device memory yet.

        :param page: the file's content: the device, the size, and the IPC handles.
        """
        super().__init__(fd, page.nbytes, writable=writable)
        self.device = page.uuid
        self._page = page
        self._memory: DeviceMemory | None = None
        self._written: Event | None = None

    @classmethod
    def _allocated(cls, nbytes: int, name: str, check: Callable[[], None], device: str) -> Buffer:
        """Allocate device memory and an event; write a page (file) with their handles.

        :param name: of the page's file. :param check: raises to stop.
        :param device: UUID of the GPU.
        :raises NoCapacity: the device has too little memory left.
        """
        check()
        _lingering.sweep()
        gpu = device_of(device)
        try:
            memory = gpu.allocate(nbytes, device)
        except NoCapacity as error:
            left = _lingering.nbytes()
            if not left:
                raise
            more = f"{error.message}; {size_text(left)} of closed buffers are freed when other processes close them"
            raise NoCapacity(more, hint=error.hint) from error
        try:
            written = gpu.event(device, interprocess=True)
            page = _Page(_MAGIC, device, nbytes, memory.handle, written.handle)
            buffer = cls(_write_page(page, name), page, writable=True)
        except BaseException:
            memory.close()
            raise
        buffer._memory, buffer._written = memory, written
        return buffer

    @classmethod
    def _adopted(cls, fd: int, device: str, *, writable: bool) -> Buffer:
        """Return a buffer over another process's GPU memory; take over its page.

        The page is a small file with the memory's IPC handle. The memory is mapped at
        the first use.

        :param fd: descriptor of the page; closed on an error. :param device: UUID of
            the GPU.
        :raises WorldError: ``fd`` is not a page of this device.
        """
        try:
            return cls(fd, _read_page(fd, device), writable=writable)
        except BaseException:
            os.close(fd)
            raise

    @property
    def path(self) -> str:
        """Raise UsageError: device memory has no path."""
        text = f"the version is in the memory of GPU {self.device}, which has no path"
        raise UsageError(text, hint='set staging = "host" on the channel for engines that load files')

    def readable(self) -> torch.Tensor:
        """Return the shared bytes, not a copy; the first call maps the memory.

        :raises WorldError: they cannot be opened here.
        """
        with self._lock:
            return self._open_memory().tensor

    def private(self) -> torch.Tensor:
        """Return a copy of the bytes, on the device; block until it is made."""
        shared, gpu = self.readable(), device_of(self.device)
        copied = shared.clone()
        gpu.synchronize(self.device)
        return copied

    def pin(self) -> bool:
        """Return False: only host memory can be pinned."""
        return False

    def record_write(self) -> None:
        """Record the page's event behind this thread's writes; for the owner only.

        They are on its current stream. Other processes can wait for the event
        (:meth:`wait_for_write`).

        :raises ValueError: this process does not own the memory.
        """
        if self._locks_in != os.getpid() or self._origin is not None:
            raise ValueError("only the owner of device memory records its writes")
        with self._lock:
            self._open_event().record()

    def wait_for_write(self) -> None:
        """Make this thread's current stream wait for the owner's last recorded write.

        The call does not block. Does nothing for another member's memory, which is
        complete.
        """
        if self._origin is None:  # other processes offer only complete memory
            with self._lock:
                self._open_event().wait()

    def close(self) -> None:
        """Close the buffer; this process's work on it must have ended.

        The memory is freed when no other process has it open or holds it, and no tensor
        over it is left here.
        """
        fd, memory, written = self.fd, self._memory, self._written
        owner = fd >= 0 and bool(memory and memory.handle) and self._locks_in == os.getpid()
        page = os.dup(fd) if owner else -1  # its locks show whether others have the memory open
        super().close()
        self._memory = self._written = None
        if memory is None:
            return
        if owner:
            _lingering.add(_Leftover(page, memory, written))
        else:
            memory.close()

    def close_after_fork(self) -> None:
        """Do nothing: a forked child inherits no GPU memory."""

    def _open_memory(self) -> DeviceMemory:
        """Return the memory; the first call maps it, and flags the page as in use.

        Needs the lock.

        :raises WorldError: it cannot be opened here.
        """
        if self._memory is None:
            flag = os.fdopen(reopen(self._open_fd), "rb", buffering=0)
            try:
                locks.flag(flag.fileno(), locks.OPENED)
                device = device_of(self.device)
                self._memory = device.open(self._page.memory, self.nbytes, self.device, on_free=flag.close)
            except BaseException:
                flag.close()
                raise
        return self._memory

    def _open_event(self) -> Event:
        """Return the event of the owner's writes, opened at first use.

        Needs the lock.
        """
        if self._written is None:
            self._open_memory()  # its flag also keeps the event alive
            self._written = device_of(self.device).open_event(self._page.written, self.device)
        return self._written


Buffer.on_device = DeviceBuffer


def _write_page(page: _Page, name: str) -> int:
    """Write a page to a new memfd called ``name``; return its descriptor."""
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
    """Return the page in an open file.

    :param device: UUID of the GPU that the page must be of.
    :raises WorldError: it is not such a page.
    """
    raw = os.pread(fd, PAGE_NBYTES, 0)
    try:
        (length,) = _LENGTH.unpack_from(raw)
        page = _decode(raw[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, *MALFORMED) as error:
        raise WorldError(f"the memory does not lead to GPU {device}: {error}") from error
    if page.magic != _MAGIC or page.nbytes < 0:
        text = f"the memory does not lead to GPU {device}: it is of kind {page.magic!r}"
        raise WorldError(text, hint="use the same release of this library everywhere")
    if page.uuid != device:
        raise WorldError(f"the memory is on GPU {page.uuid}, not on {device}")
    return page


@dataclass(eq=False)
class _Leftover:
    """GPU memory of a closed buffer, which other processes may still use.

    :ivar page: a duplicate of the owner's descriptor.
    :ivar written: destroyed with the memory, as others may use it until then.
    """

    page: int
    memory: DeviceMemory
    written: Event | None

    def free_if_unused(self) -> bool:
        """Free the memory, and return True, unless another process uses it.

        Frees the event and the descriptor of the page, too.
        """
        if not locks.hold_exclusive(self.page):
            return False
        with contextlib.suppress(OSError):  # without such locks no other process can open it
            if locks.flagged(self.page, locks.OPENED):
                return False
        self.memory.close()
        self.written = None
        os.close(self.page)
        return True


class _Lingering:
    """Memory of closed buffers that other processes may still have open.

    A thread frees it, as does every new allocation; freeing waits for all work of the
    device. The kernel does not report the end of a lock, so the thread polls while any
    memory is left. The thread ends before the interpreter does, which would otherwise
    end it inside torch and abort the process. Memory left then ends with the process.
    """

    def __init__(self) -> None:
        """Begin without memory and thread."""
        self._lock = threading.RLock()  # garbage collection in the same thread may close a buffer
        self._sweeping = threading.RLock()  # for the same reason
        self._left: list[_Leftover] = []
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def add(self, leftover: _Leftover) -> None:
        """Take over the memory of a closed buffer; start the thread that frees it."""
        with self._lock:
            self._left.append(leftover)
            if self._thread is None and not self._ending.is_set():
                self._thread = threading.Thread(target=self._watch, name="replicas device memory", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread left; the next allocation or closed buffer frees it
                    self._thread = None

    def sweep(self) -> None:
        """Free the memory of closed buffers that no other process uses any longer.

        Waits for the device's work.
        """
        with self._sweeping:
            with self._lock:
                left, self._left = self._left, []
            still = [one for one in left if not one.free_if_unused()]
            with self._lock:
                self._left += still

    def stop(self) -> None:
        """End the thread for good, and wait for it, 10 s at most.

        At the end of the process.
        """
        self._ending.set()
        if (thread := self._thread) is not None:
            thread.join(_END_S)

    def reset_after_fork(self) -> None:
        """Reset in a forked child, which owns none of the memory or locks."""
        self._lock, self._sweeping = threading.RLock(), threading.RLock()
        self._left, self._thread, self._ending = [], None, threading.Event()

    def nbytes(self) -> int:
        """Free what is unused, and return the bytes that other processes still use."""
        with self._sweeping:
            self.sweep()
            return sum(one.memory.nbytes for one in self._left)

    def _watch(self) -> None:
        """Sweep repeatedly until no memory is left; the thread's function."""
        while not self._ending.is_set():
            self.sweep()
            with self._lock:
                if not self._left:
                    self._thread = None
                    return
            self._ending.wait(_LINGER_LOOK_S)


_lingering = _Lingering()
os.register_at_fork(after_in_child=_lingering.reset_after_fork)
atexit.register(_lingering.stop)

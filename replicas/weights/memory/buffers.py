"""Anonymous shared memory: a process's own, and that of others on the same host.

Theory of operation
===================

A :class:`Buffer` is a memfd, which the kernel frees when all processes with it have
ended. Its pages are allocated in advance (``posix_fallocate``: a clean error instead of
a later SIGBUS) and mapped in advance (the first touch of a page is ten times slower
than the next).

Sidecars share it by its descriptor. Other members *open* it (:meth:`Buffer.open`)
through ``/proc`` of a process that has it, read-only, with their own locks. The library
reads an opened buffer through :meth:`Buffer.readable`, whose tensor users never get;
users read it through :meth:`Buffer.private`, or as a file (:meth:`Buffer.show`).

A user may map that file in any process, for longer than the version. So showing a file
*seals* it (:mod:`replicas.linux.seals`): no process can open it for writing, and its
owner sees at the next claim that it must not refill it, and leaves it to its readers.
The kernel keeps the seal after the reader that set it has ended.

The owner *claims* its buffer before it writes, and *offers* it when it holds a complete
version. The next claim checks that the version has no holder or mapping left
(:mod:`replicas.linux.locks`), and that the file was not shown.

The bytes may be in GPU memory (:mod:`replicas.weights.devices.device_buffers`). Then
the file is a page that describes how to open them; its locks work the same way.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import torch

from replicas.common.foreign import visible
from replicas.common.sizes import size_text
from replicas.common.waits import locked
from replicas.errors import NoCapacity, WorldError
from replicas.linux import locks, seals
from replicas.linux.files import kernel_lines
from replicas.linux.scarce import SCARCE, describe_limit
from replicas.memory.beacon import own_door
from replicas.memory.held_memory import Living, hold
from replicas.messages import SlotPlace
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.memory.mappings import KeptMappings, Mapping, map_private, map_readable, map_shared

_ALLOCATE_NBYTES = 64 << 20  # between two checks of the memory left
RESERVE_NBYTES = 32 << 20
"""Left free beside a large buffer, for its page tables and other processes."""

_FSIZE_HINT = "this memory counts as a file: raise the limit of the size of files (ulimit -f unlimited)"
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED_NBYTES = 1 << 60  # cgroup version 1 writes "no limit" as a huge number

Claim = Literal["claimed", "held", "in sight", "shown"]


class AllocationStopped(Exception):  # not an error: the caller's ``stop`` asked for it
    """``stop`` ended an allocation."""


class BufferWatcher(Protocol):
    """An object that is told when a buffer is closed."""

    def buffer_closed(self, key: int) -> None:
        """Handle the end of the buffer with this ``key``, on the thread that closed
        it."""


class Buffer:
    """Anonymous shared memory, own or opened from another process, with its locks.

    :ivar device: UUID of the GPU that holds the bytes; empty if they are in the file.
    :ivar key: a number unique among all buffers of this process, never reused.
    :ivar watchers: called on the closing thread when it is closed; held weakly.
    :ivar writable: False for the memory of another process.
    :ivar serial: how often it has been filled.
    :ivar offered: the version that others may hold, or 0.
    :ivar released: no responsive member still needs that version.
    :cvar on_device: set by :mod:`replicas.weights.devices.device_buffers`, which
        imports this module.
    """

    on_device: ClassVar[type[Buffer]]
    device = ""

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        """Take over ``fd``, an open memfd of ``nbytes``; map nothing. Leave its
        locks to the caller; :meth:`close` releases them if ``_locks_in`` is set."""
        self.fd = fd
        self.nbytes = nbytes
        self.key = next(_KEYS)
        self.watchers: Living[BufferWatcher] = Living()
        self.writable = writable
        self.serial = 0
        self.offered = 0
        self.released = False
        self._locks_in = 0
        self._lock = threading.Lock()
        self._mapping: Mapping | None = None
        self._origin: SlotPlace | None = None
        self._kept: KeptMappings | None = None
        _LIVING.add(self)

    @staticmethod
    def allocate(nbytes: int, name: str, *, stop: Callable[[], bool] = lambda: False, device: str = "") -> Buffer:
        """Allocate a new buffer with all its pages.

        :param name: shown in ``/proc/PID/maps``.
        :param stop: called every few megabytes; returns True to give up.
        :param device: UUID of the GPU for the bytes; empty for host memory.
        :raises NoCapacity: the machine, the cgroup or the GPU has less than ``nbytes``
            left.
        :raises AllocationStopped: ``stop`` returned true.
        """

        def check() -> None:
            """Raise AllocationStopped if ``stop`` asks for it."""
            if stop():
                raise AllocationStopped

        buffer = (Buffer.on_device if device else Buffer)._allocated(nbytes, name, check, device)
        buffer._locks_in = os.getpid()
        return buffer

    @classmethod
    def _allocated(cls, nbytes: int, name: str, check: Callable[[], None], device: str) -> Buffer:
        """Allocate and map a new memfd (``device`` is empty). ``check`` is called
        repeatedly, and raises to stop. Raise NoCapacity if too little is left."""
        what = f"the buffer {name!r}"
        check_capacity(nbytes, what)
        # the kernel takes up to 249 bytes
        buffer = cls(os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), nbytes)
        try:
            for start in range(0, nbytes, _ALLOCATE_NBYTES):
                check()
                check_capacity(nbytes - start, what)  # again, as others also allocate
                os.posix_fallocate(buffer.fd, start, min(_ALLOCATE_NBYTES, nbytes - start))
            if nbytes:
                buffer._mapping = map_shared(buffer.fd, nbytes, check)
        except (OSError, ValueError) as error:
            buffer.close()
            hint = _FSIZE_HINT if isinstance(error, OSError) and error.errno == errno.EFBIG else None
            raise NoCapacity(f"{what} of {size_text(nbytes)} cannot be allocated: {error}", hint=hint) from error
        except BaseException:
            buffer.close()
            raise
        return buffer

    @staticmethod
    def adopt(fd: int, device: str = "") -> Buffer:
        """Return a buffer over a descriptor from another process; take over ``fd``.

        If ``device`` is the UUID of a GPU, ``fd`` is a file that describes its memory;
        raise WorldError if that cannot be used here. If "", it has the bytes."""
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        return (Buffer.on_device if device else Buffer)._adopted(fd, device, writable=writable)

    @classmethod
    def _adopted(cls, fd: int, device: str, *, writable: bool) -> Buffer:
        """Return a buffer of this class over ``fd``, which it takes over. Map
        nothing."""
        return cls(fd, os.fstat(fd).st_size, writable=writable)

    @staticmethod
    def open(place: SlotPlace, version: int, *, lock: bool = True) -> Buffer:
        """Open memory of another process, found at ``place``, for reading.

        :param version: that it should hold, for error texts.
        :param lock: prevent a refill until this buffer is closed; else check
            :attr:`unchanged` after reading.
        :raises Gone: the process has ended, or the memory is gone or reused.
        """
        fd = hold(place, version, lock=lock)
        buffer = (Buffer.on_device if place.device else Buffer)._adopted(fd, place.device, writable=False)
        buffer._locks_in = os.getpid() if lock else 0
        buffer.serial, buffer.offered, buffer._origin = place.serial, version, place
        return buffer

    def claim(self) -> Claim:
        """Try to lock the buffer for writing; never wait.

        Returns "claimed" if it has no readers, and can get none from now on. Otherwise
        nothing has changed, and the result is "held" if a process holds its content,
        "in sight" if a private mapping of it may exist in any process, "shown" if its
        file was handed out, so that it must never be filled again.
        """
        if not locks.hold_exclusive(self._open_fd):
            return "held"
        if self.shown:
            locks.unlock(self.fd)
            return "shown"
        try:
            in_sight = locks.flagged(self.fd, locks.MAPPED)
        except OSError:  # without such locks only users of this process can have mapped it, inside their blocks
            in_sight = False
        if in_sight:
            locks.unlock(self.fd)
            return "in sight"
        if self.offered:
            locks.unflag(self.fd, self.serial)
        self.offered, self.released = 0, False
        return "claimed"

    def abandon(self) -> None:
        """Release the lock of :meth:`claim`: the buffer is empty, not filled."""
        locks.unlock(self._open_fd)

    def offer(self, version: int) -> None:
        """Announce that ``version`` is complete: flag the file as full (a lock on one
        byte), and release the lock of :meth:`claim`, so that readers may hold it."""
        self.serial += 1
        locks.flag(self._open_fd, self.serial)  # before the lock is released, as readers check the flag
        self.offered, self.released = version, False
        locks.unlock(self.fd)

    @property
    def place(self) -> SlotPlace:
        """Where other processes of this host can open it: pid, descriptor, inode."""
        fd = self._open_fd
        status = os.fstat(fd)
        door = "" if self.device else own_door()
        return SlotPlace(os.getpid(), fd, status.st_ino, status.st_size, self.serial, device=self.device, door=door)

    @property
    def origin(self) -> SlotPlace:
        """Pid, descriptor and inode in the process that owns and fills the memory."""
        return self._origin or self.place

    @property
    def unchanged(self) -> bool:
        """Whether bytes read so far, without a lock, belong to the version: the owner
        removes a flag (lock on a byte) before it writes."""
        return locks.flagged(self._open_fd, self.serial)

    @property
    def path(self) -> str:
        """The file's path in ``/proc``, while process and buffer live."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def shown(self) -> bool:
        """Whether any process has handed its file out, so that it must not change."""
        return not self.device and seals.is_final(self._open_fd)

    @property
    def closed_to_writers(self) -> bool:
        """True if no process can map the file for writing any longer."""
        return not self.device and seals.is_closed_to_writers(self._open_fd)

    def close_to_writers(self) -> None:
        """Seal the file against new writable mappings; this one stays writable."""
        if not self.device:
            seals.close_to_writers(self._open_fd)

    def show(self, *, to_copy: bool = False) -> str:
        """Return :attr:`path` for a user, sealed so that its bytes never change.

        :param to_copy: the user keeps no mapping after leaving the update's block, so
            that the buffer may be refilled; ignored if it is not closed to writers.
        :raises NoCapacity: no descriptor is left here.
        :raises WorldError: this process cannot seal the file.
        """
        path = self.path
        if not (to_copy and self.closed_to_writers):
            try:
                seals.make_final(self._open_fd)
            except OSError as error:
                if error.errno in SCARCE:
                    why, remedy = describe_limit(error)
                    raise NoCapacity(f"the file of a version cannot be opened: {why}", hint=remedy) from error
                text = f"the file of a version cannot be made read-only, so it is not handed out: {error}"
                hint = "use tensors() or load_into(), which need no file, or run all processes of the host as one user"
                raise WorldError(text, hint=hint) from error
        return path

    def tensor(self) -> torch.Tensor:
        """Return the shared bytes for writing (uint8, no copy); maps them at first use.

        :raises ValueError: it is closed, or read-only here.
        """
        tensor = self.readable()
        if not self.writable or (self._mapping is not None and self._mapping.read_only):
            raise ValueError("the buffer belongs to another process or is closed to writers, so it is read-only")
        return tensor

    def readable(self) -> torch.Tensor:
        """Return the shared bytes (uint8, no copy); the first call maps them."""
        return (self._mapping or locked(self._lock, self._map)).tensor

    def _map(self) -> Mapping:
        """Return the mapping; the first call makes it. Needs the lock."""
        if self._mapping is None:
            fd = self._open_fd
            if not self.nbytes:
                self._mapping = Mapping(torch.empty(0, dtype=torch.uint8))
            elif self.writable and not self.closed_to_writers:
                self._mapping = map_shared(fd, self.nbytes)
            elif self._kept is None or self._origin is None:
                self._mapping = map_readable(fd, self.nbytes)
            else:
                self._mapping = self._kept.map(fd, self._origin)
        return self._mapping

    def private(self) -> torch.Tensor:
        """Return a copy-on-write view, uint8 of shape ``[nbytes]``; on a GPU a copy.

        Its content does not change while a tensor uses it, even after :meth:`close`.

        :raises NoCapacity: a limit of this process or machine allows no more mappings.
        """
        fd = self._open_fd
        return map_private(fd, self.nbytes) if self.nbytes else torch.empty(0, dtype=torch.uint8)

    def pin(self) -> bool:
        """Pin the mapping for copies with a GPU; return False if that fails.

        It stays pinned until the buffer is closed or, with :meth:`keep_mappings_in`, as
        long as the mapping is kept. Do not close it while a copy is in flight."""
        found = accelerator()
        if found is None or not self.nbytes:
            return False
        return (self._mapping or locked(self._lock, self._map)).pin(found)

    @property
    def pinned(self) -> bool:
        """True if the mapping is pinned."""
        return self._mapping is not None and self._mapping.pinned

    # ------------------------------------ order of GPU work; no-ops for host memory

    def record_write(self) -> None:
        """GPU: record an event behind this thread's current work. Host: do nothing."""

    def wait_for_write(self) -> None:
        """GPU: make this thread's stream await the owner's writes. Host: do nothing."""

    def keep_mappings_in(self, kept: KeptMappings) -> None:
        """Have ``kept`` make and keep the mapping, so that a later buffer can reuse
        it."""
        self._kept = kept

    def close(self) -> None:
        """Close the buffer and tell its watchers; a second call does nothing. Tensors
        and other processes that use the memory keep it."""
        fd, self.fd = self.fd, -1
        mapping, self._mapping = self._mapping, None
        if mapping is not None and mapping.kept is None:  # KeptMappings unpins a kept one
            mapping.unpin()
        if fd < 0:
            return
        if self._kept is not None and mapping is not None and mapping.kept is not None and seals.is_final(fd):
            self._kept.drop(mapping.kept.inode)  # as the owner closes this memory, maybe unseen by us
        if self._locks_in == os.getpid():  # a forked child shares the locks, and must not release them
            locks.unlock(fd)
            if self.offered:
                locks.unflag(fd, self.serial)
        os.close(fd)
        for watcher in list(self.watchers):
            watcher.buffer_closed(self.key)

    def __del__(self) -> None:
        """Close the buffer."""
        self.close()

    def close_after_fork(self) -> None:
        """In a forked child, drop the memory, but not the parent's locks."""
        fd, self.fd, self._mapping, self._kept = self.fd, -1, None, None
        if fd >= 0:
            os.close(fd)

    @property
    def _open_fd(self) -> int:
        """The descriptor; raises ValueError if the buffer is closed."""
        if self.fd < 0:
            raise ValueError("the buffer is closed")
        return self.fd


_KEYS = itertools.count(1)
_LIVING: Living[Buffer] = Living(operator.methodcaller("close_after_fork"))


def available_nbytes(*, proc: Path = Path("/proc"), cgroup_root: Path = _CGROUP_ROOT) -> tuple[int, str]:
    """Return how many bytes can still be allocated, and the name of the limit. ``proc``
    and ``cgroup_root``: where these file systems are mounted."""
    lines = [line.split() for line in _read(proc / "meminfo") if line.startswith("MemAvailable:")]
    machine = [(int(words[1]) * 1024, "the machine's memory") for words in lines]
    return min([*machine, *_cgroups(proc, cgroup_root)], default=(_UNLIMITED_NBYTES, "nothing"))


def check_capacity(nbytes: int, what: str) -> None:
    """Raise NoCapacity if the host cannot give ``nbytes`` more for the use ``what``.

    The kernel reports no error beyond a cgroup's limit, but kills a process; it charges
    shared memory to the cgroup of the process that touches it first.
    """
    available, limit = available_nbytes()
    reserve = RESERVE_NBYTES if nbytes >= RESERVE_NBYTES else 0
    if nbytes + reserve > available:
        kept = f", of which {size_text(reserve)} are kept for others" if reserve else ""
        raise NoCapacity(f"{what} needs {size_text(nbytes)}, but {limit} leaves {size_text(available)}{kept}")


def _cgroups(proc: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Yield (bytes left, name) of each memory limit of this process's cgroups."""
    for line in filter(None, _read(proc / "self/cgroup")):
        _, controllers, path = line.split(":", 2)
        limit_names: tuple[str, ...]
        if controllers == "":
            # Beyond memory.high allocations succeed, but each page is throttled.
            base, limit_names, usage_name = root, ("memory.max", "memory.high"), "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_names, usage_name = root / "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in [folder, *folder.parents]:
            usage = _read(place / usage_name)[0]
            for name in limit_names:
                limit = _read(place / name)[0]
                if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED_NBYTES:
                    room = int(limit) - int(usage) + _reclaimable(place)
                    group = "/" if place == base else f"/{visible(str(place.relative_to(base)))}"
                    yield max(0, min(room, int(limit))), f"{name} of cgroup {group}"
            if place == base:
                break


def _reclaimable(folder: Path) -> int:
    """Return the bytes of file cache in a cgroup, which are freed on demand."""
    fields = dict(line.split(None, 1) for line in _read(folder / "memory.stat") if " " in line)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _read(path: Path) -> list[str]:
    """Return the lines of a file, or one empty line if it cannot be read."""
    try:
        return kernel_lines(path)
    except OSError:  # not every kernel or container has it; then there is no limit
        return [""]

"""Memory for weights: anonymous shared buffers, and the slots of an arena.

Theory of operation
===================

A :class:`Buffer` is a memfd: it has no name in any file system, so that nothing is left when every process that has it
is killed. Its pages are allocated at once (``posix_fallocate``: a clean error in place of a SIGBUS later) and mapped at
once (the first touch of a page is ten times slower than the next). Sidecars get the descriptor; readers map it privately.

An :class:`Arena` has a fixed number of slots. A slot is *free*, *filling* (one writer, a rank or its sidecar) or *held*
(a complete version). A held slot may be pinned by any number of readers. :meth:`Arena.acquire` takes a free slot, or
evicts the oldest version that nobody has pinned or protected; buffers are reused when the size fits exactly, because a
slot's file must be as long as its image. The writer calls :meth:`Arena.hold` or :meth:`Arena.free`; a slot whose writer
may still be writing must stay *filling*.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from replicas.core.manifest import Manifest, PartManifest
from replicas.errors import NoCapacity
from replicas.weights.capacity import check_capacity

__all__ = ["Arena", "Buffer", "BufferWatcher", "Slot"]

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module of Python 3.11 has no names for them
_MADV_POPULATE_WRITE = 23
_POPULATE_NBYTES = 32 << 20


class BufferWatcher(Protocol):
    """Someone who has a mapping of a buffer in another process."""

    def buffer_closed(self, key: int) -> None: ...


class Buffer:
    """Anonymous shared memory.

    :ivar fd: its descriptor (close-on-exec), owned by this object.
    :ivar nbytes: its size, and the size of the file.
    :ivar key: a number that no other buffer of this process ever has.
    :ivar watchers: told (``buffer_closed(key)``, on the closing thread) when it is closed; held weakly.
    """

    _keys = itertools.count(1)

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.key = next(self._keys)
        self.watchers: weakref.WeakSet[BufferWatcher] = weakref.WeakSet()
        self._shared: torch.Tensor | None = None

    @classmethod
    def allocate(cls, nbytes: int, name: str) -> Buffer:
        """A new buffer whose pages are all there. ``name`` shows in ``/proc/PID/maps``.

        :raises NoCapacity: the machine or the cgroup has less than ``nbytes`` left.
        """
        check_capacity(nbytes, f"the buffer {name!r}")
        fd = os.memfd_create(name[:200], os.MFD_CLOEXEC)
        buffer = cls(fd, nbytes)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
                buffer.tensor()
        except (OSError, ValueError) as error:
            buffer.close()
            raise NoCapacity(f"the buffer {name!r} of {nbytes} bytes cannot be allocated: {error}") from error
        return buffer

    @classmethod
    def adopt(cls, fd: int) -> Buffer:
        """A buffer that came as a descriptor from another process; ``fd`` is owned from now on."""
        return cls(fd, os.fstat(fd).st_size)

    def tensor(self) -> torch.Tensor:
        """The shared bytes, uint8 of shape ``[nbytes]``. The mapping lives as long as a tensor that uses it."""
        if self._shared is None:
            self._shared = self._map(mmap.MAP_SHARED, _MADV_POPULATE_WRITE)
        return self._shared

    def private(self) -> torch.Tensor:
        """A copy-on-write view, uint8 of shape ``[nbytes]``: writes stay with the caller.

        Pages that the caller has not written still show later writes of the owner: keep the slot pinned meanwhile.
        """
        return self._map(mmap.MAP_PRIVATE, _MADV_POPULATE_READ)

    @property
    def path(self) -> str:
        """A path that opens this buffer as a file, while this process lives and the buffer is open."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last mapping and the last descriptor anywhere have gone."""
        self._shared = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            for watcher in list(self.watchers):
                watcher.buffer_closed(self.key)

    def __del__(self) -> None:
        self.close()

    def _map(self, flags: int, advice: int) -> torch.Tensor:
        if self.fd < 0:
            raise ValueError("the buffer is closed")
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        mapping = mmap.mmap(self.fd, self.nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        _populate(mapping, advice)
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _populate(mapping: mmap.mmap, advice: int) -> None:
    """In steps: ``madvise`` keeps Python's lock, and a minute of it would silence the other threads of the process."""
    try:
        for start in range(0, len(mapping), _POPULATE_NBYTES):
            mapping.madvise(advice, start, min(_POPULATE_NBYTES, len(mapping) - start))
    except OSError as error:
        if error.errno in (12, 14):  # ENOMEM, EFAULT: the pages cannot be had
            raise
        # EINVAL: a kernel before 5.14 has no such advice. It is an optimisation; the pages come at first touch.


class Slot:
    """One slot of an arena. Fields change under the arena's lock; read them, and leave the rest to the arena.

    :ivar state: ``free``, ``filling`` or ``held``.
    :ivar manifest: of an image (:class:`Manifest`, or a :class:`PartManifest` without pieces), or of a packed part.
    :ivar digest: of the data, once held.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.state: Literal["free", "filling", "held"] = "free"
        self.version = 0
        self.manifest: Manifest | PartManifest | None = None
        self.digest = ""
        self.pins = 0
        self._buffer: Buffer | None = None

    @property
    def buffer(self) -> Buffer:
        """The memory of a slot that is not free."""
        if self._buffer is None:
            raise ValueError(f"slot {self.index} has no buffer")
        return self._buffer

    @property
    def image(self) -> Manifest | None:
        """The manifest of the whole image in it; None for a packed part."""
        if isinstance(self.manifest, PartManifest):
            return self.manifest.whole if self.manifest.pieces is None else None
        return self.manifest

    @property
    def data(self) -> torch.Tensor:
        """The data section of an image, or the whole of a packed part: uint8, shared."""
        image = self.image
        return self.buffer.tensor()[image.data_offset if image else 0 :]

    def __repr__(self) -> str:
        return f"<Slot {self.index} {self.state} version={self.version} pins={self.pins}>"


class Arena:
    """A fixed number of slots. Every method is thread-safe; callbacks run without the lock held.

    :param slots: how many versions it can hold.
    :param name: shown with its memory in ``/proc/PID/maps``.
    :param on_drop: called with the version whose slot was given to another one.
    :param on_change: called after a slot became free or lost its last pin: a waiting :meth:`acquire` may succeed now.
    :ivar protected: versions that must not be evicted; replace or change it at will.
    """

    def __init__(
        self,
        slots: int,
        *,
        name: str = "replicas",
        on_drop: Callable[[int], None] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"an arena needs at least one slot, not {slots}")
        self.protected: set[int] = set()
        self.on_drop = on_drop
        self.on_change = on_change
        self._name = name
        self._lock = threading.RLock()
        self._slots = [Slot(index) for index in range(slots)]
        self._closed = False

    @property
    def slots(self) -> Sequence[Slot]:
        return tuple(self._slots)

    def acquire(self, version: int, manifest: Manifest | PartManifest) -> Slot | None:
        """A slot to fill with ``version``, its header written; None when every slot is in use.

        :raises NoCapacity: its memory cannot be allocated; the slot stays free.
        """
        nbytes = manifest.nbytes if isinstance(manifest, PartManifest) else manifest.image_nbytes
        with self._lock:
            slot = self._choose(nbytes)
            if slot is None:
                return None
            dropped = slot.version if slot.state == "held" else 0
            slot.state, slot.version, slot.manifest, slot.digest, slot.pins = "filling", version, manifest, "", 0
        try:
            self._fit(slot, nbytes)
        except BaseException:  # an interrupt must not lose the slot either
            self.free(slot)
            raise
        finally:
            if dropped and self.on_drop is not None:
                self.on_drop(dropped)
        return slot

    def hold(self, slot: Slot, digest: str) -> None:
        """The slot is complete: it holds its version from now on."""
        with self._lock:
            if slot.state != "filling":
                raise ValueError(f"{slot!r} is not being filled")
            slot.state, slot.digest = "held", digest

    def free(self, slot: Slot) -> None:
        """Forget what is in the slot; its memory is kept for the next one. A free slot stays free."""
        with self._lock:
            self._clear(slot)
            if self._closed:
                self._drop_buffer(slot)
        self._changed()

    def pin(self, slot: Slot) -> None:
        """Keep a held slot until :meth:`unpin`; pins add up."""
        with self._lock:
            if slot.state != "held":
                raise ValueError(f"{slot!r} holds nothing")
            slot.pins += 1

    def unpin(self, slot: Slot) -> None:
        with self._lock:
            if slot.pins < 1:
                raise ValueError(f"{slot!r} is not pinned")
            slot.pins -= 1
            last = slot.pins == 0
            if last and self._closed:
                self._clear(slot)
                self._drop_buffer(slot)
        if last:
            self._changed()

    def find(self, version: int) -> Slot | None:
        """The slot that holds ``version`` complete."""
        with self._lock:
            return next((slot for slot in self._slots if slot.state == "held" and slot.version == version), None)

    def find_pinned(self, version: int) -> Slot | None:
        """Like :meth:`find`, and pinned in the same step."""
        with self._lock:
            slot = self.find(version)
            if slot is not None:
                slot.pins += 1
            return slot

    def find_filling(self, version: int) -> Slot | None:
        """The slot that is being filled with ``version``."""
        with self._lock:
            return next((slot for slot in self._slots if slot.state == "filling" and slot.version == version), None)

    def held(self) -> dict[int, str]:
        """Digest of each version that is held."""
        with self._lock:
            return {slot.version: slot.digest for slot in self._slots if slot.state == "held"}

    def images(self) -> dict[int, Manifest]:
        """Manifest of each whole version that is held."""
        with self._lock:
            images = {slot.version: slot.image for slot in self._slots if slot.state == "held"}
            return {version: image for version, image in images.items() if image is not None}

    def close(self) -> None:
        """Release the memory of all slots; that of one which is being filled or read goes when it is freed or unpinned."""
        with self._lock:
            self._closed = True
            for slot in self._slots:
                if slot.state != "filling" and not slot.pins:
                    self._clear(slot)
                    self._drop_buffer(slot)

    def _choose(self, nbytes: int) -> Slot | None:
        """A free slot, rather one whose memory fits; else the oldest version that may go."""
        if self._closed:
            return None
        free = [slot for slot in self._slots if slot.state == "free"]
        if free:
            return min(free, key=lambda slot: slot._buffer is None or slot._buffer.nbytes != nbytes)
        evictable = [
            slot
            for slot in self._slots
            if slot.state == "held" and not slot.pins and slot.version not in self.protected
        ]
        return min(evictable, key=lambda slot: slot.version, default=None)

    def _fit(self, slot: Slot, nbytes: int) -> None:
        """Give the slot memory of exactly ``nbytes`` and write the header of its image."""
        if slot._buffer is None or slot._buffer.nbytes != nbytes:
            self._drop_buffer(slot)
            slot._buffer = Buffer.allocate(nbytes, f"{self._name}-{slot.index}")
        image = slot.image
        if image is not None:
            header = torch.frombuffer(bytearray(image.header), dtype=torch.uint8)
            slot.buffer.tensor()[: image.data_offset].copy_(header)

    @staticmethod
    def _clear(slot: Slot) -> None:
        slot.state, slot.version, slot.manifest, slot.digest, slot.pins = "free", 0, None, "", 0

    def _drop_buffer(self, slot: Slot) -> None:
        if slot._buffer is not None:
            slot._buffer.close()
            slot._buffer = None

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

"""Slots for versions: a member's own memory, and mapped memory of others on its host.

Theory of operation
===================

An :class:`Arena` has a fixed number of own slots. Their states are the table ``SLOT``
of :mod:`replicas.core.membership`: *free*, *filling* (one writer, a rank or its
sidecar) or *held* (a complete version). Any number of readers may pin a held slot; a
slot released while pinned is *leaving* until its last pin goes. :meth:`Arena.acquire`
takes a free slot, or evicts the oldest version that is neither pinned nor protected.
Buffers are reused only at exactly the same size, because a slot's file must be as long
as its image. The writer calls :meth:`Arena.hold` or :meth:`Arena.free`; a slot must
stay *filling* while its writer may still write.

*Foreign* slots are versions in the memory of another member of this host, mapped
(:meth:`Arena.adopt`). They come on top of the arena's own slots, cost no memory, and go
once they are neither pinned nor protected here.

**Readers in other processes** hold this memory by kernel locks
(:mod:`replicas.linux.locks`), which also end with a killed process. A held buffer is
not written to: its slot is not reused, even when its version has been released here.
Two kinds of readers are not waited for: those that keep a mapping of a version after
letting go of its lock, and those that hold a version which no responsive member still
holds (:meth:`Arena.released`: the holder is frozen, and evicted). Their buffer is
*retired*, that is, left to them. The slot gets another buffer from the
:class:`~replicas.weights.memory.pool.Pool`, which also preallocates the memory of slots
that have none yet. The kernel does not report the end of a lock: to wait for a slot,
poll.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from replicas.core.membership import SLOT, SlotEvent
from replicas.core.versions.manifest import Manifest, PartManifest
from replicas.errors import Gone
from replicas.linux import locks
from replicas.messages import SlotPlace
from replicas.weights.memory.buffers import Buffer, BufferWatcher
from replicas.weights.memory.mappings import KeptMappings
from replicas.weights.memory.pool import Pool
from replicas.weights.memory.slots import Slot

__all__ = ["Arena", "ArenaStatistics", "Buffer", "BufferWatcher", "Slot"]


class ArenaStatistics(NamedTuple):
    """A snapshot of an arena's slots, buffers and memory.

    ``held``: own slots that hold a version. ``foreign``: mapped slots. ``retired``:
    buffers left to their readers. ``spare``: buffers without a slot. ``nbytes``: own
    memory, retired and spare included. ``kept``: kept mappings.
    """

    slots: int
    held: int
    foreign: int
    retired: int
    spare: int
    nbytes: int
    kept: int


class Arena:
    """A fixed number of own slots, and foreign ones. Every method is thread-safe.

    Callbacks run without the lock held.

    :param slots: how many versions fit in its own memory.
    :param name: names its memory in ``/proc/PID/maps``.
    :param device: UUID of the GPU for its own memory; empty: host memory. On a GPU no
        header is written.
    :param pin: pin preallocated host memory, as a target of copies from a GPU. See
        :attr:`pinning`.
    :param on_drop: called with a version whose slot was given to another version, or
        was foreign and is no longer needed.
    :param on_change: called after a slot became free or lost its last pin: a waiting
        :meth:`acquire` may succeed now.
    :ivar protected: versions that must not be evicted; replace or change it at will,
        then call :meth:`trim`.
    """

    def __init__(
        self,
        slots: int,
        *,
        name: str = "replicas",
        device: str = "",
        pin: bool = False,
        on_drop: Callable[[int], None] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"an arena needs at least one slot, not {slots}")
        self.protected: set[int] = set()
        self.on_drop = on_drop
        self.on_change = on_change
        self._lock = threading.RLock()
        self._slots = [Slot(index) for index in range(slots)]
        self._foreign: list[Slot] = []
        self._adopted = 0
        self._kept = KeptMappings()
        self._pool = Pool(name, slots, device)
        self._pool.pinning = pin
        self._closed = False
        self._end = weakref.finalize(self, self._pool.close)
        self._end.atexit = False

    @property
    def slots(self) -> Sequence[Slot]:
        """Its own slots."""
        return tuple(self._slots)

    @property
    def foreign(self) -> Sequence[Slot]:
        """The slots mapped from other members."""
        with self._lock:
            return tuple(self._foreign)

    @property
    def device(self) -> str:
        """UUID of the GPU that holds its own memory; empty: host memory."""
        return self._pool.device

    @property
    def pinning(self) -> bool:
        """Whether preallocated memory is pinned (:meth:`Buffer.pin`).

        Pinning takes as long as a copy. Set it once it is known that bytes of a GPU
        will be copied there.
        """
        return self._pool.pinning

    @pinning.setter
    def pinning(self, pin: bool) -> None:
        self._pool.pinning = pin

    # ------------------------------------------------------------ memory of its own

    def prepare(self, nbytes: int) -> None:
        """Allocate memory for the slots that lack it, in the background.

        Call it as soon as the size is known. Where memory is short nothing happens:
        :meth:`acquire` reports it when the memory is needed.
        """
        with self._lock:
            bare = sum(slot._buffer is None for slot in self._slots)
            unfit = sum(
                slot.state == "free" and slot._buffer is not None for slot in self._slots if not _fits(slot, nbytes)
            )
        self._pool.prepare(nbytes, bare + unfit)

    def acquire(self, version: int, manifest: Manifest | PartManifest) -> Slot | None:
        """Take a slot to fill with ``version``, its header written; None: all in use.

        Readers in other processes may be using them. The kernel does not report when
        they let go: try again every few hundredths of a second, and at each
        ``on_change``. It blocks only for memory that is being allocated.

        :raises NoCapacity: its memory cannot be allocated; the slot stays free.
        """
        nbytes = manifest.nbytes if isinstance(manifest, PartManifest) else manifest.image_nbytes
        with self._lock:
            if self._closed:
                return None
            self._pool.beat(sum(slot._buffer is None for slot in self._slots))
            slot = self._choose(nbytes)
            if slot is None:
                return None
            dropped = slot.version if slot.state == "held" else 0
            slot.state = SLOT.next(slot.state, "evicted" if dropped else "acquired")
            slot.version, slot.manifest, slot.digest, slot.pins = version, manifest, "", 0
        try:
            self._fit(slot, nbytes)
        except BaseException:  # an interrupt must not lose the slot either
            self.free(slot)
            raise
        finally:
            if dropped:
                self._dropped([dropped])
        self.prepare(nbytes)
        return slot

    def hold(self, slot: Slot, digest: str) -> None:
        """Mark the slot complete: it holds its version, and others may map it."""
        with self._lock:
            if slot.state != "filling":
                raise ValueError(f"{slot!r} is not being filled")
            slot.buffer.offer(slot.version)
            slot.state, slot.digest = SLOT.next(slot.state, "completed"), digest

    def assign(self, slot: Slot, version: int) -> None:
        """Set the version of a filling slot, unknown when it was acquired."""
        with self._lock:
            if slot.state != "filling":
                raise ValueError(f"{slot!r} is not being filled")
            slot.version = version

    def free(self, slot: Slot) -> None:
        """Forget a slot's content and keep its memory; a free slot stays free."""
        with self._lock:
            match slot.state:
                case "free" | "closed":
                    pass
                case "filling":
                    if slot._buffer is not None:
                        slot._buffer.abandon()
                    self._clear(slot, "abandoned")
                case "held":
                    self._clear(slot, "released")
                case "leaving":
                    self._clear(slot, "let_go")
        self._changed()

    def release(self, version: int) -> bool:
        """Free the slot of ``version``, now or with its last pin; False: not held.

        It counts as not held from now on.
        """
        with self._lock:
            slot = self.find(version)
            if slot is None:
                return False
            if slot.pins:
                slot.state = SLOT.next(slot.state, "released_in_use")
                return True
            self._clear(slot, "released")
        self._changed()
        return True

    def released(self, version: int) -> None:
        """Stop waiting for locks on ``version`` in this arena's memory.

        No responsive member of this host has it any more.
        """
        with self._lock:
            for slot in self._slots:
                if slot._buffer is not None and slot._buffer.offered == version:
                    slot._buffer.released = True
        self._changed()

    def lent(self) -> set[int]:
        """Versions no longer held here that others may still read in this memory."""
        with self._lock:
            held = {slot.version for slot in self._slots if slot.state != "free"}
            offered = {slot._buffer.offered for slot in self._slots if slot._buffer is not None}
            return offered - held - {0}

    # ------------------------------------------------------------ memory of others

    def borrow(self, place: SlotPlace, version: int) -> Buffer:
        """Open another member's memory briefly; the caller closes the buffer.

        See :meth:`Buffer.open`.
        """
        buffer = Buffer.open(place, version)
        buffer.keep_mappings_in(self._kept)
        return buffer

    def adopt(self, version: int, manifest: Manifest | PartManifest, buffer: Buffer, digest: str = "") -> Slot:
        """Add a held foreign slot with ``version`` in ``buffer``.

        ``buffer`` is taken over, also on failure. The slot stays until it is neither
        pinned nor protected at a :meth:`trim` or at its own last unpin.

        :raises Gone: the arena is closed.
        :raises ValueError: the version is held here already.
        """
        with self._lock:
            error: Exception | None = None
            if self._closed:
                error = Gone("the arena is closed", version=version)
            elif self.find(version) is not None:
                error = ValueError(f"version {version} is held here already")
            if error is not None:
                buffer.close()
                raise error
            self._adopted += 1
            slot = Slot(len(self._slots) + self._adopted, "held", foreign=True)
            slot.version, slot.manifest, slot.digest, slot._buffer = version, manifest, digest, buffer
            buffer.keep_mappings_in(self._kept)
            self._foreign.append(slot)
            return slot

    def trim(self) -> None:
        """Drop foreign slots neither pinned nor protected.

        Call it when ``protected`` has changed.
        """
        with self._lock:
            unneeded = [slot for slot in self._foreign if not slot.pins and slot.version not in self.protected]
            versions = [slot.version for slot in unneeded]
            for slot in unneeded:
                self._clear(slot, "close")
            self._kept.sweep(slot.buffer.place.inode for slot in self._foreign)
        self._dropped(versions)

    # ------------------------------------------------------------ readers here

    def pin(self, slot: Slot) -> None:
        """Keep a held slot until :meth:`unpin`; pins add up."""
        with self._lock:
            if slot.state != "held":
                raise ValueError(f"{slot!r} holds nothing")
            slot.pins += 1

    def unpin(self, slot: Slot) -> None:
        """Remove a pin; the last one drops a leaving, or unprotected foreign, slot."""
        dropped: list[int] = []
        with self._lock:
            if slot.pins < 1:
                raise ValueError(f"{slot!r} is not pinned")
            slot.pins -= 1
            last = slot.pins == 0
            if last and slot.state == "leaving":
                self._clear(slot, "let_go")
            elif last and (self._closed or (slot.foreign and slot.version not in self.protected)):
                dropped = [slot.version] if slot.foreign and not self._closed else []
                self._clear(slot, "close")
        self._dropped(dropped)
        if last:
            self._changed()

    def find(self, version: int) -> Slot | None:
        """The slot that holds ``version`` complete, or None."""
        with self._lock:
            return next((slot for slot in self._held() if slot.version == version), None)

    def find_pinned(self, version: int) -> Slot | None:
        """Like :meth:`find`, and pin the slot in the same step."""
        with self._lock:
            slot = self.find(version)
            if slot is not None:
                slot.pins += 1
            return slot

    def find_filling(self, version: int) -> Slot | None:
        """The slot that is being filled with ``version``, or None."""
        with self._lock:
            return next((slot for slot in self._slots if slot.state == "filling" and slot.version == version), None)

    def held(self) -> dict[int, str]:
        """Digest of each held version."""
        with self._lock:
            return {slot.version: slot.digest for slot in self._held()}

    def images(self) -> dict[int, Manifest]:
        """Manifest of each held whole version."""
        with self._lock:
            images = {slot.version: slot.image for slot in self._held()}
            return {version: image for version, image in images.items() if image is not None}

    # ------------------------------------------------------------ the whole

    def in_use(self) -> str:
        """The slots in use and their users, as text for an error."""
        with self._lock:
            texts = [text for slot in self._slots if (text := self._use(slot))]
        retired = self._pool.retired
        text = f"the {len(self._slots)} slots have {', '.join(texts)}" if texts else "none"
        if retired:
            processes = {pid for buffer in retired for pid in locks.holders(buffer.place.inode)}
            who = f", held by {_processes(processes)}" if processes else ""
            text += f"; {len(retired)} older buffers are still mapped by readers{who}"
        return text

    def statistics(self) -> ArenaStatistics:
        """A snapshot of slots, buffers and memory."""
        with self._lock:
            own = [slot._buffer for slot in self._slots if slot._buffer is not None]
            held = sum(slot.state in ("held", "leaving") for slot in self._slots)
            foreign = len(self._foreign)
        retired, spare = self._pool.retired, self._pool.spare
        nbytes = sum(buffer.nbytes for buffer in (*own, *retired, *spare))
        return ArenaStatistics(len(self._slots), held, foreign, len(retired), len(spare), nbytes, len(self._kept))

    def close(self) -> None:
        """Free the memory of all slots; a filling or pinned one keeps it until done."""
        with self._lock:
            self._closed = True
            for slot in [*self._slots, *self._foreign]:
                if slot.state not in ("filling", "closed") and not slot.pins:
                    self._clear(slot, "close")
            self._kept.close()
        self._pool.close()
        self._end.detach()  # no Python runs when this is garbage-collected, maybe on a thread being interrupted

    # ------------------------------------------------------------ inside

    def _held(self) -> Iterator[Slot]:
        return (slot for slot in (*self._slots, *self._foreign) if slot.state == "held")

    def _choose(self, nbytes: int) -> Slot | None:
        """A free slot, or the oldest evictable version's; its buffer claimed or gone.

        Free slots with memory of the right size come first.
        """
        free = sorted((slot for slot in self._slots if slot.state == "free"), key=lambda slot: not _fits(slot, nbytes))
        evictable = [
            slot
            for slot in self._slots
            if slot.state == "held" and not slot.pins and slot.version not in self.protected
        ]
        retirable: list[tuple[Slot, Buffer]] = []
        for slot in [*free, *sorted(evictable, key=lambda slot: slot.version)]:
            buffer = slot._buffer
            if buffer is None:
                return slot
            claim = buffer.claim()
            if claim == "claimed":
                return slot
            if claim == "in sight" or buffer.released:
                retirable.append((slot, buffer))
        for slot, buffer in retirable:
            if self._pool.retire(buffer):
                slot._buffer = None
                return slot
        return None

    def _fit(self, slot: Slot, nbytes: int) -> None:
        """Give the slot memory of exactly ``nbytes``, with its image's header."""
        if not _fits(slot, nbytes):
            self._drop_buffer(slot)
            slot._buffer = self._pool.take(nbytes, len(self._slots))
        image = slot.image
        if image is not None and not slot.buffer.device:  # device memory cannot be read as a file
            header = torch.frombuffer(bytearray(image.header), dtype=torch.uint8)
            slot.buffer.tensor()[: image.data_offset].copy_(header)

    def _clear(self, slot: Slot, event: SlotEvent) -> None:
        """Forget the content; close a slot that is foreign or of a closed arena."""
        slot.state = SLOT.next(slot.state, event)
        slot.version, slot.manifest, slot.digest, slot.pins = 0, None, "", 0
        if slot.state == "free" and (slot.foreign or self._closed):
            slot.state = SLOT.next(slot.state, "close")
        if slot.state == "closed":
            self._drop_buffer(slot)
            if slot.foreign:
                self._foreign.remove(slot)

    def _drop_buffer(self, slot: Slot) -> None:
        if slot._buffer is not None:
            slot._buffer.close()
            slot._buffer = None

    def _use(self, slot: Slot) -> str:
        if slot.state == "filling":
            return f"version {slot.version} (being filled)"
        readers = locks.holders(slot._buffer.place.inode) if slot._buffer is not None and slot._buffer.offered else ()
        if slot.state == "free" and not readers:
            return ""
        uses = ["open"] if slot.pins else []
        uses += [f"read by {_processes(readers)}"] if readers else []
        return f"version {slot.version or slot.buffer.offered} ({', '.join(uses) or 'kept'})"

    def _dropped(self, versions: Sequence[int]) -> None:
        if self.on_drop is not None:
            for version in versions:
                self.on_drop(version)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


def _fits(slot: Slot, nbytes: int) -> bool:
    return slot._buffer is not None and slot._buffer.nbytes == nbytes


def _processes(pids: Sequence[int] | set[int]) -> str:
    return f"process{'' if len(pids) == 1 else 'es'} {', '.join(map(str, sorted(pids)))}"

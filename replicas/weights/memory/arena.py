"""Slots for versions: a member's own memory, and mapped memory of others on its host.

Theory of operation
===================

An :class:`Arena` has a fixed number of own slots. Their states are the table ``SLOT``
of :mod:`replicas.core.base.membership`: *free*, *filling* (one writer, a rank or its
sidecar) or *held* (a complete version). Any number of readers may pin a held slot; a
slot released while pinned is *leaving* until its last pin goes. :meth:`Arena.acquire`
takes a free slot, or evicts the oldest version that is neither pinned nor protected.
Buffers are reused only at exactly the same size, because a slot's file must be as long
as its image. The writer calls :meth:`Arena.hold` or :meth:`Arena.free`; a slot must
stay *filling* while its writer may still write.

*Foreign* slots are versions in the memory of another member of this host, mapped
(:meth:`Arena.adopt`). They come on top of the arena's own slots, cost no memory, and
end when they are neither pinned nor protected here.
For readers in other processes see :mod:`replicas.weights.memory`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from replicas.core.base.manifest import Manifest, PartManifest
from replicas.core.base.membership import SLOT, SlotEvent, SlotState
from replicas.errors import Gone
from replicas.linux import locks
from replicas.messages import SlotPlace
from replicas.weights.copies.digest import DigestKind
from replicas.weights.memory.buffers import Buffer
from replicas.weights.memory.mappings import KeptMappings
from replicas.weights.memory.pool import Pool

_FREED: dict[SlotState, SlotEvent] = {"filling": "abandoned", "held": "released", "leaving": "let_go"}


class Slot:
    """Memory for one version. Its arena changes the fields under the arena's lock.

    :ivar foreign: the memory belongs to another member of this host.
    :ivar digest: of the data, once held.
    :ivar sharing: how many processes of this host have received its version together.
    """

    def __init__(self, index: int, state: SlotState = "free", *, foreign: bool = False) -> None:
        """Make a slot without memory; ``index`` numbers it within its arena."""
        self.index = index
        self.state: SlotState = state
        self.foreign = foreign
        self.version = 0
        self.manifest: Manifest | PartManifest | None = None
        self.digest = ""
        self.pins = 0
        self.sharing = 1
        self._buffer: Buffer | None = None

    @property
    def buffer(self) -> Buffer:
        """The memory; raises ValueError if the slot has none."""
        if self._buffer is None:
            raise ValueError(f"slot {self.index} has no buffer")
        return self._buffer

    def drop_buffer(self) -> None:
        """Close the slot's memory, if it has any; other processes keep theirs."""
        buffer, self._buffer = self._buffer, None  # first, as a slot's buffer is open
        if buffer is not None:
            buffer.close()

    @property
    def image(self) -> Manifest | None:
        """The manifest (layout) of a whole version; None for one rank's packed part."""
        if isinstance(self.manifest, PartManifest):
            return self.manifest.whole if self.manifest.pieces is None else None
        return self.manifest

    @property
    def data(self) -> torch.Tensor:
        """The bytes of the tensors, without a header; read-only if foreign."""
        image = self.image
        return self.buffer.readable()[image.data_offset if image else 0 :]

    @property
    def digest_kind(self) -> DigestKind:
        """``"device"`` if the memory is on a GPU, else ``"host"``."""
        return "device" if self.buffer.device else "host"

    @property
    def place(self) -> SlotPlace:
        """Where other processes of this host can open the memory of the held slot."""
        return self.buffer.place

    def __repr__(self) -> str:
        kind = "foreign " if self.foreign else ""
        return f"<Slot {self.index} {kind}{self.state} version={self.version} pins={self.pins}>"


class Arena:
    """Memory for versions: own slots, and slots mapped from others. Thread-safe.

    :ivar protected: versions that must not be evicted; call :meth:`trim` after changes.
    :ivar pool: allocates the memory of its slots.
    """

    def __init__(
        self,
        slots: int,
        *,
        name: str = "replicas",
        device: str = "",
        on_drop: Callable[[int], None] = lambda version: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the slots, without memory yet.

        :param slots: how many versions fit in its own memory.
        :param name: names its memory in ``/proc/PID/maps``.
        :param device: UUID of the GPU for its own memory, without headers; else empty.
        :param on_drop: called, without the lock, with a version whose slot was given to
            another version, or was foreign and is no longer needed.
        :param on_change: called, without the lock, after a slot became free or lost its
            last pin: a waiting :meth:`acquire` may succeed now.
        """
        if slots < 1:
            raise ValueError(f"an arena needs at least one slot, not {slots}")
        self.protected: set[int] = set()
        self.on_drop = on_drop
        self.on_change = on_change
        self._lock = threading.RLock()  # a finaliser may run within any method
        self._slots = [Slot(index) for index in range(slots)]
        self._foreign: list[Slot] = []
        self._adopted = 0
        self._kept = KeptMappings()
        self.pool = Pool(name, slots, device)
        self._closed = False
        self._end = weakref.finalize(self, self.pool.close)
        self._end.atexit = False  # the end of the process frees it

    @property
    def slots(self) -> Sequence[Slot]:
        """This process's slots (memory for one version each), free ones included."""
        return tuple(self._slots)

    @property
    def foreign(self) -> Sequence[Slot]:
        """The slots that map versions in the memory of other members of this host."""
        with self._lock:
            return tuple(self._foreign)

    def prepare(self, nbytes: int, at_most: int | None = None) -> None:
        """Have a thread allocate memory of ``nbytes`` for slots that lack it: for all,
        or for ``at_most`` of them. Do not wait."""
        with self._lock:
            lacking = [
                slot._buffer is None or (slot.state == "free" and not _fits(slot, nbytes)) or slot._buffer.shown
                for slot in self._slots
            ]
        self.pool.prepare(nbytes, sum(lacking) if at_most is None else min(sum(lacking), at_most))

    def acquire(self, version: int, manifest: Manifest | PartManifest, *, alone: bool = False) -> Slot | None:
        """Take a slot of the size that ``manifest`` needs, to fill it with ``version``,
        and write its header. Return None if all are in use, or this is closed; the
        caller may try again at each ``on_change`` and, for readers in other processes,
        after hundredths of a second. Blocks only while memory is allocated.

        :param alone: only this process fills it, no sidecar.
        :raises NoCapacity: its memory cannot be allocated; the slot stays free.
        """
        nbytes = manifest.nbytes if isinstance(manifest, PartManifest) else manifest.image_nbytes
        with self._lock:
            if self._closed:
                return None
            self.pool.count_version(sum(slot._buffer is None for slot in self._slots))
            slot = self._choose(nbytes)
            if slot is None:
                return None
            dropped = slot.version if slot.state == "held" else 0
            slot.state = SLOT.next(slot.state, "evicted" if dropped else "acquired")
            slot.version, slot.manifest, slot.digest, slot.pins = version, manifest, "", 0
        try:
            self._fit(slot, nbytes, alone=alone)  # without the lock, as it may allocate
        except BaseException:  # an interrupt must not lose the slot
            self.free(slot)
            raise
        finally:
            if dropped:
                self.on_drop(dropped)
        self.prepare(nbytes)
        return slot

    def hold(self, slot: Slot, digest: str) -> None:
        """Mark a filled slot as complete, with its digest: others may map it now."""
        with self._lock:
            if slot.state != "filling":
                raise ValueError(f"{slot!r} is not being filled")
            slot.buffer.offer(slot.version)
            slot.state, slot.digest = SLOT.next(slot.state, "completed"), digest

    def assign(self, slot: Slot, version: int) -> None:
        """Set the version of a slot being filled that was acquired without one."""
        with self._lock:
            if slot.state != "filling":
                raise ValueError(f"{slot!r} is not being filled")
            slot.version = version

    def free(self, slot: Slot) -> None:
        """Empty a slot, even a pinned one, but keep its memory; leave a free one."""
        with self._lock:
            if slot.state == "filling" and slot._buffer is not None:
                slot._buffer.abandon()
            if (event := _FREED.get(slot.state)) is not None:
                self._clear(slot, event)
        self.on_change()

    def release(self, version: int) -> bool:
        """Drop ``version`` from this arena: free its slot now or, if it is pinned, with
        the last :meth:`unpin`. Return False if no slot holds it."""
        with self._lock:
            slot = self.find(version)
            if slot is None:
                return False
            if slot.pins:
                slot.state = SLOT.next(slot.state, "released_in_use")
                return True
            self._clear(slot, "released")
        self.on_change()
        return True

    def released(self, version: int) -> None:
        """Note that no responsive member needs ``version``: a later one may take its
        slot, even while a process still reads the old memory, which it then keeps."""
        with self._lock:
            for slot in self._slots:
                if slot._buffer is not None and slot._buffer.offered == version:
                    slot._buffer.released = True
        self.on_change()

    def lent(self) -> set[int]:
        """Return versions no longer held here that others may still read."""
        with self._lock:
            held = {slot.version for slot in self._slots if slot.state != "free"}
            offered = {slot._buffer.offered for slot in self._slots if slot._buffer is not None}
            return offered - held - {0}

    def borrow(self, place: SlotPlace, version: int, *, lock: bool = True) -> Buffer:
        """Open another process's memory of ``version`` at ``place``, or raise Gone. The
        caller closes it; with ``lock`` its owner cannot refill it until then."""
        buffer = Buffer.open(place, version, lock=lock)
        buffer.keep_mappings_in(self._kept)
        return buffer

    def adopt(self, version: int, manifest: Manifest | PartManifest, buffer: Buffer, digest: str = "") -> Slot:
        """Add another member's memory, ``buffer``, as a complete (foreign) slot of a
        version. Takes over ``buffer``, also on failure.

        The slot stays until it is neither pinned nor protected at a :meth:`trim` or its
        last unpin. Gone: the arena is closed; ValueError: the version is here."""
        with self._lock:
            if self._closed:
                buffer.close()
                raise Gone("the memory of this channel is closed", version=version)
            if self.find(version) is not None:
                buffer.close()
                raise ValueError(f"version {version} is in memory here already")
            self._adopted += 1
            slot = Slot(len(self._slots) + self._adopted, "held", foreign=True)
            slot.version, slot.manifest, slot.digest, slot._buffer = version, manifest, digest, buffer
            buffer.keep_mappings_in(self._kept)
            self._foreign.append(slot)
            return slot

    def trim(self) -> None:
        """Drop slots in others' memory that are neither pinned nor ``protected``."""
        with self._lock:
            unneeded = [slot for slot in self._foreign if not slot.pins and slot.version not in self.protected]
            versions = [slot.version for slot in unneeded]
            for slot in unneeded:
                self._clear(slot, "close")
            self._kept.sweep(slot.buffer.place.inode for slot in self._foreign)
        for version in versions:
            self.on_drop(version)

    def pin(self, slot: Slot) -> None:
        """Count a user of a held slot, which is kept until :meth:`unpin`."""
        with self._lock:
            if slot.state != "held":
                raise ValueError(f"{slot!r} does not hold a version")
            slot.pins += 1

    def unpin(self, slot: Slot) -> None:
        """Remove a user of a slot. The last one frees it if it is released or
        foreign."""
        dropped = 0
        with self._lock:
            if slot.pins < 1:
                raise ValueError(f"{slot!r} is not pinned")
            slot.pins -= 1
            last = slot.pins == 0
            if last and slot.state == "leaving":
                self._clear(slot, "let_go")
            elif last and (self._closed or (slot.foreign and slot.version not in self.protected)):
                dropped = slot.version if slot.foreign and not self._closed else 0
                self._clear(slot, "close")
        if dropped:
            self.on_drop(dropped)
        if last:
            self.on_change()

    def find(self, version: int) -> Slot | None:
        """Return the slot that holds the complete ``version``, or None."""
        with self._lock:
            return next((slot for slot in self._held() if slot.version == version), None)

    def find_pinned(self, version: int) -> Slot | None:
        """Pin and return the slot of ``version``, or None. The caller unpins it."""
        with self._lock:
            slot = self.find(version)
            if slot is not None:
                slot.pins += 1
            return slot

    def find_filling(self, version: int) -> Slot | None:
        """Return the slot that is being filled with ``version``, or None."""
        with self._lock:
            return next((slot for slot in self._slots if slot.state == "filling" and slot.version == version), None)

    def held(self) -> dict[int, str]:
        """Return the digests of the held versions, by version."""
        with self._lock:
            return {slot.version: slot.digest for slot in self._held()}

    def images(self) -> dict[int, Manifest]:
        """Return the manifests (layouts) of the whole versions held, by version."""
        with self._lock:
            images = {slot.version: slot.image for slot in self._held()}
            return {version: image for version, image in images.items() if image is not None}

    def in_use(self) -> str:
        """Return a text, for an error: which slots are in use, and by which readers."""
        with self._lock:
            texts = [text for slot in self._slots if (text := self._use(slot))]
        text = f"the {len(self._slots)} slots have {', '.join(texts)}" if texts else "none"
        if retired := self.pool.retired:
            processes = {pid for buffer in retired for pid in locks.holders(buffer.place.inode)}
            who = f", held by {_processes(processes)}" if processes else ""
            text += f"; {len(retired)} older buffers are still mapped by readers{who}"
        return f"{text}; {left}" if (left := self.pool.still_mapped.text()) else text

    def close(self) -> None:
        """Close for good: free slots' memory, of used ones when freed or unpinned."""
        with self._lock:
            self._closed = True
            for slot in [*self._slots, *self._foreign]:
                if slot.state not in ("filling", "closed") and not slot.pins:
                    self._clear(slot, "close")
            self._kept.close()
        self.pool.close()
        self._end.detach()  # or garbage collection would run Python, maybe on an interrupted thread

    def _held(self) -> Iterator[Slot]:
        """Return the slots that hold a complete version, foreign ones included."""
        return (slot for slot in (*self._slots, *self._foreign) if slot.state == "held")

    def _choose(self, nbytes: int) -> Slot | None:
        """Return a free slot, else that of the oldest version not pinned or protected;
        None if readers prevent it. Its buffer is claimed, or was left to readers."""
        free = sorted((slot for slot in self._slots if slot.state == "free"), key=lambda slot: not _fits(slot, nbytes))
        evictable = [
            slot
            for slot in self._slots
            if slot.state == "held" and not slot.pins and slot.version not in self.protected
        ]
        shown: list[tuple[Slot, Buffer]] = []
        retirable: list[tuple[Slot, Buffer]] = []
        for slot in [*free, *sorted(evictable, key=lambda slot: slot.version)]:
            buffer = slot._buffer
            if buffer is None:
                return slot
            claim = buffer.claim()  # fails if readers in other processes hold it
            if claim == "claimed":
                return slot
            if claim == "shown":
                shown.append((slot, buffer))
            elif claim == "in sight" or buffer.released:
                retirable.append((slot, buffer))
        for slot, buffer in shown:  # first, as they do not count as retired
            slot._buffer = None
            self.pool.close_shown(buffer)
            return slot
        for slot, buffer in retirable:
            if self.pool.retire(buffer):
                slot._buffer = None
                return slot
        return None

    def _fit(self, slot: Slot, nbytes: int, *, alone: bool) -> None:
        """Give the slot memory of exactly ``nbytes``; write its image's header.

        :param alone: no other process writes to it.
        """
        if not _fits(slot, nbytes) or (not alone and slot.buffer.closed_to_writers):
            with self._lock:  # other threads read all slots' buffers under it
                slot.drop_buffer()
            slot._buffer = self.pool.claim_buffer(nbytes, len(self._slots), alone=alone)
        if alone:
            slot.buffer.close_to_writers()
        image = slot.image
        if image is not None and not slot.buffer.device:  # device memory cannot be read as a file
            # not by torch, whose threads wake more slowly than a header is copied
            slot.buffer.tensor()[: image.data_offset].numpy().data[:] = image.header

    def _clear(self, slot: Slot, event: SlotEvent) -> None:
        """Empty a slot, for the reason ``event``. Close it, too, if it is foreign or
        the arena is closed."""
        slot.state = SLOT.next(slot.state, event)
        slot.version, slot.manifest, slot.digest, slot.pins = 0, None, "", 0
        if slot.state == "free" and (slot.foreign or self._closed):
            slot.state = SLOT.next(slot.state, "close")
        if slot.state == "closed":
            slot.drop_buffer()
            if slot.foreign:
                self._foreign.remove(slot)

    def _use(self, slot: Slot) -> str:
        """Return a text: the slot's version and its readers; "" for an unused slot."""
        if slot.state == "filling":
            return f"version {slot.version} (being filled)"
        # a protected version stays whoever reads it; the coordinator keeps the newest
        counted = slot._buffer is not None and slot._buffer.offered and slot.version not in self.protected
        readers = locks.holders(slot.buffer.place.inode) if counted else ()
        if slot.state == "free" and not readers:
            return ""
        uses = ["open"] if slot.pins else []
        uses += [f"read by {_processes(readers)}"] if readers else []
        return f"version {slot.version or slot.buffer.offered} ({', '.join(uses) or 'kept'})"


def _fits(slot: Slot, nbytes: int) -> bool:
    """Return True if the slot has memory of exactly this size."""
    return slot._buffer is not None and slot._buffer.nbytes == nbytes


def _processes(pids: Sequence[int] | set[int]) -> str:
    """Return the text ``process 12`` or ``processes 12, 34``."""
    return f"process{'' if len(pids) == 1 else 'es'} {', '.join(map(str, sorted(pids)))}"

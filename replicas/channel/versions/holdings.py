"""What a member holds: versions in slots, what is known of each, and which of them must
be kept.

Theory of operation
===================

The arena is used from several threads; all the rest here belongs to the session thread,
which replaces (never changes in place) what others read. *Protected*, that is never
evicted, are: the newest committed version, the one assigned to this replica and not yet
loaded, those being published, and those received and not yet committed or discarded.
Open updates and running transfers pin theirs. After each change those who wait for a
slot (a publish, a transfer) look again.

A version that is released while somebody still reads its slot goes with the last pin,
and counts as not held until then. Versions that are mapped from another member of this
host (*foreign* slots) cost no memory here, and go as soon as nobody needs them: their
owner may want to write there again. Of a version without a slot nothing is kept.

**Doubt.** A slot that this member filled by itself has no digest until the coordinator
names one in its commit. A new coordinator may never have heard of ours and give the
same number to another version. What was held without a digest when the coordinator was
replaced is therefore *doubtful*: before it counts as the committed version its digest
is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from replicas.messages import Described, HeldVersion, Meta
from replicas.weights.digest import digest_of
from replicas.weights.memory.arena import Arena, Slot

__all__ = ["Holdings"]


class Holdings:
    """The versions of one channel in this process.

    :param name: of the channel; its memory is called after it.
    :param call: runs a function on the session thread.
    :param on_drop: called there with a version whose slot was given to another one.
    :ivar latest: the newest committed version that this member has heard of.
    :ivar latest_digest: of it; empty while only its number is known.
    :ivar assigned: the version granted to this replica that this rank has yet to load;
        0: none.
    """

    arena: Arena

    def __init__(self, name: str, call: Callable[..., None], on_drop: Callable[[int], None]) -> None:
        self._name = name
        self._call = call
        self._on_drop = on_drop
        self.latest = 0
        self.latest_digest = ""
        self.assigned = 0
        self.publishing: set[int] = set()
        self.prepared: set[int] = set()
        self.doubtful: set[int] = set()
        self._metas: dict[int, Meta] = {}
        self._digests: dict[int, str] = {}
        self._devices: dict[int, str] = {}
        self._event = asyncio.Event()
        self._device = ""

    def open(self, slots: int, device: str = "") -> None:
        """Make the arena, on the GPU that ``device`` names or in host memory; it takes
        memory when it is first used."""
        self._device = device

        def on_change() -> None:
            self._call(self._wake)

        def on_drop(version: int) -> None:
            self._call(self._dropped, version)

        name = f"replicas-{self._name}"
        self.arena = Arena(slots, name=name, device=device, on_change=on_change, on_drop=on_drop)

    @property
    def opened(self) -> bool:
        return hasattr(self, "arena")

    def close(self) -> None:
        """Release all memory; what is pinned or being filled goes when its user lets
        go."""
        if self.opened:
            self.arena.close()
            self._wake()

    # ------------------------------------------------------------ what is held

    def held(self) -> tuple[HeldVersion, ...]:
        """The complete versions here, for the coordinator."""
        if not self.opened:
            return ()
        held: list[HeldVersion] = []
        for version, image in sorted(self.arena.images().items()):
            slot = self.arena.find_pinned(version)
            if slot is not None:
                held.append(HeldVersion(version, self.digest(version), image.hash, slot.place))
                self.arena.unpin(slot)
        return tuple(held)

    def lent(self) -> tuple[int, ...]:
        """Versions that are not held any more, whose memory others may still have
        mapped."""
        return tuple(sorted(self.arena.lent())) if self.opened else ()

    def digest(self, version: int) -> str:
        """Empty while it is not known here."""
        return self._digests.get(version, "")

    def meta(self, version: int) -> Meta:
        return self._metas.get(version, {})

    def describe(self, version: int) -> Described:
        """All that a new coordinator must know to have it sent to others."""
        image = self.arena.images().get(version)
        if image is None:
            return Described(version, "", "", {}, "cpu")
        device = "cuda" if self._device else self._devices.get(version, "cpu")
        return Described(version, self.digest(version), image.hash, self.meta(version), device)

    def note(
        self, version: int, *, meta: Meta | None = None, digest: str | None = None, device: str | None = None
    ) -> None:
        """Write down what is known of a version that is held, or about to be."""
        if meta is not None:
            self._metas[version] = meta
        if digest is not None:
            self._digests[version] = digest
            self.doubtful.discard(version)
        if device is not None:
            self._devices[version] = device

    # ------------------------------------------------------------ what becomes of it

    def received(self, slot: Slot, digest: str, meta: Meta, device: str) -> None:
        """A slot has been filled by others, or mapped; it is kept until it is known
        what becomes of its version."""
        version = slot.version
        if not slot.foreign:
            self.arena.hold(slot, digest)
        self.note(version, meta=meta, digest=digest, device=device)
        if version > self.latest:
            self.prepared.add(version)
        self.protect()

    def overtake(self, version: int) -> None:
        """``version`` is on its way: what was received before it and never decided is
        not waited for."""
        self.prepared = {known for known in self.prepared if known > version}
        self.protect()

    def committed(self, version: int, digest: str) -> bool:
        """It is decided. True when it is the newest so far. ``digest``: empty when only
        the number is known."""
        self.prepared.discard(version)
        newest = version > self.latest
        if newest:
            self.latest, self.latest_digest = version, digest
        elif version == self.latest and digest:
            self.latest_digest = digest
        self.protect()
        return newest

    def release(self, version: int) -> None:
        """Free the slot of ``version``, at once or when its last reader lets go."""
        self.prepared.discard(version)
        self.publishing.discard(version)
        self.arena.release(version)
        self.protect()

    def doubt(self) -> None:
        """The coordinator is a new one."""
        self.doubtful = {held.version for held in self.held() if not held.digest}

    async def compare(self, version: int, digest: str) -> bool:
        """Whether the doubtful slot of ``version`` has this digest. Computed on a
        worker thread; the slot stays pinned."""
        slot = self.arena.find_pinned(version)
        if slot is None:
            return True
        try:
            found = await asyncio.to_thread(digest_of, slot.data, slot.digest_kind)
        finally:
            self.arena.unpin(slot)
        if found == digest:
            self.note(version, digest=digest)
        return found == digest

    # ------------------------------------------------------------ room for others

    def protect(self) -> None:
        """Recompute what must not be evicted, let go of what others may have back, and
        let those who wait look again."""
        self.arena.protected = {self.latest, self.assigned, *self.publishing, *self.prepared} - {0}
        self.arena.trim()
        self._forget()
        self._wake()

    def event(self) -> asyncio.Event:
        """Set at the next change of a slot. Take it before you try."""
        return self._event

    def _wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def _dropped(self, version: int) -> None:
        if self.arena.find(version) is None:
            self._forget()
            self._on_drop(version)

    def _forget(self) -> None:
        """Keep nothing of versions that have no slot and will get none."""
        slots = (*self.arena.slots, *self.arena.foreign)
        keep = {slot.version for slot in slots if slot.state not in ("free", "closed")} | self.publishing
        facts: tuple[dict[int, Any], ...] = (self._metas, self._digests, self._devices)
        for known in facts:
            for version in [version for version in known if version not in keep]:
                del known[version]
        self.doubtful &= keep

"""The versions that a member holds in slots, and the resources lent to user threads.

Several threads use the arena; the rest here belongs to the session thread, which
replaces (never changes in place) the values that others read. *Protected* versions are
never evicted: the newest committed version, the version assigned to this replica and
not yet loaded, versions being published, versions received and not yet committed or
discarded, and those that the coordinator asks to keep. Open updates and running
transfers pin their slots.

A version that is released while its slot is being read is freed with the last pin, and
counts as not held until then. Versions that are mapped from another member of this host
(*foreign* slots) cost no memory here, and are unmapped as soon as they are not needed:
their owner may want to reuse the slot.

**Doubt.** A slot that this member filled itself has no digest until the coordinator
names one in its commit. A new coordinator may not know our version, and give the same
number to another one. A version that was held without a digest when the coordinator was
replaced is therefore *doubtful*: its digest is computed before it counts as the
committed version.

**Loans** return resources lent to the user's threads, even after an interrupt. A
publish that reads the weights, or a slot of ``arena_like``, ends when the user's thread
says so. An interrupt may prevent that at any line, even at the first line of an
``__exit__`` or a ``finally`` (:mod:`replicas.common.waits`). Each loan therefore has a
:class:`Holder`, to which only frames and objects of the user's own thread refer. When
the last reference is gone, the session thread takes the resource back.

The callback of the weak reference is written in C: it only appends to a deque, so no
signal handler can run in it. The session thread checks the deque once a second, and
whenever it looks for a slot.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from replicas.messages import Described, HeldVersion, Meta
from replicas.weights.copies.digest import digest_of
from replicas.weights.memory.arena import Arena, Slot

LOOK_S = 1.0
"""Seconds between two checks for dead holders."""


class _Facts(msgspec.Struct):
    """Facts about a version: publisher's ``meta``, digest, and device type."""

    meta: Meta = {}
    digest: str = ""  # empty while unknown
    device: str = "cpu"


class ToldVersions:
    """The facts about versions that the coordinator has told this member.

    :ivar latest: the newest version that it knows committed; 0 if there is none.
    :ivar latest_digest: of ``latest``; empty while only its number is known.
    :ivar contents: by committed version, the older version whose bytes it has.
    :ivar labels: the version of each label.
    :ivar kept: contents that must not be evicted.
    :ivar assigned: the version that this replica was granted and this rank has yet to
        load, or 0.
    :ivar adopted: the newest version known here that all targets may load.
    :ivar unadopted: the newest version that was rejected, or refused here.
    """

    def __init__(self) -> None:
        """Start without any version."""
        self.latest = 0
        self.latest_digest = ""
        self.assigned = self.adopted = self.unadopted = 0
        self.contents: dict[int, int] = {}
        self.labels: dict[str, int] = {}
        self.kept: frozenset[int] = frozenset()

    def decisions(self) -> dict[str, Any]:
        """Return what the coordinator has decided, as far as known here, by name.

        The names are ``latest``, ``latest_digest``, ``assigned``, ``adopted``,
        ``unadopted`` and ``latest_content`` (the version whose bytes ``latest`` has; 0:
        its own): fields of a Hello, for a coordinator that has restarted.
        """
        names = ("latest", "latest_digest", "assigned", "adopted", "unadopted")
        decided = {name: getattr(self, name) for name in names}
        return decided | {"latest_content": self.contents.get(self.latest, 0)}

    def content(self, version: int) -> int:
        """Return the version whose bytes ``version`` has, and whose slot it uses.

        Mostly that is ``version``; after a rollback it is an older one.
        """
        return self.contents.get(version, version)

    def forget_contents(self) -> None:
        """Drop the entries of :attr:`contents` of old versions.

        Keeps those of versions newer than :attr:`latest`, and of the newest, the
        assigned and the labelled versions.
        """
        known = {self.latest, self.assigned, *self.labels.values()}
        self.contents = {one: content for one, content in self.contents.items() if one in known or one > self.latest}


class HeldVersions(ToldVersions):
    """The versions of one channel's weights that this process has in slots of memory.

    It also says which of them must not be evicted (are *protected*), and why.

    :param call: runs a function on the session thread.
    :param on_drop: called there with a version whose slot was reused for another.
    :ivar changed: set at the next change of a slot; get it before looking for a slot.
    :ivar publishing: versions that this rank is publishing.
    :ivar prepared: versions received that are neither committed nor discarded yet.
    :ivar doubtful: versions here whose bytes a new coordinator may not mean.
    """

    arena: Arena

    def __init__(self, name: str, call: Callable[..., None], on_drop: Callable[[int], None]) -> None:
        """Start without memory; :meth:`open` makes the slots.

        :param name: name of the channel.
        :param call: runs a function, with arguments, on the session thread; any thread
            may call it.
        :param on_drop: called on the session thread with the number of each version
            that has lost its slot to another.
        """
        super().__init__()
        self._name = name
        self._call = call
        self._on_drop = on_drop
        self.publishing: set[int] = set()
        self.prepared: set[int] = set()
        self.doubtful: set[int] = set()
        self._facts: dict[int, _Facts] = {}
        self.changed = asyncio.Event()
        self._device = ""

    def open(self, slots: int, device: str = "") -> None:
        """Make the arena: memory for ``slots`` versions, on a GPU or in host memory.

        The memory of a slot (one version) is allocated when the slot is first filled.

        :param device: UUID of the GPU; "" for host memory.
        """
        self._device = device
        self.arena = Arena(
            slots,
            name=f"replicas-{self._name}",
            device=device,
            on_change=partial(self._call, self._wake),
            on_drop=partial(self._call, self._dropped),
        )

    @property
    def opened(self) -> bool:
        """True once :meth:`open` has made the arena."""
        return hasattr(self, "arena")

    def close(self) -> None:
        """Free the memory of all slots; a slot in use is freed after its use.

        Then wake all waits for a slot. Does nothing before :meth:`open`.
        """
        if self.opened:
            self.arena.close()
            self._wake()

    def held(self) -> tuple[HeldVersion, ...]:
        """Return number, digest and location of each complete version in a slot here.

        Mapped memory of other members counts, too. () before :meth:`open`.
        """
        if not self.opened:
            return ()
        held: list[HeldVersion] = []
        for version in sorted(self.arena.images()):
            slot = self.arena.find_pinned(version)  # pinned: another thread may evict it
            if slot is not None:
                held.append(HeldVersion(version, self.digest(version), slot.place))
                self.arena.unpin(slot)
        return tuple(held)

    def lent(self) -> tuple[int, ...]:
        """Return versions released here that others may still map; () before open."""
        return tuple(sorted(self.arena.lent())) if self.opened else ()

    def find_pinned(self, version: int) -> Slot | None:
        """Return the slot with the bytes of ``version``, pinned; None if not held.

        The caller must unpin the slot.
        """
        return self.arena.find_pinned(self.content(version))

    def digest(self, version: int) -> str:
        """Return the digest of ``version``, or "" while it is unknown here."""
        return self._facts.get(self.content(version), _Facts()).digest

    def meta(self, version: int) -> Meta:
        """Return the publisher's ``meta`` of ``version``, or {} while unknown."""
        return self._facts.get(self.content(version), _Facts()).meta

    def describe(self, version: int) -> Described:
        """Return digest, manifest hash, meta and device type of ``version``, as an
        answer to send.

        If the version is not held here, the hashes are "", and the device is ``cpu``.
        """
        image = self.arena.images().get(version)
        if image is None:
            return Described(version, "", "", {}, "cpu")
        facts = self._facts.get(version, _Facts())
        return Described(version, facts.digest, image.hash, facts.meta, "cuda" if self._device else facts.device)

    def record_facts(self, version: int, **facts: Any) -> None:
        """Replace the given ``facts`` of a version: ``meta``, ``digest`` or ``device``.

        The other facts stay. A version with a digest is no longer doubtful. Wakes all
        waits for a change of a slot.
        """
        known = self._facts.get(version, _Facts())
        self._facts[version] = msgspec.structs.replace(known, **facts)
        if "digest" in facts:
            self.doubtful.discard(version)
        self._call(self._wake)  # the version may be complete now

    def received(self, slot: Slot, digest: str, meta: Meta, device: str) -> None:
        """Record a complete slot: received, or mapped from another member's memory.

        Its version is protected from eviction until its commit or discard.

        :param digest: of its bytes. ``meta``: the publisher's.
        :param device: type of the device through which it came, ``cpu`` or ``cuda``.
        """
        version = slot.version
        if not slot.foreign:  # memory of another member is not ours to hold
            self.arena.hold(slot, digest)
        self.record_facts(version, meta=meta, digest=digest, device=device)
        if version > self.latest:
            self.prepared.add(version)
        self.protect()

    def unprotect_up_to(self, version: int) -> None:
        """Allow eviction of received, uncommitted versions up to number ``version``."""
        self.prepared = {known for known in self.prepared if known > version}
        self.protect()

    def committed(self, version: int, digest: str, content: int = 0) -> bool:
        """Record a commit; return True if it is newer than all commits known so far.

        Then recompute which versions are protected from eviction.

        :param digest: digest of the version, or "" if unknown.
        :param content: the older version whose bytes it has; 0: it has its own.
        """
        if content:
            self.contents[version] = content
        self.prepared.discard(version)
        newest = version > self.latest
        if newest:
            self.latest, self.latest_digest = version, digest
        elif version == self.latest and digest:  # a Welcome named only its number
            self.latest_digest = digest
        self.protect()
        return newest

    def release(self, version: int) -> None:
        """Protect ``version`` no more; free its slot, now or with its last pin.

        Does nothing to a version that is not held.
        """
        self.prepared.discard(version)
        self.publishing.discard(version)
        self.arena.release(version)
        self.protect()

    def mark_doubtful(self) -> None:
        """Replace the set of doubtful versions by those here that have no digest.

        Called at a new coordinator, which may give such a number to other bytes. The
        version must pass :meth:`verify_doubtful` before it counts as committed.
        """
        self.doubtful = {held.version for held in self.held() if not held.digest}

    async def verify_doubtful(self, version: int, digest: str) -> bool:
        """Digest a version on another thread; return True if that gives ``digest``.

        Also returns True if the version is no longer held. Records a right digest; a
        version with a wrong one is left for the caller to drop.
        """
        slot = self.arena.find_pinned(version)
        if slot is None:
            return True
        try:
            found = await asyncio.to_thread(digest_of, slot.data, slot.digest_kind)
        finally:
            self.arena.unpin(slot)
        if found == digest:
            self.record_facts(version, digest=digest)
        return found == digest

    def protect(self) -> None:
        """Recompute which versions are not evicted; unmap unneeded memory; wake waits.

        Call it after each change of what must be kept. The waits are those for a free
        slot.
        """
        served = {self.content(self.latest), self.content(self.assigned)}
        self.arena.protected = {*served, *self.kept, *self.publishing, *self.prepared} - {0}
        self.arena.trim()
        self._drop_old_facts()
        self._wake()

    def set_labels(self, labels: dict[str, int], kept: tuple[int, ...]) -> None:
        """Replace the labels and the set of versions that must not be evicted.

        Then evict or unmap what is no longer needed, and wake waits for a free slot.

        :param labels: the version of each label.
        :param kept: versions to keep beside those that other rules keep.
        """
        self.labels, self.kept = labels, frozenset(kept)
        self.forget_contents()
        self.protect()

    def _wake(self) -> None:
        """Set the event :attr:`changed`, to wake all waits for a slot; renew it."""
        self.changed.set()
        self.changed = asyncio.Event()  # earlier waiters have the old event

    def _dropped(self, version: int) -> None:
        """Call ``on_drop`` for a version that lost its slot, unless held again by now.

        Forgets its facts, too.
        """
        if self.arena.find(version) is None:  # it may have been received again since
            self._drop_old_facts()
            self._on_drop(version)

    def _drop_old_facts(self) -> None:
        """Forget ``meta`` and digest of versions without a slot or a publish."""
        slots = (*self.arena.slots, *self.arena.foreign)
        keep = {slot.version for slot in slots if slot.state not in ("free", "closed")} | self.publishing
        self._facts = {version: facts for version, facts in self._facts.items() if version in keep}
        self.doubtful &= keep


class Holder:
    """Represents a lent resource, which returns when this is garbage-collected."""


class Loans:
    """The resources of a channel that are on loan to user threads.

    For the session thread only.

    :param after: calls a function after a number of seconds.
    """

    def __init__(self, after: Callable[[float, Callable[[], None]], asyncio.TimerHandle]) -> None:
        """Start without loans; a timer runs only while something is lent.

        :param after: called with seconds and a function; calls that on the session
            thread when they have passed.
        """
        self._after = after
        self._lent: dict[int, tuple[weakref.ref[Holder], Callable[[], object]]] = {}
        self._gone: deque[weakref.ref[Holder]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, holder: Holder, take_back: Callable[[], object]) -> weakref.ref[Holder]:
        """Record that ``holder`` has a loan; return a weak reference to it.

        A loan is a resource of the channel that a user's thread uses, such as a slot.

        :param holder: the user's thread keeps it; the loan ends when it is
            garbage-collected.
        :param take_back: called once, on the session thread: at :meth:`give_back`, or
            up to a second after ``holder`` was garbage-collected.
        """
        known = weakref.ref(holder, self._gone.append)  # C code: no signal handler runs in it
        self._lent[id(known)] = (known, take_back)  # by id: weak references compare as what they refer to
        self._look_again()
        return known

    def give_back(self, holder: Holder) -> None:
        """Call the ``take_back`` that :meth:`lend` got with ``holder``: its loan ends.

        Do nothing if the loan has ended already.
        """
        take_back = self._end(holder)
        if take_back is not None:
            take_back()

    def keep(self, holder: Holder) -> bool:
        """End a loan without its ``take_back``: the caller owns the resource now.

        Return False, and do nothing, if ``holder`` has no loan (any more).
        """
        return self._end(holder) is not None

    def sweep(self) -> None:
        """End loans whose holders were garbage-collected, by their ``take_back``."""
        while self._gone:
            loan = self._lent.pop(id(self._gone.popleft()), None)
            if loan is not None:
                loan[1]()

    def _end(self, holder: Holder) -> Callable[[], object] | None:
        """Remove the loan of ``holder``; return its ``take_back``, or None."""
        found = next((number for number, (known, _) in self._lent.items() if known() is holder), None)
        return None if found is None else self._lent.pop(found)[1]

    def _look_again(self) -> None:
        """Schedule a :meth:`sweep` in a second if anything is lent and none is due."""
        if self._timer is None and self._lent:  # no timer while nothing is lent
            self._timer = self._after(LOOK_S, self._sweep_and_schedule)

    def _sweep_and_schedule(self) -> None:
        """Sweep, and schedule the next sweep if anything is still lent."""
        self._timer = None
        self.sweep()
        self._look_again()

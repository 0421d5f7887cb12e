"""Read the versions of a channel from an archive, as the updates of a channel.

    for update in replicas.follow("s3://bucket/run", "policy", key="ed25519:..."):
        with update:
            update.load_into(model)

:mod:`replicas.archive.format` has the objects, :mod:`replicas.archive.plan` which of
them are read. Versions are in memory as on a channel, in two slots of an arena: the
version that was handed out last, from which the next one is made, and the next one,
which is shown only when all its blocks have the signed digests.

**What can go wrong.** Objects may appear late, be missing, short, old, swapped or
forged, and the storage may fail at any call. While the storage fails or lacks an
object, a reader begins again with ``latest``, after a growing pause, for as long as
:data:`PATIENCE_S`; then the error is raised. It is raised at once if the storage
denies, or an object has other bytes than were signed. A ``latest`` that is older than
what was handed out is one that the storage shows late; it is ignored. After an error
the next call begins anew, with the version that it has.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np

from replicas import errors
from replicas.archive.deltas import apply_delta
from replicas.archive.format import ENTRIES, LATEST, Entry, Latest, Link, Range, number_of, sha256_of, unseal
from replicas.archive.keys import verifier
from replicas.archive.plan import route_to
from replicas.archive.store import Archive, Denied, Missing, Store, Tag, Unchanged
from replicas.carry.delta import DeltaError
from replicas.channel.session.held_versions import Holder
from replicas.channel.session.pending import Pending
from replicas.channel.versions.owner import Owner
from replicas.channel.versions.update import Update
from replicas.common.logs import Log
from replicas.common.sizes import list_text
from replicas.core.versions.load_rounds import is_enough
from replicas.messages import arguments
from replicas.messages.version_orders import Steered
from replicas.weights.copies.copy_pool import helpers_for, run_all
from replicas.weights.copies.digest import digest_blocks
from replicas.weights.memory.arena import Arena, Slot

Bound: TypeAlias = int | tuple[str, float] | None
Which: TypeAlias = int | str | None
Limit: TypeAlias = float | None
logger = Log("replicas.archive")
PATIENCE_S = 60.0
"""How long faults of the storage are waited out."""
FIRST_S, LAST_S = 0.1, 2.0
"""Pauses between looks at the archive: each is twice as long as the one before."""


def follow(
    archive: Archive,
    channel: str | None = None,
    *,
    key: str | None,
    at_least: Bound = None,
    version: Which = None,
    timeout: Limit = None,
) -> Follower:
    """Follow the versions of a channel in an archive, without a coordinator.

    The iterator yields the newest version, and then each time the newest one again, as
    a :class:`replicas.Update`. Versions that were archived meanwhile are left out. The
    update before must have ended: leave its ``with`` block, or call its ``loaded()``.

    :param archive: a URL: ``s3://bucket/run``, ``gs://``, ``az://`` or
        ``file:///folder``, with credentials from the environment as obstore reads them;
        or a store of obstore.
    :param channel: default: the URL is that of the channel's folder in the archive.
    :param key: the public key of the archive's writer. It must be given: None trusts
        whoever can write to the storage, and only detects damage.
    :param at_least: a version number, or ``(key, number)`` of the publisher's ``meta``:
        older versions are waited out.
    :param version: a number: this version alone; or a label: each version that it is
        moved to, also an older one.
    :param timeout: seconds to wait for a version; default: no limit. A version that has
        begun to arrive is read to its end.
    :raises replicas.errors.UsageError: an argument is not valid, or obstore is missing.
        Steps of the iterator raise DeadlineExceeded, ArchiveError, ArchiveTampered,
        Gone (the archive has no such version), or NoCapacity; the next step goes on.
    """
    return Follower(archive, channel, key, at_least, version, timeout)


class Follower(Iterator[Update], AsyncIterator[Update]):
    """The iterator that :func:`follow` returns; for one thread or task at a time.

    A step of ``async for`` runs on a thread. :meth:`close` it to free its memory.

    :ivar version: the version that was handed out last; 0: none.
    :ivar entry: all that was signed about it.
    """

    def __init__(
        self, archive: Archive, channel: str | None, key: str | None, at_least: Bound, version: Which, timeout: Limit
    ) -> None:
        """Check the arguments; read nothing."""
        self._run, self._channel = "", channel if channel is None else arguments.name("follow: channel", channel)
        self._verify = None if key is None else verifier(arguments.text("follow: key", key))
        self._bound = arguments.bound("follow: at_least", at_least)
        self._timeout_s = arguments.patience("follow: timeout", timeout)
        is_label = isinstance(version, str)
        self._label = arguments.text("follow: version", version) if is_label else ""
        self._number = 0 if version is None or is_label else arguments.integer("follow: version", version, least=1)
        if version is not None and at_least is not None:
            raise errors.UsageError("follow: at_least and version exclude each other", hint="give one of them")
        self._seen, self._others = 0.0, ""
        self._store = Store(archive, channel or "")
        self._arena = Arena(2, name="replicas-archive")
        self._reports = _Reports(self._arena)
        self._held: Link | None = None
        self.version = 0
        self._tag: Tag | None = None
        self.entry: Entry | None = None

    def close(self) -> None:
        """Free the memory, but for tensors that are still in use."""
        self._arena.close()
        self._store.close()

    async def __anext__(self) -> Update:
        """Return the next version; see :func:`follow`."""
        return await asyncio.to_thread(self.__next__)

    def __next__(self) -> Update:
        """Return the next version; see :func:`follow`."""
        self._reports.end_last()
        if self._number and self.version:
            raise StopIteration
        until = time.monotonic() + (math.inf if self._timeout_s is None else self._timeout_s)
        pause_s, faulty_until, fault = FIRST_S, 0.0, ""
        while True:
            try:
                if (update := self._look()) is not None:
                    return update
                fault = ""
            except errors.ArchiveError as error:
                faulty_until = faulty_until if fault else time.monotonic() + PATIENCE_S
                is_late = time.monotonic() > faulty_until and not isinstance(error, _Empty)
                if isinstance(error, Denied) or is_late:
                    raise
                if not fault:
                    logger.warning("waiting for the storage: %s", error.message)
                fault = f": {error.message}"
            if (left_s := until - time.monotonic()) <= 0:
                bound = f" with at_least={self._bound[::-1]}" if any(self._bound) else ""
                wanted = f"a version after {self.version}{bound}"
                wanted = f'another version of label "{self._label}"' if self._label else wanted
                text = f"{self._store.text}: {wanted} did not come within {self._timeout_s:g} s{fault}{self._others}"
                raise errors.DeadlineExceeded(text, hint="check the URL, see that the writer runs, or wait longer")
            time.sleep(min(pause_s, left_s))
            pause_s = min(LAST_S, 2 * pause_s)

    def _look(self) -> Update | None:
        """Read the newest version if it is newer; return None if there is none (yet).

        :raises replicas.errors.ArchiveError, replicas.errors.ArchiveTampered: a fault.
        """
        try:
            data, tag = self._store.read(LATEST, unless=self._tag)
        except Unchanged:
            return None
        except Missing as error:
            raise error if self._tag is not None else _Empty(error.message, hint=error.hint) from None
        latest = unseal(data, Latest, self._verify, f"{self._store.text}/{LATEST}")
        self._run, self._channel = self._run or latest.run, self._channel or latest.channel
        link = self._choose(latest) if latest.at >= self._seen else None  # else the storage shows an old one
        newest = latest.newest
        another = newest.version == self.version and newest != self._held
        if another or (latest.run, latest.channel) != (self._run, self._channel):
            raise errors.ArchiveTampered(f"{self._store.text}/{LATEST}: another {newest.version} of {latest.channel}")
        entry = None if link is None or link.version == self.version else self._entry(link)
        self._seen = max(latest.at, self._seen)
        if link is None or entry is None or not is_enough(*self._bound, entry.version, entry.meta):
            self._tag = tag
            return None
        slot = self._fill(entry)
        self._arena.protected = {entry.version}
        self._tag, self._held, self.entry, self.version = tag, link, entry, link.version
        return self._reports.hand_out(slot, entry)

    def _choose(self, latest: Latest) -> Link | None:
        """Return the link of the version to read, or None if there is none yet.

        :raises replicas.errors.Gone: the archive does not have it.
        """
        newest, number = latest.newest, self._number or latest.labels.get(self._label, 0)
        if not self._label and not self._number:
            return newest if newest.version > self.version else None
        self._others = f"; it has the labels {list_text(sorted(latest.labels))}" if self._label else ""
        if number in (0, self.version) or (self._label and number > newest.version):
            return None
        if number == newest.version:
            return newest
        names = sorted(self._store.list_names(ENTRIES))
        mine = [name for name in names if number_of(name) == number]
        if not mine:
            have = list_text([str(one) for one in sorted({number_of(name) for name in names}, reverse=True)])
            raise errors.Gone(f"{self._store.text} has no version {number}; it has {have}", version=number, hint="")
        # Of several, all but one are of writers that were killed or fenced. Each entry
        # links to one that was the newest.
        later = (self._entry(self._link(name)).before for name in names if len(mine) > 1 and number_of(name) > number)
        return next((one for one in later if one is not None and one.version == number), self._link(mine[-1]))

    def _link(self, name: str) -> Link:
        """Return the link of an entry that was found by its name."""
        return Link(version=number_of(name), entry=name, sha256=sha256_of(self._store.read(name)[0]))

    def _entry(self, link: Link) -> Entry:
        """Read an entry, and check that it is the one that was linked."""
        data = self._read(link.entry, link.sha256)
        entry = unseal(data, Entry, self._verify, link.entry)
        if (entry.run, entry.channel, entry.version) != (self._run, self._channel, link.version):
            raise errors.ArchiveTampered(f"{link.entry} is {entry.version} of {entry.channel} of run {entry.run}")
        return entry

    def _read(self, name: str, sha256: str, start: int = 0, nbytes: int = 0) -> bytes:
        """Read bytes of an object, and check them."""
        data = self._store.read(name, start, nbytes)[0]
        if sha256_of(data) != sha256:
            raise errors.ArchiveTampered(f"{self._store.text}/{name} is not what was signed")
        return data

    def _fill(self, entry: Entry) -> Slot:
        """Return a slot with the version, all of which was checked."""
        manifest, (whole, deltas) = entry.manifest(), route_to(entry, self._held, self._entry)
        slot = self._arena.acquire(entry.version, manifest, alone=True)
        if slot is None:
            raise errors.Busy(f"version {entry.version}: {self._arena.in_use()}", version=entry.version)
        try:
            data = slot.buffer.tensor()[manifest.data_offset :].numpy()
            if whole is not None:
                self._read_whole(whole, data.data)
            elif (before := self._arena.find(self.version)) is not None:
                np.copyto(data, before.data.numpy())
            run = partial(run_all, helpers=helpers_for(data.nbytes))
            for one in deltas:
                apply_delta(self._read(one.object, one.sha256, one.start, one.nbytes), data.data, run)
            found = [one.hex() for one in digest_blocks(data.data)]
            if wrong := [number for number, digest in enumerate(entry.blocks) if found[number] != digest]:
                raise DeltaError(f"block {wrong[0]} has another digest")
            self._arena.hold(slot, entry.digest)
        except BaseException as error:
            self._arena.free(slot)
            if isinstance(error, DeltaError | ValueError):
                raise errors.ArchiveTampered(f"version {entry.version} is not what was signed: {error}") from error
            raise
        return slot

    def _read_whole(self, wanted: Range, data: memoryview) -> None:
        """Read an image into ``data``, without its header, and check all of it."""
        digest, at = hashlib.sha256(), data.nbytes - wanted.nbytes  # below 0 in the header

        def take(chunk: bytes | memoryview) -> None:
            """Copy a chunk to its place."""
            nonlocal at
            digest.update(chunk)
            at += len(chunk)
            if at > 0:
                part = np.frombuffer(chunk, np.uint8)[-at:]
                np.copyto(np.frombuffer(data, np.uint8)[at - len(part) : at], part)  # without the GIL

        self._store.read(wanted.object, 0, wanted.nbytes, take=take)
        if digest.hexdigest() != wanted.sha256:
            raise errors.ArchiveTampered(f"{self._store.text}/{wanted.object} is not what was signed")


class _Empty(Missing):
    """There is no version in the archive yet."""


class _Reports(Owner):
    """The owner of the updates of a follower."""

    def __init__(self, arena: Arena) -> None:
        """Begin without an update."""
        super().__init__(lambda: arena, _refuse_scores)
        self._update: weakref.ref[Update] | None = None
        self._lent: dict[int, Slot] = {}
        self._touched = False

    def hand_out(self, slot: Slot, entry: Entry) -> Update:
        """Return the update of a version, which pins its slot."""
        self.arena().pin(slot)
        update = Update(self, slot, entry.version, entry.meta, entry.digest)
        update.content_of, self._touched = entry.content_of, False
        self._update, self._lent = weakref.ref(update), {id(update.holder): slot}
        return update

    def end_last(self) -> None:
        """Take the last update back, if it was not used, or was dropped.

        :raises replicas.errors.UsageError: it is still open.
        """
        update = None if self._update is None else self._update()
        if update is not None and not update.ended and not update.withdraw():
            raise errors.UsageError(
                f"the update of version {update.version} is open", hint="leave its `with` block first"
            )
        while update is None and self._lent:  # it was dropped, perhaps in the middle of a load
            self.arena().unpin(self._lent.popitem()[1])
            self._base = None if self._touched else self._base

    def let_go(self, holder: Holder, slot: Slot) -> None:
        """Unpin the slot of an update that has ended, once; any thread may be first."""
        if self._lent.pop(id(holder), None) is not None:
            self.arena().unpin(slot)

    def touched(self, version: int) -> None:
        """Note that the update is used: if it is dropped now, it was half loaded."""
        self._touched = True


def _refuse_scores(version: int, scores: dict[str, float]) -> Pending[Steered]:
    """Refuse scores: nothing is written to an archive that is read."""
    raise errors.UsageError("an archive takes no scores", hint="report them to the run: replicas score")

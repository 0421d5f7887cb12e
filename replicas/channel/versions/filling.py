"""The caller's part of a publish: take a slot and copy the weights into it."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from replicas import errors
from replicas.channel.hub import Hub
from replicas.channel.pending import Pending
from replicas.channel.versions.free_slot import free_slot
from replicas.channel.versions.leases import Holder
from replicas.channel.versions.publish_job import PublishJob
from replicas.channel.versions.under_way import CopiesUnderWay
from replicas.core.versions.manifest import PartManifest, check_size
from replicas.weights.copying import Copier
from replicas.weights.devices.accelerator import device_of
from replicas.weights.devices.device_copies import CopyOptions, DeviceCopies
from replicas.weights.feed import Feed
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.writable import WritableSlot
from replicas.weights.packing import Packer, Packing, stage

__all__ = ["Filling"]


class Filling:
    """Fills slots, on the publishing thread, one at a time.

    :param streaming: called on the session thread with a job, its manifest and its
        device type, before a slot is filled that may be sent meanwhile.
    :param grown: called there, after ``streaming``, with the number of bytes filled so
        far.
    :ivar last: the manifest of the last committed version.
    :ivar copies: copies that devices have under way.
    """

    def __init__(
        self,
        hub: Hub,
        streaming: Callable[[PublishJob, PartManifest, str], None],
        grown: Callable[[PublishJob, int], None],
    ) -> None:
        self.last: PartManifest | None = None
        self.copies = CopiesUnderWay()
        self._hub = hub
        self._streaming = streaming
        self._grown = grown
        self._packer = Packer()

    def fill(self, job: PublishJob, feed: Feed) -> tuple[PartManifest, Packing]:
        """Copy the weights into a slot, or take the slot that the trainer has written.

        :raises replicas.errors.ReplicasError: it failed; the slot still belongs to the
            job.
        """
        if isinstance(feed.weights, WritableSlot):
            return self._take_written(job, feed, feed.weights)
        return self._pack(job, feed)

    def device(self, feed: Feed) -> str:
        """Device type of the slots if they are on a GPU, else of the weights."""
        return device_of(self._hub.device).kind if self._hub.device else feed.device

    def _begun(self, job: PublishJob, copies: DeviceCopies | Copier) -> None:
        if isinstance(copies, Copier):
            job.copier = copies
        else:
            job.copies = copies
            self.copies.add(copies)
            self._hub.call(self.copies.watch, copies)

    def _take_written(self, job: PublishJob, feed: Feed, written: WritableSlot) -> tuple[PartManifest, Packing]:
        """Take a slot that the trainer has filled in place, without a copy."""
        if feed.dtype is not None:
            raise self._hub.error(
                errors.UsageError, "publish: this slot has its dtypes already", hint="pass dtype to arena_like"
            )
        check_size(written.manifest)
        written.check_open()
        feed.take_known()
        room: Pending[Slot] = Pending(f"the slot that was written on {self._hub.name}")
        self._hub.call(self._look_for, job, room, partial(self._take, job, written))
        room._wait_for_session()
        written.taken()
        return written.manifest, written.digest(partial(self._begun, job))

    def _pack(self, job: PublishJob, feed: Feed) -> tuple[PartManifest, Packing]:
        """Copy the weights into a free slot."""
        manifest = self._packer.plan(feed)
        if manifest is None and not job.new_manifest:
            manifest = self.last
        staged = stage(feed) if manifest is None else None
        if staged is not None:
            manifest = staged.manifest
        assert manifest is not None
        check_size(manifest)
        self._expect(feed)
        slot = self._take_slot(job, manifest)
        begun = partial(self._begun, job)
        if staged is not None:
            return manifest, staged.write(slot.data, CopyOptions(slot.buffer, begun=begun))
        progress = None
        at_once = feed.mode == "image" and job.late_meta is None  # receivers are told the meta first
        if self._hub.several_hosts and at_once and self._packer.knows(feed, manifest):
            self._hub.call(self._streaming, job, manifest, self.device(feed))
            progress = partial(self._hub.call, self._grown, job)
        return manifest, self._packer.pack(feed, manifest, slot, progress, hold=job.hold, begun=begun)

    def _expect(self, feed: Feed) -> None:
        if feed.device != "cpu" and not self._hub.device:
            self._hub.arena.pinning = True  # preallocated memory is then for copies from a GPU

    def _take_slot(self, job: PublishJob, manifest: PartManifest) -> Slot:
        room: Pending[Slot] = Pending(f"a slot of {self._hub.name}")
        self._hub.call(self._look_for, job, room, partial(self._free_slot, job, manifest))
        return room._wait_for_session()

    # ------------------------------------------------------------ session thread

    def _look_for(self, job: PublishJob, room: Pending[Slot], find: Callable[[], Coroutine[Any, Any, Slot]]) -> None:
        self._hub.spawn(self._find(job, room, find), "slot of a publish")

    async def _find(self, job: PublishJob, room: Pending[Slot], find: Callable[[], Coroutine[Any, Any, Slot]]) -> None:
        """The job owns the slot at once: whatever the caller does, it comes back."""
        try:
            await job.admitted
            started = time.monotonic()
            job.slot = await find()
            job.wait_s = time.monotonic() - started
        except (OSError, RuntimeError, MemoryError, errors.ReplicasError) as error:
            room._fail(error)
        else:
            room._resolve(job.slot)

    async def _free_slot(self, job: PublishJob, manifest: PartManifest) -> Slot:
        what = f"version {job.version}"
        return await free_slot(
            self._hub, job.version, manifest, what=what, until=job.deadline, check=partial(self._check, job)
        )

    async def _take(self, job: PublishJob, written: WritableSlot) -> Slot:
        self._check(job)
        if not (isinstance(written.holder, Holder) and self._hub.leases.keep(written.holder)):
            raise self._hub.error(
                errors.UsageError,
                "publish: this slot is one of another channel, or of an earlier session of this one",
                hint="publish it on the channel whose arena_like made it",
            )
        self._hub.arena.assign(written.slot, job.version)
        return written.slot

    def _check(self, job: PublishJob) -> None:
        """Raise unless the publish still needs a slot."""
        if job.pending.done():
            job.pending.wait()
        if job.walk_over or job.failed is not None:
            raise self._hub.error(errors.Gone, "the publish was interrupted", hint="")

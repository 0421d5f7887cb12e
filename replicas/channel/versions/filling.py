"""The caller's part of a publish: its job, a free slot, and the copy of the weights.

A free slot is filled here, or lent to the trainer (`arena_like`).
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, Literal

import torch

from replicas import errors
from replicas.channel.session.held_versions import Holder
from replicas.channel.session.hub import Hub, Part, as_wire_error
from replicas.channel.session.pending import Promise, Receipt, SessionEnd, copy_error
from replicas.common import own_loop
from replicas.common.tasks import is_set_within
from replicas.core.base.manifest import Manifest, PartManifest, check_size
from replicas.core.base.membership import PUBLISH_JOB, PublishJobEvent, PublishJobState
from replicas.messages import Meta, Packed, PackFailed, PublishBegin, arguments
from replicas.weights.copies.accelerator import accelerator, device_of
from replicas.weights.copies.copying import Copier
from replicas.weights.copies.tensors import check_modes
from replicas.weights.devices.device_copies import CopyOptions, DeviceCopies
from replicas.weights.feed import Feed, Mode
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.pool import PREPARED_NBYTES
from replicas.weights.packing import Packer, Packing, stage
from replicas.weights.writable import WritableSlot

BEAT_S = 0.03
"""Seconds between two checks: readers in other processes do not report their end."""


@dataclass(eq=False, repr=False)
class PublishJob:
    """One publish of this rank; fields change on the session thread.

    :ivar asked_meta: as the caller gave it: ``meta``, or a function that makes it.
    :ivar number: among the replica's publishes; 0 until it has begun.
    :ivar version: number given by the coordinator; 0 until then.
    :ivar state: in :data:`~replicas.core.base.membership.PUBLISH_JOB`.
    :ivar streaming: the version is sent while it is being filled.
    :ivar unsettled: the caller has OutcomeUnknown, and the verdict may still come.
    :ivar failed: the failure that this rank has reported.
    :ivar timer: ends the publish at its deadline, or an unsettled one without verdict.
    """

    asked_version: int | None
    deadline_s: float
    asked_meta: Meta | Callable[[], Mapping[str, Any]]
    new_manifest: bool
    channel: InitVar[str]
    session_end: InitVar[SessionEnd | None] = None
    hold: bool = True  # GPU tensors are copied on the caller's stream
    check_finite: bool = False  # check the values before Packed
    number: int = 0
    version: int = 0
    state: PublishJobState = "walking"
    streaming: bool = False
    unsettled: bool = False
    copies: DeviceCopies | None = None  # on a device, under way or ended
    copier: Copier | None = None  # on the CPU
    slot: Slot | None = None
    manifest: PartManifest | None = None
    device: str = "cpu"
    failed: PackFailed | None = None
    digest: str = ""
    digest_s: float = 0.0
    wait_s: float = 0.0
    pack_s: float = 0.0
    hold_s: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self, channel: str, session_end: SessionEnd | None) -> None:
        """Start the deadline's clock; make the open Promises ``pending`` (outcome) and
        ``admitted`` (the version's number, from the coordinator)."""
        self.began = time.monotonic()
        self.deadline = self.began + self.deadline_s
        self.meta: Meta = {} if callable(self.asked_meta) else self.asked_meta
        self.pending: Promise[Receipt] = Promise(f"publish on {channel}", session_end)
        self.admitted: Promise[int] = Promise(f"admission of a publish on {channel}", session_end)

    def step(self, event: PublishJobEvent) -> None:
        """Change :attr:`state` by ``event``; raise InvalidStep if not allowed."""
        self.state = PUBLISH_JOB.next(self.state, event)

    def ask_meta(self, feed: Feed) -> None:
        """Call the user's ``meta`` function, if there is one, and store the result.

        Its exception passes; ``feed`` is then marked as failed by the user's code.
        """
        if not callable(self.asked_meta):
            return
        try:
            found = self.asked_meta()
        except BaseException:
            feed.user_failed = True
            raise
        self.meta = arguments.meta("publish: the result of meta()", found)

    @property
    def announced(self) -> bool:
        """True if the coordinator was told of the packed version, or of the failure."""
        return self.streaming or self.unsettled or self.state in ("told", "failed")

    @property
    def filled(self) -> bool:
        """True if this rank's slot is complete, so that a commit is possible."""
        return self.state in ("filled", "ready", "told")

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def begin_message(self, deadline_s: float) -> PublishBegin:
        """Return the message that announces this publish to the coordinator, also to a
        restarted one. ``deadline_s``: seconds that the coordinator has for a
        verdict."""
        version = self.version or self.asked_version
        return PublishBegin(self.number, version, deadline_s, self.meta, self.new_manifest, self.version != 0)

    def packed_message(self) -> Packed:
        """Return the Packed message with digest, place and times of the slot."""
        return Packed(
            publish=self.number,
            manifest_hash=self.manifest.hash if self.manifest is not None else "",
            device=self.device,
            wait_s=self.wait_s,
            pack_s=self.pack_s,
            digest=self.digest,
            place=self.slot.place if self.slot is not None else None,
            digest_s=self.digest_s,
            hold_s=self.hold_s,
            meta=self.meta if callable(self.asked_meta) else None,
        )

    def receipt(self, epoch: int, staging: Literal["host", "device"]) -> Receipt:
        """Return the receipt for a version that was committed, but whose verdict (with
        the coordinator's data) did not arrive: it has no members and fewer phases.

        :param epoch: number of the newest membership known here.
        :param staging: where the channel's slots are.
        """
        return Receipt(
            version=self.version,
            epoch=epoch,
            members=(),
            lost=(),
            nbytes=self.manifest.nbytes if self.manifest is not None else 0,
            seconds=time.monotonic() - self.began,
            phases={"wait": self.wait_s, "pack": self.pack_s, "hold": self.hold_s},
            staging=staging,
            digest=self.digest if self.slot is not None and self.slot.image is not None else "",
        )

    def stop_timer(self) -> None:
        """Cancel the timer, if there is one."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class CopiesUnderWay:
    """GPU copies that have not ended. Without a lock: interrupts could keep it."""

    def __init__(self) -> None:
        """Start without copies."""
        self._copies: dict[int, DeviceCopies] = {}

    def add(self, copies: DeviceCopies) -> None:
        """Publishing thread: remember these copies until they have ended."""
        self._copies[id(copies)] = copies
        copies.ended.add(lambda: self._copies.pop(id(copies), None))

    def fence(self, stream: object = None) -> None:
        """Make ``stream`` (None: this thread's current one) wait for all copies."""
        copies = list(self._copies.values())
        gpu = accelerator() if copies else None
        if gpu is not None:
            with gpu.on_stream(stream):
                for one in copies:
                    one.fence()

    def wait(self, timeout_s: float) -> bool:
        """Block until all copies have ended or failed; False after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        return all(one.ended.wait(until - time.monotonic()) for one in list(self._copies.values()))


class Filling:
    """Fills slots (memory for versions) with published weights, one publish at a time.

    :param streaming: called on the session thread before a slot is filled that may be
        sent meanwhile; ``grown`` then gets the number of bytes filled so far.
    """

    def __init__(
        self,
        hub: Hub,
        streaming: Callable[[PublishJob, PartManifest, str], None],
        grown: Callable[[PublishJob, int], None],
    ) -> None:
        """``streaming(job, manifest, device type)``: called on the session thread
        before a slot is filled that may be sent meanwhile; ``grown(job, nbytes)``: as
        it is filled."""
        self.last: PartManifest | None = None
        self.copies = CopiesUnderWay()
        self._hub = hub
        self._streaming = streaming
        self._grown = grown
        self._packer = Packer()

    def fill(self, job: PublishJob, feed: Feed) -> tuple[PartManifest, Packing]:
        """Wait for a free slot and copy the weights; or take a slot written already.

        Has the publish announced first if it may be sent while it is filled.

        :returns: the manifest, and the copy, which may still run on a GPU. After an
            exception the slot still belongs to the job.
        """
        begun = partial(self._begun, job)
        if isinstance(feed.weights, WritableSlot):
            return self._take_written(job, feed, feed.weights, begun)
        check_modes("publish")
        manifest = self._packer.plan(feed)
        if manifest is None and not job.new_manifest:
            manifest = self.last
        staged = stage(feed) if manifest is None else None
        if staged is not None:
            manifest = staged.manifest
        assert manifest is not None
        check_size(manifest)
        if feed.device != "cpu" and not self._hub.device:
            self._hub.arena.pool.pinning = True  # preallocated memory is then for copies from a GPU
        slot = self._hub.loop.run(partial(self._find_slot, job, manifest), None)
        if staged is not None:
            return manifest, staged.write(slot.data, CopyOptions(slot.buffer, begun=begun))
        progress = None
        at_once = feed.mode == "image" and not callable(job.asked_meta)  # receivers get the meta first
        if self._hub.several_hosts and at_once and self._packer.copies_at_once(feed, manifest):
            self._hub.call(self._streaming, job, manifest, self.device(feed))
            progress = partial(self._hub.call, self._grown, job)
        return manifest, self._packer.pack(feed, manifest, slot, progress, hold=job.hold, begun=begun)

    def device(self, feed: Feed) -> str:
        """Return the device type of the slots if on a GPU, else that of the weights."""
        return device_of(self._hub.device).kind if self._hub.device else feed.device

    def _begun(self, job: PublishJob, copies: DeviceCopies | Copier) -> None:
        """Record an object that makes the copies, in the job.

        A GPU's is also recorded for :meth:`CopiesUnderWay.fence`.
        """
        if isinstance(copies, Copier):
            job.copier = copies
        else:
            job.copies = copies
            self.copies.add(copies)

    def _take_written(
        self, job: PublishJob, feed: Feed, written: WritableSlot, begun: Callable[[DeviceCopies | Copier], None]
    ) -> tuple[PartManifest, Packing]:
        """Take a slot of ``arena_like`` without a copy; return it with its digest.

        Waits for the admission by the coordinator.

        :param begun: called with each object that reads the slot, to find the digest.
        :raises replicas.errors.UsageError: the block of the slot was left, or a dtype
            given.
        """
        if feed.dtype is not None:
            text = "publish: dtype cannot be given with memory of arena_like, which has its dtypes already"
            raise self._hub.error(errors.UsageError, text, hint="pass dtype to arena_like")
        check_size(written.manifest)
        written.check_open()
        feed.take_known()
        self._hub.loop.run(partial(self._find_slot, job, written.manifest, written), None)
        written.mark_taken()
        return written.manifest, written.digest(begun)

    # ------------------------------------------------------------ session thread

    async def _find_slot(self, job: PublishJob, manifest: PartManifest, written: WritableSlot | None = None) -> Slot:
        """Wait for the admission and, until the job's deadline, for a slot; return it.

        Admitted means that the coordinator has given the version its number.

        :param manifest: of the version, for the size.
        :param written: take its slot.
        """
        await job.admitted
        started = time.monotonic()
        if written is not None:
            slot = self._adopt_written_slot(job, written)
        else:
            text = f"no free slot (memory) for version {job.version} within {job.deadline - started:.3g} s"
            check = partial(self._check, job)
            slot = await free_slot(self._hub, job.version, manifest, until=job.deadline, check=check, text=text)
        job.slot = slot
        job.wait_s = time.monotonic() - started
        return slot

    def _adopt_written_slot(self, job: PublishJob, written: WritableSlot) -> Slot:
        """End the loan of a written slot, and give the slot the job's version.

        :raises replicas.errors.UsageError: another channel, or session, lent the slot.
        """
        self._check(job)
        if not (isinstance(written.holder, Holder) and self._hub.loans.keep(written.holder)):
            text = "publish: this memory of arena_like is of another channel, or of an earlier join"
            raise self._hub.error(errors.UsageError, text, hint="publish it on the channel whose arena_like made it")
        self._hub.arena.assign(written.slot, job.version)
        return written.slot

    def _check(self, job: PublishJob) -> None:
        """Raise an error if the publish has ended, so that it needs no slot."""
        if job.pending.done():
            job.pending.wait()
        if job.state != "walking":
            raise self._hub.error(errors.Gone, "an exception in the calling thread ended the publish", hint="")


async def free_slot(
    hub: Hub, version: int, manifest: Manifest | PartManifest, *, until: float, check: Callable[[], object], text: str
) -> Slot:
    """Session thread (no interrupts): wait for a slot to fill with ``version``.

    Has other parts release optional slots.

    :param manifest: of a publish, whose rank alone fills the slot, or of a version to
        receive.
    :param check: called before and after each try; raises if no slot is wanted.
    :raises replicas.errors.Busy: none became free ``until`` (monotonic clock); the
        message is ``text`` and the users of the slots.
    """
    alone = isinstance(manifest, PartManifest)
    nbytes = manifest.nbytes if isinstance(manifest, PartManifest) else manifest.image_nbytes
    while True:
        changed = hub.held_versions.changed
        check()
        hub.loans.sweep()
        hub.arena.release(version)
        if nbytes < PREPARED_NBYTES:  # allocated fast enough for this thread
            slot = hub.arena.acquire(version, manifest, alone=alone)
        else:
            slot = await asyncio.to_thread(hub.arena.acquire, version, manifest, alone=alone)
        try:
            check()
        except BaseException:
            if slot is not None:
                hub.arena.free(slot)
            raise
        if slot is not None:
            return slot
        hub.tell(Part.slot_wanted)
        left = until - time.monotonic()
        if left <= 0:
            raise hub.error(
                errors.Busy,
                f"{text}: {hub.arena.in_use()}",
                version=version or None,
                phase="wait" if alone else "",
                members=[hub.member.name],
            )
        await is_set_within(changed, min(left, BEAT_S))


def arena_like(hub: Hub, weights: object, dtype: torch.dtype | None, mode: Mode, deadline_s: float) -> WritableSlot:
    """Caller's thread: wait for a slot, and lend it as writable tensors by name.

    :param weights: only names, shapes and dtypes are read. :param dtype: of plain
        floating tensors; None: their own.
    :param mode: ``image``: the leader sends all weights; ``parts``: each rank its own.
    :param deadline_s: seconds to wait; not at all on a coordinator's event loop.
    :raises replicas.errors.Busy: no slot became free in time.
    """
    if mode == "image" and not hub.leader:
        text = "arena_like: only the leader of this source sends weights"
        raise hub.error(errors.UsageError, text, hint='call it on rank 0 alone, or set ranks = "all" for the source')
    manifest = _planned(hub, "arena_like", weights, dtype, mode)
    holder = Holder()
    until = time.monotonic() + (0.0 if own_loop.has_coordinator() else deadline_s)
    try:
        slot = hub.loop.run(partial(_lend_slot, hub, weakref.ref(holder), manifest, until), None)
    except errors.Busy:
        own_loop.must_not_block("waiting for a free slot")  # the reason why it has not waited
        raise
    return WritableSlot(slot, manifest, partial(hub.call, hub.loans.give_back, holder), holder)


def reserve(hub: Hub, weights: object, dtype: torch.dtype | None, mode: Mode, slots: int) -> None:
    """Caller's thread: start to allocate the memory of ``slots`` slots; do not wait.

    :param weights: names, shapes and dtypes, for the size.
    :param mode: ``image``: the leader sends all weights; ``parts``: each rank its own.
    """
    manifest = _planned(hub, "reserve", weights, dtype, mode)
    if mode == "parts" or hub.leader:
        hub.arena.prepare(manifest.nbytes, slots)


def _planned(hub: Hub, what: str, weights: object, dtype: torch.dtype | None, mode: Mode) -> PartManifest:
    """Return the manifest of ``weights``, without reading their values.

    :param what: name of the method, for errors.
    :param mode: ``image``: all of the weights; ``parts``: those that this rank sends.
    :raises replicas.errors.UsageError: the weights do not list their tensors.
    """
    check_modes(what)
    manifest = Feed(weights, dtype=dtype, mode=mode).plan()
    if manifest is None:
        text = f"{what}: a {type(weights).__name__} does not list its tensors beforehand"
        raise hub.error(errors.UsageError, text, hint="give a module, a mapping, or an object with metadata()")
    return manifest


async def _lend_slot(hub: Hub, wanted: weakref.ref[Holder], manifest: PartManifest, until: float) -> Slot:
    """Session thread: wait for a free slot, and lend it to the holder ``wanted``.

    :param wanted: dies if the caller is interrupted.
    :param until: deadline by ``time.monotonic()``.
    :raises Gone: the holder is dead. :raises Busy: no slot became free in time.
    """

    def check() -> None:
        """Raise if the channel has ended, or the caller has died or was interrupted."""
        if hub.over is not None:
            raise copy_error(hub.over)
        if wanted() is None:
            raise hub.error(errors.Gone, "the caller no longer waits for the slot", hint="")

    text = f"arena_like: no free slot (memory for a version) within {until - time.monotonic():.3g} s"
    try:
        slot = await free_slot(hub, 0, manifest, until=until, check=check, text=text)
    except (OSError, RuntimeError, MemoryError, errors.ReplicasError) as error:
        raise as_wire_error(error, channel=hub.name, phase="wait").exception() from None
    holder = wanted()
    if holder is None:
        hub.arena.free(slot)
        raise hub.error(errors.Gone, "the caller no longer waits for the slot", hint="")
    hub.loans.lend(holder, partial(hub.arena.free, slot))
    return slot

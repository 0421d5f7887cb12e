"""Publish: the caller's thread fills a slot, the session thread does the rest.

A publish is numbered and announced (PublishBegin) on the session thread. The rest, up
to the packed slot, runs on the calling thread, because iterating over the weights may
run collectives of the user's own group, on the user's own stream. ::

    caller                                   session thread
    ------                                   --------------
    publish() ────────────────────────────▶  PublishBegin ──▶
    wait until admitted                  ◀── PublishAdmitted (the version's number)
    wait for a slot, walk the
    weights into it (or only walk) ───────▶  pin; when the digest, made behind
    return the Pending                       the copy, is known: Packed ──▶
                                         ◀── PublishEnd: unpin, resolve

**Tensors on a GPU** are only queued by the caller, on its current stream. The slot
counts as filled when the copies have arrived. Until then it belongs to them, even if
the publish has ended. :mod:`replicas.channel.versions` describes failures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from replicas import errors
from replicas.channel.session.held_versions import Holder
from replicas.channel.session.hub import GRACE_S, Hub, Part, as_wire_error
from replicas.channel.session.pending import Promise, Receipt
from replicas.channel.versions.filling import Filling, PublishJob
from replicas.core.base.manifest import PartManifest
from replicas.messages import Filled, Packed, PackFailed, PublishAdmitted, PublishEnd
from replicas.messages.bounds import SECONDS_MAX, text_of
from replicas.weights.feed import Feed, Mode
from replicas.weights.finite import counts_text, not_finite
from replicas.weights.memory.arena import Slot
from replicas.weights.packing import Packing

_T = TypeVar("_T")
LATE_S = 15.0
"""Extra time of a publish past its deadline, once a new coordinator knows of it."""


class Publisher(Part):
    """Publishes this rank's weights. A *walk* is one iteration over given weights."""

    def __init__(self, hub: Hub) -> None:
        """Start without publishes; allocate nothing."""
        self._hub = hub
        self._jobs: dict[int, PublishJob] = {}
        self._walking: PublishJob | None = None
        self._filling = Filling(hub, self._begun_to_fill, self._grown)
        self.copies = self._filling.copies

    @property
    def mode(self) -> Mode:
        """``"image"`` if the leader sends all weights; ``"parts"``: each its own."""
        return "parts" if self._hub.settings.source_ranks == "all" else "image"

    def publish(self, feed: Feed, job: PublishJob) -> Promise[Receipt]:
        """Caller's thread: announce ``job``, wait for a slot, copy the weights of
        ``feed`` into it, and return the job's Promise, which ends with the verdict."""
        walk = Holder()
        try:
            self._hub.call(self._begin_publish, job, walk)
            self._walk(job, feed)
        finally:
            self._hub.call(self._hub.loans.give_back, walk)
        return job.pending

    def _walk(self, job: PublishJob, feed: Feed) -> None:
        """Copy the weights. After our own error iterate to the end (other ranks gather)
        and raise the replica's common verdict; a user's exception passes unchanged."""
        try:
            self.copies.fence()
            self._fill(job, feed)
        except BaseException as error:
            users = feed.user_failed or not isinstance(error, Exception)
            self._hub.call(self._fill_failed, job, self._as_error(job, error, users=users))
            if users or not isinstance(error, Exception):
                job.pending.mark_reported()
                raise
            try:
                feed.drain()
            except BaseException:
                job.pending.mark_reported()
                raise
            verdict = self._verdict(job, error)
            if verdict is error:
                raise
            try:
                raise verdict from error
            finally:  # the error and this frame must not refer to each other
                del verdict

    def _fill(self, job: PublishJob, feed: Feed) -> None:
        """Copy the weights into a slot, or only iterate if this rank sends none. On the
        leader first raise an earlier failure that no caller was told."""
        hub = self._hub
        if hub.leader and (earlier := hub.failures.take_unreported()) is not None:
            raise earlier
        manifest: PartManifest | None = None
        packing: Packing | None = None
        device = feed.device
        if hub.leader or feed.mode == "parts":
            manifest, packing = self._filling.fill(job, feed)
            device = self._filling.device(feed)
        else:
            job.admitted.wait()
            feed.drain()
        walked = time.monotonic()
        job.ask_meta(feed)
        hub.call(self._handle_walk_end, job, manifest, device, packing, walked)

    def _as_error(self, job: PublishJob, error: BaseException, *, users: bool) -> errors.ReplicasError:
        """Return the failure as our error; ``users``: the user's own code raised it."""
        if users:
            text = f"the publishing code of {self._hub.member} raised {type(error).__name__}: {text_of(error)}"
            return self._hub.error(errors.SyncError, text, phase="pack", members=[self._hub.member.name])
        return as_wire_error(error, channel=self._hub.name, phase="pack", version=job.version or None).exception()

    def _verdict(self, job: PublishJob, error: Exception) -> Exception:
        """Block for the replica's outcome; return its error, or else our ``error``."""
        try:
            job.pending.wait(min(job.left_s + 2 * GRACE_S, SECONDS_MAX))
        except errors.ReplicasError as verdict:
            local = isinstance(verdict, (errors.DeadlineExceeded, errors.Disconnected)) and not verdict.unanimous
            return error if local and isinstance(error, errors.ReplicasError) else verdict
        except TimeoutError:
            return error
        return error

    # ------------------------------------------------------------ session thread

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {PublishAdmitted: self._admitted, PublishEnd: self._ended}

    def open_jobs(self) -> list[Promise[Receipt]]:
        """Any thread: return the publishes that have not ended, for close()."""
        return [job.pending for job in list(self._jobs.values()) if not job.pending.done()]

    def new_term(self) -> None:
        """Announce all publishes without a verdict to the restarted coordinator."""
        for job in list(self._jobs.values()):
            job.streaming = False
            if job.state == "told":
                job.step("forgotten")
            self._hub.send(job.begin_message(LATE_S if job.unsettled else job.left_s))
            if job.failed is not None:
                self._hub.send(job.failed)
        self._announce()

    def fail_all(self, error: errors.ReplicasError) -> None:
        """Fail open publishes with ``error``, except those ended as OutcomeUnknown."""
        for job in list(self._jobs.values()):
            if job.unsettled:
                self._end_decided(job, None)
            else:
                self._fail(job, error)

    def _begin_publish(self, job: PublishJob, walk: Holder) -> None:
        """Number the publish; send PublishBegin, or fail. Lend the right to publish to
        ``walk``: when that is given back or lost, :meth:`_end_walk` is called."""
        hub = self._hub
        if hub.over is not None:
            self._fail(job, hub.over)
            return
        hub.loans.sweep()
        if self._walking is not None:
            text = "publish was called while another thread publishes on this channel"
            error = hub.error(errors.UsageError, text, hint="publish from one thread")
            job.step("end")
            job.admitted.fail(error)
            job.pending.fail(error)
            return
        self._walking = job
        hub.loans.lend(walk, partial(self._end_walk, job))
        job.number = hub.publishes_made + 1
        try:
            hub.send(job.begin_message(job.left_s))
        except errors.UsageError as refused:
            self._fail(job, refused)
            return
        hub.publishes_made = job.number
        self._jobs[job.number] = job
        job.timer = hub.after(job.deadline + GRACE_S - time.monotonic(), self._overdue, job)

    def _end_walk(self, job: PublishJob) -> None:
        """Allow the next publish; fail ``job`` if an interrupt has ended its walk."""
        self._walking = None
        if job.state == "walking":
            job.pending.mark_reported()  # the interrupt tells the caller
        text = f"the publish on {self._hub.member} was interrupted by an exception in the calling thread"
        self._fill_failed(job, self._hub.error(errors.SyncError, text, phase="pack"))

    def _handle_walk_end(
        self, job: PublishJob, manifest: PartManifest | None, device: str, packing: Packing | None, walked: float
    ) -> None:
        """Store what the walk over the weights, which ended at time ``walked``, has
        made; start the task that follows the copies. ``packing``: or None (no slot)."""
        job.manifest, job.device = manifest, device
        if job.state == "walking":  # else the publish has ended; its slot is freed after the last write
            job.step("walked")
        self._hub.spawn(self._follow(job, packing, walked), f"the copy of version {job.version}")

    async def _follow(self, job: PublishJob, packing: Packing | None, copied: float) -> None:
        """Announce the version when it is copied, digested and, if wanted, checked.
        ``copied``: time of the end of the walk, and of all copies on the CPU."""
        try:
            if packing is not None and packing.copies is not None:
                job.hold_s = await self._result_of(packing.copies.copied)
                copied = time.monotonic()
            job.pack_s = copied - job.began - job.wait_s
            slot = self._pin_filled(job)
            if packing is not None:
                job.digest = await self._result_of(packing.digest)
                job.digest_s = time.monotonic() - copied
            if slot is not None and job.check_finite:
                await self._check_finite(job, slot)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001  # also one of the user's thread; the other ranks must not wait
            is_open = job.state in ("copying", "filled")
            if job.state == "filled":
                self._release_slot(job, keep=False)
            else:
                self._free(job)
            if is_open:
                self._report_failed(job, error)
            return
        if job.state == "filled" and job.slot is slot:
            self._ready(job)

    async def _result_of(self, future: Future[_T]) -> _T:
        """Await the result of work on other threads, which a cancel does not stop."""
        ended: Promise[Future[_T]] = self._hub.pending("a copy")
        future.add_done_callback(ended.resolve)
        return (await ended).result()

    def _admitted(self, message: PublishAdmitted) -> None:
        """Record the version that a publish got from the coordinator; end its wait."""
        job = self._jobs.get(message.publish)
        if job is None or job.unsettled:
            return
        known = self._hub.held_versions
        if job.version not in (0, message.version):
            text = f"publish number {job.number} was version {job.version}, and is now version {message.version}"
            raise errors.InternalError(text, channel=self._hub.name)
        job.version = message.version
        known.publishing.add(message.version)
        known.record_facts(message.version, meta=job.meta)
        known.protect()
        job.admitted.resolve(message.version)

    def _pin_filled(self, job: PublishJob) -> Slot | None:
        """Pin and return the filled slot, if any; raise Gone if the publish is over."""
        if job.state != "copying":
            raise self._hub.error(errors.Gone, "the publish ended before its copy", hint="")
        if job.slot is not None:
            self._hub.arena.hold(job.slot, "")  # not evicted before the pin: its version is protected
            self._hub.arena.pin(job.slot)
            self._hub.held_versions.record_facts(job.version, device=job.device)
        self._hub.held_versions.record_facts(job.version, meta=job.meta)
        job.step("copied")
        return job.slot

    async def _check_finite(self, job: PublishJob, slot: Slot) -> None:
        """Read the slot on a thread; raise ManifestMismatch for NaN or infinity."""
        if job.manifest is None or job.slot is not slot:
            return  # the publish has ended
        self._hub.arena.pin(slot)  # the publish may end, and its slot be released, meanwhile
        try:
            found = await asyncio.to_thread(not_finite, slot.data, job.manifest)
        finally:
            self._hub.arena.unpin(slot)
        if found:
            raise _not_finite(self._hub, job.version, found)

    def _ready(self, job: PublishJob) -> None:
        """Report the digest: send Filled if streaming, else Packed in its turn."""
        if job.slot is not None and job.slot.image is not None:
            self._hub.held_versions.record_facts(job.version, digest=job.digest)
        job.step("digested")
        if job.streaming and job.slot is not None:
            job.step("tell")
            self._hub.send(Filled(job.number, job.pack_s, job.digest, job.digest_s, job.slot.place, job.hold_s))
        else:
            self._announce()

    def _announce(self) -> None:
        """Send Packed of ready publishes, in order; stop at one that is in progress."""
        for job in list(self._jobs.values()):
            if job.state == "ready":
                job.step("tell")
                self._hub.send(job.packed_message())
            elif not job.announced:
                return

    def _begun_to_fill(self, job: PublishJob, manifest: PartManifest, device: str) -> None:
        """Send Packed before the copy: the version is sent on while it is packed."""
        if job.state != "walking" or not all(one.announced for one in self._jobs.values() if one.number < job.number):
            return  # it has ended; or announce it as a whole when it is packed
        job.streaming = True
        self._hub.tell(Part.filled_up_to, job.version, 0)
        job.manifest = manifest
        self._hub.send(Packed(job.number, manifest.hash, device, job.wait_s, 0.0, streaming=True))

    def _grown(self, job: PublishJob, nbytes: int) -> None:
        """Tell the parts that send the version how many bytes of it are packed."""
        if job.streaming:
            self._hub.tell(Part.filled_up_to, job.version, nbytes)

    def manifest_of(self, manifest_hash: str) -> bytes | None:
        """Return the encoded manifest of an open publish by its hash, or None."""
        known = (job.manifest for job in self._jobs.values() if job.manifest is not None)
        found = next((manifest for manifest in known if manifest.hash == manifest_hash), None)
        return found.encode() if found is not None else None

    def _fill_failed(self, job: PublishJob, error: errors.ReplicasError) -> None:
        """Free the slot after a failed copy; send PackFailed if the publish is open."""
        if job.state not in ("walking", "over"):
            return  # the interrupt came after the last step: the publish continues
        self._free(job)
        if job.state == "walking":
            self._report_failed(job, error)

    def _report_failed(self, job: PublishJob, error: BaseException) -> None:
        """Send PackFailed with ``error``; the coordinator ends all ranks' publish."""
        job.step("fail")
        if job.unsettled:
            return  # the caller has its error already
        wire = as_wire_error(error, channel=self._hub.name, phase="pack", version=job.version or None)
        job.failed = PackFailed(job.number, wire)
        self._hub.send(job.failed)
        self._announce()

    def _free(self, job: PublishJob) -> None:
        """Free a slot that is not filled, once nothing writes to it."""
        slot, job.slot = job.slot, None
        if slot is None:
            return
        hub, copies = self._hub, job.copies
        if job.copier is not None:
            job.copier.close()
        if copies is None:
            hub.arena.free(slot)
        else:  # a device still writes to the slot
            copies.abandon()
            copies.ended.add(lambda: hub.call(hub.arena.free, slot))

    def _ended(self, message: PublishEnd) -> None:
        """Handle the verdict: resolve or fail the publish."""
        outcome: Receipt | errors.ReplicasError
        if message.receipt is not None:
            outcome = Receipt.of(message.receipt)
        elif message.error is not None:
            outcome = message.error.exception()
        else:
            raise errors.InternalError("PublishEnd without a verdict", channel=self._hub.name)
        job = self._jobs.get(message.publish)
        if job is None:
            return
        if job.unsettled or isinstance(outcome, Receipt):
            self._end_decided(job, outcome)
        else:
            self._fail(job, outcome)

    def _overdue(self, job: PublishJob) -> None:
        """End a publish 5 s after its deadline: failed or, once packed, unknown."""
        hub = self._hub
        if not job.filled:
            error = hub.overdue_error("the publish", job.deadline_s)
            if job.state != "failed":
                self._report_failed(job, error)  # the other ranks need not wait
            self._fail(job, error)
            return
        why = hub.overdue_error(f"the publish of version {job.version}", job.deadline_s)
        self._fail(job, hub.error(errors.OutcomeUnknown, why.message, version=job.version, phase="commit"))

    def _remove_ended(self, job: PublishJob) -> None:
        """Remove the ended job, stop its timer, and announce the jobs behind it."""
        self._jobs.pop(job.number, None)
        job.step("end")
        job.stop_timer()
        if self._hub.over is None:
            self._announce()

    def _fail(self, job: PublishJob, error: errors.ReplicasError) -> None:
        """End with ``error``; after OutcomeUnknown keep the slot for a late verdict."""
        filled = job.filled
        if filled and isinstance(error, errors.OutcomeUnknown) and self._hub.over is None:
            job.unsettled = True
            job.stop_timer()
            self._announce()
        else:
            self._remove_ended(job)
            if filled:
                self._release_slot(job, keep=False)
            else:
                self._hub.held_versions.publishing.discard(job.version)
        job.admitted.fail(error)
        if job.pending.fail(error) and self._hub.leader:
            self._hub.failures.note(job.pending)
        self._hub.held_versions.protect()

    def _release_slot(self, job: PublishJob, *, keep: bool) -> None:
        """Release the publish's slot: ``keep`` it as a version, or free it."""
        known = self._hub.held_versions
        slot, job.slot = job.slot, None
        if slot is not None:
            self._hub.arena.unpin(slot)
        known.publishing.discard(job.version)
        if keep:
            known.protect()
        else:
            known.release(job.version)

    def _end_decided(self, job: PublishJob, outcome: Receipt | errors.ReplicasError | None) -> None:
        """End a publish with ``outcome``; if that is None, it stays OutcomeUnknown."""
        self._remove_ended(job)
        self._release_slot(job, keep=isinstance(outcome, Receipt))
        if isinstance(outcome, Receipt):
            self._filling.last = job.manifest
            self._hub.loaded = max(self._hub.loaded, job.version)
            job.pending.resolve(outcome)  # if it is not unsettled
        if outcome is not None:
            job.pending.replace_unknown(outcome)

    def settled(self, version: int, committed: bool) -> None:
        """End an unknown outcome, 5 s after a commit or discard of ``version``."""
        for job in [job for job in self._jobs.values() if job.unsettled]:
            if job.version == version and job.timer is None:
                job.timer = self._hub.after(GRACE_S, self._settle_without_verdict, job, committed)
            if committed and job.version < version:
                self._release_slot(job, keep=False)  # the newer commit replaces it

    def _settle_without_verdict(self, job: PublishJob, committed: bool) -> None:
        """End a publish of unknown outcome by its version's commit or discard."""
        if committed:
            self._end_decided(job, job.receipt(self._hub.epoch, self._hub.settings.staging))
            return
        text = f"version {job.version} was not committed, and never will be"
        error = self._hub.error(errors.SyncError, text, version=job.version, phase="commit", hint="publish again")
        self._end_decided(job, error)


def _not_finite(hub: Hub, version: int, found: dict[str, int]) -> errors.ReplicasError:
    """Return (do not raise) the error for bad values; ``found``: counts by tensor."""
    text = f"version {version} has values that are not finite, in {counts_text(found)}"
    hint = "the training has diverged; to send the version nevertheless, publish without check_finite"
    return hub.error(errors.ManifestMismatch, text, version=version, phase="pack", hint=hint)

"""Publish: the caller's thread fills a slot, the session thread does the rest.

Theory of operation
===================

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

**Several hosts.** When all tensors are known before the first is copied (a module, a
mapping), no user code can delay the walk. The version is then sent while it is packed:
Packed(streaming) goes out as soon as there is a slot, Filled when there is a digest.

**Tensors on a GPU** are only queued by the caller, on its current stream
(:mod:`replicas.weights.devices.device_copies`). The slot counts as filled when the
copies have arrived. Until then it belongs to them, even if the publish has ended.

**In order.** The coordinator refuses a version that a newer one has overtaken. A packed
publish is therefore announced only when every earlier one was announced or can no
longer be packed (:meth:`Publisher._announce`). The progress of a rank in a publish is a
state of :data:`~replicas.core.base.membership.PUBLISH_JOB`.

**Our own failure** (no memory, no slot, unusable tensors, not admitted): the weights
are still walked to the end, then the error is raised. PackFailed goes out first, so
that the other ranks need not wait, and the error raised is the verdict that returns,
the same on all ranks of the replica. **The user's own exception** passes through
unchanged, after PackFailed: the walk has ended. A failure that no caller was told of
fails the leader's next publish in the same way, so that the ranks agree.

Without a verdict a publish ends :data:`~replicas.channel.session.hub.GRACE_S` after its
deadline; once packed, with OutcomeUnknown, because the coordinator may have decided. It
is then *unsettled*, and its slot pinned, until a late verdict, commit or discard
arrives; waiting again on its Pending gives the outcome.

**A new coordinator** gets every open or unsettled publish: its number, and the result
of its packing. It continues them, and gives the verdict of those that its predecessor
had decided. A publish without a number begins again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

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

LATE_S = 15.0
"""Extra time of a publish past its deadline, once a new coordinator knows of it."""


class Publisher(Part):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._jobs: dict[int, PublishJob] = {}
        self._walking: PublishJob | None = None
        self._filling = Filling(hub, self._begun_to_fill, self._grown)
        self.copies = self._filling.copies

    @property
    def mode(self) -> Mode:
        return "parts" if self._hub.settings.source_ranks == "all" else "image"

    def publish(self, feed: Feed, job: PublishJob) -> Promise[Receipt]:
        """See :meth:`replicas.Channel.publish`. ``feed``: in :attr:`mode`."""
        walk = Holder()
        try:
            self._hub.call(self._begin_publish, job, walk)
            self._walk(job, feed)
        finally:
            self._hub.call(self._hub.loans.give_back, walk)
        return job.pending

    def _walk(self, job: PublishJob, feed: Feed) -> None:
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
        hub = self._hub
        if hub.leader and (earlier := hub.failures.take_unreported()) is not None:
            raise earlier
        started = time.monotonic()
        if not (hub.leader or feed.mode == "parts"):
            job.admitted.wait()
            feed.drain()
            pack_s = time.monotonic() - started
            job.ask_meta(feed)
            hub.call(self._walked, job, feed.device, pack_s)
            return
        manifest, packing = self._filling.fill(job, feed)
        job.ask_meta(feed)
        hub.call(self._packing, job, manifest, self._filling.device(feed), packing, started, time.monotonic())

    def _as_error(self, job: PublishJob, error: BaseException, *, users: bool) -> errors.ReplicasError:
        """Return the failure for the session thread; its text may run any code."""
        if users:
            text = f"the publishing code of {self._hub.member} raised {type(error).__name__}: {text_of(error)}"
            return self._hub.error(errors.SyncError, text, phase="pack", members=[self._hub.member.name])
        return as_wire_error(error, channel=self._hub.name, phase="pack", version=job.version or None).exception()

    def _verdict(self, job: PublishJob, error: Exception) -> Exception:
        """Wait for and return the replica's common verdict, or our own ``error``."""
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
        return {PublishAdmitted: self._admitted, PublishEnd: self._ended}

    def open_jobs(self) -> list[Promise[Receipt]]:
        """Any thread: return the publishes that have not ended, for close()."""
        return [job.pending for job in list(self._jobs.values()) if not job.pending.done()]

    def new_term(self) -> None:
        for job in list(self._jobs.values()):
            job.streaming = False
            if job.state == "told":
                job.step("forgotten")
            self._hub.send(job.begin_message(LATE_S if job.unsettled else job.left_s))
            if job.failed is not None:
                self._hub.send(job.failed)
        self._announce()

    def fail_all(self, error: errors.ReplicasError) -> None:
        for job in list(self._jobs.values()):
            if job.unsettled:
                self._end_unknown(job, None)
            else:
                self._fail(job, error)

    def _begin_publish(self, job: PublishJob, walk: Holder) -> None:
        hub = self._hub
        if hub.over is not None:
            self._fail(job, hub.over)
            return
        hub.loans.sweep()
        if self._walking is not None:
            text = "publish was called while another thread publishes"
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
        """Clean up after the caller's walk, which an interrupt may have ended."""
        self._walking = None
        if job.state == "walking":
            job.pending.mark_reported()  # the interrupt tells the caller
        text = f"the publish on {self._hub.member} was interrupted"
        self._fill_failed(job, self._hub.error(errors.SyncError, text, phase="pack"))

    def _walked(self, job: PublishJob, device: str, pack_s: float) -> None:
        if job.state == "walking":
            job.step("walked")
            job.pack_s = pack_s
            self._filled(job, None, device)
            job.step("digested")
            self._announce()

    def _packing(
        self, job: PublishJob, manifest: PartManifest, device: str, packing: Packing, started: float, returned: float
    ) -> None:
        if job.state == "walking":  # else the publish has ended; its slot is freed after the last write
            job.step("walked")

        def copied(done: Future[float] | None, at: float) -> None:
            self._hub.call(self._copied, job, manifest, device, done, at - started - job.wait_s)
            packing.digest.add_done_callback(
                lambda digest: self._hub.call(self._digested, job, digest, time.monotonic() - at)
            )

        if packing.copies is None:
            copied(None, returned)
        else:  # on the thread that follows the copies
            packing.copies.copied.add_done_callback(lambda done: copied(done, time.monotonic()))

    def _admitted(self, message: PublishAdmitted) -> None:
        job = self._jobs.get(message.publish)
        if job is None or job.unsettled:
            return
        known = self._hub.held_versions
        if job.version not in (0, message.version):
            text = f"publish {job.number} was version {job.version}, and is now version {message.version}"
            raise errors.InternalError(text, channel=self._hub.name)
        job.version = message.version
        known.publishing.add(message.version)
        known.record_facts(message.version, meta=job.meta)
        known.protect()
        job.admitted.resolve(message.version)

    def _copied(
        self, job: PublishJob, manifest: PartManifest, device: str, held: Future[float] | None, pack_s: float
    ) -> None:
        """Handle the end of the copies: all bytes are there, or ``held`` has failed."""
        job.pack_s = pack_s
        if held is not None and (error := held.exception()) is not None:
            self._free(job)
            if job.state == "copying":
                self._report_failed(job, error)
            return
        job.hold_s = held.result() if held is not None else 0.0
        self._filled(job, manifest, device)

    def _filled(self, job: PublishJob, manifest: PartManifest | None, device: str) -> None:
        if job.state != "copying":
            self._free(job)
            return
        if job.slot is not None:
            self._hub.arena.hold(job.slot, "")  # not evicted before the pin: its version is protected
            self._hub.arena.pin(job.slot)
            self._hub.held_versions.record_facts(job.version, device=device)
        self._hub.held_versions.record_facts(job.version, meta=job.meta)
        job.manifest, job.device = manifest, device
        job.step("copied")

    def _digested(self, job: PublishJob, done: Future[str], digest_s: float) -> None:
        if done.cancelled() or job.state != "filled":  # the copies failed, or the publish ended
            return
        error = done.exception()
        if isinstance(error, errors.ReplicasError):  # of a device
            self._release_slot(job, keep=False)
            self._report_failed(job, error)
            return
        if error is not None:
            raise error
        job.digest, job.digest_s = done.result(), digest_s
        if job.slot is not None and job.check_finite:
            self._hub.arena.pin(job.slot)  # now: the slot may be released before the task begins
            self._hub.spawn(self._check_finite(job, job.slot), f"values of version {job.version}")
        else:
            self._ready(job)

    async def _check_finite(self, job: PublishJob, slot: Slot) -> None:
        """Announce the version, or fail it for non-finite values; unpin the slot."""
        hub, manifest = self._hub, job.manifest
        assert manifest is not None
        try:
            found = await asyncio.to_thread(not_finite, slot.data, manifest)
            failure = _not_finite(hub, job.version, found) if found else None
        except (OSError, RuntimeError, MemoryError) as error:
            failure = as_wire_error(error, channel=hub.name, phase="pack", version=job.version).exception()
        finally:
            hub.arena.unpin(slot)
        if failure is None:
            self._ready(job)
        elif job.slot is slot:
            self._release_slot(job, keep=False)
            self._report_failed(job, failure)

    def _ready(self, job: PublishJob) -> None:
        """Send Filled or Packed, if it is its turn: the digest is known."""
        if job.slot is None:  # the publish has ended
            return
        if job.slot.image is not None:
            self._hub.held_versions.record_facts(job.version, digest=job.digest)
        job.step("digested")
        if job.streaming:
            job.step("tell")
            self._hub.send(Filled(job.number, job.pack_s, job.digest, job.digest_s, job.slot.place, job.hold_s))
        else:
            self._announce()

    def _announce(self) -> None:
        """Announce ready publishes in order; stop at the first still in progress."""
        for job in list(self._jobs.values()):
            if job.state == "ready":
                job.step("tell")
                self._hub.send(job.packed_message())
            elif not job.announced:
                return

    def _begun_to_fill(self, job: PublishJob, manifest: PartManifest, device: str) -> None:
        if job.state != "walking":
            return
        if not all(one.announced for one in self._jobs.values() if one.number < job.number):
            return  # announce it as a whole when it is packed
        job.streaming = True
        self._hub.filled_up_to(job.version, 0)
        job.manifest = manifest
        self._hub.send(Packed(job.number, manifest.hash, manifest.nbytes, device, job.wait_s, 0.0, streaming=True))

    def _grown(self, job: PublishJob, nbytes: int) -> None:
        if job.streaming:
            self._hub.filled_up_to(job.version, nbytes)

    def manifest_of(self, manifest_hash: str) -> bytes | None:
        """Return the encoded manifest of an open publish by its hash, or None."""
        known = (job.manifest for job in self._jobs.values() if job.manifest is not None)
        found = next((manifest for manifest in known if manifest.hash == manifest_hash), None)
        return found.encode() if found is not None else None

    def _fill_failed(self, job: PublishJob, error: errors.ReplicasError) -> None:
        """Report a failed fill; the walk may continue."""
        if job.state not in ("walking", "over"):
            return  # the interrupt came after the last step: the publish continues
        self._free(job)
        if job.state == "walking":
            self._report_failed(job, error)

    def _report_failed(self, job: PublishJob, error: BaseException) -> None:
        job.step("fail")
        if job.unsettled:
            return  # the caller has its error already
        wire = as_wire_error(error, channel=self._hub.name, phase="pack", version=job.version or None)
        job.failed = PackFailed(job.number, wire)
        self._hub.send(job.failed)
        self._announce()

    def _free(self, job: PublishJob) -> None:
        """Free an unfilled slot, once nothing writes to it."""
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
        if job.unsettled:
            self._end_unknown(job, outcome)
        elif isinstance(outcome, Receipt):
            self._over(job)
            self._committed(job)
            job.pending.resolve(outcome)
        else:
            self._fail(job, outcome)

    def _committed(self, job: PublishJob) -> None:
        self._release_slot(job, keep=True)
        self._filling.last = job.manifest
        self._hub.loaded = max(self._hub.loaded, job.version)

    def _overdue(self, job: PublishJob) -> None:
        hub = self._hub
        if not job.filled:
            error = hub.overdue_error("the publish", job.deadline_s)
            if job.state != "failed":
                self._report_failed(job, error)  # the other ranks need not wait
            self._fail(job, error)
            return
        why = hub.overdue_error(f"the publish of version {job.version}", job.deadline_s)
        self._fail(job, hub.error(errors.OutcomeUnknown, why.message, version=job.version, phase="commit"))

    def _over(self, job: PublishJob) -> None:
        self._jobs.pop(job.number, None)
        job.step("end")
        job.stop_timer()
        if self._hub.over is None:
            self._announce()

    def _fail(self, job: PublishJob, error: errors.ReplicasError) -> None:
        filled = job.filled
        if filled and isinstance(error, errors.OutcomeUnknown) and self._hub.over is None:
            job.unsettled = True
            job.stop_timer()
            self._announce()
        else:
            self._over(job)
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

    def _end_unknown(self, job: PublishJob, outcome: Receipt | errors.ReplicasError | None) -> None:
        """End an unsettled publish with its outcome, or None if it stays unknown."""
        self._over(job)
        if isinstance(outcome, Receipt):
            self._committed(job)
        else:
            self._release_slot(job, keep=False)
        if outcome is not None:
            job.pending.replace_unknown(outcome)

    def settled(self, version: int, committed: bool) -> None:
        """Handle a commit or discard; first wait for the verdict, which says more."""
        for job in [job for job in self._jobs.values() if job.unsettled]:
            if job.version == version and job.timer is None:
                job.timer = self._hub.after(GRACE_S, self._settle_without_verdict, job, committed)
            if committed and job.version < version:
                self._release_slot(job, keep=False)  # the newer commit replaces it

    def _settle_without_verdict(self, job: PublishJob, committed: bool) -> None:
        if committed:
            self._end_unknown(job, job.receipt(self._hub.epoch, self._hub.settings.staging))
            return
        text = f"version {job.version} was discarded, and will never be committed"
        error = self._hub.error(errors.SyncError, text, version=job.version, phase="commit", hint="publish again")
        self._end_unknown(job, error)


def _not_finite(hub: Hub, version: int, found: dict[str, int]) -> errors.ReplicasError:
    text = f"version {version} has values that are not finite, in {counts_text(found)}"
    hint = "the training has diverged; to send the version nevertheless, publish without check_finite"
    return hub.error(errors.ManifestMismatch, text, version=version, phase="pack", hint=hint)

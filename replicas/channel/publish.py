"""Publishing: the caller's thread fills a slot, the session thread sees it through.

Theory of operation
===================

A publish is numbered and announced (PublishBegin) on the session thread; the rest until it is packed runs on the thread
that called, because walking the weights may be made of collectives of the user's own group, on the user's own stream. ::

    caller                                   session thread
    ------                                   --------------
    publish() ────────────────────────────▶  PublishBegin ──▶
    wait until admitted                  ◀── PublishAdmitted (the version's number)
    wait for a slot, walk the weights
    into it (or only walk) ───────────────▶  pin, UploadManifest, Packed ──▶
    return the Pending                       ...
                                         ◀── PublishEnd: unpin, resolve

**Failure of ours** (no memory, no slot, tensors of no use, not admitted): the weights are walked to their end all the
same, then the error is raised. PackFailed goes out first, so that the others need not wait, and what is raised is the
verdict that comes back, the same on all ranks of the replica. **The user's own exception** goes through as it is, after
PackFailed: there is nothing left to walk.

**Failures that nobody waited for** surface here: the leader's next publish fails with the earlier error, by the same
path, so that the ranks of a replica cannot part ways.

A publish ends by itself :data:`~replicas.channel.hub.GRACE_S` after its deadline when no verdict came: with OutcomeUnknown
once it was packed, for the coordinator may have decided. Its slot stays pinned then, until the version is committed or
discarded.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from replicas import errors
from replicas.channel.hub import GRACE_S, Hub, as_wire_error
from replicas.channel.pending import Pending, Receipt
from replicas.core.manifest import PartManifest
from replicas.messages import (
    Meta,
    Packed,
    PackFailed,
    PublishAdmitted,
    PublishBegin,
    PublishEnd,
    UploadManifest,
)
from replicas.weights.arena import Slot
from replicas.weights.packing import Feed, Mode, pack, stage

__all__ = ["PublishJob", "Publisher"]


class PublishJob:
    """One publish of this rank. ``pending`` is what the caller gets; fields change on the session thread."""

    def __init__(self, version: int | None, deadline_s: float, meta: Meta, new_manifest: bool, channel: str) -> None:
        self.number = 0
        self.asked_version = version
        self.version = 0
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self.meta = meta
        self.new_manifest = new_manifest
        self.pending: Pending[Receipt] = Pending(f"publish on {channel}")
        self.admitted: Pending[int] = Pending(f"admission of a publish on {channel}")
        self.packed = False
        self.slot: Slot | None = None
        self.manifest: PartManifest | None = None
        self.wait_s = 0.0
        self.pack_s = 0.0
        self.timer: asyncio.TimerHandle | None = None


class Publisher:
    """Publishes of one channel in this process."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._jobs: dict[int, PublishJob] = {}
        self._unsettled: dict[int, PublishJob] = {}
        self._uploaded: set[str] = set()
        self._last: PartManifest | None = None
        self._made: int | None = None
        self._busy = threading.Lock()
        hub.on_settled(self._settled)

    # ------------------------------------------------------------ caller's thread

    def publish(self, weights: object, job: PublishJob, dtype: torch.dtype | None) -> Pending[Receipt]:
        """See :meth:`replicas.Channel.publish`."""
        if not self._busy.acquire(blocking=False):
            raise self._hub.error(
                errors.UsageError, "publish was called while another thread is in it", hint="publish from one thread"
            )
        try:
            mode: Mode = "parts" if self._hub.settings.source_ranks == "all" else "image"
            feed = Feed(weights, dtype=dtype, mode=mode)
            self._hub.call(self._begin, job)
            self._walk(job, feed)
        finally:
            self._busy.release()
        return job.pending

    def _walk(self, job: PublishJob, feed: Feed) -> None:
        try:
            self._fill(job, feed)
        except BaseException as error:
            users = feed.user_error is not None or not isinstance(error, Exception)
            self._hub.call(self._fill_failed, job, error, users)
            if users or not isinstance(error, Exception):
                job.pending._observed = True
                raise
            feed.drain()
            verdict = self._verdict(job, error)
            if verdict is error:
                raise
            raise verdict from error

    def _fill(self, job: PublishJob, feed: Feed) -> None:
        hub = self._hub
        if hub.leader and (earlier := hub.take_failure()) is not None:
            raise earlier
        job.admitted.wait()
        if not (hub.leader or feed.mode == "parts"):
            started = time.monotonic()
            feed.drain()
            job.pack_s = time.monotonic() - started
            hub.call(self._filled, job, None, feed.device)
            return
        started = time.monotonic()
        manifest = feed.plan()
        if manifest is None and not job.new_manifest:
            manifest = self._last
        staged = stage(feed) if manifest is None else None
        if staged is not None:
            manifest = staged.manifest
        assert manifest is not None
        job.slot = slot = self._slot(job, manifest)
        if staged is not None:
            staged.write(slot.data)
        else:
            pack(feed, manifest, slot.data)
        job.pack_s = time.monotonic() - started - job.wait_s
        hub.call(self._filled, job, manifest, feed.device)

    def _slot(self, job: PublishJob, manifest: PartManifest) -> Slot:
        """A free slot, waited for until the deadline or until the publish has failed elsewhere."""
        hub = self._hub
        started = time.monotonic()
        while True:
            with hub.slots_changed:
                seen = hub.slots_generation
            slot = hub.arena.acquire(job.version, manifest)
            if slot is not None:
                job.wait_s = time.monotonic() - started
                return slot
            if job.pending.done():
                job.pending.wait()
            with hub.slots_changed:
                left = job.deadline - time.monotonic()
                if left <= 0 or not hub.slots_changed.wait_for(lambda: hub.slots_generation != seen, left):  # noqa: B023  # used at once
                    raise hub.error(
                        errors.Busy,
                        f"no free slot for version {job.version} within {job.deadline_s:g} s: "
                        f"all {len(hub.arena.slots)} are in use",
                        version=job.version,
                        phase="wait",
                        members=[hub.member.name],
                    )

    def _verdict(self, job: PublishJob, error: Exception) -> Exception:
        """What all ranks of the replica are told; our own error when nobody can tell."""
        left = max(0.0, job.deadline - time.monotonic()) + 2 * GRACE_S
        try:
            job.pending.wait(left)
        except errors.ReplicasError as verdict:
            local = isinstance(verdict, (errors.DeadlineExceeded, errors.Disconnected)) and not verdict.unanimous
            return error if local and isinstance(error, errors.ReplicasError) else verdict
        except TimeoutError:
            return error
        return error

    # ------------------------------------------------------------ session thread

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {PublishAdmitted: self._admitted, PublishEnd: self._ended}

    def open_jobs(self) -> list[Pending[Receipt]]:
        """Publishes that have not ended, for close(); from any thread."""
        return [job.pending for job in list(self._jobs.values()) if not job.pending.done()]

    def new_term(self) -> None:
        self._uploaded.clear()
        for job in list(self._jobs.values()):
            self._fail(job, self._lost(job))

    def fail_all(self, error: errors.ReplicasError) -> None:
        for job in list(self._jobs.values()):
            self._fail(job, error)

    def _lost(self, job: PublishJob) -> errors.ReplicasError:
        if job.packed:
            return self._hub.error(
                errors.OutcomeUnknown,
                f"the coordinator was replaced while version {job.version} was on its way",
                version=job.version,
                phase="commit",
            )
        return self._hub.error(
            errors.Disconnected, "the coordinator was replaced during the publish", hint="publish again"
        )

    def _begin(self, job: PublishJob) -> None:
        hub = self._hub
        if hub.over is not None:
            self._fail(job, hub.over)
            return
        if self._made is None:
            self._made = hub.publishes_made
        self._made += 1
        job.number = self._made
        self._jobs[job.number] = job
        job.timer = hub.after(job.deadline + GRACE_S - time.monotonic(), self._overdue, job)
        hub.send(
            PublishBegin(
                publish=job.number,
                version=job.asked_version,
                deadline_s=max(0.0, job.deadline - time.monotonic()),
                meta=job.meta,
                new_manifest=job.new_manifest,
            )
        )

    def _admitted(self, message: PublishAdmitted) -> None:
        job = self._jobs.get(message.publish)
        if job is None:
            return
        job.version = message.version
        self._hub.publishing.add(message.version)
        self._hub.metas[message.version] = job.meta
        self._hub.protect()
        job.admitted._resolve(message.version)

    def _filled(self, job: PublishJob, manifest: PartManifest | None, device: str) -> None:
        hub = self._hub
        if job.number not in self._jobs:
            self._free(job)
            return
        if job.slot is not None:
            hub.arena.hold(job.slot, "")  # not to be evicted before the pin: its version is protected
            hub.arena.pin(job.slot)
        job.packed = True
        job.manifest = manifest
        digest = ""
        if manifest is not None:
            digest = manifest.hash
            if digest not in self._uploaded:
                self._uploaded.add(digest)
                hub.send(UploadManifest(digest, manifest.encode()))
        hub.send(
            Packed(
                publish=job.number,
                manifest_hash=digest,
                nbytes=manifest.nbytes if manifest is not None else 0,
                device=device,
                wait_s=job.wait_s,
                pack_s=job.pack_s,
            )
        )

    def _fill_failed(self, job: PublishJob, error: BaseException, users: bool) -> None:
        """The walk may go on meanwhile, but it no longer writes into the slot. ``users``: the user's code raised."""
        hub = self._hub
        self._free(job)
        if job.number not in self._jobs:
            return
        if users:
            text = f"the publishing code of {hub.member} raised {type(error).__name__}: {error}"
            error = hub.error(errors.SyncError, text, phase="pack", members=[hub.member.name])
        wire = as_wire_error(error, channel=hub.name, phase="pack", version=job.version or None)
        hub.send(PackFailed(job.number, wire))

    def _free(self, job: PublishJob) -> None:
        slot, job.slot = job.slot, None
        if slot is not None:
            self._hub.arena.free(slot)

    def _ended(self, message: PublishEnd) -> None:
        job = self._jobs.get(message.publish)
        if job is None:
            return
        if message.receipt is not None:
            self._over(job)
            self._let_go(job, keep=True)
            self._last = job.manifest
            self._hub.loaded = max(self._hub.loaded, message.receipt.version)
            job.pending._resolve(Receipt.of(message.receipt))
        elif message.error is not None:
            self._fail(job, message.error.exception())
        else:
            raise errors.InternalError("PublishEnd without a verdict", channel=self._hub.name)

    def _overdue(self, job: PublishJob) -> None:
        hub = self._hub
        if not job.packed:
            self._fail(job, hub.no_answer("the publish", job.deadline_s))
            return
        why = hub.no_answer(f"the publish of version {job.version}", job.deadline_s)
        self._fail(job, hub.error(errors.OutcomeUnknown, why.message, version=job.version, phase="commit"))

    def _over(self, job: PublishJob) -> None:
        self._jobs.pop(job.number, None)
        if job.timer is not None:
            job.timer.cancel()

    def _fail(self, job: PublishJob, error: errors.ReplicasError) -> None:
        self._over(job)
        unknown = isinstance(error, errors.OutcomeUnknown) and self._hub.over is None
        if unknown and job.packed:
            self._unsettled[job.version] = job
        elif job.packed:
            self._let_go(job, keep=False)
        else:
            self._hub.publishing.discard(job.version)
        job.admitted._fail(error)
        if job.pending._fail(error) and self._hub.leader:
            self._hub.note_failure(job.pending)
        self._hub.protect()

    def _let_go(self, job: PublishJob, *, keep: bool) -> None:
        """The slot is no longer this publish's: ``keep`` it as a version that may be sent, or free it."""
        hub = self._hub
        hub.publishing.discard(job.version)
        slot, job.slot = job.slot, None
        if slot is not None:
            if keep:
                hub.arena.unpin(slot)
            elif slot.pins == 1:
                hub.arena.free(slot)
            else:
                hub.arena.unpin(slot)
        hub.protect()

    def _settled(self, version: int, committed: bool) -> None:
        """A commit or a discard tells what became of publishes whose outcome was unknown."""
        for known in [known for known in self._unsettled if known == version or (committed and known < version)]:
            self._let_go(self._unsettled.pop(known), keep=committed and known == version)

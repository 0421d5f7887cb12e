"""Move one version within a group: chains of members, buckets, a window, and digests.

Theory of operation
===================

Each part (an image is one part) has a *route*: lane ranks, the owner first. The bytes
go along it as a chain: each member receives a bucket (:mod:`replicas.sidecar.buckets`)
from its predecessor while it sends the previous one to its successor. So every link
carries the bytes once each way, for any number of members. A member outside the route
does not handle that part.

A receiver takes a bucket straight into the image if it is contiguous there, too, else
into staging memory, from which its pieces are scattered.

Each member starts its receives and sends in the order of the buckets, which is the same
for all, and before it waits for anything later in that order. Therefore the first
unfinished bucket never waits for a later one: there is no deadlock, whatever the routes
are, and between two members bytes arrive in the order in which they were sent.

A second thread digests arrived buckets (and scatters staged ones) while the next
buckets are moving. It proceeds through the image from start to end, up to the first
byte that may still change, so that little is left to do after the last bucket.

A *streaming* sender starts while its rank still packs the image: before it sends a
bucket it waits until the rank has reported the image packed up to the bucket's end. It
digests nothing, as the rank digests beside the copy. Receivers do not notice.

Nothing is retried here: a failed or late operation ends the group. (When a peer has
died, Gloo immediately fails operations queued to or from it, but not a half-done one:
that ends at its timeout, or when the sidecar is killed because the coordinator has
dropped the lane.)

Why a chain
-----------

With links of 800 Mbit/s, four hosts take 1.05 times as long as two; by Gloo's broadcast
of one flat buffer they take three times as long, by a binary tree twice
(docs/measurements.md). Hence also the sizes in :mod:`replicas.sidecar.buckets`.

NCCL pipelines its own broadcast, and runs the operations of one member one after
another: a chain would wait in circles. So each bucket goes from its owner to all others
of the route at once (:meth:`replicas.sidecar.groups.CollectiveGroup.spread`), in the
same order on all members. These buckets are larger, as an operation costs more than its
bytes.

On a GPU
--------

The image may be in device memory: NCCL and the digests work on it in place. All members
then use the device digests of :mod:`replicas.weights.copies.digest`. After its wait an
operation is complete for every stream. The second thread waits for the work on its own
stream before other threads use that memory, and before the answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from replicas.core.base.manifest import Manifest
from replicas.sidecar.buckets import MAX_BUCKET_NBYTES, Bucket, BucketPlan, image_run, make_plan
from replicas.sidecar.groups import CollectiveGroup, StartedWork
from replicas.sidecar.wire import TransferResult, TransferSpec
from replicas.weights.copies.accelerator import Accelerator
from replicas.weights.copies.digest import DeviceDigest, Digest
from replicas.weights.loading import piece_pairs

WaitPacked = Callable[[int, float], None]
"""Waits until this number of bytes of the image's data is packed.

Raises :class:`TimeoutError` at the deadline (monotonic)."""

WINDOW = 4
"""Buckets in flight on each side: as many receives as sends."""
DIGEST_NBYTES = 64 << 20
"""Bytes to digest between two progress reports."""
SPREAD_NBYTES = 32 << 20
"""Bucket size in a group that spreads, in bytes."""


def scatter(staged: torch.Tensor, bucket: Bucket, data: torch.Tensor, manifest: Manifest) -> None:
    """Copy a bucket's pieces (uint8, in the owner's layout) to their image offsets."""
    for view, chunk in piece_pairs(manifest, bucket.pieces, staged, data, bucket.start):
        view.copy_(chunk)


def check_routes(spec: TransferSpec, manifest: Manifest, size: int) -> None:
    """Raise ValueError unless each part has a route in a group of ``size``."""
    parts = 1 if spec.mode == "image" else len(manifest.parts or ())
    if len(spec.routes) != parts:
        raise ValueError(f"{len(spec.routes)} routes do not fit {parts} part(s)")
    for route in spec.routes:
        if len(set(route)) != len(route) or not all(rank in range(size) for rank in route):
            raise ValueError(f"the route {route} does not fit a group of {size}")


@dataclass
class _Flight:
    number: int
    bucket: Bucket
    tensor: torch.Tensor
    spare: torch.Tensor | None
    arriving: StartedWork | None = None
    leaving: StartedWork | None = None
    checked: Future[None] | None = None


@dataclass(eq=False)
class _Checker:
    """Digests and scatters buckets on a second thread, in their order.

    :param device: of ``data``; None for host memory.
    """

    plan: BucketPlan
    manifest: Manifest
    data: torch.Tensor
    device: Accelerator | None
    worked: Callable[[int], None]
    by_part: bool

    def __post_init__(self) -> None:
        self._image = self._digest()
        self._parts: dict[int, Digest | DeviceDigest] = {}

    def digest_fixed(self) -> None:
        """Digest the bytes that no bucket will change."""
        with self._stream():
            self._digest_up_to(0)

    def receive(self, flight: _Flight) -> None:
        with self._stream():
            if self.by_part:
                self._part(flight.bucket.owner).update(flight.tensor)
            if flight.spare is not None:
                scatter(flight.tensor, flight.bucket, self.data, self.manifest)
                if self.device is not None:
                    self.device.synchronize()  # the staging memory is reused
            self._digest_up_to(flight.number + 1)

    def send(self, flight: _Flight) -> None:
        with self._stream():
            self._part(flight.bucket.owner).update(flight.tensor)

    def end(self) -> None:
        """Wait for this thread's stream, before other threads use the memory."""
        if self.device is not None:
            with self._stream():
                self.device.synchronize()

    def image_digest(self) -> str:
        if self._image.nbytes != self.data.numel():
            raise RuntimeError(f"{self._image.nbytes} of {self.data.numel()} bytes were digested")
        with self._stream():
            return self._image.hexdigest()

    def part_digest(self, owner: int) -> str:
        with self._stream():
            return self._part(owner).hexdigest()

    def _digest(self) -> Digest | DeviceDigest:
        return Digest() if self.device is None else DeviceDigest()

    def _part(self, owner: int) -> Digest | DeviceDigest:
        return self._parts.setdefault(owner, self._digest())

    def _digest_up_to(self, number: int) -> None:
        end = self.plan.settled[number]
        while (start := self._image.nbytes) < end:
            self._image.update(self.data[start : min(end, start + DIGEST_NBYTES)])
            if self.device is None:  # else the digest is only queued
                self.worked(self._image.nbytes - start)

    def _stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self.device is None else self.device.on_side_stream()


class _Mover:
    def __init__(
        self,
        group: CollectiveGroup,
        spec: TransferSpec,
        manifest: Manifest,
        memory: torch.Tensor,
        wait_packed: WaitPacked,
        device: Accelerator | None,
        worked: Callable[[int], None],
    ) -> None:
        if spec.streaming and (spec.role, spec.mode) != ("send", "image"):
            raise ValueError(f"only the sender of an image can be streaming, not: {spec.role}, mode {spec.mode}")
        self._wait_packed = wait_packed if spec.streaming else None
        self._group = group
        self._manifest = manifest
        self._routes = spec.routes
        self._deadline = time.monotonic() + spec.timeout_s
        self._receives = spec.role == "receive"
        self._hashes = self._receives or not (spec.digest or spec.streaming)
        holds_image = self._receives or spec.mode == "image"
        if holds_image and memory.numel() != manifest.image_nbytes:
            raise ValueError(f"the slot has {memory.numel()} bytes, but the image {manifest.image_nbytes}")
        self._memory = memory[manifest.data_offset :] if holds_image else memory
        by_part = spec.mode == "parts"
        limit = SPREAD_NBYTES if group.spreads else None
        self._plan = make_plan(manifest, spec.routes, group.rank, by_part=by_part, limit=limit)
        self._spare_nbytes = limit or MAX_BUCKET_NBYTES
        self._spare: list[torch.Tensor] = []
        self._leaving: deque[_Flight] = deque()
        self._checks: deque[Future[None]] = deque()
        self._worked = worked
        self.checker = _Checker(self._plan, manifest, self._memory, device, worked, by_part)

    def run(self, thread: ThreadPoolExecutor) -> None:
        """Move all buckets; ``thread`` may still be digesting on return."""
        if self._receives:
            self._checks.append(thread.submit(self.checker.digest_fixed))
        arriving: deque[_Flight] = deque()
        for number, bucket in enumerate(self._plan.buckets):
            arriving.append(self._start_bucket(number, bucket))
            if len(arriving) > WINDOW:
                self._pass_on(arriving.popleft(), thread)
        while arriving:
            self._pass_on(arriving.popleft(), thread)
        while self._leaving:
            self._end(self._leaving.popleft())
        self._checks.append(thread.submit(self.checker.end))

    def finish(self, *, all_bytes: bool = True) -> None:
        """Wait for all checks on the second thread, or collect those already done."""
        while self._checks and (all_bytes or self._checks[0].done()):
            self._checks.popleft().result()

    def _start_bucket(self, number: int, bucket: Bucket) -> _Flight:
        """Start to receive another member's bucket, or to spread this member's own."""
        flight = _Flight(number, bucket, *self._place(bucket))
        if self._group.spreads:
            self._await_packing(bucket)
            flight.arriving = self._group.spread(flight.tensor, self._routes[bucket.part], self._deadline)
        elif bucket.owner != self._group.rank:
            route = self._routes[bucket.part]
            before = route[route.index(self._group.rank) - 1]
            flight.arriving = self._group.receive(flight.tensor, before, self._deadline)
        return flight

    def _pass_on(self, flight: _Flight, thread: ThreadPoolExecutor) -> None:
        """Wait until a bucket has arrived; start to send it, and to digest it."""
        bucket, route = flight.bucket, self._routes[flight.bucket.part]
        if flight.arriving is not None:
            flight.arriving.wait()
            self._worked(bucket.nbytes)
        place = route.index(self._group.rank)
        if not self._group.spreads and place + 1 < len(route):
            self._await_packing(bucket)
            flight.leaving = self._group.send(flight.tensor, route[place + 1], self._deadline)
        if bucket.owner == self._group.rank:
            if self._hashes:
                flight.checked = thread.submit(self.checker.send, flight)
        elif self._receives:
            flight.checked = thread.submit(self.checker.receive, flight)
        if flight.checked is not None:
            self._checks.append(flight.checked)
        self._leaving.append(flight)
        while len(self._leaving) > WINDOW:
            self._end(self._leaving.popleft())

    def _end(self, flight: _Flight) -> None:
        if flight.leaving is not None:
            flight.leaving.wait()
            self._worked(flight.bucket.nbytes)
        if flight.spare is not None:
            if flight.checked is not None:
                flight.checked.result()
            self._spare.append(flight.spare)
        self.finish(all_bytes=False)

    def _await_packing(self, bucket: Bucket) -> None:
        if self._wait_packed is not None:
            self._wait_packed(bucket.start + bucket.nbytes, self._deadline)

    def _place(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return memory to send from or receive into, and staging memory or None."""
        if bucket.owner == self._group.rank:
            if bucket.start + bucket.nbytes > self._memory.numel():
                raise ValueError(f"the slot has {self._memory.numel()} bytes, less than its part of the manifest")
            return self._memory[bucket.start : bucket.start + bucket.nbytes], None
        start = image_run(self._manifest, bucket) if self._receives else None
        if start is not None:
            return self._memory[start : start + bucket.nbytes], None
        if self._spare:
            spare = self._spare.pop()
        else:
            spare = torch.empty(self._spare_nbytes, dtype=torch.uint8, device=self._memory.device)
        return spare[: bucket.nbytes], spare


def run_transfer(
    group: CollectiveGroup,
    spec: TransferSpec,
    manifest: Manifest,
    memory: torch.Tensor,
    wait_packed: WaitPacked,
    device: Accelerator | None = None,
    worked: Callable[[int], None] = lambda nbytes: None,
) -> TransferResult:
    """Send or receive one version.

    :param memory: uint8: an image slot, or the packed part of a sender in mode
        ``"parts"``. A sender's memory may be read-only.
    :param wait_packed: called by a streaming sender before it sends.
    :param device: of ``memory``; None for host memory.
    :param worked: called with each number of bytes moved or digested.
    :raises RuntimeError: a peer failed, or the timeout passed; a receiver's ``memory``
        is then undefined.
    :raises TimeoutError: the image of a streaming sender was not packed in time.
    :raises ValueError: ``spec`` does not fit the manifest, the group or the memory.
    """
    check_routes(spec, manifest, group.size)
    started = time.monotonic()
    mover = _Mover(group, spec, manifest, memory, wait_packed, device, worked)
    thread = ThreadPoolExecutor(1, "digest")
    try:
        mover.run(thread)
        moved = time.monotonic()
        mover.finish()
    finally:
        thread.shutdown(cancel_futures=True)  # no write to the memory after the answer
    image_digest, part_digests = _digests(group.rank, spec, mover)
    return TransferResult(image_digest, part_digests, moved - started, time.monotonic() - moved)


def _digests(rank: int, spec: TransferSpec, mover: _Mover) -> tuple[str, dict[int, str]]:
    """Return the digests that this member has: of the image, and of parts by owner."""
    if spec.role == "receive":
        seen = {route[0] for route in spec.routes if rank in route} if spec.mode == "parts" else set()
        return mover.checker.image_digest(), {owner: mover.checker.part_digest(owner) for owner in seen}
    mine = spec.digest if spec.digest or spec.streaming else mover.checker.part_digest(rank)
    return (mine, {}) if spec.mode == "image" else ("", {rank: mine})

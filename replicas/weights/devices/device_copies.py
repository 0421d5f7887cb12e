"""Asynchronous copies of a publish on a GPU, and the thread that waits for them.

Theory of operation
===================

The caller's thread *enqueues* all copies, and an event after each *batch*; later work
on its stream runs after the copies. A thread for this publish, the *follower*, waits
for one event after the other and reports the bytes that have arrived: to the digest
(and the sender) of host memory, which work meanwhile, or at the end to the digest on
the device. The follower also gets the device's failures::

    caller     wait for last readers · copy · event · copy · event · copy · end
    follower                           arrived · arrived · arrived · copied · digest

A slot belongs to its copies until ``copied`` is done, even if the publish has failed:
it is not freed earlier, and no thread waits for a device that hangs.

**Freeing sources.** The copies are on the caller's current stream, like any operation
of torch. A tensor that was allocated on that stream may be freed or written after its
copy is enqueued. Tensors of other streams need the precautions torch requires: the
current stream must wait for theirs, and ``record_stream``.

**Aside** (``hold=False``): a stream of the library copies weights that all exist, after
waiting for the enqueued work of the caller's stream. The caller's stream continues
meanwhile, and must wait for the copies before it writes to the weights
(:meth:`DeviceCopies.fence`). The weights' memory is kept until then, even if freed.

Tensors in host memory are copied before the call returns, as streams do not order
writes to them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass

import torch

from replicas.common.waits import Latch
from replicas.errors import NoCapacity, ReplicasError, SyncError, WorldError
from replicas.messages.bounds import text_of
from replicas.weights.copies.accelerator import Accelerator, Event
from replicas.weights.copies.copying import Copier, Prefix, Progress, Step, copy_host
from replicas.weights.copies.digest import device_digest_of
from replicas.weights.copies.host_copies import unusable
from replicas.weights.copies.streaming import MemoryMoved, Private
from replicas.weights.memory.buffers import Buffer

DEVICE_NBYTES = 64 << 20
"""Bytes of copies from a device in one batch; a quarter of this with ``progress``.

Copies within a device are batched only with ``progress``, as a batch takes no longer
than its events.
"""

_Batch = tuple[list[Event], list[tuple[int, int]]]
"""The events of a batch, and the byte ranges that are filled after them."""

Begun = Callable[["DeviceCopies | Copier"], object]
"""Called with the object that copies, so that it can be stopped or waited for."""


@dataclass(frozen=True, eq=False)
class CopyOptions:
    """How a publish fills its slot when a device makes the copies.

    :param buffer: the slot's memory, claimed; None for host memory, not to be pinned.
    :param hold: copy on the caller's stream; False: on a stream of the library.
    :param begun: called before the first copy, on the caller's thread.
    """

    buffer: Buffer | None = None
    hold: bool = True
    begun: Begun = lambda copies: None

    @property
    def device(self) -> str:
        """UUID of the slot's device; empty for host memory."""
        return self.buffer.device if self.buffer is not None else ""


class _DeviceSink:
    """Computes the digest of device memory on the device, once all bytes are there."""

    def __init__(self, accelerator: Accelerator, data: torch.Tensor, device: str, progress: Progress | None) -> None:
        """Begin with no byte arrived; start nothing.

        :param data: the memory to digest. :param device: UUID of its GPU.
        :param progress: called in :meth:`filled` and :meth:`finish`, with the number of
            bytes that have arrived from the start on; None: not reported.
        """
        self.digest: Future[str] = Future()
        self._accelerator = accelerator
        self._data: torch.Tensor | None = data
        self._device = device
        self._prefix = None if progress is None else Prefix(data.numel(), progress)

    def filled(self, start: int, end: int) -> None:
        """Count bytes ``start`` to ``end`` as arrived.

        May call the progress callback.
        """
        if self._prefix is not None:
            self._prefix.filled(start, end)

    def finish(self) -> None:
        """Report all bytes to the progress callback; then compute the digest.

        Called on the follower's thread after the last byte. Blocks until the device has
        computed it, and sets the future ``digest``.
        """
        if self._prefix is not None:
            self._prefix.finish()
        assert self._data is not None
        with self._accelerator.on_side_stream(self._device):
            digest = device_digest_of(self._data)
        self._data = None
        self.digest.set_result(digest)

    def close(self) -> None:
        """Drop the memory; if :meth:`finish` was not called, no digest will come."""
        self._data = None  # device memory lives as long as a tensor over it


class DeviceCopies:
    """Fills one run of bytes by device copies, in a ``with`` block on one thread.

    Has the methods of a :class:`Copier`. After an exception in the block, enqueued
    copies still end.

    :ivar copied: done when all bytes are copied; the result is the seconds for which
        the copies held the caller's stream. Fails if the device failed or the block
        raised. Set on the follower's thread, before the digest.
    :ivar ended: set after ``copied``, for waits that may be interrupted.
    """

    def __init__(
        self, accelerator: Accelerator, data: torch.Tensor, options: CopyOptions, progress: Progress | None = None
    ) -> None:
        """Start the follower thread, and call ``options.begun``; copy nothing yet.

        :param data: uint8, the run of bytes to fill.
        :param progress: called on the follower's thread, with the number of bytes
            filled from the start.
        """
        self.copied: Future[float] = Future()
        self.ended = Latch()
        self._accelerator = accelerator
        self._buffer = options.buffer
        self._device = options.device
        self._hold = options.hold
        self._aside_alone = False
        self._nbytes = data.numel()
        self._filled = 0
        self._sink: _DeviceSink | Copier
        if self._device:
            self._sink = _DeviceSink(accelerator, data, self._device, progress)
        else:
            self._sink = Copier(data, beside=True, progress=progress)  # hashes bytes as they arrive
        self.digest = self._sink.digest
        self._most = self.step_nbytes = DEVICE_NBYTES
        if not self._device:
            self._most = DEVICE_NBYTES if progress is None else DEVICE_NBYTES // 4
            self.step_nbytes = DEVICE_NBYTES // 4
        elif progress is None:
            self._most = self.step_nbytes = max(1, self._nbytes)
        self._starts: dict[str, Event] = {}
        self._ends: dict[str, Event] = {}
        self._last: dict[str, Event] = {}
        self._batch: list[tuple[int, int]] = []
        self._batch_nbytes = 0
        self._used: set[str] = set()
        self._batches: queue.SimpleQueue[_Batch | SyncError | None] = queue.SimpleQueue()
        threading.Thread(target=self._follow, name="replicas-copies", daemon=True).start()
        try:
            options.begun(self)
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {text_of(error)}")
            raise

    # ------------------------------------------------------------ the caller's thread

    def __enter__(self) -> DeviceCopies:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """After an error in the block, have the futures fail; else do nothing.

        Does not wait; enqueued copies go on.
        """
        if error is None:
            return
        try:
            with suppress(ReplicasError):  # a failed device
                self._end_batch()
        finally:
            self._give_up(f"{type(error).__name__}: {text_of(error)}")

    def abandon(self) -> None:
        """Have ``copied`` and ``digest`` fail with SyncError; any thread may call this.

        For a block that an interrupt has ended. Copies that are enqueued still run.
        """
        self._give_up("its block was left")

    def _give_up(self, why: str) -> None:
        """Have the follower's thread fail the futures: a SyncError that says
        ``why``."""
        self._batches.put(SyncError(f"given up: {why}", phase="pack", hint=""))

    def put(self, destination: torch.Tensor, source: torch.Tensor, start: int, end: int, name: str = "") -> None:
        """Enqueue the copy of one tensor on the current stream; it fills these bytes.

        ``source`` may be freed or written afterwards; one in host memory is copied
        before this returns. The stream may differ from call to call, as inside an
        iterator: each copy waits for the previous one.

        :param start: first byte of the run that is filled. :param end: one past the
            last.
        :param name: of the tensor, for errors.
        """
        uuid = self._accelerator.uuid_of(source)
        if uuid:
            for event in self._last.values():
                event.wait()
            self._enqueue([destination], [source], {uuid})
            for one in {uuid, self._device} - {""}:
                if one not in self._last:
                    self._last[one] = self._accelerator.event(one)
                self._last[one].record()
        else:
            self._copy_from_host([destination], [source], name)
        self._note(start, end)

    def run(self, steps: Iterable[Step]) -> None:
        """Enqueue the copies of all steps in order; copy sources in host memory here.

        The tensors must all exist already. Each step's bytes are counted for the
        digest.
        """
        known = list(steps)
        uuids = [list(map(self._accelerator.uuid_of, step.sources)) for step in known]
        used = {uuid for found in uuids for uuid in found}
        if "" in used:
            host = [pair for step, found in zip(known, uuids, strict=True) for pair in _pairs(step, found, host=True)]
            self._copy_from_host([one for one, _ in host], [one for _, one in host])
            used.discard("")
        self._aside_alone = not self._hold
        with nullcontext() if self._hold or not used else self._aside({*used, self._device} - {""}):
            try:
                for step, found in zip(known, uuids, strict=True):
                    if "" not in found:
                        self._enqueue(step.destinations, step.sources, set(found))
                    elif pairs := list(_pairs(step, found, host=False)):
                        self._enqueue([one for one, _ in pairs], [one for _, one in pairs], set(found) - {""})
                    self._note(step.start, step.end)
            finally:
                self._end_batch()  # here, so that its events are on the streams of the copies

    def written(self) -> None:
        """Count all bytes as filled by work that is enqueued on the current stream."""
        self._use({self._device or self._accelerator.device()})
        self._note(0, self._nbytes)

    def finish(self) -> None:
        """End the enqueueing; the follower then completes the futures. Does not wait.

        :raises ValueError: some bytes were not filled.
        """
        if self._filled != self._nbytes:
            raise ValueError(f"{self._nbytes - self._filled} bytes were not filled")
        self._end_batch()
        self._batches.put(None)

    def fence(self) -> None:
        """Make later work on this thread's current streams wait for the copies.

        The call does not block.
        """
        if not self.ended.is_set:  # else the follower has waited
            for event in list(self._ends.values()):
                event.wait()

    def _enqueue(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], uuids: set[str]) -> None:
        """Enqueue copies on the current streams of the devices ``uuids``.

        The slot's host memory is pinned before the first copy.
        """
        if not self._used and not self._ends and self._buffer is not None and not self._device:
            self._buffer.pin()  # not earlier: only now a device takes part
        self._use({*uuids, self._device} - {""})
        if self._aside_alone:
            self._accelerator.keep(sources)
        self._accelerator.copy(destinations, sources)

    def _copy_from_host(
        self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], name: str = ""
    ) -> None:
        """Copy sources in host memory to the slot, and wait.

        :param name: of the tensor, for errors.
        """
        if not self._device:
            pairs = [pair for pair in zip(destinations, sources, strict=True) if pair[1].numel()]
            copy_host(pairs, 1, lambda index: name, load=False)
            return
        assert self._buffer is not None
        for first, last in _groups(sources):
            private = Private(sources[first:last])  # another thread may free the sources
            try:
                private.copy()
            except MemoryMoved:
                raise unusable(name, sources[first]) from None
            with self._accelerator.on_side_stream(self._device):
                self._accelerator.copy(destinations[first:last], private.views)
                self._accelerator.synchronize(self._device)

    def _use(self, uuids: set[str]) -> None:
        """Note that these devices get work in this batch.

        On a device that is new, record the event from which the time is counted.
        """
        self._used |= uuids
        for uuid in uuids - self._starts.keys():
            self._starts[uuid] = event = self._accelerator.event(uuid, timing=True)
            event.record()

    def _aside(self, uuids: set[str]) -> ExitStack:
        """Make the library's own streams of these devices current on this thread.

        They wait for the enqueued work of the caller's streams. Closing the returned
        stack ends that.
        """
        before = {uuid: self._accelerator.event(uuid) for uuid in uuids}
        for event in before.values():
            event.record()
        with ExitStack() as stack:
            for uuid in sorted(uuids, key=lambda one: one == self._device):  # the slot's last, to stay current
                stack.enter_context(self._accelerator.on_side_stream(uuid))
                before[uuid].wait()
            return stack.pop_all()

    def _note(self, start: int, end: int) -> None:
        """Count bytes ``start`` to ``end`` as filled by the batch.

        The batch is the copies since the last events were recorded; end it if it is
        large.
        """
        self._batch.append((start, end))
        self._batch_nbytes += end - start
        self._filled += end - start
        if self._batch_nbytes >= self._most:
            self._end_batch()

    def _end_batch(self) -> None:
        """Record an event behind the batch's copies on each GPU's stream, and queue
        them for the thread that follows the copies. Does not block."""
        for last in self._last.values() if self._used else ():
            last.wait()
        for uuid in self._used:
            self._ends[uuid] = event = self._accelerator.event(uuid, timing=True)
            event.record()
        self._batches.put(([self._ends[uuid] for uuid in self._used], self._batch))
        self._batch, self._batch_nbytes, self._used = [], 0, set()

    # ------------------------------------------------------------ the follower's thread

    def _follow(self) -> None:
        """Wait for each batch and report its bytes; set the futures at the end.

        The follower thread's function. After a failure of the device the futures fail.
        """
        error: BaseException | None = None
        held_s = 0.0
        try:
            while isinstance(batch := self._batches.get(), tuple):
                for event in batch[0]:
                    event.synchronize()
                for extent in batch[1]:
                    self._sink.filled(*extent)
            error = batch
            if not self._aside_alone:  # aside, the caller's stream was not held
                held_s = max((self._ends[one].seconds_since(self._starts[one]) for one in self._ends), default=0.0)
        except BaseException as failure:  # noqa: BLE001  # waiters get it
            error = failure
        self._buffer = None  # its owner may close it from here on
        if error is not None:
            self._fail(error)
            return
        self.copied.set_result(held_s)
        self.ended.set()
        try:
            self._sink.finish()
        except BaseException as failure:  # noqa: BLE001  # as above
            self._fail(failure)
        finally:
            self._sink.close()

    def _fail(self, error: BaseException) -> None:
        """Fail the futures that are not done with ``error``; compute no digest."""
        self._sink.close()
        told = _typed(error)
        if not self.copied.done():
            self.copied.set_exception(told)
        self.ended.set()
        if not self.digest.done():
            self.digest.set_exception(told)


def _pairs(step: Step, uuids: Sequence[str], *, host: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield those (destination, source) pairs of a step that ``host`` selects.

    :param uuids: device of each source, "" for the host.
    :param host: True for sources in host memory, False for those on a device.
    """
    for destination, source, uuid in zip(step.destinations, step.sources, uuids, strict=True):
        if host is not bool(uuid):
            yield destination, source


def _groups(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) indices of groups of neighbours of about 64 MiB together."""
    first = nbytes = 0
    for number, tensor in enumerate(tensors):
        if number > first and nbytes + tensor.nbytes > DEVICE_NBYTES:
            yield first, number
            first, nbytes = number, 0
        nbytes += tensor.nbytes
    if first < len(tensors):
        yield first, len(tensors)


def _typed(error: BaseException) -> BaseException:
    """Return an error of torch as NoCapacity or WorldError; other errors unchanged."""
    if isinstance(error, torch.OutOfMemoryError):
        text = f"the digest of the version found no memory on the GPU: {error}"
        return NoCapacity(text, phase="pack", hint="it takes about 64 MiB: leave more of the GPU free")
    if isinstance(error, RuntimeError) and not isinstance(error, ReplicasError):
        text = f"copies on the GPU failed: {error}"
        return WorldError(text, phase="pack", hint="the CUDA context of this process is broken: restart the replica")
    return error

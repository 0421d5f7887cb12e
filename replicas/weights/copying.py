r"""Copying tensors into one run of bytes, and the digest of them.

Theory of operation
===================

The work is cut into :class:`Step`\ s of about :data:`STEP_NBYTES`, each of which fills
one run of bytes, and done by a :class:`~replicas.weights.copy_pool.CopyPool`. Every
block (of the digest) of which all bytes are filled may be hashed, by any helper and in
any order. The caller's thread hashes nothing (but a few MiB, which need no helper): it
goes on when the last byte is copied, and the digest follows.

Where there are three cores or more, a helper hashes a block as soon as it is filled.
Two cores copy at twice the speed of one, so that a helper which hashes meanwhile holds
the caller: on two quiet cores, 269 MB that a plain copy moves in 17 ms held it for 32
ms with the digest beside them, and for 20 ms with the digest behind them. There the
digest waits until the last byte is copied; then as many threads as there are cores
hash, and the caller need not wait for them.

Tensors on a device go another way (:mod:`replicas.weights.devices.device_copies`); here
only :func:`copy_pairs` copies them, on the caller's current stream, and waits. On a
kind of device that is no :class:`~replicas.weights.devices.accelerator.Accelerator`
they are copied by the caller's thread, with one synchronisation for each batch.

The steps are begun in the order of their bytes, so that what is filled grows from the
start: whoever sends it meanwhile is told how far it goes without a hole
(:class:`Prefix`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

import torch
import xxhash

from replicas.common.waits import locked
from replicas.weights import streaming
from replicas.weights.copy_pool import ALONE_NBYTES, CopyPool, cores, helpers_for
from replicas.weights.devices.accelerator import Accelerator, accelerator
from replicas.weights.digest import BLOCK_NBYTES, combined

__all__ = [
    "PROGRESS_NBYTES",
    "STEP_NBYTES",
    "Copier",
    "Prefix",
    "Progress",
    "Runs",
    "Step",
    "copy_pairs",
    "wait_for_devices",
]

STEP_NBYTES = 4 << 20
"""About how much one step copies: with 1 MiB two threads were a fifth slower, with 16
MiB no faster."""
DEVICE_NBYTES = 64 << 20
"""Copies from a device are waited for when this much is under way, or a quarter of it
when somebody is told of progress; copies within a device only when somebody is told."""
PROGRESS_NBYTES = 8 << 20
"""Progress is told when it is this much: as much as a sender sends at once."""

Progress = Callable[[int], None]
"""Told from time to time how many bytes are filled from the start on, and in the end
that all are. On whatever thread copies, one call at a time, with a lock held: it must
not wait."""


@dataclass(frozen=True, eq=False)
class Step:
    """Copy ``sources`` to ``destinations``, one to one; together they fill the bytes
    from ``start`` to ``end``."""

    start: int
    end: int
    destinations: list[torch.Tensor]
    sources: list[torch.Tensor]

    def run(self, *, past_caches: bool = False) -> None:
        """On the CPU; values are cast where dtypes differ. ``past_caches``: as
        :func:`streaming.pays` says of the whole."""
        streaming.copy_all(self.destinations, self.sources, past_caches=past_caches)

    def begin(self) -> None:
        """From or to a device, on the current stream; values are cast where dtypes
        differ."""
        with torch.no_grad():
            torch._foreach_copy_(self.destinations, self.sources, True)


@dataclass(frozen=True, eq=False)
class Runs:
    """Copy runs of bytes of host memory, which are just the bytes from ``start`` to
    ``end``."""

    start: int
    end: int
    to: streaming.Addresses
    sources: streaming.Addresses
    sizes: streaming.Addresses

    def run(self, *, past_caches: bool = False) -> None:
        """``past_caches``: as :func:`streaming.pays` says of the whole."""
        streaming.copy_runs(self.to, self.sources, self.sizes, past_caches=past_caches)


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for what the current streams of this thread have under way, on the devices
    of these tensors."""
    for device in {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}:
        torch.accelerator.current_stream(device).synchronize()


def copy_pairs(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    sharing: int = 1,
    on_device: Callable[[], object] = lambda: None,
) -> None:
    """Copy to the first tensor of each pair the second, of the same shape; values are
    cast where dtypes differ.

    As many threads as pay copy what lies on the CPU; this one alone, on its current
    streams, what lies on a device. All is copied on return.

    :param sharing: how many processes of this machine are known to do this at the same
        time.
    :param on_device: called before the first copy from or to a device: to pin host
        memory.
    """
    device = accelerator()
    enqueued: list[tuple[torch.Tensor, torch.Tensor]] = []
    batches: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    elsewhere: list[torch.Tensor] = []
    nbytes = room = 0
    with torch.no_grad():
        for destination, source in pairs:
            if not destination.numel():
                continue
            if device is not None and (device.owns(destination) or device.owns(source)):
                enqueued.append((destination, source))
                continue
            if not (destination.is_cpu and source.is_cpu):
                with streaming.writing((destination,)):
                    destination.copy_(source, non_blocking=True)
                elsewhere += (destination, source)
                continue
            nbytes += destination.nbytes
            for part, taken in _parts(destination, source):
                if part.nbytes > room:
                    batches.append(([], []))
                    room = STEP_NBYTES
                room -= part.nbytes
                batches[-1][0].append(part)
                batches[-1][1].append(taken)
    used: set[str] = set()
    if device is not None and enqueued:
        on_device()
        used = _enqueue(device, enqueued)
    owner = _Caller()
    crew = CopyPool(helpers_for(nbytes, sharing), owner=owner)
    try:
        inference = any(any(map(torch.Tensor.is_inference, destinations)) for destinations, _ in batches)
        copy = functools.partial(streaming.copy_all, past_caches=streaming.pays(nbytes), inference=inference)
        crew.run([functools.partial(copy, *batch) for batch in batches])
    finally:
        crew.close()
        if device is not None:
            for uuid in used:
                device.synchronize(uuid)
    wait_for_devices(elsewhere)


class _Caller:
    """Lives as long as the call."""


def _enqueue(device: Accelerator, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> set[str]:
    """Enqueue the copies; the devices whose current streams have to be waited for."""
    destinations, sources = [one for one, _ in pairs], [one for _, one in pairs]
    with streaming.writing(destinations):
        device.copy(destinations, sources)
    return {uuid for tensor in (*destinations, *sources) if (uuid := device.uuid_of(tensor))}


def _parts(destination: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A large pair in rows of its first axis that has more than one index."""
    axis = next((axis for axis, extent in enumerate(destination.shape) if extent > 1), None)
    if destination.nbytes <= STEP_NBYTES or axis is None:
        yield destination, source
        return
    extent = destination.shape[axis]
    rows = max(1, STEP_NBYTES * extent // destination.nbytes)
    for row in range(0, extent, rows):
        count = min(rows, extent - row)
        yield destination.narrow(axis, row, count), source.narrow(axis, row, count)


class Prefix:
    """How many of ``nbytes`` bytes are filled from the start on without a hole; tells
    ``progress``. One call at a time."""

    def __init__(self, nbytes: int, progress: Progress) -> None:
        self._nbytes = nbytes
        self._progress = progress
        self._end = 0
        self._told = 0
        self._ahead: dict[int, int] = {}

    def filled(self, start: int, end: int) -> None:
        """These bytes are filled, each once."""
        if start == end:
            return
        self._ahead[start] = end
        while (further := self._ahead.pop(self._end, None)) is not None:
            self._end = further
        if self._end - self._told >= PROGRESS_NBYTES and self._end < self._nbytes:
            self._told = self._end
            self._progress(self._end)

    def finish(self) -> None:
        """All are filled, and nothing can go wrong any more."""
        self._progress(self._nbytes)


class Copier:
    """Fills one run of bytes. Use it in a ``with`` block: an exception stops the
    helpers and cancels the digest.

    One whose block was left without a word (an interrupt at its very end) is to be
    stopped by :meth:`close`, from any thread, before its memory is given away.

    :param data: uint8, one-dimensional, contiguous, on the CPU: what the steps fill,
        each byte once.
    :param helpers: threads beside the caller's; None: what :func:`helpers_for` says,
        and at least one for the digest.
    :param beside: hash while the copying goes on; None: when there are two helpers or
        more.
    :param progress: told how far ``data`` is filled from its start.
    :param begun: called with it before the first helper is there.
    :ivar step_nbytes: how large steps should be.
    :ivar digest: of all of ``data``, once :meth:`finish` was called; set on a helper's
        thread.
    """

    step_nbytes = STEP_NBYTES

    def __init__(
        self,
        data: torch.Tensor,
        *,
        helpers: int | None = None,
        beside: bool | None = None,
        progress: Progress | None = None,
        begun: Callable[[Copier], object] = lambda copier: None,
    ) -> None:
        nbytes = data.numel()
        if helpers is None:
            helpers = max(helpers_for(nbytes), int(nbytes >= ALONE_NBYTES))
        self.digest: Future[str] = Future()
        self._bytes: memoryview | None = data.numpy().data
        """Until nobody asks for more of it: the crew and this one refer to each other,
        and would keep it alive."""
        self._past_caches = streaming.pays(nbytes)
        self._beside = helpers > 1 if beside is None else beside
        self._unfilled = [min(BLOCK_NBYTES, nbytes - start) for start in range(0, nbytes, BLOCK_NBYTES)]
        self._blocks = [b""] * len(self._unfilled)
        self._ready: list[int] = []
        self._unhashed = len(self._blocks)
        self._finished = False
        self._prefix = None if progress is None else Prefix(nbytes, progress)
        self._crew = CopyPool(0, self._chore)
        begun(self)
        self._crew.grow(helpers)

    def __enter__(self) -> Copier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nobody writes to the memory any more on return. What is finished goes on; the
        rest is given up."""
        locked(self._crew.lock, self._give_up)
        self._crew.close()

    def _give_up(self) -> None:
        if not self._finished:
            self._ready.clear()
            self.digest.cancel()
            self._bytes = None

    def run(self, steps: Iterable[Step | Runs]) -> None:
        """Do all steps, begun in this order; returns when they are copied. CPU tensors
        only."""
        self._crew.run([functools.partial(self._copy, step) for step in steps])

    def run_here(self, steps: Iterable[Step]) -> None:
        """Like :meth:`run`, on this thread alone and in order: for tensors of a
        device."""
        waiting: list[Step] = []
        nbytes, most = 0, DEVICE_NBYTES if self._prefix is None else DEVICE_NBYTES // 4
        for step in steps:
            step.begin()
            waiting.append(step)
            nbytes += step.end - step.start
            if nbytes >= most:
                self._arrived(waiting)
                nbytes = 0
        self._arrived(waiting)

    def put(self, destination: torch.Tensor, source: torch.Tensor, start: int, end: int) -> None:
        """Copy one tensor here and now, from wherever it is; it fills the bytes from
        ``start`` to ``end``."""
        destination.copy_(source)
        self.filled(start, end)

    def written(self) -> None:
        """All bytes are there."""
        self.filled(0, sum(self._unfilled))

    def filled(self, start: int, end: int) -> None:
        """These bytes are filled."""
        locked(self._crew.lock, self._fill, start, end)

    def _fill(self, start: int, end: int) -> None:
        if self._prefix is not None:
            self._prefix.filled(start, end)
        while start < end:
            block = start // BLOCK_NBYTES
            stop = min(end, (block + 1) * BLOCK_NBYTES)
            self._unfilled[block] -= stop - start
            start = stop
            if not self._unfilled[block]:
                self._ready.append(block)
                if self._beside:
                    self._crew.changed.notify()

    def finish(self) -> None:
        """Everything is filled: the digest comes by itself from here.

        :raises ValueError: some bytes were never filled.
        """
        locked(self._crew.lock, self._finish)
        if not self._blocks:
            self._bytes = None
            self.digest.set_result(combined(()))
        elif not self._crew.helpers:
            while (chore := self._chore()) is not None:
                chore()

    def _finish(self) -> None:
        if any(self._unfilled):
            raise ValueError(f"{sum(self._unfilled)} bytes were not filled")
        if self._prefix is not None:
            self._prefix.finish()
        self._finished = True
        self._crew.changed.notify_all()

    def _copy(self, step: Step | Runs) -> None:
        step.run(past_caches=self._past_caches)
        self.filled(step.start, step.end)

    def _arrived(self, waiting: list[Step]) -> None:
        wait_for_devices(source for step in waiting for source in step.sources)
        for step in waiting:
            self.filled(step.start, step.end)
        waiting.clear()

    def _chore(self) -> Callable[[], None] | None:
        """A block to hash; called with the lock held."""
        if self._bytes is not None and self._ready and (self._finished or self._beside):
            block = self._ready.pop(0)
            return functools.partial(self._hash, block, self._bytes[block * BLOCK_NBYTES : (block + 1) * BLOCK_NBYTES])
        return None

    def _grow(self) -> None:
        """The caller is gone: one more helper may use its core. Not started by the
        caller, who would wait for it."""
        more = locked(self._crew.lock, self._idle_cores)
        if more > 0:
            self._crew.grow(more)

    def _idle_cores(self) -> int:
        return cores() - self._crew.helpers if self._crew.helpers and self._finished and self._ready else 0

    def _hash(self, block: int, data: memoryview) -> None:
        try:
            self._grow()
            self._blocks[block] = xxhash.xxh3_128_digest(data)
        except Exception as error:  # noqa: BLE001  # whoever waits for the digest is told; an interrupt is its caller's
            self.digest.set_exception(error)
            return
        del data
        if locked(self._crew.lock, self._hashed) and self.digest.set_running_or_notify_cancel():
            self.digest.set_result(combined(self._blocks))

    def _hashed(self) -> bool:
        """One more block is; whether that was the last one."""
        self._unhashed -= 1
        if not self._unhashed:
            self._bytes = None
        return not self._unhashed

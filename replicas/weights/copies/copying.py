r"""Copies tensors into one run of bytes and computes the digest of that run.

Theory of operation
===================

A copy is cut into steps of about 4 MiB for each thread; each fills one run of bytes.
Threads in C copy bytes with the GIL held
(:mod:`replicas.weights.copies.host_copies`); a
:class:`~replicas.weights.copies.copy_pool.CopyPool` runs the copies by torch. Any
helper of that pool hashes any digest block whose bytes are all filled, in any order.
The caller's thread hashes only a few MiB, which need no helper: it continues when the
last byte is copied, and the digest follows.

With three cores or more, a helper hashes a block as soon as it is filled. With two,
hashing beside the copy slows the caller: 269 MB took 17 ms to copy, 32 ms with the
digest beside the copy, 20 ms with the digest after it. There the digest waits until the
last byte is copied; then as many threads as there are cores hash.

:mod:`replicas.weights.devices.device_copies` copies tensors on a GPU; here only
:func:`copy_pairs` and :func:`copy_elements` do, on the caller's current stream, and
wait. On a device without an :class:`~replicas.weights.copies.accelerator.Accelerator`
the caller's thread copies, and synchronises after each step.

Steps begin in the order of their bytes, so the filled bytes grow from the start of the
run. A sender that streams them meanwhile gets the length of the prefix without holes
(:class:`Prefix`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xxhash

from replicas.common.waits import locked
from replicas.weights.copies import streaming
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.copies.copy_pool import ALONE_NBYTES, CopyPool, cores, helpers_for, run_all
from replicas.weights.copies.digest import BLOCK_NBYTES, combined
from replicas.weights.copies.host_copies import STEP_NBYTES, Cut, HostCopies, Kinds, cuts_of, unusable
from replicas.weights.copies.tensors import why_unusable, written_as_bits

PROGRESS_NBYTES = 8 << 20
"""Bytes between two calls of ``progress``: as much as a sender sends in one call."""

Progress = Callable[[int], None]
"""Called repeatedly with the number of bytes filled from the start, at last with all.

Runs on any copying thread, one call at a time, with a lock held: it must not wait.
"""


@dataclass(frozen=True, eq=False)
class Step:
    """A copy of ``sources`` to ``destinations`` that fills ``start`` to ``end``."""

    start: int
    end: int
    destinations: list[torch.Tensor]
    sources: list[torch.Tensor]


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Block until this thread's current streams on the tensors' devices are done."""
    for device in {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}:
        torch.accelerator.current_stream(device).synchronize()


def copy_pairs(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    sharing: int = 1,
    on_device: Callable[[], object] = lambda: None,
    name: Callable[[int], str] = str,
) -> None:
    """Copy the second tensor of each pair to the first, of the same shape, with casts.

    Several threads copy tensors on the CPU; this thread copies those on a device, on
    its current streams, after a call of ``on_device``, which may pin host memory. Waits
    for all copies.

    :param sharing: processes of this host that copy at the same time.
    :param name: returns the name of a pair by number, for errors.
    :raises ManifestMismatch: the memory of the first of a pair was freed.
    """
    device = accelerator()
    enqueued: list[tuple[torch.Tensor, torch.Tensor]] = []
    here: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    elsewhere: list[torch.Tensor] = []
    for number, (destination, source) in enumerate(pairs):
        if not destination.numel():
            continue
        if device is not None and (device.owns(destination) or device.owns(source)):
            enqueued.append((destination, source))
        elif destination.is_cpu and source.is_cpu:
            here[number] = destination, source
        else:
            with streaming.writing((destination,)):
                destination.copy_(source, non_blocking=True)
            elsewhere += (destination, source)
    used: set[str] = set()
    if device is not None and enqueued:
        on_device()
        destinations, sources = [one for one, _ in enqueued], [one for _, one in enqueued]
        with streaming.writing(destinations):
            device.copy(destinations, sources)
        used = {uuid for tensor in (*destinations, *sources) if (uuid := device.uuid_of(tensor))}
    try:
        numbers = list(here)
        copy_host([(to, source) for to, source in here.values()], sharing, lambda index: name(numbers[index]))
    finally:
        if device is not None:
            for uuid in used:
                device.synchronize(uuid)
    wait_for_devices(elsewhere)


def put_elements(destination: torch.Tensor, source: torch.Tensor, positions: torch.Tensor) -> None:
    """Copy the elements at ``positions`` of source to the same ones of destination.

    Both are contiguous; the positions count in the flattened tensor. On a device the
    copy is only enqueued, on the current stream.
    """
    device = destination.device
    values = source.view(-1).index_select(0, positions).to(device, destination.dtype)
    with streaming.writing((destination,)):
        destination.view(-1).index_copy_(0, positions.to(device), values)


def copy_host(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    sharing: int = 1,
    name: Callable[[int], str] = str,
    *,
    load: bool = True,
) -> None:
    """Copy (destination, source) pairs on the CPU, with several threads; wait.

    :param pairs: none of the tensors may be empty.
    :param sharing: processes of this host that copy at the same time.
    :param name: returns the name of a pair by number, for errors.
    :param load: True if the destinations are the user's tensors, False if the sources
        are. The user's tensors are checked, and named in errors.
    :raises ManifestMismatch: a user's tensor has no memory.
    """
    if not pairs:
        return
    tensors, ours = [pair[not load] for pair in pairs], [pair[load] for pair in pairs]
    kinds = Kinds.of(tensors, [one.dtype for one in ours])
    # our side, too, must be one run of plain bytes
    kinds.kept &= np.array(
        [one.is_contiguous() and not (one.is_neg() or one.is_conj()) for one in ours], dtype=np.bool_
    )
    found = kinds.find_memory(tensors)
    if found is None:
        index = next((index for index, one in enumerate(tensors) if why_unusable(one)), 0)
        raise unusable(name(index), tensors[index])
    addresses = np.array([one.data_ptr() for one in ours], dtype=np.uintp)
    ends = np.cumsum(kinds.sizes)
    starts = (ends - kinds.sizes).tolist()
    copies = HostCopies(found, kinds, addresses, starts, ours.__getitem__, load=load, name=name)
    run_host(copies, partial(cuts_of, starts, ends.tolist(), kinds.shapes), sum(kinds.sizes.tolist()), sharing)


def run_host(copies: HostCopies, cuts: Callable[[int], list[Cut]], nbytes: int, sharing: int = 1) -> None:
    """Copy all cuts (steps) of ``copies``, with as many threads as pay, and wait.

    :param cuts: returns cuts of about the given size.
    :param nbytes: of all cuts together.
    :param sharing: processes of this host that copy at the same time.
    """
    helpers, past_caches = helpers_for(nbytes, sharing), streaming.bypasses_caches(nbytes)
    if copies.runs:
        copies.run(cuts(STEP_NBYTES * (helpers + 1)), threads=helpers + 1, past_caches=past_caches)
        return
    run_all(copies.tasks(cuts(STEP_NBYTES), past_caches=past_caches), helpers, owner=_Caller())


class _Caller:
    """The pool's owner, which is freed when the call ends in any way."""


def copy_elements(destination: torch.Tensor, source: torch.Tensor, *, load: bool = False, name: str = "0") -> None:
    """Copy values of any dtype, device and strides, with casts, and wait.

    :param load: True if the destination is the user's tensor, which is checked; False
        if the source is. :param name: of the user's tensor, for errors.
    :raises ManifestMismatch: shapes differ, or the user's tensor has no memory.
    """
    device = accelerator()
    tensor = destination if load else source
    if destination.shape != source.shape:
        raise unusable(name, tensor, f"has shape {list(tensor.shape)}")
    if not destination.numel():
        return
    uuid = "" if device is None else device.uuid_of(source) or device.uuid_of(destination)
    if not uuid and destination.is_cpu and source.is_cpu:
        if not _copy_quickly(destination, source, load=load):
            copy_host([(destination, source)], name=lambda index: name, load=load)
        return
    if why_unusable(tensor):
        raise unusable(name, tensor)
    with torch.no_grad():
        if destination.dtype == source.dtype:
            destination, source = written_as_bits(destination, source)
        if device is not None and uuid:
            device.copy([destination], [source])
            device.synchronize(uuid)
        else:
            destination.copy_(source)


def _copy_quickly(destination: torch.Tensor, source: torch.Tensor, *, load: bool) -> bool:
    """Copy source to destination on this thread, if both are a small run of bytes.
    Return False, having copied nothing, if not, or if the user's tensor has moved.

    :param load: True if the destination is the user's tensor; False if the source is.
    """
    nbytes = destination.nbytes
    tensor = destination if load else source
    if not (
        streaming.available
        and nbytes <= STEP_NBYTES
        and destination.dtype == source.dtype
        and destination.is_contiguous()
        and source.is_contiguous()
        and not (source.is_neg() or source.is_conj() or destination.is_neg() or destination.is_conj())
        and not (load and destination.is_inference())
    ):
        return False
    needed = tensor.storage_offset() * tensor.itemsize + nbytes
    table = np.array([destination.data_ptr(), source.data_ptr(), nbytes, needed], dtype=np.uintp)
    to, sources, sizes, most = table[0:1], table[1:2], table[2:3], table[3:4]
    try:
        streaming.copy_runs(streaming.still_there([tensor], to if load else sources, most), to, sources, sizes)
    except streaming.MemoryMoved:
        return False
    if load:
        torch.autograd.graph.increment_version([destination])  # as every write of torch's own does
    return True


class Prefix:
    """Counts the bytes filled from the start without a hole, and reports the count."""

    def __init__(self, nbytes: int, progress: Progress) -> None:
        """Begin with none of the ``nbytes`` bytes filled.

        :param progress: called with the count every 8 MiB, and at last with all.
        """
        self._nbytes = nbytes
        self._progress = progress
        self._end = 0
        self._told = 0
        self._ahead: dict[int, int] = {}

    def filled(self, start: int, end: int) -> None:
        """Count bytes ``start`` to ``end`` as filled. Report the bytes filled from the
        start if these are 8 MiB more than last time."""
        if start == end:
            return
        self._ahead[start] = end
        while (further := self._ahead.pop(self._end, None)) is not None:
            self._end = further
        if self._end - self._told >= PROGRESS_NBYTES and self._end < self._nbytes:  # finish() reports the last byte
            self._told = self._end
            self._progress(self._end)

    def finish(self) -> None:
        """Report all bytes, after all steps have succeeded."""
        self._progress(self._nbytes)


class Copier:
    """Copies tensors into one run of bytes, by threads, and computes its digest.

    Leaving its ``with`` block by an exception ends the helpers and cancels the digest.
    If an interrupt skips that, call :meth:`close` before reusing the memory.

    :ivar digest: of ``data``, set on a helper's thread after :meth:`finish`.
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
        """Start the helper threads, which wait for work.

        :param data: uint8, one-dimensional, contiguous, on the CPU; steps fill it.
        :param helpers: threads beside the caller's; by default as many as pay.
        :param beside: hash while copying; by default with two or more helpers.
        :param progress: called on any copying thread with the bytes filled so far.
        :param begun: called with this copier before its first helper starts.
        """
        nbytes = data.numel()
        if helpers is None:
            helpers = max(helpers_for(nbytes), int(nbytes >= ALONE_NBYTES))  # one at least, to hash large data
        self.digest: Future[str] = Future()
        self._bytes: memoryview | None = data.numpy().data
        """Dropped after its last use, or the cycle of pool and copier would keep it."""
        self._past_caches = streaming.bypasses_caches(nbytes)
        self._beside = helpers > 1 if beside is None else beside
        self._threads = max(1, helpers + 1 - self._beside)  # one of them hashes
        self._unfilled = [min(BLOCK_NBYTES, nbytes - start) for start in range(0, nbytes, BLOCK_NBYTES)]
        self._blocks = [b""] * len(self._unfilled)
        self._ready: list[int] = []
        self._unhashed = len(self._blocks)
        self._finished = False
        self._prefix = None if progress is None else Prefix(nbytes, progress)
        self._pool = CopyPool(0, self._chore)
        begun(self)  # before threads start, so that the caller can close it
        self._pool.grow(helpers)

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the copying threads, and wait; cancel an unfinished copy's digest."""
        self.close()

    def close(self) -> None:
        """Stop the copying threads, and wait; cancel an unfinished copy's digest."""
        locked(self._pool.lock, self._give_up)
        self._pool.close()

    def _give_up(self) -> None:
        """Cancel the digest, unless the copy has finished. Needs the lock."""
        if not self._finished:
            self._ready.clear()
            self.digest.cancel()
            self._bytes = None

    def run_host(self, copies: HostCopies, cuts: Callable[[int], list[Cut]]) -> None:
        """Copy all cuts, begun in order, on all threads; wait for the copies.

        :param cuts: returns cuts (steps) of about the given number of bytes.
        """
        done, past_caches = self.filled, self._past_caches
        if copies.runs:
            copies.run(cuts(STEP_NBYTES * self._threads), self._threads, past_caches=past_caches, done=done)
        else:
            self._pool.run(copies.tasks(cuts(STEP_NBYTES), past_caches=past_caches, done=done))

    def run_here(self, steps: Iterable[Step]) -> None:
        """Copy all steps on this thread, in order; for tensors on a device."""
        for step in steps:
            with torch.no_grad():
                torch._foreach_copy_(step.destinations, step.sources, True)
            wait_for_devices(step.sources)
            self.filled(step.start, step.end)

    def put(self, destination: torch.Tensor, source: torch.Tensor, start: int, end: int, name: str = "") -> None:
        """Copy ``source`` to ``destination`` on this thread; it fills the bytes
        ``start`` to ``end``. ``name``: of the tensor, for errors."""
        copy_elements(destination, source, name=name)
        self.filled(start, end)

    def written(self) -> None:
        """Count all bytes as filled, because an earlier writer has filled them."""
        self.filled(0, sum(self._unfilled))

    def filled(self, start: int, end: int) -> None:
        """Count bytes ``start`` to ``end`` as filled; queue full blocks for hashing."""
        locked(self._pool.lock, self._fill, start, end)

    def _fill(self, start: int, end: int) -> None:
        """Count the bytes as filled; queue full blocks for hashing. Needs the lock."""
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
                    self._pool.changed.notify()

    def finish(self) -> None:
        """End the copy; raise ValueError for unfilled bytes. Helper threads then
        compute the digest; without helpers this call does, and blocks."""
        locked(self._pool.lock, self._finish)
        if not self._blocks:
            self._bytes = None
            self.digest.set_result(combined(()))
        elif not self._pool.helpers:  # hash on this thread
            while (chore := self._chore()) is not None:
                chore()

    def _finish(self) -> None:
        """Report the last byte and start the rest of the hashing. Needs the lock.

        :raises ValueError: some bytes were not filled.
        """
        if any(self._unfilled):
            raise ValueError(f"{sum(self._unfilled)} bytes were not filled")
        if self._prefix is not None:
            self._prefix.finish()
        self._finished = True
        self._pool.changed.notify_all()

    def _chore(self) -> Callable[[], None] | None:
        """Return a function that hashes a filled block, or None. Needs the lock."""
        if self._bytes is not None and self._ready and (self._finished or self._beside):
            block = self._ready.pop(0)
            return functools.partial(self._hash, block, self._bytes[block * BLOCK_NBYTES : (block + 1) * BLOCK_NBYTES])
        return None

    def _idle_cores(self) -> int:
        """Return how many threads to add for hashing; 0 while the copy is under way."""
        return cores() - self._pool.helpers if self._pool.helpers and self._finished and self._ready else 0

    def _hash(self, block: int, data: memoryview) -> None:
        """Hash one block (``data``) of this number; set the digest after the last."""
        try:
            if (more := locked(self._pool.lock, self._idle_cores)) > 0:  # not in finish(), where the caller would wait
                self._pool.grow(more)
            self._blocks[block] = xxhash.xxh3_128_digest(data)
        except Exception as error:  # noqa: BLE001  # the digest raises it; interrupts reach the caller's thread
            self.digest.set_exception(error)
            return
        del data  # or this thread would keep the slot's memory
        if locked(self._pool.lock, self._hashed) and self.digest.set_running_or_notify_cancel():
            self.digest.set_result(combined(self._blocks))

    def _hashed(self) -> bool:
        """Count a hashed block; return True after the last one. Needs the lock."""
        self._unhashed -= 1
        if not self._unhashed:
            self._bytes = None
        return not self._unhashed

"""Memory that grows while weights come, for a publish of which nothing is known beforehand.

Theory of operation
===================

A plain iterable says neither how many tensors it has nor how large they are: its manifest, and so the length of the header
and the place of each tensor, is known when it has ended. Until then each tensor is written where it will mostly stay.

A :class:`Run` is a memfd that grows. Its pages are made in steps, each as in
:meth:`~replicas.weights.buffers.Buffer.allocate`: first it is asked what the machine and the cgroup leave, then the pages are
allocated, then mapped. The file is longer than that, but for a hole, so that the mapping has to grow only when it doubles; it
may move then (``mremap``), therefore no view of it outlives a call.

An image has its tensors by falling item size, then in the order in which they came. So there is one run for each item size
(for nearly all models: one), and within it every tensor is in its final order. At the end (:meth:`Growing.finish`) the file
of the largest run becomes the image: its bytes are moved within it, by what comes before them (269 MB: 20 ms; not at all
when the length of the header was guessed right, as it is for a few tensors, and for the same weights as last time). The
other runs are copied into it by a few megabytes at a time, and what was copied is given back at once, by a hole that is
punched: never are the weights there twice. Should much come before the largest run, to make room for it would take as much
memory again; then the file of the first run is taken, and all others are copied behind it. In the end the header is written
and the file is cut to the length of the image.

It may begin in memory that the arena has already (a slot's old buffer, a spare one), which is warm. Somebody may still have
an old mapping of that at which he does not look (a sidecar, a digest that nobody waits for), so such a file is never made
shorter: to touch what was cut off would be a SIGBUS. It becomes the image when that is as long or longer, else it is copied
into a new file like any other run.

When anything fails, all pages are given back before the error goes on, also those that are still mapped because a frame of
its traceback has a view of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from types import TracebackType

import torch

from replicas.core.manifest import ALIGNMENT_NBYTES, PartManifest, item_nbytes
from replicas.errors import NoCapacity
from replicas.weights.buffers import Buffer
from replicas.weights.capacity import check_capacity
from replicas.weights.feed import Feed
from replicas.weights.layout import Entry, copy_elements, layout
from replicas.weights.mappings import bytes_of, populate, reopen
from replicas.weights.tensors import torch_dtype, typed

__all__ = ["Growing", "Run"]

STEP_NBYTES = 16 << 20
"""So many pages are made at a time: at most this much, or a quarter of what is there, more than is needed."""
CHUNK_NBYTES = 16 << 20
"""So much is copied from one file to another at a time."""
ROOM_NBYTES = 64 << 20
"""A run takes no more than this of new memory to make room for others in front of it."""
_FIRST_NBYTES = 1 << 20
_MAPPED_NBYTES = 64 << 20

_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Run:
    """One file that grows, and tensors that lie in it one behind the other.

    :param name: shown with its memory in ``/proc/PID/maps``.
    :param start: where its data begins in the file.
    :param buffer: claimed memory to begin with, which is used up; None: a new file.
    :param more: called when memory is short; whether there may be more now.
    :ivar end: where its data ends.
    :ivar least_nbytes: the file must not become shorter than this.
    """

    def __init__(self, name: str, start: int, buffer: Buffer | None = None, more: Callable[[], bool] = bool) -> None:
        self._fd = -1
        self._pid = os.getpid()
        self.start = self.end = start
        self.least_nbytes = self._nbytes = 0 if buffer is None else buffer.nbytes
        self._name = name
        self._more = more
        self._there = _pages(self._nbytes)
        self._mapping: mmap.mmap | None = None
        self._data = torch.empty(0, dtype=torch.uint8)
        self._serial = 0 if buffer is None else buffer.serial
        if buffer is None:
            self._fd = os.memfd_create(name[:200], os.MFD_CLOEXEC)
        else:
            self._fd, self._data = buffer.hand_over()

    @property
    def nbytes(self) -> int:
        """Of its data."""
        return self.end - self.start

    def missing(self, end: int) -> int:
        """How much memory the bytes up to ``end`` would still take."""
        return max(0, end - self._there)

    def view(self, start: int, end: int) -> torch.Tensor:
        """A view of these bytes of the file, which have been reserved. Not to be kept."""
        return self._data[start:end]

    def append(self, tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> None:
        """Copy ``tensor``, cast to ``dtype``, behind what is there.

        :raises NoCapacity: see :meth:`reserve`.
        """
        end = self.end + tensor.numel() * item_nbytes(dtype)
        self.reserve(end, ahead=min(STEP_NBYTES, max(_FIRST_NBYTES, self._nbytes // 4)))
        copy_elements(typed(self._data, self.end, torch_dtype(dtype), shape), tensor)
        self.end = end

    def reserve(self, end: int, *, ahead: int = 0) -> None:
        """Make the pages up to byte ``end``, and when some are missing also those of the next ``ahead`` bytes, if they fit.

        :raises NoCapacity: the machine or the cgroup has not so much left.
        """
        if end <= self._nbytes:
            return
        most = _pages(end + ahead)
        try:
            self._make(min(most, self._there) if end <= self._there else most)
        except NoCapacity:
            if not (self._more() or ahead):
                raise
            self._make(_pages(end))

    def shift(self, start: int) -> None:
        """Move the data so that it begins at ``start``."""
        end = start + self.nbytes
        self.reserve(end)
        if self.nbytes and start != self.start:
            address = self._data.data_ptr()
            ctypes.memmove(address + start, address + self.start, self.nbytes)
        self.start, self.end = start, end

    def take(self, other: Run, start: int) -> None:
        """Copy the data of ``other`` to ``start``; the memory of ``other`` is given back meanwhile."""
        for begin in range(other.start, other.end, CHUNK_NBYTES):
            chunk = other.view(begin, min(begin + CHUNK_NBYTES, other.end))
            to = start + begin - other.start
            self.reserve(to + chunk.numel())
            self.view(to, to + chunk.numel()).copy_(chunk)
            other._punch(begin, chunk.numel())
        other.close()

    def finish(self, header: bytes, nbytes: int) -> Buffer:
        """Write ``header`` to the front and cut the file to ``nbytes``: it is an ordinary buffer now, and claimed."""
        self.reserve(nbytes)
        if header:
            self.view(0, len(header)).copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if self._data.numel() != nbytes:
            self._resize(nbytes)
        fd, self._fd = self._fd, -1
        buffer = Buffer.grown(fd, self._data, self._serial)
        self._forget()
        return buffer

    def close(self) -> None:
        """Give its memory back, also where it is still mapped."""
        if self._fd >= 0:
            if self._pid == os.getpid():  # it is not a forked child's to give back
                self._punch(0, os.fstat(self._fd).st_size)
            os.close(self._fd)
            self._fd = -1
            self._forget()

    def __del__(self) -> None:
        self.close()

    def _make(self, nbytes: int) -> None:
        """Make and map the pages up to byte ``nbytes``."""
        what = f"the buffer {self._name!r}, which grows with the weights and has {self._nbytes} bytes so far,"
        try:
            while self._nbytes < nbytes:
                # What was there before is not mapped yet in a mapping that is made now.
                start = 0 if self._mapping is None else self._nbytes
                end = min(_pages(self._nbytes) + STEP_NBYTES, nbytes)
                if end > self._there:
                    check_capacity(nbytes - self._there, what)
                    os.posix_fallocate(self._fd, self._there, end - self._there)
                    self._there = end
                if end > self._data.numel():
                    self._resize(max(2 * end, _MAPPED_NBYTES))
                populate(self._data.data_ptr() + start, end - start)
                self._nbytes = end
        except (OSError, ValueError) as error:
            raise NoCapacity(f"{what} cannot grow to {nbytes} bytes: {error}") from error

    def _resize(self, nbytes: int) -> None:
        """Give the file, and its mapping, this length."""
        self._data = self._data[:0].clone()  # nothing may look at what is moved
        if self._mapping is None:
            os.ftruncate(self._fd, nbytes)
            own = reopen(self._fd, os.O_RDWR)  # see mappings.py
            try:
                self._mapping = mmap.mmap(own, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(own)
        else:
            self._mapping.resize(nbytes)
        self._data = bytes_of(self._mapping)

    def _forget(self) -> None:
        self._mapping, self._data = None, torch.empty(0, dtype=torch.uint8)

    def _punch(self, start: int, nbytes: int) -> None:
        if nbytes and _libc.fallocate(self._fd, _PUNCH_HOLE, start, nbytes):
            number = ctypes.get_errno()
            raise OSError(number, f"a hole cannot be made in shared memory: {os.strerror(number)}")


class Growing:
    """Memory for weights that are still to come. Use it in a ``with`` block, which gives back what was not finished.

    :param name: shown with its memory in ``/proc/PID/maps``.
    :param header_nbytes: the guess of the header's length: that of the last version, if there was one.
    :param begin: claimed memory to begin with, which is used up.
    :param more: called when memory is short; whether there may be more now.
    """

    def __init__(
        self,
        name: str,
        *,
        header_nbytes: int = ALIGNMENT_NBYTES,
        begin: Buffer | None = None,
        more: Callable[[], bool] = bool,
    ) -> None:
        self._name = name
        self._header_nbytes = header_nbytes
        self._begin = begin
        self._more = more
        self._runs: dict[int, Run] = {}
        self._entries: list[Entry] = []

    def __enter__(self) -> Growing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def fill(self, feed: Feed) -> PartManifest:
        """Walk ``feed`` and copy each tensor before the next one is asked for; the manifest of what came.

        :raises NoCapacity: there is no memory for it.
        :raises ManifestMismatch: a value cannot be published. In any case the memory was given back, and the feed drained.
        """
        try:
            for entry in feed:
                self.write(entry)
            return layout(self._entries, feed.mode)
        except BaseException:
            self.close()
            feed.drain()
            raise

    def write(self, entry: Entry) -> None:
        """Copy one entry behind those of its item size."""
        tensor, nbytes = entry.tensor, item_nbytes(entry.dtype)
        self._entries.append(Entry(entry.name, None, entry.dtype, entry.shape, entry.box, entry.alias_of))
        if tensor is None or entry.box is None or not tensor.numel():
            return
        run = self._runs.get(nbytes)
        if run is None:
            run = self._runs[nbytes] = self._new_run(self._header_nbytes)
        run.append(tensor, entry.dtype, entry.box[1])

    def finish(self, manifest: PartManifest) -> Buffer:
        """The memory of everything, claimed, as long as ``manifest`` says, with its header if it is that of an image.

        :raises NoCapacity: there is no memory for it.
        """
        header = manifest.whole.header if manifest.pieces is None else b""
        starts: dict[Run, int] = {}
        behind = len(header)
        for _, run in sorted(self._runs.items(), reverse=True):
            starts[run], behind = behind, behind + run.nbytes
        if behind != manifest.nbytes:
            raise ValueError(f"{behind} bytes were written for a manifest of {manifest.nbytes}")
        if not behind:
            return Buffer.allocate(0, self._name)
        final = self._final_run(starts, behind)
        final.shift(starts.pop(final, len(header)))
        for run, start in starts.items():
            final.take(run, start)
        buffer = final.finish(header, behind)
        self.close()
        return buffer

    def close(self) -> None:
        """Give all memory back that was not finished."""
        begin, self._begin = self._begin, None
        if begin is not None:
            begin.close()
        while self._runs:
            self._runs.popitem()[1].close()

    def _new_run(self, start: int, most: int | None = None) -> Run:
        """``most``: the file will not be longer than this."""
        begin = self._begin
        if begin is not None and (most is None or begin.nbytes <= most):
            self._begin = None
        else:
            begin = None
        return Run(self._name, start, begin, self._more)

    def _final_run(self, starts: dict[Run, int], nbytes: int) -> Run:
        """The one whose file everything goes to."""
        for run in sorted(starts, key=lambda run: -run.nbytes):
            if run.least_nbytes <= nbytes and run.missing(starts[run] + run.nbytes) <= ROOM_NBYTES:
                return run
        run = self._runs[0] = self._new_run(0, nbytes)  # 0: there is no such item size
        return run


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

"""Copies between our bytes and the user's tensors, in host memory.

Theory of operation
===================

At any moment another thread may give a parameter other memory, free it or resize it. So
facts about a tensor are valid only while its memory is at the same address. The copy
checks the address again, while no Python code can run
(:mod:`replicas.weights.copies.streaming`). If it differs, the tensors are looked at
again, and copied from or to their present memory: each tensor's bytes are the old or
the new ones. A tensor that takes several steps is first replaced by a private alias,
which keeps its storage. If even that memory is freed, the copy ends with
ManifestMismatch.

:class:`HostCopies` describes a copy in either direction: *cuts* of the pieces (some of
them, or rows of one), the address of each piece, and the tensors. Tensors that are one
run of the same bytes need no view of either side.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap

import numpy as np
import numpy.typing as npt
import torch

from replicas.common.reason import Reason
from replicas.errors import ManifestMismatch, ReplicasError
from replicas.messages.bounds import text_of
from replicas.weights.copies import streaming
from replicas.weights.copies.streaming import Addresses, MemoryMoved, Private
from replicas.weights.copies.tensors import is_copied, why_unusable, written_as_bits

STEP_NBYTES = 4 << 20
"""Bytes per step and thread, roughly: 1 MiB made two threads a fifth slower, 16 MiB no
faster."""
LOOK = 2048
"""Tensors that are looked at together; this many fit the CPU caches."""
RUNS_MAX = 1 << 16
"""Runs of bytes that are copied together: each takes about 40 bytes of index arrays,
and no other Python thread runs meanwhile."""
TIMES = 100
"""Attempts at a step while its tensors move."""

_SHAPE, _DTYPE, _ON_CPU = map(operator.attrgetter, ("shape", "dtype", "is_cpu"))


def unusable(name: str, tensor: torch.Tensor, why: str = "") -> ManifestMismatch:
    """Return (do not raise) the error for a tensor that cannot be read or written.
    ``why`` is the reason; if it is "", the tensor is examined for one."""
    text = f"tensor {name!r} {why or why_unusable(tensor) or 'changes while it is copied'}"
    return ManifestMismatch(text, hint="give dense tensors with memory of their own, and keep it during the copy")


@dataclass(eq=False)
class Found:
    """Plain tensors and their memory, in the order in which they are copied.

    :ivar addresses: of each tensor's first element.
    :ivar needed: bytes from the start of each storage to the last element.
    :ivar runs: whether each tensor is one run of the bytes to copy, in host memory.
    :ivar elsewhere: a tensor that is not in host memory, or None.
    """

    tensors: list[torch.Tensor]
    addresses: Addresses
    needed: Addresses
    runs: npt.NDArray[np.bool_]
    elsewhere: torch.Tensor | None = None

    def of(self, picks: Sequence[int]) -> Found:
        """Return the facts about the tensors numbered ``picks``, in that order."""
        tensors = [self.tensors[number] for number in picks]
        order = np.array(picks, dtype=np.intp)
        return Found(tensors, self.addresses[order], self.needed[order], self.runs[order], self.elsewhere)

    def update(self, some: slice, found: Found) -> None:
        """Replace the facts about the tensors in the range ``some`` by ``found``."""
        self.addresses[some], self.needed[some], self.runs[some] = found.addresses, found.needed, found.runs


class Kinds:
    """Shapes and dtypes that tensors must have.

    :param published: the dtypes of the bytes on the other side of a copy.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], published: Sequence[torch.dtype]
    ) -> None:
        """Keep shapes and dtypes; a copy casts between ``dtypes`` and ``published``."""
        self.shapes, self.dtypes = list(shapes), list(dtypes)
        self.items = np.fromiter((dtype.itemsize for dtype in dtypes), dtype=np.uintp, count=len(self.dtypes))
        self.sizes = np.fromiter(map(math.prod, shapes), dtype=np.uintp, count=len(self.dtypes)) * self.items
        self.kept = np.fromiter(map(operator.is_, dtypes, published), dtype=np.bool_, count=len(self.dtypes))
        self.complex = any(dtype.is_complex for dtype in set(dtypes))

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], published: Sequence[torch.dtype]) -> Kinds:
        """Return the Kinds of tensors that are copied from or to these dtypes."""
        return cls([one.shape for one in tensors], [one.dtype for one in tensors], published)

    def differs(self, index: int, tensor: torch.Tensor) -> Reason | None:
        """Return how shape or dtype differ from those of number ``index``, or None."""
        if tensor.shape == self.shapes[index] and tensor.dtype is self.dtypes[index]:
            return None
        was = f"{self.dtypes[index]}{list(self.shapes[index])}"
        return f"was {was}, and is {tensor.dtype}{list(tensor.shape)}"

    def find_memory(self, tensors: Sequence[torch.Tensor], first: int = 0) -> Found | None:
        """Find the memory of plain tensors, and check their shapes and dtypes. Return
        None if one differs, or has no memory.

        :param first: number of the kind that the first of them must have.
        """
        count = len(tensors)
        found = Found(list(tensors), np.empty(count, np.uintp), np.empty(count, np.uintp), np.zeros(count, np.bool_))
        for start in range(0, count, LOOK):
            if not self._find_some(found, slice(start, start + LOOK), first):
                return None
        return found

    def _find_some(self, found: Found, few: slice, first: int) -> bool:
        """Fill in ``found`` for the slice ``few`` of its tensors. Return False if one
        differs from its kind. ``first``: number of the first tensor's kind."""
        some = found.tensors[few]
        size = len(some)
        these = slice(few.start + first, few.start + first + size)
        try:
            addresses = np.fromiter(map(torch.Tensor.data_ptr, some), np.uintp, size)
            offsets = list(map(torch.Tensor.storage_offset, some))
        except RuntimeError:  # no storage, as of a sparse tensor
            return False
        if (
            not all(map(operator.eq, map(_SHAPE, some), self.shapes[these]))
            or list(map(_DTYPE, some)) != self.dtypes[these]
        ):
            return False
        sizes = self.sizes[these]
        if np.any((addresses == 0) & (sizes != 0)):
            return False
        found.addresses[few], found.needed[few] = addresses, sizes
        if any(offsets):
            found.needed[few] += np.array(offsets, np.uintp) * self.items[these]
        if not all(map(_ON_CPU, some)):
            found.elsewhere = found.elsewhere or next(tensor for tensor in some if not tensor.is_cpu)
        elif streaming.available:
            found.runs[few] = self.kept[these]
            if not all(map(torch.Tensor.is_contiguous, some)):
                found.runs[few] &= np.fromiter(map(torch.Tensor.is_contiguous, some), np.bool_, size)
            # only complex tensors can be conjugate
            for lazy in (torch.Tensor.is_neg, torch.Tensor.is_conj)[: 1 + self.complex]:
                if any(map(lazy, some)):
                    found.runs[few] &= ~np.fromiter(map(lazy, some), np.bool_, size)
        return True


@dataclass(frozen=True)
class Cut:
    """One step of a copy: bytes ``start:end``, pieces (tensors) ``first:last``.

    :param axis: -1 for whole pieces; else the step copies ``rows`` indices of this axis
        of piece ``first``, from ``row`` on.
    """

    start: int
    end: int
    first: int
    last: int
    axis: int = -1
    row: int = 0
    rows: int = 0

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that this step copies (or its rows of one large tensor)
        out of ``tensors``, which has one for each piece."""
        if self.axis < 0:
            return list(tensors[self.first : self.last])
        return [self.rows_of(tensors[self.first])]

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the step's rows of a tensor; all if the step has whole pieces."""
        return tensor if self.axis < 0 else tensor.narrow(self.axis, self.row, self.rows)


def cuts_of(starts: Sequence[int], ends: Sequence[int], shapes: Sequence[tuple[int, ...]], nbytes: int) -> list[Cut]:
    """Return cuts (steps of a copy) of about ``nbytes`` each that cover all pieces.

    ``starts``, ``ends`` and ``shapes`` are the first byte of each piece, the byte
    behind its last one, and its shape."""
    cuts: list[Cut] = []
    first = start = behind = 0
    for index, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        if index > first and (end - start > nbytes or index - first >= 4 * LOOK):
            cuts.append(Cut(start, behind, first, index))
            first, start = index, begin
        if end - begin > nbytes:
            cuts.extend(_rows(index, begin, end - begin, shapes[index], nbytes))
            first, start = index + 1, end
        behind = end
    if first < len(starts):
        cuts.append(Cut(start, behind, first, len(starts)))
    return cuts


def _rows(index: int, start: int, nbytes: int, shape: tuple[int, ...], step_nbytes: int) -> Iterator[Cut]:
    """Yield cuts of about ``step_nbytes``, each some rows of the piece ``index``. The
    piece has ``nbytes`` bytes from ``start`` on, and this ``shape``."""
    axis = next(axis for axis, extent in enumerate(shape) if extent > 1)
    row_nbytes = nbytes // shape[axis]
    rows = max(1, step_nbytes // row_nbytes)
    for row in range(0, shape[axis], rows):
        count = min(rows, shape[axis] - row)
        yield Cut(start, start + count * row_nbytes, index, index + 1, axis, row, count)
        start += count * row_nbytes


def _nothing(start: int, end: int) -> None:
    """Do nothing; in place of a callback."""


class HostCopies:
    """CPU copies between the user's tensors and our memory (for each one a piece)."""

    def __init__(
        self,
        found: Found,
        kinds: Kinds,
        ours: Addresses,
        starts: Sequence[int],
        piece: Callable[[int], torch.Tensor],
        *,
        load: bool,
        name: Callable[[int], str],
    ) -> None:
        """Keep the arguments; copy nothing yet.

        :param found: the user's tensors. :param kinds: their shapes and dtypes.
        :param ours: the address of each piece, which is our side of the copy.
        :param starts: each piece's first byte, as in the cuts.
        :param piece: returns a piece as a tensor; used where torch makes the copy.
        :param load: copy to the user's tensors instead of from them.
        :param name: returns the name of a piece's tensor, by index.
        """
        self._found, self._kinds, self._ours, self._starts = found, kinds, ours, starts
        self._piece, self._load, self._name = piece, load, name
        self.runs = bool(found.runs.all())
        """All tensors are runs, so torch copies none."""

    def run(
        self, cuts: Sequence[Cut], threads: int, *, past_caches: bool, done: Callable[[int, int], object] = _nothing
    ) -> None:
        """Copy all cuts, on this thread and (with ``threads`` > 1) threads in C; wait.

        :param past_caches: use stores that bypass the CPU caches.
        :param done: called with (first byte, end) after each step.
        """
        for task in self.tasks(cuts, threads=threads, past_caches=past_caches, done=done):
            task()

    def tasks(
        self, cuts: Sequence[Cut], *, past_caches: bool, done: Callable[[int, int], object] = _nothing, threads: int = 1
    ) -> list[Callable[[], None]]:
        """Return a function for each cut (step) that copies it, as :meth:`copy` does
        with these arguments, then calls ``done(start, end)``; run none."""
        for index in {cut.first for cut in cuts if cut.axis >= 0}:
            with torch.no_grad():
                self._found.tensors[index] = self._found.tensors[index].detach()
            self._look_again(slice(index, index + 1))  # it may have moved since the look

        def task(cut: Cut) -> None:
            """Copy one cut (step), and call ``done``."""
            self.copy(cut, threads=threads, past_caches=past_caches)
            done(cut.start, cut.end)

        return [partial(task, cut) for cut in cuts]

    def copy(self, cut: Cut, *, threads: int = 1, past_caches: bool = False) -> None:
        """Copy one cut (step), to or from the user's tensors; repeat if they moved.

        :param threads: how many threads copy plain runs of bytes.
        :param past_caches: use stores that bypass the CPU caches.
        :raises ManifestMismatch: a tensor was freed, or has another shape or dtype.
        """
        some = slice(cut.first, cut.last)
        for _ in range(TIMES):
            try:
                numbers = np.flatnonzero(self._found.runs[some])
                if len(numbers):
                    self._copy_runs(cut, numbers, threads, past_caches)
                if len(numbers) < cut.last - cut.first:
                    self._copy_others(cut, np.flatnonzero(~self._found.runs[some]))
                if self._load:
                    _written(self._found.tensors[some])
                return
            except MemoryMoved:
                if cut.axis >= 0:  # the alias keeps its storage, so that has changed
                    raise unusable(
                        self._name(cut.first), self._found.tensors[cut.first], "was freed or resized"
                    ) from None
                self._look_again(some)
            except (ReplicasError, MemoryError):
                raise
            except Exception as error:  # torch's, for freed memory or from a torch mode
                raise self._unusable(cut, f"cannot be copied: {type(error).__name__}: {text_of(error)}") from error
        raise self._unusable(cut, "changes while it is copied")

    def put(self, pieces: npt.NDArray[np.intp], skipped: Addresses, sizes: Addresses) -> None:
        """Copy ranges of bytes (changed elements) from pieces to the user's tensors.

        :param pieces: index of each range's piece. :param skipped: where each range
            begins in its piece. :param sizes: bytes of each range.
        :raises ManifestMismatch: a tensor was freed, or has another shape or dtype.
        """
        found, least = self._found, pieces.min()
        touched = np.flatnonzero(np.bincount(pieces - least)) + least
        tensors = [found.tensors[number] for number in touched.tolist()]
        for _ in range(TIMES):
            if not found.runs[touched].all():
                for number in touched.tolist():
                    self.copy(Cut(0, 0, number, number + 1))
                return
            check = streaming.still_there(tensors, found.addresses[touched], found.needed[touched])
            try:
                streaming.copy_runs(check, found.addresses[pieces] + skipped, self._ours[pieces] + skipped, sizes)
            except MemoryMoved:
                self._look_again(slice(int(touched[0]), int(touched[-1]) + 1))
            else:
                _written(tensors)
                return
        raise self._unusable(Cut(0, 0, int(touched[0]), int(touched[-1]) + 1), "changes while it is copied")

    def _unusable(self, cut: Cut, why: str) -> ManifestMismatch:
        """Return the error for the step's first unusable tensor. If all are usable, it
        is for the step's first tensor, with the reason ``why``."""
        tensors = self._found.tensors
        index = next((index for index in range(cut.first, cut.last) if why_unusable(tensors[index])), cut.first)
        return unusable(self._name(index), tensors[index], why_unusable(tensors[index]) or why)

    def _copy_runs(self, cut: Cut, numbers: npt.NDArray[np.intp], threads: int, past_caches: bool) -> None:
        """Copy tensors ``numbers`` of a step, plain runs of bytes, by threads in C; may
        raise MemoryMoved. ``past_caches``: use stores that bypass the CPU caches."""
        found = self._found
        if cut.axis >= 0 or len(numbers) == cut.last - cut.first:
            those: slice | npt.NDArray[np.intp] = slice(cut.first, cut.last)
            tensors = found.tensors[cut.first : cut.last]
        else:
            those = numbers + cut.first
            tensors = [found.tensors[number] for number in those]
        addresses, ours, sizes = found.addresses[those], self._ours[those], self._kinds.sizes[those]
        if cut.axis >= 0:
            skipped = np.uintp(cut.start - self._starts[cut.first])
            addresses, ours, sizes = addresses + skipped, ours + skipped, np.array([cut.end - cut.start], np.uintp)
        check = streaming.still_there(tensors, found.addresses[those], found.needed[those])
        to, sources = (addresses, ours) if self._load else (ours, addresses)
        streaming.copy_runs(check, to, sources, sizes, threads=threads, past_caches=past_caches)

    def _copy_others(self, cut: Cut, numbers: npt.NDArray[np.intp]) -> None:
        """Copy tensors ``numbers`` by torch (casts, gaps); may raise MemoryMoved."""
        pairs: list[_Pair] = []
        for index in (numbers + cut.first).tolist():
            tensor, piece = cut.rows_of(self._alias(index)), cut.rows_of(self._piece(index))
            if not is_copied(tensor.dtype):  # torch may not copy it; our piece may be integers
                piece = piece.view(tensor.dtype)
            if self._load and tensor.dtype == piece.dtype:
                tensor, piece = written_as_bits(tensor, piece)
            elif not is_copied(tensor.dtype):
                piece, tensor = written_as_bits(piece, tensor)
            pairs.append((tensor, piece))
        for few in _few_runs(pairs):
            self._copy_pairs(few)

    def _copy_pairs(self, pairs: Sequence[_Pair]) -> None:
        """Copy between the two tensors of each pair (the user's, our piece), by torch.
        A load writes to the user's. May raise MemoryMoved."""
        tensors, ours = [one for one, _ in pairs], [one for _, one in pairs]
        with torch.inference_mode() if any(map(torch.Tensor.is_inference, tensors)) else torch.no_grad():
            private = Private(tensors)
            if self._load:
                torch._foreach_copy_(private.views, ours)
                private.copy(back=True)
            else:
                private.copy()
                torch._foreach_copy_(ours, private.views)

    def _alias(self, index: int) -> torch.Tensor:
        """Return an alias of tensor ``index``; MemoryMoved: another shape or dtype."""
        with torch.no_grad():
            tensor = self._found.tensors[index].detach()
        if tensor.shape != self._kinds.shapes[index] or tensor.dtype is not self._kinds.dtypes[index]:
            raise MemoryMoved
        if not streaming.available and why_unusable(tensor):  # torch would use freed memory
            raise MemoryMoved
        return tensor

    def _look_again(self, some: slice) -> None:
        """Find the memory of the tensors in the range ``some`` again, after a move.
        Raise ManifestMismatch if a tensor can no longer be used."""
        tensors = self._found.tensors[some]
        found = self._kinds.find_memory(tensors, some.start)
        if found is not None and found.elsewhere is None:
            self._found.update(some, found)
            return
        for index, tensor in enumerate(tensors, some.start):
            if why := why_unusable(tensor) or self._kinds.differs(index, tensor):
                raise unusable(self._name(index), tensor, why)
            if not tensor.is_cpu:
                raise unusable(self._name(index), tensor, f"was on the cpu, and is on {tensor.device}")


_Pair = tuple[torch.Tensor, torch.Tensor]
"""A user's tensor, or a part of it, and the same part of our piece."""


def _few_runs(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Yield all pairs, cut into parts, in lists of :data:`RUNS_MAX` runs at most."""
    few: list[_Pair] = []
    total = 0
    for tensor, piece, runs in chain.from_iterable(starmap(_parts, pairs)):
        if few and total + runs > RUNS_MAX:
            yield few
            few, total = [], 0
        few.append((tensor, piece))
        total += runs
    yield few


def _parts(tensor: torch.Tensor, piece: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield (tensor, piece, number of runs of bytes) for small parts of a pair."""
    axes = [] if tensor.is_contiguous() else streaming.gaps(tensor)
    runs = math.prod(tensor.shape[axis] for axis in axes)
    if runs <= RUNS_MAX:
        yield tensor, piece, runs
        return
    axis = max(axes, key=tensor.shape.__getitem__)
    rows = max(1, tensor.shape[axis] * RUNS_MAX // runs)
    for some in zip(torch.split(tensor, rows, axis), torch.split(piece, rows, axis), strict=True):
        yield from _parts(*some)


def _written(tensors: Sequence[torch.Tensor]) -> None:
    """Count a write to each tensor for autograd, as torch's own writes do."""
    inference = any(map(torch.Tensor.is_inference, tensors))
    torch.autograd.graph.increment_version([one for one in tensors if not (inference and one.is_inference())])

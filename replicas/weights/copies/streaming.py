"""Copy bytes in C: with non-temporal stores if large, in batches if small.

Theory of operation
===================

torch copies with ordinary stores, as does memcpy below most of the cache's size: each
line is read from memory before it is overwritten. Weights are larger than any cache,
and no reader comes while a copy is still cached. ``streaming.c``, compiled when the
package is installed (``hatch_build.py``), copies them with non-temporal stores: on two
cores, 269 MB took 13 ms instead of 18; on one thread, 18 ms instead of 28.

torch also takes a microsecond for each tensor, however small. Where both sides are runs
of the same bytes, one call copies all of them: 100,000 tensors of 256 bytes take 4 ms
instead of 90.

**Tensors that move.** Another thread may give a parameter other memory at any moment
(``p.data = ...``), or free it (``untyped_storage().resize_(0)``). Both are Python code,
which needs the GIL. So :func:`copy_runs` holds the GIL, asks each tensor where its
memory is now, and keeps the GIL until its threads have copied the last byte. Callers
copy a few MiB at a time. Copies by torch (casts, strides) go through private memory
(:class:`Private`). Not detected are code that frees memory without the GIL
(``tensor.resize_`` to a larger size, code in C++), and changes of device memory before
its copy is enqueued.

Where the C code was not compiled, torch copies with the same result; then another
thread can free memory that is being copied.
"""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from replicas.memory.lines import LIBRARY
from replicas.weights.copies.tensors import span_nbytes

Addresses = npt.NDArray[np.uintp]
"""Addresses, or numbers of bytes, as an array."""

Check = Callable[[], bool]
"""Must not run Python code, so that no other thread runs between it and the copy."""
_CACHE_NBYTES = 32 << 20
"""Assumed on a machine that does not report its cache size."""
_ALIGNED = 64
_POINTER, _STORAGE, _ROOM = torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes


class MemoryMoved(Exception):
    """A tensor's memory has moved since it was found; nothing was copied."""


def _load() -> Any:
    """Load the compiled C library; return its function that :func:`copy_runs` calls.

    Return None if the library is missing or cannot be loaded, or if that function is
    not in it, as in one of an old release.
    """
    try:
        library = ctypes.PyDLL(str(LIBRARY))
        function = library.replicas_copy_runs
    except (OSError, AttributeError):  # not compiled, for another kind of machine, or by an older version
        return None
    function.argtypes = [ctypes.py_object, *[ctypes.c_void_p] * 3, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    return function


_copy = _load()
available = _copy is not None
"""Whether the C code was compiled."""


def _cache_nbytes() -> int:
    """Return the size of the CPU's last cache; 32 MiB if unknown."""
    try:
        found = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (OSError, ValueError):  # a C library that does not know this name
        return _CACHE_NBYTES
    return found if found > 0 else _CACHE_NBYTES


def bypasses_caches(nbytes: int) -> bool:
    """Return True if a copy of ``nbytes`` should bypass the CPU caches."""
    return available and nbytes > _cache_nbytes()


@contextmanager
def writing(destinations: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context manager: torch may write in place to these tensors in the block.

    Autograd records nothing; tensors of inference mode are allowed, too.
    """
    inference = any(map(torch.Tensor.is_inference, destinations))
    with torch.inference_mode() if inference else torch.no_grad():
        yield


def still_there(tensors: Sequence[torch.Tensor], addresses: Addresses, needed: Addresses) -> Check:
    """Return a function that returns True if all tensors are where they were.

    It can be called once, and runs in C, so that no other thread runs meanwhile.

    :param addresses: the expected address of each tensor's first element.
    :param needed: bytes from the start of each storage to the end of the elements.
    """
    there = map(operator.eq, map(_POINTER, tensors), addresses.tolist())
    enough = map(operator.le, needed.tolist(), map(_ROOM, map(_STORAGE, tensors)))
    return partial(all, chain(there, enough))


def copy_runs(
    check: Check, to: Addresses, sources: Addresses, sizes: Addresses, *, threads: int = 1, past_caches: bool = False
) -> None:
    """Copy runs of bytes from address to address, in C; blocks all Python threads.

    Call it only if :data:`available`; the runs must not overlap.

    :param check: called before the copy, with the GIL held until the copy has ended.
    :param to: address of each run's destination. :param sources: of its source.
    :param sizes: bytes of each run. :param threads: number of threads that copy.
    :param past_caches: the result of :func:`bypasses_caches` for the whole copy.
    :raises MemoryMoved: ``check`` returned False; nothing was copied.
    """
    runs = to.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes)
    if not _copy(check, *runs, threads, int(past_caches)):
        raise MemoryMoved


def _axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (stride, axis) of each axis longer than 1, by rising stride."""
    return sorted((stride, axis) for axis, stride in enumerate(tensor.stride()) if stride and tensor.shape[axis] > 1)


def gaps(tensor: torch.Tensor) -> list[int]:
    """Return the axes of a tensor along which its elements are apart in memory.

    The elements of all other axes together are runs of bytes without gaps.
    """
    found: list[int] = []
    behind = 1
    for stride, axis in _axes(tensor):
        if found or stride != behind:
            found.append(axis)
        behind = stride * tensor.shape[axis]
    return found


class Private:
    """Private memory for the elements of tensors, by which torch copies them.

    Without the C code the tensors themselves are used.

    :ivar views: a tensor for each, to read or write instead.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate private memory with a view for each tensor; copy nothing yet.

        :param tensors: aliases on the CPU that no other code has.
        """
        self.views = list(tensors)
        self._tensors = list(tensors) if available else []
        if not self._tensors:
            return
        runs = list(map(_Runs, tensors))
        counts = [len(one.offsets) for one in runs]
        nbytes = [-(-one.nbytes * len(one.offsets) // _ALIGNED) * _ALIGNED for one in runs]
        starts = [0, *accumulate(nbytes)]
        memory = torch.empty(starts[-1], dtype=torch.uint8, device="cpu")
        self._sizes = np.repeat(np.array([one.nbytes for one in runs], dtype=np.uintp), counts)
        self._counts = np.array(counts, dtype=np.intp)
        self._offsets = np.concatenate([one.offsets for one in runs])
        within = [
            np.arange(count, dtype=np.uintp) * np.uintp(one.nbytes) for count, one in zip(counts, runs, strict=True)
        ]
        self._places = np.concatenate(within) + np.repeat(np.array(starts[:-1], dtype=np.uintp), counts)
        self._places += np.uintp(memory.data_ptr())
        # starts also has the end
        for number, (tensor, one, start) in enumerate(zip(tensors, runs, starts, strict=False)):
            flat = memory[start : start + one.nbytes * counts[number]].view(tensor.dtype)
            view = flat.as_strided(tensor.shape, one.strides)
            view = torch._neg_view(view) if tensor.is_neg() else view
            self.views[number] = view.conj() if tensor.is_conj() else view

    def copy(self, *, back: bool = False) -> None:
        """Copy the tensors' elements to :attr:`views`, or ``back`` from the views.

        Does nothing without the C code, as the views are the tensors then.

        :raises MemoryMoved: a tensor's memory was freed or moved.
        """
        if self._tensors:
            check, theirs = self._found()
            to, sources = (theirs, self._places) if back else (self._places, theirs)
            copy_runs(check, to, sources, self._sizes)

    def _found(self) -> tuple[Check, Addresses]:
        """Return a check that no tensor moves from now on, and the address of each run.

        Both are for :func:`copy_runs`.
        """
        addresses = np.fromiter(map(_POINTER, self._tensors), dtype=np.uintp, count=len(self._tensors))
        needed = [one.storage_offset() * one.itemsize + span_nbytes(one) for one in self._tensors]
        check = still_there(self._tensors, addresses, np.array(needed, dtype=np.uintp))
        return check, np.repeat(addresses, self._counts) + self._offsets


class _Runs:
    """The elements of a tensor as runs of ``nbytes`` bytes.

    :ivar offsets: of each run, from the first element.
    :ivar strides: of the tensor after its runs are packed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Find the runs of bytes that make up a tensor; read no element."""
        self.strides = [0] * tensor.ndim
        offsets, count, apart = np.zeros(1, dtype=np.uintp), 1, gaps(tensor)
        for stride, axis in _axes(tensor):
            self.strides[axis], extent = count, tensor.shape[axis]
            if axis in apart:
                steps = np.arange(extent, dtype=np.uintp) * np.uintp(stride * tensor.itemsize)
                offsets = (steps[:, None] + offsets).ravel()
            count *= extent
        self.offsets = offsets
        self.nbytes = count * tensor.itemsize // len(offsets) if tensor.numel() else 0

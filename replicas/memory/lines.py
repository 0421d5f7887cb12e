"""Find the 64-byte lines that differ between two runs of memory, and their elements.

A version differs from the previous one in few elements. One bit for each line, set by a
pass over both runs, says where to look for them. The C code is in the library of the
copies, is loaded without torch, and runs without the GIL; where it was not compiled,
numpy does the same, more slowly.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LINE_NBYTES = 64
WORD_NBYTES = 64 * LINE_NBYTES
"""Bytes whose lines have their bits in one word."""
LIBRARY = Path(__file__).parents[1] / "weights" / "copies" / "_streaming.so"

Bytes = npt.NDArray[np.uint8]


def _load() -> Any:
    """Load the compiled C library and declare its functions; return None if that fails.

    It fails if the library was not compiled, or is of another machine or release.
    """
    try:
        library = ctypes.CDLL(str(LIBRARY))
        compare, changed, change = library.replicas_compare, library.replicas_changed, library.replicas_change
    except (OSError, AttributeError):  # not compiled, for another kind of machine, or by an older version
        return None
    compare.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_size_t] * 2, ctypes.c_int]
    compare.restype = None
    changed.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_size_t] * 3, *[ctypes.c_void_p] * 2, ctypes.c_size_t]
    changed.restype = ctypes.c_size_t
    change.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 2, ctypes.c_size_t]
    change.restype = None
    return library


_library = _load()


class Lines:
    """The lines (64 bytes) of a run of bytes that differ from a base of equal length.

    :param run: starts at a multiple of 64; neither it nor ``base`` may move.
    :ivar words: bit ``i % 64`` of word ``i // 64``, from the lowest on, belongs to line
        ``i``. It is set if the line may differ, and clear if the line is the same or
        was not compared yet.
    """

    def __init__(self, run: Bytes, base: Bytes) -> None:
        """Start with the bits of all lines (of 64 bytes) clear; compare nothing yet.

        :param run: the bytes to compare, from an address that is a multiple of 64.
        :param base: as many bytes to compare them with. Neither is copied, or may move.
        :raises ValueError: the sizes differ, or ``run`` is not so aligned.
        """
        if run.nbytes != base.nbytes or (run.nbytes and run.ctypes.data % LINE_NBYTES):
            raise ValueError(f"a base of {base.nbytes} bytes does not fit {run.nbytes} bytes at {run.ctypes.data:#x}")
        self._run, self._base, self._lock = run, base, threading.Lock()
        self.words = np.zeros(-(-run.nbytes // WORD_NBYTES), np.uint64)

    def compare(self, first: int, last: int, threads: int = 1) -> None:
        """Compare a range of the run's bytes with those of the base; return when done.

        Set in ``words`` the bit of each line (64 bytes) with a difference; clear none.
        May be called on several threads; the C code runs without the GIL.

        :param first: the first byte.
        :param last: the byte after the last.
        :param threads: how many threads of the C code share the work.
        :raises ValueError: the range is not within the run.
        """
        if not 0 <= first <= last <= self._run.nbytes:
            raise ValueError(f"bytes {first} to {last} of {self._run.nbytes}")
        if _library is not None:
            data = self._run.ctypes.data, self._base.ctypes.data, self.words.ctypes.data
            _library.replicas_compare(*data, first, last, threads)
            return
        numbers = np.unique((np.flatnonzero(self._run[first:last] != self._base[first:last]) + first) // LINE_NBYTES)
        with self._lock:
            np.bitwise_or.at(self.words, numbers // 64, np.uint64(1) << (numbers % 64).astype(np.uint64))


def find_changed(
    run: Bytes, base: Bytes, words: npt.NDArray[np.uint64] | None, first: int, last: int, width: int, most: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]] | None:
    """Return (indices, xors) of the elements that differ in a range of bytes.

    Nothing is changed. Return None if more than ``most`` elements differ.

    :param run: the new bytes.
    :param base: the old ones, as many.
    :param words: as :attr:`Lines.words`, to make the C code skip lines that are the
        same; None to compare all.
    :param first: the first byte; indices count elements from it.
    :param last: the byte after the last.
    :param width: bytes of an element: 1, 2, 4 or 8; ``first`` and ``last`` are
        multiples of it.
    :returns: indices in rising order, and for each the xor of the new and the old
        value.
    """
    kind = f"<u{width}"
    if _library is None:
        one, other = run[first:last].view(kind), base[first:last].view(kind)
        where = np.flatnonzero(one != other)
        return (where.astype(np.uint32), one[where] ^ other[where]) if len(where) <= most else None
    most = min(most, (last - first) // width)
    numbers, xors = np.empty(most, np.uint32), np.empty(most, kind)
    data = run.ctypes.data, base.ctypes.data, None if words is None else words.ctypes.data
    count = _library.replicas_changed(*data, first, last, width, numbers.ctypes.data, xors.ctypes.data, most)
    return (numbers[:count], xors[:count]) if count <= most else None


def apply_xors(run: Bytes, numbers: npt.NDArray[np.uint32], xors: npt.NDArray[Any]) -> None:
    """Xor elements of ``run`` in place, as found by :func:`find_changed`.

    This turns the old values into the new ones, and back.

    :param run: bytes of elements of the xors' dtype.
    :param numbers: indices of the elements, which must exist: no check.
    :param xors: what to xor each of these with.
    """
    if _library is None:
        run.view(xors.dtype)[numbers] ^= xors
    else:
        _library.replicas_change(run.ctypes.data, xors.itemsize, numbers.ctypes.data, xors.ctypes.data, len(numbers))

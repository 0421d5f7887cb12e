"""CPU copies in C: non-temporal stores for large tensors, batches of small ones.

Theory of operation
===================

torch copies with ordinary stores, as does memcpy below most of the cache's size: each
line is read from memory before it is overwritten. Weights are larger than any cache,
and no reader comes while a copy is still cached. ``streaming.c``, compiled when the
package is installed (``hatch_build.py``), copies them with non-temporal stores: on two
cores, 269 MB took 13 ms instead of 18; on one thread, 18 ms instead of 28.

torch also takes a microsecond for each tensor, however small. Where both sides are runs
of the same bytes, one call copies all of them (:func:`copy_runs`): 100,000 tensors of
256 bytes take 4 ms instead of 90.

torch copies, with the same result, where the C code was not compiled (no C compiler at
hand), where tensors are not of the simplest kind (other dtypes, strides, lazy
conjugation, subclasses), and for small pieces, in one call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["PIECE_NBYTES", "Addresses", "available", "copy_all", "copy_runs", "pays", "writing"]

Addresses = npt.NDArray[np.uintp]
"""Addresses, or numbers of bytes, as an array."""

PIECE_NBYTES = 64 << 10
"""Smaller pieces gain nothing: torch copies them."""
MOST_PIECES = 128
"""With more pieces in one call most are small: torch copies all, unchecked."""
_CACHE_NBYTES = 32 << 20
"""Assumed on a machine that does not report its cache size."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _load() -> tuple[Any, Any]:
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_streaming.so")))
        functions = library.replicas_stream, library.replicas_copy
    except (OSError, AttributeError):  # not compiled, or for another kind of machine
        return None, None
    for function in functions:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        function.restype = None
    return functions


_stream, _copy = _load()
available = _stream is not None
"""Whether the C code was compiled."""


def _cache_nbytes() -> int:
    try:
        found = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (OSError, ValueError):  # a C library that does not know this name
        return _CACHE_NBYTES
    return found if found > 0 else _CACHE_NBYTES


def pays(nbytes: int) -> bool:
    """Whether a copy of ``nbytes`` should bypass the CPU caches: it is larger."""
    return available and nbytes > _cache_nbytes()


@contextmanager
def writing(destinations: Iterable[torch.Tensor]) -> Iterator[None]:
    """Allow in-place writes on this thread, also to tensors made in inference mode."""
    inference = any(map(torch.Tensor.is_inference, destinations))
    with torch.inference_mode() if inference else torch.no_grad():
        yield


def copy_runs(to: Addresses, sources: Addresses, sizes: Addresses, *, past_caches: bool = False) -> None:
    """Copy runs of bytes that do not overlap, without the GIL; needs :data:`available`.

    :param past_caches: the result of :func:`pays` for the whole copy.
    """
    (_stream if past_caches else _copy)(to.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes))


def copy_all(
    destinations: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    past_caches: bool = False,
    inference: bool = False,
) -> None:
    """Copy each source to the destination of the same shape, on the CPU, with casts.

    :param past_caches: the result of :func:`pays` for the whole copy.
    :param inference: some destinations were made in inference mode.
    """
    if past_caches and _stream is not None and len(destinations) <= MOST_PIECES:
        pairs = list(zip(destinations, sources, strict=True))
        large = [_simple(*pair) for pair in pairs]
        _copy_large([pair for pair, simple in zip(pairs, large, strict=True) if simple])
        rest = [pair for pair, simple in zip(pairs, large, strict=True) if not simple]
        destinations, sources = [to for to, _ in rest], [source for _, source in rest]
    if destinations:
        with torch.inference_mode() if inference else torch.no_grad():
            torch._foreach_copy_(list(destinations), list(sources))


def _simple(to: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        to.nbytes >= PIECE_NBYTES
        and to.dtype == source.dtype
        and type(to) in _PLAIN
        and type(source) in _PLAIN
        and to.is_contiguous()
        and source.is_contiguous()
        and not (to.is_conj() or source.is_conj() or to.is_neg() or source.is_neg())
    )


def _copy_large(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if not pairs:
        return
    table = np.array([(to.data_ptr(), source.data_ptr(), to.nbytes) for to, source in pairs], dtype=np.uintp)
    copy_runs(*np.ascontiguousarray(table.T), past_caches=True)
    torch.autograd.graph.increment_version([to for to, _ in pairs])  # as every write of torch's own does

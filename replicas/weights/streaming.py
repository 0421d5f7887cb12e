"""Copies without torch: of large tensors past the caches of the processor, of many
small ones without a look at each.

Theory of operation
===================

torch copies with ordinary stores, and so does memcpy for anything smaller than most of
the cache: each line is read from memory before it is overwritten. Weights are larger
than any cache, and nobody reads what was just copied while it is still there.
``streaming.c``, compiled when the package is installed (``hatch_build.py``), uses
non-temporal stores for them: on two cores 269 MB were copied in 13 ms in place of 18,
by one thread in 18 ms in place of 28.

torch also takes a microsecond for each tensor, however small. Who knows that both sides
are runs of the same bytes has all of them copied by one call (:func:`copy_runs`):
100,000 tensors of 256 bytes in 4 ms in place of 90.

Where it was not compiled (no C compiler at hand), or the tensors are not of the
simplest kind (other dtypes, strides, lazy conjugation, subclasses), torch copies, with
the same result. Small pieces go to torch as well, all at once.
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
"""Addresses, or numbers of bytes."""

PIECE_NBYTES = 64 << 10
"""Smaller pieces gain nothing: torch copies them."""
MOST_PIECES = 128
"""Of so many in one call most are small: torch copies all of them, and nobody looks at
each."""
_CACHE_NBYTES = 32 << 20
"""Of a machine that does not say it."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _load() -> tuple[Any, Any]:
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_streaming.so")))
        functions = library.replicas_stream, library.replicas_copy
    except (OSError, AttributeError):  # it was not compiled, or for another kind of machine
        return None, None
    for function in functions:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        function.restype = None
    return functions


_stream, _copy = _load()
available = _stream is not None
"""Whether it was compiled."""


def _cache_nbytes() -> int:
    try:
        found = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (OSError, ValueError):  # a C library that does not know this name
        return _CACHE_NBYTES
    return found if found > 0 else _CACHE_NBYTES


def pays(nbytes: int) -> bool:
    """Whether ``nbytes`` that are copied in one go should not go through the caches:
    they are larger than those."""
    return available and nbytes > _cache_nbytes()


@contextmanager
def writing(destinations: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within the block these tensors can be written in place, on this thread.

    Those that were made in inference mode, as an engine's parameters may be, can be
    written in that mode only, which is each thread's own; the others in either.
    """
    inference = any(map(torch.Tensor.is_inference, destinations))
    with torch.inference_mode() if inference else torch.no_grad():
        yield


def copy_runs(to: Addresses, sources: Addresses, sizes: Addresses, *, past_caches: bool = False) -> None:
    """Copy runs of bytes, none of which may overlap another; only where
    :data:`available`. Others may run Python meanwhile.

    :param past_caches: as :func:`pays` says of the whole of which this is a part.
    """
    function = _stream if past_caches else _copy
    function(to.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes))


def copy_all(
    destinations: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    past_caches: bool = False,
    inference: bool = False,
) -> None:
    """Copy each source to the destination of the same shape, on the CPU; values are
    cast where dtypes differ.

    :param past_caches: as :func:`pays` says of the whole of which this is a part.
    :param inference: some destinations were made in inference mode (see
        :func:`writing`).
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
    table = np.array(
        [
            [to.data_ptr() for to, _ in pairs],
            [source.data_ptr() for _, source in pairs],
            [to.nbytes for to, _ in pairs],
        ],
        dtype=np.uintp,
    )
    copy_runs(*table, past_caches=True)
    torch.autograd.graph.increment_version([to for to, _ in pairs])  # as every write of torch's own does

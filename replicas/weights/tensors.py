"""Helpers for torch tensors: dtype names, bit views, and pieces of an image."""

from __future__ import annotations

from functools import cache
from math import prod

import torch

from replicas.core.versions.manifest import Manifest, Piece, item_nbytes
from replicas.errors import ManifestMismatch

__all__ = [
    "bits",
    "dtype_name",
    "is_castable",
    "is_copied",
    "overlaps_itself",
    "piece_view",
    "torch_dtype",
    "typed",
    "written_as_bits",
]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COPIED = {
    *_CASTABLE,
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of ``dtype`` without ``torch.``.

    :raises ManifestMismatch: tensors of this dtype cannot be moved.
    """
    name = str(dtype).removeprefix("torch.")
    item_nbytes(name)
    return name


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``.

    :raises ManifestMismatch: this torch does not have it.
    """
    item_nbytes(name)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ManifestMismatch(f"torch {torch.__version__} has no dtype {name!r}", hint="use the same torch everywhere")
    return found


def is_castable(dtype: torch.dtype) -> bool:
    """Whether ``dtype=`` casts it: plain floats only; float8's bits carry meaning."""
    return dtype in _CASTABLE


def is_copied(dtype: torch.dtype) -> bool:
    """Whether every torch copies this dtype; others are copied as :func:`bits`."""
    return dtype in _COPIED


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same size (any strides): always copyable."""
    return tensor.resolve_conj().resolve_neg().view(_BITS[tensor.dtype.itemsize])


def written_as_bits(destination: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors, of one dtype, as :func:`bits`; the destination shares its memory.

    That holds for a conjugate or negative view, too.
    """
    if destination.is_conj():
        destination, source = destination.conj(), source.conj()
    if destination.is_neg():
        destination, source = torch._neg_view(destination), torch._neg_view(source)
    return bits(destination), bits(source)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, as in an expanded tensor: not writable."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False


def typed(data: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of ``dtype`` and ``shape`` at byte ``offset`` of uint8 ``data``."""
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device=data.device)
    return data[offset : offset + nbytes].view(dtype).view(shape)


def piece_view(data: torch.Tensor, manifest: Manifest, piece: Piece) -> torch.Tensor:
    """The box of ``piece`` in the data section of an image, as bits."""
    spec = manifest.tensors[piece.tensor]
    whole = typed(data, manifest.offsets[piece.tensor], _BITS[item_nbytes(spec.dtype)], spec.shape)
    for axis, (offset, extent) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
        whole = whole.narrow(axis, offset, extent)
    return whole

"""Helpers for torch tensors: dtype names, bit views, pieces of an image, DTensors.

Importing ``torch.distributed.tensor`` takes as long as importing torch, so it is
imported only where a DTensor can exist. The offsets of a shard come from
torch.distributed.checkpoint's hook (``__create_chunk_list__``). Its planner does not
fit: the deduplication of replicas needs all SavePlans in one place, by a collective
that pickles.
"""

from __future__ import annotations

import sys
from functools import cache
from math import prod
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from replicas.common.reason import Reason
from replicas.core.base.dtypes import item_nbytes
from replicas.core.base.manifest import Manifest, Piece
from replicas.errors import ManifestMismatch, UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that do not run code of their own."""
# torch has no integers of 16 bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COPIED = {
    *_CASTABLE,
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
}
# taken from the base class: a subclass may have code of its own behind these names
_IS_META, _LAYOUT, _IS_NESTED = (vars(torch._C.TensorBase)[name].__get__ for name in ("is_meta", "layout", "is_nested"))


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of ``dtype`` without "torch.".

    :raises ManifestMismatch: the library does not support it.
    """
    name = str(dtype).removeprefix("torch.")
    item_nbytes(name)
    return name


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch calls ``name``: ``torch.bfloat16`` for "bfloat16".

    :raises ManifestMismatch: this torch lacks it, or the library does not support it.
    """
    item_nbytes(name)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ManifestMismatch(f"torch {torch.__version__} has no dtype {name!r}", hint="use the same torch everywhere")
    return found


def is_castable(dtype: torch.dtype) -> bool:
    """Return True for a plain floating dtype, which publish and load may cast.

    Not for float8, which is quantised.
    """
    return dtype in _CASTABLE


def is_copied(dtype: torch.dtype) -> bool:
    """Return True if every release of torch can copy tensors of this dtype.

    Tensors of other dtypes are copied as integers (:func:`bits`).
    """
    return dtype in _COPIED


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers of the same size: a view, if possible.

    Lazy conjugation or negation needs a copy. Every torch can copy the integers.
    """
    return tensor.resolve_conj().resolve_neg().view(_BITS[tensor.dtype.itemsize])


def written_as_bits(destination: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integer views of both, by which torch can copy source to destination.

    Nothing is copied to the destination here. Both have one dtype; the source may come
    as a copy.
    """
    if destination.is_conj():
        destination, source = destination.conj(), source.conj()
    if destination.is_neg():
        destination, source = torch._neg_view(destination), torch._neg_view(source)
    return bits(destination), bits(source)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if elements may share memory, as in an expanded tensor."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain, detached tensor over the same memory.

    As only this function's caller has it, no other code can give it another storage.
    """
    if type(tensor) in PLAIN:
        return tensor.detach()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        found = tensor.detach()
        return found if type(found) is torch.Tensor else found.as_subclass(torch.Tensor)


def _is_sound(tensor: torch.Tensor) -> bool:
    """Return True if a plain tensor is certainly usable; False asks for more checks."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_nested:
        return False
    nbytes = tensor.nbytes
    there = tensor.data_ptr() != 0 if nbytes else not tensor.is_meta
    return there and tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + nbytes


def check_modes(what: str) -> None:
    """Raise UsageError if torch makes other tensors than plain ones on this thread.

    So it does in a FakeTensorMode.

    :param what: name of the calling function, for the error.
    """
    probe = torch.empty(1, device="cpu")
    if type(probe) is not torch.Tensor or why_unusable(probe):
        text = f"{what}: torch makes a {type(probe).__name__} of everything on this thread at present"
        raise UsageError(text, hint="leave the FakeTensorMode, or a mode like it, first")


def why_unusable(tensor: torch.Tensor) -> Reason | None:
    """Return why a tensor's elements cannot be read or written in memory, or None.

    None of the tensor's own code (``__torch_function__``) runs. For a DTensor pass its
    local tensor.
    """
    if type(tensor) in PLAIN and _is_sound(tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if is_lazy(tensor):
            return "is not initialized"
        if _IS_META(tensor):
            return "is on the meta device"
        if (layout := _LAYOUT(tensor)) is not torch.strided or _IS_NESTED(tensor):
            return "is nested" if layout is torch.strided else f"has layout {layout}"
        if not torch._C._has_storage(tensor):
            return f"is a {type(tensor).__name__} without memory of its own"
        if not tensor.numel():
            return None
        storage = torch.Tensor.untyped_storage(tensor)
        room = storage.nbytes()
        needed = tensor.storage_offset() * tensor.itemsize + span_nbytes(tensor)
        if room < needed:
            what = "was freed" if not room else f"has {room} bytes of the {needed} that it needs"
            return f"has no memory: its storage {what}"
        # a wrapper of other tensors, fake, functional
        if storage.device.type != tensor.device.type or not torch.Tensor.data_ptr(tensor):
            kind = "functional tensor" if torch._is_functional_tensor(tensor) else type(tensor).__name__
            return f"is a {kind} without memory of its own"
        return None


def span_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last one.

    Gaps between them count.
    """
    if not tensor.numel():
        return 0
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(reach + 1) * tensor.itemsize


def typed(data: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view of ``data`` (uint8) at byte ``offset``, with this dtype and shape.

    An empty tensor is a new one.
    """
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device=data.device)
    return data[offset : offset + nbytes].view(dtype).view(shape)


def piece_view(data: torch.Tensor, manifest: Manifest, piece: Piece) -> torch.Tensor:
    """Return a view, as integers, of one piece (a box of a tensor) of a version.

    :param data: the data section of the version. :param manifest: its layout.
    """
    spec = manifest.tensors[piece.tensor]
    whole = typed(data, manifest.offsets[piece.tensor], _BITS[item_nbytes(spec.dtype)], spec.shape)
    for axis, (offset, extent) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
        whole = whole.narrow(axis, offset, extent)
    return whole


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape of a part of a tensor."""


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return True if ``value`` is a DTensor, without importing the DTensor module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_box(tensor: DTensor, name: str) -> Box | None:
    """Return (offsets, shape) of the part of a DTensor that this rank has.

    Return None if it has none. Does not communicate.

    :param name: of the tensor, for the error.
    :raises ManifestMismatch: the local tensor is not a box of the global one (partial
        sums, strided shards).
    """
    from torch.distributed.tensor import Replicate

    if any(placement.is_partial() for placement in tensor.placements):
        text = f"tensor {name!r} is a DTensor with placements {tensor.placements}"
        raise ManifestMismatch(text, hint="redistribute it to Shard or Replicate first")
    if tensor.device_mesh.get_coordinate() is None or not tensor.numel():
        return None
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    offsets, shape = (tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if len(chunks) == 1 else ((), ())
    if shape != tuple(tensor.to_local().shape) or not _is_contiguous_block(tensor):
        text = f"tensor {name!r}: the local shard under placements {tensor.placements} is not one box of the tensor"
        hint = "redistribute it to plain Shard placements, or pass it as Shard(tensor, offsets, shape)"
        raise ManifestMismatch(text, hint=hint)
    return (offsets, shape) if all(shape) else None


def _is_contiguous_block(tensor: DTensor) -> bool:
    """Return True if this rank's part of a DTensor is one block on every axis.

    With strided shards its rows may be apart.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    for axis in {placement.dim for placement in tensor.placements if isinstance(placement, _StridedShard)}:
        index = torch.arange(tensor.shape[axis]).view([-1 if dim == axis else 1 for dim in range(tensor.ndim)])
        for mesh_dim, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) == axis:
                chunks, _ = placement._split_tensor(  # type: ignore[attr-defined]  # Shard and _StridedShard have it
                    index, tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=True
                )
                index = chunks[coordinate[mesh_dim]]
        rows = index.flatten()
        if rows.numel() and int(rows[-1] - rows[0]) != rows.numel() - 1:
            return False
    return True

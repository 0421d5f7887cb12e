"""DTensor support: recognise DTensors and find a local shard's box in its tensor.

Importing ``torch.distributed.tensor`` takes as long as importing torch, so it is
imported only where a DTensor can exist.

torch.distributed.checkpoint computes where a shard lies (``__create_chunk_list__``, by
which its planner learns what each rank saves). The rest of that planner does not fit:
its public overlap arithmetic (``planner_helpers.create_read_items_for_chunk_list``)
pairs the chunks of a file with those of a reader. Here each box of an update goes to
its place in a whole image, and a DTensor parameter takes its own box out of that image
by ``narrow``; only identical boxes overlap, of which one is taken
(:func:`replicas.core.versions.manifest.merge_parts`, which has no torch). Its
deduplication of replicas needs all SavePlans in one place: a collective that pickles.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

from replicas.errors import ManifestMismatch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Box", "is_dtensor", "local_box"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape of a part of a tensor."""


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether ``value`` is a DTensor; False before the DTensor module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_box(tensor: DTensor, name: str) -> Box | None:
    """The box of this rank's local tensor in the global one; None if it is empty.

    Needs no communication.

    :raises ManifestMismatch: the local tensor is no box of the global one (partial
        sums, strided shards).
    """
    from torch.distributed.tensor import Replicate

    if any(placement.is_partial() for placement in tensor.placements):
        raise ManifestMismatch(
            f"tensor {name!r} is a DTensor with placements {tensor.placements}",
            hint="redistribute it to Shard or Replicate first",
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    offsets, shape = (tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if len(chunks) == 1 else ((), ())
    if shape != tuple(tensor.to_local().shape) or not _is_contiguous_block(tensor):
        raise ManifestMismatch(
            f"tensor {name!r}: the local shard under placements {tensor.placements} is not one box of the tensor",
            hint="redistribute it to plain Shard placements, or pass it as Shard(tensor, offsets, shape)",
        )
    return (offsets, shape) if all(shape) else None


def _is_contiguous_block(tensor: DTensor) -> bool:
    """Whether the local shard is one block: strided shards are, in some orders only.

    Strided shards come from FSDP over tensor parallelism. The check follows one index
    through all placements.
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

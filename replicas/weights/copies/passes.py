"""Adapt a ``WeightSource`` of vLLM 0.33 as a stream of names and tensors.

Such a source has ``metadata`` as a property, and ``iter_full()`` and ``iter_local()``
instead of an iteration. The rows of ``metadata`` describe which trainer ranks own a
tensor and its layout there, so a rank's own pieces become shards without a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from replicas import errors

Piece = Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...]], object]


class Passes:
    """A vLLM ``WeightSource`` as a stream of (name, tensor), with ``metadata()``."""

    def __init__(self, source: Any, mode: Literal["image", "parts"], shard: Piece) -> None:
        """Keep the vLLM source; walk it when iterated.

        :param mode: ``"image"`` for whole tensors, ``"parts"`` for this rank's pieces.
        :param shard: makes a shard of a local tensor, its offsets, and the global
            shape.
        """
        self._source, self._mode, self._shard = source, mode, shard

    def metadata(self) -> Any:
        """Return the source's rows, with name, dtype and shape of each tensor."""
        return self._source.metadata

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Begin a walk of (name, whole tensor or this rank's piece); return it.

        Its steps may be collectives of the source's own group.

        :raises replicas.errors.UsageError: the source cannot give whole tensors.
        """
        if self._mode == "image" or not _has(self._source, "iter_local"):
            if not _has(self._source, "iter_full"):
                what = f"{type(self._source).__name__} has iter_local alone: each rank has its own pieces"
                raise errors.UsageError(
                    what, hint='set sources = [{ group = "...", ranks = "all" }], or write iter_full'
                )
            return iter(self._source.iter_full())
        rows = {row.name: row for row in self._source.metadata}
        return ((name, self._piece(rows[name], tensor)) for name, tensor in self._source.iter_local())

    def _piece(self, row: Any, local: torch.Tensor) -> object:
        """Return this rank's part of a tensor as a shard, or unchanged if not sharded.

        :param row: the source's metadata of the tensor. :param local: the part.
        """
        if row.placements is None:
            return local
        offsets, extents = [0] * len(row.shape), list(row.shape)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        place = row.owners.index(rank)
        for axis, placement in enumerate(row.placements):
            size = row.mesh_shape[axis]
            coordinate = place // math.prod(row.mesh_shape[axis + 1 :]) % size
            if (dim := getattr(placement, "dim", None)) is not None:  # as torch.chunk splits
                chunk = -(-extents[dim] // size)
                begin = min(coordinate * chunk, extents[dim])
                offsets[dim] += begin
                extents[dim] = min(chunk, extents[dim] - begin)
        return self._shard(local, tuple(offsets), tuple(row.shape))


def _has(source: Any, name: str) -> bool:
    """Return True if the source implements the method ``name``.

    vLLM's base class defines all methods, some only as stubs; there the method
    ``implements_NAME()`` is asked.
    """
    says = getattr(source, f"implements_{name}", None)
    return bool(says()) if callable(says) else callable(getattr(source, name, None))


def with_passes(weights: object, mode: Literal["image", "parts"], shard: Piece) -> object:
    """Wrap a vLLM ``WeightSource`` in :class:`Passes`; return others unchanged.

    :param weights: any object. :param mode: ``"image"`` for whole tensors, ``"parts"``
        for this rank's pieces. :param shard: makes a shard of a local tensor, its
        offsets, and the global shape.
    """
    is_source = callable(getattr(weights, "iter_full", None)) and not hasattr(weights, "__iter__")
    return Passes(weights, mode, shard) if is_source else weights

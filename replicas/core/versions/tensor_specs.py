"""Tensors and pieces of tensors as values: sizes, checks and memory layout.

See :mod:`replicas.core.versions.manifest` for how they make up an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Protocol

import msgspec

from replicas.errors import ManifestMismatch
from replicas.messages.bounds import MANIFEST_TENSORS, encodable

__all__ = [
    "ITEM_NBYTES",
    "Piece",
    "SegmentLike",
    "TensorSpec",
    "check_cover",
    "check_piece",
    "check_tensors",
    "item_nbytes",
    "packed_offsets",
    "piece_end",
    "segment_layout",
]

SEGMENT_ALIGNMENT_NBYTES = 64

ITEM_NBYTES = {
    "complex128": 16,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "complex32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Bytes of one element, by torch's dtype name without ``torch.``."""

MAX_NBYTES = 1 << 56


def item_nbytes(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``.

    :raises ManifestMismatch: the dtype cannot be moved.
    """
    try:
        return ITEM_NBYTES[dtype]
    except KeyError:
        raise ManifestMismatch(
            f"dtype {dtype!r} cannot be published", hint=f"use one of {', '.join(sorted(ITEM_NBYTES))}"
        ) from None


class SegmentLike(Protocol):
    """Anything with a dtype and a shape, such as :class:`replicas.messages.Segment`."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor: torch's dtype name without ``torch.``, and the global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * item_nbytes(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a tensor: ``shape`` elements from ``offsets`` on.

    ``tensor``: the tensor's number in its manifest. ``source_offset``: byte offset of
    its data (contiguous, row-major) in its owner's packed part.
    """

    tensor: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    source_offset: int


def packed_offsets(sizes: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Return gapless byte offsets for ``(dtype, nbytes)`` items.

    They are packed by falling item size, then in the given order.
    """
    order = sorted(range(len(sizes)), key=lambda index: -item_nbytes(sizes[index][0]))
    offsets = [0] * len(sizes)
    position = 0
    for index in order:
        offsets[index] = position
        position += sizes[index][1]
    return tuple(offsets)


def check_tensors(tensors: Sequence[TensorSpec], aliases: Sequence[tuple[str, str]]) -> None:
    if len(tensors) + len(aliases) > MANIFEST_TENSORS:
        raise ManifestMismatch(
            f"{len(tensors) + len(aliases):,} tensors: at most {MANIFEST_TENSORS:,} can be published together",
            hint="publish them stacked, or over several channels",
        )
    total = 0
    for spec in tensors:
        if not spec.name.isascii() and not encodable(spec.name):
            hint = "name it by characters that UTF-8 can say"
            raise ManifestMismatch(f"tensor name {spec.name!a} cannot travel", hint=hint)
        nbytes = item_nbytes(spec.dtype)
        for extent in spec.shape:
            if extent < 0:
                raise ManifestMismatch(f"tensor {spec.name!r} has a negative extent: {list(spec.shape)}", hint="")
            nbytes *= extent
        total += nbytes
    if total >= MAX_NBYTES:
        raise ManifestMismatch(f"the tensors add up to {total} bytes", hint="that is more than any machine has")
    names = {spec.name for spec in tensors}
    if len(names) < len(tensors) or "__metadata__" in names:
        _refuse_name([spec.name for spec in tensors])
    seen = {alias for alias, _ in aliases}
    if len(seen) < len(aliases) or not seen.isdisjoint(names) or "__metadata__" in seen:
        _refuse_name([*names, *(alias for alias, _ in aliases)])
    for alias, target in aliases:
        if target not in names:
            raise ManifestMismatch(f"tensor {alias!r} shares storage with unknown tensor {target!r}", hint="")


def _refuse_name(names: Iterable[str]) -> None:
    """Raise for the first reserved or repeated name."""
    seen = {"__metadata__"}
    for name in names:
        if name in seen:
            what = "is reserved by safetensors" if name == "__metadata__" else "appears twice"
            raise ManifestMismatch(f"tensor name {name!r} {what}", hint="give each tensor a name of its own")
        seen.add(name)


def piece_end(piece: Piece, tensors: Sequence[TensorSpec]) -> int:
    """Return the end of the piece in its owner's part, in bytes."""
    return piece.source_offset + prod(piece.shape) * item_nbytes(tensors[piece.tensor].dtype)


def check_piece(piece: Piece, tensors: Sequence[TensorSpec]) -> None:
    if not 0 <= piece.tensor < len(tensors):
        raise ManifestMismatch(f"a piece names tensor number {piece.tensor} of {len(tensors)}", hint="")
    spec = tensors[piece.tensor]
    inside = len(piece.offsets) == len(piece.shape) == len(spec.shape) and all(
        offset >= 0 and extent >= 1 and offset + extent <= limit
        for offset, extent, limit in zip(piece.offsets, piece.shape, spec.shape, strict=True)
    )
    if not inside:
        box = f"offsets {list(piece.offsets)} shape {list(piece.shape)}"
        raise ManifestMismatch(
            f"tensor {spec.name!r}: piece at {box} does not lie in {spec}", hint="check offsets and shape of the Shard"
        )
    if not 0 <= piece.source_offset < MAX_NBYTES or piece.source_offset % item_nbytes(spec.dtype):
        raise ManifestMismatch(f"tensor {spec.name!r}: a piece cannot lie at byte {piece.source_offset}", hint="")


def _overlap(first: Piece, second: Piece) -> bool:
    return all(
        a < b + extent_b and b < a + extent_a
        for a, extent_a, b, extent_b in zip(first.offsets, first.shape, second.offsets, second.shape, strict=True)
    )


def check_cover(tensors: Sequence[TensorSpec], parts: Sequence[Sequence[Piece]]) -> None:
    boxes: list[list[tuple[Piece, int]]] = [[] for _ in tensors]
    for number, part in enumerate(parts):
        for piece in part:
            boxes[piece.tensor].append((piece, number))
    for spec, found in zip(tensors, boxes, strict=True):
        _check_no_overlap(spec, found)
        covered = sum(prod(piece.shape) for piece, _ in found)
        if covered != prod(spec.shape):
            raise ManifestMismatch(
                f"tensor {spec.name!r}: the ranks have {covered} of {prod(spec.shape)} elements of {spec}",
                hint="publish every shard of every tensor from some rank",
            )


def _check_no_overlap(spec: TensorSpec, found: Sequence[tuple[Piece, int]]) -> None:
    """Raise if two boxes overlap.

    It sweeps along the dimension in which the boxes differ most, so that thousands of
    shards stay cheap.
    """
    if len(found) < 2:
        return
    axes = range(len(spec.shape))
    axis = max(axes, key=lambda axis: len({piece.offsets[axis] for piece, _ in found}), default=None)
    active: list[tuple[Piece, int]] = []
    for piece, part in found if axis is None else sorted(found, key=lambda entry: entry[0].offsets[axis]):
        if axis is not None:
            start = piece.offsets[axis]
            active = [entry for entry in active if entry[0].offsets[axis] + entry[0].shape[axis] > start]
        for other, other_part in active:
            if _overlap(piece, other):
                raise ManifestMismatch(
                    f"tensor {spec.name!r}: ranks {other_part} and {part} both have elements at {list(piece.offsets)}",
                    hint="shards of a tensor must be identical or must not overlap",
                )
        active.append((piece, part))


def segment_layout(segments: Iterable[SegmentLike]) -> tuple[tuple[int, ...], int]:
    """Return the offset of each segment and their total size, in bytes.

    Each segment starts at a multiple of 64.
    """
    offsets: list[int] = []
    position = 0
    for segment in segments:
        offsets.append(position)
        nbytes = prod(segment.shape) * item_nbytes(segment.dtype)
        position += -(-nbytes // SEGMENT_ALIGNMENT_NBYTES) * SEGMENT_ALIGNMENT_NBYTES
    return tuple(offsets), position

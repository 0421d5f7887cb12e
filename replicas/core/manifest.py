"""What a set of weights looks like: names, dtypes, shapes, and where each byte lies.

Theory of operation
===================

A slot holds one complete version as a valid safetensors file (an *image*): an 8-byte length, a JSON header that is
padded with spaces until the data starts on a page, then the data. Tensors lie by falling item size, then in the order
in which they were given: every tensor starts at a multiple of its item size and no byte is left between two of them,
as safetensors demands. The header follows from the tensors and aliases alone, so that all holders of a version have
the same bytes, however the version was put together.

A rank describes what it publishes by a :class:`PartManifest`. A whole image has ``pieces = None``. A rank of a source
with ``ranks = "all"`` has a *part*: boxes (:class:`Piece`) of global tensors, packed one after another. The coordinator
makes one :class:`Manifest` of all parts with :func:`merge_parts`: each byte of each tensor comes from exactly one part.
Identical boxes (a replicated tensor) are taken from the lowest part that has them.

Everything here is pure and knows torch's dtypes by name only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Protocol, TypeVar

import msgspec
import xxhash

from replicas.errors import ManifestMismatch

__all__ = [
    "ALIGNMENT_NBYTES",
    "ITEM_NBYTES",
    "Manifest",
    "PartManifest",
    "Piece",
    "SegmentLike",
    "TensorSpec",
    "difference",
    "item_nbytes",
    "merge_parts",
    "packed_offsets",
    "segment_layout",
]

ALIGNMENT_NBYTES = 4096
"""The data section of an image starts at a multiple of this."""

SEGMENT_ALIGNMENT_NBYTES = 64

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
}

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

_MAX_NBYTES = 1 << 56


def item_nbytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``; :class:`ManifestMismatch` for a dtype that cannot be moved."""
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


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: ``dtype`` is torch's name without ``torch.``; ``shape`` is the global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * item_nbytes(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor: ``shape`` elements from ``offsets`` on, of tensor number ``tensor`` of its manifest.

    ``source_offset``: where its bytes (contiguous, row-major) start in its owner's packed part.
    """

    tensor: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    source_offset: int


_T = TypeVar("_T")


def _decode(data: bytes | memoryview, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ManifestMismatch(f"malformed manifest: {error}", hint="") from error


def packed_offsets(sizes: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Offsets without holes for ``(dtype, nbytes)`` each: by falling item size, then in the given order."""
    order = sorted(range(len(sizes)), key=lambda index: -item_nbytes(sizes[index][0]))
    offsets = [0] * len(sizes)
    position = 0
    for index in order:
        offsets[index] = position
        position += sizes[index][1]
    return tuple(offsets)


class PartManifest(msgspec.Struct, frozen=True, dict=True):
    """What one rank publishes.

    :param tensors: global specs; with ``pieces`` also of tensors of which this rank has only a part.
    :param aliases: ``(name, name of the tensor that it shares storage with)``.
    :param pieces: None for a whole image; else the boxes that the rank's packed part holds.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    pieces: tuple[Piece, ...] | None = None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> PartManifest:
        """The opposite of :meth:`encode`; :class:`ManifestMismatch` for anything malformed or inconsistent."""
        part = _decode(data, cls)
        part.validate()
        return part

    @cached_property
    def hash(self) -> str:
        """xxh3-128 of the encoding, in hex."""
        return xxhash.xxh3_128_hexdigest(self.encode())

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the slot that holds it: a whole image with its header, or a packed part without one."""
        if self.pieces is None:
            return self.whole.image_nbytes
        return sum(prod(piece.shape) * item_nbytes(self.tensors[piece.tensor].dtype) for piece in self.pieces)

    @cached_property
    def whole(self) -> Manifest:
        """The manifest of the image that a rank with everything publishes alone."""
        return Manifest(self.tensors, self.aliases)

    def validate(self) -> None:
        """Raise :class:`ManifestMismatch` unless names are unique and pieces lie within their tensors."""
        _check_tensors(self.tensors, self.aliases)
        for piece in self.pieces or ():
            _check_piece(piece, self.tensors)
        end = max((_end(piece, self.tensors) for piece in self.pieces or ()), default=0)
        if self.pieces is not None and end > self.nbytes:
            raise ManifestMismatch(f"a piece ends at byte {end} of a part of {self.nbytes} bytes", hint="")


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """One version's tensors and, when several ranks send it, which part owns which box.

    :param tensors: in the order in which they were given; :attr:`offsets` says where they lie.
    :param aliases: ``(name, name of the tensor that it shares storage with)``.
    :param parts: None when one sender has the whole image; else the pieces to take from each part. A piece's
        ``source_offset`` refers to its owner's packed part.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[Piece, ...], ...] | None = None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Manifest:
        """The opposite of :meth:`encode`; :class:`ManifestMismatch` for anything malformed or inconsistent."""
        manifest = _decode(data, cls)
        manifest.validate()
        return manifest

    def validate(self) -> None:
        """Raise :class:`ManifestMismatch` unless names are unique and the parts cover each tensor exactly once."""
        _check_tensors(self.tensors, self.aliases)
        if self.parts is not None:
            for piece in (piece for part in self.parts for piece in part):
                _check_piece(piece, self.tensors)
            _check_cover(self.tensors, self.parts)

    @cached_property
    def hash(self) -> str:
        """xxh3-128 of the encoding, in hex."""
        return xxhash.xxh3_128_hexdigest(self.encode())

    @cached_property
    def content_hash(self) -> str:
        """Like :attr:`hash`, of tensors and aliases alone: equal for the same weights in other parts."""
        return Manifest(self.tensors, self.aliases).hash

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts in the data section, in bytes, in the order of :attr:`tensors`."""
        return packed_offsets([(tensor.dtype, tensor.nbytes) for tensor in self.tensors])

    @cached_property
    def data_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def header(self) -> bytes:
        """The safetensors header with its 8-byte length; its size is a multiple of :data:`ALIGNMENT_NBYTES`."""
        raw = {spec.name: spec.dtype for spec in self.tensors if spec.dtype not in _SAFETENSORS}
        metadata = {"format": "pt"}
        if self.aliases:
            metadata["replicas.aliases"] = json.dumps(dict(self.aliases))
        if raw:
            metadata["replicas.dtypes"] = json.dumps(raw)
        entries: dict[str, object] = {"__metadata__": metadata}
        for index in sorted(range(len(self.tensors)), key=self.offsets.__getitem__):
            spec, start = self.tensors[index], self.offsets[index]
            code = _SAFETENSORS.get(spec.dtype)
            shape = spec.shape if code else (*spec.shape, item_nbytes(spec.dtype))
            offsets = [start, start + spec.nbytes]
            entries[spec.name] = {"dtype": code or "U8", "shape": shape, "data_offsets": offsets}
        body = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        body += b" " * (-(8 + len(body)) % ALIGNMENT_NBYTES)
        return len(body).to_bytes(8, "little") + body

    @cached_property
    def data_offset(self) -> int:
        """Where the data section starts in the image."""
        return len(self.header)

    @cached_property
    def image_nbytes(self) -> int:
        """Size of the whole image, which is the size of a valid safetensors file."""
        return self.data_offset + self.data_nbytes

    @cached_property
    def index(self) -> dict[str, int]:
        """Number of each tensor by its name; aliases included."""
        found = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        return found | {alias: found[target] for alias, target in self.aliases}

    def part_nbytes(self, part: int) -> int:
        """Bytes that part number ``part`` sends."""
        pieces = self.parts[part] if self.parts is not None else ()
        return sum(prod(piece.shape) * item_nbytes(self.tensors[piece.tensor].dtype) for piece in pieces)


# ---------------------------------------------------------------- checks


def _check_tensors(tensors: Sequence[TensorSpec], aliases: Sequence[tuple[str, str]]) -> None:
    names: set[str] = set()
    total = 0
    for spec in tensors:
        if spec.name in names or spec.name == "__metadata__":
            what = "is reserved by safetensors" if spec.name == "__metadata__" else "appears twice"
            raise ManifestMismatch(f"tensor name {spec.name!r} {what}", hint="give each tensor a name of its own")
        if any(extent < 0 for extent in spec.shape):
            raise ManifestMismatch(f"tensor {spec.name!r} has a negative extent: {list(spec.shape)}", hint="")
        names.add(spec.name)
        total += spec.nbytes
    if total >= _MAX_NBYTES:
        raise ManifestMismatch(f"the tensors add up to {total} bytes", hint="that is more than any machine has")
    seen: set[str] = set()
    for alias, target in aliases:
        if alias in names or alias in seen or alias == "__metadata__":
            raise ManifestMismatch(f"tensor name {alias!r} appears twice", hint="give each tensor a name of its own")
        if target not in names:
            raise ManifestMismatch(f"tensor {alias!r} shares storage with unknown tensor {target!r}", hint="")
        seen.add(alias)


def _end(piece: Piece, tensors: Sequence[TensorSpec]) -> int:
    """Where the piece ends in its owner's part."""
    return piece.source_offset + prod(piece.shape) * item_nbytes(tensors[piece.tensor].dtype)


def _check_piece(piece: Piece, tensors: Sequence[TensorSpec]) -> None:
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
    if not 0 <= piece.source_offset < _MAX_NBYTES or piece.source_offset % item_nbytes(spec.dtype):
        raise ManifestMismatch(f"tensor {spec.name!r}: a piece cannot lie at byte {piece.source_offset}", hint="")


def _overlap(first: Piece, second: Piece) -> bool:
    return all(
        a < b + extent_b and b < a + extent_a
        for a, extent_a, b, extent_b in zip(first.offsets, first.shape, second.offsets, second.shape, strict=True)
    )


def _check_cover(tensors: Sequence[TensorSpec], parts: Sequence[Sequence[Piece]]) -> None:
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
    """Sweep along the dimension in which the boxes differ most, so that thousands of shards stay cheap."""
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


# ---------------------------------------------------------------- several parts, one image


def merge_parts(parts: Sequence[PartManifest]) -> Manifest:
    """One manifest for what all ``parts`` hold together.

    A single whole image keeps ``parts = None``. Tensors come in the order of the first part that names them.

    :raises ManifestMismatch: naming the tensor, when parts disagree on a shape or dtype, overlap, or leave a hole.
    """
    for part in parts:
        part.validate()
    if len(parts) == 1 and parts[0].pieces is None:
        return parts[0].whole
    for number, part in enumerate(parts):
        if part.pieces is None:
            raise ManifestMismatch(
                f"rank {number} publishes a whole image, but other ranks publish parts",
                hint="publish alike on all ranks",
            )
    tensors: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    for number, part in enumerate(parts):
        _merge_names(number, part, tensors, aliases)
    numbers = {name: number for number, name in enumerate(tensors)}
    taken: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    owned: list[tuple[Piece, ...]] = []
    for part in parts:
        mine: list[Piece] = []
        for piece in part.pieces or ():
            number = numbers[part.tensors[piece.tensor].name]
            box = (number, piece.offsets, piece.shape)
            if box not in taken:
                taken.add(box)
                mine.append(Piece(number, piece.offsets, piece.shape, piece.source_offset))
        owned.append(tuple(mine))
    merged = Manifest(tuple(tensors.values()), tuple(aliases.items()), tuple(owned))
    merged.validate()
    return merged


def _merge_names(number: int, part: PartManifest, tensors: dict[str, TensorSpec], aliases: dict[str, str]) -> None:
    for spec in part.tensors:
        known = tensors.setdefault(spec.name, spec)
        if known != spec:
            raise ManifestMismatch(
                f"tensor {spec.name!r}: rank {number} has {spec}, a lower rank has {known}",
                hint="every rank must give the same global shape and dtype",
            )
    for alias, target in part.aliases:
        if aliases.setdefault(alias, target) != target:
            raise ManifestMismatch(
                f"tensor {alias!r}: rank {number} ties it to {target!r}, a lower rank to {aliases[alias]!r}",
                hint="tie the same tensors on every rank",
            )


def difference(old: Manifest | PartManifest, new: Manifest | PartManifest, *, limit: int = 3) -> str:
    """The first ``limit`` differences in tensors and aliases as text, or an empty string when there is none."""
    found = list(_differences(old, new))
    if not found and (old.tensors, old.aliases) != (new.tensors, new.aliases):
        found = ["the same tensors in another order"]
    shown = "; ".join(found[:limit])
    return f"{shown}; and {len(found) - limit} more" if len(found) > limit else shown


def _differences(old: Manifest | PartManifest, new: Manifest | PartManifest) -> Iterable[str]:
    before = {spec.name: spec for spec in old.tensors}
    after = {spec.name: spec for spec in new.tensors}
    for name, spec in after.items():
        if name not in before:
            yield f"{name!r} ({spec}) is new"
        elif before[name] != spec:
            yield f"{name!r} was {before[name]}, is {spec}"
    yield from (f"{name!r} ({spec}) is missing" for name, spec in before.items() if name not in after)
    old_aliases, new_aliases = dict(old.aliases), dict(new.aliases)
    for alias in [*old_aliases, *(name for name in new_aliases if name not in old_aliases)]:
        was, now = old_aliases.get(alias), new_aliases.get(alias)
        if was != now and alias not in before and alias not in after:
            yield f"{alias!r} was tied to {was}, is tied to {now}"


# ---------------------------------------------------------------- operations


def segment_layout(segments: Iterable[SegmentLike]) -> tuple[tuple[int, ...], int]:
    """Offset of each segment and the size of them all, in bytes; each starts at a multiple of 64."""
    offsets: list[int] = []
    position = 0
    for segment in segments:
        offsets.append(position)
        nbytes = prod(segment.shape) * item_nbytes(segment.dtype)
        position += -(-nbytes // SEGMENT_ALIGNMENT_NBYTES) * SEGMENT_ALIGNMENT_NBYTES
    return tuple(offsets), position

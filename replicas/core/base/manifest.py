"""Manifests: names, dtypes and shapes of a set of weights, and the offset of each byte.

A slot holds one complete version as a valid safetensors file (an *image*): an 8-byte
length, a JSON header that is padded with spaces until the data starts on a page, then
the data. Tensors are packed by falling item size, then in the given order: every tensor
starts at a multiple of its item size, and there is no gap between two tensors, as
safetensors demands. The header follows from the tensors and aliases alone, so that all
holders of a version have the same bytes, however the version was assembled.

The header gives a dtype that safetensors lacks under torch's name. Such an image is
mapped like any other, and every reader of files refuses it
(:meth:`Manifest.check_file`).

A rank describes its publish by a :class:`PartManifest`. A whole image has ``pieces =
None``. A rank of a source with ``ranks = "all"`` has a *part*: boxes (:class:`Piece`)
of global tensors, packed one after another. The coordinator makes one :class:`Manifest`
of all parts (:func:`replicas.core.versions.manifests.merge_parts`).

This module does no I/O, and knows torch's dtypes by name only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Annotated, Any, Self

import msgspec
import xxhash

from replicas.common.decoding import MALFORMED
from replicas.core.base.dtypes import CODES, FILE_CODES, PACKED, item_nbytes
from replicas.errors import ManifestMismatch
from replicas.messages import Segment
from replicas.messages.bounds import MANIFEST_NBYTES, MANIFEST_TENSORS, encodable

ALIGNMENT_NBYTES = 4096
"""The data section of an image starts at a multiple of this."""
SEGMENT_ALIGNMENT_NBYTES = 64
MAX_NBYTES = 1 << 56


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor: torch's dtype name without ``torch.``, and the global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * item_nbytes(self.dtype)

    @property
    def in_file(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape as in a safetensors file; torch's if safetensors has none."""
        code = FILE_CODES[self.dtype]
        if code not in PACKED:
            return code or self.dtype, self.shape
        # safetensors counts half bytes along the last dimension: a scalar has none
        return (code, (*self.shape[:-1], self.shape[-1] * PACKED[code])) if self.shape else (self.dtype, ())

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


def _nbytes(pieces: Iterable[Piece], tensors: Sequence[TensorSpec]) -> int:
    """Return the size of all pieces in bytes; ``tensors``: those of their manifest."""
    return sum(prod(piece.shape) * item_nbytes(tensors[piece.tensor].dtype) for piece in pieces)


class AnyManifest(msgspec.Struct, frozen=True, dict=True):
    """Tensors, identified by the hash of their encoding.

    :param tensors: in the given order; global specs, also of tensors of which a rank
        has only a part.
    :param aliases: ``(name, name of the tensor that it shares storage with)``.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        """Return the manifest as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Decode and validate the output of :meth:`encode`.

        :raises ManifestMismatch: it is malformed or inconsistent.
        """
        manifest = cls.decode_only(data)
        manifest.validate()
        return manifest

    @classmethod
    def decode_only(cls, data: bytes | memoryview) -> Self:
        """Decode the output of :meth:`encode` without validation.

        :raises ManifestMismatch: it is malformed.
        """
        try:
            decoded: Self = _decoders[cls].decode(data)
        except MALFORMED as error:
            raise ManifestMismatch(f"malformed manifest: {error}", hint="") from error
        return decoded

    def validate(self) -> None:
        """Check names, shapes, dtypes and aliases of the tensors.

        :raises ManifestMismatch: one of them cannot be published.
        """
        check_tensors(self.tensors, self.aliases)

    @cached_property
    def regions(self) -> tuple[tuple[int, int, int], ...]:
        """Ranges of the data section in which all numbers have one size.

        ``(start, end, bytes of a number)`` each, in bytes from the data section's
        start.
        """
        return packed_regions((tensor.dtype, tensor.nbytes) for tensor in self.tensors)

    @property
    def hash(self) -> str:
        """xxh3-128 of the encoding, in hex; computed at the first use, then cached."""
        return self._sealed[0]

    @property
    def encoded_nbytes(self) -> int:
        """Size of the encoding in bytes; computed at the first use, then cached."""
        return self._sealed[1]

    @cached_property
    def _sealed(self) -> tuple[str, int]:
        """``(hash, size in bytes)`` of the encoding, computed once."""
        encoded = self.encode()
        return xxhash.xxh3_128_hexdigest(encoded), len(encoded)


class PartManifest(AnyManifest, frozen=True, dict=True):
    """The manifest of one rank's publish.

    :param pieces: None for a whole image; else the boxes in the rank's packed part.
    """

    pieces: tuple[Piece, ...] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the rank's slot: an image with its header, or a part without one."""
        return self.whole.image_nbytes if self.pieces is None else _nbytes(self.pieces, self.tensors)

    @cached_property
    def whole(self) -> Manifest:
        """The manifest of an image of these tensors; valid if ``pieces`` is None."""
        return Manifest(self.tensors, self.aliases)

    @cached_property
    def regions(self) -> tuple[tuple[int, int, int], ...]:
        """Ranges of the rank's packed tensors in which all numbers have one size, as
        ``(start, end, bytes of one number)``."""
        if self.pieces is None:
            return self.whole.regions
        pieces = ((self.tensors[piece.tensor].dtype, _nbytes([piece], self.tensors)) for piece in self.pieces)
        return packed_regions(pieces)

    def validate(self) -> None:
        """Check tensors as a whole manifest does, and that each piece fits its tensor.

        :raises ManifestMismatch: they do not.
        """
        super().validate()
        for piece in self.pieces or ():
            _check_piece(piece, self.tensors)
        end = max((piece.source_offset + _nbytes([piece], self.tensors) for piece in self.pieces or ()), default=0)
        if self.pieces is not None and end > self.nbytes:
            raise ManifestMismatch(f"a piece ends at byte {end} of a part of {self.nbytes} bytes", hint="")


_Size = Annotated[int, msgspec.Meta(ge=0)]


class FileEntry(msgspec.Struct):
    """A tensor in the header of a safetensors file; offsets count from its data."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class Manifest(AnyManifest, frozen=True, dict=True):
    """One version's tensors and, when several ranks send it, the owner of each box.

    :param parts: None when one sender has the whole image; else the pieces to take from
        each part. A piece's ``source_offset`` refers to its owner's packed part.
    """

    parts: tuple[tuple[Piece, ...], ...] | None = None

    def validate(self) -> None:
        """Raise ManifestMismatch for bad tensors, or if parts miss or repeat bytes."""
        super().validate()
        if self.parts is not None:
            for piece in (piece for part in self.parts for piece in part):
                _check_piece(piece, self.tensors)
            check_cover(self.tensors, self.parts)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offsets in the data section, in the order of ``tensors``."""
        return packed_offsets([(tensor.dtype, tensor.nbytes) for tensor in self.tensors])

    @cached_property
    def data_nbytes(self) -> int:
        """Bytes of the data section."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def header(self) -> bytes:
        """The safetensors header with its 8-byte length and its padding."""
        metadata = {"format": "pt"}
        if self.aliases:
            metadata["replicas.aliases"] = msgspec.json.encode(dict(self.aliases)).decode()
        entries: dict[str, object] = {"__metadata__": metadata}
        offsets = self.offsets
        for index in sorted(range(len(self.tensors)), key=offsets.__getitem__):
            spec, start = self.tensors[index], offsets[index]
            entries[spec.name] = FileEntry(*spec.in_file, (start, start + spec.nbytes))
        body = msgspec.json.encode(entries)
        body += b" " * (-(8 + len(body)) % ALIGNMENT_NBYTES)
        return len(body).to_bytes(8, "little") + body

    def check_file(self) -> None:
        """Check that safetensors has every dtype, so that the image is a valid file.

        :raises ManifestMismatch: safetensors lacks a dtype.
        """
        for spec in self.tensors:
            if (code := spec.in_file[0]) not in CODES:
                text = (
                    f"tensor {spec.name!r} is {spec}, and safetensors has no such dtype: the version cannot be a file"
                )
                raise ManifestMismatch(text, hint=f"publish it as another dtype than {code}, or read the tensors")

    @cached_property
    def data_offset(self) -> int:
        """Byte offset of the data section in the image."""
        return len(self.header)

    @cached_property
    def image_nbytes(self) -> int:
        """Bytes of the whole image, the size of a valid safetensors file."""
        return self.data_offset + self.data_nbytes

    @cached_property
    def index(self) -> dict[str, int]:
        """Number of each tensor by its name; an alias has the number of its tensor."""
        found = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        return found | {alias: found[target] for alias, target in self.aliases}

    def part_nbytes(self, part: int) -> int:
        """Return the size in bytes of part number ``part``; 0 if there are no parts."""
        return _nbytes(self.parts[part], self.tensors) if self.parts is not None else 0


# Made at import, not at the first use: msgspec inspects a struct type at its first use,
# and two threads that do so at once crash the process (a half-inspected type has null
# pointers in it).
_decoders: dict[type[AnyManifest], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (PartManifest, Manifest)
}


def packed_offsets(sizes: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Return the byte offset of each ``(dtype, nbytes)`` tensor, packed without gaps.

    Tensors with the largest elements come first; equal ones keep the given order.
    """
    order = sorted(range(len(sizes)), key=lambda index: -item_nbytes(sizes[index][0]))
    offsets = [0] * len(sizes)
    position = 0
    for index in order:
        offsets[index] = position
        position += sizes[index][1]
    return tuple(offsets)


def packed_regions(sizes: Iterable[tuple[str, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return ``(start, end, bytes of one number)`` of each range of like numbers.

    These are the ranges in which :func:`packed_offsets` puts tensors of these
    ``sizes``, given as ``(dtype, nbytes)``. A complex number is two numbers.
    """
    nbytes = Counter[int]()
    for dtype, size in sizes:
        nbytes[min(8, item_nbytes(dtype))] += size  # a complex number is two numbers
    regions: list[tuple[int, int, int]] = []
    for width in sorted(+nbytes, reverse=True):
        start = regions[-1][1] if regions else 0
        regions.append((start, start + nbytes[width], width))
    return tuple(regions)


def segment_layout(segments: Iterable[Segment | TensorSpec]) -> tuple[tuple[int, ...], int]:
    """Return ``(offset of each segment, total size)`` in bytes.

    A segment is one tensor of an operation; each starts at a multiple of 64.
    """
    offsets: list[int] = []
    position = 0
    for segment in segments:
        offsets.append(position)
        nbytes = prod(segment.shape) * item_nbytes(segment.dtype)
        position += -(-nbytes // SEGMENT_ALIGNMENT_NBYTES) * SEGMENT_ALIGNMENT_NBYTES
    return tuple(offsets), position


# ------------------------------------------------------------ checks


def check_size(manifest: AnyManifest) -> None:
    """Check that the manifest is within the limits on tensors and bytes.

    :raises ManifestMismatch: it is too large.
    """
    tensors, nbytes = len(manifest.tensors) + len(manifest.aliases), manifest.encoded_nbytes
    if nbytes > MANIFEST_NBYTES or tensors > MANIFEST_TENSORS:
        raise ManifestMismatch(
            f"a manifest of {tensors:,} tensors and {nbytes:,} bytes: at most {MANIFEST_TENSORS:,} tensors "
            f"and {MANIFEST_NBYTES:,} bytes can be published together",
            hint="publish them stacked, with shorter names, or over several channels",
        )


def check_tensors(tensors: Sequence[TensorSpec], aliases: Sequence[tuple[str, str]]) -> None:
    """Check names, shapes, dtypes, the total size, and ``(alias, target)`` pairs.

    :raises ManifestMismatch: one of them cannot be published.
    """
    count = len(tensors) + len(aliases)
    if count > MANIFEST_TENSORS:
        raise ManifestMismatch(
            f"{count:,} tensors: at most {MANIFEST_TENSORS:,} can be published together",
            hint="publish them stacked, or over several channels",
        )
    total = 0
    for spec in tensors:
        if not spec.name.isascii() and not encodable(spec.name):
            hint = "use only characters that UTF-8 can encode"
            raise ManifestMismatch(f"tensor name {spec.name!a} cannot be sent", hint=hint)
        nbytes = item_nbytes(spec.dtype)
        for extent in spec.shape:
            if extent < 0:
                raise ManifestMismatch(f"tensor {spec.name!r} has a negative extent: {list(spec.shape)}", hint="")
            nbytes *= extent
        total += nbytes
    if total >= MAX_NBYTES:
        raise ManifestMismatch(f"the tensors add up to {total} bytes", hint="that is more than any machine has")
    names = [*(spec.name for spec in tensors), *(alias for alias, _ in aliases)]
    if len({"__metadata__", *names}) <= count:
        name = next(name for name, times in Counter(["__metadata__", *names]).items() if times > 1)
        what = "is reserved by safetensors" if name == "__metadata__" else "appears twice"
        raise ManifestMismatch(f"tensor name {name!r} {what}", hint="give each tensor a name of its own")
    known = set(names[: len(tensors)]) if aliases else ()
    for alias, target in aliases:
        if target not in known:
            raise ManifestMismatch(f"tensor {alias!r} shares storage with unknown tensor {target!r}", hint="")


def _check_piece(piece: Piece, tensors: Sequence[TensorSpec]) -> None:
    """Raise ManifestMismatch if the piece, a box, does not lie in its tensor, or if its
    byte offset in its owner's part is out of range or misaligned."""
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


def check_cover(tensors: Sequence[TensorSpec], parts: Sequence[Sequence[Piece]]) -> None:
    """Raise ManifestMismatch if a tensor has a hole, or an element in two parts.

    :param parts: the pieces of each part.
    """
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
    """Raise ManifestMismatch if two boxes of the tensor overlap.

    It sweeps along the dimension in which the boxes differ most, so that thousands of
    shards stay cheap.

    :param found: each box, and the number of its part.
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
            bounds = zip(piece.offsets, piece.shape, other.offsets, other.shape, strict=True)
            if all(a < b + extent_b and b < a + extent_a for a, extent_a, b, extent_b in bounds):
                raise ManifestMismatch(
                    f"tensor {spec.name!r}: ranks {other_part} and {part} both have elements at {list(piece.offsets)}",
                    hint="shards of a tensor must be identical or must not overlap",
                )
        active.append((piece, part))

"""Manifests: names, dtypes and shapes of a set of weights, and where each byte is.

Theory of operation
===================

A slot holds one complete version as a valid safetensors file (an *image*): an 8-byte
length, a JSON header that is padded with spaces until the data starts on a page, then
the data. Tensors are packed by falling item size, then in the given order: every tensor
starts at a multiple of its item size, and there is no gap between two of them, as
safetensors demands. The header follows from the tensors and aliases alone, so that all
holders of a version have the same bytes, however the version was assembled.

A rank describes its publish by a :class:`PartManifest`. A whole image has
``pieces = None``. A rank of a source with ``ranks = "all"`` has a *part*: boxes
(:class:`Piece`) of global tensors, packed one after another. The coordinator makes one
:class:`Manifest` of all parts with :func:`merge_parts`: each byte of each tensor comes
from exactly one part. Identical boxes (a replicated tensor) are taken from the lowest
part that has them.

This module does no I/O, and knows torch's dtypes by name only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import TypeVar

import msgspec
import xxhash

from replicas.common.decoding import MALFORMED
from replicas.core.versions.tensor_specs import (
    ITEM_NBYTES,
    Piece,
    SegmentLike,
    TensorSpec,
    check_cover,
    check_piece,
    check_tensors,
    item_nbytes,
    packed_offsets,
    piece_end,
    segment_layout,
)
from replicas.errors import ManifestMismatch
from replicas.messages.bounds import MANIFEST_NBYTES, MANIFEST_TENSORS

__all__ = [
    "ALIGNMENT_NBYTES",
    "ITEM_NBYTES",
    "Manifest",
    "PartManifest",
    "Piece",
    "SegmentLike",
    "TensorSpec",
    "check_size",
    "difference",
    "item_nbytes",
    "merge_parts",
    "packed_offsets",
    "segment_layout",
]

ALIGNMENT_NBYTES = 4096
"""The data section of an image starts at a multiple of this."""

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

_T = TypeVar("_T")


class _Entry(msgspec.Struct):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _decode(data: bytes | memoryview, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    try:
        return decoder.decode(data)
    except MALFORMED as error:
        raise ManifestMismatch(f"malformed manifest: {error}", hint="") from error


class _Encoded(msgspec.Struct, frozen=True, dict=True):
    """A manifest that is identified by the hash of its encoding."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @cached_property
    def hash(self) -> str:
        """xxh3-128 of the encoding, in hex."""
        return self._sealed[0]

    @property
    def encoded_nbytes(self) -> int:
        return self._sealed[1]

    @cached_property
    def _sealed(self) -> tuple[str, int]:
        encoded = self.encode()
        return xxhash.xxh3_128_hexdigest(encoded), len(encoded)


class PartManifest(_Encoded, frozen=True, dict=True):
    """The manifest of what one rank publishes.

    :param tensors: global specs; with ``pieces`` also of tensors of which this rank has
        only a part.
    :param aliases: ``(name, name of the tensor that it shares storage with)``.
    :param pieces: None for a whole image; else the boxes that the rank's packed part
        holds.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    pieces: tuple[Piece, ...] | None = None

    @classmethod
    def decode(cls, data: bytes | memoryview) -> PartManifest:
        """Decode and validate the output of :meth:`encode`.

        :raises ManifestMismatch: it is malformed or inconsistent.
        """
        part = cls.decode_only(data)
        part.validate()
        return part

    @classmethod
    def decode_only(cls, data: bytes | memoryview) -> PartManifest:
        """Decode without validation, which :func:`merge_parts` does itself."""
        return _decode(data, _part_decoder)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its slot: an image with its header, or a packed part without."""
        if self.pieces is None:
            return self.whole.image_nbytes
        return sum(prod(piece.shape) * item_nbytes(self.tensors[piece.tensor].dtype) for piece in self.pieces)

    @cached_property
    def whole(self) -> Manifest:
        """The manifest of the image that a rank with everything publishes alone."""
        return Manifest(self.tensors, self.aliases)

    def validate(self) -> None:
        """Check that names are unique and pieces lie within their tensors.

        :raises ManifestMismatch: they are not.
        """
        check_tensors(self.tensors, self.aliases)
        for piece in self.pieces or ():
            check_piece(piece, self.tensors)
        end = max((piece_end(piece, self.tensors) for piece in self.pieces or ()), default=0)
        if self.pieces is not None and end > self.nbytes:
            raise ManifestMismatch(f"a piece ends at byte {end} of a part of {self.nbytes} bytes", hint="")


class Manifest(_Encoded, frozen=True, dict=True):
    """One version's tensors and, when several ranks send it, which part owns which box.

    :param tensors: in the given order; :attr:`offsets` has their positions.
    :param aliases: ``(name, name of the tensor that it shares storage with)``.
    :param parts: None when one sender has the whole image; else the pieces to take from
        each part. A piece's ``source_offset`` refers to its owner's packed part.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[Piece, ...], ...] | None = None

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Manifest:
        """Decode and validate the output of :meth:`encode`.

        :raises ManifestMismatch: it is malformed or inconsistent.
        """
        manifest = _decode(data, _manifest_decoder)
        manifest.validate()
        return manifest

    def validate(self) -> None:
        """Check that names are unique and the parts cover each tensor exactly once.

        :raises ManifestMismatch: they do not.
        """
        check_tensors(self.tensors, self.aliases)
        if self.parts is not None:
            for piece in (piece for part in self.parts for piece in part):
                check_piece(piece, self.tensors)
            check_cover(self.tensors, self.parts)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offsets in the data section, in the order of :attr:`tensors`."""
        return packed_offsets([(tensor.dtype, tensor.nbytes) for tensor in self.tensors])

    @cached_property
    def data_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def header(self) -> bytes:
        """The safetensors header with its 8-byte length.

        Its size is a multiple of :data:`ALIGNMENT_NBYTES`.
        """
        raw = {spec.name: spec.dtype for spec in self.tensors if spec.dtype not in _SAFETENSORS}
        metadata = {"format": "pt"}
        if self.aliases:
            metadata["replicas.aliases"] = msgspec.json.encode(dict(self.aliases)).decode()
        if raw:
            metadata["replicas.dtypes"] = msgspec.json.encode(raw).decode()
        entries: dict[str, object] = {"__metadata__": metadata}
        offsets = self.offsets
        for index in sorted(range(len(self.tensors)), key=offsets.__getitem__):
            spec, start = self.tensors[index], offsets[index]
            code = _SAFETENSORS.get(spec.dtype)
            shape = spec.shape if code else (*spec.shape, item_nbytes(spec.dtype))
            entries[spec.name] = _Entry(code or "U8", shape, (start, start + spec.nbytes))
        body = msgspec.json.encode(entries)
        body += b" " * (-(8 + len(body)) % ALIGNMENT_NBYTES)
        return len(body).to_bytes(8, "little") + body

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
        """Number of each tensor by its name; aliases included."""
        found = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        return found | {alias: found[target] for alias, target in self.aliases}

    def part_nbytes(self, part: int) -> int:
        """Return the bytes that part number ``part`` sends."""
        pieces = self.parts[part] if self.parts is not None else ()
        return sum(prod(piece.shape) * item_nbytes(self.tensors[piece.tensor].dtype) for piece in pieces)


# ------------------------------------------------------------- several parts, one image


# Made at import, not at the first use: msgspec inspects a struct type at its first use,
# and two threads that do so at once crash the process (a half-inspected type has null
# pointers in it).
_part_decoder = msgspec.msgpack.Decoder(PartManifest)
_manifest_decoder = msgspec.msgpack.Decoder(Manifest)


def merge_parts(parts: Sequence[PartManifest]) -> Manifest:
    """Merge the manifests of all ``parts`` into one.

    A single whole image keeps ``parts = None``. Tensors come in the order of the first
    part that names them.

    :raises ManifestMismatch: naming the tensor, when parts disagree on a shape or
        dtype, overlap, or leave a hole.
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
    check_tensors(merged.tensors, merged.aliases)
    check_cover(merged.tensors, owned)  # each part has already checked that its pieces lie in their tensors
    return merged


def check_size(manifest: Manifest | PartManifest) -> None:
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
    """Return the first ``limit`` differences in tensors and aliases; empty: none."""
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

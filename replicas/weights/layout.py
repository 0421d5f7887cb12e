"""From entries of a walk to a manifest, and from a manifest to places in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from replicas.core.manifest import PartManifest, Piece, TensorSpec, item_nbytes, packed_offsets
from replicas.errors import ManifestMismatch
from replicas.weights.dtensor import Box
from replicas.weights.tensors import bits, torch_dtype, typed

__all__ = ["Entry", "Writer", "copy_elements", "layout"]


@dataclass(frozen=True, eq=False)
class Entry:
    """One step of a walk.

    :param tensor: the elements that this rank writes, in the dtype they came with; None for an alias, for no elements,
        and while only planning a gather.
    :param dtype: torch's name of the dtype that is published.
    :param shape: the global shape.
    :param box: where the elements lie in it; None when there are none.
    :param alias_of: the earlier name whose storage it shares.
    """

    name: str
    tensor: torch.Tensor | None
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    alias_of: str | None = None


def layout(entries: Sequence[Entry], mode: Literal["image", "parts"]) -> PartManifest:
    """The manifest of these entries. A part's pieces are packed without holes, by falling item size.

    :raises ManifestMismatch: a name came twice, or shards of one tensor disagree about it.
    """
    specs: dict[str, TensorSpec] = {}
    aliases: list[tuple[str, str]] = []
    pieces: list[tuple[str, Box]] = []
    for entry in entries:
        spec = TensorSpec(entry.name, entry.dtype, entry.shape)
        if entry.alias_of is not None:
            aliases.append((entry.name, entry.alias_of))
        elif specs.setdefault(entry.name, spec) != spec or (mode == "image" and specs[entry.name] is not spec):
            raise ManifestMismatch(
                f"tensor name {entry.name!r} appears twice: {specs[entry.name]} and {spec}",
                hint="give each tensor a name of its own",
            )
        elif entry.box is not None:
            pieces.append((entry.name, entry.box))
    tensors = tuple(specs.values())
    if mode == "image":
        part = PartManifest(tensors, tuple(aliases))
    else:
        numbers = {name: number for number, name in enumerate(specs)}
        offsets = packed_offsets([(specs[name].dtype, _nbytes(specs[name].dtype, box)) for name, box in pieces])
        packed = [Piece(numbers[name], *box, offset) for (name, box), offset in zip(pieces, offsets, strict=True)]
        part = PartManifest(tensors, tuple(aliases), tuple(packed))
    part.validate()
    return part


def _nbytes(dtype: str, box: Box) -> int:
    return prod(box[1]) * item_nbytes(dtype)


def copy_elements(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values, cast where dtypes differ; every dtype, device and stride. Host memory is filled on return."""
    with torch.no_grad():
        if destination.dtype == source.dtype:
            destination, source = bits(destination), bits(source)
        destination.copy_(source)


class Writer:
    """Copies entries to the places that a manifest gives them.

    :param data: uint8: the data section of an image, or a packed part.
    """

    def __init__(self, manifest: PartManifest, data: torch.Tensor) -> None:
        self._manifest = manifest
        self._data = data
        self._specs = {spec.name: (number, spec) for number, spec in enumerate(manifest.tensors)}
        self._aliases = dict(manifest.aliases)
        if manifest.pieces is None:
            starts = manifest.whole.offsets
            boxes = [(number, (0,) * len(spec.shape), spec.shape) for number, spec in enumerate(manifest.tensors)]
            self._places = dict(zip(boxes, starts, strict=True))
        else:
            self._places = {
                (piece.tensor, piece.offsets, piece.shape): piece.source_offset for piece in manifest.pieces
            }
        self._missing = {box for box in self._places if all(box[2])}
        self._unseen = set(self._specs)

    def write(self, entry: Entry) -> None:
        """Put one entry into its place; :class:`ManifestMismatch` when the manifest has none for it."""
        if entry.alias_of is not None:
            if self._aliases.get(entry.name) != entry.alias_of:
                raise ManifestMismatch(f"tensor {entry.name!r} is tied to {entry.alias_of!r}, which it was not before")
            return
        number, spec = self._specs.get(entry.name, (-1, None))
        if spec is None:
            raise ManifestMismatch(f"tensor {entry.name!r} is not in the manifest")
        if (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            raise ManifestMismatch(
                f"tensor {entry.name!r} is {TensorSpec(entry.name, entry.dtype, entry.shape)}, the manifest says {spec}"
            )
        self._unseen.discard(entry.name)
        if entry.box is None or entry.tensor is None:
            return
        place = (number, *entry.box)
        if place not in self._missing:
            known = place in self._places
            what = "came twice" if known else f"has another part than before: {entry.box[1]} at {entry.box[0]}"
            raise ManifestMismatch(f"tensor {entry.name!r} {what}")
        self._missing.discard(place)
        copy_elements(typed(self._data, self._places[place], torch_dtype(spec.dtype), entry.box[1]), entry.tensor)

    def finish(self) -> None:
        """Check that everything came; :class:`ManifestMismatch` names the first that did not."""
        absent = self._unseen | {self._manifest.tensors[box[0]].name for box in self._missing}
        if absent:
            first = next(spec.name for spec in self._manifest.tensors if spec.name in absent)
            raise ManifestMismatch(f"tensor {first!r} did not come ({len(absent)} missing in all)")

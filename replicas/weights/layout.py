"""The entries of a walk over weights, and the manifest built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from replicas.core.versions.manifest import PartManifest, Piece, TensorSpec, item_nbytes, packed_offsets
from replicas.errors import ManifestMismatch
from replicas.weights.devices.accelerator import accelerator
from replicas.weights.dtensor import Box
from replicas.weights.tensors import written_as_bits

__all__ = ["Entry", "copy_elements", "layout"]


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a walk.

    :param tensor: the elements that this rank writes, detached, in their original
        dtype; None for an alias, for no elements, and while only planning a gather.
    :param dtype: torch's name of the published dtype.
    :param shape: the global shape.
    :param box: the elements' box in the global tensor; None when there are none.
    :param alias_of: the earlier name whose storage it shares.
    """

    name: str
    tensor: torch.Tensor | None
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    alias_of: str | None = None


def layout(entries: Sequence[Entry], mode: Literal["image", "parts"]) -> PartManifest:
    """Build the manifest of these entries.

    A part's pieces are packed without holes, by falling item size.

    :raises ManifestMismatch: a name came twice, or shards of one tensor disagree about
        its dtype or shape.
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
    if len(set(pieces)) < len(pieces):
        name = next(one for one in pieces if pieces.count(one) > 1)[0]
        raise ManifestMismatch(f"tensor {name!r} came twice", hint="give each part of a tensor once")
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
    """Copy values, cast where dtypes differ; any dtype, device and strides.

    Host memory is filled on return.
    """
    device = accelerator()
    with torch.no_grad():
        if destination.dtype == source.dtype:
            destination, source = written_as_bits(destination, source)
        if device is not None and (uuid := device.uuid_of(source) or device.uuid_of(destination)):
            device.copy([destination], [source])
            device.synchronize(uuid)
        else:
            destination.copy_(source)

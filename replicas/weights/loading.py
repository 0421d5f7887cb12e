"""Views of a slot's bytes as tensors, and copies: to a model, of parts to images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from replicas.core.versions.manifest import Manifest, PartManifest, Piece
from replicas.errors import ManifestMismatch
from replicas.weights.copying import copy_pairs
from replicas.weights.feed import Ties, known_values
from replicas.weights.layout import Places
from replicas.weights.tensors import (
    is_castable,
    is_copied,
    is_dtensor,
    local_box,
    overlaps_itself,
    piece_view,
    torch_dtype,
    written_as_bits,
)

__all__ = ["load_into", "named_views", "piece_pairs", "views"]


def named_views(data: torch.Tensor, manifest: PartManifest) -> dict[str, torch.Tensor]:
    """Views as :func:`views` of the data of an image, or of a packed part.

    A part has at most one piece of each tensor.
    """
    places = Places(manifest)
    found = dict(zip(places.order, places.views(data, as_bits=False), strict=True))
    pieces = manifest.pieces
    numbers = {piece.tensor: number for number, piece in enumerate(pieces or ())}
    named: dict[str, torch.Tensor] = {}
    for number, spec in enumerate(manifest.tensors):
        view = found.get(number if pieces is None else numbers.get(number, -1))
        if view is None:
            shape = spec.shape if pieces is None else (0,)
            view = torch.empty(shape, dtype=torch_dtype(spec.dtype), device=data.device)
        named[spec.name] = view
    return named


def views(image: torch.Tensor, manifest: Manifest | PartManifest) -> dict[str, torch.Tensor]:
    """Views of the tensors of an image, in the publisher's order, without aliases.

    :param image: uint8 of shape ``[manifest.image_nbytes]``, header included:
        ``slot.buffer.tensor()`` or ``.private()``.
    """
    whole = manifest.whole if isinstance(manifest, PartManifest) else manifest
    return named_views(image[whole.data_offset :], PartManifest(whole.tensors, whole.aliases))


def piece_pairs(
    manifest: Manifest, pieces: Sequence[Piece], source: torch.Tensor, data: torch.Tensor, start: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece's place in ``data``, of an image, and its bytes in ``source``; uint8.

    :param source: a packed part from its byte ``start`` on.
    """
    for piece in pieces:
        view = piece_view(data, manifest, piece)
        first = piece.source_offset - start
        chunk = source[first : first + view.numel() * view.itemsize]
        if chunk.storage_offset() % view.itemsize:  # a bucket may start between two elements of the widest dtype
            chunk = chunk.clone()
        yield view, chunk.view(view.dtype).view(view.shape)


def load_into(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    aliases: Sequence[tuple[str, str]] = (),
    *,
    sharing: int = 1,
    on_device: Callable[[], object] = lambda: None,
) -> None:
    """Copy ``tensors`` in place into the parameters and persistent buffers of a model.

    Names and shapes must match exactly; a plain floating dtype may differ and is cast.
    Tied parameters are written once and may come under any of their names. A DTensor
    parameter gets its local part, without communication. Everything is checked before
    the first byte is written. For the options see :func:`copy_pairs`.

    :raises ManifestMismatch: naming the tensors that are missing, unknown, or of
        another shape or dtype; ``model`` is unchanged.
    """
    given = dict(tensors)
    given.update({alias: given[target] for alias, target in aliases if target in given})
    targets = known_values(model)
    if targets is None:
        text = f"cannot load into a {type(model).__name__}"
        raise ManifestMismatch(text, hint="give a module or a mapping of tensors")
    ties = Ties()
    first_names = {name: ties.alias(name, value) or name for name, value in targets.items() if value is not None}
    served: dict[str, torch.Tensor] = {}
    for name, first in first_names.items():
        if name in given:
            served.setdefault(first, given[name])
    unknown = [name for name in given if name not in first_names]
    missing = [name for name, first in first_names.items() if first not in served]
    if unknown or missing:
        parts = [f"{what}: {_some(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        text = f"the weights do not fit the model ({'; '.join(parts)})"
        raise ManifestMismatch(text, hint="rename them, or load them by hand")
    pairs = [_pair(name, targets[name], source) for name, source in served.items()]
    copy_pairs(pairs, sharing=sharing, on_device=on_device)


def _pair(name: str, value: object, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor to write and the elements to write there."""
    if not isinstance(value, torch.Tensor) or is_lazy(value) or value.is_meta:
        kind = f"a {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            kind = "not initialized" if is_lazy(value) else "on the meta device"
        raise ManifestMismatch(f"the model's {name!r} is {kind}", hint="load into dense tensors that have memory")
    if tuple(value.shape) != tuple(source.shape):
        text = f"tensor {name!r} has shape {list(source.shape)}, the model's has {list(value.shape)}"
        raise ManifestMismatch(text, hint="")
    if value.dtype != source.dtype and not (is_castable(value.dtype) and is_castable(source.dtype)):
        text = f"tensor {name!r} is {source.dtype}, the model's is {value.dtype}"
        raise ManifestMismatch(text, hint="convert it by hand")
    if overlaps_itself(value.to_local() if is_dtensor(value) else value):
        text = f"the model's {name!r} has elements that share memory (it is expanded)"
        raise ManifestMismatch(text, hint="load into a tensor of its own")
    if is_dtensor(value):
        box, local = local_box(value, name), value.to_local().detach()
        if box is None:
            return local, source.flatten()[:0].view(local.shape)
        for axis, (offset, extent) in enumerate(zip(*box, strict=True)):
            source = source.narrow(axis, offset, extent)
        return local, source
    target = value.detach()
    if target.dtype == source.dtype and not is_copied(source.dtype):
        return written_as_bits(target, source)
    return target, source


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown

"""From bytes in a slot to tensors, and into a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from replicas.core.manifest import Manifest, PartManifest
from replicas.errors import ManifestMismatch
from replicas.weights.dtensor import is_dtensor, local_box
from replicas.weights.layout import copy_elements
from replicas.weights.sources import Ties, known_values
from replicas.weights.tensors import is_castable, torch_dtype, typed

__all__ = ["load_into", "views"]


def views(image: torch.Tensor, manifest: Manifest | PartManifest) -> dict[str, torch.Tensor]:
    """The tensors of an image by name, in the publisher's order, as views of it (aliases left out).

    :param image: uint8 of shape ``[manifest.image_nbytes]``, header included: ``slot.buffer.tensor()`` or ``.private()``.
    """
    whole = manifest.whole if isinstance(manifest, PartManifest) else manifest
    data = image[whole.data_offset :]
    return {
        spec.name: typed(data, offset, torch_dtype(spec.dtype), spec.shape)
        for spec, offset in zip(whole.tensors, whole.offsets, strict=True)
    }


def load_into(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    aliases: Sequence[tuple[str, str]] = (),
) -> None:
    """Copy ``tensors`` into the parameters and persistent buffers of ``model``, in place.

    Names and shapes must match exactly; a plain floating dtype may differ and is cast. Tied parameters are written once
    and may come under any of their names. A DTensor parameter gets its local part, without communication. Everything is
    checked before the first byte is written.

    :raises ManifestMismatch: naming what is missing, unknown, or of another shape or dtype; ``model`` is unchanged.
    """
    given = dict(tensors)
    given.update({alias: given[target] for alias, target in aliases if target in given})
    targets = known_values(model)
    if targets is None:
        raise ManifestMismatch(
            f"cannot load into a {type(model).__name__}", hint="give a module or a mapping of tensors"
        )
    ties = Ties()
    first_names = {name: ties.alias(name, value) or name for name, value in targets if value is not None}
    served: dict[str, torch.Tensor] = {}
    for name, first in first_names.items():
        if name in given:
            served.setdefault(first, given[name])
    unknown = [name for name in given if name not in first_names]
    missing = [name for name, first in first_names.items() if first not in served]
    if unknown or missing:
        parts = [f"{what}: {_some(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ManifestMismatch(
            f"the weights do not fit the model ({'; '.join(parts)})", hint="rename them, or load them by hand"
        )
    values = dict(targets)
    pairs = [_pair(name, values[name], source) for name, source in served.items()]
    for target, source in pairs:
        copy_elements(target, source)


def _pair(name: str, value: object, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory to write and the elements to write there."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        kind = "on the meta device" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ManifestMismatch(f"the model's {name!r} is {kind}", hint="load into dense tensors that have memory")
    if tuple(value.shape) != tuple(source.shape):
        raise ManifestMismatch(
            f"tensor {name!r} has shape {list(source.shape)}, the model's has {list(value.shape)}", hint=""
        )
    if value.dtype != source.dtype and not (is_castable(value.dtype) and is_castable(source.dtype)):
        raise ManifestMismatch(
            f"tensor {name!r} is {source.dtype}, the model's is {value.dtype}", hint="convert it by hand"
        )
    if is_dtensor(value):
        box, local = local_box(value, name), value.to_local().detach()
        if box is None:
            return local, source.flatten()[:0].view(local.shape)
        for axis, (offset, extent) in enumerate(zip(*box, strict=True)):
            source = source.narrow(axis, offset, extent)
        return local, source
    return value.detach(), source


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown

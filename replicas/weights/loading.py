"""Views of a slot's bytes as tensors, and their in-place copy into a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from replicas.core.versions.manifest import Manifest, PartManifest
from replicas.errors import ManifestMismatch
from replicas.weights.copying import copy_pairs
from replicas.weights.dtensor import is_dtensor, local_box
from replicas.weights.places import Places
from replicas.weights.sources import Ties, known_values
from replicas.weights.tensors import is_castable, is_copied, overlaps_itself, torch_dtype, written_as_bits

__all__ = ["load_into", "views"]


def views(image: torch.Tensor, manifest: Manifest | PartManifest) -> dict[str, torch.Tensor]:
    """The tensors of an image by name, in the publisher's order, without aliases.

    They are views of ``image``.

    :param image: uint8 of shape ``[manifest.image_nbytes]``, header included:
        ``slot.buffer.tensor()`` or ``.private()``.
    """
    whole = manifest.whole if isinstance(manifest, PartManifest) else manifest
    places = Places(PartManifest(whole.tensors, whole.aliases))
    found = dict(zip(places.order, places.views(image[whole.data_offset :], as_bits=False), strict=True))
    return {
        spec.name: found[number]
        if number in found
        else torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=image.device)
        for number, spec in enumerate(whole.tensors)
    }


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
    the first byte is written.

    :param sharing: how many processes of this machine are known to load at the same
        time.
    :param on_device: called before the first copy from or to a device: to pin the host
        memory of ``tensors``.
    :raises ManifestMismatch: naming the tensors that are missing, unknown, or of
        another shape or dtype; ``model`` is unchanged.
    """
    given = dict(tensors)
    given.update({alias: given[target] for alias, target in aliases if target in given})
    targets = known_values(model)
    if targets is None:
        raise ManifestMismatch(
            f"cannot load into a {type(model).__name__}", hint="give a module or a mapping of tensors"
        )
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
        raise ManifestMismatch(
            f"the weights do not fit the model ({'; '.join(parts)})", hint="rename them, or load them by hand"
        )
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
        raise ManifestMismatch(
            f"tensor {name!r} has shape {list(source.shape)}, the model's has {list(value.shape)}", hint=""
        )
    if value.dtype != source.dtype and not (is_castable(value.dtype) and is_castable(source.dtype)):
        raise ManifestMismatch(
            f"tensor {name!r} is {source.dtype}, the model's is {value.dtype}", hint="convert it by hand"
        )
    if overlaps_itself(value.to_local() if is_dtensor(value) else value):
        raise ManifestMismatch(
            f"the model's {name!r} has elements that share memory (it is expanded)",
            hint="load into a tensor of its own",
        )
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

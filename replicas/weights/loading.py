"""Views of a slot's bytes as tensors, and copies: to a model, of parts to images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from replicas.core.base.manifest import Manifest, PartManifest, Piece
from replicas.errors import ManifestMismatch, ReplicasError
from replicas.messages.bounds import text_of
from replicas.weights.changes import Difference
from replicas.weights.copies import streaming
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.copies.copying import copy_pairs, put_elements, run_host, wait_for_devices
from replicas.weights.copies.host_copies import HostCopies
from replicas.weights.copies.tensors import (
    PLAIN,
    alias_of,
    check_modes,
    is_castable,
    is_copied,
    is_dtensor,
    local_box,
    overlaps_itself,
    piece_view,
    span_nbytes,
    torch_dtype,
    why_unusable,
    written_as_bits,
)
from replicas.weights.feed import Ties, known_values
from replicas.weights.layout import Places


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


def load_image(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    image: torch.Tensor,
    manifest: Manifest,
    *,
    sharing: int = 1,
    on_device: Callable[[], object] = lambda: None,
) -> None:
    """As :func:`load_into`, of the tensors of an image; without views, if it can.

    :param image: uint8 of shape ``[manifest.image_nbytes]``, header included.
    """
    check_modes("load_into")
    targets = known_values(model)
    if targets is not None:
        served = _served(targets, [spec.name for spec in manifest.tensors], manifest.aliases)
        if _load_runs(targets, served, image, manifest, sharing):
            return
    given = model if targets is None else targets
    load_into(given, views(image, manifest), manifest.aliases, sharing=sharing, on_device=on_device)  # type: ignore[arg-type]  # it checks


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

    :raises ManifestMismatch: naming the tensors that are missing, unknown, of another
        shape or dtype, without memory or overlapping; ``model`` is unchanged. It has
        changed in part only if another thread frees one of its tensors meanwhile.
    """
    names, _, pairs = _pairs(model, tensors, aliases)
    copy_pairs(pairs, sharing=sharing, on_device=on_device, name=names.__getitem__)


def load_changes(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    image: torch.Tensor,
    manifest: Manifest,
    difference: Difference,
    *,
    sharing: int = 1,
    on_device: Callable[[], object] = lambda: None,
) -> None:
    """As :func:`load_image`, of what differs from the version that the model holds.

    A changed tensor of which this rank has a part, or that is not contiguous, is
    written whole.
    """
    tensors = views(image, manifest)
    names, sources, pairs = _pairs(model, tensors, manifest.aliases)
    whole: list[int] = []
    written: list[torch.Tensor] = []
    for number, (source_name, (target, source)) in enumerate(zip(sources, pairs, strict=True)):
        positions = difference.positions(source_name)
        flat = target.is_contiguous() and source.is_contiguous() and not (target.is_conj() or target.is_neg())
        if positions is None or (len(positions) and not (flat and source.numel() == tensors[source_name].numel())):
            whole.append(number)
        elif len(positions):
            put_elements(target, source, positions)
            written.append(target)
    copy_pairs(
        [pairs[number] for number in whole],
        sharing=sharing,
        on_device=on_device,
        name=lambda index: names[whole[index]],
    )
    wait_for_devices(written)


def _pairs(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    aliases: Sequence[tuple[str, str]],
) -> tuple[list[str], list[str], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The model's names, those of the tensors, and what to write there, all checked."""
    check_modes("load_into")
    targets = known_values(model)
    if targets is None:
        text = f"cannot load into a {type(model).__name__}"
        raise ManifestMismatch(text, hint="give a module or a mapping of tensors")
    served, tied = _served(targets, list(tensors), aliases), dict(aliases)
    names, sources = list(served), [tied.get(given, given) for given in served.values()]
    pairs = [_checked(name, targets[name], tensors[source]) for name, source in zip(names, sources, strict=True)]
    _check_apart([target for target, _ in pairs], names)
    return names, sources, pairs


def _load_runs(
    targets: Mapping[str, object], served: Mapping[str, str], image: torch.Tensor, manifest: Manifest, sharing: int
) -> bool:
    """Load all as runs of bytes, without views; False: they are not that simple."""
    if not image.is_cpu or not streaming.available:
        return False
    places = _places(manifest)
    by_given = {given: targets[name] for name, given in served.items()}
    values = [by_given.get(name) for name in map(places.name, range(len(places.starts)))]
    # empty tensors have no place here, and must be checked, too
    if len(values) < len(manifest.tensors) or not set(map(type, values)).issubset(PLAIN):
        return False
    device = accelerator()
    if device is not None and (device.owns(image) or any(map(device.owns, values))):  # type: ignore[arg-type]  # PLAIN holds tensors only
        return False
    found = places.kinds.look(values)  # type: ignore[arg-type]  # PLAIN holds tensors only
    if found is None or not found.runs.all():
        return False
    order = np.argsort(found.addresses)
    if np.any((found.addresses + places.kinds.sizes)[order][:-1] > found.addresses[order][1:]):  # they overlap
        return False
    ours = places.addresses(image[manifest.data_offset :])
    copies = HostCopies(found, places.kinds, ours, places.starts, list, load=True, name=places.name)
    run_host(copies, places.cuts, manifest.data_nbytes, sharing)
    return True


_KNOWN: OrderedDict[str, Places] = OrderedDict()
"""Of the last manifests, by hash: they are mostly the same from version to version."""
_KNOWN_MOST = 4


def _places(manifest: Manifest) -> Places:
    found = _KNOWN.get(manifest.hash)
    if found is None:
        found = _KNOWN[manifest.hash] = Places(PartManifest(manifest.tensors, manifest.aliases))
        while len(_KNOWN) > _KNOWN_MOST:
            _KNOWN.popitem(last=False)
    return found


def _served(targets: Mapping[str, object], names: Sequence[str], aliases: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The name of each target to write, and of its tensor; tied ones come once."""
    if not aliases and len(targets) == len(names) and (list(targets) == names or targets.keys() == set(names)):
        storages = set(map(_storage, targets.values()))
        if None not in storages and len(storages) == len(targets):  # no ties
            return dict(zip(names, names, strict=True))
    known = dict.fromkeys(names)
    known |= dict.fromkeys(alias for alias, target in aliases if target in known)
    ties = Ties()
    first_names = {name: ties.alias(name, value) or name for name, value in targets.items() if value is not None}
    found: dict[str, str] = {}
    for name, first in first_names.items():
        if name in known:
            found.setdefault(first, name)
    unknown = [name for name in known if name not in first_names]
    missing = [name for name, first in first_names.items() if first not in found]
    if unknown or missing:
        parts = [f"{what}: {_some(some)}" for what, some in (("missing", missing), ("unknown", unknown)) if some]
        text = f"the weights do not fit the model ({'; '.join(parts)})"
        raise ManifestMismatch(text, hint="rename them, or load them by hand")
    return found


def _storage(value: object) -> int | None:
    """The storage of a plain tensor, by which ties are known; None: another value."""
    plain = type(value) in PLAIN and isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if plain else None  # type: ignore[attr-defined]  # plain: a tensor


def _checked(name: str, value: object, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_pair`; errors of a tensor's own code are ManifestMismatch, too."""
    try:
        return _pair(name, value, source)
    except ReplicasError:
        raise
    except Exception as error:
        text = f"the model's {name!r}, a {type(value).__name__}, cannot be written: {type(error).__name__}: {text_of(error)}"
        raise ManifestMismatch(text, hint="load into dense tensors that have memory") from error


def _pair(name: str, value: object, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor to write and the elements to write there."""
    if not isinstance(value, torch.Tensor):
        text = f"the model's {name!r} is a {type(value).__name__}"
        raise ManifestMismatch(text, hint="load into dense tensors that have memory")
    local = value.to_local() if is_dtensor(value) else value
    if why := why_unusable(local):
        raise ManifestMismatch(f"the model's {name!r} {why}", hint="load into dense tensors that have memory")
    target = alias_of(local)
    whole = value if is_dtensor(value) else target
    if tuple(whole.shape) != tuple(source.shape):
        text = f"tensor {name!r} has shape {list(source.shape)}, the model's has {list(whole.shape)}"
        raise ManifestMismatch(text, hint="")
    if target.dtype != source.dtype and not (is_castable(target.dtype) and is_castable(source.dtype)):
        text = f"tensor {name!r} is {source.dtype}, the model's is {target.dtype}"
        raise ManifestMismatch(text, hint="convert it by hand")
    if overlaps_itself(target):
        text = f"the model's {name!r} has elements that share memory (it is expanded)"
        raise ManifestMismatch(text, hint="load into a tensor of its own")
    if is_dtensor(value):
        box = local_box(value, name)
        if box is None:
            return target, source.flatten()[:0].view(target.shape)
        for axis, (offset, extent) in enumerate(zip(*box, strict=True)):
            source = source.narrow(axis, offset, extent)
    elif target.dtype == source.dtype and (target.is_conj() or target.is_neg() or not is_copied(source.dtype)):
        return written_as_bits(target, source)
    return target, source


def _check_apart(targets: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise ManifestMismatch if two targets share some, but not all of their memory.

    Ties of unlike form, as to the transposed, share all of it.
    """
    spans = [
        (str(one.device), one.data_ptr(), one.data_ptr() + span_nbytes(one), number)
        for number, one in enumerate(targets)
        if one.numel()
    ]
    spans.sort()
    group: list[int] = []
    device, behind = "", 0
    for where, start, end, number in spans:
        if where != device or start >= behind:
            _check_group(group, targets, names)
            group, device, behind = [], where, 0
        group.append(number)
        behind = max(behind, end)
    _check_group(group, targets, names)


def _check_group(group: Sequence[int], targets: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Mark the bytes of each target of a group that lies together."""
    if len(group) < 2:
        return
    base = targets[group[0]].data_ptr()
    most = max(targets[number].data_ptr() + span_nbytes(targets[number]) for number in group) - base
    marked = torch.zeros(most, dtype=torch.uint8, device="cpu")
    whole: dict[tuple[int, int], int] = {}
    for number in group:
        one = targets[number]
        dense = one.data_ptr(), span_nbytes(one)
        if dense in whole and one.nbytes == dense[1]:  # a tie of another form
            continue
        strides = *(stride * one.itemsize for stride in one.stride()), 1
        found = marked.as_strided((*one.shape, one.itemsize), strides, one.data_ptr() - base)
        if found.any():
            others = " or ".join(repr(names[other]) for other in group[: group.index(number)][-3:])
            text = f"the model's {names[number]!r} shares a part of its memory with {others}"
            raise ManifestMismatch(text, hint="load into tensors of their own")
        found.fill_(1)
        if one.nbytes == dense[1]:
            whole[dense] = number


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown

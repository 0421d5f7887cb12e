"""Views of a slot's bytes as tensors, and copies: to a model, of parts to images."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

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
from replicas.weights.finite import overflows
from replicas.weights.layout import Places

_T = TypeVar("_T")


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


def each_name(found: Iterable[tuple[str, _T]], aliases: Iterable[tuple[str, str]]) -> Iterator[tuple[str, _T]]:
    """Add the other names of tied tensors: each after that of its tensor."""
    others = defaultdict[str, list[str]](list)
    for alias, name in aliases:
        others[name].append(alias)
    return ((one, value) for name, value in found for one in (name, *others[name]))


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


@runtime_checkable
class Loadable(Protocol):
    """An object that says which tensors to write."""

    def destinations(self) -> dict[str, torch.Tensor]:
        """The tensors by the names that the version has for them."""


Model = torch.nn.Module | Mapping[str, torch.Tensor] | Loadable


def load_image(
    model: Model,
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
    targets = _destinations(model)
    if targets is not None:
        served = _served(targets, [spec.name for spec in manifest.tensors], manifest.aliases)
        if _load_runs(targets, served, image, manifest, sharing):
            return
    given = model if targets is None else targets
    load_into(given, views(image, manifest), manifest.aliases, sharing=sharing, on_device=on_device)  # type: ignore[arg-type]  # it checks


def load_into(
    model: Model,
    tensors: Mapping[str, torch.Tensor],
    aliases: Sequence[tuple[str, str]] = (),
    *,
    sharing: int = 1,
    on_device: Callable[[], object] = lambda: None,
) -> None:
    """Copy ``tensors`` in place into the parameters and persistent buffers of a model.

    Names and shapes must match exactly; a plain floating dtype may differ and is cast.
    Each name gets its tensor, whatever is tied at either end: tied parameters may come
    under any of their names, or under several with the same values. A DTensor parameter
    gets its local part, without communication. Everything is checked before the first
    byte is written. For the options see :func:`copy_pairs`.

    :raises ManifestMismatch: naming the tensors that are missing, unknown, of another
        shape or dtype, without memory, beyond the range of float16, or in shared memory
        with different values; ``model`` is unchanged. It has changed in part only if
        another thread frees one of its tensors meanwhile.
    """
    names, _, pairs = _pairs(model, tensors, aliases)
    copy_pairs(pairs, sharing=sharing, on_device=on_device, name=names.__getitem__)


def load_changes(
    model: Model,
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


def _destinations(model: Model) -> dict[str, object] | None:
    """The tensors to write by name; None: it is no model."""
    if not isinstance(model, (torch.nn.Module, Mapping)) and isinstance(model, Loadable):
        return dict(model.destinations())
    return known_values(model)


def _pairs(
    model: Model,
    tensors: Mapping[str, torch.Tensor],
    aliases: Sequence[tuple[str, str]],
) -> tuple[list[str], list[str], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The model's names, those of the tensors, and what to write there, all checked."""
    check_modes("load_into")
    targets = _destinations(model)
    if targets is None:
        text = f"cannot load into a {type(model).__name__}"
        raise ManifestMismatch(text, hint="give a module or a mapping of tensors")
    served = _served(targets, list(tensors), aliases)
    names, sources = list(served), list(served.values())
    pairs = [_checked(name, targets[name], tensors[source]) for name, source in served.items()]
    _check_shared(pairs, names)
    return names, sources, pairs


def _load_runs(
    targets: Mapping[str, object], served: Mapping[str, str], image: torch.Tensor, manifest: Manifest, sharing: int
) -> bool:
    """Load all as runs of bytes, without views; False: they are not that simple."""
    if not image.is_cpu or not streaming.available:
        return False
    names: dict[str, str] = {}
    again = [(source, name) for name, source in served.items() if names.setdefault(source, name) != name]
    places = _places(manifest, tuple(source for source, _ in again))
    if len(places.starts) < len(served):  # empty tensors have no place, and must be checked, too
        return False
    given = [*(names[spec.name] for spec in manifest.tensors), *(name for _, name in again)]
    values = [targets[given[number]] for number in places.order]
    if not set(map(type, values)).issubset(PLAIN):
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


_KNOWN: OrderedDict[tuple[str, tuple[str, ...]], Places] = OrderedDict()
"""Of the last manifests, by hash: they are mostly the same from version to version."""
_KNOWN_MOST = 4


def _places(manifest: Manifest, again: tuple[str, ...]) -> Places:
    """The places of all tensors, and once more those of the tensors of ``again``."""
    found = _KNOWN.get((manifest.hash, again))
    if found is None:
        pieces = None
        if again:
            specs, offsets, index = manifest.tensors, manifest.offsets, manifest.index
            numbers = *range(len(specs)), *(index[name] for name in again)
            pieces = tuple(Piece(one, (0,) * len(specs[one].shape), specs[one].shape, offsets[one]) for one in numbers)
        found = _KNOWN[manifest.hash, again] = Places(PartManifest(manifest.tensors, manifest.aliases, pieces))
        while len(_KNOWN) > _KNOWN_MOST:
            _KNOWN.popitem(last=False)
    return found


def _served(targets: Mapping[str, object], names: Sequence[str], aliases: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The name of each target to write, and of the tensor that it gets.

    Targets that are tied come once for each tensor that they get.
    """
    if not aliases and len(targets) == len(names) and (list(targets) == names or targets.keys() == set(names)):
        storages = set(map(_storage, targets.values()))
        if None not in storages and len(storages) == len(targets):  # no ties
            return dict(zip(names, names, strict=True))
    known = dict(zip(names, names, strict=True))
    known |= {alias: target for alias, target in aliases if target in known}
    ties = Ties()
    first_names = {name: ties.alias(name, value) or name for name, value in targets.items() if value is not None}
    found: dict[tuple[str, str], str] = {}
    for name, first in first_names.items():
        if name in known:
            found.setdefault((first, known[name]), name)
    given = {first for first, _ in found}
    unknown = [name for name in known if name not in first_names]
    missing = [name for name, first in first_names.items() if first not in given]
    if unknown or missing:
        parts = [f"{what}: {_some(some)}" for what, some in (("missing", missing), ("unknown", unknown)) if some]
        text = f"the weights do not fit the model ({'; '.join(parts)})"
        raise ManifestMismatch(text, hint="rename them, or load them by hand")
    return {name: source for (_, source), name in found.items()}


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
    if target.dtype is torch.float16 != source.dtype and overflows(source, torch.float16):
        text = f"tensor {name!r} has values beyond the range of float16, the dtype of the model's"
        raise ManifestMismatch(text, hint="load into bfloat16 or float32")
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


_Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Targets and the elements to write there."""


def _check_shared(pairs: _Pairs, names: Sequence[str]) -> None:
    """Raise ManifestMismatch if two targets share memory and get different values for
    it.
    """
    spans = [
        (str(one.device), one.data_ptr(), one.data_ptr() + span_nbytes(one), number)
        for number, (one, _) in enumerate(pairs)
        if one.numel()
    ]
    spans.sort()
    group: list[int] = []
    device, behind = "", 0
    for where, start, end, number in spans:
        if where != device or start >= behind:
            _check_group(group, pairs, names)
            group, device, behind = [], where, 0
        group.append(number)
        behind = max(behind, end)
    _check_group(group, pairs, names)


def _check_group(group: Sequence[int], pairs: _Pairs, names: Sequence[str]) -> None:
    """Check targets of which each begins within those before it."""
    distinct: dict[object, int] = {}
    for number in group if len(group) > 1 else ():
        one = pairs[number][0]
        first = distinct.setdefault((one.data_ptr(), one.shape, one.stride(), one.itemsize), number)
        if first != number and not torch.equal(_stored(*pairs[first]), _stored(*pairs[number])):
            raise _differing(names[first], names[number])
    if len(distinct) < 2:
        return
    # Write all to memory that is laid out as theirs: then each must still be there.
    numbers = list(distinct.values())
    targets = {number: pairs[number][0] for number in numbers}
    base = min(one.data_ptr() for one in targets.values())
    end = max(one.data_ptr() + span_nbytes(one) for one in targets.values())
    memory = torch.empty(end - base, dtype=torch.uint8, device="cpu")

    def place(number: int) -> torch.Tensor:
        one = targets[number]
        strides = *(stride * one.itemsize for stride in one.stride()), 1
        return memory.as_strided((*one.shape, one.itemsize), strides, one.data_ptr() - base)

    for number in numbers:
        place(number).copy_(_stored(*pairs[number]))
    for number in numbers:
        given = _stored(*pairs[number])
        if torch.equal(place(number), given):
            continue
        for other in numbers[numbers.index(number) + 1 :]:
            place(number).copy_(given)
            place(other).copy_(_stored(*pairs[other]))
            if not torch.equal(place(number), given):
                raise _differing(names[number], names[other])


def _stored(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The bytes of each element of ``source`` as they will lie in ``target``; uint8 of
    shape ``[*target.shape, target.itemsize]``, on the CPU.
    """
    given = source.to(device="cpu", dtype=target.dtype)
    if target.is_neg():
        given = -given
    return given.reshape(-1).view(torch.uint8).view(*given.shape, given.itemsize)


def _differing(one: str, other: str) -> ManifestMismatch:
    text = f"{one!r} and {other!r} share memory in the model, and their values in the version differ"
    return ManifestMismatch(text, hint="load into tensors of their own, or publish them tied")


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown

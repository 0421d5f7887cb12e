"""View a slot's bytes as tensors, and copy them: into a model, or from parts to images.

load_image(model, image, manifest)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from replicas.common.sizes import list_text
from replicas.core.base.manifest import Manifest, PartManifest, Piece
from replicas.errors import ManifestMismatch, ReplicasError
from replicas.messages.bounds import text_of
from replicas.weights.changes import Difference
from replicas.weights.copies import streaming
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.copies.copying import copy_pairs, put_elements, run_host, wait_for_devices
from replicas.weights.copies.host_copies import HostCopies, Kinds
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
    typed,
    why_unusable,
    written_as_bits,
)
from replicas.weights.feed import Ties, known_values
from replicas.weights.finite import overflows
from replicas.weights.layout import Places, places_of
from replicas.weights.overlaps import check_shared

_T = TypeVar("_T")


def named_views(data: torch.Tensor, manifest: PartManifest) -> dict[str, torch.Tensor]:
    """Return each tensor as a view of ``data``, by name; copy nothing.

    :param data: uint8: the data section of an image (a whole version), or a packed part
        (one rank's bytes) with at most one piece of each tensor. A tensor without a
        piece gets an empty tensor.
    :param manifest: the layout of ``data``.
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
    """Return an iterator of each (name, value), then the same under its other names.

    :param found: the pairs. :param aliases: (other name, name) pairs.
    """
    others = defaultdict[str, list[str]](list)
    for alias, name in aliases:
        others[name].append(alias)
    return ((one, value) for name, value in found for one in (name, *others[name]))


def views(image: torch.Tensor, manifest: Manifest | PartManifest) -> dict[str, torch.Tensor]:
    """Return the tensors of an image (a version's bytes) as views of it, by name.

    They come in the publisher's order, without aliases.

    :param image: uint8 of shape ``[manifest.image_nbytes]``, header included:
        ``slot.buffer.tensor()`` or ``.private()``.
    """
    whole = manifest.whole if isinstance(manifest, PartManifest) else manifest
    return named_views(image[whole.data_offset :], PartManifest(whole.tensors, whole.aliases))


def piece_pairs(
    manifest: Manifest, pieces: Sequence[Piece], source: torch.Tensor, data: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, for each piece (a box of a tensor), its views in ``data`` and ``source``.

    Copies nothing; both are integers of the elements' size.

    :param manifest: the layout of ``data``.
    :param source: uint8: the packed part (one rank's bytes) from which the pieces are;
        each is at its ``source_offset``.
    :param data: the data section of an image (a whole version).
    """
    for piece in pieces:
        view = piece_view(data, manifest, piece)
        chunk = source[piece.source_offset : piece.source_offset + view.numel() * view.itemsize]
        yield view, chunk.view(view.dtype).view(view.shape)


@runtime_checkable
class Loadable(Protocol):
    """An object that names the tensors to load into."""

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return the tensors to write, by their names in the version."""


Model = torch.nn.Module | Mapping[str, torch.Tensor] | Loadable


def load_image(
    model: Model,
    image: torch.Tensor,
    manifest: Manifest,
    difference: Difference | None = None,
    *,
    sharing: int = 1,
    on_device: Callable[[], object] = lambda: None,
) -> None:
    """Copy a version in place into the parameters and persistent buffers of a model.

    Names and shapes must match exactly; a plain floating dtype may differ and is cast.
    Each name gets its tensor, even if other names are tied at either end: tied
    parameters may be given under any of their names, or under several with the same
    values. A DTensor parameter gets its local part, without communication. All checks
    come before the first write. No views are made if that is possible.

    :param image: uint8 of shape ``[manifest.image_nbytes]``, header included.
    :param difference: finds the changes from the version that the model has: copy only
        these. A changed tensor is written whole if the model has only a part of it, or
        if it is not contiguous.
    :param sharing: processes of this host that load at the same time.
    :param on_device: called before copies to a device; may pin the image.
    :raises ManifestMismatch: names the tensors that are missing, unknown, of another
        shape or dtype, without memory, beyond the range of float16, or in shared memory
        with different values. ``model`` is unchanged, unless another thread frees one
        of its tensors during the copy.
    """
    check_modes("load_into")
    targets = _destinations(model)
    plain = _plain_again(targets, image, manifest)
    if plain is None:
        served = _match_names(targets, [spec.name for spec in manifest.tensors], manifest.aliases)
        plain = _plain(targets, served, image, manifest)
    if plain is None:
        tensors = views(image, manifest)
        names, sources = list(served), list(served.values())
        pairs = [_checked(name, targets[name], tensors[source]) for name, source in served.items()]
        check_shared(pairs, names)
    elif difference is None:
        run_host(plain.copies, plain.places.cuts, manifest.data_nbytes, sharing)
        return
    else:
        left = plain.put(difference).tolist()
        names, sources = ([of(one) for one in left] for of in (plain.names.__getitem__, plain.places.name))
        pairs = list(map(plain.pair, left))
    whole: list[int] = []
    written: list[torch.Tensor] = []
    for number, (source_name, (target, source)) in enumerate(zip(sources, pairs, strict=True)):
        positions = None if difference is None else difference.positions(source_name)
        flat = target.is_contiguous() and source.is_contiguous() and not (target.is_conj() or target.is_neg())
        shape = manifest.tensors[manifest.index[source_name]].shape
        if positions is None or (len(positions) and not (flat and source.numel() == prod(shape))):
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


def _destinations(model: Model) -> Mapping[str, object]:
    """Return the values of ``model`` by name, unchecked, to which the load writes.

    :raises ManifestMismatch: ``model`` is not of a kind that can be loaded into.
    """
    if not isinstance(model, (torch.nn.Module, Mapping)) and isinstance(model, Loadable):
        return dict(model.destinations())
    targets = known_values(model)
    if targets is None:
        text = f"cannot load into a {type(model).__name__}"
        raise ManifestMismatch(text, hint="give a module or a mapping of tensors")
    return targets


@dataclass(frozen=True, eq=False)
class _Match:
    """How the plain tensors of a model fit a version, for the next load of these names.

    :ivar model: names of all the model's values, in its order.
    :ivar picks: index in ``model`` of each target, in the order of the image's bytes;
        None if that is the model's order.
    """

    model: list[str]
    picks: list[int] | None
    names: list[str]
    places: Places
    kinds: Kinds


_MATCHES: dict[str, _Match] = {}
"""The last few matches, by the hash of the version's manifest."""
_MATCHES_MOST = 4


@dataclass(eq=False)
class _Plain:
    """A checked load into plain tensors in host memory.

    :ivar places: the image's places, once for each target, in the order of the bytes.
    :ivar names: of the targets.
    :ivar pair: returns a target and the elements to write there, by index.
    :ivar runs: whether each target is one run of the same bytes; and False at the end.
    """

    copies: HostCopies
    places: Places
    names: list[str]
    pair: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    runs: npt.NDArray[np.bool_]

    def put(self, difference: Difference) -> npt.NDArray[np.intp]:
        """Copy the changed elements of small tensors to the targets.

        Return the indices of the targets that are left to do: large ones, and those
        that are not one run of the same bytes.

        :param difference: finds the changes; compares when asked.
        """
        theirs, left = difference.places, np.ones(len(self.places.order), np.bool_)
        begins, ends = (np.searchsorted(self.places.edges[:-1], theirs.edges[:-1], side) for side in ("left", "right"))
        for group in difference.groups():
            whole, item, behind = np.flatnonzero(group.whole), theirs.items[group.first], group.first + len(group.whole)
            left[begins[group.first] : ends[behind - 1]] = False
            owners = np.repeat(np.arange(len(group.whole)), np.diff(group.bounds))
            numbers = np.concatenate([whole, owners]) + group.first
            skipped = np.concatenate([np.zeros_like(whole), group.positions * item]).astype(np.uintp)
            sizes = np.where(np.arange(len(numbers)) < len(whole), theirs.kinds.sizes[numbers], np.uintp(item))
            for more in range(int((ends - begins).max())):  # the targets of each tensor
                pieces = begins[numbers] + more
                kept = (pieces < ends[numbers]) & self.runs[pieces]
                if kept.any():
                    self.copies.put(pieces[kept], skipped[kept], sizes[kept])
        return np.flatnonzero(left | ~self.runs[:-1])


def _plain(
    targets: Mapping[str, object], served: Mapping[str, str], image: torch.Tensor, manifest: Manifest
) -> _Plain | None:
    """Check a load into a model; return it if the C code can do all of it, else None.

    It cannot if targets are subclasses, are on a device, or share memory. Writes
    nothing.

    :param targets: the model's values by name.
    :param served: name of the version's tensor that each target gets, by the target's
        name.
    :param image: all bytes of the version. :param manifest: their layout.
    :raises ManifestMismatch: a target does not fit its tensor.
    """
    names: dict[str, str] = {}
    again = [(source, name) for name, source in served.items() if names.setdefault(source, name) != name]
    places = places_of(manifest, tuple(source for source, _ in again))
    sources = [*(spec.name for spec in manifest.tensors), *(source for source, _ in again)]
    given = [*(names[spec.name] for spec in manifest.tensors), *(name for _, name in again)]
    placed = [given[number] for number in places.order]
    values: list[Any] = [targets[name] for name in placed]  # tensors, if their types are in PLAIN
    if not set(map(type, values)).issubset(PLAIN):
        return None
    dtypes = [value.dtype for value in values]
    kinds = places.kinds if dtypes == places.dtypes else Kinds(places.shapes, dtypes, places.dtypes)
    plain = _found(_Match([], None, placed, places, kinds), values, image, manifest)
    if plain is None:
        return None
    if len(placed) < len(given):  # empty tensors are not among the places
        data = image[manifest.data_offset :]
        for number in set(range(len(given))).difference(places.order):
            spec = manifest.tensors[manifest.index[sources[number]]]
            _checked(given[number], targets[given[number]], typed(data, 0, torch_dtype(spec.dtype), spec.shape))
    elif len(placed) == len(targets):
        numbers = {name: number for number, name in enumerate(targets)}
        picks = None if placed == [*numbers] else [numbers[name] for name in placed]
        _MATCHES[manifest.hash] = _Match([*numbers], picks, placed, places, kinds)
        for old in list(_MATCHES)[:-_MATCHES_MOST]:
            _MATCHES.pop(old, None)  # another thread may have dropped it
    return plain


def _plain_again(targets: Mapping[str, object], image: torch.Tensor, manifest: Manifest) -> _Plain | None:
    """Return the load into ``targets`` (the model's values by name) if it is like the
    last one of these names from such an image; else None, for one that checks all."""
    match = _MATCHES.get(manifest.hash)
    if match is None or len(targets) != len(match.model) or list(targets) != match.model:
        return None
    values: list[Any] = list(targets.values())
    if not set(map(type, values)).issubset(PLAIN):
        return None
    placed = values if match.picks is None else [values[number] for number in match.picks]
    return _found(match, placed, image, manifest)


def _found(match: _Match, values: list[torch.Tensor], image: torch.Tensor, manifest: Manifest) -> _Plain | None:
    """Return the load into ``values``, the targets of ``match`` in the order of the
    bytes; None if one is not as ``match`` says, is on a device, or overlaps another."""
    device = accelerator()
    if not (image.is_cpu and streaming.available):
        return None
    if device is not None and (device.owns(image) or any(map(device.owns, values))):
        return None
    places, kinds, placed = match.places, match.kinds, match.names
    found = kinds.find_memory(values)
    if found is None or found.elsewhere is not None:
        return None
    data = image[manifest.data_offset :]
    piece = cache(lambda one: typed(data, places.starts[one], places.dtypes[one], places.shapes[one]))
    pair = cache(lambda one: _checked(placed[one], values[one], piece(one)))
    others = np.flatnonzero(~found.runs).tolist()
    spans = kinds.sizes.copy()
    spans[others] = [span_nbytes(target) for target, _ in map(pair, others)]
    order = np.argsort(found.addresses)
    if np.any((found.addresses + spans)[order][:-1] > found.addresses[order][1:]):  # they overlap
        return None
    copies = HostCopies(found, kinds, places.addresses(data), places.starts, piece, load=True, name=placed.__getitem__)
    return _Plain(copies, places, placed, pair, np.append(found.runs, False))


def _match_names(
    targets: Mapping[str, object], names: Sequence[str], aliases: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Return the name of the version's tensor that each target gets, by target name.

    Where several tied targets (names of one tensor) get the same tensor of the version,
    only the first of them is in the result, so that it is written once.

    :param targets: the model's values by name. :param names: of the version's tensors.
    :param aliases: (other name, name) of tied tensors of the version.
    :raises ManifestMismatch: names are missing or unknown.
    """
    if not aliases and len(targets) == len(names) and (list(targets) == names or targets.keys() == set(names)):
        addresses = [one for one in map(_address, targets.values()) if one != 0]
        if None not in addresses and len(set(addresses)) == len(addresses):  # no ties
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
        found_names = {"not published": [*map(repr, missing)], "not in the model": [*map(repr, unknown)]}
        parts = [f"{what}: {list_text(names, 5)}" for what, names in found_names.items() if names]
        text = f"the weights do not fit the model ({'; '.join(parts)})"
        hint = "rename one side, or load by hand" if known else "the version has no tensors: see what was published"
        raise ManifestMismatch(text, hint=hint)
    return {name: source for (_, source), name in found.items()}


def _address(value: object) -> int | None:
    """Return the address of a plain tensor's memory, 0 if it has none.

    Return None for any other value.
    """
    plain = type(value) in PLAIN and isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.data_ptr() if plain else None  # type: ignore[attr-defined]  # plain: a tensor


def _checked(name: str, value: object, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Check one target of a load; return (tensor to write, elements to write there).

    As :func:`_pair`, but errors of a tensor's own code become ManifestMismatch, too.

    :param name: of the target, for errors. :param value: the model's value of that
        name.
    :param source: the version's tensor.
    """
    try:
        return _pair(name, value, source)
    except ReplicasError:
        raise
    except Exception as error:
        text = f"the model's {name!r}, a {type(value).__name__}, cannot be written: {type(error).__name__}: {text_of(error)}"
        raise ManifestMismatch(text, hint="load into dense tensors that have memory") from error


def _pair(name: str, value: object, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Check one target of a load; return (tensor to write, elements to write there).

    Both are views, and of a DTensor they are the local part. Writes nothing.

    :param name: of the target, for errors. :param value: the model's value of that
        name.
    :param source: the version's tensor.
    :raises ManifestMismatch: the elements do not fit, or the tensor cannot be written.
    """
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
        raise ManifestMismatch(text, hint="build the model with the sizes of the published one")
    if target.dtype != source.dtype and not (is_castable(target.dtype) and is_castable(source.dtype)):
        text = f"tensor {name!r} is {source.dtype}, the model's is {target.dtype}"
        raise ManifestMismatch(text, hint="convert it yourself, from update.tensors()")
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

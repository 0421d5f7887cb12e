"""The entries of a walk over weights, their manifest, and their byte ranges."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from replicas.core.base.dtypes import item_nbytes
from replicas.core.base.manifest import Manifest, PartManifest, Piece, TensorSpec, packed_offsets
from replicas.errors import ManifestMismatch
from replicas.weights.copies.copying import Step
from replicas.weights.copies.host_copies import STEP_NBYTES, Cut, Kinds, cuts_of
from replicas.weights.copies.streaming import Addresses
from replicas.weights.copies.tensors import Box, bits, is_copied, torch_dtype


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a walk (a pass over the user's weights), checked.

    :param tensor: the elements that this rank writes, detached, in their original
        dtype; None for an alias, for no elements, and while only planning a gather.
    :param dtype: torch's name of the published dtype.
    :param shape: the global shape.
    :param box: the elements' box in the global tensor; None if there are no elements.
    :param alias_of: the earlier name of the same tensor.
    """

    name: str
    tensor: torch.Tensor | None
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    alias_of: str | None = None


def layout(entries: Sequence[Entry], mode: Literal["image", "parts"]) -> PartManifest:
    """Return the manifest of these entries, with byte offsets; copy nothing.

    Pieces of a part are sorted by the size of their elements.

    :param mode: ``"image"`` for whole tensors, ``"parts"`` for this rank's pieces.
    :raises ManifestMismatch: a name appears twice, or shards of one tensor disagree
        about its dtype or shape.
    """
    specs: dict[str, TensorSpec] = {}
    aliases: list[tuple[str, str]] = []
    pieces: list[tuple[str, Box]] = []
    for entry in entries:
        spec = TensorSpec(entry.name, entry.dtype, entry.shape)
        if entry.alias_of is not None:
            aliases.append((entry.name, entry.alias_of))
        # in parts one tensor may have several pieces, in an image just one
        elif specs.setdefault(entry.name, spec) != spec or (mode == "image" and specs[entry.name] is not spec):
            text = f"tensor name {entry.name!r} appears twice: {specs[entry.name]} and {spec}"
            raise ManifestMismatch(text, hint="give each tensor a name of its own")
        elif entry.box is not None:
            pieces.append((entry.name, entry.box))
    tensors = tuple(specs.values())
    if len(set(pieces)) < len(pieces):
        name = next(one for one in pieces if pieces.count(one) > 1)[0]
        raise ManifestMismatch(f"tensor {name!r} was published twice", hint="give each part of a tensor once")
    if mode == "image":
        part = PartManifest(tensors, tuple(aliases))
    else:
        numbers = {name: number for number, name in enumerate(specs)}
        dtypes = [specs[name].dtype for name, _ in pieces]
        sizes = [prod(box[1]) * item_nbytes(dtype) for dtype, (_, box) in zip(dtypes, pieces, strict=True)]
        offsets = packed_offsets(list(zip(dtypes, sizes, strict=True)))
        packed = [Piece(numbers[name], *box, offset) for (name, box), offset in zip(pieces, offsets, strict=True)]
        part = PartManifest(tensors, tuple(aliases), tuple(packed))
    part.validate()
    return part


NO_TENSORS = "an iterator gives its tensors once: make a new one for each publish, or give the module"
GROUP_NBYTES = 1 << 20
"""Small pieces within one range of this size are compared together."""


class Places:
    """Where a manifest's pieces (tensors, or boxes of them) are in a run of bytes.

    They come in the order of their bytes, without empty ones.

    :ivar order: each piece's index among the tensors of an image, or the pieces of a
        part.
    :ivar starts: each piece's first byte.
    :ivar items: bytes of each piece's elements.
    """

    def __init__(self, manifest: PartManifest) -> None:
        """Compute where each piece of the manifest is; touch no memory.

        A piece is a tensor, or a box of one that a rank packs.
        """
        specs = manifest.tensors
        if manifest.pieces is None:
            given = [(start, spec.dtype, spec.shape) for start, spec in zip(manifest.whole.offsets, specs, strict=True)]
            self._keys = [(number, (0,) * len(spec.shape), spec.shape) for number, spec in enumerate(specs)]
        else:
            given = [(piece.source_offset, specs[piece.tensor].dtype, piece.shape) for piece in manifest.pieces]
            self._keys = [(piece.tensor, piece.offsets, piece.shape) for piece in manifest.pieces]
        order = [number for number, (_, _, shape) in enumerate(given) if all(shape)]
        order.sort(key=lambda number: given[number][0])
        self.order = order
        self.starts = [given[number][0] for number in order]
        names = [given[number][1] for number in order]
        self.items = [item_nbytes(name) for name in names]
        self.dtypes = [torch_dtype(name) for name in names]
        self.shapes = [given[number][2] for number in order]
        self._counts = [prod(shape) for shape in self.shapes]
        self._names = [spec.name for spec in specs]
        self._cuts: dict[int, list[Cut]] = {}

    @cached_property
    def index(self) -> dict[tuple[int, tuple[int, ...], tuple[int, ...]], int]:
        """Index of each piece, by number of its tensor, offsets and shape."""
        return {self._keys[number]: index for index, number in enumerate(self.order)}

    @cached_property
    def odd(self) -> tuple[int, ...]:
        """Indices of pieces to copy as integers, as torch may not copy their dtype."""
        return tuple(index for index, dtype in enumerate(self.dtypes) if not is_copied(dtype))

    def cuts(self, nbytes: int = STEP_NBYTES) -> list[Cut]:
        """Return copy steps of about ``nbytes`` bytes that cover all pieces; cached."""
        if (found := self._cuts.get(nbytes)) is not None:
            return found
        ends = [start + size for start, size in zip(self.starts, self.kinds.sizes.tolist(), strict=True)]
        cuts = self._cuts[nbytes] = cuts_of(self.starts, ends, self.shapes, nbytes)
        return cuts

    @cached_property
    def edges(self) -> npt.NDArray[np.int64]:
        """First byte of each piece as an array, and last the end of the last piece."""
        return np.array([*self.starts, self.extent(-1)[1] if self.order else 0], np.int64)

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """Small neighbouring pieces, to be compared together, as (first, end) indices.

        Pieces of a group have elements of one size; a larger piece is a group of its
        own.
        """

        def kind(one: int) -> tuple[int, ...]:
            """Return a key of piece ``one``.

            Neighbours with equal keys form a group.
            """
            start, end = self.extent(one)
            return self.items[one], start // GROUP_NBYTES, (end - 1) // GROUP_NBYTES

        groups = (list(group) for _, group in groupby(range(len(self.order)), key=kind))
        return [(group[0], group[-1] + 1) for group in groups]

    @cached_property
    def group_of(self) -> dict[str, tuple[int, int]]:
        """By the name of a tensor: (number of its group, index in the group).

        Of an image; empty tensors are left out.
        """
        groups = enumerate(self.groups)
        return {self.name(one): (number, one - first) for number, (first, last) in groups for one in range(first, last)}

    def steps(self, destinations: list[torch.Tensor], sources: list[torch.Tensor], nbytes: int) -> Iterator[Step]:
        """Yield copy steps of about ``nbytes`` each, which cover all pieces in order.

        :param destinations: a tensor for each piece. :param sources: likewise.
        """
        for cut in self.cuts(nbytes):
            yield Step(cut.start, cut.end, cut.of(destinations), cut.of(sources))

    @cached_property
    def kinds(self) -> Kinds:
        """The shapes and dtypes of the pieces, to compare tensors with."""
        return Kinds(self.shapes, self.dtypes, self.dtypes)

    def addresses(self, data: torch.Tensor) -> Addresses:
        """Return the address of each piece in ``data``, the memory of all of them."""
        return self.edges[:-1].astype(np.uintp) + np.uintp(data.data_ptr())

    def name(self, index: int) -> str:
        """Return the name of the tensor of piece ``index``."""
        return self._names[self._keys[self.order[index]][0]]

    def extent(self, index: int) -> tuple[int, int]:
        """Return the first byte and the end of piece ``index``, within the data."""
        start = self.starts[index]
        return start, start + self._counts[index] * self.items[index]

    @torch.inference_mode(False)  # so that any thread may write to the views
    def views(self, data: torch.Tensor, *, as_bits: bool = True) -> list[torch.Tensor]:
        """Return all pieces, in order, as views of ``data``; copy nothing.

        :param data: uint8: the data section of an image, or a packed part.
        :param as_bits: return :attr:`odd` pieces as integers of the same size.
        """
        found: list[torch.Tensor] = []
        # to split one view for each run of a dtype is faster than a view for each piece
        for dtype, indices in groupby(range(len(self.dtypes)), key=self.dtypes.__getitem__):
            run = list(indices)
            first, last = run[0], run[-1]
            end = self.starts[last] + self._counts[last] * self.items[last]
            flat = data[self.starts[first] : end].view(dtype)
            parts = flat.split_with_sizes(self._counts[first : last + 1])
            found += [part.view(shape) for part, shape in zip(parts, self.shapes[first : last + 1], strict=True)]
        for index in self.odd if as_bits else ():
            found[index] = bits(found[index])
        return found


_KNOWN: OrderedDict[tuple[str, tuple[str, ...]], Places] = OrderedDict()
"""The last manifests' places, as most versions have the same manifest."""
_KNOWN_MOST = 4


def places_of(manifest: Manifest, again: tuple[str, ...] = ()) -> Places:
    """Return where the tensors of an image with this manifest are, in its data section.

    The last four results are cached.

    :param again: names of tensors to list a second time, at the end: a load copies
        these to a second tensor of the model.
    """
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


class Writer:
    """Copies a walk's tensors one by one to ``destinations`` (:meth:`Places.views`).

    It checks each by a manifest.
    """

    def __init__(self, manifest: PartManifest, places: Places, destinations: Sequence[torch.Tensor]) -> None:
        """Begin with no tensor written.

        :param manifest: names, dtypes and shapes that the entries must have.
        :param places: where its pieces are. :param destinations: a view for each piece.
        """
        self._manifest = manifest
        self._places = places
        self._destinations = destinations
        self._specs = {spec.name: (number, spec) for number, spec in enumerate(manifest.tensors)}
        self._aliases = dict(manifest.aliases)
        self._missing = dict(places.index)
        self._odd = set(places.odd)
        self._unseen = set(self._specs)

    def write(self, entry: Entry, put: Callable[[torch.Tensor, torch.Tensor, int, int, str], None]) -> None:
        """Compare one entry of a walk with the manifest; copy it to its destination.

        An alias, or an entry without elements, is only compared.

        :param put: called as ``put(destination, source, start, end, name)`` to copy a
            tensor to its bytes ``start`` to ``end``.
        :raises ManifestMismatch: the entry differs from the manifest.
        """
        if entry.alias_of is not None:
            if self._aliases.get(entry.name) != entry.alias_of:
                raise ManifestMismatch(f"tensor {entry.name!r} is tied to {entry.alias_of!r}, which it was not before")
            return
        number, spec = self._specs.get(entry.name, (-1, None))
        if spec is None:
            raise ManifestMismatch(f"tensor {entry.name!r} is not in the channel's manifest")
        if entry.dtype != spec.dtype or entry.shape != spec.shape:
            raise ManifestMismatch(
                f"tensor {entry.name!r} is {TensorSpec(entry.name, entry.dtype, entry.shape)}, the manifest says {spec}"
            )
        self._unseen.discard(entry.name)
        if entry.box is None or entry.tensor is None:
            return
        index = self._missing.pop((number, *entry.box), None)
        if index is None:
            known = (number, *entry.box) in self._places.index
            what = "was given twice" if known else f"has another part than before: {entry.box[1]} at {entry.box[0]}"
            raise ManifestMismatch(f"tensor {entry.name!r} {what}")
        source = bits(entry.tensor) if index in self._odd else entry.tensor
        put(self._destinations[index], source, *self._places.extent(index), entry.name)

    def finish(self) -> None:
        """Raise ManifestMismatch if a tensor or piece of the manifest has not come."""
        absent = self._unseen | {self._manifest.tensors[key[0]].name for key in self._missing}
        if absent:
            first = next(spec.name for spec in self._manifest.tensors if spec.name in absent)
            hint = NO_TENSORS if absent.issuperset(spec.name for spec in self._manifest.tensors) else None
            raise ManifestMismatch(f"tensor {first!r} was not published ({len(absent)} missing in all)", hint=hint)

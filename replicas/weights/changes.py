"""Find the elements that differ between two versions: positions and values, by tensor.

Theory of operation
===================

A training step changes few elements of a model, and a process with the previous version
needs only those. While that version's slot has not been refilled, both versions are in
shared memory with one manifest, and their bytes are compared
(:mod:`replicas.memory.lines`): a large tensor alone, small neighbours together, as the
call takes longer than a small tensor. Bits are compared: a NaN is equal to itself, and
-0.0 differs from 0.0.

**The base is read without a lock**, so its owner may start to refill it at any moment.
But the owner removes a flag first (:mod:`replicas.linux.locks`). So the flag is checked
*after* each comparison: if it is still there, the base was unchanged during the
comparison. Otherwise these tensors and all later ones count as changed completely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from replicas.core.base.manifest import Manifest
from replicas.memory.lines import Lines, find_changed
from replicas.weights.copies.copy_pool import helpers_for
from replicas.weights.copies.tensors import torch_dtype, typed
from replicas.weights.layout import places_of
from replicas.weights.memory.buffers import Buffer

SHARE = 8
"""If more than one in this many elements has changed, the whole tensor is returned, as
writing single elements would cost as much."""
_RUN_NBYTES = 1 << 30
"""Bytes compared in one call, which numbers elements by 32 bits."""
_WIDTH_MAX = 8
_GROUPS_KEPT = 8
"""Cached groups, as the publisher's order may alternate between item sizes."""


@cache
@torch.inference_mode(False)  # cached for threads in other modes
def _none(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return an empty CPU tensor, the same object for each call with this dtype."""
    return torch.empty(0, dtype=dtype, device="cpu")


@dataclass(frozen=True, eq=False)
class Change:
    """The change of one tensor (:meth:`replicas.Update.changes`).

    :ivar name: of the tensor.
    :ivar whole: the whole tensor, in its published shape and dtype, if more than an
        eighth has changed, or the changes are unknown; else None.
    :ivar positions: of the changed elements, rising, in the flattened (row-major)
        tensor: int64 of shape ``[n]``, on the CPU. Empty if the tensor has not changed,
        or with ``whole``.
    :ivar values: the elements there: the tensor's dtype, shape ``[n]``, on the CPU.
    """

    name: str
    whole: torch.Tensor | None = None
    positions: torch.Tensor = field(default_factory=_none)
    values: torch.Tensor = field(default_factory=_none)


def all_of(name: str, tensor: torch.Tensor) -> Change:
    """Return the Change of a tensor of which every element counts as changed.

    :param name: of the tensor. :param tensor: all its elements; kept, not copied.
    """
    return Change(name, tensor, values=tensor.view(-1)[:0])


class Group(NamedTuple):
    """The changes of neighbouring tensors of one item size.

    :ivar first: index of the first tensor among the places of the image.
    :ivar whole: bool of shape ``[tensors]``: the tensor counts as changed completely.
    :ivar bounds: of shape ``[tensors + 1]``: where the changed elements of each tensor
        begin in the two arrays below, and end; empty for ``whole`` tensors.
    :ivar positions: int64 of shape ``[n]``: index of each element in its tensor.
    :ivar values: the bits of these elements, copied.
    """

    first: int
    whole: npt.NDArray[np.bool_]
    bounds: npt.NDArray[np.intp]
    positions: npt.NDArray[np.int64]
    values: npt.NDArray[Any]


class Difference:
    """Finds where an image (a version's bytes) differs from an older one, its base.

    The base may be overwritten meanwhile; all tensors not compared before count as
    changed then.
    """

    def __init__(self, image: torch.Tensor, manifest: Manifest, base: Buffer | None, sharing: int = 1) -> None:
        """Keep the image and the base (the older version); compare nothing yet.

        Maps the base's memory for reading.

        :param image: uint8 of shape ``[manifest.image_nbytes]``, header included.
        :param base: the memory of an image of the same manifest, opened without a lock,
            so that its owner may overwrite it meanwhile; closed when this object's
            ``with`` block ends. If None, all tensors count as changed.
        :param sharing: how many processes of this host compare at the same time; each
            starts fewer threads then.
        """
        self.places = places_of(manifest)
        self._data, self._manifest, self._base = image[manifest.data_offset :], manifest, base
        self._threads = helpers_for(2 * manifest.data_nbytes, sharing) + 1
        self._known: dict[int, Group] = {}
        self._run = self._data.numpy()
        if base is not None:
            self._old = base.readable()[manifest.data_offset :].numpy()
            self._lines = Lines(self._run, self._old)

    def __enter__(self) -> Difference:
        """Return this difference."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the base, the older version that the image is compared with."""
        self._close_base()

    def _close_base(self) -> None:
        """Close the base; all tensors that were not compared yet count as changed.

        A second call does nothing.
        """
        base, self._base = self._base, None
        if base is not None:
            base.close()

    def groups(self) -> Iterator[Group]:
        """Return an iterator of the changes of small tensors, in their bytes' order.

        Each step compares a run of neighbouring tensors. Large tensors, which form no
        group, are left out.
        """
        groups = enumerate(self.places.groups)
        return (self._group(number) for number, (first, last) in groups if last - first > 1)

    def _group(self, number: int) -> Group:
        """Return the changes of one group of tensors; the last few results are cached.

        If the base (the older version) was overwritten by then, it is closed, and all
        tensors count as changed.

        :param number: index of the group in ``places.groups``.
        """
        if (known := self._known.get(number)) is not None:
            return known
        found = self._compared(*self.places.groups[number])
        if self._base is not None and not self._base.unchanged:
            self._close_base()
            found = self._compared(*self.places.groups[number])
        while len(self._known) >= _GROUPS_KEPT:
            del self._known[next(iter(self._known))]
        if len(found.whole) > 1:
            self._known[number] = found
        return found

    def _compared(self, first: int, last: int) -> Group:
        """Compare neighbouring tensors with the base (the older version), not cached.

        Return their changes. Without a base all count as changed.

        :param first: index of the first tensor in ``places``. :param last: one more
            than the last.
        """
        starts, item, alone = self.places.edges[first : last + 1], self.places.items[first], last - first == 1
        begin, end, width = int(starts[0]), int(starts[-1]), min(item, _WIDTH_MAX)
        starts = (starts - begin) // item
        numbers = None if self._base is None else self._changed(begin, end, width, SHARE if alone else 1)
        if numbers is None:
            whole, numbers = np.ones(last - first, np.bool_), np.empty(0, np.int64)
        else:
            numbers = np.unique(numbers // 2) if item > width else numbers
            counts = np.diff(np.searchsorted(numbers, starts))
            whole = counts > np.diff(starts) // SHARE
            numbers = numbers[~np.repeat(whole, counts)]
        bounds = np.searchsorted(numbers, starts)
        elements = self._run[begin:end].view("<c16" if item > width else f"<u{width}")
        return Group(first, whole, bounds, numbers - np.repeat(starts[:-1], np.diff(bounds)), elements[numbers])

    def _changed(self, begin: int, end: int, width: int, share: int) -> npt.NDArray[np.int64] | None:
        """Return which elements differ from the base in bytes ``begin`` to ``end``.

        The bytes are those of the data section. The elements are indices, rising,
        counted from ``begin``. Return None if more than one in ``share`` elements
        differs.

        :param width: bytes of an element.
        """
        self._lines.compare(begin, end, self._threads)
        parts: list[npt.NDArray[np.int64]] = []
        for start in range(begin, end, _RUN_NBYTES):
            stop = min(start + _RUN_NBYTES, end)
            data = self._run, self._old, self._lines.words, start, stop
            if (some := find_changed(*data, width, (stop - start) // width // share)) is None:
                return None
            parts.append(some[0].astype(np.int64) + (start - begin) // width)
        return np.concatenate(parts)

    def _found(self, name: str) -> tuple[Group, slice] | None:
        """Return where the changes of a tensor are; compare it first if need be.

        They are (the changes of its group, a slice of these). Return None if the tensor
        counts as changed completely, or is empty.
        """
        place = self.places.group_of.get(name)
        if place is None:  # it is empty
            return None
        group, number = self._group(place[0]), place[1]
        return None if group.whole[number] else (group, slice(group.bounds[number], group.bounds[number + 1]))

    def positions(self, name: str) -> torch.Tensor | None:
        """Return the indices of a tensor's changed elements, rising (int64).

        They count in the flattened tensor. Return None if all of it counts as changed,
        or it has no elements. The tensor is compared with the base now, unless that is
        done.
        """
        found = self._found(name)
        return None if found is None else torch.from_numpy(found[0].positions[found[1]])

    def of(self, name: str) -> Change:
        """Return the change of the tensor ``name``; compare it unless that is done.

        A tensor that counts as changed completely comes as a view of the image.
        """
        number = self._manifest.index[name]
        spec = self._manifest.tensors[number]
        dtype, found = torch_dtype(spec.dtype), self._found(name)
        if found is None and (spec.nbytes or self._base is None):
            with torch.inference_mode(False):  # any thread may write to it
                return all_of(name, typed(self._data, self._manifest.offsets[number], dtype, spec.shape))
        if found is None or found[1].start == found[1].stop:
            return Change(name, None, _none(), _none(dtype))
        group, some = found
        positions, values = torch.from_numpy(group.positions[some]), torch.from_numpy(group.values[some])
        return Change(name, None, positions, values.view(dtype))

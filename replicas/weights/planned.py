"""The layout of a set of weights, reused from one publish to the next.

Theory of operation
===================

A module or a mapping mostly gives the same tensors at each publish: the same names,
shapes, dtypes and ties, with other values. Then the manifest is the same, too, and so
is the place of each tensor. :class:`Planned` remembers the layout of the last set, and
:meth:`Planned.sources` compares a new set with it by whole lists, at half a microsecond
a tensor. It answers None for any difference and for values of an unusual kind; the set
is then planned anew, with all checks. Ties are compared by address: tied tensors must
share one address again, and all others must have different ones. No tensor is kept.

When each tensor is contiguous in host memory, with just the bytes to publish, they are
copied by their addresses, without a view of either side
(:attr:`~replicas.weights.feed.Sources.addresses`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from replicas.core.versions.manifest import PartManifest
from replicas.weights import streaming
from replicas.weights.feed import Feed, Shard, Sources
from replicas.weights.layout import Entry, Places
from replicas.weights.streaming import Addresses
from replicas.weights.tensors import bits, is_dtensor, torch_dtype

__all__ = ["Planned"]

LOOK = 2048
"""How many tensors are compared together: so many fit the CPU caches."""

_SAME, _IS, _SHAPE, _DTYPE = operator.eq, operator.is_, operator.attrgetter("shape"), operator.attrgetter("dtype")
_ON_CPU = operator.attrgetter("is_cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Seen(NamedTuple):
    addresses: Addresses
    elsewhere: torch.Tensor | None
    """One that is not on the CPU."""
    runs: bool
    """Each tensor is one run of just the bytes to copy."""


class Planned:
    """The layout of the known entries of a feed, and the place of each tensor."""

    def __init__(self, feed: Feed, entries: Sequence[Entry], manifest: PartManifest) -> None:
        known = feed.known() or {}
        values = [value for value in known.values() if value is not None]
        self.manifest = manifest
        self.places = Places(manifest)
        self._how = feed.dtype, feed.mode
        self._names = list(known)
        self._types = list(map(type, known.values()))
        numbers = {entry.name: number for number, entry in enumerate(entries)}
        self._ties = [
            (number, numbers[entry.alias_of]) for number, entry in enumerate(entries) if entry.alias_of is not None
        ]
        full = [number for number, entry in enumerate(entries) if entry.alias_of is None and entry.box is not None]
        self._full = np.array(full, dtype=np.intp)
        self._gathers = any(entries[number].tensor is None for number in full)
        own = [number for number, entry in enumerate(entries) if entry.alias_of is None]
        given = own if manifest.pieces is None else full
        self._picks = [given[number] for number in self.places.order]
        self._picks_all = self._picks == list(range(len(values)))
        self._special = [(number, _form(value)) for number, value in enumerate(values) if type(value) not in _PLAIN]
        tensors = None if self._gathers else self._tensors(values)
        self._shapes = [tensor.shape for tensor in tensors or ()]
        self._dtypes = [tensor.dtype for tensor in tensors or ()]
        kinds = {(dtype, entry.dtype) for dtype, entry in zip(self._dtypes, entries, strict=tensors is not None)}
        self._casts = any(dtype != torch_dtype(published) for dtype, published in kinds)
        self._complex = any(dtype.is_complex for dtype, _ in kinds)
        self._usable = tensors is not None and self._look(tensors) is not None

    def first_sources(self, entries: Sequence[Entry]) -> Sources | None:
        """The tensors of the planned ``entries``; None when some must be gathered."""
        return None if self._gathers else Sources(self._ordered([entry.tensor for entry in entries]), None)

    def sources(self, feed: Feed) -> Sources | None:
        """The tensors to copy, in the order of the bytes; None for another layout."""
        known = feed.known()
        if known is None or not self._usable or self._how != (feed.dtype, feed.mode):
            return None
        if list(known) != self._names or list(map(type, known.values())) != self._types:
            return None
        values = [value for value in known.values() if value is not None]
        if any(_form(values[number]) != form for number, form in self._special):
            return None
        tensors = self._tensors(values)
        seen = None if tensors is None else self._look(tensors)
        if tensors is None or seen is None:
            return None
        if seen.elsewhere is not None:
            feed.device = seen.elsewhere.device.type
        if seen.runs:
            if self._picks_all:
                return Sources(list(tensors), seen.addresses)
            return Sources([tensors[number] for number in self._picks], seen.addresses[self._picks])
        return Sources(self._ordered(tensors), None)

    def _tensors(self, values: Sequence[object]) -> list[torch.Tensor] | None:
        """The local tensor of each value; None when a value is of an unknown kind."""
        if not self._special:
            return values  # type: ignore[return-value]  # their types are plain tensors, all of them
        found: list[torch.Tensor] = []
        with torch.no_grad():
            for value in values:
                tensor = _memory(value)
                if tensor is None:
                    return None
                found.append(tensor)
        return found

    def _look(self, tensors: Sequence[torch.Tensor]) -> _Seen | None:
        """Inspect what may differ from the last set; None if shapes, dtypes or ties do.

        It takes :data:`LOOK` tensors at a time: the first check brings them into the
        caches for the next ones.
        """
        addresses = np.empty(len(tensors), dtype=np.uintp)
        elsewhere: torch.Tensor | None = None
        runs = streaming.available and not self._casts
        for first in range(0, len(tensors), LOOK):
            few = slice(first, first + LOOK)
            some = tensors[few]
            if not all(map(_SAME, map(_SHAPE, some), self._shapes[few])):
                return None
            if not all(map(_IS, map(_DTYPE, some), self._dtypes[few])):
                return None
            try:
                addresses[few] = np.fromiter(map(torch.Tensor.data_ptr, some), dtype=np.uintp, count=len(some))
            except RuntimeError:  # it has no storage: it is sparse
                return None
            if elsewhere is None:
                elsewhere = next(itertools.filterfalse(_ON_CPU, some), None)
            runs = (
                runs
                and elsewhere is None
                and all(map(torch.Tensor.is_contiguous, some))
                and not any(map(torch.Tensor.is_neg, some))
                and not (self._complex and any(map(torch.Tensor.is_conj, some)))
            )
        if any(tensors[int(number)].numel() for number in np.flatnonzero(addresses == 0)):
            return None  # on the meta device
        if not self._tied_alike(tensors, addresses):
            return None
        return _Seen(addresses, elsewhere, runs)

    def _tied_alike(self, tensors: Sequence[torch.Tensor], addresses: Addresses) -> bool:
        full = np.sort(addresses[self._full])
        if np.any(full[1:] == full[:-1]):
            return False
        return all(
            addresses[tie] == addresses[first] != 0 and _strides(tensors[tie]) == _strides(tensors[first])
            for tie, first in self._ties
        )

    def _ordered(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        found = [tensors[number] for number in self._picks]
        for index in self.places.odd:
            tensor = found[index]
            assert tensor is not None
            found[index] = bits(tensor.detach())
        return found  # type: ignore[return-value]  # aliases and empty entries, which have none, were not picked


def _form(value: object) -> object:
    """The layout of a Shard or a DTensor, for comparison; None for unknown kinds."""
    if isinstance(value, Shard):
        return value.offsets, value.shape
    if is_dtensor(value):
        return value.device_mesh, value.placements, value.shape
    return None


def _memory(value: object) -> torch.Tensor | None:
    if isinstance(value, Shard):
        value = value.tensor
    elif is_dtensor(value):
        value = value.to_local()
    return value if type(value) in _PLAIN else None  # type: ignore[return-value]  # _PLAIN holds tensors only


def _strides(tensor: torch.Tensor) -> object:
    return tensor.stride(), tensor.is_conj(), tensor.is_neg()

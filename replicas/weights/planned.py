"""What is known of a set of weights from one publish to the next.

Theory of operation
===================

A module or a mapping mostly gives the same tensors each time: the same names, shapes, dtypes and ties, with other values.
Then the manifest is the same, too, and so is the place of each tensor. :class:`Planned` remembers how the last set looked,
and :meth:`Planned.sources` compares a new one with it by whole lists, which costs about a microsecond a tensor. Whatever
differs makes it answer None, and so does whatever is of an unusual kind: then the set is looked at anew, with all checks.

Ties are compared by address: tied tensors must have one again, and all others different ones. No tensor is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from replicas.core.manifest import PartManifest
from replicas.weights.dtensor import is_dtensor
from replicas.weights.feed import Feed, Shard
from replicas.weights.layout import Entry
from replicas.weights.places import Places
from replicas.weights.tensors import bits

__all__ = ["Planned"]

_SAME, _SHAPE, _DTYPE = operator.eq, operator.attrgetter("shape"), operator.attrgetter("dtype")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Planned:
    """How one set of known weights looked, and where it goes.

    :param feed: whose :meth:`Feed.known` is not None.
    :param entries: of ``feed``, as :meth:`Feed.known_entries` gives them.
    :param manifest: the layout of ``entries``.
    """

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
        self._full = [
            number for number, entry in enumerate(entries) if entry.alias_of is None and entry.box is not None
        ]
        self._gathers = any(entries[number].tensor is None for number in self._full)
        own = [number for number, entry in enumerate(entries) if entry.alias_of is None]
        given = own if manifest.pieces is None else self._full
        self._picks = [given[number] for number in self.places.order]
        self._special = [(number, _form(value)) for number, value in enumerate(values) if type(value) not in _PLAIN]
        tensors = None if self._gathers else self._tensors(values)
        self._shapes = [tensor.shape for tensor in tensors or ()]
        self._dtypes = [tensor.dtype for tensor in tensors or ()]
        self._usable = tensors is not None and self._tied_alike(tensors)

    def first_sources(self, entries: Sequence[Entry]) -> list[torch.Tensor] | None:
        """What to copy of the entries of which this was made; None when something has to be gathered first."""
        return None if self._gathers else self._ordered([entry.tensor for entry in entries])

    def sources(self, feed: Feed) -> list[torch.Tensor] | None:
        """What to copy, in the order of the bytes; None when ``feed`` does not give just what was given then."""
        known = feed.known()
        if known is None or not self._usable or self._how != (feed.dtype, feed.mode):
            return None
        if list(known) != self._names or list(map(type, known.values())) != self._types:
            return None
        values = [value for value in known.values() if value is not None]
        if any(_form(values[number]) != form for number, form in self._special):
            return None
        tensors = self._tensors(values)
        if tensors is None or not self._alike(tensors):
            return None
        feed.device = next((tensor.device.type for tensor in tensors if not tensor.is_cpu), feed.device)
        return self._ordered(tensors)

    def _tensors(self, values: Sequence[object]) -> list[torch.Tensor] | None:
        """The memory of each value; None when one of them is of a kind that this does not know."""
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

    def _alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        return (
            all(map(_SAME, map(_SHAPE, tensors), self._shapes))  # one by one: a list of shapes would wake the collector
            and all(map(_SAME, map(_DTYPE, tensors), self._dtypes))
            and {tensor.layout for tensor in tensors} <= {torch.strided}
            and not any(tensor.is_meta for tensor in tensors)
            and self._tied_alike(tensors)
        )

    def _tied_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        addresses = [tensor.data_ptr() for tensor in tensors]
        if len({addresses[number] for number in self._full}) != len(self._full):
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
    """What else must be the same of a value that is no plain tensor; None for a kind that is not known here."""
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
    return value if type(value) in _PLAIN else None  # type: ignore[return-value]  # that is what it says


def _strides(tensor: torch.Tensor) -> object:
    return tensor.stride(), tensor.is_conj(), tensor.is_neg()

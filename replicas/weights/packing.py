"""Packs a user's weights into the bytes of a slot.

Theory of operation
===================

A publish walks the weights once (:class:`replicas.weights.feed.Feed`). Weights whose
layout is known before the walk (:meth:`Packer.plan`) are written straight into the slot
by :meth:`Packer.pack`. The layout of a plain iterable is unknown: pass the manifest of
the channel's last publish, or make private copies of everything with :func:`stage`,
which then knows the manifest.

A module or a mapping that needs no gather is copied *at once*: all its tensors exist,
so several threads copy them in the order of their bytes, in large steps
(:mod:`replicas.weights.copying`). A :class:`Packer` remembers the layout of the last
publish (:class:`Planned`) and the views of each slot. Bytes that are copied at once may
be sent meanwhile, since no user code can run in between (:meth:`Packer.knows`).
Everything else is copied tensor by tensor, each before the next one is asked for.

Another thread computes the digest beside the copy. The caller's thread only enqueues
copies from or to a device (:mod:`replicas.weights.devices.device_copies`).

:meth:`Packer.pack` and :func:`stage` drain the feed to its end before they raise an
error of the library, because its steps may be collectives of the user's group. The
user's own exceptions (``feed.user_failed``) pass unchanged.

Mode ``"image"``: this rank writes all tensors into one image; DTensors are gathered, on
every rank of the replica (the others only call :meth:`Feed.drain`). Mode ``"parts"``:
each rank writes its own pieces and nothing is gathered.

**Planned.** A module or a mapping mostly gives the same tensors at each publish: the
same names, shapes, dtypes and ties, with other values. Then the manifest is the same,
too, and so is the place of each tensor. :class:`Planned` remembers the layout of the
last set, and :meth:`Planned.sources` compares a new set with it by whole lists, at half
a microsecond a tensor. It answers None for any difference and for values of an unusual
kind; the set is then planned anew, with all checks. Ties are compared by address: tied
tensors must share one address again, and all others must have different ones. No tensor
is kept.

When each tensor is contiguous in host memory, with just the bytes to publish, they are
copied by their addresses, without a view of either side
(:attr:`~replicas.weights.feed.Sources.addresses`).
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from replicas.core.versions.manifest import PartManifest
from replicas.weights import streaming
from replicas.weights.copy_pool import cores
from replicas.weights.copying import Copier, Progress, copy_elements
from replicas.weights.devices.accelerator import Accelerator, accelerator
from replicas.weights.devices.device_copies import Begun, CopyOptions, DeviceCopies
from replicas.weights.feed import Feed, Shard, Sources
from replicas.weights.layout import Entry, Places, Writer, layout
from replicas.weights.memory.arena import Slot
from replicas.weights.streaming import Addresses
from replicas.weights.tensors import bits, is_dtensor, torch_dtype

__all__ = ["LOOK", "Packer", "Packing", "Staged", "packing_of", "stage"]

LOOK = 2048
"""How many tensors are compared together: so many fit the CPU caches."""

_SAME, _IS, _SHAPE, _DTYPE = operator.eq, operator.is_, operator.attrgetter("shape"), operator.attrgetter("dtype")
_ON_CPU = operator.attrgetter("is_cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, eq=False)
class Packing:
    """The outcome of a copy into a slot."""

    digest: Future[str]
    """Of all of the slot's data; set a moment later, on another thread."""
    copy_s: float
    """How long the caller was held."""
    copies: DeviceCopies | None = None
    """May still run; None: everything is copied."""


Copies = Copier | DeviceCopies


def _filled(
    fill: Callable[[Copies], object],
    data: torch.Tensor,
    options: CopyOptions,
    progress: Progress | None = None,
    *,
    device: Accelerator | None,
    beside: bool | None = None,
) -> Packing:
    """Fill ``data`` and start its digest: the only way, for all kinds of weights.

    :param fill: copies all weights, or reports that they are already in place.
    :param device: makes the copies; None: threads of the CPU do.
    """
    started = time.monotonic()
    with (
        DeviceCopies(device, data, options, progress)
        if device is not None
        else Copier(data, beside=beside, progress=progress, begun=options.begun)
    ) as copies:
        fill(copies)
        copies.finish()
    held_s = time.monotonic() - started
    return Packing(copies.digest, held_s, copies if isinstance(copies, DeviceCopies) else None)


def packing_of(slot: Slot, begun: Begun = lambda copies: None) -> Packing:
    """Start the digest of a filled slot, behind the current stream's writes to it."""
    buffer = slot.buffer
    device = accelerator() if buffer.device or buffer.pinned else None
    return _filled(lambda copies: copies.written(), slot.data, CopyOptions(buffer, begun=begun), device=device)


def _device_for(sources: list[torch.Tensor], options: CopyOptions) -> Accelerator | None:
    """The device involved in copying these tensors; None: all of it is host memory."""
    device = accelerator()
    return device if device is not None and (options.device or any(map(device.owns, sources))) else None


def _copy_runs(places: Places, sources: Addresses, data: torch.Tensor, copies: Copies) -> None:
    """Copy bytes of host memory by their addresses, in the order of the places."""
    assert isinstance(copies, Copier)
    copies.run(places.runs(data, sources))


def _copy(places: Places, destinations: list[torch.Tensor], sources: list[torch.Tensor], copies: Copies) -> None:
    """Copy tensors that all exist; both lists are in the order of their bytes."""
    steps = places.steps(destinations, sources, copies.step_nbytes)
    if isinstance(copies, DeviceCopies) or all(map(_ON_CPU, sources)):
        copies.run(steps)
    else:
        copies.run_here(steps)


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


class Packer:
    """Packs one publish after another and reuses their layout. Not thread-safe."""

    def __init__(self) -> None:
        self._planned: Planned | None = None
        self._places: tuple[PartManifest, Places] | None = None
        self._views: dict[int, tuple[str, list[torch.Tensor]]] = {}
        """By buffer key, until that buffer is closed."""

    def plan(self, feed: Feed) -> PartManifest | None:
        """As :meth:`Feed.plan`; cheap when the layout is that of the last call."""
        planned = self._planned
        if planned is not None and (sources := planned.sources(feed)) is not None:
            feed.sources = sources
            return planned.manifest
        entries = feed.known_entries()
        if entries is None:
            return feed.plan()
        manifest = layout(entries, feed.mode)
        if planned is not None and planned.manifest.hash == manifest.hash:
            manifest = planned.manifest  # with its hash and offsets computed already
        self._planned = Planned(feed, entries, manifest)
        feed.sources = self._planned.sources(feed) or self._planned.first_sources(entries)
        return manifest

    def knows(self, feed: Feed, manifest: PartManifest) -> bool:
        """Whether :meth:`pack` will copy at once: no user code runs before the end."""
        return feed.sources is not None and self._planned is not None and manifest is self._planned.manifest

    def pack(
        self,
        feed: Feed,
        manifest: PartManifest,
        slot: Slot,
        progress: Progress | None = None,
        *,
        hold: bool = True,
        begun: Begun = lambda copies: None,
    ) -> Packing:
        """Copy everything to its place in ``slot``, at once or tensor by tensor.

        :param manifest: from :meth:`plan`, or of an earlier publish.
        :param progress: told how far the slot's data is filled from its start. The last
            call reports all of it, before this returns or once :attr:`Packing.copies`
            are done; it does not come when this raises or those fail.
        :raises ManifestMismatch: the feed gave something else than ``manifest`` says;
            it has been drained.
        """
        options = CopyOptions(slot.buffer, hold, begun)
        known = self.knows(feed, manifest)
        sources, feed.sources = feed.sources, None
        try:
            if not known or sources is None or self._planned is None:
                return self._walk(feed, manifest, slot, options, progress)
            places, device = self._planned.places, _device_for(sources.tensors, options)
            if sources.addresses is not None and device is None:
                fill = partial(_copy_runs, places, sources.addresses, slot.data)
            else:
                fill = partial(_copy, places, self._destinations(manifest, places, slot), sources.tensors)
            packing = _filled(fill, slot.data, options, progress, device=device)
            feed.take_known()
        except BaseException:
            feed.drain()
            raise
        return packing

    def _walk(
        self, feed: Feed, manifest: PartManifest, slot: Slot, options: CopyOptions, progress: Progress | None
    ) -> Packing:
        """Copy each tensor of a walk before asking for the next one."""
        if self._places is None or self._places[0].hash != manifest.hash:
            self._places = manifest, Places(manifest)
        places = self._places[1]
        writer = Writer(manifest, places, self._destinations(manifest, places, slot))

        def fill(copies: Copies) -> None:
            for entry in feed:
                writer.write(entry, copies.put)
            writer.finish()

        beside = torch.get_num_threads() < cores()  # torch copies with its own threads here
        return _filled(fill, slot.data, options, progress, device=accelerator(), beside=beside)

    def _destinations(self, manifest: PartManifest, places: Places, slot: Slot) -> list[torch.Tensor]:
        buffer = slot.buffer
        known_hash, destinations = self._views.get(buffer.key, ("", []))
        if known_hash != manifest.hash:
            destinations = places.views(slot.data)
            buffer.watchers.add(self)
            self._views[buffer.key] = manifest.hash, destinations
        return destinations

    def buffer_closed(self, key: int) -> None:
        self._views.pop(key, None)


@dataclass(frozen=True, eq=False)
class Staged:
    """Private copies of a whole feed, for weights of unknown layout."""

    manifest: PartManifest
    entries: tuple[Entry, ...]

    def write(self, data: torch.Tensor, options: CopyOptions = CopyOptions()) -> Packing:
        """Copy everything to its place in ``data`` (uint8: a slot's data)."""
        places = Places(self.manifest)
        full = self.manifest.pieces is not None
        tensors = [one.tensor for one in self.entries if one.alias_of is None and (one.box is not None or not full)]
        sources = [tensor for tensor in (tensors[number] for number in places.order) if tensor is not None]
        for index in places.odd:
            sources[index] = bits(sources[index])
        fill = partial(_copy, places, places.views(data), sources)
        return _filled(fill, data, options, device=_device_for(sources, options))


def stage(feed: Feed) -> Staged:
    """Walk ``feed`` and keep private CPU copies: an iterator may free what it gave.

    :raises ManifestMismatch: a value cannot be published; the feed has been drained.
    """
    entries: list[Entry] = []
    try:
        for entry in feed:
            copy = None
            if entry.tensor is not None and entry.box is not None:
                copy = torch.empty(entry.box[1], dtype=torch_dtype(entry.dtype))
                copy_elements(copy, entry.tensor)
            entries.append(Entry(entry.name, copy, entry.dtype, entry.shape, entry.box, entry.alias_of))
        manifest = layout(entries, feed.mode)
    except BaseException:
        feed.drain()
        raise
    return Staged(manifest, tuple(entries))

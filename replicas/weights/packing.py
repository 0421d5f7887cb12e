"""Pack a user's weights into the bytes of a slot.

Theory of operation
===================

A publish walks the weights once (:class:`replicas.weights.feed.Feed`). If the layout is
known before the walk (:meth:`Packer.plan`), :meth:`Packer.pack` writes the weights
straight into the slot. The layout of a plain iterable is unknown: pass the manifest of
the channel's last publish, or make private copies of all tensors with :func:`stage`,
which then knows the manifest.

All tensors of a module or a mapping that needs no gather exist, so several threads copy
them *at once*, in the order of their bytes, in large steps
(:mod:`replicas.weights.copies.copying`). A :class:`Packer` remembers the layout of the
last publish (:class:`Planned`) and the views of each slot. Bytes that are copied at
once may be sent meanwhile, since no user code can run in between
(:meth:`Packer.copies_at_once`). All other weights are copied tensor by tensor, each
before the walk continues.

Another thread computes the digest beside the copy. The caller's thread only enqueues
copies from or to a device (:mod:`replicas.weights.devices.device_copies`).

:meth:`Packer.pack` and :func:`stage` drain the feed to its end before they raise an
error of the library, because its steps may be collectives of the user's group. The
user's own exceptions (``feed.user_failed``) pass unchanged.

In mode ``"image"`` this rank writes all tensors into one image; every rank of the
replica takes part in the gathers of DTensors (the others only call :meth:`Feed.drain`).
In mode ``"parts"`` each rank writes its own pieces, without gathers.

**Planned.** A module or a mapping mostly gives the same tensors at each publish: the
same names, shapes, dtypes and ties, with other values, and so the same manifest and
offsets. :class:`Planned` remembers the layout of the last set; :meth:`Planned.sources`
compares a new set with it by whole lists, in half a microsecond a tensor, and returns
None for any difference and for unusual kinds of values. Such a set is planned again,
with all checks. Ties are compared by address: tied tensors must share one address
again, and all others must have different ones. No tensor is kept.

Between the plan and the copy the caller waits for a slot. So the copy checks again
where the tensors' memory is (:mod:`replicas.weights.copies.host_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from replicas.core.base.manifest import PartManifest
from replicas.errors import UsageError
from replicas.weights.copies.accelerator import Accelerator, accelerator
from replicas.weights.copies.copy_pool import cores
from replicas.weights.copies.copying import Copier, Progress, copy_elements
from replicas.weights.copies.host_copies import Found, HostCopies, Kinds, unusable
from replicas.weights.copies.streaming import Addresses
from replicas.weights.copies.tensors import PLAIN, bits, is_dtensor, torch_dtype, why_unusable
from replicas.weights.devices.device_copies import Begun, CopyOptions, DeviceCopies
from replicas.weights.feed import Feed, Shard
from replicas.weights.layout import NO_TENSORS, Entry, Places, Writer, layout
from replicas.weights.memory.arena import Slot


@dataclass(frozen=True, eq=False)
class Packing:
    """The outcome of a copy into a slot."""

    digest: Future[str]
    """Digest of the slot's data; set a moment later, on another thread."""
    copies: DeviceCopies | None = None
    """Device copies that may still run; None if all bytes are copied."""


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
    """Have ``fill`` copy all weights into ``data``, and start the digest of that.

    :param fill: called with the object that copies; copies all weights, or reports that
        they are already in place.
    :param options: how a device copies. :param progress: called with the bytes filled.
    :param device: enqueues the copies; if None, CPU threads copy, and this waits.
    :param beside: hash while copying; None: by the number of threads.
    """
    with (
        DeviceCopies(device, data, options, progress)
        if device is not None
        else Copier(data, beside=beside, progress=progress, begun=options.begun)
    ) as copies:
        fill(copies)
        copies.finish()
    return Packing(copies.digest, copies if isinstance(copies, DeviceCopies) else None)


def packing_of(slot: Slot, begun: Begun = lambda copies: None) -> Packing:
    """Start to compute the digest of a slot that is filled already; copy nothing.

    The device first waits for the current stream's writes to the slot; the caller does
    not wait.

    :param begun: called with the object that does the work, before it begins.
    :returns: the digest to come.
    """
    buffer = slot.buffer
    device = accelerator() if buffer.device or buffer.pinned else None
    return _filled(lambda copies: copies.written(), slot.data, CopyOptions(buffer, begun=begun), device=device)


def _device_for(sources: list[torch.Tensor], options: CopyOptions) -> Accelerator | None:
    """Return the accelerator if a source or the slot is on a GPU, so that it copies.

    Else return None: threads copy on the CPU.
    """
    device = accelerator()
    return device if device is not None and (options.device or any(map(device.owns, sources))) else None


def _copy_on_host(host: HostCopies, places: Places, copies: Copies) -> None:
    """Copy the tensors in ``host`` by the threads of ``copies``, a Copier, in steps
    that ``places`` gives; wait for the copies."""
    assert isinstance(copies, Copier)
    copies.run_host(host, places.cuts)


def _copy(
    places: Places, kinds: Kinds, destinations: list[torch.Tensor], sources: list[torch.Tensor], copies: Copies
) -> None:
    """Copy each source to the destination of the same index, in the bytes' order.

    If some are on a device, their copies are only enqueued.

    :param kinds: dtypes and shapes that the sources must have.
    :param sources: detached aliases, which keep the memory of the user's tensors.
    :raises ManifestMismatch: a source is not as ``kinds`` says, or has no memory.
    """
    for index, source in enumerate(sources):
        if why := why_unusable(source) or kinds.differs(index, source):
            raise unusable(places.name(index), source, why)
    for index in places.odd:
        sources[index] = bits(sources[index])
    steps = places.steps(destinations, sources, copies.step_nbytes)
    if isinstance(copies, DeviceCopies):
        copies.run(steps)
    else:
        copies.run_here(steps)


class Planned:
    """The layout of the last publish's values: manifest, and tensors' offsets."""

    def __init__(self, feed: Feed, entries: Sequence[Entry], manifest: PartManifest) -> None:
        """Remember where each value of the feed is in ``manifest``; keep no tensor.

        :param entries: the checked entry of each value, in the feed's order.
        """
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
        # a gather makes new tensors at each walk
        self._gathers = any(entries[number].tensor is None for number in full)
        own = [number for number, entry in enumerate(entries) if entry.alias_of is None]
        given = own if manifest.pieces is None else full
        self._picks = [given[number] for number in self.places.order]
        self._picks_all = self._picks == list(range(len(values)))  # as for most models; saves the picking
        # values whose layout is compared, too, not only their type
        self._special = [(number, _form(value)) for number, value in enumerate(values) if type(value) not in PLAIN]
        tensors = None if self._gathers else self._tensors(values)
        published = [torch_dtype(entry.dtype) for entry in entries]
        shown = tensors or ()
        self._kinds = Kinds.of(shown, published[: len(shown)])
        own_tensors = self._own_tensors(entries)
        self.kinds = Kinds.of(own_tensors, [published[number] for number in self._picks[: len(own_tensors)]])
        self._usable = tensors is not None and self._find_memory(tensors) is not None

    def first_sources(self, entries: Sequence[Entry]) -> Found | None:
        """Return the tensors of the ``entries`` that this was made of, and their
        memory; None if one is gathered (a DTensor), as it gets its tensor only in the
        walk."""
        return None if self._gathers else self.kinds.find_memory(self._own_tensors(entries))

    def _own_tensors(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Return the entries' tensors in the bytes' order; none if any is gathered."""
        picks = () if self._gathers else self._picks
        return [tensor for number in picks if (tensor := entries[number].tensor) is not None]

    def sources(self, feed: Feed) -> Found | None:
        """Return the feed's tensors in the bytes' order; None for another layout.

        Finds their memory, and sets ``feed.device``; reads no values.
        """
        known = feed.known()
        if known is None or not self._usable or self._how != (feed.dtype, feed.mode):
            return None
        if list(known) != self._names or list(map(type, known.values())) != self._types:
            return None
        values = [value for value in known.values() if value is not None]
        if any(_form(values[number]) != form for number, form in self._special):
            return None
        tensors = self._tensors(values)
        found = None if tensors is None else self._find_memory(tensors)
        if found is None:
            return None
        if found.elsewhere is not None:
            feed.device = found.elsewhere.device.type
        return found if self._picks_all else found.of(self._picks)

    def _tensors(self, values: Sequence[object]) -> list[torch.Tensor] | None:
        """Return each value's local tensor; None if one's class has code of its own."""
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

    def _find_memory(self, tensors: Sequence[torch.Tensor]) -> Found | None:
        """Return the tensors' addresses, or None if shapes, dtypes or ties differ."""
        found = self._kinds.find_memory(tensors)
        return found if found is not None and self._tied_alike(tensors, found.addresses) else None

    def _tied_alike(self, tensors: Sequence[torch.Tensor], addresses: Addresses) -> bool:
        """Return True if the same tensors share memory as when this was planned."""
        full = np.sort(addresses[self._full])
        if np.any(full[1:] == full[:-1]):  # two are newly tied
            return False
        return all(
            # an address of 0 means no memory
            addresses[tie] == addresses[first] != 0 and _strides(tensors[tie]) == _strides(tensors[first])
            for tie, first in self._ties
        )


def _form(value: object) -> object:
    """Return a key of a Shard's or DTensor's placement; None for other values."""
    if isinstance(value, Shard):
        return value.offsets, value.shape
    if is_dtensor(value):
        return value.device_mesh, value.placements, value.shape
    return None


def _memory(value: object) -> torch.Tensor | None:
    """Return the tensor of a value (of a Shard or DTensor the local one) or None."""
    if isinstance(value, Shard):
        value = value.tensor
    elif is_dtensor(value):
        value = value.to_local()
    return value if type(value) in PLAIN else None  # type: ignore[return-value]  # PLAIN holds tensors only


def _strides(tensor: torch.Tensor) -> object:
    """Return a key of a tensor's strides and lazy bits (conjugate, negative)."""
    return tensor.stride(), tensor.is_conj(), tensor.is_neg()


class Packer:
    """Copies the weights of one publish after another into slots. Not thread-safe.

    It reuses the layout and the views of slots."""

    def __init__(self) -> None:
        """Begin without a remembered layout."""
        self._planned: Planned | None = None
        self._places: tuple[PartManifest, Places] | None = None
        self._views: dict[int, tuple[str, list[torch.Tensor]]] = {}
        """Manifest hash and views by buffer key, until that buffer is closed."""

    def plan(self, feed: Feed) -> PartManifest | None:
        """Return the feed's manifest, without a walk; None for a plain iterable.

        It is found cheaply if the last layout fits; a new layout replaces that. Sets
        ``feed.sources`` if all tensors exist already. Raises as :meth:`Feed.plan`.
        """
        planned = self._planned
        if planned is not None and (sources := planned.sources(feed)) is not None:
            feed.sources = sources
            return planned.manifest
        entries = feed.known_entries()
        if entries is None:
            return feed.plan()
        manifest = layout(entries, feed.mode)
        if planned is not None and planned.manifest.hash == manifest.hash:
            manifest = planned.manifest  # whose hash and offsets are computed already
        self._planned = Planned(feed, entries, manifest)
        feed.sources = self._planned.sources(feed) or self._planned.first_sources(entries)
        return manifest

    def copies_at_once(self, feed: Feed, manifest: PartManifest) -> bool:
        """Return True if :meth:`pack` would copy this feed without running user
        code."""
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
        """Copy all weights of the feed into ``slot``; on an error drain the feed first.

        :param manifest: from :meth:`plan`, or of an earlier publish.
        :param progress: called with the bytes of the slot's data filled from its start.
            The last call reports all bytes, before this returns or when
            :attr:`Packing.copies` are done, and is left out if this or those fail.
        :param hold: copy on the caller's CUDA stream, not on one of this library.
        :param begun: called with the object that copies, before the first copy.
        :returns: the digest to come, and copies of a device that may still run.
        :raises ManifestMismatch: the feed differs from ``manifest``."""
        options = CopyOptions(slot.buffer, hold, begun)
        known = self.copies_at_once(feed, manifest)
        sources, feed.sources = feed.sources, None  # the feed must not keep the tensors alive
        try:
            if not known or sources is None or self._planned is None:
                return self._walk(feed, manifest, slot, options, progress)
            planned, places, device = self._planned, self._planned.places, _device_for(sources.tensors, options)
            views = partial(self._destinations, manifest, places, slot)
            if device is None and sources.elsewhere is None:
                ours = places.addresses(slot.data)
                host = HostCopies(
                    sources, planned.kinds, ours, places.starts, lambda one: views()[one], load=False, name=places.name
                )
                fill: Callable[[Copies], object] = partial(_copy_on_host, host, places)
            else:
                with torch.no_grad():
                    aliases = list(map(torch.Tensor.detach, sources.tensors))  # aliases keep their storages
                fill = partial(_copy, places, planned.kinds, views(), aliases)
            packing = _filled(fill, slot.data, options, progress, device=device)
            feed.take_known()  # the walk is over: there is nothing to drain
        except BaseException:
            feed.drain()
            raise
        return packing

    def _walk(
        self, feed: Feed, manifest: PartManifest, slot: Slot, options: CopyOptions, progress: Progress | None
    ) -> Packing:
        """Walk the feed; copy each tensor into the slot before taking the next.

        The arguments are those of :meth:`pack`; ``options``: how a device copies."""
        if self._places is None or self._places[0].hash != manifest.hash:
            self._places = manifest, Places(manifest)
        places = self._places[1]
        writer = Writer(manifest, places, self._destinations(manifest, places, slot))

        def fill(copies: Copies) -> None:
            """Walk the feed, copying each entry by ``copies``; check that all came."""
            for entry in feed:
                writer.write(entry, copies.put)
            writer.finish()

        beside = torch.get_num_threads() < cores()  # torch copies with its own threads here
        return _filled(fill, slot.data, options, progress, device=accelerator(), beside=beside)

    def _destinations(self, manifest: PartManifest, places: Places, slot: Slot) -> list[torch.Tensor]:
        """Return views of the slot's memory, one for each piece in ``places``; cached
        until its buffer is closed."""
        buffer = slot.buffer
        known_hash, destinations = self._views.get(buffer.key, ("", []))
        if known_hash != manifest.hash:
            destinations = places.views(slot.data)
            buffer.watchers.add(self)  # or the views would keep a closed buffer mapped
            self._views[buffer.key] = manifest.hash, destinations
        return destinations

    def buffer_closed(self, key: int) -> None:
        """Drop the cached views of the buffer ``key``, which is closed now."""
        self._views.pop(key, None)


@dataclass(frozen=True, eq=False)
class Staged:
    """Private copies, on the CPU, of all weights of a feed whose layout was unknown."""

    manifest: PartManifest
    entries: tuple[Entry, ...]

    def write(self, data: torch.Tensor, options: CopyOptions = CopyOptions()) -> Packing:
        """Copy all tensors into ``data`` (uint8, a slot's), and start its digest.

        Waits for copies on the CPU; copies to a GPU are only enqueued.
        """
        places = Places(self.manifest)
        full = self.manifest.pieces is not None
        tensors = [one.tensor for one in self.entries if one.alias_of is None and (one.box is not None or not full)]
        sources = [tensor for tensor in (tensors[number] for number in places.order) if tensor is not None]
        if (device := _device_for(sources, options)) is None:
            found = places.kinds.find_memory(sources)
            assert found is not None  # private copies
            host = HostCopies(
                *(found, places.kinds, places.addresses(data), places.starts, places.views(data).__getitem__),
                load=False,
                name=places.name,
            )
            return _filled(partial(_copy_on_host, host, places), data, options, device=None)
        return _filled(partial(_copy, places, places.kinds, places.views(data), sources), data, options, device=device)


def stage(feed: Feed) -> Staged:
    """Walk ``feed`` to its end; return private CPU copies of all tensors.

    :raises ManifestMismatch: a value cannot be published; the feed has been drained.
    :raises UsageError: the feed is a whole image and has no tensors, which would fit no
        model. (The part of one of several ranks may be empty.)
    """
    entries: list[Entry] = []
    try:
        for entry in feed:
            copy = None
            if entry.tensor is not None and entry.box is not None:
                # the iterator may free or refill its tensors
                copy = torch.empty(entry.box[1], dtype=torch_dtype(entry.dtype), device="cpu")
                copy_elements(copy, entry.tensor, name=entry.name)
            entries.append(Entry(entry.name, copy, entry.dtype, entry.shape, entry.box, entry.alias_of))
        if not entries and feed.mode == "image":
            raise UsageError("publish: the weights have no tensors", hint=NO_TENSORS)
        manifest = layout(entries, feed.mode)
    except BaseException:
        feed.drain()
        raise
    return Staged(manifest, tuple(entries))

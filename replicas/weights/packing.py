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
publish (:mod:`replicas.weights.planned`) and the views of each slot. Bytes that are
copied at once may be sent meanwhile, since no user code can run in between
(:meth:`Packer.knows`). Everything else is copied tensor by tensor, each before the next
one is asked for.

Another thread computes the digest beside the copy. The caller's thread only enqueues
copies from or to a device (:mod:`replicas.weights.devices.device_copies`).

:meth:`Packer.pack` and :func:`stage` drain the feed to its end before they raise an
error of the library, because its steps may be collectives of the user's group. The
user's own exceptions (``feed.user_failed``) pass unchanged.

Mode ``"image"``: this rank writes all tensors into one image; DTensors are gathered, on
every rank of the replica (the others only call :meth:`Feed.drain`). Mode ``"parts"``:
each rank writes its own pieces and nothing is gathered.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from replicas.core.versions.manifest import PartManifest
from replicas.weights.copy_pool import cores
from replicas.weights.copying import Copier, Progress, copy_elements
from replicas.weights.devices.accelerator import Accelerator, accelerator
from replicas.weights.devices.device_copies import Begun, CopyOptions, DeviceCopies
from replicas.weights.feed import Feed
from replicas.weights.layout import Entry, Places, Writer, layout
from replicas.weights.memory.arena import Slot
from replicas.weights.planned import Planned
from replicas.weights.streaming import Addresses
from replicas.weights.tensors import bits, torch_dtype

__all__ = ["Packer", "Packing", "Staged", "packing_of", "stage"]


@dataclass(frozen=True, eq=False)
class Packing:
    """The outcome of a copy into a slot."""

    digest: Future[str]
    """Of all of the slot's data; set a moment later, on another thread."""
    copy_s: float
    """How long the caller was held."""
    copies: DeviceCopies | None = None
    """May still run; None: everything is copied."""


_ON_CPU = operator.attrgetter("is_cpu")
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

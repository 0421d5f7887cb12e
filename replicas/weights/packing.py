"""From the user's weights to bytes in a slot.

Theory of operation
===================

A publish walks the weights once (:class:`replicas.weights.feed.Feed`). What is known
before the first step (:meth:`Feed.plan`: a module, a mapping, an object with
``metadata()``) is written straight into the slot by :meth:`Packer.pack`. A plain
iterable tells nothing beforehand: give the manifest of the last publish of the same
channel, or keep private copies of everything with :func:`stage`, which then knows its
manifest.

A module or a mapping of which nothing has to be gathered is copied *at once*: all its
tensors exist, so they are taken in the order of their bytes, in large steps, by several
threads (:mod:`replicas.weights.copying`). A :class:`Packer` remembers from one publish
to the next what it looked like (:mod:`replicas.weights.planned`) and the views of each
slot, so that a repeated publish of many small tensors costs little beside the copy.
Anything else is copied step by step, before the next step is asked for. What is copied
at once may be sent meanwhile: no code of the user's can come in between
(:meth:`Packer.knows`), and whoever sends it is told how far it is there from its start.

Either way the digest of the bytes is made beside the copy, by another thread:
:class:`Packing` has it a moment later.

What lies on a device, and what goes there, is not copied by the caller's thread: that
only enqueues the copies, and goes on (:mod:`replicas.weights.devices.device_copies`).
The packing tells when they are done.

Both drain the feed to its end before they raise an error of ours, because its steps may
be collectives of the user's group; the user's own exceptions (``feed.user_failed``)
come through as they are.

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
from replicas.weights.copying import Copier, Progress
from replicas.weights.devices.accelerator import Accelerator, accelerator
from replicas.weights.devices.device_copies import Begun, CopyOptions, DeviceCopies
from replicas.weights.feed import Feed
from replicas.weights.layout import Entry, copy_elements, layout
from replicas.weights.memory.arena import Slot
from replicas.weights.places import Places, Writer, steps
from replicas.weights.planned import Planned
from replicas.weights.streaming import Addresses
from replicas.weights.tensors import bits, torch_dtype

__all__ = ["Packer", "Packing", "Staged", "packing_of", "stage"]


@dataclass(frozen=True, eq=False)
class Packing:
    """Weights that are copied.

    :param digest: of all of the slot's data; set a moment later, on another thread.
    :param copy_s: how long the caller was held.
    :param copies: what a device may still have under way; None: everything is copied.
    """

    digest: Future[str]
    copy_s: float
    copies: DeviceCopies | None = None


_ON_CPU = operator.attrgetter("is_cpu")

Fill = Callable[[Copier | DeviceCopies], None]
"""Copies all of the weights, or says that they are there."""


def _filled(
    fill: Fill,
    data: torch.Tensor,
    manner: CopyOptions,
    progress: Progress | None = None,
    *,
    device: Accelerator | None,
    beside: bool | None = None,
) -> Packing:
    """Fill ``data``: the one way, whatever the weights are.

    :param device: makes the copies; None: threads of the CPU do.
    :param beside: see :class:`Copier`.
    """
    started = time.monotonic()
    with (
        DeviceCopies(device, data, manner, progress)
        if device is not None
        else Copier(data, beside=beside, progress=progress, begun=manner.begun)
    ) as copies:
        fill(copies)
        copies.finish()
    held_s = time.monotonic() - started
    return Packing(copies.digest, held_s, copies if isinstance(copies, DeviceCopies) else None)


def packing_of(slot: Slot, begun: Begun = lambda copies: None) -> Packing:
    """The digest of a slot that is filled already. Returns at once.

    What was written to it on a device, or from one to pinned memory, is waited for
    first, as far as it is on the current stream; see :class:`CopyOptions` for
    ``begun``.
    """
    buffer = slot.buffer
    device = accelerator() if buffer.device or buffer.pinned else None
    return _filled(lambda copies: copies.written(), slot.data, CopyOptions(buffer, begun=begun), device=device)


def _walk(feed: Feed, writer: Writer, copies: Copier | DeviceCopies) -> None:
    """Copy each tensor of a walk before the next one is asked for."""
    for entry in feed:
        writer.write(entry, copies)
    writer.finish()


def _device_for(sources: list[torch.Tensor], manner: CopyOptions) -> Accelerator | None:
    """The device that has anything to do with the copies of these."""
    device = accelerator()
    return device if device is not None and (manner.device or any(map(device.owns, sources))) else None


def _copy(
    places: Places,
    destinations: list[torch.Tensor],
    sources: list[torch.Tensor],
    data: torch.Tensor,
    manner: CopyOptions,
    progress: Progress | None = None,
) -> Packing:
    """Copy tensors that all exist; both in the order of their bytes."""

    def copy(copies: Copier | DeviceCopies) -> None:
        made = steps(places, destinations, sources, copies.step_nbytes)
        if isinstance(copies, DeviceCopies) or all(map(_ON_CPU, sources)):
            copies.run(made)
        else:
            copies.run_here(made)

    return _filled(copy, data, manner, progress, device=_device_for(sources, manner))


def _copy_runs(
    places: Places, sources: Addresses, data: torch.Tensor, manner: CopyOptions, progress: Progress | None
) -> Packing:
    """Copy bytes of host memory as they are, by their addresses in the order of the
    places."""

    def copy(copies: Copier | DeviceCopies) -> None:
        assert isinstance(copies, Copier)
        copies.run(places.runs(data, sources))

    return _filled(copy, data, manner, progress, device=None)


class Packer:
    """Packs one publish after the other, and remembers what they have in common. One
    thread at a time."""

    def __init__(self) -> None:
        self._planned: Planned | None = None
        self._places: tuple[PartManifest, Places] | None = None
        self._views: dict[int, tuple[str, list[torch.Tensor]]] = {}
        """By the key of a buffer, until it is closed."""

    def plan(self, feed: Feed) -> PartManifest | None:
        """Like :meth:`Feed.plan`; cheap when the weights look like those of the last
        call.

        :raises ManifestMismatch: a value cannot be published. The feed still has to be
            drained.
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
            manifest = planned.manifest  # whose hash and offsets are known already
        self._planned = Planned(feed, entries, manifest)
        feed.sources = self._planned.sources(feed) or self._planned.first_sources(entries)
        return manifest

    def knows(self, feed: Feed, manifest: PartManifest) -> bool:
        """Whether :meth:`pack` will copy at once: all tensors are there, and no code of
        the user's runs before the end."""
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
        """Copy everything to its place in ``slot``. What has to be walked is copied
        step by step, before the next one.

        :param manifest: from :meth:`plan`, or of an earlier publish of the same
            weights.
        :param progress: told how far the slot's data is there from its start. The last
            call says that all is, and comes before this returns, or after
            :attr:`Packing.copies` are done; it does not come when this raises or those
            fail.
        :param hold: see :class:`CopyOptions`, as for ``begun``.
        :raises ManifestMismatch: the feed gave something else than ``manifest`` says;
            the feed has been drained.
        """
        manner = CopyOptions(slot.buffer, hold, begun)
        known = self.knows(feed, manifest)
        sources, feed.sources = feed.sources, None
        try:
            if not known or sources is None or self._planned is None:
                places = self._places_of(manifest)
                walk = partial(_walk, feed, Writer(manifest, places, self._destinations(manifest, places, slot)))
                beside = torch.get_num_threads() < cores()  # torch copies with its own threads here
                return _filled(walk, slot.data, manner, progress, device=accelerator(), beside=beside)
            places = self._planned.places
            if sources.addresses is not None and _device_for(sources.tensors, manner) is None:
                packing = _copy_runs(places, sources.addresses, slot.data, manner, progress)
            else:
                destinations = self._destinations(manifest, places, slot)
                packing = _copy(places, destinations, sources.tensors, slot.data, manner, progress)
            feed.take_known()
        except BaseException:
            feed.drain()
            raise
        return packing

    def _places_of(self, manifest: PartManifest) -> Places:
        if self._places is None or self._places[0].hash != manifest.hash:
            self._places = manifest, Places(manifest)
        return self._places[1]

    def _destinations(self, manifest: PartManifest, places: Places, slot: Slot) -> list[torch.Tensor]:
        buffer = slot.buffer
        known_hash, destinations = self._views.get(buffer.key, ("", []))
        if known_hash != manifest.hash:
            destinations = places.views(slot.data)
            buffer.watchers.add(self)
            self._views[buffer.key] = manifest.hash, destinations
        return destinations

    def buffer_closed(self, key: int) -> None:
        """Keep no views of it."""
        self._views.pop(key, None)


@dataclass(frozen=True, eq=False)
class Staged:
    """Private copies of a whole feed, for weights of which nothing was known
    beforehand."""

    manifest: PartManifest
    entries: tuple[Entry, ...]

    def write(self, data: torch.Tensor, manner: CopyOptions = CopyOptions()) -> Packing:
        """Copy everything to its place in ``data`` (uint8: a slot's data)."""
        places = Places(self.manifest)
        full = self.manifest.pieces is not None
        tensors = [one.tensor for one in self.entries if one.alias_of is None and (one.box is not None or not full)]
        sources = [tensor for tensor in (tensors[number] for number in places.order) if tensor is not None]
        for index in places.odd:
            sources[index] = bits(sources[index])
        return _copy(places, places.views(data), sources, data, manner)


def stage(feed: Feed) -> Staged:
    """Walk ``feed`` and keep private CPU copies: a yielded tensor may be freed when its
    iterator goes on.

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

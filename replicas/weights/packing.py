"""From the user's weights to bytes in a slot.

Theory of operation
===================

A publish walks the weights once (:class:`replicas.weights.feed.Feed`). What is known before the first step
(:meth:`Feed.plan`: a module, a mapping, an object with ``metadata()``) is written straight into the slot by :func:`pack`.
A plain iterable tells nothing beforehand: give :func:`pack` the manifest of the last publish of the same channel, or keep
private copies of everything with :func:`stage`, which then knows its manifest.

Both drain the feed to its end before they raise an error of ours, because its steps may be collectives of the user's
group; the user's own exceptions (``feed.user_error``) come through as they are.

Mode ``"image"``: this rank writes all tensors into one image; DTensors are gathered, on every rank of the replica (the
others only call :meth:`Feed.drain`). Mode ``"parts"``: each rank writes its own pieces and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from replicas.core.manifest import PartManifest
from replicas.weights.feed import Feed, Mode, Shard
from replicas.weights.layout import Entry, Writer, copy_elements, layout
from replicas.weights.loading import load_into, views
from replicas.weights.tensors import torch_dtype

__all__ = ["Entry", "Feed", "Mode", "Shard", "Staged", "iter_tensors", "load_into", "pack", "plan", "stage", "views"]


def iter_tensors(weights: object, *, dtype: torch.dtype | None = None, mode: Mode = "image") -> Iterator[Entry]:
    """The entries of ``weights``; see :class:`Feed`."""
    return iter(Feed(weights, dtype=dtype, mode=mode))


def plan(weights: object, *, dtype: torch.dtype | None = None, mode: Mode = "image") -> PartManifest | None:
    """What ``weights`` will give, without consuming them; None when it cannot be known. See :meth:`Feed.plan`."""
    return Feed(weights, dtype=dtype, mode=mode).plan()


def pack(feed: Feed, manifest: PartManifest, data: torch.Tensor) -> None:
    """Walk ``feed`` and copy each tensor to its place before the next one is asked for.

    :param manifest: of this feed, from :meth:`Feed.plan` or from an earlier publish of the same weights.
    :param data: uint8, ``slot.data``: the data section of an image slot, or a part slot.
    :raises ManifestMismatch: the feed gave something else than ``manifest`` says; the feed has been drained.
    """
    try:
        writer = Writer(manifest, data)
        for entry in feed:
            writer.write(entry)
        writer.finish()
    except BaseException:
        feed.drain()
        raise


@dataclass(frozen=True, eq=False)
class Staged:
    """Private copies of a whole feed, for weights of which nothing was known beforehand."""

    manifest: PartManifest
    entries: tuple[Entry, ...]

    def write(self, data: torch.Tensor) -> None:
        """Copy everything to its place in ``data`` (see :func:`pack`)."""
        writer = Writer(self.manifest, data)
        for entry in self.entries:
            writer.write(entry)
        writer.finish()


def stage(feed: Feed) -> Staged:
    """Walk ``feed`` and keep private CPU copies: a yielded tensor may be freed when its iterator goes on.

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

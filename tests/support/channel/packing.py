"""Packing into memory that is not in a slot, and loading from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from replicas.core.base.manifest import PartManifest
from replicas.weights.feed import Feed
from replicas.weights.loading import Model, load_image
from replicas.weights.memory.arena import Arena
from replicas.weights.packing import Packer

__all__ = ["load_tensors", "pack"]


def pack(feed: Feed, manifest: PartManifest, data: torch.Tensor) -> None:
    """Pack a feed into ``data`` (uint8), by way of a slot."""
    arena = Arena(1, name="test")
    slot = arena.acquire(1, manifest)
    assert slot is not None
    try:
        Packer().pack(feed, manifest, slot)
        data.copy_(slot.data)
    finally:
        arena.free(slot)
        arena.close()


def load_tensors(model: Model, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load as a receiver does: out of an image that the tensors were packed into."""
    feed = Feed(dict(tensors))
    manifest = feed.plan()
    assert manifest is not None
    image = torch.zeros(manifest.whole.image_nbytes, dtype=torch.uint8)
    pack(feed, manifest, image[manifest.whole.data_offset :])
    load_image(model, image, manifest.whole)

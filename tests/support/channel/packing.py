"""Packing into memory that is not in a slot."""

from __future__ import annotations

import torch

from replicas.core.base.manifest import PartManifest
from replicas.weights.feed import Feed
from replicas.weights.memory.arena import Arena
from replicas.weights.packing import Packer

__all__ = ["pack"]


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

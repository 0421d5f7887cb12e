"""Weights as bytes: memory for them, packing, loading and digests. Imports torch."""

from __future__ import annotations

from replicas.weights.arena import Arena, Buffer, Slot
from replicas.weights.digest import Digest, digest_of
from replicas.weights.packing import Entry, Feed, Mode, Shard, Staged, iter_tensors, load_into, pack, plan, stage, views

__all__ = [
    "Arena",
    "Buffer",
    "Digest",
    "Entry",
    "Feed",
    "Mode",
    "Shard",
    "Slot",
    "Staged",
    "digest_of",
    "iter_tensors",
    "load_into",
    "pack",
    "plan",
    "stage",
    "views",
]

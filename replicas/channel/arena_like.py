"""The body of ``Channel.arena_like``: a free slot for the trainer to write its publish copy into."""

from __future__ import annotations

import time

import torch

from replicas import errors
from replicas.channel.free_slot import free_slot
from replicas.channel.hub import Hub
from replicas.weights.feed import Feed, Mode
from replicas.weights.writable import WritableSlot

__all__ = ["arena_like"]


def arena_like(hub: Hub, weights: object, dtype: torch.dtype | None, deadline_s: float) -> WritableSlot:
    """See :meth:`replicas.Channel.arena_like`. On the caller's thread."""
    mode: Mode = "parts" if hub.settings.source_ranks == "all" else "image"
    feed = Feed(weights, dtype=dtype, mode=mode)
    if mode == "image" and not hub.leader:
        raise hub.error(
            errors.UsageError,
            "arena_like: only the leader of this source carries bytes",
            hint='call it on rank 0 alone, or set ranks = "all" for the source',
        )
    manifest = feed.plan()
    if manifest is None:
        raise hub.error(
            errors.UsageError,
            f"arena_like: a {type(weights).__name__} does not tell its tensors beforehand",
            hint="give a module, a mapping, or an object with metadata()",
        )

    def check() -> None:
        if hub.over is not None:
            raise hub.over.with_traceback(None)

    slot = free_slot(hub, 0, manifest, what="writing in place", until=time.monotonic() + deadline_s, check=check)
    try:
        slot.buffer.begin_write()
        return WritableSlot(slot, manifest, hub.arena.free)
    except BaseException:
        hub.arena.free(slot)
        raise

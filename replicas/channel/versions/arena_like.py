"""Body of `Channel.arena_like`: lend a free slot for the trainer to write into."""

from __future__ import annotations

import time
import weakref
from functools import partial

import torch

from replicas import errors
from replicas.channel.hub import Hub, as_wire_error
from replicas.channel.pending import Pending
from replicas.channel.versions.free_slot import free_slot
from replicas.channel.versions.leases import Holder
from replicas.common import own_loop
from replicas.core.versions.manifest import PartManifest
from replicas.weights.feed import Feed, Mode
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.writable import WritableSlot

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

    holder = Holder()
    room: Pending[Slot] = Pending(f"a slot of {hub.name}")
    refusal = _refusal_to_wait()
    until = time.monotonic() + (deadline_s if refusal is None else 0.0)
    hub.call(_lend, hub, holder, manifest, until, room)
    try:
        slot = room._wait_for_session()
    except errors.Busy:
        if refusal is not None:
            raise refusal from None
        raise
    return WritableSlot(slot, manifest, partial(_give_back, hub, holder), holder)


def _refusal_to_wait() -> errors.ReplicasError | None:
    """The error to raise if no slot is free at once: on the coordinator's own loop."""
    try:
        own_loop.must_not_block("waiting for a free slot")
    except errors.UsageError as error:
        return error
    return None


def _give_back(hub: Hub, holder: Holder) -> None:
    hub.call(hub.leases.give_back, holder)


def _lend(hub: Hub, holder: Holder, manifest: PartManifest, until: float, room: Pending[Slot]) -> None:
    hub.spawn(_find(hub, weakref.ref(holder), manifest, until, room), "arena_like")


async def _find(
    hub: Hub, wanted: weakref.ref[Holder], manifest: PartManifest, until: float, room: Pending[Slot]
) -> None:
    """Session thread: lend the caller a slot, as long as the caller waits for it."""

    def check() -> None:
        if hub.over is not None:
            raise hub.over.with_traceback(None)
        if wanted() is None:
            raise hub.error(errors.Gone, "nobody waits for the slot any more", hint="")

    try:
        slot = await free_slot(hub, 0, manifest, what="writing in place", until=until, check=check)
    except (OSError, RuntimeError, MemoryError, errors.ReplicasError) as error:
        room._fail(as_wire_error(error, channel=hub.name, phase="wait").exception())
        return
    holder = wanted()
    if holder is None:
        hub.arena.free(slot)
        return
    hub.leases.lend(holder, partial(hub.arena.free, slot))
    del holder
    room._resolve(slot)

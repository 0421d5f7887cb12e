"""Wait for a free slot, to fill it here or to lend it to the trainer (`arena_like`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch

from replicas import errors
from replicas.channel.hub import Hub, as_wire_error
from replicas.channel.pending import Pending
from replicas.channel.versions.leases import Holder
from replicas.common import own_loop
from replicas.core.versions.manifest import Manifest, PartManifest
from replicas.weights.feed import Feed, Mode
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.pool import PREPARED_NBYTES
from replicas.weights.memory.writable import WritableSlot

__all__ = ["arena_like", "free_slot"]

BEAT_S = 0.03
"""Seconds between two looks: a reader in another process lets go without notice."""


async def free_slot(
    hub: Hub,
    version: int,
    manifest: Manifest | PartManifest,
    *,
    until: float,
    check: Callable[[], object],
    text: str,
    phase: str = "wait",
) -> Slot:
    """Session thread, which interrupts do not reach: a slot to fill with ``version``.

    ``check``, called before and after each look, raises if no slot is wanted. At
    ``until`` (monotonic clock) it is Busy: ``text``, and who uses the slots.
    """
    nbytes = manifest.nbytes if isinstance(manifest, PartManifest) else manifest.image_nbytes
    while True:
        changed = hub.holdings.changed
        check()
        hub.leases.sweep()
        hub.arena.release(version)
        if nbytes < PREPARED_NBYTES:  # its memory is allocated fast enough for this thread
            slot = hub.arena.acquire(version, manifest)
        else:
            slot = await asyncio.to_thread(hub.arena.acquire, version, manifest)
        try:
            check()
        except BaseException:
            if slot is not None:
                hub.arena.free(slot)
            raise
        if slot is not None:
            return slot
        left = until - time.monotonic()
        if left <= 0:
            raise hub.error(
                errors.Busy,
                f"{text}: {hub.arena.in_use()}",
                version=version or None,
                phase=phase,
                members=[hub.member.name],
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left, BEAT_S)):
                await changed.wait()


def arena_like(hub: Hub, weights: object, dtype: torch.dtype | None, mode: Mode, deadline_s: float) -> WritableSlot:
    """See :meth:`replicas.Channel.arena_like`. On the caller's thread."""
    feed = Feed(weights, dtype=dtype, mode=mode)
    if mode == "image" and not hub.leader:
        text = "arena_like: only the leader of this source carries bytes"
        raise hub.error(errors.UsageError, text, hint='call it on rank 0 alone, or set ranks = "all" for the source')
    manifest = feed.plan()
    if manifest is None:
        text = f"arena_like: a {type(weights).__name__} does not tell its tensors beforehand"
        raise hub.error(errors.UsageError, text, hint="give a module, a mapping, or an object with metadata()")

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
    return WritableSlot(slot, manifest, partial(hub.call, hub.leases.give_back, holder), holder)


def _refusal_to_wait() -> errors.ReplicasError | None:
    """The error to raise if no slot is free at once: on the coordinator's own loop.

    Its traceback must not refer to the caller's frame, which refers to the holder.
    """
    try:
        own_loop.must_not_block("waiting for a free slot")
    except errors.UsageError as error:
        return error
    return None


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

    text = f"no free slot for writing in place within {until - time.monotonic():.3g} s"
    try:
        slot = await free_slot(hub, 0, manifest, until=until, check=check, text=text)
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

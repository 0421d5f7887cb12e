"""A free slot for a publish or a trainer, waited for on the session thread: no
interrupt comes there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from replicas import errors
from replicas.channel.hub import Hub
from replicas.core.versions.manifest import PartManifest
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.pool import PREPARED_NBYTES

__all__ = ["free_slot", "look_again"]

BEAT_S = 0.03
"""How often one who waits for a slot looks again: nobody is told when a reader in
another process lets go of its memory."""


async def free_slot(
    hub: Hub, version: int, manifest: PartManifest, *, what: str, until: float, check: Callable[[], object]
) -> Slot:
    """A slot to fill with ``version``; 0 if it has no number yet.

    :param manifest: of what it will hold; see :meth:`Arena.acquire`.
    :param what: what it is for, in the error's text.
    :param until: reading of the monotonic clock at which it gives up.
    :param check: called at each look; raises if there is no point in waiting any more.
    :raises replicas.errors.Busy: no slot became free in time; it says who uses them.
    :raises replicas.errors.NoCapacity: there is no memory for it.
    """
    started = time.monotonic()
    while True:
        changed = hub.holdings.event()
        hub.leases.sweep()
        if manifest.nbytes < PREPARED_NBYTES:  # whose memory is there in no time
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
                f"no free slot for {what} within {until - started:.3g} s: {hub.arena.in_use()}",
                version=version or None,
                phase="wait",
                members=[hub.member.name],
            )
        await look_again(changed, left)


async def look_again(changed: asyncio.Event, left_s: float) -> None:
    """Wait until a slot may have become free: something of ours has changed, or a beat
    is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(left_s, BEAT_S)):
            await changed.wait()

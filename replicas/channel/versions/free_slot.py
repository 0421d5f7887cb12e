"""Wait for a free slot, on the session thread, which interrupts do not reach."""

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
"""Seconds between two looks: a reader in another process lets go without notice."""


async def free_slot(
    hub: Hub, version: int, manifest: PartManifest, *, what: str, until: float, check: Callable[[], object]
) -> Slot:
    """A slot to fill with ``version``; 0 if it has no number yet.

    :param manifest: manifest of the future contents; see :meth:`Arena.acquire`.
    :param what: purpose of the slot, for the error's text.
    :param until: time (monotonic clock) at which it gives up.
    :param check: called at each look; raises if waiting is no longer useful.
    :raises replicas.errors.Busy: no slot became free in time; it names the users.
    :raises replicas.errors.NoCapacity: there is no memory for it.
    """
    started = time.monotonic()
    while True:
        changed = hub.holdings.event()
        hub.leases.sweep()
        if manifest.nbytes < PREPARED_NBYTES:  # its memory is allocated fast enough for this thread
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
    """Wait until a local slot has changed, or :data:`BEAT_S` is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(left_s, BEAT_S)):
            await changed.wait()

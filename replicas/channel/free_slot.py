"""A free slot for the caller's thread, waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from replicas import errors, own_loop
from replicas.channel.hub import Hub
from replicas.core.manifest import PartManifest
from replicas.weights.arena import Slot

__all__ = ["BEAT_S", "free_slot"]

BEAT_S = 0.03
"""How often one who waits for a slot looks again: nobody is told when a reader in another process lets go of its memory."""


def free_slot(
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
        with hub.holdings.changed:
            seen = hub.holdings.generation
        slot = hub.arena.acquire(version, manifest)
        if slot is not None:
            return slot
        check()
        own_loop.must_not_block("waiting for a free slot")
        left = until - time.monotonic()
        if left <= 0:
            raise hub.error(
                errors.Busy,
                f"no free slot for {what} within {until - started:.3g} s: {hub.arena.in_use()}",
                version=version or None,
                phase="wait",
                members=[hub.member.name],
            )
        with hub.holdings.changed:
            hub.holdings.changed.wait_for(lambda: hub.holdings.generation != seen, min(left, BEAT_S))  # noqa: B023  # used at once

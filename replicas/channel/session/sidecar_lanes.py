"""Form and end this member's lanes (process groups), one sidecar each, on request.

LaneForm -> fork a sidecar -> build the process group -> LaneFormed; LaneDrop -> kill.
A sidecar that failed during work is killed, and its lane *ended*. The memory that it
read or wrote may be reused only when its death is confirmed
(:meth:`SidecarLane.gone`); otherwise the memory is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from replicas import errors
from replicas.channel.session.hub import Hub, Part, as_wire_error
from replicas.common.logs import Log
from replicas.common.tasks import kept
from replicas.messages import Backend, LaneDrop, LaneFailed, LaneForm, LaneFormed, LaneMoved
from replicas.sidecar.rank_side.sidecar_handle import Sidecar, SidecarDied, SidecarFailed
from replicas.sidecar.wire import GroupSpec, Moved

logger = Log("replicas.channel")

DEATH_TIMEOUT_S = 5.0
MOVED_INTERVAL_S = 0.8
"""Seconds between two LaneMoved messages while bytes move."""
STILL_S = 1.0
"""Seconds without a moved byte after which LaneMoved is sent immediately."""
PREFORK_DELAY_S = 0.2
"""Delay before the next spare sidecar is forked: the lane's first work has priority."""


@dataclass(eq=False, repr=False)
class SidecarLane:
    """One process group as this member sees it."""

    name: str
    rank: int
    backend: Backend
    sidecar: Sidecar | None = None
    ended: bool = False
    told_at: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one operation at a time, in the order of their Go

    def end(self) -> None:
        self.ended = True
        if self.sidecar is not None:
            self.sidecar.kill()

    async def gone(self) -> bool:
        """End the lane; return True once its sidecar is dead, False if unconfirmed."""
        self.end()
        return self.sidecar is None or await self.sidecar.wait_dead(DEATH_TIMEOUT_S)


class SidecarLanes(Part):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lanes: dict[str, SidecarLane] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {LaneForm: self._form_asked, LaneDrop: self._drop}

    def get(self, name: str) -> SidecarLane:
        """Return the lane ``name``; raise Gone if it is not formed or has ended."""
        lane = self._lanes.get(name)
        if lane is None or lane.ended or lane.sidecar is None:
            raise self._hub.error(errors.Gone, f"lane {name} is gone", phase="form", hint="")
        return lane

    def prepare(self) -> None:
        """Connect to the forkserver (or start our own) ahead of use."""
        if self._hub.over is None and (self._preparing is None or self._preparing.done()):
            self._preparing = self._hub.spawn(self._prepare(), "forkserver")

    async def _prepare(self) -> None:
        try:
            (await self._hub.loop.forkserver(self._hub.forkserver_name)).prefork()
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            logger.warning("%s: cannot prepare a sidecar yet: %s", self._hub.name, error)

    def new_term(self) -> None:
        for name in list(self._lanes):
            self._drop(LaneDrop(name))

    async def all_gone(self) -> None:
        """Wait up to :data:`DEATH_TIMEOUT_S` until all dropped sidecars are dead."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=DEATH_TIMEOUT_S)

    def _form_asked(self, message: LaneForm) -> None:
        self._lanes[message.lane] = lane = SidecarLane(message.lane, message.rank, message.backend)
        self._hub.spawn(self._form(lane, message), f"lane {lane.name}")

    async def _form(self, lane: SidecarLane, message: LaneForm) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(message.deadline_s):
                lane.sidecar = await self._fork()
                if lane.ended:  # dropped while it was forked
                    lane.end()
                    return
                self._hub.loop.inherited.add(lane.sidecar)
                lane.sidecar.on_exit = partial(self._hub.call, self._exited, lane)
                lane.sidecar.on_moved = partial(self._hub.call, self._moved, lane)
                spec = GroupSpec(
                    prefix=message.prefix,
                    store_host=message.store_host,
                    store_port=message.store_port,
                    rank=message.rank,
                    size=message.size,
                    backend=message.backend,
                    address=message.addresses[message.rank],
                    timeout_s=message.deadline_s,
                    names=message.names,
                    addresses=message.addresses,
                    probe=message.probe,
                    secret=message.secret,
                    device=self._hub.gpu if message.backend == "nccl" else self._hub.device,
                )
                await lane.sidecar.build(spec)
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            self.failed(lane, error, phase="form")
            return
        if not lane.ended:
            self._hub.send(LaneFormed(lane.name, time.monotonic() - started))
        self._hub.after(PREFORK_DELAY_S, self.prepare)

    async def _fork(self) -> Sidecar:
        """Fork a sidecar; if the forkserver has died, fork from a new one."""
        loop, name = self._hub.loop, self._hub.forkserver_name
        forkserver = await loop.forkserver(name)
        try:
            return await forkserver.fork()
        except SidecarDied as error:
            if forkserver.alive:
                raise
            logger.warning("%s: using a new forkserver; the last one died (%s)", self._hub.name, error)
        return await (await loop.forkserver(name)).fork()

    def failed(self, lane: SidecarLane, error: BaseException, *, phase: str) -> None:
        """Kill the lane's sidecar, and report the failure once."""
        if not lane.ended:
            lane.end()
            links = error.links if isinstance(error, SidecarFailed) else ()
            self._hub.send(LaneFailed(lane.name, as_wire_error(error, channel=self._hub.name, phase=phase), links))

    def _exited(self, lane: SidecarLane, reason: str) -> None:
        self.failed(lane, errors.SyncError(f"the sidecar of {self._hub.member} ended: {reason}", hint=""), phase="lane")

    def _moved(self, lane: SidecarLane, moved: Moved) -> None:
        now = time.monotonic()
        if not lane.ended and (moved.still_s >= STILL_S or now - lane.told_at >= MOVED_INTERVAL_S):
            lane.told_at = now
            self._hub.send(LaneMoved(lane.name, moved.sent, moved.received, moved.still_s, moved.rtt_s, moved.held_up))

    def _drop(self, message: LaneDrop) -> None:
        lane = self._lanes.pop(message.lane, None)
        if lane is None:
            return
        lane.end()
        kept(self._hub.spawn(self._confirm_death(lane), f"lane {lane.name} ends"), self._ending)

    async def _confirm_death(self, lane: SidecarLane) -> None:
        gone = await lane.gone()
        if lane.sidecar is not None:
            self._hub.loop.inherited.discard(lane.sidecar)
        if not gone:
            logger.warning("%s: keeping the memory of lane %s: its sidecar did not die", self._hub.name, lane.name)

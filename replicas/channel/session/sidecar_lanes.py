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

import msgspec

from replicas import errors
from replicas.channel.session.hub import Hub, Part, as_wire_error
from replicas.common.logs import Log
from replicas.common.tasks import keep_until_done
from replicas.messages import (
    Backend,
    GroupSpec,
    LaneDrop,
    LaneFailed,
    LaneForm,
    LaneFormed,
    LaneMoved,
    OperationGo,
    OperationKind,
    ReduceOp,
)
from replicas.messages.identity import Member
from replicas.sidecar.rank_side.sidecar_handle import Sidecar, SidecarDied, SidecarFailed
from replicas.sidecar.wire import CollectiveSpec, Moved
from replicas.weights.memory.buffers import Buffer

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
    """One lane: a process group over several members, with a sidecar process here.

    :ivar backend: of the process group.
    :ivar sidecar: None until it was forked.
    :ivar ended: True if no operation may use the lane from now on.
    :ivar turn: lock that gives one operation at a time the sidecar, in order.
    :ivar told_at: time of the last LaneMoved, by ``time.monotonic()``.
    """

    hub: Hub
    name: str
    backend: Backend
    sidecar: Sidecar | None = None
    ended: bool = False
    told_at: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one operation at a time, in the order of their Go

    def end(self) -> None:
        """Mark the lane (process group) as ended; kill its sidecar, but do not wait.

        An operation that is running there then raises SidecarDied.
        """
        self.ended = True
        if self.sidecar is not None:
            self.sidecar.kill()

    async def gone(self) -> bool:
        """Kill the sidecar, and wait for its death.

        The lane (process group) has ended then. Return True if the sidecar is dead, or
        there was none; False if it lives after 5 s, and may still write to its memory.
        """
        self.end()
        return self.sidecar is None or await self.sidecar.wait_dead(DEATH_TIMEOUT_S)

    async def run(
        self, go: OperationGo, kind: OperationKind, reduce_op: ReduceOp, inputs: Buffer | None, outputs: Buffer | None
    ) -> None:
        """Wait until the sidecar has run the operation that ``go`` describes.

        The caller holds :attr:`turn`, so that the lane runs one operation at a time.
        After an error the sidecar may use the memory until it is dead (:meth:`gone`).

        :param inputs: shared memory that the sidecar reads; None on a member without
            any.
        :param outputs: shared memory that it writes; None on a member without results.
        :raises replicas.errors.Gone: the lane has ended.
        :raises SidecarFailed, SidecarDied: the operation failed, or its sidecar died.
        """
        if self.ended or self.sidecar is None:
            raise _gone(self.hub, self.name)
        spec = CollectiveSpec(
            operation=go.operation,
            kind=kind,
            reduce_op=reduce_op,
            lane_ranks=go.lane_ranks,
            segments=go.segments,
            me=index_in(go, self.hub.member),
            root=go.root,
            timeout_s=max(0.001, go.deadline_s),  # the deadline may have passed
            places=go.places,
        )
        await self.sidecar.collective(spec, inputs, outputs)


class SidecarLanes(Part):
    """This member's lanes (process groups), made and ended as the coordinator asks."""

    def __init__(self, hub: Hub) -> None:
        """Start without lanes (process groups); fork nothing."""
        self._hub = hub
        self._lanes: dict[str, SidecarLane] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {LaneForm: self._form_asked, LaneDrop: self._drop}

    def get(self, name: str) -> SidecarLane:
        """Return the lane (process group) ``name``, whose sidecar was forked.

        :raises replicas.errors.Gone: it is not formed, or has ended.
        """
        lane = self._lanes.get(name)
        if lane is None or lane.ended or lane.sidecar is None:
            raise _gone(self._hub, name)
        return lane

    def prepare(self) -> None:
        """Start a task that has a spare sidecar forked, for the next lane; do not wait.

        Does nothing if such a task still runs, or the channel is over.
        """
        if self._hub.over is None and (self._preparing is None or self._preparing.done()):
            self._preparing = self._hub.spawn(self._prepare(), "forkserver")

    async def _prepare(self) -> None:
        """Connect to the forkserver and have it fork a spare; only log a failure."""
        try:
            (await self._hub.loop.forkserver(self._hub.forkserver_name)).prefork()
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            logger.warning("channel %s: trying again later to start a helper process: %s", self._hub.name, error)

    def new_term(self) -> None:
        """Forget all lanes, unknown to a new coordinator; kill their sidecars."""
        for name in list(self._lanes):
            self._drop(LaneDrop(name))

    async def all_gone(self) -> None:
        """Wait until the sidecars of all dropped lanes are dead, for 5 s at most."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=DEATH_TIMEOUT_S)

    def _form_asked(self, message: LaneForm) -> None:
        """Record the lane that the coordinator asks for; start a task that forms it."""
        self._lanes[message.lane] = lane = SidecarLane(self._hub, message.lane, message.group.backend)
        self._hub.spawn(self._form(lane, message.group), f"lane {lane.name}")

    async def _form(self, lane: SidecarLane, group: GroupSpec) -> None:
        """Fork a sidecar, and have it build the lane's process group ``group``.

        Then send LaneFormed, and have a spare sidecar forked a little later. After a
        failure kill the sidecar, and send LaneFailed.
        """
        try:
            async with asyncio.timeout(group.timeout_s):
                lane.sidecar = await self._fork()
                if lane.ended:  # dropped while it was forked
                    lane.end()
                    return
                self._hub.loop.inherited.add(lane.sidecar)
                lane.sidecar.on_exit = partial(self._hub.call, self._exited, lane)
                lane.sidecar.on_moved = partial(self._hub.call, self._moved, lane)
                device = self._hub.gpu if group.backend == "nccl" else self._hub.device
                await lane.sidecar.build(msgspec.structs.replace(group, device=device, nccl_env=None))
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            self.failed(lane, error, phase="form")
            return
        if not lane.ended:
            self._hub.send(LaneFormed(lane.name))
        self._hub.after(PREFORK_DELAY_S, self.prepare)

    async def _fork(self) -> Sidecar:
        """Fork a sidecar and return it; if the forkserver has died, use a new one.

        :raises OSError, RuntimeError: no forkserver can be reached or started, or the
            system allows no process.
        """
        loop, name = self._hub.loop, self._hub.forkserver_name
        forkserver = await loop.forkserver(name)
        try:
            return await forkserver.fork()
        except SidecarDied as error:
            logger.warning("channel %s: starting helpers by a new process; the last died (%s)", self._hub.name, error)
        return await (await loop.forkserver(name)).fork()

    def failed(self, lane: SidecarLane, error: BaseException, *, phase: str) -> None:
        """End the lane: kill its sidecar, and send LaneFailed with ``error``.

        Do nothing if the lane has ended.

        :param phase: name of the work that failed, such as ``form``, for the error.
        """
        if not lane.ended:
            lane.end()
            links = error.links if isinstance(error, SidecarFailed) else ()
            self._hub.send(LaneFailed(lane.name, as_wire_error(error, channel=self._hub.name, phase=phase), links))

    def _exited(self, lane: SidecarLane, reason: str) -> None:
        """End a lane whose sidecar has exited on its own, and send LaneFailed.

        Do nothing if the lane has ended.

        :param reason: how the sidecar ended, as text.
        """
        name = self._hub.member.name
        error = errors.SyncError(f"the helper process (sidecar) of {name} ended: {reason}", members=[name], hint="")
        self.failed(lane, error, phase="lane")

    def _moved(self, lane: SidecarLane, moved: Moved) -> None:
        """Send the sidecar's progress to the coordinator, at most every 0.8 s.

        Sends it immediately if no byte has moved for a second.
        """
        now = time.monotonic()
        if not lane.ended and (moved.still_s >= STILL_S or now - lane.told_at >= MOVED_INTERVAL_S):
            lane.told_at = now
            self._hub.send(LaneMoved(lane.name, moved.still_s, moved.rtt_s, moved.held_up))

    def _drop(self, message: LaneDrop) -> None:
        """Forget the lane that the coordinator names, and kill its sidecar.

        A task waits for its death. Does nothing for an unknown lane.
        """
        lane = self._lanes.pop(message.lane, None)
        if lane is None:
            return
        lane.end()
        keep_until_done(self._hub.spawn(self._confirm_death(lane), f"lane {lane.name} ends"), self._ending)

    async def _confirm_death(self, lane: SidecarLane) -> None:
        """Wait up to 5 s for a killed sidecar's death; log a warning without it."""
        gone = await lane.gone()
        if lane.sidecar is not None:
            self._hub.loop.inherited.discard(lane.sidecar)
        if not gone:
            logger.warning("channel %s: keeping memory of %s: a helper process did not die", self._hub.name, lane.name)


def index_in(go: OperationGo, member: Member) -> int:
    """Return the index of ``member`` among the participants that ``go`` names; raise
    ValueError if it is none of them."""
    return [one.name for one in go.participants].index(member.name)


def _gone(hub: Hub, name: str) -> errors.ReplicasError:
    """Return (do not raise) the Gone for a lane that is not formed, or has ended."""
    return hub.error(errors.Gone, f"the process group {name} is gone", phase="form", hint="")

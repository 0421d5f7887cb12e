"""The session thread's side of a member with everything around it faked: the test is
the coordinator and the sidecars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import torch

from replicas import errors
from replicas import messages as wire
from replicas.channel.operations.operations import RankOperations
from replicas.channel.session.carriers import Carriers
from replicas.channel.session.hub import Hub
from replicas.channel.session.loop import SessionLoop
from replicas.channel.session.pending import SessionEnd
from replicas.channel.session.sidecar_lanes import SidecarLanes
from replicas.channel.versions.manifest_exchange import ManifestExchange
from replicas.channel.versions.orders import VersionOrders, Versions
from replicas.channel.versions.publish import Publisher
from replicas.channel.versions.receive import Receiver, Watches
from replicas.channel.versions.transfers import Transfers
from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.core.versions.fetching import pieces
from replicas.messages import GroupSpec
from replicas.messages.identity import Member, ProcessIdentity
from replicas.sidecar.rank_side.sidecar_handle import SidecarDied
from replicas.sidecar.wire import CollectiveSpec
from replicas.weights.copies.digest import digest_of
from replicas.weights.memory.buffers import Buffer

__all__ = ["DIGEST", "MANIFEST", "ME", "Loop", "ScriptedWorld", "Session", "Sidecar"]

MANIFEST = Manifest((TensorSpec("w", "float32", (4,)),))
DIGEST = digest_of(torch.full((4,), 7.0).view(torch.uint8))
"""Of what every version has here: see :attr:`Sidecar.slot_value`."""
ME = Member("rollout", 0, 0, "abc")


class Loop:
    """The test's own loop in place of the session thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.end = SessionEnd()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.inherited: set[Any] = set()
        self.users: set[Any] = set()
        self.sidecars: list[Sidecar] = []

    def call(self, function: Callable[..., object], *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine, name=name)
        self.tasks.add(task)
        return task

    run: Any = SessionLoop.run
    _resolve_from = staticmethod(SessionLoop._resolve_from)
    _thread = None

    async def forkserver(self, name: str | None) -> Loop:
        return self

    def prefork(self) -> None:
        """Sidecars cost nothing here."""

    async def fork(self) -> Sidecar:
        self.sidecars.append(Sidecar())
        return self.sidecars[-1]


class Sidecar:
    """Does what it is asked when the test opens its gate; ``stubborn``: does not
    die."""

    def __init__(self) -> None:
        self.on_exit: Callable[[str], None] | None = None
        self.gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.killed = False
        self.dead = asyncio.Event()
        self.slot_value = 7.0
        self.spec: GroupSpec | None = None

    async def build(self, spec: GroupSpec) -> float:
        self.spec = spec
        return 0.1

    async def collective(self, spec: CollectiveSpec, inputs: Buffer | None, outputs: Buffer | None) -> float:
        await self.gate
        if inputs is None and outputs is not None:  # the broadcast of a version
            outputs.tensor()[MANIFEST.data_offset :].view(torch.float32).fill_(self.slot_value)
        elif inputs is not None and outputs is not None:
            outputs.tensor()[:16].view(torch.float32).copy_(inputs.tensor()[:16].view(torch.float32) * 2)
        return 0.1

    @property
    def usable(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True
        if not self.gate.done():
            self.gate.set_exception(SidecarDied("killed"))

    async def wait_dead(self, timeout_s: float) -> bool:
        await self.dead.wait()
        return True


class Session:
    def __init__(self) -> None:
        self.sent: list[wire.FromMember] = []
        self.connected = True
        self.endpoint = "coordinator"
        self.term = 1
        self._news = asyncio.Event()
        self.on_ask: Callable[[wire.ManifestAsk], None] = lambda ask: None

    def send(self, message: wire.FromMember) -> None:
        if isinstance(message, wire.ManifestAsk) and message.manifest_hash == MANIFEST.hash:
            self.on_ask(message)
            return
        self.sent.append(message)
        self._news.set()

    async def close(self, reason: str, timeout_s: float) -> None:
        self.connected = False

    async def next(self, kind: type[Any]) -> Any:
        """The next message of this kind; what came before it is dropped."""
        async with asyncio.timeout(30):
            while True:
                while self.sent:
                    message = self.sent.pop(0)
                    if isinstance(message, kind):
                        return message
                self._news.clear()
                await self._news.wait()


class ScriptedWorld:
    def __init__(self, role: str, slots: int) -> None:
        self.loop = Loop()
        self.hello = wire.Hello(1, "", "policy", "rollout", 0, 0, 1, "abc", 1, ProcessIdentity(1, 2, "b", 3))
        self.hub = hub = Hub(self.loop, self.hello, None)  # type: ignore[arg-type]  # a fake
        self.session = Session()
        self.session.on_ask = self._answer
        self.lanes = SidecarLanes(hub)
        self.publisher, self.receiver = Publisher(hub), Receiver(hub, Versions(hub, VersionOrders(hub)).score)
        self.manifests = ManifestExchange(hub, self.publisher.manifest_of)
        self.carriers = Carriers(hub, self.lanes.prepare)
        self.transfers = Transfers(hub, self.lanes, self.carriers, self.manifests)
        self.watches, self.operations = Watches(hub), RankOperations(hub, self.lanes, self.transfers.broadcast)
        weights = (self.publisher, self.receiver, self.watches, self.transfers, self.manifests)
        hub.start(self.session, (*weights, self.operations, self.lanes, self.carriers))  # type: ignore[arg-type]  # a fake
        settings = wire.ChannelSettings(role, 5.0, slots, "leader", "leader", 1.0)  # type: ignore[arg-type]  # a valid role
        self.welcome = wire.Welcome(1, settings, 0, 1, "127.0.0.1", replica=0)
        hub.welcomed(self.welcome, False)

    def _answer(self, ask: wire.ManifestAsk) -> None:
        for piece in pieces(ask, MANIFEST.encode()):
            self.loop.call(self.tell, piece)

    def tell(self, *messages: wire.FromCoordinator) -> None:
        for message in messages:
            self.hub.handle(message)

    def new_coordinator(self, latest: int = 0, meanwhile: Callable[[], object] = lambda: None) -> wire.Hello:
        """Meet a coordinator of another term; returns our Hello. ``meanwhile`` happens
        while its Welcome is on the way."""
        hello = self.hub.update_hello(self.hello)
        meanwhile()
        self.session.sent.clear()
        self.welcome = msgspec.structs.replace(self.welcome, term=self.welcome.term + 1, latest=latest)
        self.session.term = self.welcome.term
        self.hub.welcomed(self.welcome, False)
        return hello

    async def end(self) -> None:
        """Let everything end, also what only a sidecar's death ends."""
        self.hub.session_over(errors.Gone("the test is over"))
        for sidecar in self.loop.sidecars:
            sidecar.dead.set()
        await asyncio.wait_for(asyncio.gather(*self.loop.tasks), 30)

    async def lane(self, name: str = "a") -> Sidecar:
        self.tell(wire.LaneForm(name, GroupSpec("prefix", "host", 1, 0, 1, "gloo", "127.0.0.1", 5.0)))
        assert (await self.session.next(wire.LaneFormed)).lane == name
        return self.loop.sidecars[-1]

    def offer(self, number: int, version: int, deadline_s: float = 10.0) -> None:
        self.tell(wire.TransferOffer(number, version, "receive", "image", MANIFEST.hash, {"n": version}, deadline_s))

    async def hold(self, version: int, *, commit: bool = True) -> None:
        """Receive a version, as if nobody else were in the lane."""
        sidecar = await self.lane(f"lane {version}")
        self.offer(version, version)
        await self.session.next(wire.TransferReady)
        sidecar.gate.set_result(None)
        self.go(version, f"lane {version}")
        assert (await self.session.next(wire.TransferDone)).image_digest == DIGEST
        if commit:
            self.tell(wire.Commit(version, DIGEST))

    def go(self, transfer: int, lane: str, deadline_s: float = 5.0) -> None:
        """Have the slot of a transfer filled by a broadcast."""
        members = Member("trainer", 0, 0, "b"), self.hub.member
        self.tell(wire.OperationGo(0, transfer, lane, members, (0, 1), (), 0, deadline_s, transfer=transfer))

    def slots(self) -> dict[int, str]:
        return {slot.version: slot.state for slot in self.hub.arena.slots if slot.state not in ("free", "closed")}

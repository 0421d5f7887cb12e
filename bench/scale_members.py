"""Simulated members for :mod:`bench.bench_scale`: real sessions and messages, no torch
and no bytes.

A process of its own (``python -m bench.rank scale_members``) with a crowd of members on
one asyncio loop. Each one speaks the real protocol over a WebSocket of its own: Hello,
heartbeats at the interval that it is told, and an answer at once to whatever is asked
of it: a slot is there, all bytes have come, a version is loaded. Its carrier, which
holders of a version need, is only a port number: nobody connects to it.
Replicas have one rank each, and eight of them are one "host", as their beacons say.
Times are stamps of CLOCK_MONOTONIC, taken when the *last* member has got the message.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from bench.rank import Driver, Handler
from bench.shapes import FULL, shapes
from replicas import messages as wire
from replicas.core.base.manifest import PartManifest, TensorSpec
from replicas.core.versions.fetching import pieces
from replicas.messages.identity import ProcessIdentity

__all__ = ["handlers"]

DONE_TIMEOUT_S = 60.0
PER_HOST = 8
CARRIER_PORT = 9
"""Of discard (RFC 863)."""
AT_ONCE = 32
"""Joins that are under way at one time."""
DIGEST = "00" * 16
LEFT = "it left"
_COUNTED = {wire.Ack, wire.Heartbeat}
"""Everything else is counted."""


class Member(asyncio.Protocol):
    """One rank of one replica, with a session."""

    def __init__(self, crowd: Crowd, hello: wire.Hello) -> None:
        self.crowd = crowd
        self.hello = hello
        self.host = hello.process.boot_id
        self.epoch = 0
        self.committed = 0
        self.loaded = 0
        self.lost = ""
        self.welcomed: asyncio.Future[None] = crowd.loop.create_future()
        self._sent = self._received = self._unacked = self._asks = 0
        self._interval_s = 1.0
        self._beat: asyncio.TimerHandle | None = None
        self._websocket = ClientProtocol(parse_uri(f"ws://{crowd.endpoint}/session"), max_size=None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        request = self._websocket.connect()
        request.headers = Headers(request.headers)
        request.headers["Authorization"] = f"Bearer {self.crowd.token}"
        self._websocket.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._websocket.receive_data(data)
        for event in self._websocket.events_received():
            if isinstance(event, Response):
                self._put(0, self.hello)
            elif isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                self._handle(wire.decode_server_frame(bytes(event.data)))
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if not self.lost:
            self.lost = f"connection lost: {exc or 'closed'}"
        if self.lost != LEFT:
            self.crowd.failed = f"{self.hello.incarnation}: {self.lost}"
        if not self.welcomed.done():
            self.welcomed.set_exception(ConnectionError(self.lost))
        self.crowd.members.pop(self.hello.incarnation, None)
        self.crowd.news()

    # ------------------------------------------------------------ the session

    def say(self, body: wire.FromMember) -> None:
        """Send a numbered message."""
        self._sent += 1
        self.crowd.said[type(body).__name__] += 1
        self._put(self._sent, body)
        self._flush()

    def leave(self) -> None:
        """In good order."""
        self.lost = LEFT
        if self._beat is not None:
            self._beat.cancel()
        self.say(wire.Bye())

    def _put(self, number: int, body: wire.FromMember) -> None:
        self._unacked = 0
        self._websocket.send_binary(wire.encode(wire.MemberFrame(number, self._received, body)))

    def _flush(self) -> None:
        for data in self._websocket.data_to_send():
            if data:
                self._transport.write(data)

    def _heartbeat(self) -> None:
        self._put(0, wire.Heartbeat())
        self._flush()
        self._beat = self.crowd.loop.call_later(self._interval_s, self._heartbeat)

    def _handle(self, frame: wire.ServerFrame) -> None:
        if frame.seq:
            self._received = frame.seq
            self._unacked += 1
            if self._unacked >= 64:
                self._put(0, wire.Heartbeat())
        body = frame.body
        if type(body) not in _COUNTED:
            self.crowd.heard[type(body).__name__] += 1
        reaction = _REACTIONS.get(type(body))
        if reaction is not None:
            reaction(self, body)

    # ------------------------------------------------------------ what is asked of it

    def welcome(self, message: wire.Welcome) -> None:
        self._interval_s = message.settings.heartbeat_interval_s
        first = self._interval_s * random.random()  # a phase, no secret
        self._beat = self.crowd.loop.call_later(first, self._heartbeat)
        self.committed = message.latest
        self.welcomed.set_result(None)
        self.say(wire.CarrierUp(CARRIER_PORT))
        if self.hello.group != "trainer":
            self.ask()

    def ask(self) -> None:
        """For the next version."""
        self._asks += 1
        self.say(wire.ReceiveAsk(self._asks, self.loaded))

    def refused(self, message: wire.Refused) -> None:
        self.lost = message.error.message
        self._transport.close()

    def view(self, message: wire.View) -> None:
        self.epoch = message.epoch
        self._interval_s = message.heartbeat_interval_s or self._interval_s
        self.crowd.news()

    def locate(self, message: wire.Locate) -> None:
        places = [beacon.nonce.partition("-")[0] for beacon in message.beacons]
        self.say(wire.Located(places.index(self.host) if self.host in places else -1))

    def offer(self, message: wire.TransferOffer) -> None:
        if message.role == "pull":
            self.say(wire.TransferReady(message.transfer))
        if message.role in ("pull", "map"):
            self.say(wire.TransferDone(message.transfer, DIGEST, 0.0, 0.0, self.crowd.place))

    def commit(self, message: wire.Commit) -> None:
        self.committed = message.version
        self.crowd.news()

    def grant(self, message: wire.ReceiveGrant) -> None:
        self.loaded = message.version
        self.say(wire.Loaded(message.version, 0.0))
        if message.version > 1:
            self.say(wire.Dropped(message.version - 1))
        self.ask()
        self.crowd.news()

    def ended(self, message: wire.PublishEnd) -> None:
        self.crowd.verdicts.append(message)
        self.crowd.news()

    def asked(self, message: wire.ManifestAsk) -> None:
        for piece in pieces(message, self.crowd.encoded):
            self.say(piece)

    def watched(self, message: wire.WatchEnd) -> None:
        self.crowd.watched = max(self.crowd.watched, message.version)
        self.crowd.news()


_REACTIONS: Mapping[type[Any], Callable[[Member, Any], None]] = {
    wire.Welcome: Member.welcome,
    wire.Refused: Member.refused,
    wire.View: Member.view,
    wire.Locate: Member.locate,
    wire.TransferOffer: Member.offer,
    wire.Commit: Member.commit,
    wire.ReceiveGrant: Member.grant,
    wire.PublishEnd: Member.ended,
    wire.WatchEnd: Member.watched,
    wire.ManifestAsk: Member.asked,
}


class Crowd:
    """All members of this process, and what is measured with them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: str, token: str) -> None:
        self.loop = loop
        self.endpoint, self.token = endpoint, token
        self.members: dict[str, Member] = {}
        self.said: Counter[str] = Counter()
        self.heard: Counter[str] = Counter()
        self.verdicts: list[wire.PublishEnd] = []
        self.watched = 0
        self.failed = ""
        self.place = wire.SlotPlace(pid=1, fd=3, inode=1, nbytes=1 << 28, serial=1)
        self.published = 0
        self._joined = 0
        self._changed = asyncio.Event()
        specs = tuple(TensorSpec(name, "bfloat16", shape) for name, shape in shapes(FULL))
        self._manifest = PartManifest(specs)
        self.encoded = self._manifest.encode()
        self.source: Member | None = None

    def news(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for it; returns when it was."""
        try:
            async with asyncio.timeout(DONE_TIMEOUT_S):
                while not condition():
                    if self.failed:
                        raise RuntimeError(self.failed)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise RuntimeError(f"not within {DONE_TIMEOUT_S:g} s: {what}") from None
        return time.monotonic()

    # ------------------------------------------------------------ commands

    async def grow(self, size: int, group: str = "rollout") -> dict[str, Any]:
        """Join until there are ``size`` targets and all of them know of all; the source
        comes first."""
        if self.source is None:
            self.source = await self._join("trainer", 0, "trainer")
        began = time.monotonic()
        gate = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with gate:
                await self._join(group)

        missing = size + 1 - len(self.members)
        await asyncio.gather(*(one() for _ in range(missing)))
        welcomed = time.monotonic()
        ended = await self._settled(0)
        return {"joined": missing, "joins_s": welcomed - began, "all_s": ended - began}

    async def _settled(self, after: int) -> float:
        """Everybody knows of the same epoch, a later one than ``after``; returns when.
        And all serve the newest version."""

        def same() -> bool:
            epochs = {member.epoch for member in self.members.values()}
            return len(epochs) == 1 and epochs.pop() > after

        known = await self.until(same, "everybody knows of the same epoch")
        targets = [member for member in self.members.values() if member is not self.source]
        await self.until(
            lambda: all(one.loaded == self.published for one in targets), "everybody serves the newest version"
        )
        return known

    async def _join(self, group: str, replica: int | None = None, host: str = "") -> Member:
        if replica is None:
            replica, self._joined = self._joined, self._joined + 1
            host = f"host{replica // PER_HOST}"
        incarnation = f"{group}{replica}"
        hello = wire.Hello(
            protocol=wire.PROTOCOL,
            run="",
            channel="policy",
            group=group,
            replica=replica,
            rank=0,
            world_size=1,
            incarnation=incarnation,
            generation=1,
            process=ProcessIdentity(2, 1, host, 1),
            torch_version="2.13.0",
            beacon=wire.Beacon(2, 3, f"{host}-{incarnation}", 0),
        )
        address, _, port = self.endpoint.rpartition(":")
        _, member = await self.loop.create_connection(lambda: Member(self, hello), address, int(port))
        await member.welcomed
        self.members[incarnation] = member
        return member

    async def join_one(self) -> dict[str, Any]:
        """One joins more: seconds until everybody knows."""
        epoch = max(member.epoch for member in self.members.values())
        began = time.monotonic()
        await self._join("rollout")
        return {"seconds": await self._settled(epoch) - began}

    async def leave_one(self) -> dict[str, Any]:
        """One leaves: seconds until everybody knows."""
        leaver = next(reversed(self.members.values()))
        epoch = max(member.epoch for member in self.members.values())
        del self.members[leaver.hello.incarnation]
        began = time.monotonic()
        leaver.leave()
        return {"seconds": await self._settled(epoch) - began}

    async def publish(self) -> dict[str, Any]:
        """One version: seconds to the commit at the last member, and until all targets,
        who wait for it, have loaded it."""
        source = self.source
        assert source is not None
        said, heard = self.said.copy(), self.heard.copy()
        self.verdicts.clear()
        self.published += 1
        number, part = self.published, self._manifest
        began = time.monotonic()
        source.say(wire.PublishBegin(number, None, 100.0))
        source.say(wire.Packed(number, part.hash, "cpu", 0.0, 0.0, DIGEST, self.place))
        version = source.committed + 1
        committed = await self.until(
            lambda: all(member.committed >= version for member in self.members.values()), "the commit at everybody"
        )
        source.say(wire.WatchLoaded(number, version))
        loaded = await self.until(lambda: self.watched >= version, "everybody has loaded it")
        await self.until(lambda: bool(self.verdicts), "the verdict")
        receipt = self.verdicts[0].receipt
        if receipt is None or receipt.lost or len(receipt.members) < len(self.members) - 1:
            raise RuntimeError(f"not a clean commit: {self.verdicts[0]}")
        return {
            "commit_s": committed - began,
            "loaded_s": loaded - began,
            "said": dict(self.said - said),
            "heard": dict(self.heard - heard),
        }

    async def close(self) -> dict[str, Any]:
        for member in list(self.members.values()):
            member.leave()
        self.members.clear()
        return {}


def handlers(driver: Driver) -> dict[str, Handler]:
    """Commands for :mod:`bench.rank`."""
    del driver
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    crowds: list[Crowd] = []

    def run(coroutine: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def made(endpoint: str, token: str) -> dict[str, Any]:
        crowds.append(Crowd(loop, endpoint, token))
        return {}

    return {
        "start": lambda endpoint, token: run(made(endpoint, token)),
        "grow": lambda size: run(crowds[-1].grow(size)),
        "join": lambda: run(crowds[-1].join_one()),
        "leave": lambda: run(crowds[-1].leave_one()),
        "publish": lambda: run(crowds[-1].publish()),
        "close": lambda: run(crowds[-1].close()),
    }

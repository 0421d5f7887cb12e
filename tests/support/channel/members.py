"""A member by hand: the raw protocol of a session, one message at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from replicas import messages as wire
from replicas.coordinator import Coordinator
from replicas.messages.identity import ProcessIdentity

__all__ = ["ELSEWHERE", "Client"]

ELSEWHERE = ProcessIdentity(1, 1, "another machine", 1)
"""A process that cannot be watched from here."""


class Client:
    """A member by hand: one message at a time."""

    def __init__(self, coordinator: Coordinator, **hello: Any) -> None:
        fields: dict[str, Any] = {
            "protocol": wire.PROTOCOL,
            "run": "embedded",
            "channel": "policy",
            "group": "rollout",
            "replica": 0,
            "rank": 0,
            "world_size": 1,
            "incarnation": "one",
            "generation": 1,
            "process": ELSEWHERE,
            **hello,
        }
        self.hello = wire.Hello(**fields)
        self._coordinator = coordinator
        self._socket: ClientConnection | None = None
        self.sent = 0
        self.received = 0

    @staticmethod
    def hello_of(group: str) -> wire.Hello:
        """A Hello of its first rank."""
        return wire.Hello(wire.PROTOCOL, "embedded", "policy", group, 0, 0, 1, "one", 1, ELSEWHERE)

    @staticmethod
    def process(pid: int) -> ProcessIdentity:
        """A process of another machine with this pid."""
        return ProcessIdentity(pid, 1, "another machine", 1)

    @property
    def socket(self) -> ClientConnection:
        assert self._socket is not None
        return self._socket

    async def open(self, *, token: str | None = None) -> None:
        bearer = self._coordinator.token if token is None else token
        self._socket = await connect(
            f"ws://{self._coordinator.endpoint}/session",
            additional_headers={"Authorization": f"Bearer {bearer}"},
            compression=None,
            ping_interval=None,
            open_timeout=5,
        )

    async def join(self) -> wire.FromCoordinator:
        await self.open()
        await self.socket.send(wire.encode(wire.MemberFrame(0, 0, self.hello)))
        return await self.next()

    async def next(self) -> wire.FromCoordinator:
        async with asyncio.timeout(5):
            data = await self.socket.recv()
        assert isinstance(data, bytes)
        frame = wire.decode_server_frame(data)
        self.received = max(self.received, frame.seq)
        return frame.body

    async def until(self, kind: type[Any]) -> Any:
        while not isinstance(body := await self.next(), kind):
            pass
        return body

    async def say(self, body: wire.FromMember, *, seq: int | None = None) -> None:
        if seq is None:
            self.sent += 1
            seq = self.sent
        await self.socket.send(wire.encode(wire.MemberFrame(seq, self.received, body)))

"""A WebSocket of the control port on a transport that keeps what is written: what it
reads, when it pauses, and how it ends.

Covers: coordinator/websocket.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from unittest import mock

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from replicas.control.access import RefusedToken
from replicas.coordinator import websocket as module
from replicas.coordinator.websocket import FRAGMENTS, MESSAGES_WAITING, Ended, WebSocket
from replicas.messages.bounds import FRAME_NBYTES

pytestmark = pytest.mark.anyio


class Below(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.ended = ""
        self.changed = asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        self.changed.set()

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"
        self.changed.set()


class World:
    """Both ends of a connection. ``refusal``: of the request."""

    def __init__(self, refusal: tuple[int, str] | None = None) -> None:
        self.below, self.left = Below(), mock.Mock()
        self.socket = WebSocket(self.below, self.left)
        self.malformed = self.socket.on_malformed = mock.Mock()
        self.client = ClientProtocol(parse_uri("ws://localhost/session"))
        request = self.client.connect()
        request.headers["X-Twice"] = "first"
        request.headers["X-Twice"] = "second"
        self.client.send_request(request)
        (head,) = self.client.data_to_send()
        self.headers: Mapping[str, str] = {}

        def judge(headers: Mapping[str, str]) -> tuple[int, str] | None:
            self.headers = headers
            return refusal

        self.opened = self.socket.open(head, judge)
        self.heard()

    def heard(self) -> list[object]:
        """What the client makes of what was written since the last call."""
        data, self.below.written = self.below.written, b""
        self.client.receive_data(data)
        return list(self.client.events_received())

    def is_read(self) -> bool:
        return self.below.reading

    def say(self, *messages: bytes) -> None:
        for message in messages:
            self.client.send_binary(message)
        self.send()

    def send(self) -> None:
        self.socket.feed_bytes(b"".join(self.client.data_to_send()))


async def test_messages_in_both_directions() -> None:
    world = World()
    assert world.opened
    assert world.headers["x-twice"] == "first"
    world.say(b"one", b"two")
    assert [await world.socket.receive() for _ in range(2)] == [b"one", b"two"]
    world.socket.write([b"three", b"four"])
    assert [frame.data for frame in world.heard() if isinstance(frame, Frame)] == [b"three", b"four"]
    world.client.send_close(1000)
    world.send()
    with pytest.raises(Ended):
        await world.socket.receive()
    assert world.below.ended == "closed"
    world.socket.write([b"nobody hears it"])
    world.socket.connection_lost(None)
    world.left.assert_called_once_with()


async def test_a_request_that_is_refused() -> None:
    world = World((401, RefusedToken("wrong token")))  # msgspec encodes no subclass of str by itself
    assert not world.opened
    assert world.below.ended == "closed"
    assert world.client.handshake_exc is not None
    response = world.client.handshake_exc.response  # type: ignore[attr-defined]  # of InvalidStatus
    assert (response.status_code, response.body) == (401, b'{"error":"wrong token"}')


async def test_a_socket_is_not_read_while_its_messages_wait() -> None:
    world = World()
    world.say(*[b"x"] * MESSAGES_WAITING)
    assert world.is_read()
    world.say(b"x")
    assert not world.is_read()
    for _ in range(MESSAGES_WAITING):
        await world.socket.receive()
    assert not world.is_read()
    await world.socket.receive()
    assert world.is_read()


async def test_a_socket_in_debt_is_not_read() -> None:
    world = World()
    with mock.patch.object(world.socket.pace, "charge", return_value=0.01):
        world.say(b"x")
    assert not world.is_read()
    async with asyncio.timeout(10):
        await world.below.changed.wait()
    assert world.is_read()


async def test_a_pong_is_for_a_peer_that_reads() -> None:
    world = World()
    for writable in (False, True):
        (world.socket.resume_writing if writable else world.socket.pause_writing)()
        world.client.send_ping(b"are you there")
        world.send()
        assert bool(world.below.written) is writable
    assert world.socket.takes_more()


async def test_text_is_no_message() -> None:
    world = World()
    world.client.send_text(b"text")
    world.send()
    assert await world.socket.receive() == b"\xc1"


async def test_a_message_in_fragments_and_one_in_too_many() -> None:
    world = World()
    world.client.send_binary(b"a", fin=False)
    world.client.send_continuation(b"b", fin=True)
    world.send()
    assert await world.socket.receive() == b"ab"
    world.client.send_binary(b"a", fin=False)
    for _ in range(FRAGMENTS):
        world.client.writes.append(Frame(Opcode.CONT, b"", fin=False).serialize(mask=True))
    world.send()
    world.malformed.assert_called_once_with()
    assert world.below.ended == "aborted"


async def test_a_frame_that_is_too_big_ends_it() -> None:
    world = World()
    world.client.send_binary(bytes(FRAME_NBYTES + 1))
    world.socket.feed_bytes(world.client.data_to_send()[0][:100])
    with pytest.raises(Ended) as caught:
        await world.socket.receive()
    assert caught.value.too_big
    assert world.below.ended == "closed"


async def test_a_peer_that_does_not_answer_the_close_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.01)
    world = World()
    world.socket.close(1008, "é" * 100)
    (frame,) = world.heard()
    assert isinstance(frame, Frame)
    assert bytes(frame.data).decode(errors="ignore").endswith("é" * 60)
    async with asyncio.timeout(10):
        await world.below.changed.wait()
    assert world.below.ended == "aborted"

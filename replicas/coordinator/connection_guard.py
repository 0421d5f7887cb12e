"""Limit what each connection of the control port may cost, from its first request on.

Connections arrive through the door (:mod:`replicas.coordinator.door`). uvicorn has no
limits for what follows, and handles one connection for as long as it has data. The
protocols here are uvicorn's own with these limits added:

* A *stranger* is a connection that has not shown the run's token. It gets one answer
  and is closed. The loop time of its request is charged to one account that all
  strangers share. At most :data:`STRANGERS` of them are served at a time (event streams
  included); one more closes the oldest of the source that has most. A stranger that
  does not read its answer is aborted.
* Little is read from a session at a time, so that all sessions get a turn. Parsing is
  charged to the connection's account, because pings and fragments never become messages
  that could be charged. (The Hello has its own deadline in the server.)
* A pong is written only to a peer that reads; a message may not come in thousands of
  fragments; a text frame is malformed.
* A closing connection is aborted when its peer does not read the remaining data.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.protocol import State

from replicas.common.logs import Log
from replicas.coordinator.limits import Crowd, RateLimit

CLOSE_TIMEOUT_S = 1.0
"""Time for the peer of a closing connection to read the remaining data."""
STALL_TIMEOUT_S = 5.0
"""Time for the reader of a page to read one buffer of it."""
STRANGERS = 128
"""Connections of strangers that are being served."""
READ_NBYTES = 4096
"""Read from one connection per turn: some 160 of the smallest messages, 3 ms."""
MESSAGES_WAITING = 32
"""Unhandled messages of a connection beyond which it is not read."""
FRAGMENTS = 1024
"""Maximum fragments of one message (this library sends each message whole)."""
_KEY = "replicas.connection"
_NO_MESSAGE = b"\xc1"
"""A byte that MessagePack never uses; it replaces the content of a text frame."""
_RTT = struct.Struct("<68xI")
"""``tcpi_rtt`` of Linux's ``struct tcp_info``, in microseconds."""
_quiet = Log("replicas.coordinator.http")
_quiet.setLevel(logging.CRITICAL)  # bad requests of strangers are counted, not logged


class Guard:
    """The strangers among the open connections of one port."""

    def __init__(self, refused: Callable[[str], None]) -> None:
        self.refused = refused
        self._strangers: Crowd[asyncio.Transport] = Crowd()

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    def arrived(self, transport: asyncio.Transport, source: bytes) -> None:
        if len(self._strangers) >= STRANGERS:
            self.refused("too_many")
            self._strangers.pop_excess().abort()
        self._strangers.add(transport, source)

    def is_stranger(self, transport: asyncio.Transport) -> bool:
        return transport in self._strangers

    def left(self, transport: asyncio.Transport) -> None:
        """Its connection shows the token, or has ended."""
        self._strangers.discard(transport)


class Charged(Generator[Any, Any, None]):
    """An awaitable that calls ``pay(seconds)`` after each step on the event loop."""

    def __init__(self, work: Awaitable[None], pay: Callable[[float], None]) -> None:
        self._steps = work.__await__()
        self._pay = pay

    def __await__(self) -> Generator[Any, Any, None]:
        return self

    def send(self, value: Any) -> Any:
        return self._paid(lambda: self._steps.send(value))

    def throw(self, *error: Any) -> Any:
        return self._paid(lambda: self._steps.throw(*error))

    def _paid(self, step: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return step()
        finally:
            self._pay(time.perf_counter() - began)


class GuardConfig(uvicorn.Config):
    """uvicorn's config, with the guard of its connections."""

    def __init__(self, app: Any, guard: Guard, **options: Any) -> None:
        super().__init__(app, ws=SessionProtocol, **options)
        self.guard = guard


class HttpProtocol(H11Protocol):
    """HTTP, until a request asks for the WebSocket."""

    source: bytes | None = None
    """Source of a stranger; None: not a stranger."""

    def __init__(self, config: GuardConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.guard = config.guard
        self.app_state = {**self.app_state, _KEY: self}  # becomes "state" in the scope of each request
        self.logger = _quiet
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if self.source is not None:
            self.guard.arrived(transport, self.source)

    def connection_lost(self, exc: Exception | None) -> None:
        self._goes_on()
        self.app_state.pop(_KEY, None)
        self.guard.left(self.transport)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._goes_on()
        self.app_state.pop(_KEY, None)
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        self.guard.refused("malformed")
        super().send_400_response(msg)

    # ----------------------------------------------------- peers that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._goes_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait()

    def _wait(self) -> None:
        if self._stalled is None:
            self._stalled = self.loop.call_later(STALL_TIMEOUT_S, self._cut)

    def _goes_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _cut(self) -> None:
        self._stalled = None
        self.guard.refused("timeout")
        self.transport.abort()


class SessionProtocol(WebSocketsSansIOProtocol):
    """The WebSocket of a session."""

    def __init__(self, config: GuardConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.guard = config.guard
        self.app_state = {**self.app_state, _KEY: self}
        self.logger = self.conn.logger = _quiet
        self.close_timeout = CLOSE_TIMEOUT_S
        self.pace = RateLimit(self.loop.time())
        """Account that pays for parsing its bytes and handling its messages."""
        self._resting: asyncio.TimerHandle | None = None
        self.on_writable: Callable[[], None] = lambda: None
        self.on_bytes: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if hasattr(self.transport, "max_size"):  # of asyncio's own loop: 256 KiB, ten thousand messages at once
            self.transport.max_size = READ_NBYTES

    def connection_lost(self, exc: Exception | None) -> None:
        if self._resting is not None:
            self._resting.cancel()
        self.app_state.pop(_KEY, None)
        self.guard.left(self.transport)
        super().connection_lost(exc)

    # ------------------------------------------------------------ incoming

    def data_received(self, data: bytes) -> None:
        began = time.perf_counter()
        super().data_received(data)
        if self.queue.empty():
            self.on_bytes()
        rest_s = self.pace.charge(time.perf_counter() - began, self.loop.time())
        if rest_s and not self.transport.is_closing():
            self.transport.pause_reading()
            if self._resting is None:
                self._resting = self.loop.call_later(rest_s, self._rested)

    def _rested(self) -> None:
        self._resting = None
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """As in uvicorn, but do not resume reading while the rate limit pauses it."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self._resting is None and not self.transport.is_closing():
                self.transport.resume_reading()
        return message

    def send_receive_event_to_app(self) -> None:
        """As in uvicorn, but pause reading only when MESSAGES_WAITING are unhandled."""
        paused, self.read_paused = self.read_paused, True
        super().send_receive_event_to_app()
        self.read_paused = paused
        if not paused and self.queue.qsize() > MESSAGES_WAITING:
            self.read_paused = True
            self.transport.pause_reading()

    def handle_cont(self, event: Frame) -> None:
        super().handle_cont(event)
        if len(self.frames) > FRAGMENTS:
            self.guard.refused("malformed")
            self.transport.abort()

    def handle_text(self, event: Frame) -> None:
        super().handle_bytes(Frame(event.opcode, _NO_MESSAGE, event.fin))

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # discards the pong: the peer does not read

    def cut(self) -> None:
        """End the connection at once; its member may come back."""
        self.transport.abort()

    # ------------------------------------------------------------ outgoing

    def takes_more(self) -> bool:
        return self.writable.is_set()

    @property
    def unread_nbytes(self) -> int:
        """What was written and has not left this process."""
        return self.transport.get_write_buffer_size()

    def rtt_s(self) -> float:
        """The kernel's smoothed round-trip time in seconds; 0: unknown."""
        sock = self.transport.get_extra_info("socket")
        try:
            return float(_RTT.unpack_from(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.size))[0]) / 1e6
        except (OSError, struct.error):  # the socket is closed
            return 0.0

    def resume_writing(self) -> None:
        super().resume_writing()
        self.on_writable()

    def write(self, messages: Sequence[bytes]) -> None:
        if self.close_sent or self.transport.is_closing() or self.conn.state is not State.OPEN:
            return
        for message in messages:
            self.conn.send_binary(message)
        self.transport.write(b"".join(self.conn.data_to_send()))

    # ------------------------------------------------------------ the end

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            if not self.disconnected:
                self.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)


def _connection(scope: Any) -> HttpProtocol | SessionProtocol | None:
    """The connection of a request or WebSocket; None: of another server."""
    found: HttpProtocol | SessionProtocol | None = scope.get("state", {}).get(_KEY)
    return found


def welcome(scope: Any) -> None:
    """The sender is authorized: not a stranger any more. Other servers are ignored."""
    if (connection := _connection(scope)) is not None:
        connection.guard.left(connection.transport)


def is_stranger(scope: Any) -> bool:
    """Whether the request or WebSocket of this scope belongs to a known stranger."""
    connection = _connection(scope)
    return connection is not None and connection.guard.is_stranger(connection.transport)


def session_of(scope: Any) -> SessionProtocol:
    """The connection behind a WebSocket of this server."""
    return cast("SessionProtocol", _connection(scope))

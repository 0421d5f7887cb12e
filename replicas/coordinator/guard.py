"""The guard at the control port: bounds on connections before anybody knows who is at their other end.

Theory of operation
===================

uvicorn has no limit on connections that never send a request, or one byte of it at a time, and gives one connection the
loop for as long as it has data. The protocols here are uvicorn's own with these holes closed:

* A *stranger* is a connection of which we do not know that it may be here: no Hello of it has been accepted, and no request
  of it has shown the run's token (a page that is being served counts, too). There may be
  :data:`~replicas.coordinator.limits.STRANGERS` of them; one more closes the oldest, which a member, who says who he is
  within milliseconds, never is.
* A request must be complete in some seconds. (The Hello behind it has its own deadline in the server.)
* Little is read at a time, so that everybody has a turn, and parsing is paid from the connection's account
  (:class:`~replicas.coordinator.limits.Pace`): pings and fragments never get as far as being messages.
* A pong is only written to a peer that reads; a message may not come in thousands of fragments; text is no message.
* A connection that is being closed is cut when its peer does not read what is left.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.protocol import State

from replicas.coordinator.limits import (
    CLOSE_TIMEOUT_S,
    FRAGMENTS,
    MESSAGES_WAITING,
    READ_NBYTES,
    REQUEST_TIMEOUT_S,
    STRANGERS,
    Pace,
)

__all__ = ["Config", "Guard", "HttpProtocol", "SessionProtocol", "connection_of", "welcome"]

_SCOPE_KEY = "replicas.connection"
_NO_MESSAGE = b"\xc1"
"""A byte that MessagePack never uses: what a text frame becomes."""
_RTT = struct.Struct("<68xI")
"""``tcpi_rtt`` of Linux's ``struct tcp_info``, in microseconds."""
_quiet = logging.getLogger("replicas.coordinator.http")
_quiet.setLevel(logging.CRITICAL)  # whatever strangers send is counted, not written down


class Guard:
    """Counts strangers. ``refused(reason)`` is called for each connection that is turned away."""

    def __init__(self, refused: Callable[[str], None]) -> None:
        self.refused = refused
        self._strangers: dict[asyncio.Transport, None] = {}
        self._members: set[asyncio.Transport] = set()

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    def arrived(self, transport: asyncio.Transport) -> None:
        if len(self._strangers) >= STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self.refused("too_many")
            oldest.abort()
        self._strangers[transport] = None

    def accepted(self, transport: asyncio.Transport) -> None:
        if transport in self._strangers:
            del self._strangers[transport]
            self._members.add(transport)

    def left(self, transport: asyncio.Transport) -> None:
        self._strangers.pop(transport, None)
        self._members.discard(transport)

    def cut_all(self) -> None:
        """End what is left, whether it is read or not."""
        for transport in (*self._strangers, *self._members):
            transport.abort()


class Config(uvicorn.Config):
    """uvicorn's, with the guard. ``http``: what reads requests, :class:`HttpProtocol` or a subclass."""

    def __init__(self, app: Any, guard: Guard, **options: Any) -> None:
        super().__init__(app, **{"http": HttpProtocol, "ws": SessionProtocol, **options})
        self.guard = guard


def _read_little(transport: asyncio.Transport) -> None:
    """asyncio reads up to 256 KiB at once, which is ten thousand messages. Other loops than its own have no such knob."""
    if hasattr(transport, "max_size"):
        transport.max_size = READ_NBYTES


class HttpProtocol(H11Protocol):
    """HTTP, until a request asks for the WebSocket."""

    def __init__(self, config: Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.guard = config.guard
        self.app_state = {**self.app_state, _SCOPE_KEY: self}  # each request finds it as its scope's "state"
        self.logger = _quiet
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.guard.arrived(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.app_state.pop(_SCOPE_KEY, None)
        self.guard.left(self.transport)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self.transport.get_protocol() is self and not self.transport.is_closing():
            self._await_request()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_waiting()
        self.app_state.pop(_SCOPE_KEY, None)
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        self.guard.refused("malformed")
        super().send_400_response(msg)

    def accepted(self) -> None:
        """Whoever sends its requests may: no stranger any more."""
        self.guard.accepted(self.transport)

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self.guard.refused("timeout")
        self.transport.abort()


class SessionProtocol(WebSocketsSansIOProtocol):
    """The WebSocket of a session."""

    def __init__(self, config: Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.guard = config.guard
        self.logger = self.conn.logger = _quiet
        self.close_timeout = CLOSE_TIMEOUT_S
        self.pace = Pace(self.loop.time())
        """The connection's account: parsing its bytes is paid from it, and handling its messages."""
        self._resting: asyncio.TimerHandle | None = None
        self.on_writable: Callable[[], None] = _nothing
        self.on_bytes: Callable[[], None] = _nothing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _read_little(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._resting is not None:
            self._resting.cancel()
        self.guard.left(self.transport)
        super().connection_lost(exc)

    def accepted(self) -> None:
        """Its Hello is: no stranger any more."""
        self.guard.accepted(self.transport)

    # ------------------------------------------------------------ what comes in

    def data_received(self, data: bytes) -> None:
        began = time.perf_counter()
        super().data_received(data)
        if self.queue.empty():
            self.on_bytes()
        rest_s = self.pace.charge(time.perf_counter() - began, self.loop.time())
        if rest_s and not self.transport.is_closing():
            self._rest(rest_s)

    def _rest(self, seconds: float) -> None:
        self.transport.pause_reading()
        if self._resting is None:
            self._resting = self.loop.call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._resting = None
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """As in uvicorn, but reading does not go on in a rest."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self._resting is None and not self.transport.is_closing():
                self.transport.resume_reading()
        return message

    def send_receive_event_to_app(self) -> None:
        """As in uvicorn, but a message that is handled at once is no reason to stop reading and to begin again."""
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
            self.conn.data_to_send()  # the pong: its reader does not read

    # ------------------------------------------------------------ what goes out

    def takes_more(self) -> bool:
        """Whether its buffer is not full."""
        return self.writable.is_set()

    def rtt_s(self) -> float:
        """How long a round trip takes lately, in seconds, by the kernel's count; 0: not known."""
        sock = self.transport.get_extra_info("socket")
        try:
            return float(_RTT.unpack_from(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.size))[0]) / 1e6
        except (OSError, struct.error):  # it is closed
            return 0.0

    def resume_writing(self) -> None:
        super().resume_writing()
        self.on_writable()

    def write(self, messages: Sequence[bytes]) -> None:
        """Send them, in one go; nothing happens when the connection is closing."""
        if self.close_sent or self.transport.is_closing() or self.conn.state is not State.OPEN:
            return
        for message in messages:
            self.conn.send_binary(message)
        self.transport.write(b"".join(self.conn.data_to_send()))

    # ------------------------------------------------------------ the end

    async def run_asgi(self) -> None:
        cast("dict[str, Any]", self.scope)[_SCOPE_KEY] = self
        try:
            await super().run_asgi()
        finally:
            if not self.disconnected:
                self.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)


def _nothing() -> None:
    """Nobody waits for it."""


def welcome(scope: Any) -> None:
    """The request with this scope has shown that it may be here. What comes over another transport is left alone."""
    connection = scope.get("state", {}).get(_SCOPE_KEY)
    if isinstance(connection, HttpProtocol):
        connection.accepted()


def connection_of(scope: Any) -> SessionProtocol:
    """The connection behind a WebSocket of this server."""
    return cast("SessionProtocol", scope[_SCOPE_KEY])

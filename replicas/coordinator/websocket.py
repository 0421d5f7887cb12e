"""The WebSocket of a session or an agent, with limits on the cost of its peer.

Frames are parsed by the Sans-I/O protocol of websockets. Around it:

* Each read is small, so that all connections get a turn. Parsing is charged to the
  connection's account, because pings and fragments are not charged as messages. A
  connection in debt, or with many unhandled messages, is not read.
* A pong is written only to a peer that reads; a message may not come in thousands of
  fragments; a text frame is malformed.
* A closing connection is aborted if its peer does not read the remaining data.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from starlette.routing import BaseRoute
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from replicas.common.logs import Log
from replicas.coordinator.limits import RateLimit
from replicas.linux.sockets import round_trip_s
from replicas.messages.bounds import FRAME_NBYTES

CLOSE_TIMEOUT_S = 1.0
"""Time for the peer of a closing connection to read the remaining data."""
READ_NBYTES = 4096
"""Read from one connection per turn: about 160 of the smallest messages, 3 ms."""
MESSAGES_WAITING = 32
"""Maximum unhandled messages of a connection that is still read."""
FRAGMENTS = 1024
"""Maximum fragments of one message (this library sends each message whole)."""
TOO_BIG = 1009
_REASON_NBYTES = 120
_DATA = (Opcode.BINARY, Opcode.TEXT, Opcode.CONT)
_NO_MESSAGE = b"\xc1"
"""A byte that MessagePack never uses; it replaces the content of a text frame."""
quiet = Log("replicas.coordinator.http")
quiet.setLevel(logging.CRITICAL)  # bad requests of strangers are counted, not logged


class Ended(Exception):
    """The connection has ended, and all its messages were received.

    :ivar too_big: its last frame was larger than :data:`FRAME_NBYTES`.
    """

    def __init__(self, *, too_big: bool = False) -> None:
        """Make the exception; ``too_big`` if a frame larger than allowed ended it."""
        super().__init__("the connection has ended")
        self.too_big = too_big


class SocketRoute(BaseRoute):
    """A path of the control port at which WebSockets are served."""

    def __init__(
        self,
        path: str,
        refusal: Callable[[Mapping[str, str]], tuple[int, str] | None],
        serve: Callable[[WebSocket], Awaitable[None]],
    ) -> None:
        """Keep the path and both functions.

        :param refusal: given a request's headers (names in lower case), returns None to
            upgrade it, or status and text to refuse it.
        :param serve: serves one connection, which is closed when this returns.
        """
        self.path, self.refusal, self.serve = path, refusal, serve


class _Inbox:
    """Messages and fragments that a connection has received, not yet handled.

    :ivar full: stop reading from the connection. :ivar ended: it has ended.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._fragments: list[bytes] = []
        self._messages: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.full = self.ended = False

    def __len__(self) -> int:
        return len(self._messages)

    def keep(self, frame: Frame) -> bool:
        """Add a data frame; the last frame of a message completes it for :meth:`next`.

        Return False if the message has more than :data:`FRAGMENTS` frames: the caller
        must cut the connection.
        """
        self._fragments.append(_NO_MESSAGE if frame.opcode is Opcode.TEXT else bytes(frame.data))
        if frame.fin:
            self._messages.append(b"".join(self._fragments))
            self._fragments.clear()
            self._news.set()
            self.full = self.full or len(self._messages) > MESSAGES_WAITING
        return len(self._fragments) <= FRAGMENTS

    def end(self) -> None:
        """Note that the connection has ended: no more frames come."""
        self.ended = True
        self._news.set()

    async def next(self) -> bytes | None:
        """Remove the next whole message and return it; wait until there is one.

        Return None if the connection has ended and all messages were returned.
        """
        while not self._messages:
            if self.ended:
                return None
            self._news.clear()
            await self._news.wait()
        message = self._messages.popleft()
        self.full = self.full and bool(self._messages)  # resume reading when all are handled
        return message


class WebSocket(asyncio.BufferedProtocol):
    """The asyncio protocol of one WebSocket connection, from its upgrade request on.

    :ivar headers: of its request, with names in lower case.
    """

    headers: Mapping[str, str]

    def __init__(self, transport: asyncio.Transport, left: Callable[[], None]) -> None:
        """Take over an open transport; the upgrade request comes to :meth:`open`.

        :param left: called once on the loop when the connection has ended.
        """
        self._transport = transport
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._conn = ServerProtocol(max_size=FRAME_NBYTES, logger=quiet)
        self._buffer = memoryview(bytearray(READ_NBYTES))  # asyncio reads several TLS records into slices of it
        self._inbox = _Inbox()
        self._paused = False
        self._writable = True
        self._resting: asyncio.TimerHandle | None = None
        self.pace = RateLimit(self._loop.time())
        """Account of loop time for parsing its bytes and handling its messages."""
        self.on_writable: Callable[[], None] = lambda: None
        self.on_bytes: Callable[[], None] = lambda: None
        self.on_malformed: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ the request

    def open(self, head: bytes, judge: Callable[[Mapping[str, str]], tuple[int, str] | None]) -> bool:
        """Answer the HTTP request that asks for a WebSocket; return True if it is open.

        Return False if it is refused or malformed; the connection then closes.

        :param head: bytes of the request head.
        :param judge: given the headers, returns ``(status, text)`` to refuse, or None.
        """
        self._conn.receive_data(head)
        request = next(iter(self._conn.events_received()), None)
        if isinstance(request, Request):
            named = reversed([*request.headers.raw_items()])  # the first of several with one name counts
            self.headers = {name.lower(): value for name, value in named}
            if refusal := judge(self.headers):
                answer = self._conn.reject(
                    refusal[0], msgspec.json.encode({"error": refusal[1]}, enc_hook=str).decode()
                )
                del answer.headers["Content-Type"]  # assignment would add a second one
                answer.headers["Content-Type"] = "application/json"
            else:
                answer = self._conn.accept(request)
            self._conn.send_response(answer)
        self._write_out()
        return self._conn.state is State.OPEN

    def peer(self) -> str:
        """Return the IP address of the peer, or "" on a Unix socket."""
        return _host(self._transport.get_extra_info("peername"))

    def here(self) -> str:
        """Return the IP address of this side, or "" on a Unix socket."""
        return _host(self._transport.get_extra_info("sockname"))

    # ------------------------------------------------------------ incoming

    def get_buffer(self, _: int) -> memoryview:
        """Return the buffer into which asyncio reads next."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse ``nbytes`` bytes that asyncio has read into the buffer."""
        self.feed_bytes(bytes(self._buffer[:nbytes]))

    def feed_bytes(self, data: bytes) -> None:
        """Parse received bytes: queue whole messages for :meth:`receive`, answer pings.

        The time is charged to :attr:`pace`, the connection's account of loop time,
        which may pause reading. Too many fragments abort the connection.
        """
        began = time.perf_counter()
        self._conn.receive_data(data)
        for frame in self._conn.events_received():
            if isinstance(frame, Frame) and frame.opcode in _DATA and not self._inbox.keep(frame):
                self.on_malformed()
                self.cut()
        if self._conn.state is not State.OPEN:
            self._inbox.end()
        if self._writable or self._inbox.ended:
            self._write_out()
        else:
            self._conn.data_to_send()  # discards pongs: the peer does not read
        if not self._inbox:  # a whole message is reported when it is handled
            self.on_bytes()
        rest_s = self.pace.charge(time.perf_counter() - began, self._loop.time())
        if rest_s and self._resting is None:
            self._resting = self._loop.call_later(rest_s, self._rested)
        self._regulate()

    def _rested(self) -> None:
        """Resume reading, as the connection has paused long enough; a timer calls it.

        It was paused because handling its bytes took more than its share of loop time.
        """
        self._resting = None
        self._regulate()

    def _regulate(self) -> None:
        """Pause or resume reading from the transport.

        Reading pauses while many messages are unhandled, or the connection has used
        more than its share of loop time.
        """
        paused = self._inbox.full or self._resting is not None
        if paused is not self._paused and not self._transport.is_closing():
            self._paused = paused
            (self._transport.pause_reading if paused else self._transport.resume_reading)()

    async def receive(self) -> bytes:
        """Wait for the next message of the peer, and return its bytes.

        :raises Ended: the connection has ended, and all its messages were returned.
        """
        message = await self._inbox.next()
        if message is None:
            raise Ended(too_big=self._conn.close_sent is not None and self._conn.close_sent.code == TOO_BIG)
        self._regulate()
        return message

    def eof_received(self) -> None:
        """Note that the peer sends no more; asyncio then closes the transport."""
        self._inbox.end()

    def connection_lost(self, _: Exception | None) -> None:
        """End :meth:`receive` after the last message; call the function ``left``."""
        if self._resting is not None:
            self._resting.cancel()
        self._inbox.end()
        self._left()

    # ------------------------------------------------------------ outgoing

    def takes_more(self) -> bool:
        """Return True if the write buffer has room."""
        return self._writable

    @property
    def unread_nbytes(self) -> int:
        """Bytes that were written and are still in the transport's buffer."""
        return self._transport.get_write_buffer_size()

    def rtt_s(self) -> float:
        """Return the kernel's smoothed round-trip time in seconds, or 0 if unknown."""
        return round_trip_s(self._transport.get_extra_info("socket"))

    def pause_writing(self) -> None:
        """Note that the write buffer is full; the transport calls it."""
        self._writable = False

    def resume_writing(self) -> None:
        """Note that the write buffer has room, and call :attr:`on_writable`.

        The transport calls it.
        """
        self._writable = True
        self.on_writable()

    def write(self, messages: Sequence[bytes]) -> None:
        """Write each encoded message as a binary frame; do not wait.

        The transport buffers what its peer does not read. Do nothing on a closing
        connection.
        """
        if self._conn.state is State.OPEN and not self._transport.is_closing():
            for message in messages:
                self._conn.send_binary(message)
            self._write_out()

    def _write_out(self) -> None:
        """Write the bytes that the WebSocket protocol has ready to the transport.

        If they are the last ones, close the transport, and abort it after 1 s.
        """
        parts = self._conn.data_to_send()
        if not self._transport.is_closing():
            self._transport.write(b"".join(parts))
            if not all(parts):  # an empty part is the end
                self._transport.close()
                self._abort_later()

    # ------------------------------------------------------------ the end

    def close(self, code: int = 1000, text: str = "") -> None:
        """Start to close the connection; do not wait. After 1 s it is aborted.

        :param code: WebSocket close code. :param text: its reason, cut to 120 bytes.
        """
        if self._conn.state is State.OPEN:
            # the limit may cut a character
            self._conn.send_close(code, text.encode()[:_REASON_NBYTES].decode(errors="ignore"))
            self._write_out()
        self._abort_later()

    def _abort_later(self) -> None:
        """Abort the transport after ``CLOSE_TIMEOUT_S``."""
        self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def cut(self) -> None:
        """Abort the connection; its member's session may continue on another one."""
        self._transport.abort()


def _host(address: object) -> str:
    """Return the host of a socket's address, or "" for a Unix socket."""
    return str(address[0]) if isinstance(address, tuple) else ""

"""Read the request head of a connection; pass the rest to a WebSocket or the pages.

A *stranger* is a connection that has not shown the run's token. It must send a complete
request head by its deadline, gets one answer, and is closed. The loop time of its
request is charged to one account that all strangers share. A connection whose peer does
not read the answer is aborted. The token of a head only prevents these limits: the
handler of the request checks it again.

Pages are served by uvicorn's HTTP protocol on the same transport.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import unquote

from starlette.responses import JSONResponse

from replicas import errors
from replicas.coordinator.addresses import AllowedHosts
from replicas.coordinator.limits import STRANGERS_SHARE, Bounded, RateLimit
from replicas.coordinator.websocket import SocketRoute, WebSocket

REQUEST_TIMEOUT_S = 5.0
"""Time from connecting to the complete head; for a stranger also until its turn."""
STALL_TIMEOUT_S = 5.0
"""Time for the reader of a page to read one buffer of it."""
HEAD_NBYTES = 16 * 1024
"""Maximum size of a request head."""
STRANGERS = 128
"""Maximum connections of strangers that are served."""
UNPROVEN = 256
"""Maximum connections with TLS and no complete request head."""
REQUEST_S = 500e-6
"""Fixed cost of a stranger's request: transport, parsing, close."""
KEY = "replicas.visit"
_ENDS = (b"\r\n\r\n", b"\n\n", b"\n\r\n")  # bare line feeds too, as other servers accept them
_REQUEST = re.compile(rb"[A-Za-z]+ (\S+) HTTP/1\.[01]\r?(?:\n|$)")
_TLS_HANDSHAKE = 0x16  # the first byte of a TLS connection
_NAMES = ("host", "origin")
"""Headers that name this port."""


@functools.cache
def answer(status: str, text: str) -> bytes:
    """Return a whole HTTP response that closes the connection."""
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode() + body


def authorization_of(head: bytes) -> bytes:
    """Return the value of the Authorization header, or ``b""``."""
    for line in head.split(b"\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"authorization":
            return value.strip()
    return b""


def head_nbytes(data: bytes) -> int:
    """Return the length of the request head, or 0 while it is incomplete."""
    return min((at + len(end) for end in _ENDS if (at := data.find(end)) >= 0), default=0)


class PortRules:
    """The access rules of one port, and the strangers connected to it.

    :param refused: called with the reason for each connection that is refused.
    :param knows: returns True for an Authorization header with a valid token.
    :param hosts: the host names that a stranger's request may have.
    :param live: result of ``GET /livez``, or None without that page.
    """

    def __init__(
        self,
        refused: Callable[[str], None],
        knows: Callable[[bytes], bool],
        hosts: AllowedHosts,
        live: Callable[[], bool] | None = None,
    ) -> None:
        self.refused, self.knows, self.hosts = refused, knows, hosts
        self._live = live
        self.unproven: Bounded[PortConnection] = Bounded(UNPROVEN)
        self.strangers: Bounded[PortConnection] = Bounded(STRANGERS)
        self.pace = RateLimit(asyncio.get_running_loop().time(), STRANGERS_SHARE)
        """Account of the requests of all strangers."""

    def answer_at_once(self, head: bytes) -> bytes | None:
        """Return the answer to a probe, which must not wait, or None otherwise."""
        if self._live is None or not head.startswith(b"GET /livez HTTP/1."):
            return None
        status, text = "503 Service Unavailable", "the supervisor's event loop or store is stuck"
        try:
            if self._live():
                status, text = "200 OK", "ok"
        except errors.UsageError as error:  # the supervisor is still starting
            text = error.message
        return answer(status, text)

    def problem(self, names: Iterable[str]) -> tuple[int, str] | None:
        """Return status and text if these Host and Origin are refused, or None."""
        if problem := self.hosts.problem(names):
            self.refused("host")
            return 403, problem
        return None


class Port(Protocol):
    """The server to which a visit belongs."""

    rules: PortRules | None
    refused: Callable[[str], None]
    sockets: Mapping[str, SocketRoute]
    connections: set[PortConnection]

    def pages(self, visit: PortConnection) -> asyncio.Protocol:
        """Return a protocol that serves pages; its requests' scope has ``visit``."""

    def serve(self, route: SocketRoute, websocket: WebSocket) -> None:
        """Serve a WebSocket in its own task."""

    def turns_away(self, transport: asyncio.Transport) -> bytes:
        """Return the answer that refuses this connection, or ``b""`` if allowed."""


class PortConnection(asyncio.Protocol):
    """The protocol of one connection until it becomes a WebSocket or closes.

    :param source: its source, for limits. :param until: loop time by which its head
        must be complete. Both are unused at a port without rules.
    """

    transport: asyncio.Transport

    def __init__(self, port: Port, source: bytes = b"", until: float = 0.0) -> None:
        self._port = port
        self.rules = port.rules
        self._source = source
        self._until = until
        self._loop = asyncio.get_running_loop()
        self.began = time.perf_counter()
        """When its turn came. A stranger is charged for the time from then to its
        answer, including other work of the loop."""
        self.opening: asyncio.Task[None] | None = None
        """The task that creates the transport: slow if the peer's TLS is slow."""
        self._head = b""
        self._pages: asyncio.Protocol | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_stranger(self) -> bool:
        return self.rules is not None and self in self.rules.strangers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.opening = None
        self.is_secure = transport.get_extra_info("sslcontext") is not None
        self._port.connections.add(self)
        if self.rules is not None:
            self._wait(max(0.0, self._until - self._loop.time()))

    def count_in(self, crowd: Bounded[PortConnection]) -> None:
        """Add it to a set of limited size; close the connection that it displaces."""
        if (one := crowd.add(self, self._source)) is not None:
            self._port.refused("too_many")
            one.cut()

    def data_received(self, data: bytes) -> None:
        if self._pages is not None:
            self._pages.data_received(data)
        elif not self.transport.is_closing():
            self._head += data  # bytes after the answer are dropped
            self._judge()

    def _judge(self) -> None:
        """Check the part of the request that has arrived; answer a bad one."""
        data, nbytes = self._head, head_nbytes(self._head)
        if data[0] == _TLS_HANDSHAKE:
            self._turn_away("tls", "400 Bad Request", "this port does not speak TLS")
        elif not data[:1].isalpha() or (nbytes and not _REQUEST.match(data)):  # a method has only letters
            self._turn_away("malformed", "400 Bad Request", "this is not an HTTP request")
        elif nbytes > HEAD_NBYTES or (not nbytes and len(data) >= HEAD_NBYTES):
            text = f"the request head exceeds the limit of {HEAD_NBYTES} bytes"
            self._turn_away("oversized", "431 Request Header Fields Too Large", text)
        elif nbytes:
            self._heard(data[:nbytes])

    def _heard(self, head: bytes) -> None:
        self._goes_on()
        if said := self._port.turns_away(self.transport) or self._said_at_once(head):
            self._say(said)
            return
        data, self._head = self._head, b""
        found = _REQUEST.match(head)
        assert found is not None
        route = self._port.sockets.get(found[1].partition(b"?")[0].decode("latin-1"))
        if route is not None:
            self._upgrade(route, head, data[len(head) :])
            return
        self._pages = self._port.pages(self)
        self._pages.connection_made(self.transport)
        self._pages.data_received(data)

    def _said_at_once(self, head: bytes) -> bytes:
        """Return the answer to a probe or to a stranger over the limit, or ``b""``."""
        if (rules := self.rules) is None:
            return b""
        rules.unproven.discard(self)
        self.began = time.perf_counter() if self.is_secure else self.began
        if (probe := rules.answer_at_once(head)) is not None:
            return probe
        if not rules.knows(authorization_of(head)):
            if self.is_secure and rules.pace.charge(
                REQUEST_S, self._loop.time()
            ):  # without TLS the acceptor charges it
                rules.refused("too_many")
                return answer("503 Service Unavailable", "too many requests without a token")
            self.count_in(rules.strangers)
        return b""

    def _upgrade(self, route: SocketRoute, head: bytes, rest: bytes) -> None:
        websocket = WebSocket(self.transport, self.left)
        websocket.on_malformed = lambda: self._port.refused("malformed")

        def judge(headers: Mapping[str, str]) -> tuple[int, str] | None:
            problem = None
            if self.rules is not None and self.is_stranger:
                problem = self.rules.problem([headers[name] for name in _NAMES if name in headers])
            return problem or route.refusal(headers)

        self.transport.set_protocol(websocket)
        if websocket.open(head, judge):
            self._port.serve(route, websocket)
            if rest:  # a client need not wait for the answer
                websocket.feed_bytes(rest)

    # ------------------------------------------------------------ answers, and the end

    def _turn_away(self, reason: str, status: str, text: str) -> None:
        self._port.refused(reason)
        self._say(answer(status, text))

    def _say(self, data: bytes) -> None:
        self._goes_on()
        self.transport.write(data)
        self.transport.close()
        self._wait(STALL_TIMEOUT_S)

    def finish(self, kind: str) -> None:
        """End a response; abort later if the peer does not read the rest of it."""
        if kind == "websocket":  # a route of the caller, whose protocol has the transport now
            self.left()
        elif self.transport.is_closing() and self in self._port.connections:  # it may have left already
            self._wait(STALL_TIMEOUT_S)

    def cut(self) -> None:
        if self.opening is not None:
            self.opening.cancel()
        else:
            self.transport.abort()

    def _wait(self, seconds: float) -> None:
        if self._timer is None:  # keep the first limit
            self._timer = self._loop.call_later(seconds, self._late)

    def _goes_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._head or self._pages is not None:  # a browser's spare connection sends no request
            self._port.refused("timeout")
        self.cut()

    def pause_writing(self) -> None:
        self._wait(STALL_TIMEOUT_S)
        if self._pages is not None:
            self._pages.pause_writing()

    def resume_writing(self) -> None:
        self._goes_on()
        if self._pages is not None:
            self._pages.resume_writing()

    def eof_received(self) -> None:
        if self._pages is not None:
            self._pages.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._goes_on()
        if self._pages is not None:
            self._pages.connection_lost(exc)
        self.left()

    def left(self) -> None:
        """Remove the connection from the port's sets."""
        self._port.connections.discard(self)
        if self.rules is not None:
            self.rules.unproven.discard(self)
            self.rules.strangers.discard(self)


# ------------------------------------------------------------ around the pages


class Pages:
    """ASGI middleware: checks the host of strangers, and closes after one answer.

    A request target with scheme and host, as for proxies, is reduced to its path; its
    host replaces the header (RFC 9112, 3.2.2).
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        visit: PortConnection = scope["state"].pop(KEY)
        raw = scope["raw_path"]
        if raw.lower().startswith((b"http://", b"https://")):
            host, _, path = raw.partition(b"://")[2].partition(b"/")
            headers = [(b"host", host), *((name, value) for name, value in scope["headers"] if name != b"host")]
            path = b"/" + path
            scope = {**scope, "path": unquote(path.decode("latin-1")), "raw_path": path, "headers": headers}
        rules = visit.rules
        try:
            if rules is None or not visit.is_stranger:
                await self._app(scope, receive, send)
            else:
                await self._for_stranger(rules, visit.began, scope, receive, send)
        finally:
            visit.finish(scope["type"])

    async def _for_stranger(self, rules: PortRules, began: float, scope: Any, receive: Any, send: Any) -> None:
        names = [value.decode("latin-1") for name, value in scope["headers"] if name.decode("latin-1") in _NAMES]
        refusal = rules.problem(names)
        app = self._app if refusal is None else JSONResponse({"error": refusal[1]}, status_code=refusal[0])
        loop = asyncio.get_running_loop()

        async def send_once(message: Any) -> None:
            if message["type"] == "http.response.start":
                rules.pace.charge(time.perf_counter() - began, loop.time())
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, send_once)

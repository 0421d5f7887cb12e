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
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import unquote

from replicas import errors
from replicas.coordinator.addresses import AllowedHosts
from replicas.coordinator.limits import STRANGERS_SHARE, BoundedConnections, RateLimit
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
_REQUEST = re.compile(rb"[A-Za-z]+ (?=\S)(?:(?i:https?)://([^/\s]*))?(\S*) HTTP/1\.[01]\r?(?:\n|$)")
"""A request line. Its target may have scheme and host (RFC 9112, 3.2.2)."""
_TLS_HANDSHAKE = 0x16  # the first byte of a TLS connection


@functools.lru_cache(maxsize=16)  # a text may have a name that a stranger has sent
def answer(status: str, text: str) -> bytes:
    """Return the bytes of a whole HTTP response with a text; it closes the connection.

    :param status: code and phrase: ``"400 Bad Request"``. :param text: its body.
    """
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode() + body


def values_of(head: bytes, wanted: bytes) -> list[bytes]:
    """Return the values of one header in the bytes of a request head.

    :param wanted: the header's name in lower case.
    """
    lines = (line.partition(b":") for line in head.split(b"\n")[1:])
    return [value.strip() for name, _, value in lines if name.lower() == wanted]


def authorization_of(head: bytes) -> bytes:
    """Return the value of the Authorization header in a request head, or ``b""``."""
    return next(iter(values_of(head, b"authorization")), b"")


def names_of(head: bytes) -> list[str]:
    """Return the names by which a request calls this machine: its hosts and origins.

    They are not checked. A host in the request's target replaces the header Host.

    :param head: bytes of the request head.
    """
    found = _REQUEST.match(head)
    hosts = [found[1]] if found is not None and found[1] is not None else values_of(head, b"host")
    return [name.decode("latin-1") for name in (*hosts, *values_of(head, b"origin"))]


def head_nbytes(data: bytes) -> int:
    """Return the length of the request head that begins ``data``; 0 if incomplete."""
    return min((at + len(end) for end in _ENDS if (at := data.find(end)) >= 0), default=0)


class PortRules:
    """The access rules of one port, and its connections without token (*strangers*)."""

    def __init__(
        self,
        refused: Callable[[str], None],
        knows: Callable[[bytes], bool],
        hosts: AllowedHosts,
        live: Callable[[], bool] | None = None,
    ) -> None:
        """Keep the rules; no connection is known yet.

        :param refused: called with the reason for each connection that is refused.
        :param knows: returns True for an Authorization header with a valid token.
        :param hosts: the host names that a stranger's request may have.
        :param live: result of ``GET /livez``, or None without that page.
        """
        self.refused, self.is_valid_token, self.hosts = refused, knows, hosts
        self._live = live
        self.unproven: BoundedConnections[PortConnection] = BoundedConnections(UNPROVEN)
        self.strangers: BoundedConnections[PortConnection] = BoundedConnections(STRANGERS)
        self.pace = RateLimit(asyncio.get_running_loop().time(), STRANGERS_SHARE)
        """Account of the requests of all strangers."""

    def answer_at_once(self, head: bytes) -> bytes | None:
        """Return the response to a probe (``GET /livez``), or None for another request.

        :param head: bytes of the request head.
        """
        if self._live is None or not head.startswith(b"GET /livez HTTP/1."):
            return None
        status, text = "503 Service Unavailable", "the supervisor's event loop or store is stuck"
        try:
            if self._live():
                status, text = "200 OK", "ok"
        except errors.UsageError as error:  # the supervisor is still starting
            text = error.message
        return answer(status, text)


class Port(Protocol):
    """The server that accepted a :class:`PortConnection`, as the connection uses it."""

    rules: PortRules
    sockets: Mapping[str, SocketRoute]
    connections: set[PortConnection]

    def pages(self, visit: PortConnection) -> asyncio.Protocol:
        """Return a new protocol that serves HTTP pages; it has no transport yet.

        :param visit: the connection, which then calls the methods of the protocol.
        """

    def serve(self, route: SocketRoute, websocket: WebSocket) -> None:
        """Start a task that serves a WebSocket by its route, and then closes it.

        Does not wait for the task.
        """

    def turns_away(self, transport: asyncio.Transport) -> bytes:
        """Return the response that refuses the peer of this connection; ``b""`` if the
        peer is admitted. Sends nothing."""


class PortConnection(asyncio.Protocol):
    """The protocol of one accepted connection until it is a WebSocket, or closes."""

    transport: asyncio.Transport

    def __init__(self, port: Port, source: bytes, until: float) -> None:
        """Begin without a transport; asyncio calls :meth:`connection_made`.

        :param port: the server to which the connection belongs.
        :param source: key of the peer's address, by which connections are limited.
        :param until: loop time by which its head must be complete.
        """
        self._port = port
        self.rules = port.rules
        self._source = source
        self._until = until
        self._loop = asyncio.get_running_loop()
        self._began = time.perf_counter()
        """When its turn came. A stranger is charged for the time from then to its
        answer, including other work of the loop."""
        self.opening: asyncio.Task[None] | None = None
        """The task that creates the transport: slow if the peer's TLS is slow."""
        self._head = b""
        self._pages: asyncio.Protocol | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_stranger(self) -> bool:
        """True if it has sent a request without a valid token, and so is limited."""
        return self in self.rules.strangers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; limit the time in which the request head must come."""
        self.transport = cast("asyncio.Transport", transport)
        self.opening = None
        self._is_secure = transport.get_extra_info("sslcontext") is not None
        self._port.connections.add(self)
        self._start_timer(max(0.0, self._until - self._loop.time()))

    def add_to_limited(self, crowd: BoundedConnections[PortConnection]) -> None:
        """Add this connection to a set of limited size.

        If the set is full, or half full from this source, an older connection is
        removed from it, counted as refused, and aborted.

        :param crowd: the set.
        """
        if (one := crowd.add(self, self._source)) is not None:
            self.rules.refused("too_many")
            one.cut()

    def data_received(self, data: bytes) -> None:
        """Collect and check the request head; pass later bytes to the HTTP pages."""
        if self._pages is not None:
            self._pages.data_received(data)
        elif not self.transport.is_closing():
            self._head += data  # bytes after the answer are dropped
            self._check_head()

    def _check_head(self) -> None:
        """Look at the part of the request head that has come.

        Answer a malformed or oversized one with an error; handle a complete one.
        """
        data, nbytes = self._head, head_nbytes(self._head)
        if data[0] == _TLS_HANDSHAKE:
            self._turn_away("tls", "400 Bad Request", "this port does not speak TLS")
        elif not data[:1].isalpha() or (nbytes and not _REQUEST.match(data)):  # a method has only letters
            self._turn_away("malformed", "400 Bad Request", "this port speaks HTTP, and this is not an HTTP request")
        elif nbytes > HEAD_NBYTES or (not nbytes and len(data) >= HEAD_NBYTES):
            text = f"the request head exceeds the limit of {HEAD_NBYTES} bytes"
            self._turn_away("oversized", "431 Request Header Fields Too Large", text)
        elif nbytes:
            self._handle_head(data[:nbytes])

    def _handle_head(self, head: bytes) -> None:
        """Answer a complete request head here, or give the connection to its handler.

        The handler is a WebSocket, or uvicorn's protocol for HTTP pages.

        :param head: bytes of the head.
        """
        self._cancel_timer()
        if said := self._port.turns_away(self.transport) or self._immediate_answer(head):
            self._say(said)
            return
        data, self._head = self._head, b""
        found = _REQUEST.match(head)
        assert found is not None
        route = self._port.sockets.get(found[2].partition(b"?")[0].decode("latin-1"))
        if route is not None:
            self._upgrade(route, head, data[len(head) :])
            return
        self._pages = self._port.pages(self)
        self._pages.connection_made(self.transport)
        self._pages.data_received(data)

    def _immediate_answer(self, head: bytes) -> bytes:
        """Return the response to a probe or a refused stranger; ``b""`` to go on.

        A request without a token is counted among the strangers, and checked for its
        host name.

        :param head: bytes of the request head.
        """
        rules = self.rules
        rules.unproven.discard(self)
        self._began = time.perf_counter() if self._is_secure else self._began
        if (probe := rules.answer_at_once(head)) is not None:
            return probe
        if rules.is_valid_token(authorization_of(head)):
            return b""
        if self._is_secure and rules.pace.charge(REQUEST_S, self._loop.time()):  # without TLS the acceptor charges it
            rules.refused("too_many")
            return answer("503 Service Unavailable", "too many requests without a token at once; try later")
        if problem := rules.hosts.problem(names_of(head)):
            rules.refused("host")
            return answer("403 Forbidden", problem)
        self.add_to_limited(rules.strangers)
        return b""

    def _upgrade(self, route: SocketRoute, head: bytes, rest: bytes) -> None:
        """Turn the connection into a WebSocket, and start a task that serves it.

        If the route refuses the request, or it is malformed, it is answered and closed.

        :param head: the request. :param rest: bytes that came behind it.
        """
        websocket = WebSocket(self.transport, self.remove_from_port)
        websocket.on_malformed = lambda: self.rules.refused("malformed")
        self.transport.set_protocol(websocket)
        if websocket.open(head, route.refusal):
            self._port.serve(route, websocket)
            if rest:  # a client need not wait for the answer
                websocket.feed_bytes(rest)

    # ------------------------------------------------------------ answers, and the end

    def _turn_away(self, reason: str, status: str, text: str) -> None:
        """Count a refusal, send an error response, and close the connection.

        :param reason: one of :data:`replicas.coordinator.limits.REASONS`.
        :param status: HTTP code and phrase. :param text: the response's body.
        """
        self.rules.refused(reason)
        self._say(answer(status, text))

    def _say(self, data: bytes) -> None:
        """Write ``data``, a whole response, and close; do not wait.

        Abort after 5 s if the peer does not read it.
        """
        self._cancel_timer()
        self.transport.write(data)
        self.transport.close()
        self._start_timer(STALL_TIMEOUT_S)

    def charge_answer(self) -> None:
        """Charge the time from this connection's turn on to the strangers' limit.

        All connections without a token (strangers) share one limit of the loop's time.
        """
        self.rules.pace.charge(time.perf_counter() - self._began, self._loop.time())

    def finish(self, kind: str) -> None:
        """End the work for a request, after its ASGI application has returned.

        If the connection closes now, the peer must read the rest of the response within
        5 s. A WebSocket has another protocol by now, and only leaves the port's sets.

        :param kind: type of the request's ASGI scope: ``http`` or ``websocket``.
        """
        if kind == "websocket":  # a route of the caller, whose protocol has the transport now
            self.remove_from_port()
        elif self.transport.is_closing() and self in self._port.connections:  # it may have left already
            self._start_timer(STALL_TIMEOUT_S)

    def cut(self) -> None:
        """Abort the connection, or cancel the TLS handshake that opens it."""
        if self.opening is not None:
            self.opening.cancel()
        else:
            self.transport.abort()

    def _start_timer(self, seconds: float) -> None:
        """Start the timer that cuts the connection, unless one runs already."""
        if self._timer is None:  # keep the first limit
            self._timer = self._loop.call_later(seconds, self._on_timeout)

    def _cancel_timer(self) -> None:
        """Stop the timer that cuts the connection, if it runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        """Abort the connection when its time is over; the timer's function.

        Counted as a refusal if it has sent a part of a request.
        """
        self._timer = None
        if self._head or self._pages is not None:  # a browser's spare connection sends no request
            self.rules.refused("timeout")
        self.cut()

    def pause_writing(self) -> None:
        """Abort the connection if its peer reads nothing for 5 s from now on.

        The transport calls it when its buffer is full.
        """
        self._start_timer(STALL_TIMEOUT_S)
        if self._pages is not None:
            self._pages.pause_writing()

    def resume_writing(self) -> None:
        """Stop the time limit of :meth:`pause_writing`."""
        self._cancel_timer()
        if self._pages is not None:
            self._pages.resume_writing()

    def eof_received(self) -> None:
        """Tell the HTTP pages, if they serve it, that the peer sends no more."""
        if self._pages is not None:
            self._pages.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the HTTP pages, if they serve it, of the end; leave the port's sets."""
        self._cancel_timer()
        if self._pages is not None:
            self._pages.connection_lost(exc)
        self.remove_from_port()

    def remove_from_port(self) -> None:
        """Remove this connection from the port's sets; do not close it."""
        self._port.connections.discard(self)
        self.rules.unproven.discard(self)
        self.rules.strangers.discard(self)


# ------------------------------------------------------------ around the pages


class Pages:
    """ASGI middleware: charges connections without a token (strangers) for their time.

    A stranger's connection closes after one answer. A request target with scheme and
    host is reduced to its path; its host replaces the header.
    """

    def __init__(self, app: Any) -> None:
        """Wrap the ASGI application ``app``."""
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI request by the wrapped application.

        A stranger's response is charged to the limit of all strangers, and closes its
        connection. Errors of the application are raised.
        """
        visit: PortConnection = scope["state"].pop(KEY)
        raw = scope["raw_path"]
        if raw.lower().startswith((b"http://", b"https://")):
            host, _, path = raw.partition(b"://")[2].partition(b"/")
            headers = [(b"host", host), *((name, value) for name, value in scope["headers"] if name != b"host")]
            path = b"/" + path
            scope = {**scope, "path": unquote(path.decode("latin-1")), "raw_path": path, "headers": headers}

        async def send_once(message: Any) -> None:
            """Send a message of the response.

            At the start of a response to a stranger, also charge the stranger for its
            time, and have the connection closed after the response.
            """
            if visit.is_stranger and message["type"] == "http.response.start":
                visit.charge_answer()
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, send_once)
        finally:
            visit.finish(scope["type"])

"""A connection's request head, and who serves the rest: a WebSocket, or the pages.

A *stranger* is a connection that has not shown the run's token. It must show a complete
request head by its deadline, gets one answer, and is closed. What its request costs the
loop is charged to one account that all strangers share. A visitor that does not read
its answer is aborted. That a head has the token grants nothing: the handler of the
request checks it again.

Pages are served by uvicorn's HTTP protocol, as its config loads it, on the transport
that this module has read the head from.
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
"""From connecting to the complete head; for a stranger also from there to its turn."""
STALL_TIMEOUT_S = 5.0
"""Time for the reader of a page to read one buffer of it."""
HEAD_NBYTES = 16 * 1024
"""Of a request head."""
STRANGERS = 128
"""Connections of strangers that are being served."""
UNPROVEN = 256
"""Connections with TLS and no complete request head."""
REQUEST_S = 500e-6
"""Fixed cost of a stranger's request: a transport, parsing, the close."""
KEY = "replicas.visit"
_ENDS = (b"\r\n\r\n", b"\n\n", b"\n\r\n")  # bare line feeds too, as other servers take them
_REQUEST = re.compile(rb"[A-Za-z]+ (\S+) HTTP/1\.[01]\r?(?:\n|$)")
_TLS_HANDSHAKE = 0x16  # the first byte of a TLS connection
_NAMES = ("host", "origin")
"""Headers that name this port."""


@functools.cache
def answer(status: str, text: str) -> bytes:
    """A whole response of HTTP, after which the connection ends."""
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode() + body


def authorization_of(head: bytes) -> bytes:
    """The value of the Authorization header, or empty."""
    for line in head.split(b"\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"authorization":
            return value.strip()
    return b""


def head_nbytes(data: bytes) -> int:
    """Length of the request's head with its end; 0: it is not complete yet."""
    return min((at + len(end) for end in _ENDS if (at := data.find(end)) >= 0), default=0)


class PortRules:
    """Who may do what at one port, and the strangers there.

    :param refused: called with the reason for each connection that is turned away.
    :param knows: whether the value of an Authorization header shows a valid token.
    :param hosts: names by which a stranger may speak to the port.
    :param live: result of ``GET /livez``; None: no such page.
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
        self.unproven: Bounded[Visit] = Bounded(UNPROVEN)
        self.strangers: Bounded[Visit] = Bounded(STRANGERS)
        self.pace = RateLimit(asyncio.get_running_loop().time(), STRANGERS_SHARE)
        """Account of the requests of all strangers."""

    def answer_at_once(self, head: bytes) -> bytes | None:
        """The answer to a probe, which must not wait; None: it is no probe."""
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
        """Why a stranger's request is refused for the names by which it speaks."""
        if problem := self.hosts.problem(names):
            self.refused("host")
            return 403, problem
        return None


class Port(Protocol):
    """The server that a visit is at."""

    rules: PortRules | None
    refused: Callable[[str], None]
    sockets: Mapping[str, SocketRoute]
    visits: set[Visit]

    def pages(self, visit: Visit) -> asyncio.Protocol:
        """A protocol that serves pages; ``visit`` is in the scope of its requests."""

    def serve(self, route: SocketRoute, websocket: WebSocket) -> None:
        """Talk to a WebSocket in a task of its own."""

    def turns_away(self, transport: asyncio.Transport) -> bytes:
        """The answer to one who may not be here; empty: it may."""


class Visit(asyncio.Protocol):
    """One connection, for as long as it is no WebSocket.

    :param source: where it comes from. :param until: loop time by which its head must
        be there. Both are of no use at a port without rules.
    """

    transport: asyncio.Transport

    def __init__(self, port: Port, source: bytes = b"", until: float = 0.0) -> None:
        self._port = port
        self.rules = port.rules
        self._source = source
        self._until = until
        self._loop = asyncio.get_running_loop()
        self.began = time.perf_counter()
        """When its turn came: a stranger pays for the time from then to its answer,
        which is long where the loop has much else to do."""
        self.opening: asyncio.Task[None] | None = None
        """The task that makes the transport: slow if the peer is slow in its TLS."""
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
        self._port.visits.add(self)
        if self.rules is not None:
            self._wait(max(0.0, self._until - self._loop.time()))

    def count_in(self, crowd: Bounded[Visit]) -> None:
        """Be one of a crowd, in which another one may have to give way."""
        if (one := crowd.add(self, self._source)) is not None:
            self._port.refused("too_many")
            one.cut()

    def data_received(self, data: bytes) -> None:
        if self._pages is not None:
            self._pages.data_received(data)
        elif not self.transport.is_closing():
            self._head += data  # what comes after the answer is dropped
            self._judge()

    def _judge(self) -> None:
        """Judge the part of the request that has come."""
        data, nbytes = self._head, head_nbytes(self._head)
        if data[0] == _TLS_HANDSHAKE:
            self._turn_away("tls", "400 Bad Request", "this port does not speak TLS")
        elif not data[:1].isalpha() or (nbytes and not _REQUEST.match(data)):  # a method has only letters
            self._turn_away("malformed", "400 Bad Request", "this is not a request of HTTP")
        elif nbytes > HEAD_NBYTES or (not nbytes and len(data) >= HEAD_NBYTES):
            text = f"the head of a request may have {HEAD_NBYTES} bytes"
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
        """The answer to a probe, or to one stranger too many; empty: go on."""
        if (rules := self.rules) is None:
            return b""
        rules.unproven.discard(self)
        self.began = time.perf_counter() if self.is_secure else self.began
        if (probe := rules.answer_at_once(head)) is not None:
            return probe
        if not rules.knows(authorization_of(head)):
            if self.is_secure and rules.pace.charge(REQUEST_S, self._loop.time()):  # else the door has charged it
                rules.refused("too_many")
                return answer("503 Service Unavailable", "too many ask without a token")
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
            if rest:  # a client may go on without waiting for the answer
                websocket.take(rest)

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
        """A response is over: a peer that does not read what is left is cut."""
        if kind == "websocket":  # a route of others', whose protocol has taken over the transport
            self.left()
        elif self.transport.is_closing() and self in self._port.visits:  # else it has left, as who closes the page
            self._wait(STALL_TIMEOUT_S)

    def cut(self) -> None:
        if self.opening is not None:
            self.opening.cancel()
        else:
            self.transport.abort()

    def _wait(self, seconds: float) -> None:
        if self._timer is None:  # the first limit stands
            self._timer = self._loop.call_later(seconds, self._late)

    def _goes_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._head or self._pages is not None:  # else it has asked for nothing, as a browser's spare connection
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
        """The connection is over."""
        self._port.visits.discard(self)
        if self.rules is not None:
            self.rules.unproven.discard(self)
            self.rules.strangers.discard(self)


# ------------------------------------------------------------ around the pages


class Pages:
    """ASGI middleware: answers strangers once, by our own names, and charges them.

    A target with scheme and host, as proxies get it, is its path, and its host counts,
    whatever the header says (RFC 9112, 3.2.2).
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        visit: Visit = scope["state"].pop(KEY)  # pages have no use for it
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

"""The HTTP server of the control port, and its WebSocket route for sessions.

A connection is bounded in three places: :mod:`replicas.coordinator.connection_guard`
before there is a session, :mod:`replicas.coordinator.limits` for each message, and
here: a session that cannot go on is closed in a second, whether its peer reads or not.
After a transport error (malformed bytes, numbers out of order) only the connection is
closed, and the member may reconnect: something on the way may have corrupted the data.
A member that sends invalid values is refused for good, as it would only repeat them; so
is a member after :data:`REFUSED_MAX` closed connections in a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from urllib.parse import unquote

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from replicas import errors
from replicas.common.logs import Log
from replicas.config.values import NAME_ONE
from replicas.coordinator.admission import NotYet
from replicas.coordinator.connection_guard import (
    CLOSE_TIMEOUT_S,
    Charged,
    Guard,
    GuardConfig,
    HttpProtocol,
    is_stranger,
    session_of,
    welcome,
)
from replicas.coordinator.door import Door
from replicas.coordinator.engine import Engine
from replicas.coordinator.greeting import Greeting
from replicas.coordinator.limits import hello_problem, message_problem, size_problem
from replicas.coordinator.sessions import MemberSession
from replicas.messages import Hello, MemberFrame, Refused, ServerFrame, WireError, decode_member_frame, encode
from replicas.messages.bounds import FRAME_NBYTES
from replicas.trust.tls import SecureConnection
from replicas.trust.tokens import Tokens

START_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 5.0
REFUSED_MAX = 3
"""Connections in a row closed for bad input before the member is lost."""
log = Log("replicas.coordinator")

BACKLOG = 256
"""Backlog of the listening socket; the loop accepts as many in one iteration."""

POLICY_VIOLATION = 1008
BAD_DATA = 1007
TOO_BIG = 1009
TRY_AGAIN = 1013


class _Refusal(Exception):
    """Bad input of a connection.

    :ivar code: WebSocket close code. :ivar final: the member is lost, and told why.
    """

    def __init__(self, reason: str, text: str, code: int, *, final: bool = False) -> None:
        super().__init__(text)
        self.reason, self.text, self.code, self.final = reason, text, code, final


def session_route(engine: Engine, tokens: Tokens) -> WebSocketRoute:
    """``/session``: for members and operators, by bearer token."""

    async def endpoint(websocket: WebSocket) -> None:
        headers = websocket.headers
        if tokens.role_of(headers) is None:
            engine.refused("token")
            await websocket.send_denial_response(JSONResponse({"error": tokens.refusal(headers)}, status_code=401))
            return
        await websocket.accept()
        try:
            with tokens.watched(headers, session_of(websocket.scope).cut):
                if tokens.role_of(headers) is not None:  # it may have ended while the connection was accepted
                    await _serve(engine, websocket)
        except WebSocketDisconnect:
            return
        finally:
            await _close(websocket)

    return WebSocketRoute("/session", endpoint)


async def _close(websocket: WebSocket, code: int = 1000, text: str = "") -> None:
    """Close the WebSocket; a peer that is gone or does not read is left to be cut."""
    if websocket.application_state is WebSocketState.DISCONNECTED:
        return
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await websocket.close(code, text[:100])


async def _serve(engine: Engine, websocket: WebSocket) -> None:
    try:
        hello = await _hello(websocket)
    except _Refusal as refusal:
        engine.refused(refusal.reason)
        if refusal.final:
            error = WireError.of(errors.UsageError(refusal.text))
            await websocket.send_bytes(encode(ServerFrame(0, 0, Refused(error))))
        await _close(websocket, refusal.code, refusal.text)
        return
    try:
        address = websocket.client.host if websocket.client is not None else "127.0.0.1"
        seen_as = (websocket.scope.get("server") or ("", 0))[0]
        session = engine.open(hello, session_of(websocket.scope), address, seen_as)
    except NotYet as exc:
        await _close(websocket, TRY_AGAIN, str(exc))
        return
    except errors.ReplicasError as exc:
        engine.refused("fenced" if isinstance(exc, errors.Fenced) else "hello")
        await websocket.send_bytes(encode(ServerFrame(0, 0, Refused(WireError.of(exc)))))
        return
    welcome(websocket.scope)
    await _converse(engine, session, websocket)


async def _converse(engine: Engine, session: MemberSession, websocket: WebSocket) -> None:
    """Read until one side ends it or the session leaves: it writes by itself."""
    over, connection = session.over, session_of(websocket.scope)
    reader = asyncio.create_task(_read(engine, session, websocket, over))
    tasks: set[asyncio.Task[Any]] = {reader, asyncio.create_task(over.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await session.written(connection)
    finally:
        engine.detach(session, connection)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception) and not isinstance(ended, WebSocketDisconnect | _Refusal):
                log.error("a bug: the session of %s failed", session.member, exc_info=ended)
    if reader.done() and not reader.cancelled() and isinstance(refusal := reader.exception(), _Refusal):
        await _close(websocket, refusal.code, refusal.text)


async def _hello(websocket: WebSocket) -> Hello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            data = await _receive(websocket)
    except TimeoutError:
        text = f"no Hello within {HELLO_TIMEOUT_S:.0f} s"
        raise _Refusal("timeout", text, POLICY_VIOLATION) from None  # not final: this process may have been paused
    body = _decoded(data, first=True).body
    if not isinstance(body, Hello):
        text = f"the first message must be Hello, it was {type(body).__name__}"
        raise _Refusal("out_of_order", text, POLICY_VIOLATION, final=True)
    if (problem := hello_problem(body)) is not None:
        raise _Refusal("malformed", f"not an acceptable Hello: {problem}", POLICY_VIOLATION, final=True)
    return body


def _decoded(data: bytes, *, first: bool = False) -> MemberFrame:
    if (problem := size_problem(data, first=first)) is not None:
        raise _Refusal("oversized", problem, TOO_BIG, final=True)
    try:
        return decode_member_frame(data)
    except msgspec.DecodeError as exc:
        raise _Refusal("malformed", f"not a message of this protocol: {exc}", BAD_DATA, final=first) from None


async def _receive(websocket: WebSocket) -> bytes:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    return message.get("bytes") or b""


async def _read(engine: Engine, session: MemberSession, websocket: WebSocket, over: asyncio.Event) -> None:
    """Handle the messages of a connection until it ends.

    :raises _Refusal: it must be closed; counted already, a final one ended the session.
    """
    loop = asyncio.get_running_loop()
    pace = session_of(websocket.scope).pace
    told = False
    while True:
        try:
            data = await _receive(websocket)
            if over.is_set():
                return
            began = time.perf_counter()
            _handle(engine, session, data)
        except WebSocketDisconnect as exc:
            if exc.code == TOO_BIG:
                text = f"a frame of more than {FRAME_NBYTES:,} bytes"
                _refused(engine, session, _Refusal("oversized", text, TOO_BIG, final=True))
            return
        except _Refusal as refusal:
            _refused(engine, session, refusal)
            raise
        wait_s = pace.after_message(time.perf_counter() - began, loop.time())
        if pace.flooded and not told:
            told = True
            engine.refused("flood")
            log.warning("%s sends more than one session may: it is read more slowly", session.member)
        if wait_s is not None:
            await asyncio.sleep(wait_s)


def _refused(engine: Engine, session: MemberSession, refusal: _Refusal) -> None:
    session.refused += 1
    engine.refused(refusal.reason)
    log.warning("%s is refused: %s", session.member, refusal.text)
    if refusal.final or session.refused >= REFUSED_MAX:
        engine.expel(session, errors.UsageError(refusal.text, members=[session.member.name]), refusal.reason)


def _handle(engine: Engine, session: MemberSession, data: bytes) -> None:
    """Decode and check one message, and pass it to the engine."""
    frame = _decoded(data)
    if isinstance(frame.body, Hello):
        raise _Refusal("out_of_order", "a second Hello", POLICY_VIOLATION)
    if not 0 <= frame.ack <= session.sent:
        raise _Refusal("out_of_order", f"ack {frame.ack} of {session.sent} messages", POLICY_VIOLATION)
    if (problem := message_problem(frame.body)) is not None:
        raise _Refusal("malformed", problem, POLICY_VIOLATION, final=True)
    if not engine.receive(session, frame):
        text = f"message {frame.seq} came after {session.received}"
        raise _Refusal("out_of_order", text, POLICY_VIOLATION)


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening socket; WorldError if the address is not ours, or the port in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is explicit because asyncio sets TCP_NODELAY only on sockets with
    # IPPROTO_TCP. Without it a commit and the next grant are 40 ms apart (Nagle against
    # the peer's delayed acknowledgement).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        if ipaddress.ip_address(listener.getsockname()[0]).is_unspecified:
            raise errors.WorldError(
                f"control: {host} means every address of this machine, and tells others none", hint=NAME_ONE
            )
        listener.listen(socket.SOMAXCONN)
    except errors.WorldError:
        listener.close()
        raise
    except OSError as exc:
        listener.close()
        raise errors.WorldError(
            f"control: cannot listen on {host}:{port}: {exc.strerror}",
            hint="choose another [control] listen, or port 0 to let the kernel choose",
        ) from exc
    listener.setblocking(False)
    return listener


class _QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its embedder."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Entrance:
    """ASGI middleware for strangers: checks host names, answers once, charges time."""

    def __init__(self, app: Any, guard: Guard, door: Door) -> None:
        self._app = app
        self._guard = guard
        self._door = door

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or not is_stranger(scope):
            await self._app(scope, receive, send)
            return
        names = [value.decode("latin-1") for name, value in scope["headers"] if name in (b"host", b"origin")]
        app = self._app
        if problem := self._door.hosts.problem(names):
            self._guard.refused("host")
            app = JSONResponse({"error": problem}, status_code=403)

        async def send_once(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await Charged(app(scope, receive, send_once), self._pay)

    def _pay(self, seconds: float) -> None:
        self._door.pace.charge(seconds, asyncio.get_running_loop().time())


class _Targets:
    """ASGI middleware: a target with scheme and host, as proxies get it, is its path.

    Its host counts, whatever the header says (RFC 9112, 3.2.2).
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw = scope.get("raw_path") or b""
        if scope["type"] == "http" and raw.lower().startswith((b"http://", b"https://")):
            host, _, path = raw.partition(b"://")[2].partition(b"/")
            headers = [(b"host", host), *((name, value) for name, value in scope["headers"] if name != b"host")]
            path = b"/" + path
            scope = {**scope, "path": unquote(path.decode("latin-1")), "raw_path": path, "headers": headers}
        await self._app(scope, receive, send)


class Server:
    """Serves HTTP and sessions on one socket until it is closed.

    :param refused: called with the reason for each connection that is turned away.
    :param door: accepts the connections; None: uvicorn does, and none is a stranger.
    """

    def __init__(
        self,
        listener: socket.socket,
        routes: Sequence[BaseRoute],
        refused: Callable[[str], None],
        *,
        http: type[HttpProtocol] = HttpProtocol,
        door: Door | None = None,
    ) -> None:
        self._listener = listener
        self._guard = Guard(refused)
        self._door = door
        app: Any = Starlette(routes=list(routes))
        self._config = GuardConfig(
            _Targets(app if door is None else _Entrance(app, self._guard, door)),
            self._guard,
            http=http,
            backlog=BACKLOG,
            ws_max_size=FRAME_NBYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=None,
            proxy_headers=False,  # trust a member's socket address, not its headers
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = _QuietServer(self._config)
        self._task: asyncio.Task[None] | None = None
        self._admitting: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        sockets = [self._listener] if self._door is None else []
        self._task = asyncio.create_task(self._server.serve(sockets=sockets))
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:  # uvicorn has no event for it
                if self._task.done():
                    await self._task
                    raise errors.InternalError("the control server ended at once")
                await asyncio.sleep(0.005)
        if self._door is not None:
            self._door.open(self._admit)

    def _admit(self, sock: socket.socket, source: bytes | None, greeting: Greeting | None) -> None:
        task = asyncio.create_task(self._connect(sock, source, greeting))
        self._admitting.add(task)
        task.add_done_callback(self._admitting.discard)

    async def _connect(self, sock: socket.socket, source: bytes | None, greeting: Greeting | None) -> None:
        """Start the protocol on an accepted socket, as asyncio's own server does."""
        loop, state = asyncio.get_running_loop(), self._server.server_state
        protocol = self._config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn makes it
            config=self._config, server_state=state, app_state=self._server.lifespan.state, _loop=loop
        )
        http = cast("HttpProtocol", protocol)
        http.source = source
        lowest = http if greeting is None else SecureConnection(http, greeting.tls, greeting.content)
        sock.setblocking(False)
        try:
            await loop.connect_accepted_socket(lambda: lowest, sock)
        except OSError:  # the peer is gone
            sock.close()

    async def aclose(self) -> None:
        if self._door is not None:
            self._door.close()
        self._server.should_exit = True
        self._server.force_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, *self._admitting, return_exceptions=True)
        for connection in tuple(self._server.server_state.connections):
            connection.transport.abort()
        self._listener.close()

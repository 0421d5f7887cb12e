"""The server of the control port, and its WebSocket route for sessions.

A connection has limits before its request is known
(:mod:`replicas.coordinator.acceptor`), until it has shown a token
(:mod:`replicas.coordinator.port_connections`), as a WebSocket
(:mod:`replicas.coordinator.websocket`), for each message
(:mod:`replicas.coordinator.limits`), and here: a failed session is closed within a
second, even if its peer does not read. After bad input (malformed bytes, values out of
range, numbers out of order) only the connection is closed, and the member may
reconnect: the network may have corrupted the data. A member that repeats it is lost
after :data:`REFUSED_MAX` closed connections in a row; one that sends too much, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from replicas import errors
from replicas.common.logs import Log
from replicas.common.tasks import cancelled, keep_until_done
from replicas.config.values import NAME_ONE
from replicas.coordinator.acceptor import Acceptor
from replicas.coordinator.engine import Engine
from replicas.coordinator.hello_checks import NotYet
from replicas.coordinator.limits import hello_problem, size_problem
from replicas.coordinator.port_connections import (
    KEY,
    REQUEST_TIMEOUT_S,
    STALL_TIMEOUT_S,
    Pages,
    PortConnection,
    PortRules,
)
from replicas.coordinator.sessions import MemberSession
from replicas.coordinator.websocket import CLOSE_TIMEOUT_S, TOO_BIG, Ended, SocketRoute, WebSocket, quiet
from replicas.linux.sockets import why_not
from replicas.messages import Hello, MemberFrame, Refused, ServerFrame, WireError, decode_member_frame, encode
from replicas.messages.bounds import FRAME_NBYTES
from replicas.trust.tokens import Tokens

HELLO_TIMEOUT_S = 5.0
REFUSED_MAX = 3
"""Connections in a row closed for bad input before the member is lost."""
log = Log("replicas.coordinator")

POLICY_VIOLATION = 1008
BAD_DATA = 1007
TRY_AGAIN = 1013


class _Refusal(Exception):
    """Bad input of a connection.

    :ivar code: WebSocket close code. :ivar final: lose the member, and send it why.
    """

    def __init__(self, reason: str, text: str, code: int, *, final: bool = False) -> None:
        """Make the exception; count and send nothing.

        :param reason: one of :data:`replicas.coordinator.limits.REASONS`, for the
            counts.
        :param text: for the peer. :param code: WebSocket close code.
        :param final: lose the member, and send it the text.
        """
        super().__init__(text)
        self.reason, self.text, self.code, self.final = reason, text, code, final


def session_route(engine: Engine, tokens: Tokens) -> SocketRoute:
    """Return the route ``/session``, at which member sessions of the engine are served.

    A request without a valid token is refused. When the token that a connection has
    shown is retired, the connection is cut.

    :param tokens: the valid tokens, now and later.
    """

    def refusal(headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return (HTTP status, text) to refuse a request, or None to accept it.

        A request without a valid token is refused, and counted.
        """
        if tokens.role_of(headers) is not None:
            return None
        engine.refused("token")
        return 401, tokens.refusal(headers)

    async def serve(websocket: WebSocket) -> None:
        """Serve one member's session on ``websocket`` until its end.

        The connection is cut when the token that it has shown is retired.
        """
        with tokens.watched(websocket.headers, websocket.cut), contextlib.suppress(Ended):
            if tokens.role_of(websocket.headers) is not None:  # it may have ended since the request was accepted
                await _serve(engine, websocket)

    return SocketRoute("/session", refusal, serve)


async def _serve(engine: Engine, websocket: WebSocket) -> None:
    """Read the Hello, open the member's session, and handle its messages to the end.

    A bad Hello, or one that the engine refuses, is counted, answered with the reason,
    and ends the connection. One that comes too early for an answer ends it with a close
    code at which the member tries again.
    """
    try:
        hello = await _hello(websocket)
    except _Refusal as refusal:
        engine.refused(refusal.reason)
        if refusal.final:
            websocket.write((_refused_frame(errors.UsageError(refusal.text)),))
        websocket.close(refusal.code, refusal.text)
        return
    try:
        session = engine.open(hello, websocket, websocket.peer() or "127.0.0.1", websocket.here())
    except NotYet as exc:
        websocket.close(TRY_AGAIN, str(exc))
        return
    except errors.ReplicasError as exc:
        engine.refused("fenced" if isinstance(exc, errors.Fenced) else "hello")
        websocket.write((_refused_frame(exc),))
        return
    await _converse(engine, session, websocket)


def _refused_frame(error: errors.ReplicasError) -> bytes:
    """Return the encoded frame that tells a member the reason of a refusal."""
    return encode(ServerFrame(0, 0, Refused(WireError.of(error))))


async def _converse(engine: Engine, session: MemberSession, websocket: WebSocket) -> None:
    """Handle a connection's messages until it ends, or its session leaves it.

    A session leaves it by its own end, or for another connection; at its end, queued
    messages are still written, for up to 1 s. Then the session is detached; after bad
    input the connection is closed. The session writes to it without this task.
    """
    over = session.over
    reader = asyncio.create_task(_read(engine, session, websocket, over))
    closed = asyncio.create_task(over.wait())
    try:
        await asyncio.wait({reader, closed}, return_when=asyncio.FIRST_COMPLETED)
        if over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await session.written(websocket)
    finally:
        engine.detach(session, websocket)
        ended, _ = await cancelled(reader, closed)
        if isinstance(ended, _Refusal):
            websocket.close(ended.code, ended.text)
        elif isinstance(ended, Exception):
            log.error("closing the connection of %s after a bug; please report this", session.member, exc_info=ended)


async def _hello(websocket: WebSocket) -> Hello:
    """Wait for the first message, 5 s at most; return it, a valid Hello.

    :raises _Refusal: it did not come, or is another message or not valid.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            data = await websocket.receive()
    except TimeoutError:
        text = f"no first message (Hello) within {HELLO_TIMEOUT_S:.0f} s"
        raise _Refusal("timeout", text, POLICY_VIOLATION) from None  # not final: this process may have been paused
    body = _decoded(data, first=True).body
    if not isinstance(body, Hello):
        text = f"the first message must be Hello, it was {type(body).__name__}"
        raise _Refusal("out_of_order", text, POLICY_VIOLATION, final=True)
    if (problem := hello_problem(body)) is not None:
        raise _Refusal("malformed", f"the first message (Hello) is not valid: {problem}", POLICY_VIOLATION, final=True)
    return body


def _decoded(data: bytes, *, first: bool = False) -> MemberFrame:
    """Return the frame in ``data``, checked for size and form.

    :param first: it is the connection's first message, the Hello, with another limit.
    :raises _Refusal: it is too large or malformed.
    """
    if (problem := size_problem(data, first=first)) is not None:
        raise _Refusal("oversized", problem, TOO_BIG, final=True)
    try:
        return decode_member_frame(data)
    except msgspec.DecodeError as exc:
        # the network may damage a later one; a bad first one is of another program
        raise _Refusal("malformed", f"not a message of this protocol: {exc}", BAD_DATA, final=first) from None


async def _read(engine: Engine, session: MemberSession, websocket: WebSocket, over: asyncio.Event) -> None:
    """Pass each message of a connection to the engine, until the connection ends.

    A member that sends too much is read more slowly.

    :param over: set when the session has left the connection; this then returns.
    :raises _Refusal: a message was bad; the caller must close the connection. The
        refusal is counted already and, if it is final, the member is lost.
    """
    loop = asyncio.get_running_loop()
    pace = websocket.pace
    told = False
    while True:
        try:
            data = await websocket.receive()
            if over.is_set():
                return
            began = time.perf_counter()
            _handle(engine, session, data)
        except Ended as end:
            if end.too_big:
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
            log.warning("reading the messages of %s more slowly: more arrive than a member may send", session.member)
        if wait_s is not None:
            await asyncio.sleep(wait_s)


def _refused(engine: Engine, session: MemberSession, refusal: _Refusal) -> None:
    """Count and log bad input of a session's connection; do not close the connection.

    If ``refusal`` is final, or the third one since the last good message, the member is
    lost, and is sent the reason.
    """
    session.refused += 1
    engine.refused(refusal.reason)
    log.warning("refusing a message of %s: %s", session.member, refusal.text)
    if refusal.final or session.refused >= REFUSED_MAX:
        engine.expel(session, errors.UsageError(refusal.text, members=[session.member.name]), refusal.reason)


def _handle(engine: Engine, session: MemberSession, data: bytes) -> None:
    """Decode and check one message of a member, and have the engine handle it now.

    :raises _Refusal: the message is malformed or out of order; the engine has not
        handled it.
    """
    frame = _decoded(data)
    if isinstance(frame.body, Hello):
        raise _Refusal("out_of_order", "a second Hello", POLICY_VIOLATION)
    if not 0 <= frame.ack <= session.sent:
        raise _Refusal("out_of_order", f"ack {frame.ack} of {session.sent} messages", POLICY_VIOLATION)
    if not engine.receive(session, frame):
        text = f"message {frame.seq} came after {session.received}"
        raise _Refusal("out_of_order", text, POLICY_VIOLATION)


def bind_listener(host: str, port: int, *, or_any: bool = False) -> socket.socket:
    """Return a new, non-blocking TCP socket that listens at the address.

    :param or_any: take any free port if ``port`` is in use, and log that.
    :raises errors.WorldError: the address is not of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is explicit because asyncio sets TCP_NODELAY only on sockets with
    # IPPROTO_TCP. Without it the next grant follows a commit after 40 ms (Nagle and
    # the peer's delayed acknowledgement).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a run that has just ended
    try:
        listener.bind((host, port))
        if ipaddress.ip_address(listener.getsockname()[0]).is_unspecified:
            raise errors.WorldError(
                f"control: {host} means every address of this machine, so others cannot dial it", hint=NAME_ONE
            )
        listener.listen(socket.SOMAXCONN)
    except errors.WorldError:
        listener.close()
        raise
    except OSError as exc:
        listener.close()
        why = why_not(exc, port)
        if not or_any or exc.errno != errno.EADDRINUSE:
            hint = "choose another address or port for control.listen, or leave it out: then any free port is taken"
            raise errors.WorldError(f"control port: cannot listen on {host}:{port} ({why})", hint=hint) from exc
        listener = bind_listener(host, 0)
        log.warning("serving the control port on %d, because %d is in use: %s", listener.getsockname()[1], port, why)
    listener.setblocking(False)
    return listener


class Server:
    """Serves HTTP, sessions and agents on one socket."""

    def __init__(
        self,
        listener: socket.socket,
        routes: Sequence[BaseRoute],
        rules: PortRules,
        *,
        turns_away: Callable[[asyncio.Transport], bytes] = lambda _: b"",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Take over a listening socket; accept nothing before :meth:`start`.

        :param routes: HTTP pages, and WebSockets (:class:`SocketRoute`).
        :param rules: of the port; they are told why a connection is refused.
        :param turns_away: returns the answer that refuses a connection, or ``b""``.
        :param tls: context of the port, or None for plain HTTP.
        """
        self._listener = listener
        self._acceptor: Acceptor | None = None
        self._tls = tls
        self.rules, self.turns_away = rules, turns_away
        self.sockets: Mapping[str, SocketRoute] = {
            route.path: route for route in routes if isinstance(route, SocketRoute)
        }
        self.connections: set[PortConnection] = set()
        """The open connections."""
        app = Starlette(routes=[route for route in routes if not isinstance(route, SocketRoute)])
        self._config = uvicorn.Config(
            Pages(app),
            http="h11",
            ws="websockets-sansio",  # for routes of the caller: ours are in self.sockets
            ws_max_size=FRAME_NBYTES,
            ws_per_message_deflate=False,  # compressing would cost the loop more than it saves
            ws_ping_interval=None,  # members send heartbeats
            proxy_headers=False,  # trust a member's socket address, not its headers
            log_config=None,
            access_log=False,
            lifespan="off",
        )
        self._config.load()
        self._uvicorn = uvicorn.Server(self._config)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start to accept connections on the running loop."""
        self._acceptor = Acceptor(self._listener, self.rules, self._admit, tls=self._tls is not None)

    def _admit(self, sock: socket.socket, source: bytes, until: float) -> None:
        """Start a task that serves a connection which the acceptor passes on.

        :param source: key of the peer's address, by which connections are limited.
        :param until: loop time by which its request head must be complete.
        """
        visit = PortConnection(self, source, until)
        visit.opening = self._spawn(self._connect(sock, visit))
        if self._tls is not None:
            visit.add_to_limited(self.rules.unproven)

    async def _connect(self, sock: socket.socket, visit: PortConnection) -> None:
        """Create the transport of an accepted socket; with TLS wait for the handshake.

        :param visit: the protocol of the connection. If it cannot be opened, the socket
            is closed, and a TLS failure is counted.
        """
        sock.setblocking(False)
        times: dict[str, float] = {}
        if self._tls is not None:
            times = {"ssl_handshake_timeout": REQUEST_TIMEOUT_S, "ssl_shutdown_timeout": STALL_TIMEOUT_S}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: visit, sock, ssl=self._tls, **times)
        except OSError as error:  # the peer is gone, or does not speak our TLS
            if self._tls is not None:
                self.rules.refused("timeout" if isinstance(error, ConnectionAbortedError) else "tls")
        finally:
            if visit.opening is not None:  # it has no transport
                sock.close()
                visit.remove_from_port()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        """Start a task for the coroutine ``work``; :meth:`aclose` cancels it."""
        return keep_until_done(asyncio.create_task(work), self._tasks)

    def pages(self, visit: PortConnection) -> asyncio.Protocol:
        """Return a new protocol of uvicorn that serves HTTP pages on one connection.

        :param visit: the connection; the scope of each request refers to it.
        """
        made = self._config.http_protocol_class(  # type: ignore[call-arg]  # any protocol, by its type
            config=self._config, server_state=self._uvicorn.server_state, app_state={KEY: visit}
        )
        made.logger = quiet  # type: ignore[attr-defined]  # bad requests of strangers are counted, not logged
        return made

    def serve(self, route: SocketRoute, websocket: WebSocket) -> None:
        """Start a task that serves a WebSocket by its route, and then closes it."""
        self._spawn(self._serve(route, websocket))

    async def _serve(self, route: SocketRoute, websocket: WebSocket) -> None:
        """Serve a WebSocket by its route, and close it when that returns or fails."""
        try:
            await route.serve(websocket)
        finally:
            websocket.close()

    async def aclose(self) -> None:
        """Stop accepting, close the listener, and abort all connections.

        Wait until their tasks have ended, without a time limit.
        """
        if self._acceptor is not None:
            self._acceptor.close()
        for visit in tuple(self.connections):  # cutting one changes the set
            visit.cut()
        await cancelled(*self._tasks, *self._uvicorn.server_state.tasks)
        self._listener.close()

"""The network side of sessions: one WebSocket route, and the HTTP server that carries it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import Iterator, Sequence

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from replicas import errors
from replicas.coordinator.engine import Engine
from replicas.coordinator.sessions import Session
from replicas.messages import Hello, Refused, ServerFrame, WireError, decode_member_frame, encode

__all__ = ["Server", "bind_listener", "session_route"]

log = logging.getLogger("replicas.coordinator")

HELLO_TIMEOUT_S = 10.0
MESSAGE_NBYTES = 64 * 2**20
"""The largest message of a member: a manifest of some 500,000 tensors."""

POLICY_VIOLATION = 1008
BAD_DATA = 1007


def session_route(engine: Engine, token: str) -> WebSocketRoute:
    """``/session``: members only, by bearer token."""

    async def endpoint(websocket: WebSocket) -> None:
        given = websocket.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            engine.refused("token")
            await websocket.send_denial_response(JSONResponse({"error": "wrong or missing token"}, status_code=401))
            return
        await websocket.accept()
        try:
            await _serve(engine, websocket)
        except WebSocketDisconnect:
            return
        finally:
            if websocket.application_state is not WebSocketState.DISCONNECTED:
                with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the peer may be gone already
                    await websocket.close()

    return WebSocketRoute("/session", endpoint)


async def _serve(engine: Engine, websocket: WebSocket) -> None:
    hello = await _hello(engine, websocket)
    if hello is None:
        return
    address = _own_view(websocket)
    try:
        session = engine.open(hello, websocket, address)
    except errors.ReplicasError as exc:
        engine.refused(type(exc).__name__)
        await websocket.send_bytes(encode(ServerFrame(0, 0, Refused(WireError.of(exc)))))
        return
    writer = asyncio.create_task(_write(session, websocket))
    reader = asyncio.create_task(_read(engine, session, websocket))
    try:
        await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        session.detach(websocket)
        for task in (writer, reader):
            task.cancel()
        for ended in await asyncio.gather(writer, reader, return_exceptions=True):
            if isinstance(ended, Exception) and not isinstance(ended, WebSocketDisconnect):
                log.error("a bug: the session of %s failed", session.member, exc_info=ended)


async def _hello(engine: Engine, websocket: WebSocket) -> Hello | None:
    problem = f"no Hello within {HELLO_TIMEOUT_S:.0f} s"
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            data = await _receive(websocket)
        body = decode_member_frame(data).body
        if isinstance(body, Hello):
            return body
        problem = f"the first message must be Hello, it was {type(body).__name__}"
    except TimeoutError:
        pass
    except msgspec.DecodeError as exc:
        problem = f"not a message of this protocol: {exc}"
    engine.refused("malformed")
    await websocket.send_bytes(encode(ServerFrame(0, 0, Refused(WireError.of(errors.UsageError(problem))))))
    return None


async def _receive(websocket: WebSocket) -> bytes:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    data = message.get("bytes")
    return data if data is not None else b""


async def _read(engine: Engine, session: Session, websocket: WebSocket) -> None:
    while True:
        try:
            frame = decode_member_frame(await _receive(websocket))
        except WebSocketDisconnect:
            return
        except msgspec.DecodeError as exc:
            engine.refused("malformed")
            log.warning("%s sent something that is no message: %s", session.member, exc)
            await websocket.close(BAD_DATA, "not a message of this protocol")
            return
        if isinstance(frame.body, Hello) or not engine.receive(session, frame):
            engine.refused("out of order")
            await websocket.close(POLICY_VIOLATION, "message out of order")
            return


async def _write(session: Session, websocket: WebSocket) -> None:
    while (data := await session.next(websocket)) is not None:
        await websocket.send_bytes(data)


def _own_view(websocket: WebSocket) -> str:
    """The address by which this machine sees the member."""
    return websocket.client.host if websocket.client is not None else "127.0.0.1"


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening socket.

    :raises errors.WorldError: the address is not of this machine, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on sockets that say that they are TCP, and without it a
    # commit and the grant behind it are 40 ms apart (Nagle against the peer's delayed acknowledgement).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as exc:
        listener.close()
        raise errors.WorldError(
            f"control: cannot listen on {host}:{port}: {exc.strerror}",
            hint="choose another [control] listen, or port 0 to let the kernel choose",
        ) from exc
    listener.setblocking(False)
    return listener


class _QuietServer(uvicorn.Server):
    """A server that leaves signals to its embedder."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Serves HTTP and sessions on one socket until it is closed."""

    def __init__(self, listener: socket.socket, routes: Sequence[BaseRoute]) -> None:
        self._listener = listener
        config = uvicorn.Config(
            Starlette(routes=list(routes)),
            ws="websockets-sansio",
            ws_max_size=MESSAGE_NBYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=None,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise errors.InternalError("the control server ended at once")
            await asyncio.sleep(0.005)

    async def aclose(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()

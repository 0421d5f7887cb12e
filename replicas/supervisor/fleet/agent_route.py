"""The WebSocket route at which agents join: ``/agent``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from starlette.responses import JSONResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from replicas.common.logs import Log
from replicas.coordinator.connection_guard import CLOSE_TIMEOUT_S, SessionProtocol, session_of, welcome
from replicas.coordinator.sessions import OUTBOX_NBYTES
from replicas.supervisor.agent.messages import Hello, Refused, decode_from_agent, encode
from replicas.supervisor.fleet.cluster import Cluster
from replicas.trust.tokens import Tokens

log = Log("replicas.supervisor")

_HELLO_S = 10.0
_BAD_DATA = 1007


class _Link:
    """A connection to an agent, which has the limit of a member's session: with too
    much that it has not read, one more message ends it.

    :param refused: called with the reason then.
    """

    def __init__(self, connection: SessionProtocol, refused: Callable[[str], None]) -> None:
        self._connection, self._refused = connection, refused
        self.over = asyncio.Event()

    def send(self, data: bytes) -> None:
        if self.over.is_set():
            return
        if self._connection.unread_nbytes > OUTBOX_NBYTES:
            log.error("an agent does not read what it is sent: it is disconnected")
            self._refused("overflow")
            self.close()
            self._connection.cut()
            return
        self._connection.write((data,))

    def close(self) -> None:
        self.over.set()


def agent_route(
    cluster: Callable[[], Cluster | None],
    refused: Callable[[str], None],
    access: Callable[[WebSocket], str] | None,
    tokens: Callable[[], Tokens],
) -> WebSocketRoute:
    """The route.

    :param cluster: None: the run does not take agents (yet).
    :param refused: called with the reason of each refusal.
    :param access: why an agent is not let in; None: this is the run's own socket.
    :param tokens: of the run; the connection ends when its own is retired.
    """

    async def endpoint(websocket: WebSocket) -> None:
        here = cluster()
        why = access(websocket) if access is not None else ""
        if why or here is None:
            problem = why or "the run is not ready for agents yet"
            await websocket.send_denial_response(JSONResponse({"error": problem}, status_code=401 if why else 503))
            return
        await websocket.accept()
        welcome(websocket.scope)
        with contextlib.suppress(WebSocketDisconnect):
            link = _Link(session_of(websocket.scope), refused)
            if access is None:
                await _serve(here, websocket, link, refused, local=True)
            else:
                with tokens().watched(websocket.headers, link.close):
                    if not access(websocket):  # its token may have ended while the connection was accepted
                        await _serve(here, websocket, link, refused, local=False)
        if websocket.application_state is not WebSocketState.DISCONNECTED:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await websocket.close()

    return WebSocketRoute("/agent", endpoint)


async def _serve(
    cluster: Cluster, websocket: WebSocket, link: _Link, refused: Callable[[str], None], *, local: bool
) -> None:
    try:
        async with asyncio.timeout(_HELLO_S):
            hello = decode_from_agent(await _received(websocket))
    except TimeoutError:
        refused("timeout")
        return
    except msgspec.DecodeError as error:
        refused("malformed")
        link.send(encode(Refused(message=f"this is no agent of this release: {error}")))
        return
    if not isinstance(hello, Hello):
        refused("out_of_order")
        return
    seen_at = "" if local or websocket.client is None else websocket.client.host
    try:
        node = cluster.hello(hello, link, local=local, seen_at=seen_at)
    except msgspec.DecodeError as error:
        refused("malformed")
        log.error("the agent of node %s is not taken: %s", hello.node, error)
        return
    if not node:
        return
    reading = asyncio.create_task(_read(cluster, node, websocket))
    closed = asyncio.create_task(link.over.wait())
    try:
        await asyncio.wait({reading, closed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        link.close()
        cluster.closed(node, link)
        for task in (reading, closed):
            task.cancel()
        ended, _ = await asyncio.gather(reading, closed, return_exceptions=True)
        if isinstance(ended, msgspec.DecodeError):
            refused("malformed")
            log.error("the agent of node %s is disconnected: %s", node, ended)
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await websocket.close(_BAD_DATA, str(ended)[:100])
        elif isinstance(ended, Exception) and not isinstance(ended, WebSocketDisconnect):
            log.error("a bug: the connection of node %s failed", node, exc_info=ended)


async def _read(cluster: Cluster, node: str, websocket: WebSocket) -> None:
    while True:
        cluster.receive(node, await _received(websocket))


async def _received(websocket: WebSocket) -> bytes:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    return message.get("bytes") or b""

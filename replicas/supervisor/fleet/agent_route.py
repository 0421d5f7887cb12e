"""The WebSocket route at which agents join: ``/agent``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import msgspec

from replicas.common.logs import Log
from replicas.common.tasks import cancelled
from replicas.control.access import Access
from replicas.coordinator.websocket import Ended, SocketRoute, WebSocket
from replicas.supervisor.agent.messages import Hello, Refused, decode_from_agent, encode
from replicas.supervisor.fleet.cluster import Cluster
from replicas.supervisor.fleet.handle import AgentLink

log = Log("replicas.supervisor")

_HELLO_S = 10.0
_BAD_DATA = 1007


def agent_route(
    cluster: Cluster, refused: Callable[[str], None], access: Access, *, local: bool = False
) -> SocketRoute:
    """Return the route of the control port, or socket, at which agents join.

    :param refused: called with the reason of each refusal, to count it.
    :param access: decides who may join; a connection ends when its access does.
    :param local: for the run's own socket, which only this machine reaches.
    """

    def refusal(headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return (HTTP status, text) to refuse a request, or None to accept it.

        :param headers: of the request, names in lower case.
        """
        why = access(headers)
        return (401, why) if why else None

    async def serve(websocket: WebSocket) -> None:
        """Serve one agent's connection until it ends, or its access does."""
        link = AgentLink(websocket, refused)
        with contextlib.suppress(Ended), access.watched(websocket.headers, link.close):
            if not access(websocket.headers):  # its token may have ended since the request was accepted
                await _serve(cluster, websocket, link, refused, local=local)

    return SocketRoute("/agent", refusal, serve)


async def _serve(
    cluster: Cluster, websocket: WebSocket, link: AgentLink, refused: Callable[[str], None], *, local: bool
) -> None:
    """Accept or refuse an agent, and pass its messages on until the connection ends.

    At the end, tell the cluster, and log a malformed message or a bug.

    :param link: the connection, for messages to the agent.
    :param refused: called with the reason of a refusal.
    :param local: the connection is on the run's own socket.
    """
    try:
        async with asyncio.timeout(_HELLO_S):
            hello = decode_from_agent(await websocket.receive())
    except TimeoutError:
        refused("timeout")
        return
    except msgspec.DecodeError as error:
        refused("malformed")
        link.send(encode(Refused(message=f"the agent does not speak this release's protocol: {error}")))
        return
    if not isinstance(hello, Hello):
        refused("out_of_order")
        return
    seen_at = "" if local else websocket.peer()
    try:
        node = cluster.hello(hello, link, local=local, seen_at=seen_at)
    except msgspec.DecodeError as error:
        refused("malformed")
        log.error("refusing the agent of node %s: %s", hello.node, error)
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
        ended, _ = await cancelled(reading, closed)
        if isinstance(ended, msgspec.DecodeError):
            refused("malformed")
            log.error("disconnecting the agent of node %s: %s", node, ended)
            websocket.close(_BAD_DATA, str(ended))
        elif isinstance(ended, Exception) and not isinstance(ended, Ended):
            log.error("closing the connection of node %s after a bug; please report this", node, exc_info=ended)


async def _read(cluster: Cluster, node: str, websocket: WebSocket) -> None:
    """Pass an agent's messages to the cluster until the connection ends.

    :raises Ended: it has ended.
    :raises msgspec.DecodeError: a message is malformed.
    """
    while True:
        cluster.receive(node, await websocket.receive())

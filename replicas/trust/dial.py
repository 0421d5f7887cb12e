"""Open a WebSocket to a control port, and show the token to no other port.

Before the request, which has the token, is sent, the kernel tells the port's owner (on
this machine), and TLS proves that the port has the key that the token names.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, TypeVar, cast

from websockets.asyncio.client import ClientConnection, connect

from replicas.linux.sockets import describe_owner, listener_uids, may_be_foreign
from replicas.trust.way import Way

CLOSE_TIMEOUT_S = 1.0
_OPTIONS: dict[str, Any] = {
    "compression": None,
    "proxy": None,
    "close_timeout": CLOSE_TIMEOUT_S,
    "ping_interval": None,
    "user_agent_header": None,
}


class PortConnection(ClientConnection):
    """A WebSocket client that sends its request only to a port of ``owners``.

    :ivar owners: users of this machine; None allows all.
    """

    owners: frozenset[int] | None = None

    async def handshake(self, *given: Any, **options: Any) -> None:
        """Send the request, which has the token, to a port of ``owners`` only.

        :param given: passed on to the handshake of websockets, with ``options``.
        :raises ConnectionRefusedError: the port is another user's; nothing was sent.
        """
        if self.owners is not None:
            uids = listener_uids(self.transport.get_extra_info("socket"))
            if may_be_foreign(uids, self.owners):
                raise ConnectionRefusedError(f"the port {describe_owner(uids)}: the run's token was not shown to it")
        await super().handshake(*given, **options)


Made = TypeVar("Made", bound=PortConnection)


async def dial(way: Way, path: str, made: type[Made], **options: Any) -> Made:
    """Open a WebSocket to a control port, and return the connection.

    The token is in the request, which is sent only after the checks of ``way`` and
    ``made``.

    :param way: endpoint, TLS context and headers: see :mod:`replicas.trust.way`.
    :param path: path of the URL, such as ``/session``.
    :param made: the class of the connection.
    :param options: further options of websockets' ``connect``.
    :raises replicas.errors.UsageError: the port has another key, or no TLS.
    :raises OSError, websockets.exceptions.WebSocketException: the connection failed.
    """
    host = way.host if way.context is not None else None
    try:
        found = await connect(
            way.url(path),
            additional_headers=way.headers,
            ssl=way.context,
            server_hostname=host,
            create_connection=made,
            **_OPTIONS,
            **options,
        )
    except ssl.SSLError as error:
        raise way.refusal(error) or error from error
    return cast("Made", found)


async def dial_socket(sock: socket.socket, path: str, **options: Any) -> ClientConnection:
    """Open a WebSocket to ``path`` over a connected Unix socket, and return it.

    No token is shown: the server identifies this user by the kernel's SO_PEERCRED.

    :param options: further options of websockets' ``connect``.
    :raises OSError, websockets.exceptions.WebSocketException: the connection failed.
    """
    return await connect(f"ws://run{path}", sock=sock, **_OPTIONS, **options)

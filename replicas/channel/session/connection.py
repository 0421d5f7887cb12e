"""A connection to a coordinator: a WebSocket, or queues if it is in this process.

Nothing is sent before the kernel has named the owner of the port (on this machine), and
no token before TLS has shown that the port has the key that the token names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from replicas.common.logs import Log
from replicas.trust.dial import CLOSE_TIMEOUT_S as CLOSE_TIMEOUT_S
from replicas.trust.dial import PortConnection
from replicas.trust.dial import dial as dial_port
from replicas.trust.way import way_to

_quiet = Log("replicas.channel.websocket")
_quiet.setLevel(logging.ERROR)

MAX_FRAME_NBYTES = 256 << 20


class FrameConnection(Protocol):
    """A connection between a member and the coordinator, for whole frames (messages).

    They arrive in order, each once.

    :ivar fd: a descriptor that a forked child must not keep open, or -1.
    """

    @property
    def fd(self) -> int:
        """The socket's descriptor; -1 if the coordinator is in this process."""

    @property
    def heard(self) -> float:
        """Time of the last received byte, by ``time.monotonic()``."""

    async def send(self, message: bytes, /) -> None:
        """Send one frame; wait while the connection takes no more bytes.

        :raises OSError, websockets.exceptions.WebSocketException: the connection has
            ended.
        """

    async def recv(self) -> str | bytes:
        """Wait for the next frame, and return it.

        :raises OSError, websockets.exceptions.WebSocketException: the connection has
            ended.
        """

    async def close(self) -> None:
        """Close the connection in order: send a close frame, and await the answer."""

    def abort(self) -> None:
        """Drop the connection immediately, without a closing handshake."""


in_process: dict[str, Callable[[str], FrameConnection]] = {}
"""Coordinators in this process, by endpoint: functions from a token to a connection
(:mod:`replicas.testing`)."""


class _Socket(PortConnection):
    """A connection that records the time of the last received byte."""

    heard = 0.0
    fd = -1

    def data_received(self, data: bytes) -> None:
        """Record the time of received bytes, and pass them to the protocol."""
        self.heard = time.monotonic()
        super().data_received(data)

    def abort(self) -> None:
        """Drop the TCP connection without a closing handshake."""
        self.transport.abort()


async def dial(
    endpoint: str, token: str, reached: Callable[[], None], token_owners: frozenset[int] | None
) -> FrameConnection:
    """Connect to the coordinator at ``endpoint``: by WebSocket, or within this process.

    It has no time limit of its own. The caller closes the connection.

    :param token: the join token.
    :param reached: called on this event loop when TCP has connected, before the HTTP
        handshake, so that the caller can allow more time.
    :param token_owners: numeric ids of the users of this machine who may own the port,
        and so see the token; None allows all.
    :returns: the open connection, before any message of the session.
    :raises replicas.errors.UsageError: the token does not identify the port's key, or
        the port has another key, or no TLS.
    :raises OSError, websockets.exceptions.WebSocketException: the connection or the
        handshake failed.
    """
    if endpoint in in_process:
        return in_process[endpoint](token)

    class Socket(_Socket):
        owners = token_owners

        def __init__(self, *arguments: Any, **options: Any) -> None:  # asyncio makes it when TCP has connected
            """Call ``reached``: asyncio makes this object when TCP has connected."""
            reached()
            super().__init__(*arguments, **options)

    way = way_to(endpoint, token)
    connection = await dial_port(way, "/session", Socket, open_timeout=None, max_size=MAX_FRAME_NBYTES, logger=_quiet)
    connection.fd = connection.transport.get_extra_info("socket").fileno()
    return connection

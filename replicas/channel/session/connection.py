"""A connection to a coordinator: a WebSocket, or memory if it is in this process.

Nothing is sent before the kernel was asked whose port it is (on this machine), and no
token before TLS has shown that the port has the key that the token names.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from websockets.asyncio.client import ClientConnection, connect

from replicas.common.logs import Log
from replicas.linux.sockets import listener_uids, whose
from replicas.trust.tls import SecureConnection, Tls
from replicas.trust.way import Way, way_to

_quiet = Log("replicas.channel.websocket")
_quiet.setLevel(logging.ERROR)

CLOSE_TIMEOUT_S = 1.0
MAX_FRAME_NBYTES = 256 << 20


class Connection(Protocol):
    """Whole frames, in order, each once.

    :ivar fd: a descriptor that a forked child must not keep open; -1: none.
    """

    @property
    def fd(self) -> int: ...

    @property
    def heard(self) -> float:
        """When the last byte came, by ``time.monotonic()``."""

    async def send(self, message: bytes, /) -> None: ...

    async def recv(self) -> str | bytes: ...

    async def close(self) -> None: ...

    def abort(self) -> None: ...


in_process: dict[str, Callable[[str], Connection]] = {}
"""By endpoint: opens a connection to a coordinator in this process, given a token
(:mod:`replicas.testing`)."""


class _Socket(ClientConnection):
    """A connection that records when a byte came, and checks the port's owner and
    key."""

    heard = 0.0
    fd = -1
    token_owners: frozenset[int] | None = None
    way: Way
    _secure: SecureConnection | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        below = cast("asyncio.Transport", transport)
        if self.way.context is not None:
            self._secure = SecureConnection(self, Tls(self.way.context, self.way.host), quiet=True)
            below.set_protocol(self._secure)
            self._secure.connection_made(below)
            below = self._secure.transport
        super().connection_made(below)

    async def handshake(self, *arguments: Any, **options: Any) -> None:
        """Refuse a port that another user took while it was free, then shake hands."""
        if self.token_owners is not None:
            uids = listener_uids(self.transport.get_extra_info("socket"))
            if uids is not None and not (uids and uids <= self.token_owners):
                raise ConnectionRefusedError(f"the port {whose(uids)}: the run's token was not shown to it")
        if self._secure is not None:
            self._secure.start()
            await self._secure.shaken
        await super().handshake(*arguments, **options)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        super().data_received(data)

    def abort(self) -> None:
        self.transport.abort()


async def dial(
    endpoint: str, token: str, reached: Callable[[], None], token_owners: frozenset[int] | None
) -> Connection:
    """Connect to the coordinator at ``endpoint``.

    :param reached: called when TCP has connected, before the HTTP handshake.
    :param token: the join token. :param token_owners: users here who may see it; None:
        all.
    :raises replicas.errors.UsageError: the token does not say how to know the right
        port, or the port has another key, or no TLS.
    :raises OSError, websockets.exceptions.WebSocketException: it did not answer so.
    """
    if endpoint in in_process:
        return in_process[endpoint](token)
    way = way_to(endpoint, token)

    def made(*arguments: Any, **options: Any) -> _Socket:
        reached()
        socket = _Socket(*arguments, **options)
        socket.token_owners, socket.way = token_owners, way
        return socket

    try:
        found = await _connected(way, made)
    except ssl.SSLError as error:
        raise way.refusal(error) or error from error
    connection = cast("_Socket", found)
    connection.fd = connection.transport.get_extra_info("socket").fileno()
    return connection


async def _connected(way: Way, made: Callable[..., _Socket]) -> ClientConnection:
    return await connect(
        f"ws://{way.endpoint}/session",
        additional_headers=way.headers,
        compression=None,
        proxy=None,
        open_timeout=None,
        close_timeout=CLOSE_TIMEOUT_S,
        ping_interval=None,
        max_size=MAX_FRAME_NBYTES,
        logger=_quiet,
        user_agent_header=None,
        create_connection=made,  # type: ignore[arg-type]  # a factory works as well as the class
    )

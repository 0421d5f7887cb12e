"""A connection to a coordinator: a WebSocket, or memory if it is in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from websockets.asyncio.client import ClientConnection, connect

from replicas.linux.sockets import listener_uids, whose

__all__ = ["CLOSE_TIMEOUT_S", "Connection", "dial", "in_process"]

_quiet = logging.getLogger("replicas.channel.websocket")
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
    """A connection that records when a byte came, and checks the port's owner."""

    heard = 0.0
    fd = -1
    token_owners: frozenset[int] | None = None

    async def handshake(self, *arguments: Any, **options: Any) -> None:
        """Refuse a port that another user took while it was free, then shake hands."""
        if self.token_owners is not None:
            uids = listener_uids(self.transport.get_extra_info("socket"))
            if uids is not None and not (uids and uids <= self.token_owners):
                raise ConnectionRefusedError(f"the port {whose(uids)}: the run's token was not shown to it")
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
    :param token_owners: users here who may see the token; None: all.
    :raises OSError, websockets.exceptions.WebSocketException: it did not answer so.
    """
    if endpoint in in_process:
        return in_process[endpoint](token)

    def made(*arguments: Any, **options: Any) -> _Socket:
        reached()
        socket = _Socket(*arguments, **options)
        socket.token_owners = token_owners
        return socket

    found = await connect(
        f"ws://{endpoint}/session",
        additional_headers={"Authorization": f"Bearer {token}"},
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
    connection = cast("_Socket", found)
    connection.fd = connection.transport.get_extra_info("socket").fileno()
    return connection

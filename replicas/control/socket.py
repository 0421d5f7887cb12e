"""The run's Unix socket, through which its own user gives orders.

Three protections, each sufficient: the file's mode is 0600 from the moment it exists
(set on the socket *before* bind, which avoids changing the process's umask); the kernel
names the user that connects (SO_PEERCRED), and only our own user and root are served;
and the file is in the run's state folder. The socket serves the same pages as the
control port, where orders need the token, and has the limits of clients with a token.

A longer path than a Unix socket's 107 bytes is reached through a descriptor of its
folder (:func:`replicas.linux.sockets.reachable`), so no shared folder is needed.

The file of an earlier, killed supervisor is replaced only if no process listens on it:
another run's config may name the same path, and its socket must survive. At the end our
file is removed, unless another file has replaced it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from starlette.routing import BaseRoute

from replicas import errors
from replicas.coordinator.addresses import AllowedHosts
from replicas.coordinator.port_connections import PortRules
from replicas.coordinator.server import Server
from replicas.linux.sockets import is_own, listens, peer_uid, reachable

SOCKET_FILE = "control.sock"
_BACKLOG = 64
_REFUSAL = b'{"done":false,"error":{"kind":"UsageError","message":"this socket is for its own user"}}'
_FORBIDDEN = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_REFUSAL), _REFUSAL)  # a client that still sends gets a reset, not an end
)


class ControlSocket:
    """Serves routes on a Unix socket for the duration of an ``async with`` block.

    :param path: absolute path of the socket.
    :param refused: called with the reason for each connection that is turned away.
    """

    def __init__(self, path: Path, routes: Sequence[BaseRoute], refused: Callable[[str], None]) -> None:
        """Keep the path and the routes; create no socket before entering.

        :param path: absolute path of the socket.
        :param refused: called on the loop, with the reason, for each connection that is
            turned away.
        """
        self.path = path
        self._routes = routes
        self._refused = refused
        self._server: Server | None = None
        self._inode: tuple[int, int] | None = None

    async def __aenter__(self) -> Self:
        """Create the socket's file, serve on the running loop, and return this object.

        :raises WorldError: the file cannot be created, or another process serves there.
        """
        listener = self._listen()
        rules = PortRules(self._refused, lambda _: True, AllowedHosts("localhost", ""))
        self._server = Server(listener, self._routes, rules, turns_away=self._turns_away)
        try:
            self._server.start()
        except BaseException:
            listener.close()
            self._remove()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server and its connections, and remove the socket's file."""
        if self._server is not None:
            await self._server.aclose()
        self._remove()

    def _turns_away(self, transport: asyncio.Transport) -> bytes:
        """Return the HTTP response with which another user's process is refused, and
        report it to ``refused``. Return b"" for a process of our user or of root, which
        is served."""
        if peer_uid(transport.get_extra_info("socket")) in (os.geteuid(), 0):
            return b""
        self._refused("peer")
        return _FORBIDDEN

    def _listen(self) -> socket.socket:
        """Remove the file of a socket on which no process listens, and return a new
        listening socket in its place. Raise WorldError if the path is in use or cannot
        be bound."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(self.path.lstat().st_mode):
                    raise OSError(0, "another kind of file is in its place")
                if not is_own(self.path):
                    raise OSError(0, "another user's socket is in its place")
                if listens(self.path):
                    raise OSError(0, "another process listens on it")
                self.path.unlink()
            os.fchmod(listener.fileno(), 0o600)
            with reachable(self.path) as name:
                listener.bind(name)
            found = self.path.lstat()
            self._inode = (found.st_dev, found.st_ino)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise errors.WorldError(
                f"control: cannot make the socket {self.path}: {error.strerror}",
                hint="name another path with control.socket in the config",
            ) from error
        listener.setblocking(False)
        return listener

    def _remove(self) -> None:
        """Remove the file of the socket, unless another file has replaced it."""
        with contextlib.suppress(OSError):  # the folder may have been deleted
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self._inode:
                self.path.unlink()

"""Unix sockets of this machine: who is at the other end, and the door of a sidecar forkserver. Standard library only.

The kernel tells who has connected, and who listens (SO_PEERCRED). Both ends ask it before a byte or a descriptor is sent:
an abstract socket has no mode, and everyone in the network namespace sees its name in ``/proc/net/unix``.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

__all__ = ["Door", "peer_uid"]

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 4096
"""Clients wait here while a forkserver loads torch, beside strangers whom it has not turned away yet; the kernel's bound
(``net.core.somaxconn``) is the same.
"""


def peer_uid(connection: socket.socket) -> int:
    """Effective user of the process at the other end: of the one that connected, or that listens."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


class Door(NamedTuple):
    """Where a forkserver listens, as ``NAME:SECRET`` in the environment of those whom it serves.

    :param name: of the abstract socket, without the NUL. It is bound before anybody is told of it, so that nobody else can.
    :param secret: what a client shows first. The user alone does not tell root in one container from root in another one
        on the same network; those two do not see each other's environment.
    """

    name: str
    secret: str = ""

    @classmethod
    def parse(cls, text: str) -> Door:
        name, _, secret = text.partition(":")
        return cls(name, secret)

    def __str__(self) -> str:
        return f"{self.name}:{self.secret}" if self.secret else self.name

    def listen(self) -> socket.socket:
        """Bind it; whoever connects waits until somebody accepts.

        :raises OSError: the name is taken.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind("\0" + self.name)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            what = f"the forkserver's socket {self.name!r} cannot be bound: {os.strerror(error.errno or 0)}"
            raise OSError(error.errno, what) from error
        return listener

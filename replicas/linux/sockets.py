"""Sockets of this machine: who is at the other end, long paths, and the door of a
sidecar forkserver.

The kernel tells who has connected, and who listens (SO_PEERCRED). Both ends ask it
before a byte or a descriptor is sent: an abstract socket has no mode, and everyone in
the network namespace sees its name in ``/proc/net/unix``. Of a TCP port of this machine
the kernel tells whose process listens on it (``/proc/net/tcp``).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["SocketAddress", "is_own", "listener_uids", "listens", "peer_uid", "reachable", "whose"]

_CREDENTIALS = struct.Struct("3i")
_LISTENS = "0A"
_PATH_NBYTES = 107
_BACKLOG = 4096
"""Clients wait here while a forkserver loads torch, beside strangers whom it has not
turned away yet; the kernel's bound (``net.core.somaxconn``) is the same.
"""


def peer_uid(connection: socket.socket) -> int:
    """Effective user of the process at the other end: of the one that connected, or
    that listens."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def listener_uids(connection: socket.socket) -> frozenset[int] | None:
    """Users of the processes that listen where this TCP connection of ours leads to;
    None: that is on another machine.

    Nobody, where it is passed on from here to somewhere else. Ask with the connection
    open: whoever listens now has taken it, or does not listen any more.
    """
    own, peer = (_address(name()[0]) for name in (connection.getsockname, connection.getpeername))
    if not peer.is_loopback and own != peer:
        return None
    found = _listeners(connection.getpeername()[1])
    for address in (peer, ipaddress.IPv4Address(0), ipaddress.IPv6Address(0)):  # as the kernel chooses
        uids = frozenset(uid for where, uid in found if where == address)
        if uids:
            return uids
    return frozenset()


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(text.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def _listeners(port: int) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    found = []
    for table in ("tcp", "tcp6"):
        try:
            with Path(f"/proc/self/net/{table}").open() as lines:
                next(lines)
                for (
                    line
                ) in lines:  # the kernel makes them as they are read: those that listen first, of others there are many
                    _, local, _, state, _, _, _, uid = line.split()[:8]
                    if state != _LISTENS:
                        break
                    address, _, number = local.partition(":")
                    if int(number, 16) == port:
                        found.append((_unpacked(address), int(uid)))
        except FileNotFoundError:  # a kernel without IPv6
            continue
    return found


def _unpacked(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel prints it: words of 32 bits, each in the machine's
    order."""
    words = (int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8))
    return _address(str(ipaddress.ip_address(b"".join(words))))


def whose(uids: frozenset[int]) -> str:
    """Whose port or socket it is, for a sentence about it."""
    if not uids:
        return "is a port on which no process of this machine listens"
    return f"is of user {', '.join(map(str, sorted(uids)))}"


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A name for the socket ``path`` that is short enough for the kernel, valid inside
    the block.

    :raises OSError: its folder is not there.
    """
    if len(os.fsencode(path)) <= _PATH_NBYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def is_own(path: Path) -> bool:
    """Whether there is a socket of this user.

    :raises OSError: there is nothing.
    """
    found = path.lstat()
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def listens(path: Path) -> bool:
    """Whether a process listens on the socket ``path``; also one that is frozen. Never
    blocks.

    :raises OSError: it cannot be told, such as for the socket of another user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            with reachable(path) as name:
                probe.connect(name)
        except BlockingIOError:  # more wait there than it lets wait
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


class SocketAddress(NamedTuple):
    """Where a forkserver listens, as ``NAME:SECRET`` in the environment of those whom
    it serves.

    :param name: of the abstract socket, without the NUL. It is bound before anybody is
        told of it, so that nobody else can.
    :param secret: what a client shows first. The user alone does not tell root in one
        container from root in another one on the same network; those two do not see
        each other's environment.
    """

    name: str
    secret: str = ""

    @classmethod
    def parse(cls, text: str) -> SocketAddress:
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

"""Local sockets: identify the peer's user, connect to long paths, forkserver addresses.

SO_PEERCRED is the user of the process that connected or listens. Both ends check it
before they send a byte or a descriptor: an abstract socket has no mode, and every
process in the network namespace sees its name in ``/proc/net/unix``. For a TCP port of
this machine, ``/proc/net/tcp`` has the user of the listening process.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from replicas.linux.processes import command_line, descriptors, processes

_CREDENTIALS = struct.Struct("3i")
_ROUND_TRIP = struct.Struct("<68xI")
"""``tcpi_rtt`` of Linux's ``struct tcp_info``, in microseconds."""
_LISTENS = "0A"
_PATH_NBYTES = 107
_BACKLOG = 4096
"""Room for clients that wait while a forkserver loads torch, and for connections of
others that it has not rejected yet. Equals the kernel's ``net.core.somaxconn``."""


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket's connection.

    For a client that is the process that listens.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def tcp_socket(address: str) -> socket.socket:
    """Return a new, unconnected TCP socket of the address's family, IPv4 or IPv6."""
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


def round_trip_s(connection: socket.socket) -> float:
    """Return the kernel's smoothed round-trip time of a TCP connection, in seconds.

    It sends nothing. Return 0 if the socket is closed, or not a TCP one.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
        return float(_ROUND_TRIP.unpack(info)[0]) / 1e6
    except (OSError, struct.error):  # the socket is closed
        return 0.0


def listener_uids(connection: socket.socket) -> frozenset[int] | None:
    """Return the uids of the local processes that listen at a connection's peer.

    Return None if the peer is on another machine, and an empty set if no local process
    listens, as when the port is forwarded.

    The kernel does not tell which process accepted the connection, only which listen at
    the port now. Call this while the connection is open: the process that accepted it
    is then one of these, or has stopped listening.

    :param connection: a TCP connection of this process.
    """
    own, peer = (_address(name()[0]) for name in (connection.getsockname, connection.getpeername))
    if not peer.is_loopback and own != peer:  # one's own address is on this machine, too
        return None
    port = connection.getpeername()[1]
    found = {(_address(one.address), uid) for one, uid in listeners() if one.port == port}
    for address in (peer, ipaddress.IPv4Address(0), ipaddress.IPv6Address(0)):  # in the kernel's order
        uids = frozenset(uid for where, uid in found if where == address)
        if uids:
            return uids
    return frozenset()


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IP address in ``text`` without its zone (``%eth0``).

    An IPv4-mapped IPv6 address is returned as IPv4.
    """
    found = ipaddress.ip_address(text.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


class Listener(NamedTuple):
    """A listening TCP socket; ``inode`` distinguishes sockets on the same port."""

    address: str
    port: int
    inode: int


def listeners() -> Iterator[tuple[Listener, int]]:
    """Yield (socket, uid of its owner) for each TCP socket that listens here.

    "Here" is this network namespace. Reads ``/proc/self/net``.
    """
    for table in ("tcp", "tcp6"):
        try:
            with Path(f"/proc/self/net/{table}").open(encoding="ascii", errors="replace") as lines:
                next(lines)
                for line in lines:  # generated as they are read, listeners first: skip the many others
                    _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
                    if state != _LISTENS:
                        break
                    words, _, port = local.partition(":")  # 32-bit words in native byte order
                    numbers = (int(words[at : at + 8], 16) for at in range(0, len(words), 8))
                    packed = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
                    yield Listener(str(ipaddress.ip_address(packed)), int(port, 16), int(inode)), int(uid)
        except (FileNotFoundError, PermissionError):  # no IPv6, or a sandbox that does not show it
            continue


def holder(inode: int) -> str:
    """Return a text for the first process found with this socket: "process 12 (vllm)".

    :param inode: the socket's inode; if no process is found, the text says so.
    """
    for pid in processes():
        if f"socket:[{inode}]" in descriptors(pid):
            return f"process {pid} ({command_line(pid) or 'gone'})"
    return "a process that has just ended, or is not visible (another user's, or in another container)"


def why_not(error: OSError, port: int) -> str:
    """Return a text for the error of a bind; if the port is in use, with its users.

    These are the visible processes that listen on it.

    :param error: of the bind. :param port: the port that was wanted.
    """
    found = {holder(one.inode) for one, _ in listeners() if one.port == port} if error.errno == errno.EADDRINUSE else ()
    return f"{error.strerror}{' by ' if found else ''}{', '.join(sorted(found))}"


def may_be_foreign(uids: frozenset[int] | None, owners: frozenset[int] | None) -> bool:
    """Return True if a port with these listeners may belong to others than ``owners``.

    Return True also if no process of this machine listens on the port, and False if the
    port is on another machine, whose users cannot be checked.

    :param uids: the result of :func:`listener_uids`.
    :param owners: uids that are allowed; None allows all users.
    """
    return uids is not None and owners is not None and not (uids and uids <= owners)


def describe_owner(uids: frozenset[int] | None) -> str:
    """Return a clause for an error about a port, such as "is of user 1000".

    :param uids: the result of :func:`listener_uids`.
    """
    if not uids:
        return "is a port on which no process of this machine listens"
    return f"is of user {', '.join(map(str, sorted(uids)))}"


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Context manager: yield a name of at most 107 bytes for a Unix socket's ``path``.

    A longer path is reached through a descriptor of its folder, open during the block.
    """
    if len(os.fsencode(path)) <= _PATH_NBYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"  # short even for a long path
    finally:
        os.close(folder)


def is_own(path: Path) -> bool:
    """Return True if there is a Unix socket of this user at the path, not a link.

    :raises OSError: there is nothing at the path.
    """
    found = path.lstat()
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def listens(path: Path) -> bool:
    """Return True if a process, even a frozen one, listens on the Unix socket ``path``.

    Return False if none does, or nothing is at the path. Tries a connection, and never
    blocks.

    :raises OSError: it cannot be determined, as for the socket of another user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            with reachable(path) as name:
                probe.connect(name)
        except BlockingIOError:  # its backlog is full
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


class SocketAddress(NamedTuple):
    """Address of an abstract Unix socket of this library, as text ``NAME:SECRET``.

    It is of a forkserver, or of a process that hands out memory; clients get it.

    :param name: name of the abstract socket, without the NUL. It is bound before any
        client learns it, so no other process can bind it.
    :param secret: authenticates a client. The user id alone does not distinguish root
        in one container from root in another container on the same network; those two
        do not see each other's environment.
    """

    name: str
    secret: str = ""

    @classmethod
    def parse(cls, text: str) -> SocketAddress:
        """Return the address from its text, ``NAME`` or ``NAME:SECRET``."""
        name, _, secret = text.partition(":")
        return cls(name, secret)

    def __str__(self) -> str:
        return f"{self.name}:{self.secret}" if self.secret else self.name

    def listen(self) -> socket.socket:
        """Return a new socket (SOCK_SEQPACKET) that listens at the address.

        It checks no secret: the caller must.

        :raises OSError: the address cannot be bound.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps messages whole
        try:
            listener.bind("\0" + self.name)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            what = f"the socket {self.name!r} cannot be bound: {os.strerror(error.errno or 0)}"
            raise OSError(error.errno, what) from error
        return listener

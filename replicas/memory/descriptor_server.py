"""A door: a socket at which processes of other pid namespaces fetch descriptors.

Theory of operation
===================

Mostly a process opens another process's memory as ``/proc/PID/fd/FD``, which needs a
common pid namespace and read permission (but no ``ptrace``, ``pidfd_getfd`` or
``process_vm_readv``). Containers of one machine have their own pid namespaces.
Therefore each process with a beacon also has a *door*: an abstract Unix socket, served
by a thread. A client names a descriptor, and gets a new read-only file description of
that file (``SCM_RIGHTS``): with its own locks, and mapped at full speed. A door gives
away memfds only.

An abstract socket belongs to a network namespace, and disappears with its process. So
containers share memory if they share the pid or the network namespace.

**Authentication.** Both ends check that the peer has the same user, and prove that they
know the door's secret, which travels only in messages of the run's coordinator: root in
one container is not root in another, and after a process has died another one may bind
its name. A door has at most :data:`CLIENTS` connections, and closes one that has not
asked within :data:`PATIENCE_S`. A client waits at most :data:`ANSWER_S`, and never on a
thread that must not block.

A client keeps one connection to each door that it has used, and so learns that the
process has ended (:func:`is_open`).
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

from replicas.linux.files import open_plain
from replicas.linux.sockets import SocketAddress, peer_uid

CLIENTS = 1024
"""Most connections: one for each process of the host that reads this memory."""
PATIENCE_S = 5.0
"""How long a connection may last without a request."""
ANSWER_S = 2.0
"""How long a client waits, as the process may be frozen."""

_SCARCE_S = 0.1
"""Pause after a client could not be accepted; the client waits."""
_CHALLENGE_NBYTES = 16
_REQUEST = struct.Struct("<qqq")  # descriptor, inode and size; -1 means any
_MAC_NBYTES = 32
_GIVEN, _NOT_THERE = b"\1", b"\0"
_MESSAGE_NBYTES = 256


class DescriptorServer:
    """This process's door: a socket at which other containers fetch descriptors.

    A thread serves it until the process ends.
    """

    def __init__(self) -> None:
        """Bind the socket, and start the daemon thread that serves it.

        :raises OSError: no socket is left.
        :raises RuntimeError: no thread can be started.
        """
        self.address = SocketAddress(f"replicas-door-{secrets.token_hex(8)}", secrets.token_hex(16))
        self._clients: dict[socket.socket, _Client] = {}
        self._socket = self.address.listen()
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        try:
            threading.Thread(target=self._serve, name="replicas door", daemon=True).start()
        except RuntimeError:
            self.close_after_fork()
            raise
        os.register_at_fork(after_in_child=self.close_after_fork)

    def close_after_fork(self) -> None:
        """Close the socket and its clients' connections.

        Called in a forked child, where no thread serves them; the parent's stay open.
        """
        self._selector.close()
        for one in (self._socket, *self._clients):
            one.close()
        self._clients.clear()

    def _serve(self) -> None:
        """Accept and answer clients until the process ends, on the server's own thread.

        Close connections that send no request within 5 s.
        """
        while True:
            waiting = [client.until for client in self._clients.values() if not client.served]
            limit = max(0.0, min(waiting) - time.monotonic()) if waiting else None
            for key, _ in self._selector.select(limit):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    if key.fileobj is self._socket:
                        self._admit()
                    elif not self._answer(key.fileobj, self._clients[key.fileobj]):
                        self._drop(key.fileobj)
                except OSError:  # the client has gone, or this process has no descriptor left
                    if key.fileobj is not self._socket:
                        self._drop(key.fileobj)
                    else:
                        time.sleep(_SCARCE_S)
            now = time.monotonic()
            for one in [one for one, client in self._clients.items() if not client.served and client.until < now]:
                self._drop(one)

    def _admit(self) -> None:
        """Accept a connection, and send it a challenge (a nonce).

        Close it instead if it is of another user, or if there are 1,024 already.
        """
        one, _ = self._socket.accept()
        if len(self._clients) >= CLIENTS or peer_uid(one) != os.geteuid():
            one.close()
            return
        one.setblocking(False)
        client = self._clients[one] = _Client()
        self._selector.register(one, selectors.EVENT_READ)
        one.send(client.challenge)

    def _answer(self, one: socket.socket, client: _Client) -> bool:
        """Answer one request with a descriptor, or that it is not there.

        Return False if the connection is to be closed: the request is malformed, or
        does not prove the secret.

        :param one: the connection, which has bytes to read.
        :param client: its state.
        """
        message = one.recv(_MESSAGE_NBYTES)
        theirs, mac, request = _split(message)
        if len(request) != _REQUEST.size or not _proves(mac, self.address, b"ask", client.challenge, theirs, request):
            return False
        number, inode, nbytes = (value if value >= 0 else None for value in _REQUEST.unpack(request))
        client.served = True
        try:
            fd = open_plain(os.getpid(), -1 if number is None else number, inode=inode, nbytes=nbytes)
        except FileNotFoundError:
            one.send(_mac(self.address, b"give", theirs, client.challenge, request, _NOT_THERE) + _NOT_THERE)
            return True
        try:
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # raises OSError if fd is not a memfd
            reply = _mac(self.address, b"give", theirs, client.challenge, request, _GIVEN) + _GIVEN
            socket.send_fds(one, [reply], [fd])
        finally:
            os.close(fd)
        return True

    def _drop(self, one: socket.socket) -> None:
        """Close a client's connection, and no longer watch or remember it."""
        del self._clients[one]
        self._selector.unregister(one)
        one.close()


@dataclass(eq=False)
class _Client:
    """A connected client.

    :ivar challenge: nonce that its request must include.
    :ivar until: deadline of the first request, by ``time.monotonic()``.
    :ivar served: it has proven that it knows the secret.
    """

    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(_CHALLENGE_NBYTES))
    until: float = field(default_factory=lambda: time.monotonic() + PATIENCE_S)
    served: bool = False


_open: dict[str, int] = {}
_lock = threading.Lock()


def fetch(door: str, fd: int, *, inode: int = -1, nbytes: int = -1) -> int:
    """Return a new read-only descriptor of a file that another process has open.

    Ask at that process's door (its socket); block for 2 s at most. The caller closes
    the descriptor. The connection stays open, for :func:`is_open`.

    :param door: address and secret of the process's socket.
    :param fd: the descriptor's number in that process.
    :param inode: the inode that the file must have; -1: any.
    :param nbytes: the size that it must have; -1: any.
    :raises FileNotFoundError: the descriptor is closed, or now of another file.
    :raises ConnectionError: this network namespace has no such door, or the peer hung
        up.
    :raises PermissionError: the peer is not the process, or of another user.
    :raises OSError: no answer in time (TimeoutError), or no descriptor left here.
    """
    address, deadline = SocketAddress.parse(door), time.monotonic() + ANSWER_S
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _within(one, deadline).connect("\0" + address.name)
        if peer_uid(one) != os.geteuid():
            raise PermissionError("the process with the memory is another user's")
        theirs = _within(one, deadline).recv(_MESSAGE_NBYTES)
        ours, request = secrets.token_bytes(16), _REQUEST.pack(fd, inode, nbytes)
        _within(one, deadline).send(ours + _mac(address, b"ask", theirs, ours, request) + request)
        reply, fds, flags, _ = socket.recv_fds(_within(one, deadline), _MESSAGE_NBYTES, 1)
        try:
            _check(address, reply, ours, theirs, request)
            if flags & socket.MSG_CTRUNC or (reply.endswith(_GIVEN) and not fds):
                raise OSError("no file descriptor is left in this process, or the system passes none on")
            if not fds:
                raise FileNotFoundError
            os.set_inheritable(fds[0], False)
        except BaseException:
            for received in fds:
                os.close(received)
            raise
    except BaseException:
        one.close()
        raise
    _keep(door, one.detach())
    return fds[0]


def _within(one: socket.socket, deadline: float) -> socket.socket:
    """Set the socket's timeout to the time that is left until a deadline.

    Return the same socket, for the next call on it.

    :param deadline: by ``time.monotonic()``.
    :raises TimeoutError: the deadline has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the process with the memory does not answer in time")
    one.settimeout(left)
    return one


def is_open(door: str) -> bool:
    """Return True if :func:`fetch` has used this door, and its process still lives.

    If the process has ended, close the connection to it, and return False. It does not
    block.

    :param door: address and secret of the process's socket.
    """
    with _lock:
        one = _open.get(door)
        if one is None:
            return False
        if not _has_ended(one):
            return True
        os.close(_open.pop(door))
        return False


def _keep(door: str, one: int) -> None:
    """Store the connection to a process's door, by which :func:`is_open` sees its end.

    Close the earlier connection to this door, and those to processes that have ended.

    :param one: the connection's descriptor, owned here from now on.
    """
    with _lock:
        for known, other in list(_open.items()):
            if known == door or _has_ended(other):
                os.close(_open.pop(known))
        _open[door] = one


def _has_ended(one: int) -> bool:
    """Return True if the peer of a connection has closed it; do not block.

    :param one: descriptor of the connection, of which nothing is read.
    """
    waiting = select.poll()
    waiting.register(one, select.POLLIN | select.POLLHUP)
    return bool(waiting.poll(0))


def _check(address: SocketAddress, reply: bytes, ours: bytes, theirs: bytes, request: bytes) -> None:
    """Raise an error unless a reply comes from a process that knows the door's secret.

    :param address: the door: its name and secret.
    :param reply: a MAC and the status. The MAC covers both nonces, the request and the
        status.
    :param ours: this client's nonce.
    :param theirs: the server's nonce.
    :param request: the bytes that the client has sent.
    :raises PermissionError: the MAC is wrong.
    :raises ConnectionResetError: the reply is empty.
    """
    if not reply:
        raise ConnectionResetError("the process with the memory closed the connection")
    mac, status = reply[:_MAC_NBYTES], reply[_MAC_NBYTES:]
    if not _proves(mac, address, b"give", ours, theirs, request, status):
        raise PermissionError("the process with the memory did not prove who it is")


def _split(message: bytes) -> tuple[bytes, bytes, bytes]:
    """Split a client's message into (the client's nonce, MAC, request).

    Check nothing.
    """
    end = _CHALLENGE_NBYTES + _MAC_NBYTES
    return message[:_CHALLENGE_NBYTES], message[_CHALLENGE_NBYTES:end], message[end:]


def _mac(address: SocketAddress, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of the concatenated ``parts``, with the door's secret as
    key."""
    return hmac.digest(address.secret.encode(), b"".join(parts), "sha256")


def _proves(mac: bytes, address: SocketAddress, *parts: bytes) -> bool:
    """Return True if ``mac`` is the HMAC of these parts under the door's secret."""
    return hmac.compare_digest(mac, _mac(address, *parts))


def _after_fork_in_child() -> None:
    """Close this process's copies of the parent's connections to doors, after a
    fork."""
    global _lock  # a thread of the parent may have held it
    _lock = threading.Lock()
    for one in _open.values():
        os.close(one)
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

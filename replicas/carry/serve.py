"""Serve slots to pullers of other hosts: ranges of bytes, straight out of the slot.

Theory of operation
===================

A connection is of one transfer, proven before anything else
(:mod:`replicas.carry.greeting`), and has a thread of its own: all it does is wait, in
the kernel or for bytes. The puller asks for ranges, several at once; each is answered
in order, in pieces, each behind a head of 4 bytes::

    n > 0          n bytes of the range follow
    0              nothing is here yet: the range goes on when it is
    0xFFFFFFFF     the transfer is withdrawn; the connection ends

``sendfile`` copies nothing and holds no GIL. Bytes that are not here yet (a slot that
is packed, or pulled itself) are waited for; a sign of life goes out meanwhile, so that
a frozen server is told from one that waits.

What has not proven itself within :data:`PROOF_S` is closed, and at most
:data:`UNPROVEN` connections may be at that. A puller that reads nothing is cut by
TCP_USER_TIMEOUT, or when its transfer is withdrawn: then all its connections are shut
down, and :meth:`Server.withdraw` returns when none of their threads uses the slot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from replicas.carry import greeting
from replicas.carry.image import Image, Withdrawn

PROOF_S = 1.0
"""In which a connection must have proven the secret of its transfer."""
UNPROVEN = 64
"""Connections that may be at that; a further one is closed."""
SIGN_S = 0.5
"""Between two signs of life while nothing is here yet."""
SILENT_MS = 10_000
"""A puller whose machine acknowledges nothing for so long is gone."""
PIECE_NBYTES = 4 << 20
"""Bytes behind one head at most."""
ASK = struct.Struct("<QQ")
"""First byte of a range, and the one behind its last."""
HEAD = struct.Struct("<I")
OVER = 0xFFFFFFFF


@dataclass(eq=False)
class _Offered:
    image: Image
    secret: bytes
    connections: set[socket.socket] = field(default_factory=set)
    sent_nbytes: int = 0


class Server:
    """The images that this process serves at one listening socket. Thread-safe.

    :param started: starts a thread that runs the given function.
    """

    def __init__(self, listener: socket.socket, started: Callable[[Callable[[], None]], object]) -> None:
        self._listener = listener
        self._started = started
        self._offered: dict[int, _Offered] = {}
        self._unproven: set[socket.socket] = set()
        self._lock = threading.Condition()

    def offer(self, transfer: int, image: Image, secret: bytes) -> None:
        """Serve ``image`` to whoever knows ``secret``."""
        with self._lock:
            self._offered[transfer] = _Offered(image, secret)
            self._lock.notify_all()

    def withdraw(self, transfer: int, why: str) -> int:
        """Serve it no more; return the bytes sent. Nobody reads the slot afterwards.

        Its connections are shut down, which ends every wait of their threads.
        """
        with self._lock:
            found = self._offered.pop(transfer, None)
            if found is None:
                return 0
            found.image.withdraw(why)
            for sock in found.connections:
                with contextlib.suppress(OSError):  # it has ended by itself
                    sock.shutdown(socket.SHUT_RDWR)
            self._lock.wait_for(lambda: not found.connections)
            return found.sent_nbytes

    def accept(self) -> bool:
        """Take one connection of the listener, which has one; it gets a thread.

        False: this process has no descriptor or memory left, and the connection waits.
        """
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the others: it has gone
            return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
        with self._lock:
            refused = len(self._unproven) >= UNPROVEN
            if not refused:
                self._unproven.add(sock)
        if refused:
            sock.close()
        else:
            self._begin(sock)
        return True

    def _begin(self, sock: socket.socket) -> None:
        try:
            self._started(lambda: self._serve(sock))
        except RuntimeError:  # no thread is left: whoever dials does with fewer connections
            with self._lock:
                self._unproven.discard(sock)
            sock.close()

    def _serve(self, sock: socket.socket) -> None:
        found: _Offered | None = None
        try:
            with sock:
                found = self._proven(sock)
                if found is not None:
                    self._answer(sock, found)
        except (OSError, Withdrawn):  # the puller asks elsewhere, or nobody needs it any more
            pass
        finally:
            with self._lock:
                self._unproven.discard(sock)
                if found is not None:
                    found.connections.discard(sock)
                self._lock.notify_all()

    def _proven(self, sock: socket.socket) -> _Offered | None:
        sock.settimeout(PROOF_S)
        transfer = greeting.answer(sock, self._secret_of)
        with self._lock:
            self._unproven.discard(sock)
            found = self._offered.get(transfer)
            if found is not None:  # else it was withdrawn meanwhile
                found.connections.add(sock)
            return found

    def _secret_of(self, transfer: int) -> bytes | None:
        """Its secret; a puller may have been told a moment before this process was."""
        with self._lock:
            self._lock.wait_for(lambda: transfer in self._offered, PROOF_S)
            found = self._offered.get(transfer)
            return None if found is None else found.secret

    def _answer(self, sock: socket.socket, offered: _Offered) -> None:
        sock.settimeout(None)  # the puller may take its time; a dead one is noticed by the kernel
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        image = offered.image
        while True:
            start, end = ASK.unpack(greeting.read_exactly(sock, ASK.size))
            if not start < end <= image.nbytes:
                raise ConnectionError("it asks for bytes that the version has not")
            try:
                while start < end:
                    found = image.here(start, min(end, start + PIECE_NBYTES), SIGN_S)
                    if not found:
                        sock.sendall(HEAD.pack(0))
                        continue
                    self._send(sock, image, start, found)
                    start += found
                    offered.sent_nbytes += found  # by one thread of several: it is a sign of progress
            except Withdrawn:
                with contextlib.suppress(OSError):  # it may be shut down already
                    sock.send(HEAD.pack(OVER), socket.MSG_DONTWAIT)
                raise

    @staticmethod
    def _send(sock: socket.socket, image: Image, start: int, nbytes: int) -> None:
        sock.sendall(HEAD.pack(nbytes), socket.MSG_MORE)
        at, behind = image.offset + start, image.offset + start + nbytes
        while at < behind:
            sent = os.sendfile(sock.fileno(), image.fd, at, behind - at)
            if not sent:
                raise ConnectionError("the slot is shorter than its image")
            at += sent

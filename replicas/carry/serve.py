"""Serve slots to pullers of other hosts: ranges of bytes, straight out of the slot.

Theory of operation
===================

A connection is of one transfer, proven before anything else
(:mod:`replicas.carry.greeting`), and has a thread of its own: all it does is wait, in
the kernel or for bytes. The puller asks for ranges, several at once, or for the digests
of all blocks; each is answered in order, in pieces, each behind a head of 4 bytes::

    n > 0          n bytes of the answer follow
    0              nothing is here yet: the answer goes on when it is
    0xFFFFFFFE     a length of 4 bytes and a delta follow; length 0: bytes follow
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
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from replicas.carry import greeting
from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.differences import Deltas
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
ASK = struct.Struct("<cQQ")
"""What is asked for: a range's first byte, and the one behind its last; or 0 and 0."""
RANGE, DIGESTS, CHANGES = b"R", b"D", b"C"
"""A range's bytes; the digests of all blocks; a block, named by its range, as its
delta."""
HEAD = struct.Struct("<I")
OVER, DELTA_FOLLOWS = 0xFFFFFFFF, 0xFFFFFFFE
DELTA = struct.Struct("<II")
"""The head of a delta, and its length."""


@dataclass(eq=False)
class _Offered:
    image: Image
    secret: bytes
    deltas: Deltas
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

    def offer(self, transfer: int, image: Image, secret: bytes, deltas: Deltas | None = None) -> None:
        """Serve ``image`` to whoever knows ``secret``; ``deltas``: of its blocks."""
        with self._lock:
            self._offered[transfer] = _Offered(image, secret, deltas or Deltas(image.nbytes))
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

    def accept(self) -> None:
        """Take one connection of the listener, which has one; it gets a thread."""
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone, or this process has no descriptor left: the listener stays
            return
        with self._lock:
            refused = len(self._unproven) >= UNPROVEN
            if not refused:
                self._unproven.add(sock)
        if refused:
            sock.close()
        else:
            self._started(lambda: self._serve(sock))

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
        while True:
            kind, start, end = ASK.unpack(greeting.read_exactly(sock, ASK.size))
            try:
                if kind == DIGESTS:
                    self._send_digests(sock, offered.image)
                elif kind in (RANGE, CHANGES) and start < end <= offered.image.nbytes:
                    if kind == RANGE or not self._send_changes(sock, offered, start, end):
                        self._send_range(sock, offered, start, end)
                else:
                    raise ConnectionError("it asks for bytes that the version has not")
            except Withdrawn:
                with contextlib.suppress(OSError):  # it may be shut down already
                    sock.send(HEAD.pack(OVER), socket.MSG_DONTWAIT)
                raise

    def _send_range(self, sock: socket.socket, offered: _Offered, start: int, end: int) -> None:
        while start < end:
            found = offered.image.here(start, min(end, start + PIECE_NBYTES), SIGN_S)
            if not found:
                sock.sendall(HEAD.pack(0))
                continue
            self._send(sock, offered.image, start, found)
            start += found
            offered.sent_nbytes += found  # by one thread of several: it is a sign of progress

    @staticmethod
    def _send_changes(sock: socket.socket, offered: _Offered, start: int, end: int) -> bool:
        """Send a block as its delta; False: its bytes are to follow."""
        while offered.image.here(start, end, SIGN_S) < end - start:
            sock.sendall(HEAD.pack(0))
        found = offered.deltas.of(start // BLOCK_NBYTES) or b""
        sock.sendall(DELTA.pack(DELTA_FOLLOWS, len(found)) + found)
        offered.sent_nbytes += len(found)
        return bool(found)

    @staticmethod
    def _send_digests(sock: socket.socket, image: Image) -> None:
        """Digest the slot as it is now: it is asked for only where a digest differs."""
        digests = []
        for start in range(0, image.nbytes, BLOCK_NBYTES):
            end = min(image.nbytes, start + BLOCK_NBYTES)
            while image.here(start, end, SIGN_S) < end - start:
                sock.sendall(HEAD.pack(0))
            digests.append(xxhash.xxh3_128_digest(os.pread(image.fd, end - start, image.offset + start)))
        answer = b"".join(digests)
        sock.sendall(HEAD.pack(len(answer)) + answer)

    @staticmethod
    def _send(sock: socket.socket, image: Image, start: int, nbytes: int) -> None:
        sock.sendall(HEAD.pack(nbytes), socket.MSG_MORE)
        at, behind = image.offset + start, image.offset + start + nbytes
        while at < behind:
            sent = os.sendfile(sock.fileno(), image.fd, at, behind - at)
            if not sent:
                raise ConnectionError("the slot is shorter than its image")
            at += sent

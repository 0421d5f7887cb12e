"""Serve slots to pullers on other hosts: ranges of bytes, straight out of the slot.

Theory of operation
===================

A connection serves one transfer, after the handshake (:mod:`replicas.carry.greeting`),
on a thread of its own, which waits in the kernel or for bytes. The puller asks for
ranges, several at a time, or for the digests of all blocks. The server answers in
order, in pieces, each after a head of 4 bytes::

    n > 0          n bytes of the answer follow
    0              a sign of life: the next bytes are not in the slot yet
    0xFFFFFFFE     a length of 4 bytes and a delta follow; length 0: bytes follow
    0xFFFFFFFF     the transfer is withdrawn; the connection ends

``sendfile`` copies nothing and does not hold the GIL. While the server waits for bytes
(of a slot that is being packed or pulled) it sends signs of life, so that pullers can
tell a frozen server from a waiting one.

*Encrypted.* A connection that begins with a TLS handshake gets the slot's mapping,
record by record, also without the GIL. A transfer is served either over TLS or in plain
(:meth:`Server.offer`), and is unknown to pullers that ask in the other way.

*Strangers.* A connection that has not done its handshakes within :data:`PROOF_S` is
closed. At most :data:`UNPROVEN` connections may be unproven: a further one replaces the
oldest of the address that has most, preferably one that has not named a known transfer.
So a flood costs a bounded number of threads, and a puller, which needs milliseconds,
gets through.

A puller that reads nothing is cut by TCP_USER_TIMEOUT, or by the withdrawal of its
transfer: :meth:`Server.withdraw` shuts the connections down, and returns when none of
their threads uses the slot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from replicas.carry import greeting, tls
from replicas.carry.blocks import BLOCK_NBYTES, block_range
from replicas.carry.differences import Deltas
from replicas.carry.image import Image, Withdrawn
from replicas.linux.sockets import round_trip_s

PROOF_S = 2.0
"""Timeout of both handshakes of a connection, TLS and greeting."""
UNPROVEN = 128
"""Connections that may be in their handshakes."""
ROOM_S = 0.01
"""How long to wait before accepting, until threads of closed connections end."""
SIGN_S = 0.5
"""Interval of signs of life while bytes are missing."""
SILENT_MS = 10_000
"""A puller is gone if its machine acknowledges nothing for this time."""
FAR_S = 0.01
"""With a longer round trip a connection asks the kernel for BBR, as other algorithms
take each lost packet for a full link."""
AHEAD_S = 600.0
"""After a far puller asked for deltas, make them ahead of time for this long."""
PIECE_NBYTES = 4 << 20
"""Most bytes after one head."""
ASK = struct.Struct("<cQQ")
"""A request: its kind; first byte and end of a range, or 0 and 0."""
RANGE, DIGESTS, CHANGES = b"R", b"D", b"C"
"""A range's bytes; the digests of all blocks; the delta of the block in the range."""
HEAD = struct.Struct("<I")
OVER, DELTA_FOLLOWS = 0xFFFFFFFF, 0xFFFFFFFE
DELTA = struct.Struct("<II")
"""The head of a delta, and its length."""


@dataclass(eq=False)
class _Offered:
    """A served image, with the proven connections that read it."""

    image: Image
    secret: bytes
    deltas: Deltas
    encrypt: bool
    connections: set[socket.socket] = field(default_factory=set)
    sent_nbytes: int = 0


@dataclass(eq=False)
class _UnprovenConnection:
    """A connection in its handshakes.

    ``named``: it has named a transfer that is served. ``told``: offers have changed, or
    the connection was turned away.
    """

    sock: socket.socket
    source: str
    named: bool = False
    told: threading.Event = field(default_factory=threading.Event)


class Server:
    """The images (bytes of versions) that this process serves at one listening socket.
    Thread-safe.

    :param started: starts a thread that runs the given function.
    """

    def __init__(self, listener: socket.socket, started: Callable[[Callable[[], None]], object]) -> None:
        """Keep the listening socket; accept nothing before :meth:`accept` is called.

        The caller calls :meth:`accept` whenever a connection waits at the socket.

        :param listener: set to non-blocking by the caller.
        :param started: starts a thread that runs the given function.
        """
        self._listener = listener
        self._started = started
        self._offered: dict[int, _Offered] = {}
        self._guests: dict[_UnprovenConnection, None] = {}
        """Connections in their handshakes, the oldest first."""
        self._at_door = 0
        """Threads of these, and of those turned away that have not ended yet."""
        self._tls: ssl.SSLContext | None = None
        self._binding = b""
        self._ahead_until = 0.0
        """Until this time deltas are made ahead, as a far puller asked for some."""
        self._lock = threading.Condition()

    def certify(self, context: ssl.SSLContext, certificate_hash: str) -> None:
        """Accept TLS connections from now on, with the certificate of ``context``.

        Plain connections are still accepted, for transfers that are not encrypted.

        :param certificate_hash: the certificate's SHA-256, in hexadecimal. Both ends
            prove that they have seen the same one.
        """
        with self._lock:
            self._tls, self._binding = context, bytes.fromhex(certificate_hash)

    def offer(
        self, transfer: int, image: Image, secret: bytes, deltas: Deltas | None = None, *, encrypt: bool = False
    ) -> None:
        """Serve ``image`` to pullers that know ``secret``, until :meth:`withdraw`.

        :param transfer: the transfer's number, by which pullers name it; an earlier
            offer of that number is replaced.
        :param deltas: of its blocks, to send in place of bytes; None: send bytes only.
        :param encrypt: True: serve it over TLS only; False: without TLS only.
        """
        with self._lock:
            self._offered[transfer] = _Offered(image, secret, deltas or Deltas(image.nbytes), encrypt)
            for guest in self._guests:
                guest.told.set()
        if deltas is not None and time.monotonic() < self._ahead_until:
            with contextlib.suppress(RuntimeError):  # no more threads
                self._started(lambda: deltas.make_ahead(image))

    def withdraw(self, transfer: int, why: str) -> int:
        """Stop serving a transfer; return the bytes sent to all pullers.

        Shuts its connections down, and blocks until no thread reads the slot. Returns 0
        for a transfer that is not served.

        :param why: the reason, for threads that wait for its bytes.
        """
        with self._lock:
            found = self._offered.pop(transfer, None)
            if found is None:
                return 0
            found.image.withdraw(why)
            for sock in found.connections:
                tls.hang_up(sock)
            self._lock.wait_for(lambda: not found.connections)
            return found.sent_nbytes

    def accept(self) -> bool:
        """Accept one waiting connection, if there is room, and start its thread.

        Returns False if this process has no descriptor or memory left for it: the
        caller should pause. Returns True in all other cases, also if none was accepted.
        Waits 10 ms at most.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self._at_door < 2 * UNPROVEN, ROOM_S):
                return True  # the connection waits in the kernel
        try:
            sock, address = self._listener.accept()
        except OSError as error:  # for other errors: it has gone
            return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
        guest = _UnprovenConnection(sock, address[0])
        with self._lock:
            if len(self._guests) >= UNPROVEN:
                self._close_oldest_unproven()
            self._guests[guest] = None
            self._at_door += 1
        try:
            self._started(lambda: self._serve(guest))
        except RuntimeError:  # this process may have no more threads
            self._end_handshake(guest)
            sock.close()
        return True

    def _end_handshake(self, guest: _UnprovenConnection) -> None:
        """Remove a connection from those in their handshakes, and wake waiting threads.

        The connection is not closed.

        :param guest: the connection, whose handshakes are done or have failed.
        """
        with self._lock:
            self._guests.pop(guest, None)
            self._at_door -= 1
            self._lock.notify_all()

    def _close_oldest_unproven(self) -> None:
        """Shut down one connection that is still in its handshakes, to make room.

        It is the oldest one from the IP address that has most of them. Connections that
        have not named a served transfer go first. Its thread then closes the socket.
        There must be such a connection. The caller holds the lock.
        """
        guests = [guest for guest in self._guests if not guest.named] or [*self._guests]
        ((source, _),) = Counter(guest.source for guest in guests).most_common(1)
        guest = next(guest for guest in guests if guest.source == source)
        del self._guests[guest]
        guest.told.set()
        tls.hang_up(guest.sock)

    def _serve(self, guest: _UnprovenConnection) -> None:
        """A connection's thread: do the handshakes, answer requests until the
        connection or transfer ends, close the socket. Raises no error of it."""
        found: _Offered | None = None
        try:
            try:
                found = self._proven(guest)
            finally:
                self._end_handshake(guest)
            if found is not None:
                self._answer(guest.sock, found)
        except (OSError, Withdrawn):  # the puller asks another holder, or has ended
            pass
        finally:
            guest.sock.close()
            with self._lock:
                if found is not None:
                    found.connections.discard(guest.sock)
                self._lock.notify_all()

    def _proven(self, guest: _UnprovenConnection) -> _Offered | None:
        """Do the handshakes with a puller within 2 s; return the image to serve it.

        Returns None if the image was withdrawn meanwhile.

        :param guest: the new connection. Its socket is replaced if the puller uses TLS,
            and becomes one of the image's connections on success.
        :raises OSError: they failed, or took too long.
        """
        deadline = time.monotonic() + PROOF_S
        guest.sock.settimeout(PROOF_S)
        sealed = guest.sock.recv(1, socket.MSG_PEEK) == tls.HANDSHAKE
        if sealed:
            self._begin_tls(guest, deadline)
        transfer = greeting.prove_as_server(
            guest.sock,
            lambda number: self._secret_of(number, guest, deadline, sealed=sealed),
            self._binding if sealed else b"",
            deadline,
        )
        with self._lock:
            found = self._offered.get(transfer)
            if found is None or found.encrypt != sealed:  # it was withdrawn meanwhile
                return None
            found.connections.add(guest.sock)
            return found

    def _begin_tls(self, guest: _UnprovenConnection, deadline: float) -> None:
        """Replace the connection's socket by a TLS one, and do its handshake.

        :param deadline: of the monotonic clock.
        :raises UnknownSecret: no TLS is served here, or the connection was turned away.
        """
        with self._lock:
            if self._tls is None or guest not in self._guests:
                raise greeting.UnknownSecret("asks for TLS, which is not served here")
            guest.sock = sock = tls.wrap(guest.sock, self._tls, server_side=True)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.do_handshake()

    def _secret_of(self, transfer: int, guest: _UnprovenConnection, deadline: float, *, sealed: bool) -> bytes | None:
        """Return a transfer's secret, or None if it is not served.

        Blocks for a coming offer, until a bit before ``deadline`` (monotonic clock).

        :param guest: the connection, whose ``named`` is set if the transfer is served.
        :param sealed: the connection uses TLS. Return None if the transfer is served
            only the other way (without TLS, or over TLS).
        """
        while True:
            guest.told.clear()
            with self._lock:
                found = self._offered.get(transfer)
                if found is not None:
                    guest.named = True
                    return found.secret if found.encrypt == sealed else None
                if guest not in self._guests:  # it was turned away
                    return None
            if not guest.told.wait(deadline - time.monotonic() - PROOF_S / 4):  # in time to answer
                return None

    def _answer(self, sock: socket.socket, offered: _Offered) -> None:
        """Answer the puller's requests until OSError or Withdrawn ends the connection.

        Sends ranges of bytes, deltas of blocks, or the digests of all blocks. A wrong
        request raises ConnectionError, an OSError.
        """
        sock.settimeout(None)  # the kernel notices a dead puller
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        if far := round_trip_s(sock) > FAR_S:
            with contextlib.suppress(OSError):  # the kernel lacks BBR, or forbids it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        while True:
            kind, start, end = ASK.unpack(greeting.read_exactly(sock, ASK.size))
            try:
                if kind == DIGESTS:
                    self._send_digests(sock, offered.image)
                    continue
                if not start < end <= offered.image.nbytes or kind not in (RANGE, CHANGES):
                    raise ConnectionError("it asks for bytes that the version does not have")
                if kind == CHANGES:
                    # the delta is kept for all pullers, so it must be of a whole block
                    if (start, end) != block_range(start // BLOCK_NBYTES, offered.image.nbytes):
                        raise ConnectionError("it asks for the changes of less or more than a block")
                    self._ahead_until = time.monotonic() + AHEAD_S if far else self._ahead_until
                if kind == RANGE or not self._send_changes(sock, offered, start, end):
                    self._send_range(sock, offered, start, end)
            except Withdrawn:
                _send_withdrawn(sock)
                raise

    def _send_range(self, sock: socket.socket, offered: _Offered, start: int, end: int) -> None:
        """Send bytes ``start`` to ``end`` of the image, waiting for those that are
        missing.

        Signs of life go out meanwhile.

        :raises Withdrawn: the transfer has ended.
        """
        while start < end:
            found = offered.image.wait_for_bytes(start, min(end, start + PIECE_NBYTES), SIGN_S)
            if not found:
                sock.sendall(HEAD.pack(0))
                continue
            self._send(sock, offered.image, start, found)
            start += found
            offered.sent_nbytes += found  # not atomic: approximate

    @staticmethod
    def _send_changes(sock: socket.socket, offered: _Offered, start: int, end: int) -> bool:
        """Send a block's delta and return True, or send that its bytes follow.

        :param start: first byte of the block. ``end``: its end.
        :returns: False if the caller has to send the bytes.
        """
        number, found = start // BLOCK_NBYTES, b""
        _wait_for(sock, offered.image, start)  # a pulled delta is kept before this byte is marked
        if offered.deltas.may_have(number):
            _wait_for(sock, offered.image, end - 1)
            found = offered.deltas.get_delta(number) or b""
        sock.sendall(DELTA.pack(DELTA_FOLLOWS, len(found)) + found)
        offered.sent_nbytes += len(found)
        return bool(found)

    @staticmethod
    def _send_digests(sock: socket.socket, image: Image) -> None:
        """Send the digests of all blocks of the image, computed now from the slot.

        Block until all bytes are there; send signs of life meanwhile.

        :raises Withdrawn: the transfer has ended.
        """
        digests = []
        for start in range(0, image.nbytes, BLOCK_NBYTES):
            end = min(image.nbytes, start + BLOCK_NBYTES)
            _wait_for(sock, image, end - 1)
            digests.append(xxhash.xxh3_128_digest(os.pread(image.fd, end - start, image.offset + start)))
        answer = b"".join(digests)
        sock.sendall(HEAD.pack(len(answer)) + answer)

    @staticmethod
    def _send(sock: socket.socket, image: Image, start: int, nbytes: int) -> None:
        """Send a head, and then ``nbytes`` bytes of the image from ``start`` on.

        These bytes must be there. They go straight out of the file, or over TLS out of
        its mapping.
        """
        if isinstance(sock, ssl.SSLSocket):
            if image.data is None:
                raise ConnectionError("the slot is not mapped")
            sock.sendall(HEAD.pack(nbytes))
            sock.sendall(image.data[start : start + nbytes])
            return
        sock.sendall(HEAD.pack(nbytes), socket.MSG_MORE)
        at, behind = image.offset + start, image.offset + start + nbytes
        while at < behind:
            sent = os.sendfile(sock.fileno(), image.fd, at, behind - at)
            if not sent:
                raise ConnectionError("the slot is shorter than its image")
            at += sent


def _wait_for(sock: socket.socket, image: Image, at: int) -> None:
    """Block until byte ``at`` of the image is there; meanwhile send signs of life.

    :raises Withdrawn: the transfer has ended.
    """
    while not image.wait_for_bytes(at, at + 1, SIGN_S):
        sock.sendall(HEAD.pack(0))


def _send_withdrawn(sock: socket.socket) -> None:
    """Send the puller that the transfer is withdrawn; drop that if it would block."""
    with contextlib.suppress(OSError):
        sock.settimeout(0.0)
        sock.send(HEAD.pack(OVER))

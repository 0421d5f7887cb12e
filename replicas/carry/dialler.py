"""A puller's connections to holders: made, authenticated by both ends, ended together.

If encrypted, each connection uses TLS with the certificate that the holder's rank
announced (:mod:`replicas.carry.tls`), and never goes without.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator

from replicas.carry import endpoint, greeting, tls
from replicas.carry.holders import Holder
from replicas.carry.serve import DELTA_FOLLOWS, FAR_S, HEAD, OVER
from replicas.linux.sockets import round_trip_s

CONNECT_S, LAST_CONNECT_S = 1.5, 3.0
"""Timeout of a connect: a lost first packet is sent again after 1 s.

The second value is for the last holder that is left, as is :data:`LAST_SILENT_S`.
"""
GREET_S = 3.0
"""Timeout of the handshake; the holder may learn of the transfer a bit later."""
SILENT_S, LAST_SILENT_S = 1.5, 4.0
"""A holder that sends nothing for this time is frozen, or cut off."""
WAKES_S = 0.25
"""Interval of checks of a silent connection and of a chunk that has arrived in part."""
_SECONDS = struct.Struct("ll")
_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
_CUT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


class HungUp(Exception):
    """The connection is no longer needed."""


class ConnectFailed(Exception):
    """The connection could not be made. ``why``: a text."""

    def __init__(self, why: str, *, cut: bool = False) -> None:
        """Store ``why`` the connection could not be made, a text for people.

        :param cut: the network path to the peer seems broken (a timeout, no route).
        """
        super().__init__(why)
        self.why, self.cut = why, cut


class OutOfResources(ConnectFailed):
    """This process or machine has no descriptor, port or memory left."""


class HandshakeBroken(ConnectFailed):
    """The connection broke before the handshake was done, as in a flood."""


def is_cut(error: OSError) -> bool:
    """Return True if the error shows a broken network path, such as a timeout."""
    return isinstance(error, TimeoutError) or error.errno in _CUT


class HolderConnection:
    """An authenticated connection to a holder (carrier that serves). Methods block.

    :param last: no other holder is left; this one gets more time.
    """

    def __init__(self, sock: socket.socket, holder: Holder, *, last: bool) -> None:
        """Use the authenticated ``sock``, whose timeouts are set here.

        The caller closes it.

        :param last: no other holder is left; this one gets more time.
        """
        self.sock, self.holder = sock, holder
        self.patience_s = LAST_SILENT_S if last else SILENT_S
        if isinstance(sock, ssl.SSLSocket):  # Python waits, record by record
            sock.settimeout(WAKES_S)
        else:
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SECONDS.pack(0, int(WAKES_S * 1e6)))

    def send(self, data: bytes) -> None:
        """Send all of ``data``; block until the kernel has taken it."""
        self.sock.sendall(data)

    def receive(self, into: memoryview) -> int:
        """Receive bytes into ``into``; return their number, at least 1.

        Blocks until ``into`` is full, or a wait of 0.25 s has ended with some bytes
        there.

        :raises OSError: the holder closed the connection, or sent nothing for 1.5 s (4
            s if it is the last).
        """
        began = time.monotonic()
        while True:
            try:
                nbytes = self.sock.recv_into(into, 0, 0 if isinstance(self.sock, ssl.SSLSocket) else socket.MSG_WAITALL)
            except (BlockingIOError, TimeoutError):
                if time.monotonic() - began < self.patience_s:
                    continue
                raise TimeoutError("was silent for too long") from None
            if not nbytes:
                raise ConnectionError("closed the connection")
            return nbytes

    def receive_all(self, into: memoryview) -> None:
        """Fill all of ``into`` with received bytes, however long that takes.

        :raises OSError: as :meth:`receive`; part of ``into`` may be written.
        """
        while into:
            into = into[self.receive(into) :]

    def number(self) -> int:
        """Receive four bytes, a head or a length; return them as a number.

        :raises ConnectionError: the holder no longer serves the version.
        :raises OSError: as :meth:`receive`.
        """
        head = bytearray(HEAD.size)
        self.receive_all(memoryview(head))
        (found,) = HEAD.unpack(head)
        if found == OVER:
            raise ConnectionError("no longer serves the version")
        return int(found)

    def piece(self, most: int) -> int:
        """Receive a head; return how many bytes follow, or :data:`DELTA_FOLLOWS`.

        Returns 0 for a sign of life: nothing follows, and the next head is to be
        received.

        :raises ConnectionError: more than ``most`` bytes follow, or the holder no
            longer serves the version.
        :raises OSError: as :meth:`receive`.
        """
        piece = self.number()
        if piece > most and piece != DELTA_FOLLOWS:
            raise ConnectionError("sends more than was asked for")
        return piece


class Connector:
    """Makes one pull's connections to holders, and ends them. Thread-safe.

    :param source: address to connect from; empty means any.
    :param trips: round trips in seconds by host, updated by each connection.
    :param encrypt: use TLS, and never connect without.
    """

    def __init__(
        self, transfer: int, secret: bytes, source: str, trips: dict[str, float] | None = None, *, encrypt: bool
    ) -> None:
        """Keep the arguments; connect nowhere yet.

        :param transfer: the transfer's number, by which most holders know it.
        :param secret: shared by the members of the transfer, proven to each holder.
        :param source: address to connect from; empty means any.
        :param trips: round trips in seconds by host, updated by each connection; None:
            begin with none.
        :param encrypt: use TLS, and never connect without.
        """
        self._transfer, self._secret, self._source = transfer, secret, source
        self._trips = {} if trips is None else trips
        self._tls = tls.client_context() if encrypt else None
        self._lock = threading.RLock()
        self._sockets: dict[socket.socket, Holder] = {}
        self._put_off: set[socket.socket] = set()
        self._over = False
        self.made: Counter[Holder] = Counter()
        """Connections by holder, including those being made."""
        self.proven: Counter[Holder] = Counter()
        """Connections by holder whose handshake is done."""

    def hang_up(self, holder: Holder | None = None) -> None:
        """Shut down all connections to ``holder``, also those being made.

        Their threads get HungUp from :meth:`connect`; this call does not wait for them.
        If ``holder`` is None, shut down those to all holders, and have :meth:`connect`
        raise HungUp until :meth:`reopen`.
        """
        with self._lock:
            if holder is None:
                self._over = True
            for sock, of in self._sockets.items():  # also those that are not connected yet
                if holder in (None, of):
                    self._put_off.add(sock)
                    tls.hang_up(sock)

    def is_far(self, holder: Holder | None) -> bool:
        """Return True if the last measured round trip to the holder's host was above 10
        ms; False if none was measured, or ``holder`` is None."""
        return holder is not None and self._trips.get(holder.host, 0.0) > FAR_S

    def reopen(self) -> None:
        """Allow connections again after :meth:`hang_up` of all."""
        with self._lock:
            self._over = False

    @contextlib.contextmanager
    def connect(self, holder: Holder, *, last: bool = True) -> Iterator[HolderConnection]:
        """Context manager: connect, do the handshakes, and close at the end. Blocks.

        :param last: no other holder is left: allow more time.
        :raises HungUp: :meth:`hang_up` refuses new connections, or ended this one; so
            an OSError of the ``with`` block becomes HungUp then.
        :raises ConnectFailed: the connection could not be made.
        :raises NotTheHolder, UnknownSecret: another program answers there.
        """
        with self._lock:
            self.made[holder] += 1
        sock: socket.socket | None = None
        proven = False
        try:
            sock = self._connect(holder, LAST_CONNECT_S if last else CONNECT_S)
            self._greet(sock, holder)
            with self._lock:
                self.proven[holder] += 1
                proven = True
            yield HolderConnection(sock, holder, last=last)
        except (OSError, ConnectFailed):
            if sock in self._put_off:
                raise HungUp from None
            raise
        finally:
            with self._lock:
                self.made[holder] -= 1
                self.proven[holder] -= proven
            if sock is not None:
                self._close_socket(sock)

    def _connect(self, holder: Holder, timeout_s: float) -> socket.socket:
        """Return a connected socket, wrapped for TLS if encrypted; no handshake yet.

        :param timeout_s: limit for the connection to be made.
        :raises ConnectFailed: the connection could not be made.
        :raises HungUp: :meth:`hang_up` ended it.
        :raises NotTheHolder: TLS is needed, but the holder announced no certificate.
        """
        if self._tls is not None and not holder.certificate_hash:
            raise tls.NotTheHolder("announced no certificate, but the channel is encrypted")
        sock: socket.socket | None = None
        try:
            sock, there = endpoint.bind_socket(holder.host, holder.port, self._source)
            self._register_socket(sock, holder)
            sock.settimeout(timeout_s)
            sock.connect(there)
            self._trips[holder.host] = round_trip_s(sock)
            return sock if self._tls is None else self._sealed(sock, holder, self._tls)
        except OSError as error:
            over = sock in self._put_off
            if sock is not None:
                self._close_socket(sock)
            if over:
                raise HungUp from None
            no_address = sock is None and error.errno == errno.EADDRNOTAVAIL  # of the holder, or of this machine
            if error.errno in _LACKS and not no_address:
                raise OutOfResources(error.strerror or str(error)) from error
            why = endpoint.unreached(error, holder.host, holder.port, self._source)
            raise ConnectFailed(why, cut=is_cut(error)) from error
        except BaseException:
            if sock is not None:
                self._close_socket(sock)
            raise

    def _sealed(self, sock: socket.socket, holder: Holder, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Return ``sock`` wrapped for TLS, registered for :meth:`hang_up` in its place.

        Sends nothing.

        :param context: the puller's TLS settings.
        """
        with self._lock:  # hang_up finds one of both sockets
            self._sockets.pop(sock, None)
            sealed = tls.wrap(sock, context)
            self._register_socket(sealed, holder)
        return sealed

    def _register_socket(self, sock: socket.socket, holder: Holder) -> None:
        """Register a socket to ``holder``, so that :meth:`hang_up` ends it.

        :raises HungUp: all connections were hung up already; the caller closes the
            socket.
        """
        with self._lock:
            self._sockets[sock] = holder
            if self._over:
                raise HungUp

    def _close_socket(self, sock: socket.socket) -> None:
        """Close the socket; :meth:`hang_up` no longer knows it."""
        with self._lock:
            self._sockets.pop(sock, None)
            self._put_off.discard(sock)
        sock.close()

    def _greet(self, sock: socket.socket, holder: Holder) -> None:
        """Do the handshakes: TLS if encrypted, then the proof of the secret. Blocks.

        The socket stays open after an error, too.

        :raises HandshakeBroken: no answer within 3 s, or the connection broke.
        :raises UnknownSecret, NotTheHolder: the peer is not the holder.
        """
        deadline, binding = time.monotonic() + GREET_S, b""
        try:
            sock.settimeout(GREET_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if isinstance(sock, ssl.SSLSocket):
                tls.do_handshake(sock, holder.certificate_hash)
                binding = bytes.fromhex(holder.certificate_hash)
            greeting.prove_as_puller(sock, holder.transfer or self._transfer, self._secret, binding, deadline)
        except (greeting.UnknownSecret, tls.NotTheHolder):
            raise
        except TimeoutError:
            raise HandshakeBroken(f"{holder.address} did not answer within {GREET_S:g} s", cut=True) from None
        except OSError as error:
            raise HandshakeBroken(failure_text(error, holder)) from error


def failure_text(error: ConnectFailed | OSError, holder: Holder) -> str:
    """Return why the connection to ``holder`` could not be made, or how it ended."""
    if isinstance(error, ConnectFailed):
        return error.why
    if isinstance(error, ssl.SSLError):
        return f"{holder.address} broke the connection ({error.reason or error})"
    how = str(error) if error.strerror is None else f"broke the connection ({error.strerror})"
    return f"{holder.address} {how}"

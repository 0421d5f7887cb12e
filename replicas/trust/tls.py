"""TLS over a socket or an asyncio transport, with little of its own on each message.

For a message and its answer asyncio's own TLS takes 20 microseconds more on each side,
of 40 to 50 without; this one takes 5 to 10: nothing is copied into further buffers, and
no state is kept but OpenSSL's. ``bench/bench_tls.py`` measures it.

:class:`Tls` is one side of a connection without any I/O. :class:`SecureConnection`
stands between a transport and a protocol: to the transport it is the protocol, and its
``transport`` is that of the protocol above. The protocol is told of its transport and
of bytes only after the handshake. Limits and pauses are those of the transport below;
while the protocol pauses reading, what has arrived stays encrypted.

Bytes that carry no content (key updates, empty records) cost work and are charged to
nobody: a peer that sends :data:`EMPTY_NBYTES` of them in a row is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any, cast

EMPTY_NBYTES = 64 * 1024
_RECORD_NBYTES = 16 * 1024


class Tls:
    """One side of a TLS connection, without I/O.

    :param host: that a client means; None: this is the server's side.
    """

    __slots__ = ("_object", "_read", "done", "encrypt", "feed", "incoming", "left", "outgoing", "to_send")

    def __init__(self, context: ssl.SSLContext, host: str | None = None) -> None:
        self.incoming, self.to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        """What came and was not read, and what is to be sent."""
        self._object = context.wrap_bio(
            self.incoming, self.to_send, server_side=host is None, server_hostname=host or None
        )
        self.done = False
        """Whether the handshake is over, and so the peer's key is the right one."""
        self.feed = self.incoming.write
        """Takes bytes that have come; :meth:`handshake` or :meth:`read` uses them."""
        self.outgoing = self.to_send.read
        """Returns the bytes to send to the peer."""
        self.encrypt = self._object.write
        """As :meth:`write`, maybe of a part only; returns its length."""
        self._read = self._object.read
        self.left = False
        """Whether there may be content to read with nothing in ``incoming``."""

    def handshake(self) -> None:
        """Go on with the handshake. ssl.SSLError: it has failed; tell the peer."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._object.do_handshake()
            self.done = True

    def read(self) -> bytes:
        """Content that has come; empty: none yet.

        :raises EOFError: the peer has ended in good order. :raises ssl.SSLError: what
            came is not what the peer sent.
        """
        most = self.incoming.pending if not self.left else _RECORD_NBYTES
        if not most:
            return b""
        try:
            found = self._read(most)  # a buffer of that size is made first; a record's content is shorter than itself
            self.left = len(found) == most
        except ssl.SSLWantReadError:
            self.left = False
            return b""
        except ssl.SSLZeroReturnError as error:
            raise EOFError("the peer has ended the connection") from error
        if not found:
            raise EOFError("the peer has ended the connection")
        return found

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt content, for :meth:`outgoing`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.encrypt(rest) :]

    def end(self) -> None:
        """Say that no more content follows."""
        with contextlib.suppress(ssl.SSLError):
            self._object.unwrap()


class SecureTransport(asyncio.Transport):
    """The transport of the protocol above: encrypts, and passes all else below."""

    def __init__(self, connection: SecureConnection, below: asyncio.Transport, tls: Tls) -> None:
        super().__init__()
        self._connection = connection
        self._below = below
        self._tls = tls
        self._ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._ended:
            tls = self._tls
            sent = tls.encrypt(data)
            if sent < len(data):
                tls.write(memoryview(data)[sent:])
            self._below.write(tls.outgoing())

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        raise NotImplementedError("TLS has no half-closed connections")

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self._ended = True
        if not self._below.is_closing():
            self._tls.end()
            self._below.write(self._tls.outgoing())
            self._below.close()

    def abort(self) -> None:
        self._ended = True
        self._below.abort()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def pause_reading(self) -> None:
        self._connection.pause_reading()

    def resume_reading(self) -> None:
        self._connection.resume_reading()

    def is_reading(self) -> bool:
        return self._below.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._connection.protocol = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._connection.protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return True if name == "sslcontext" else self._below.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._below.get_write_buffer_limits()

    @property
    def max_size(self) -> int:
        """Bytes that are read at once, where the transport below has such a limit."""
        return int(getattr(self._below, "max_size", 0))

    @max_size.setter
    def max_size(self, nbytes: int) -> None:
        if hasattr(self._below, "max_size"):  # not uvloop's
            self._below.max_size = nbytes


class SecureConnection(asyncio.Protocol):
    """Stands between a transport and ``protocol``; see the module's header.

    :param head: content that was read before. :param quiet: the protocol knows of its
        transport already, which it was given as ``transport``.
    """

    transport: SecureTransport

    def __init__(self, protocol: asyncio.Protocol, tls: Tls, head: bytes = b"", *, quiet: bool = False) -> None:
        self.protocol = protocol
        self._tls = tls
        self._head = head
        self._quiet = quiet
        self._paused = False
        self._empty_nbytes = 0
        self._loop = asyncio.get_running_loop()
        self.shaken: asyncio.Future[None] = self._loop.create_future()
        """Done when the handshake is over."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast("asyncio.Transport", transport)
        self.transport = SecureTransport(self, self._below, self._tls)
        if self._tls.done:
            self._begin()

    def start(self) -> None:
        """A client's side: begin the handshake."""
        self._go_on()

    def _begin(self) -> None:
        self.shaken.set_result(None)
        if not self._quiet:
            self.protocol.connection_made(self.transport)
        if self._head:
            head, self._head = self._head, b""
            self.protocol.data_received(head)
        self._deliver()

    def _go_on(self) -> None:
        """Take the next step of the handshake."""
        try:
            self._tls.handshake()
        except (ssl.SSLError, ssl.CertificateError) as error:
            self._fail(error)
            return
        if self._tls.to_send.pending:
            self._below.write(self._tls.outgoing())
        if self._tls.done:
            self._begin()

    # ------------------------------------------------------------ from below

    def data_received(self, data: bytes) -> None:
        tls = self._tls
        tls.feed(data)
        if not tls.done:
            self._go_on()
            return
        self._empty_nbytes += len(data)
        if not self._paused:
            self._deliver()
        if self._empty_nbytes > EMPTY_NBYTES and not self._paused:
            self._below.abort()

    def _deliver(self) -> None:
        """Pass on what has come, until the protocol pauses."""
        tls = self._tls
        try:
            while (tls.incoming.pending or tls.left) and not self._paused and (content := tls.read()):
                self._empty_nbytes = 0
                self.protocol.data_received(content)
        except EOFError:
            if not self._below.is_closing():
                self.protocol.eof_received()
                self.transport.close()
            return
        except ssl.SSLError as error:
            self._fail(error)
            return
        if tls.to_send.pending and not self._below.is_closing():  # the answer to a key update
            self._below.write(tls.outgoing())

    def _fail(self, error: Exception) -> None:
        if self._tls.to_send.pending and not self._below.is_closing():
            self._below.write(self._tls.outgoing())  # an alert, which says why
        self._below.close()
        self._not_shaken(error)

    def eof_received(self) -> None:
        if self.shaken.done():
            self.protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport._ended = True
        self._not_shaken(exc or ConnectionResetError("the peer has gone during the TLS handshake"))
        if self.shaken.exception() is None or self._quiet:
            self.protocol.connection_lost(exc)

    def _not_shaken(self, error: Exception) -> None:
        if not self.shaken.done():
            self.shaken.set_exception(error)
            self.shaken.exception()  # also if nobody waits for it any more

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()

    # ------------------------------------------------------------ from above

    def pause_reading(self) -> None:
        self._paused = True
        self._below.pause_reading()

    def resume_reading(self) -> None:
        if not self._paused:
            return
        self._paused = False
        self._below.resume_reading()
        self._loop.call_soon(self._resumed)

    def _resumed(self) -> None:
        if not self._paused and not self._below.is_closing():
            self._deliver()

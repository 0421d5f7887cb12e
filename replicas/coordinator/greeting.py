"""TLS at the door: from a connection's first byte to its decrypted request head.

The first record is only peeked at. It must be a whole ClientHello, in one record of at
most :data:`HELLO_NBYTES`, before anything is created for the connection; a request
without TLS is recognized by its first letter, and answered in plain text. The server's
part of the handshake costs some 0.4 ms, a member's as much as a stranger's, and who it
is shows only later. So hellos queue by source, and share a part of the loop's time.
"""

from __future__ import annotations

import ssl
from typing import Literal

from replicas.trust.tls import Tls

HELLO_NBYTES = 8 * 1024
"""Of a ClientHello: those of today have up to 2 KiB."""
HANDSHAKES_SHARE = 0.25
"""Of the loop's time, for the handshakes of all together."""
GREET_S = 100e-6
"""Fixed cost of a handshake, beside the measured one: turns of the loop, the socket."""
SHAKING = 512
"""Connections with TLS and no complete request."""
_RECORD_HEAD = 5
_HANDSHAKE = 0x16
TOO_LONG = b"\x15\x03\x03\x00\x02\x02\x16"
"""The alert record_overflow, for a client whose hello was too long."""

First = Literal["more", "hello", "plain", "malformed", "oversized"]


def first_bytes(data: bytes) -> First:
    """What a connection to a port with TLS begins with; ``more``: not known yet."""
    if data[:1].isalpha():
        return "plain"
    if data[0] != _HANDSHAKE or (len(data) > 1 and data[1] != 3):
        return "malformed"
    if len(data) < _RECORD_HEAD:
        return "more"
    nbytes = int.from_bytes(data[3:5])
    if nbytes > HELLO_NBYTES:
        return "oversized"
    if len(data) < _RECORD_HEAD + nbytes:
        return "more"
    hello = data[_RECORD_HEAD : _RECORD_HEAD + nbytes]
    if nbytes < 4 or hello[0] != 1:
        return "malformed"
    return "oversized" if int.from_bytes(hello[1:4]) > nbytes - 4 else "hello"


class Greeting:
    """One connection's TLS until its request is complete.

    :ivar content: what was decrypted.
    """

    __slots__ = ("_fed_nbytes", "content", "tls")

    def __init__(self, context: ssl.SSLContext) -> None:
        self.tls = Tls(context)
        self.content = b""
        self._fed_nbytes = 0

    def take(self, data: bytes) -> bytes:
        """Take what came, and return what to send.

        :raises EOFError: the peer has ended. :raises ssl.SSLError: it speaks no such
            TLS; :meth:`Tls.outgoing` has an alert for it.
        """
        tls = self.tls
        if not data:
            raise EOFError("the peer has ended the connection")
        tls.feed(data)
        if not tls.done:
            tls.handshake()
            self._fed_nbytes += len(data)
            if not tls.done and self._fed_nbytes > 2 * HELLO_NBYTES:
                raise ssl.SSLError("a handshake of too many bytes")
        if tls.done:
            while part := tls.read():
                self.content += part
        return tls.outgoing()

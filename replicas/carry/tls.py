"""TLS 1.3 between carriers, for channels with ``encrypt = true``.

Each rank makes a key and a certificate for its carrier, in memory only, and tells the
coordinator the SHA-256 of the certificate. Pullers hear it over their own sessions, and
speak with the holder of that very certificate: :func:`meet` compares it as soon as the
handshake has proven that the other end has its key, before a byte is sent. OpenSSL
verifies nothing else: a certificate that is known needs no issuer, name or date, and
each of them could only be a way to accept another one. The pullers are known by the
greeting, which then runs inside.

The greeting's proofs name the certificate, too (the *binding*), so none that was made
for a plain connection, or for another carrier, is of use here.

Threads wait in a connection that another thread ends: :func:`hang_up`. It is not
``SSLSocket.shutdown``, which takes the TLS away first, so that the waiting thread would
go on in plain text for a moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import ssl

HANDSHAKE = b"\x16"
"""The first byte of a connection that begins with a handshake (RFC 8446, 5.1)."""


class NotTheHolder(ConnectionError):
    """Somebody else than the holder answers, or in another way."""


def client_context() -> ssl.SSLContext:
    """Verifies nothing: :func:`meet` does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def wrap(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> ssl.SSLSocket:
    """Take over ``sock``; nothing is sent, and nothing waited for, until it is met."""
    return context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)


def meet(sock: ssl.SSLSocket, certificate_hash: str) -> None:
    """The puller's handshake, within the socket's timeout. Send nothing before it.

    :raises NotTheHolder: the other end has another certificate, or no TLS 1.3.
    :raises OSError: it was not in time, or was cut.
    """
    try:
        sock.do_handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise ConnectionError("closed the connection") from error
    except ssl.SSLError as error:
        raise NotTheHolder(f"does not speak TLS 1.3 ({error.reason or error})") from error
    shown = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(shown.encode(), certificate_hash.encode()):
        raise NotTheHolder(
            f"shows another certificate ({shown[:16]}...) than the holder's ({certificate_hash[:16]}...): somebody is "
            "in between, and was sent nothing"
        )


def hang_up(sock: socket.socket) -> None:
    """End every wait in the connection, from any thread; it stays as it is."""
    with contextlib.suppress(OSError):  # it is not connected, or closed
        socket.socket.shutdown(sock, socket.SHUT_RDWR)

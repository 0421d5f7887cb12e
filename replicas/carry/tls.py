"""TLS 1.3 between carriers, for channels with ``encrypt = true``.

Each rank makes a key and a certificate for its carrier, in memory only, and sends the
SHA-256 of the certificate to the coordinator. Pullers get this hash over their own
sessions and accept that certificate alone: :func:`do_handshake` compares it after the
handshake has proven that the peer has the key, before sending a byte. OpenSSL verifies
nothing else: a known certificate needs no issuer, name or date, and checking these
could only accept other ones. Pullers prove themselves by
:mod:`replicas.carry.greeting`, inside TLS; its proofs name the certificate (the
*binding*), so a proof made for a plain connection or for another carrier does not work
here.

:func:`hang_up` ends a connection in which another thread waits. It does not use
``SSLSocket.shutdown``, which removes the TLS first, so that the waiting thread would
continue in plain text for a moment.
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
    """The peer is not the holder, or does not speak TLS 1.3."""


def client_context() -> ssl.SSLContext:
    """Return a TLS 1.3 context without verification: :func:`do_handshake` verifies."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def wrap(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> ssl.SSLSocket:
    """Return ``sock`` wrapped for TLS; send nothing yet.

    ``sock`` itself is detached: it has no descriptor any more.

    :param server_side: ``sock`` is of the server, whose certificate is in ``context``.
    """
    return context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)


def do_handshake(sock: ssl.SSLSocket, certificate_hash: str) -> None:
    """Do the puller's TLS handshake and compare the server's certificate.

    Blocks for at most the socket's timeout. The caller must send nothing before it.

    :param certificate_hash: expected SHA-256, in hexadecimal.
    :raises NotTheHolder: the peer has another certificate, or no TLS 1.3.
    :raises OSError: the handshake timed out or broke.
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
            f"shows another certificate ({shown[:16]}...) than the holder's ({certificate_hash[:16]}...): another "
            "program answers there, and was sent nothing"
        )


def hang_up(sock: socket.socket) -> None:
    """Shut the connection down, from any thread: every wait in it ends.

    The descriptor stays open. No error is raised if the socket is not connected.
    """
    with contextlib.suppress(OSError):  # not connected, or closed
        socket.socket.shutdown(sock, socket.SHUT_RDWR)

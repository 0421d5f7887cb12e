"""Handshake: both ends of a connection prove that they know a transfer's secret.

The puller sends the transfer's number and a nonce; the server answers with its own
nonce and a keyed hash of both; the puller answers with another hash. Both ends get the
secret, which is valid for one version, over their sessions. Each hash names its side,
so it cannot be reflected, and the certificate of the connection's TLS, if any
(*binding*), so it cannot be replayed in another connection. The hash is keyed BLAKE2b
(RFC 7693), compared in constant time.

The whole handshake has one deadline, so that a slow sender gains no time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable

MAGIC = b"rplcarry"
SECRET_NBYTES = 32
NONCE_NBYTES = 16
_PROOF_NBYTES = 32
_HELLO = struct.Struct(f"<8sQ{NONCE_NBYTES}s")
_ANSWER = struct.Struct(f"<{NONCE_NBYTES}s{_PROOF_NBYTES}s")


class UnknownSecret(ConnectionError):
    """The peer does not know the secret."""


def _proof(secret: bytes, side: bytes, *said: bytes) -> bytes:
    """Return the proof of ``secret``: a keyed hash of the messages ``said`` so far.

    :param side: the sender of the proof, ``b"server"`` or ``b"puller"``.
    """
    return hashlib.blake2b(b"".join(said), key=secret, person=side, digest_size=_PROOF_NBYTES).digest()


def read_exactly(sock: socket.socket, nbytes: int, deadline: float | None = None) -> bytes:
    """Block until ``nbytes`` bytes have arrived, and return them.

    :param deadline: of the monotonic clock; the socket's timeout is changed to fit it.
        None: the socket's own timeout applies to each read.
    :raises ConnectionError: the peer has closed the connection.
    :raises TimeoutError: the bytes did not arrive in time.
    """
    data = bytearray()
    while len(data) < nbytes:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left)
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("closed the connection")
        data += part
    return bytes(data)


def prove_as_puller(sock: socket.socket, transfer: int, secret: bytes, binding: bytes, deadline: float) -> None:
    """Prove the secret to the server, and check the server's proof. Blocks.

    :param transfer: the transfer's number at the server.
    :param binding: SHA-256 of the server's TLS certificate; empty without TLS.
    :param deadline: by ``time.monotonic()``.
    :raises UnknownSecret: the server does not know the secret.
    :raises OSError: the connection broke, or the deadline has passed.
    """
    hello = _HELLO.pack(MAGIC, transfer, secrets.token_bytes(NONCE_NBYTES))
    sock.sendall(hello)
    answer = read_exactly(sock, _ANSWER.size, deadline)
    nonce, proof = _ANSWER.unpack(answer)
    if not hmac.compare_digest(proof, _proof(secret, b"server", hello, nonce, binding)):
        raise UnknownSecret("does not know the secret of the transfer, so it does not hold the version")
    sock.sendall(_proof(secret, b"puller", hello, nonce, binding))


def prove_as_server(
    sock: socket.socket, secret_of: Callable[[int], bytes | None], binding: bytes, deadline: float
) -> int:
    """Check the puller's proof and send ours; return the transfer's number. Blocks.

    :param secret_of: returns a transfer's secret, or None if it is not served here.
    :param binding: SHA-256 of our TLS certificate; empty without TLS.
    :param deadline: by ``time.monotonic()``.
    :raises UnknownSecret: the transfer is not served here, or the puller does not know
        its secret.
    :raises OSError: the connection broke, or the deadline has passed.
    """
    hello = read_exactly(sock, _HELLO.size, deadline)
    magic, transfer, _ = _HELLO.unpack(hello)
    secret = secret_of(transfer) if magic == MAGIC else None
    known = secret if secret is not None else secrets.token_bytes(SECRET_NBYTES)  # same time
    nonce = secrets.token_bytes(NONCE_NBYTES)
    sock.sendall(_ANSWER.pack(nonce, _proof(known, b"server", hello, nonce, binding)))
    given = read_exactly(sock, _PROOF_NBYTES, deadline)
    if not hmac.compare_digest(given, _proof(known, b"puller", hello, nonce, binding)) or secret is None:
        raise UnknownSecret("does not know the secret of a transfer")
    return int(transfer)

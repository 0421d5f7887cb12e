"""Both ends of a connection prove the secret of a transfer before anything else.

The puller sends the transfer's number and a nonce; the server answers with a nonce of
its own and a keyed hash of both; the puller with another one. The secret comes to both
over their sessions, and is of one version only. Each hash names the side that made it,
so neither can be reflected, and the certificate of the connection's TLS, if it has one
(*binding*), so that none is of use in another one. Keyed BLAKE2b (RFC 7693), compared
in constant time.

All of it has one deadline: who sends a byte now and then gains no time.
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


class Stranger(ConnectionError):
    """The other end does not know the secret."""


def _proof(secret: bytes, side: bytes, *said: bytes) -> bytes:
    return hashlib.blake2b(b"".join(said), key=secret, person=side, digest_size=_PROOF_NBYTES).digest()


def read_exactly(sock: socket.socket, nbytes: int, deadline: float | None = None) -> bytes:
    """Read so many bytes.

    :param deadline: of the monotonic clock; None: the socket's own timeout, each time.
    :raises ConnectionError: the other end has closed the connection.
    :raises TimeoutError: they did not come in time.
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


def greet(
    sock: socket.socket, transfer: int, secret: bytes, binding: bytes = b"", deadline: float | None = None
) -> None:
    """The puller's side. :raises Stranger: the server does not know the secret."""
    hello = _HELLO.pack(MAGIC, transfer, secrets.token_bytes(NONCE_NBYTES))
    sock.sendall(hello)
    answer = read_exactly(sock, _ANSWER.size, deadline)
    nonce, proof = _ANSWER.unpack(answer)
    if not hmac.compare_digest(proof, _proof(secret, b"server", hello, nonce, binding)):
        raise Stranger("does not know the secret of the transfer: it is no holder of the version")
    sock.sendall(_proof(secret, b"puller", hello, nonce, binding))


def answer(
    sock: socket.socket,
    secret_of: Callable[[int], bytes | None],
    binding: bytes = b"",
    deadline: float | None = None,
) -> int:
    """The server's side; return the transfer.

    :raises Stranger: it is none of ours, or the puller does not know its secret.
    """
    hello = read_exactly(sock, _HELLO.size, deadline)
    magic, transfer, _ = _HELLO.unpack(hello)
    secret = secret_of(transfer) if magic == MAGIC else None
    known = secret if secret is not None else secrets.token_bytes(SECRET_NBYTES)  # takes as long
    nonce = secrets.token_bytes(NONCE_NBYTES)
    sock.sendall(_ANSWER.pack(nonce, _proof(known, b"server", hello, nonce, binding)))
    given = read_exactly(sock, _PROOF_NBYTES, deadline)
    if not hmac.compare_digest(given, _proof(known, b"puller", hello, nonce, binding)) or secret is None:
        raise Stranger("does not know the secret of a transfer")
    return int(transfer)

"""Bytes that mean harm: nothing of them may be unpickled or evaluated, and nobody else
may notice (invariant I7)."""

from __future__ import annotations

import base64
import os
import pickle
import random
import socket
import struct
from pathlib import Path

import msgspec

__all__ = ["Bomb", "attack_port", "framed", "garbage"]


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.path),))


def garbage(rng: random.Random, trap: Path) -> bytes:
    """No message of any protocol."""
    return rng.choice(
        (
            rng.randbytes(rng.choice((1, 64, 4096))),
            b"\x00" * 4096,
            b"\xff" * 64,
            pickle.dumps(Bomb(trap)),
            msgspec.msgpack.encode([1, 0, {"type": "NoSuchMessage"}]),
            msgspec.msgpack.encode([10**9, 0, {"type": "Heartbeat", "more": "x" * 10_000}]),
            msgspec.msgpack.encode([[[[]]]]),
        )
    )


def framed(payload: bytes, *, masked: bool) -> bytes:
    """As one binary frame of a WebSocket; those that go to the server are masked."""
    head = bytes([0x82])
    bit = 0x80 if masked else 0
    if len(payload) < 126:
        head += bytes([bit | len(payload)])
    else:
        head += bytes([bit | 126]) + struct.pack(">H", len(payload))
    return head + (b"\0\0\0\0" if masked else b"") + payload


def attack_port(address: tuple[str, int], rng: random.Random, trap: Path, token: str) -> str:
    """Speak nonsense to a port, as an HTTP client would or worse; which kind, in a
    word. Never waits for long."""
    upgrade = (
        "GET /session HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {base64.b64encode(rng.randbytes(16)).decode()}\r\nAuthorization: Bearer %s\r\n\r\n"
    )
    nonsense = framed(garbage(rng, trap), masked=True)
    kinds = {
        "bytes": garbage(rng, trap),
        "half a request": b"POST /status HTTP/1.1\r\nContent-Length: 99999\r\n\r\n{",
        "a long header": b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        "a wrong token": (upgrade % "wrong").encode(),
        "nonsense for a Hello": (upgrade % token).encode() + nonsense,
    }
    kind = rng.choice(sorted(kinds))
    try:
        with socket.create_connection(address, timeout=2) as sock:
            sock.sendall(kinds[kind])
            sock.settimeout(0.5)
            sock.recv(4096)
    except OSError:  # refused, reset or unanswered: all of it is a good answer
        return kind
    return kind

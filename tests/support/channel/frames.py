"""Frames that have been spoilt on the way: seeded mutations of real ones, by the one
fuzzer of this project.

Its doors: the listeners of a run (integration/coordinator/test_frames, a table), the
pairs of our own processes (supervisor/shim/test_frames_of_pairs), and agents
(unit/supervisor/agent/test_agent_frames). Beside it there are right messages at wrong
times (unit/coordinator/test_hostile), a stranger for each limit, by script
(coordinator/test_security, trust/test_tls, carry/test_strangers), floods (chaos), and
spoilt configs, which are texts (config/test_mutants).

``FRAMES=1000`` makes more of them for each listener (``make test-all``).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

__all__ = ["MANY", "mutants", "recorded"]

MANY = int(os.environ.get("FRAMES", "60"))
_EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_LEAVES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63 - 1,
    1e308,
    "",
    "x" * 5000,
    "\0\ud7ff",
    [],
    {},
    [[]],
    {"type": "x"},
)


def mutants(frames: Sequence[bytes], seed: int, many: int = MANY) -> Iterator[bytes]:
    """``many`` frames, none of which is one of ``frames``."""
    chance = random.Random(seed)
    made = 0
    while made < many:
        frame = chance.choice(frames)
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            frame = chance.choice(_WAYS)(frame, chance, frames)
        if frame not in frames:
            made += 1
            yield frame


def _flip(frame: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    data = bytearray(frame or b"\0")
    for _bit in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def _cut(frame: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    return frame[: chance.randrange(len(frame) + 1)]


def _drop(frame: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(frame) + 1)
    return frame[:at] + frame[at + chance.randrange(1, 9) :]


def _insert(frame: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(frame) + 1)
    return frame[:at] + chance.randbytes(chance.choice((1, 4, 64, 2000))) + frame[at:]


def _repeat(frame: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(frame) + 1)
    return frame[:at] + frame[at : at + 64] * chance.choice((2, 50)) + frame[at:]


def _splice(frame: bytes, chance: random.Random, frames: Sequence[bytes]) -> bytes:
    other = chance.choice(frames)
    return frame[: chance.randrange(len(frame) + 1)] + other[chance.randrange(len(other) + 1) :]


def _length(frame: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    form = chance.choice(("<B", "<H", "<I", "<Q", ">I", ">Q"))
    value = struct.pack(form, chance.choice(_EXTREMES) % (1 << 8 * struct.calcsize(form)))
    at = chance.randrange(max(1, len(frame) - len(value) + 1))
    return frame[:at] + value + frame[at + len(value) :]


def _nest(frame: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    opening = chance.choice((b"\x91", b"\x81\xa1x", b"[", b'{"x":', b'{"type":'))
    return opening * chance.choice((2, 900, 100_000 // len(opening))) + frame


def _confuse(frame: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
    """Another type in one place of it, where it is MessagePack or JSON; else a bit is
    flipped."""
    for decode, encode in _FORMS:
        try:
            return encode(_replaced(decode(frame), chance))
        except (ValueError, TypeError, RecursionError, msgspec.MsgspecError, UnicodeError):
            continue
    return _flip(frame, chance, ())


def _replaced(value: Any, chance: random.Random) -> Any:
    """``value`` with one leaf, or branch, of another type."""
    if chance.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return chance.choice(_LEAVES)
    key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if chance.random() < 0.1 and isinstance(value, dict):
        return {name: item for name, item in value.items() if name != key}
    changed = value.copy()
    changed[key] = _replaced(value[key], chance)
    return changed


_FORMS: tuple[tuple[Callable[[bytes], Any], Callable[[Any], bytes]], ...] = (
    (json.loads, lambda value: json.dumps(value).encode()),
    (msgspec.msgpack.decode, msgspec.msgpack.encode),
)
_WAYS = (_flip, _flip, _cut, _drop, _insert, _repeat, _splice, _length, _nest, _confuse, _confuse, _confuse)


def recorded(port: int, talk: Callable[[int], object]) -> list[bytes]:
    """What a client of the TCPStore at ``port`` sends while ``talk(port)`` goes on."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def forward() -> None:
            client, _ = door.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=pipe, args=(server, client, None), daemon=True)
                back.start()
                pipe(client, server, said)
                back.join(10)

        def pipe(source: socket.socket, target: socket.socket, into: list[bytes] | None) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    if into is not None:
                        into.append(data)
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=forward, daemon=True)
        thread.start()
        talk(door.getsockname()[1])
        thread.join(10)
    return said

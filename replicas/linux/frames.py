"""Messages over local Unix sockets: packets and frames, with descriptors beside them.

Messages are msgspec structs of closed unions in MessagePack. No pickle is ever read.
File descriptors are sent with them (SCM_RIGHTS). A *packet* is one message on a
SOCK_SEQPACKET; a *frame*, on a SOCK_STREAM, is a head of 5 bytes (length, number of
descriptors) and a body.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from replicas.common.decoding import MALFORMED

MAX_FRAME_NBYTES = 256 << 20
MAX_PACKET_NBYTES = 4096
_MAX_FDS = 4
_CHUNK_NBYTES = 64 << 10
_HEAD = struct.Struct("<IB")

encode = msgspec.msgpack.encode


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes bytes to one message of the msgspec type ``kind``.

    It raises ConnectionError for all other bytes. To be called at import: msgspec must
    not see a struct type for the first time in two threads.
    """
    decoder = msgspec.msgpack.Decoder(kind)

    def decode(data: bytes) -> Any:
        """Return the message in ``data``; raise ConnectionError for malformed bytes."""
        try:
            return decoder.decode(data)
        except MALFORMED as error:
            raise ConnectionError(f"malformed message: {error}") from error

    return decode


def write_packet(sock: socket.socket, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    """Send one message as a packet, with duplicates of the descriptors ``fds``.

    The descriptors stay open here. Blocks as the socket does.
    """
    socket.send_fds(sock, [encode(message)], list(fds))


def read_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one packet; return its encoded bytes, and the descriptors sent with it.

    The caller owns the descriptors. The bytes are empty at the connection's end. Blocks
    as the socket does.

    :raises ConnectionError: the packet was too large; its descriptors are closed.
    """
    data, fds, flags = _receive(sock, MAX_PACKET_NBYTES, socket.MSG_CMSG_CLOEXEC)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise ConnectionError("a packet was too large")
    return data, fds


def _receive(sock: socket.socket, nbytes: int, flags: int) -> tuple[bytes, list[int], int]:
    """Receive once, up to ``nbytes``; return bytes, new descriptors and result flags.

    In place of :func:`socket.recv_fds`, which ignores its flags in Python 3.11.

    :param flags: of ``recvmsg``.
    """
    fds = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(nbytes, socket.CMSG_SPACE(_MAX_FDS * fds.itemsize), flags)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds.tolist(), flags


def frame_head(body: bytes, fds: Sequence[int]) -> bytes:
    """Return the 5 bytes before a frame's body: its length, and how many ``fds``."""
    return _HEAD.pack(len(body), len(fds))


def write_frame(sock: socket.socket, message: msgspec.Struct) -> None:
    """Send one message as a frame without descriptors.

    Blocks until a blocking socket has taken all of it.
    """
    body = encode(message)
    sock.sendall(frame_head(body, ()) + body)


class FrameReader:
    """Reads frames from a stream socket as their bytes come; it never waits.

    A frame is a message with a head before it (its length, its number of descriptors).
    """

    def __init__(self, sock: socket.socket) -> None:
        """Read from ``sock``, a stream socket that the caller owns and closes."""
        self._sock = sock
        self._data = bytearray()
        self._fds: list[int] = []

    def receive(self) -> list[tuple[bytes, list[int]]] | None:
        """Receive once, without waiting; return the frames that are complete now.

        :returns: ``(encoded body, descriptors that the caller owns)`` each, maybe none;
            None at the connection's end, when a part of a frame is dropped.
        :raises ConnectionError: a frame is larger than allowed, or descriptors are
            missing; the stream cannot be read further.
        """
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        try:
            data, fds, _ = _receive(self._sock, _CHUNK_NBYTES, flags)
        except BlockingIOError:
            return []
        self._fds += fds
        if not data:
            close_all(self._fds)
            return None
        self._data += data
        return list(iter(self._next, None))

    def _next(self) -> tuple[bytes, list[int]] | None:
        """Remove the next complete frame from the received bytes, and return it.

        Return its body and its descriptors, or None if it is incomplete.

        :raises ConnectionError: its head is not valid, or descriptors are missing.
        """
        if len(self._data) < _HEAD.size:
            return None
        length, count = _HEAD.unpack_from(self._data)
        if length > MAX_FRAME_NBYTES or count > _MAX_FDS:
            raise ConnectionError(f"a frame of {length} bytes with {count} descriptors")
        end = _HEAD.size + length
        if len(self._data) < end:
            return None
        if len(self._fds) < count:  # descriptors come with the first byte of the head
            raise ConnectionError(f"a frame came with {len(self._fds)} descriptors in place of {count}")
        body = bytes(self._data[_HEAD.size : end])
        del self._data[:end]
        fds, self._fds = self._fds[:count], self._fds[count:]
        return body, fds


def close_all(fds: Sequence[int]) -> None:
    """Close these descriptors of this process."""
    for fd in fds:
        os.close(fd)

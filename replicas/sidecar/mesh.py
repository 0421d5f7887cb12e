"""A connection between every two members of a free lane, for what is small: votes, barriers, and all-reduces of a few KiB.

Theory of operation
===================

Gloo hands every operation to a thread of its own, and what comes in to another one. For small messages that costs more than
all else. So the sidecars of a free lane make direct connections at the first turn: each listens on its lane's address, tells
all others by an all-reduce of the group where, and with which secret; each pair then has one connection, which the higher
rank has opened and on which it has shown the other's secret.

One *exchange*: everyone sends the same number of bytes to everyone, behind a *mark* of what it is about. The main thread
writes to all, then reads what comes from all; when the mark of another member differs, the lane has no common idea of what
to do, and is over. What was received is reduced in the order of ranks, on every member alike: so all have the same result
to the last bit. A connection that ends, or is silent until the deadline, is the end of the lane.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field

import torch

from replicas.sidecar.groups import Group

__all__ = ["MESH_NBYTES", "Mesh"]

MESH_NBYTES = 64 << 10
"""What is larger goes through the group."""
CONNECT_S = 5.0
HELLO_S = 1.0
_BACKLOG = 256
_TOKEN_WORDS = 2
_HEAD = struct.Struct("<Q")
_HELLO = struct.Struct("<Iqq")


@dataclass(slots=True, eq=False)
class _Peer:
    rank: int
    sock: socket.socket
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    space: memoryview = field(default_factory=lambda: memoryview(b""))
    received: int = 0


class Mesh:
    """Of one group. Any :class:`RuntimeError` or :class:`OSError` is the end of it."""

    def __init__(self, rank: int, size: int, socks: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._size = size
        self._peers = [_Peer(rank, sock) for rank, sock in sorted(socks.items())]
        self._poller = select.poll()
        for peer in self._peers:
            peer.sock.setblocking(False)
            self._poller.register(peer.sock, select.POLLIN)
        self._memory = bytearray()

    @classmethod
    def connect(cls, group: Group, address: str, deadline: float) -> Mesh:
        """All members call it at once. ``deadline``: of the monotonic clock."""
        deadline = min(deadline, time.monotonic() + CONNECT_S)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            listener.listen(_BACKLOG)
            rows, mine = _tell(group, address, listener.getsockname()[1], deadline)
            socks = {rank: _call(rows[rank], family, group.rank, deadline) for rank in range(group.rank)}
            while len(socks) < group.size - 1:
                rank, sock = _answer(listener, mine, deadline)
                if group.rank < rank < group.size and rank not in socks:
                    socks[rank] = sock
                else:
                    sock.close()
        for sock in socks.values():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(group.rank, group.size, socks)

    def exchange(self, mark: int, data: bytes, deadline: float) -> list[memoryview]:
        """Send ``mark`` and ``data`` to everyone; what came from each rank (the own data among it), in the order of ranks.

        The views are valid until the next exchange.
        """
        message = memoryview(_HEAD.pack(mark) + data)
        length = len(message)
        if len(self._memory) < length * len(self._peers):
            self._memory = bytearray(length * len(self._peers))
        memory = memoryview(self._memory)
        for index, peer in enumerate(self._peers):
            peer.unsent, peer.received = message, 0
            peer.space = memory[index * length : (index + 1) * length]
            self._send(peer)
        waiting = [peer for peer in self._peers if not self._receive(peer, mark)]
        while waiting:
            self._wait(waiting, deadline)
            for peer in waiting:
                self._send(peer)
            waiting = [peer for peer in waiting if not self._receive(peer, mark)]
        parts = [peer.space[_HEAD.size :] for peer in self._peers]
        parts.insert(self._rank, message[_HEAD.size :])
        return parts

    def close(self) -> None:
        """Hang up: the others' exchanges fail."""
        for peer in self._peers:
            peer.sock.close()

    def _wait(self, waiting: list[_Peer], deadline: float) -> None:
        remaining = deadline - time.monotonic()
        for peer in waiting:
            if peer.unsent:
                self._poller.modify(peer.sock, select.POLLIN | select.POLLOUT)
        if remaining <= 0 or not self._poller.poll(remaining * 1000):
            raise RuntimeError(f"no answer in time from rank {', '.join(str(peer.rank) for peer in waiting)}")
        for peer in waiting:
            if peer.unsent:
                self._poller.modify(peer.sock, select.POLLIN)

    @staticmethod
    def _send(peer: _Peer) -> None:
        """As much as there is room for."""
        with contextlib.suppress(BlockingIOError):
            while peer.unsent:
                peer.unsent = peer.unsent[peer.sock.send(peer.unsent) :]

    @staticmethod
    def _receive(peer: _Peer, mark: int) -> bool:
        """As much as there is; True when all has come, and is sent."""
        space = peer.space
        while peer.received < len(space):
            try:
                count = peer.sock.recv_into(space[peer.received :])
            except BlockingIOError:
                return False
            if not count:
                raise RuntimeError(f"rank {peer.rank} has closed its connection")
            before, peer.received = peer.received, peer.received + count
            if before < _HEAD.size <= peer.received and _HEAD.unpack_from(space)[0] != mark:
                raise RuntimeError(f"rank {peer.rank} was asked to do something else")
        return not peer.unsent

    def all_reduce(self, mark: int, runs: list[tuple[torch.Tensor, torch.Tensor]], op: str, deadline: float) -> None:
        """Reduce each pair's first tensor over all members into its second one; both are flat, on host memory."""
        data = b"".join(source.view(torch.uint8).numpy().tobytes() for source, _ in runs)
        parts = self.exchange(mark, data, deadline)
        start = 0
        for source, result in runs:
            nbytes = source.nbytes
            for rank, part in enumerate(parts):
                found = torch.frombuffer(bytearray(part[start : start + nbytes]), dtype=source.dtype)
                if rank == 0:
                    result.copy_(found)
                elif op in ("sum", "mean"):
                    result.add_(found)
                else:
                    (torch.minimum if op == "min" else torch.maximum)(result, found, out=result)
            if op == "mean":
                result.div_(self._size)
            start += nbytes


def _tell(
    group: Group, address: str, port: int, deadline: float
) -> tuple[list[tuple[str, int, int, int]], tuple[int, int]]:
    """Address, port and secret of every rank, and the own secret."""
    secret = tuple(int.from_bytes(secrets.token_bytes(8), signed=True) for _ in range(_TOKEN_WORDS))
    raw = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address).ljust(16, b"\0")
    words = [port, *secret, *struct.unpack("<qq", raw)]
    table = torch.zeros((group.size, len(words)), dtype=torch.int64)
    table[group.rank] = torch.tensor(words, dtype=torch.int64)
    group.all_reduce(table.view(-1), "sum", deadline).wait()
    rows: list[tuple[str, int, int, int]] = []
    for found, first, second, high, low in table.tolist():
        packed = struct.pack("<qq", high, low)
        name = (
            socket.inet_ntop(socket.AF_INET6, packed)
            if ":" in address
            else socket.inet_ntop(socket.AF_INET, packed[:4])
        )
        rows.append((name, found, first, second))
    return rows, (secret[0], secret[1])


def _call(row: tuple[str, int, int, int], family: int, rank: int, deadline: float) -> socket.socket:
    """Connect to a lower rank, and show its secret."""
    address, port, first, second = row
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect((address, port))
        sock.sendall(_HELLO.pack(rank, first, second))
    except BaseException:
        sock.close()
        raise
    return sock


def _answer(listener: socket.socket, secret: tuple[int, int], deadline: float) -> tuple[int, socket.socket]:
    """Take one connection; its rank, or -1 when it does not show the secret at once: a stranger."""
    listener.settimeout(max(0.001, deadline - time.monotonic()))
    sock, _ = listener.accept()
    hello = b""
    try:
        sock.settimeout(HELLO_S)
        while len(hello) < _HELLO.size and (more := sock.recv(_HELLO.size - len(hello))):
            hello += more
    except OSError:
        return -1, sock
    if len(hello) < _HELLO.size:
        return -1, sock
    rank, *shown = _HELLO.unpack(hello)
    return (rank if tuple(shown) == secret else -1), sock

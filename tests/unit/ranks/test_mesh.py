"""Direct connections between the sidecars of a free lane: what they reduce, and how they fail."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from replicas.sidecar import mesh as module
from replicas.sidecar.mesh import MESH_NBYTES, Mesh

DEADLINE_S = 20.0


class FakeGroup:
    """Sums tables of addresses between threads of this process."""

    def __init__(self, rank: int, size: int, tables: list[torch.Tensor], meeting: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._tables, self._meeting = tables, meeting

    def all_reduce(self, tensor: torch.Tensor, op: str, deadline: float) -> FakeGroup:
        self._tables[self.rank] = tensor.clone()
        self._meeting.wait(DEADLINE_S)
        tensor.copy_(torch.stack(self._tables).sum(0))
        return self

    def wait(self) -> None:
        """It is done already."""


@contextmanager
def meshes(size: int) -> Iterator[list[Mesh]]:
    """One of each rank, connected."""
    tables, meeting = [torch.empty(0)] * size, threading.Barrier(size)
    groups: list[Any] = [FakeGroup(rank, size, tables, meeting) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        deadline = time.monotonic() + DEADLINE_S
        found = list(pool.map(lambda group: Mesh.connect(group, "127.0.0.1", deadline), groups))
    try:
        yield found
    finally:
        for mesh in found:
            mesh.close()


def together(work: Sequence[Callable[..., Any]]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [pool.submit(one) for one in work]


def soon() -> float:
    return time.monotonic() + DEADLINE_S


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    ("op", "dtype", "wanted"),
    [
        ("sum", torch.float32, lambda values: sum(values)),
        ("mean", torch.bfloat16, lambda values: sum(values) / len(values)),
        ("min", torch.int8, min),
        ("max", torch.float64, max),
    ],
)
def test_a_reduction(size: int, op: str, dtype: torch.dtype, wanted: Callable[[list[int]], float]) -> None:
    with meshes(size) as found:
        for numel in (1, 33):
            inputs = [torch.full((numel,), rank + 1, dtype=dtype) for rank in range(size)]
            results = [torch.zeros(numel, dtype=dtype) for _ in range(size)]
            runs = [[(inputs[rank], results[rank])] for rank in range(size)]
            calls = [
                lambda mesh=mesh, run=run: mesh.all_reduce(7, run, op, soon())
                for mesh, run in zip(found, runs, strict=True)
            ]
            for call in together(calls):
                call.result()
            expected = torch.full((numel,), wanted(list(range(1, size + 1)))).to(dtype)
            for rank in range(size):
                assert results[rank].equal(expected)
                assert inputs[rank].eq(rank + 1).all(), "the inputs are only read"


def test_several_runs_and_exchanges_one_after_another() -> None:
    with meshes(3) as found:

        def work(rank: int) -> list[float]:
            outcomes = []
            for turn in range(50):
                first, second = torch.full((5,), float(rank)), torch.full((3,), rank + turn)
                sums = torch.zeros(5), torch.zeros(3, dtype=torch.int64)
                found[rank].all_reduce(turn * 2, [(first, sums[0]), (second, sums[1])], "sum", soon())
                found[rank].exchange(turn * 2 + 1, b"", soon())
                outcomes.append(float(sums[0][0] + sums[1][0]))
            return outcomes

        for call in together([lambda rank=rank: work(rank) for rank in range(3)]):
            assert call.result() == [6.0 + 3 * turn for turn in range(50)]


def test_the_largest_exchange_does_not_block_itself() -> None:
    """Everyone sends at once, more than the sockets hold."""
    with meshes(2) as found:
        for mesh in found:
            for peer in mesh._peers:
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        data = [bytes([rank]) * (16 * MESH_NBYTES) for rank in range(2)]
        calls = [
            lambda rank=rank: [bytes(part) for part in found[rank].exchange(1, data[rank], soon())] for rank in (0, 1)
        ]
        for call in together(calls):
            assert call.result() == data


def test_members_that_were_asked_for_different_things() -> None:
    with meshes(3) as found:
        works = [lambda rank=rank: found[rank].exchange(5 + (rank == 2), b"data" * rank, soon()) for rank in range(3)]
        assert all(isinstance(call.exception(), RuntimeError) for call in together(works)[2:])
        for mesh in found:
            mesh.close()


def test_a_member_that_ends() -> None:
    with meshes(2) as found:
        found[1].close()
        with pytest.raises((RuntimeError, OSError)):
            found[0].exchange(1, b"x", soon())


def test_a_member_that_is_silent() -> None:
    with meshes(2) as found, pytest.raises(RuntimeError, match="no answer in time from rank 1"):
        found[0].exchange(1, b"x", time.monotonic() + 0.05)


def test_a_stranger_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_S", 0.05)
    told = module._tell
    strangers: list[socket.socket] = []

    def tell(group: Any, address: str, port: int, deadline: float) -> Any:
        for hello in (b"", b"x" * module._HELLO.size):
            strangers.append(socket.create_connection((address, port)))
            strangers[-1].sendall(hello)
        return told(group, address, port, deadline)

    monkeypatch.setattr(module, "_tell", tell)
    with meshes(2) as found:
        calls = [lambda rank=rank: [bytes(part) for part in found[rank].exchange(1, b"ab", soon())] for rank in (0, 1)]
        for call in together(calls):
            assert call.result() == [b"ab", b"ab"]
    for stranger in strangers:
        stranger.close()

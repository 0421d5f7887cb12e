"""Broadcasts along a chain: in pieces of which size, in which order, over which links.

Covers: sidecar/collective.py.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replicas.messages import GroupSpec, Segment
from replicas.sidecar import collective, wire
from replicas.sidecar.collective import (
    AHEAD,
    CHAIN_MIN_NBYTES,
    PIECE_MAX_NBYTES,
    PIECE_MIN_NBYTES,
    piece_nbytes,
    run_collective,
)
from replicas.sidecar.groups import CollectiveGroup, StartedWork

MIB = 1 << 20


class Board:
    """The links between the members of a :class:`NotedGroup`, and what each did."""

    def __init__(self) -> None:
        self.links: defaultdict[tuple[int, int], SimpleQueue[torch.Tensor]] = defaultdict(SimpleQueue)
        self.carried: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.did: defaultdict[int, list[str]] = defaultdict(list)


class NotedGroup(CollectiveGroup):
    """Exchanges tensors over a board, and notes the most works under way at once."""

    _wait_for = staticmethod(lambda work, deadline: work())

    def __init__(self, board: Board, rank: int, size: int, backend: Any = "gloo") -> None:
        links = SimpleNamespace(send=self._sends, recv=self._receives)
        super().__init__(links, GroupSpec("test", "127.0.0.1", 1, rank, size, backend, "127.0.0.1", 5.0))
        self._board = board
        self._under_way = self.most_under_way = 0

    def _in_place(self, tensor: torch.Tensor) -> bool:
        return True

    def _staging_for(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> StartedWork:
        self._board.did[self.rank].append(f"broadcast {tensor.numel()} of {root}")
        self._begin()
        return StartedWork((), deadline, self._end)

    def _begin(self) -> None:
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)

    def _end(self) -> None:
        self._under_way -= 1

    def _sends(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Callable[[], None]:
        board, me, (tensor,) = self._board, self.rank, tensors
        board.carried[me, peer].append(tensor.numel())
        board.did[me].append("sends")
        board.links[me, peer].put(tensor.clone())
        self._begin()
        return self._end

    def _receives(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Callable[[], None]:
        board, me, (tensor,) = self._board, self.rank, tensors
        self._begin()

        def work() -> None:
            tensor.copy_(board.links[peer, me].get(timeout=5.0))
            board.did[me].append("has")
            self._end()

        return work


def broadcast(groups: Sequence[NotedGroup], ranks: tuple[int, ...], root: int, nbytes: int) -> list[torch.Tensor]:
    """What each participant has afterwards."""
    memory = [torch.zeros(nbytes, dtype=torch.uint8) for _ in ranks]
    memory[root].random_(1, 256)
    segments = ((Segment("uint8", (nbytes,)),),) * len(ranks)

    def run(me: int) -> None:
        spec = wire.CollectiveSpec(1, "broadcast", "sum", ranks, segments, me, root, 5.0)
        given = (memory[me], None) if me == root else (None, memory[me])
        run_collective(groups[ranks[me]], spec, *given)

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(run, range(len(ranks))))
    return memory


@pytest.mark.parametrize(("ranks", "root"), [((0, 1, 2), 0), ((2, 0, 1), 2), ((3, 1, 0, 2), 1), ((0, 2, 1, 4, 3), 3)])
def test_each_link_of_a_chain_carries_every_byte_once(ranks: tuple[int, ...], root: int) -> None:
    nbytes, board = CHAIN_MIN_NBYTES + 5, Board()
    memory = broadcast([NotedGroup(board, rank, len(ranks)) for rank in range(len(ranks))], ranks, root, nbytes)
    assert all(torch.equal(one, memory[root]) for one in memory)
    chain = [*ranks[root:], *ranks[:root]]
    piece = piece_nbytes(nbytes, len(ranks))
    carried = [piece] * (nbytes // piece) + [nbytes % piece]
    assert board.carried == dict.fromkeys(itertools.pairwise(chain), carried)


def test_a_piece_is_passed_on_before_the_next_one_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "CHAIN_MIN_NBYTES", 0)
    pieces, board = 3 * AHEAD, Board()
    groups = [NotedGroup(board, rank, 4) for rank in range(4)]
    broadcast(groups, (0, 1, 2, 3), 0, pieces * PIECE_MIN_NBYTES)
    assert board.did[0] == ["sends"] * pieces
    assert board.did[1] == board.did[2] == ["has", "sends"] * pieces
    assert board.did[3] == ["has"] * pieces
    assert [group.most_under_way for group in groups] == [AHEAD + 1, 2 * AHEAD + 1, 2 * AHEAD + 1, AHEAD]


@pytest.mark.parametrize(
    ("size", "nbytes", "backend"),
    [(2, CHAIN_MIN_NBYTES + 1, "gloo"), (3, CHAIN_MIN_NBYTES, "gloo"), (3, CHAIN_MIN_NBYTES + 1, "nccl")],
)
def test_there_is_no_chain_of_two_nor_for_little_nor_over_nccl(size: int, nbytes: int, backend: str) -> None:
    board = Board()
    broadcast([NotedGroup(board, rank, size, backend) for rank in range(size)], tuple(range(size)), 1, nbytes)
    assert [board.did[rank] for rank in range(size)] == [[f"broadcast {nbytes} of 1"]] * size
    assert not board.carried


def test_a_large_broadcast_needs_little_staging_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BROADCAST_NBYTES", MIB)
    board = Board()
    groups = [NotedGroup(board, rank, 2, "nccl") for rank in range(2)]
    broadcast(groups, (0, 1), 0, 3 * AHEAD * MIB + 5)
    for group in groups:
        assert board.did[group.rank] == [*[f"broadcast {MIB} of 0"] * (3 * AHEAD), "broadcast 5 of 0"]
        assert group.most_under_way == AHEAD + 1


@pytest.mark.parametrize("members", [3, 4, 10, 34, 200])
@pytest.mark.parametrize("nbytes", [CHAIN_MIN_NBYTES + 1, 200 * MIB, 16 << 30])
def test_a_chain_fills_with_a_16th_unless_its_pieces_would_be_too_small(nbytes: int, members: int) -> None:
    piece = piece_nbytes(nbytes, members)
    assert PIECE_MIN_NBYTES <= piece <= PIECE_MAX_NBYTES
    assert piece == PIECE_MIN_NBYTES or (members - 2) * piece <= nbytes / 16
    at_most = nbytes // 16 // (members - 2)
    assert piece == PIECE_MAX_NBYTES or piece >= at_most, "a larger one would be too large"


def test_pieces_of_some_sizes() -> None:
    found = [piece_nbytes(nbytes, members) for nbytes, members in ((0, 2), (64 * MIB, 4), (1 << 30, 34), (1 << 30, 3))]
    assert found == [PIECE_MIN_NBYTES, 2 * MIB, 2 * MIB, PIECE_MAX_NBYTES]

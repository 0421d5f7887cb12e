"""Weight sources in the form of vLLM 0.33, which have passes in place of an
iteration.

Covers: weights/copies/passes.py, weights/feed.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.testing import FakeRun
from replicas.weights.feed import Feed, Shard


@dataclass(frozen=True)
class Along:
    dim: int


class Everywhere:
    pass


@dataclass(frozen=True)
class Row:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


class Source:
    """One tensor on a mesh of 2 x 2 ranks, split along both of its dimensions, and one
    that all have."""

    whole = torch.arange(35.0).reshape(5, 7)
    norm = torch.ones(3)

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @cached_property
    def metadata(self) -> list[Row]:
        placements = (Along(0), Along(1))
        return [Row("w", torch.float32, (5, 7), (0, 1, 2, 3), (2, 2), placements), Row("norm", torch.float32, (3,))]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", self.whole
        yield "norm", self.norm

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", self.whole.chunk(2, 0)[self._rank // 2].chunk(2, 1)[self._rank % 2]
        yield "norm", self.norm


def test_a_source_with_passes_is_published_whole() -> None:
    with FakeRun() as run:
        trainer, target = run.join("trainer"), run.target("rollout")
        for version in (1, 2):
            trainer.publish(Source(0)).wait(20)
            trainer.loaded(version).wait(20)
            assert torch.equal(target.weights["w"], Source.whole)
            assert torch.equal(target.weights["norm"], Source.norm)


@pytest.mark.parametrize("rank", range(4))
def test_each_ranks_own_pieces_are_shards_without_a_gather(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    found = dict(iter(Feed(Source(rank), mode="parts").weights))  # type: ignore[call-overload]  # it is a stream
    piece = found["w"]
    assert isinstance(piece, Shard)
    box = tuple(slice(begin, begin + size) for begin, size in zip(piece.offsets, piece.tensor.shape, strict=True))
    assert torch.equal(Source.whole[box], piece.tensor)
    assert piece.shape == (5, 7)
    assert found["norm"] is Source.norm


class OfVllm(Source):
    """As of a base class that has both passes, of which one is not written."""

    def __init__(self, *implements: str) -> None:
        super().__init__(0)
        self._implements = implements

    def implements_iter_full(self) -> bool:
        return "full" in self._implements

    def implements_iter_local(self) -> bool:
        return "local" in self._implements


def test_of_two_passes_the_one_that_is_written_is_taken() -> None:
    whole = dict(iter(Feed(OfVllm("full"), mode="parts").weights))  # type: ignore[call-overload]  # it is a stream
    assert whole["w"] is Source.whole
    with pytest.raises(errors.UsageError, match="iter_local alone"):
        iter(Feed(OfVllm("local"), mode="image").weights)  # type: ignore[call-overload]

"""weights/copies/host_copies: tensors of very many short runs are copied in parts.

Covers: weights/copies/host_copies.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from replicas.weights.copies import host_copies, streaming
from replicas.weights.copies.copying import copy_host

pytestmark = pytest.mark.skipif(not streaming.available, reason="torch copies, without lists of runs")

MOST = 6


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each call of the C code had."""
    found: list[int] = []
    copy_runs: Callable[..., None] = streaming.copy_runs

    def counted(check: object, to: object, sources: object, sizes: list[int], **options: object) -> None:
        found.append(len(sizes))
        copy_runs(check, to, sources, sizes, **options)

    monkeypatch.setattr(streaming, "copy_runs", counted)
    monkeypatch.setattr(host_copies, "RUNS_MAX", MOST)
    return found


def numbered(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)


STRIDED = {
    "columns": lambda: numbered(2, 50)[..., ::2],
    "rows and columns": lambda: numbered(20, 6)[::2, ::2],
    "three axes": lambda: numbered(4, 6, 8)[::2, ::2, ::2],
    "transposed": lambda: numbered(8, 6)[:, ::2].t(),
    "runs of three": lambda: numbered(30, 4)[:, :3],
    "one run": lambda: numbered(30, 4).t(),
    "complex and conjugate": lambda: torch.view_as_complex(numbered(9, 4, 2, dtype=torch.float32))[:, ::2].conj(),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("load", [False, True], ids=["from it", "to it"])
def test_one_tensor_has_few_runs_at_a_time(make: Callable[[], torch.Tensor], load: bool, counts: list[int]) -> None:
    theirs = make()
    ours = torch.zeros(theirs.shape, dtype=theirs.dtype)
    expected = theirs.clone()
    if load:
        ours.copy_(expected)
        theirs.zero_()
    copy_host([(theirs, ours) if load else (ours, theirs)], 1, str, load=load)
    assert torch.equal(ours, expected)
    assert torch.equal(theirs, expected)
    assert counts
    assert max(counts) <= MOST


def test_many_tensors_share_a_call_up_to_the_limit(counts: list[int]) -> None:
    theirs = [numbered(2, 4)[..., ::2] + 0 for _ in range(3)] + [numbered(2, 2 * n)[..., ::2] for n in (1, 2, 1, 9)]
    ours = [torch.zeros(one.shape, dtype=torch.float32) for one in theirs]
    copy_host(list(zip(ours, theirs, strict=True)), 1, str, load=False)
    assert all(torch.equal(one, other.float()) for one, other in zip(ours, theirs, strict=True))
    assert max(counts) <= MOST
    assert len(counts) < sum(one.numel() for one in theirs)

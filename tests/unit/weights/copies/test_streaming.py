"""Copies past the caches give what torch's copies give.

Covers: weights/copies/copying.py, weights/copies/streaming.py.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from replicas.weights.copies import streaming
from replicas.weights.copies.copying import copy_pairs
from replicas.weights.copies.streaming import bypasses_caches

LARGE = 9 << 20
"""More than one thread copies it."""


def test_it_is_compiled_where_there_is_a_compiler() -> None:
    assert streaming.available or not any(map(shutil.which, ("cc", "gcc", "clang")))
    assert not bypasses_caches(1 << 20)
    assert bypasses_caches(1 << 40) is streaming.available


@pytest.mark.parametrize(("to", "source"), [(0, 0), (1, 0), (0, 3), (63, 64), (17, 5)])
def test_every_byte_arrives_at_any_alignment_and_none_beside_it(
    to: int, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "bypasses_caches", lambda nbytes: True)
    given = torch.arange(LARGE + 256, dtype=torch.int64).to(torch.uint8)
    memory = torch.full((LARGE + 256,), 255, dtype=torch.uint8)
    copy_pairs([(memory[to : to + LARGE], given[source : source + LARGE])])
    assert torch.equal(memory[to : to + LARGE], given[source : source + LARGE])
    assert memory[:to].eq(255).all()
    assert memory[to + LARGE :].eq(255).all()


@pytest.mark.slow
@pytest.mark.parametrize("past_caches", [False, True])
def test_tensors_of_every_kind_are_copied_in_one_call(past_caches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "bypasses_caches", lambda nbytes: past_caches)
    torch.manual_seed(1)
    wide = torch.randn(300, 200)
    sources = [
        *(wide, wide.t(), wide[:, ::2], wide.to(torch.bfloat16), torch.randn(LARGE).to(torch.float8_e4m3fn)),
        *(
            torch.nn.Parameter(wide.clone()),
            torch.view_as_complex(torch.randn(LARGE, 2)).conj(),
            torch.ones(3),
            torch.ones(0),
        ),
    ]
    found = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    found[1] = torch.zeros(200, 300, dtype=torch.float64)
    copy_pairs(zip(found, sources, strict=True))
    for one, source in zip(found, sources, strict=True):
        assert torch.equal(
            one.float() if one.element_size() == 1 else one,
            source.to(one.dtype).float() if one.element_size() == 1 else source.to(one.dtype),
        )


def test_autograd_notices_the_write() -> None:
    weight = torch.nn.Parameter(torch.ones(LARGE))
    loss = (weight * weight).sum()
    copy_pairs([(weight.detach(), torch.zeros(LARGE))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def test_tensors_of_inference_mode_are_loaded_by_any_thread() -> None:
    with torch.inference_mode():
        engine = [torch.zeros(3 << 20), torch.zeros(4)]
    plain = torch.zeros(5)
    copy_pairs((to, torch.ones(to.shape)) for to in (*engine, plain))
    assert all(to.eq(1).all() for to in (*engine, plain))

"""`publish(check_finite=True)`: no version with NaN or infinite values is committed.

Covers: weights/finite.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.core.base.manifest import PartManifest, Piece, TensorSpec
from replicas.testing import FakeRun
from replicas.weights.finite import not_finite

NAN, INF = float("nan"), float("inf")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.ones(5), "bad": torch.tensor([1.0, value, value]).bfloat16(), "n": torch.arange(3)}


GIVEN: list[Callable[[dict[str, torch.Tensor]], Any]] = [dict, lambda given: iter(given.items())]


@pytest.mark.parametrize("given", GIVEN)
def test_it_fails_alone_and_by_name_and_the_next_one_is_committed(given: Callable[[object], Any]) -> None:
    with FakeRun() as run:
        trainer, target = run.join("trainer"), run.target("rollout")
        for value in (NAN, INF, -INF):
            pending = trainer.publish(given(weights(value)), check_finite=True, deadline=20)
            with pytest.raises(errors.ManifestMismatch, match=r"values that are not finite, in 'bad' \(2\)"):
                pending.wait(30)
        version = trainer.publish(given(weights(2.0)), check_finite=True, deadline=20).wait(30).version
        assert trainer.loaded(version, deadline=20).wait(30) == version
        assert trainer.publish(given(weights(NAN)), deadline=20).wait(30).version == version + 1, "off by default"
        assert trainer.loaded(version + 1, deadline=20).wait(30) == version + 1
        assert target.versions == [version, version + 1]


def test_a_slot_that_was_written_in_place_is_checked_too() -> None:
    with FakeRun({"policy": {"sources": ["trainer"], "targets": ["rollout"], "slots": 2}}) as run:
        trainer = run.join("trainer")
        with trainer.arena_like(weights(1.0)) as slot:
            for name, tensor in weights(NAN).items():
                slot[name].copy_(tensor)
            pending = trainer.publish(slot, check_finite=True, deadline=20)
        with pytest.raises(errors.ManifestMismatch, match="not finite"):
            pending.wait(30)
        assert trainer.publish(weights(1.0), deadline=20).wait(30).version


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "complex64", "float8_e5m2", "float8_e4m3fn", "int8", "bool"]
)
def test_every_dtype(dtype: str) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    values = torch.tensor([1.0, NAN, 0.0]).to(kind)
    data = values.view(torch.uint8).reshape(-1)
    expected = {} if dtype in ("int8", "bool") else {"w": 1}
    assert not_finite(data, PartManifest((TensorSpec("w", dtype, (3,)),))) == expected


def test_pieces_of_one_tensor_are_counted_together() -> None:
    specs = (TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (4,)))
    pieces = (Piece(1, (0,), (2,), 0), Piece(1, (2,), (2,), 8), Piece(0, (0,), (2,), 16))
    data = torch.tensor([NAN, 1.0, INF, 1.0, 1.0, 1.0]).view(torch.uint8)
    assert not_finite(data, PartManifest(specs, pieces=pieces)) == {"b": 2}

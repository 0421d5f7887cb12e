"""Megatron's export generators as sources: one walk at a time, to its end, with scales
as they are.

Covers: sources/megatron.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from replicas import errors
from replicas.sources import is_linear, megatron
from replicas.sources.megatron import float8_blocks
from replicas.testing import FakeRun
from replicas.weights.feed import Feed


class Exported(NamedTuple):
    """What Megatron-Bridge yields where it names its own parameter, too."""

    param_name: str
    weight: torch.Tensor | None
    megatron_param_name: str = ""


class Bridge:
    """Counts its walks, and reuses the memory of a tensor at the next step."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.begun = self.ended = 0

    def export_hf_weights(self) -> Iterator[Exported]:
        self.begun += 1
        for name, tensor in self.tensors.items():
            yielded = tensor.clone()
            yield Exported(name, yielded)
            yielded.view(torch.uint8).fill_(77)
        self.ended += 1


def declared(source: Any) -> bool:
    """Whether metadata() says exactly what the walk gives."""
    return bool([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source] == source.metadata())


@pytest.mark.slow
def test_each_publish_is_one_walk_to_the_end() -> None:
    bridge = Bridge(a=torch.ones(3), b=torch.zeros(2, 2))
    source = megatron(bridge.export_hf_weights)
    assert (bridge.begun, bridge.ended) == (1, 1)  # names and shapes
    with FakeRun() as run, run.join("trainer") as trainer, run.join("rollout") as rollout:
        for step in (1, 2):
            bridge.tensors["a"] = torch.full((3,), float(step))
            trainer.publish(source).wait(10)
            with rollout.receive(deadline=10).wait() as update:
                assert {name: tensor.tolist() for name, tensor in update} == {"a": [step] * 3, "b": [[0, 0], [0, 0]]}
        assert (bridge.begun, bridge.ended) == (3, 3)
        bridge.tensors["c"] = torch.ones(1)
        with pytest.raises(errors.ManifestMismatch, match="'c' is not in the channel's manifest"):
            trainer.publish(source)
        assert (bridge.begun, bridge.ended) == (4, 4)  # the other ranks' collectives go on


def test_a_checkpoint_saves_the_first_walk() -> None:
    bridge = Bridge(a=torch.ones(3))
    source = megatron(bridge.export_hf_weights, like={"a": torch.empty(3, device="meta")})
    assert bridge.begun == 0
    assert declared(source)


def test_scales_keep_their_precision() -> None:
    bridge = Bridge(
        w=torch.ones(4, 4).to(torch.float8_e4m3fn),
        w_scale_inv=torch.full((1, 1), 1 / 3),
        x=torch.ones(3),
        n=torch.arange(2),
    )
    source = megatron(bridge.export_hf_weights, dtype=torch.bfloat16)
    assert declared(source)
    found = {name: tensor.dtype for name, tensor in source if tensor is not None}
    assert found == {"w": torch.float8_e4m3fn, "w_scale_inv": torch.float32, "x": torch.bfloat16, "n": torch.int64}


@pytest.mark.parametrize("shape", [(128, 128), (130, 200), (1, 5), (129, 1), (256, 0)])
def test_blocks_of_float8_times_their_scales_are_the_weights(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    weight[:1] *= 1000
    blocks, scales = float8_blocks(weight)
    assert blocks.shape == shape
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    again = blocks.float() * spread
    # a mantissa of 3 bits; what is small beside its block's largest is subnormal
    assert bool(((again - weight.float()).abs() <= weight.float().abs() / 16 + spread * 2**-9).all())
    assert torch.equal(float8_blocks(torch.zeros(3, 3))[1], torch.ones(1, 1))


@pytest.mark.parametrize("largest", [1e-44, 1e-41, 1e-38, 1e-36, 1.0, 3.4e38])
def test_the_scale_of_tiny_and_huge_blocks_is_a_normal_number(largest: float) -> None:
    weight = torch.full((2, 200), largest)
    weight[0, :128] = 0.0
    blocks, scales = float8_blocks(weight)
    tiny = torch.finfo(torch.float32).tiny
    assert bool(((tiny <= scales) & scales.isfinite()).all())
    again = blocks.float() * scales.repeat_interleave(128, 1)[:, :200]
    assert bool(((again - weight).abs() <= weight.abs() / 16 + tiny * 2**-9).all())


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_spoils_no_other_element(odd: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(130, 5)
    wanted, scales = float8_blocks(weight)
    weight[3, 2] = 0.0
    weight[3, 2] = odd
    blocks, found = float8_blocks(weight)
    assert torch.equal(found, scales)
    assert blocks.float().isnan().nonzero().tolist() == [[3, 2]]
    blocks[3, 2] = wanted[3, 2]
    assert torch.equal(blocks.float(), wanted.float())


@pytest.mark.slow
def test_what_is_not_finite_is_found_in_float8() -> None:
    bridge = Bridge(a__weight=torch.tensor([[1.0, math.inf]]))
    source = megatron(bridge.export_hf_weights, float8=is_linear)
    found = pytest.raises(errors.ManifestMismatch, match=r"'a\.weight' \(1\)")
    with FakeRun() as run, run.join("trainer") as trainer, found:
        trainer.publish(source, check_finite=True).wait(10)


def test_matrices_are_quantised_on_the_way() -> None:
    linear = "model.layers.0.mlp.experts.5.up_proj.weight"
    bridge = Bridge()
    bridge.tensors = {
        "model.embed_tokens.weight": torch.ones(3, 2).bfloat16(),
        linear: torch.ones(130, 2).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.ones(4, 2).bfloat16(),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(2).bfloat16(),
        "model.layers.0.self_attn.q_proj.bias": torch.ones(2).bfloat16(),
        "model.layers.0.mlp.quantised.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
    }
    source = megatron(bridge.export_hf_weights, float8=is_linear)
    assert declared(source)
    new = [(name, dtype, shape) for name, dtype, shape in source.metadata() if name.startswith(linear)]
    assert new == [(linear, torch.float8_e4m3fn, (130, 2)), (f"{linear}_scale_inv", torch.float32, (2, 1))]
    assert [name for name, dtype, _ in source.metadata() if dtype == torch.float8_e4m3fn] == [
        linear,
        "model.layers.0.mlp.quantised.weight",
    ]


def test_a_walk_goes_on_for_the_other_ranks_where_this_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(weight: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError

    bridge = Bridge(a__weight=torch.ones(2, 2), b__weight=torch.ones(2, 2))
    source = megatron(bridge.export_hf_weights, float8=is_linear)
    monkeypatch.setattr(sys.modules[float8_blocks.__module__], "float8_blocks", full)
    with FakeRun() as run, run.join("trainer") as trainer:
        with pytest.raises(torch.OutOfMemoryError):
            trainer.publish(source)
        assert (bridge.begun, bridge.ended) == (2, 2)
        monkeypatch.undo()
        trainer.publish(source).wait(10)


def test_ranks_that_get_the_same_tensors_share_them() -> None:
    bridge = Bridge(a=torch.ones(1), b=torch.ones(2), c=torch.ones(3))
    names = []
    for rank in range(2):
        source = megatron(bridge.export_hf_weights, share=(rank, 2))
        names.append([entry.name for entry in Feed(source, mode="parts")])
    assert names == [["a", "c"], ["b"]]
    assert bridge.begun == bridge.ended == 2


def test_a_rank_that_yields_nothing_takes_part() -> None:
    def export() -> Iterator[Any]:
        yield Exported("a", None)
        yield "b", None

    source = megatron(export)
    assert not [*source, *source.metadata()]


@pytest.mark.parametrize("wrong", [{"dtype": torch.int8}, {"share": (2, 2)}, {"share": (-1, 2)}])
def test_a_wrong_argument_names_the_right_ones(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError, match=r"pass|name"):
        megatron(list, **wrong)
    with pytest.raises(errors.UsageError, match="pass a function"):
        megatron(iter([]))  # type: ignore[arg-type]  # a generator itself

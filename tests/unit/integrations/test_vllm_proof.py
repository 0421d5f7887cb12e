"""What a worker's layers have been given, found out from the layers themselves.

(In the released vLLM: ``tests/engines/test_vllm_reload.py``.)

Covers: integrations/vllm_worker/proof.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from replicas.integrations.vllm_worker.proof import PLACES_MAX, CopiedRegion, compare_sample, place_of


class UnquantizedLinearMethod:
    """Named as vLLM's; a packed layer has no weight any more."""

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ layer.packed.T
        return found


class Fp8LinearMethod:
    pass


class Layer(nn.Module):
    """A layer of two fused tensors, with a row of padding between."""

    def __init__(self, method: object = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 4))
        self.quant_method = method

    def pack(self) -> None:
        self.packed = self.weight.detach().clone()
        self.weight = nn.Parameter(torch.empty(0))
        self.cpu_linear = True


def fused(model: nn.Module, path: str, first: torch.Tensor, second: torch.Tensor) -> list[CopiedRegion]:
    """Load them; where they went."""
    weight = model.get_submodule(path)._parameters["weight"]
    assert weight is not None
    places = []
    for name, tensor, start in (("q", first, 0), ("k", second, 4)):
        written = weight.data[start : start + len(tensor)]
        written.copy_(tensor)
        places.append(place_of(name, tensor, tensor.view(tensor.shape), written, (path, "weight", (7, 4))))
    return [place for place in places if place is not None]


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    image = torch.arange(100.0)  # all tensors of a version share its memory
    return {"q": image[10:22].view(3, 4), "k": image[30:42].view(3, 4)}


Change = Callable[[Layer], None]
PLAIN: dict[str, tuple[object, bool]] = {
    "no method": (None, False),
    "plain": (UnquantizedLinearMethod(), False),
    "packed": (UnquantizedLinearMethod(), True),
}


@pytest.mark.parametrize(("method", "packed"), PLAIN.values(), ids=PLAIN)
def test_a_tensor_that_was_not_loaded_right_is_named(
    weights: dict[str, torch.Tensor], method: object, packed: bool
) -> None:
    model = nn.ModuleDict({"proj": Layer(method)})
    places = fused(model, "proj", weights["q"], weights["k"])
    layer: Any = model["proj"]
    if packed:
        layer.pack()
    assert compare_sample(model, places, weights, 1) == ([], 2, 0)
    with torch.no_grad():
        (layer.packed if packed else layer.weight)[6, 3] += 1
    assert compare_sample(model, places, weights, 1) == (["k in proj.weight"], 1, 0)


def test_what_a_layer_has_made_of_its_weights_cannot_be_told(weights: dict[str, torch.Tensor]) -> None:
    quantized, moved = Layer(Fp8LinearMethod()), Layer()
    model = nn.ModuleDict({"quantized": quantized, "moved": moved})
    places = [place for path in model for place in fused(model, path, weights["q"], weights["k"])]
    moved.weight = nn.Parameter(moved.weight.detach().T.contiguous())
    assert compare_sample(model, places, weights, 1) == ([], 0, 4)


def test_a_nan_elsewhere_in_a_packed_layer_blames_no_tensor(weights: dict[str, torch.Tensor]) -> None:
    model = nn.ModuleDict({"proj": Layer(UnquantizedLinearMethod())})
    places = fused(model, "proj", weights["q"], weights["k"])
    layer: Any = model["proj"]
    layer.pack()
    layer.packed[6, 2] = math.nan
    proof = compare_sample(model, places, weights, 1)
    assert (proof.wrong, proof.not_compared) == ([], 1)


def test_a_version_of_nan_is_what_was_published(weights: dict[str, torch.Tensor]) -> None:
    model = nn.ModuleDict({"proj": Layer()})
    weights = {name: tensor * math.nan for name, tensor in weights.items()}
    places = fused(model, "proj", weights["q"], weights["k"])
    assert compare_sample(model, places, weights, 1) == ([], 2, 0)


def test_a_tied_layer_that_kept_an_old_packed_copy_is_found(weights: dict[str, torch.Tensor]) -> None:
    embedding, head = Layer(), Layer(UnquantizedLinearMethod())
    head.weight = embedding.weight
    head.packed, head.cpu_linear = embedding.weight.detach().clone(), True
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    places = fused(model, "embedding", weights["q"], weights["k"])
    proof = compare_sample(model, places, weights, 1)
    assert proof.wrong == ["k in embedding.weight", "q in embedding.weight"]


def test_what_a_loader_computes_is_no_place(weights: dict[str, torch.Tensor]) -> None:
    q, written, where = weights["q"], torch.zeros(3, 4), ("proj", "weight", (7, 4))
    assert place_of("q", q, q, written, where) is not None
    for given in (q * 2, q.to(torch.bfloat16), weights["k"], q[:1].expand(2, 4)):
        assert place_of("q", q, given, written, where) is None


def test_each_place_of_a_large_model_has_its_turn() -> None:
    layer = nn.Linear(1, 3 * PLACES_MAX, bias=False)
    model, tensor = nn.ModuleDict({"proj": layer}), layer.weight.detach().clone()
    places = [
        CopiedRegion("w", row, (1, 1), "proj", "weight", tuple(tensor.shape), row, (1, 1), (1, 1))
        for row in range(len(tensor))
    ]
    with torch.no_grad():
        layer.weight[100] += 1
    found = [bool(compare_sample(model, places, {"w": tensor}, version).wrong) for version in (1, 2, 3)]
    assert sorted(found) == [False, False, True]
    assert sum(compare_sample(model, places, {"w": tensor}, 1)[1:]) <= PLACES_MAX

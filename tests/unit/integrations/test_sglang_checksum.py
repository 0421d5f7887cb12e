"""What a SGLang server tells of its tensors, compared with a version.

Covers: integrations/sglang/checksum.py.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch

from replicas.integrations.sglang.checksum import difference

TENSORS = {
    "model.layers.0.self_attn.q_proj.weight": torch.arange(4.0).reshape(2, 2),
    "model.layers.0.self_attn.k_proj.weight": torch.arange(4.0, 6.0).reshape(1, 2),
    "model.layers.0.self_attn.v_proj.weight": torch.arange(6.0, 8.0).reshape(1, 2),
    "model.norm.weight": torch.ones(2, dtype=torch.bfloat16),
}


def told(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def rank(checksums: dict[str, str], *, shards: int = 1) -> dict[str, Any]:
    return {"checksums": checksums, "parallelism_info": [{"role": "target", "tp_size": shards, "pp_size": 1}]}


PACKED = torch.cat([tensor for name, tensor in TENSORS.items() if "proj" in name])
CHECKSUMS = {
    "model.layers.0.self_attn.qkv_proj.weight": told(PACKED),
    "model.norm.weight": told(TENSORS["model.norm.weight"]),
    "model.rotary.cos_sin": "0" * 16,  # no tensor of the version
}


@pytest.mark.parametrize(
    ("changed", "expected"), [({}, ""), ({"model.norm.weight": "0" * 16}, "model.norm.weight differ")]
)
def test_checksums_of_a_cpu_are_compared_with_packed_layers_put_together(
    changed: dict[str, str], expected: str
) -> None:
    for others in ([], [rank(CHECKSUMS)]):  # of one scheduler, and of two that each have the model
        ranks = [rank({**CHECKSUMS, **changed}), *others]
        assert difference(TENSORS, lambda *_, ranks=ranks: {"ranks": ranks}, on_cpu=True) == expected


def test_a_part_of_a_packed_layer_that_differs_is_seen() -> None:
    others = {**TENSORS, "model.layers.0.self_attn.v_proj.weight": torch.zeros(1, 2)}
    found = difference(others, lambda *_: {"ranks": [rank(CHECKSUMS)]}, on_cpu=True)
    assert found == "model.layers.0.self_attn.qkv_proj.weight differ"


class Rows:
    """Shows rows by the names of a checkpoint, as some models can; checksums are of
    shards.

    :param replicas: of each of the model's replicas; one replica's are in no list.
    """

    def __init__(self, *replicas: dict[str, torch.Tensor] | None) -> None:
        self.replicas = replicas

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/weights_checker":
            return {"ranks": [rank(CHECKSUMS, shards=2)] * 2}
        shown = [None if one is None else _rows(one[body["name"]], body["truncate_size"]) for one in self.replicas]
        return shown if len(shown) > 1 else shown[0]


def _rows(tensor: torch.Tensor, count: int) -> Any:
    def told(value: Any) -> Any:
        if isinstance(value, list):
            return [told(one) for one in value]
        return value if math.isfinite(value) else None

    return told((tensor[:count] if tensor.ndim else tensor).float().tolist())


OTHERS = {**TENSORS, "model.norm.weight": TENSORS["model.norm.weight"] * 2}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_rows_are_compared_where_checksums_cannot(on_cpu: bool) -> None:
    assert difference(TENSORS, Rows(TENSORS), on_cpu=on_cpu) == ""
    assert difference(TENSORS, Rows(OTHERS), on_cpu=on_cpu) == "model.norm.weight differ"


def test_rows_of_each_replica_of_the_model_are_compared() -> None:
    assert difference(TENSORS, Rows(TENSORS, TENSORS), on_cpu=False) == ""
    assert difference(TENSORS, Rows(TENSORS, OTHERS), on_cpu=False) == "model.norm.weight differ"
    assert difference(TENSORS, Rows(None, OTHERS), on_cpu=False) == "model.norm.weight differ"
    assert difference(TENSORS, Rows(None, None), on_cpu=False) is None


def test_rows_of_tensors_of_any_shape_are_compared() -> None:
    experts = {"experts": torch.arange(24.0).reshape(2, 3, 4), "scale": torch.tensor(2.0)}
    assert difference(experts, Rows(experts), on_cpu=False) == ""
    assert difference(experts, Rows(experts, experts), on_cpu=False) == ""


def test_numbers_that_json_cannot_tell_are_no_difference() -> None:
    tensors = {"a": torch.tensor([[math.nan, 1.0], [math.inf, 2.0]])}
    assert difference(tensors, Rows(tensors), on_cpu=False) == ""


def test_schedulers_of_which_it_is_not_told_how_they_share_the_model_are_not_compared() -> None:
    ranks = [{"checksums": CHECKSUMS}]
    assert difference(TENSORS, lambda path, _: {"ranks": ranks} if "checker" in path else None, on_cpu=True) == ""
    ranks.append({"checksums": dict.fromkeys(CHECKSUMS, "0" * 16)})
    assert difference(TENSORS, lambda path, _: {"ranks": ranks} if "checker" in path else None, on_cpu=True) is None


def test_an_answer_that_is_no_rows_is_not_compared() -> None:
    assert difference(TENSORS, lambda *_: {"error": "no such verb"}, on_cpu=False) is None


def test_a_server_that_shows_nothing_cannot_be_compared() -> None:
    assert difference(TENSORS, lambda *_: None, on_cpu=True) is None

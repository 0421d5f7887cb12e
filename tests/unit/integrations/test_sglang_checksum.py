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


PACKED = torch.cat([tensor for name, tensor in TENSORS.items() if "proj" in name])
CHECKSUMS = {
    "model.layers.0.self_attn.qkv_proj.weight": told(PACKED),
    "model.norm.weight": told(TENSORS["model.norm.weight"]),
    "model.rotary.cos_sin": "0" * 16,  # no tensor of the version
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({}, ""), ({"model.norm.weight": "0" * 16}, "model.norm.weight differ")],
)
def test_checksums_of_a_cpu_are_compared_with_packed_layers_put_together(
    changed: dict[str, str], expected: str
) -> None:
    assert difference(TENSORS, lambda *_: {"ranks": [{"checksums": {**CHECKSUMS, **changed}}]}, on_cpu=True) == expected


def test_a_part_of_a_packed_layer_that_differs_is_seen() -> None:
    others = {**TENSORS, "model.layers.0.self_attn.v_proj.weight": torch.zeros(1, 2)}
    found = difference(others, lambda *_: {"ranks": [{"checksums": CHECKSUMS}]}, on_cpu=True)
    assert found == "model.layers.0.self_attn.qkv_proj.weight differ"


class Rows:
    """Shows rows by the names of a checkpoint, as some models can; of several
    schedulers the checksums are of parts."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/weights_checker":
            return {"ranks": [{"checksums": CHECKSUMS}] * 2}
        rows = self.tensors[body["name"]].float()[: body["truncate_size"]].tolist()
        return [
            [None if not math.isfinite(one) else one for one in row] if isinstance(row, list) else row for row in rows
        ]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_rows_are_compared_where_checksums_cannot(on_cpu: bool) -> None:
    assert difference(TENSORS, Rows(TENSORS), on_cpu=on_cpu) == ""
    others = {**TENSORS, "model.norm.weight": TENSORS["model.norm.weight"] * 2}
    assert difference(TENSORS, Rows(others), on_cpu=on_cpu) == "model.norm.weight differ"


def test_numbers_that_json_cannot_tell_are_no_difference() -> None:
    tensors = {"a": torch.tensor([[math.nan, 1.0], [math.inf, 2.0]])}
    assert difference(tensors, Rows(tensors), on_cpu=False) == ""


def test_a_server_that_shows_nothing_cannot_be_compared() -> None:
    assert difference(TENSORS, lambda *_: None, on_cpu=True) is None

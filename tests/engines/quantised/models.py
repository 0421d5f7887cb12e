"""Small quantised checkpoints with random weights, and the same weights dequantised:
DeepSeek-V3 in float8 with a scale for each block, gpt-oss with experts in MXFP4.

The values follow from the specifications of the formats, by no library's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engines.programs.architectures import ARCHITECTURES, make

__all__ = ["MODELS", "write"]

BLOCK, GROUP = 128, 32
"""Rows and columns of a float8 block; elements of an MXFP4 group."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = torch.tensor((*POSITIVE, *(-value for value in POSITIVE)))
"""Values of the codes of float4 (e2m1)."""
WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 128}
WHOLE_BLOCKS |= {"qk_rope_head_dim": 128, "q_lora_rank": 128}
"""transformers 5.24 refuses blocks that are smaller at an edge, or uses others
(findings/transformers-guesses-float8-blocks.sh)."""
FLOAT8: Mapping[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}
MXFP4: Mapping[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
Tensors = dict[str, torch.Tensor]


def _to_float8(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """Quantised tensors in the place of this one, and what they are worth; None: it
    stays."""
    if "_proj" not in name or weight.ndim != 2:
        return None
    rows, columns = (size // BLOCK for size in weight.shape)
    scale = weight.float().reshape(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
    grown = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    codes = (weight.float() / grown).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, (codes.float() * grown).to(weight.dtype)


def _to_mxfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """As :func:`_to_float8`; codes are random, two in a byte, of which the low one is
    the first. A checkpoint has [experts, out, in], transformers [experts, in, out]."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    experts, wide, out = weight.shape
    blocks = torch.randint(0, 256, (experts, out, wide // GROUP, GROUP // 2), dtype=torch.uint8)
    scales = torch.randint(122, 126, (experts, out, wide // GROUP), dtype=torch.uint8)
    values = torch.stack((FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]), -1).flatten(-2)
    values = values * torch.exp2(scales.float() - 127)[..., None]
    worth = values.reshape(experts, out, wide).transpose(1, 2).contiguous().to(weight.dtype)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, worth


Quantise = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor] | None]
MODELS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Quantise]] = {
    "DeepSeek-V3": (WHOLE_BLOCKS, FLOAT8, _to_float8),
    "gpt-oss": ({}, MXFP4, _to_mxfp4),
}


def write(architecture: str, seed: int, quantised: Path, plain: Path) -> None:
    """Write the two checkpoints of this seed."""
    kind, config, _ = ARCHITECTURES[architecture]
    sizes, described, quantise = MODELS[architecture]
    model = make(kind, {**config, **sizes}, seed, torch.bfloat16)
    for folder in (quantised, plain):
        model.save_pretrained(folder)
    codes, worth = Tensors(), Tensors()
    for name, tensor in load_file(plain / "model.safetensors").items():
        found, worth[name] = quantise(name, tensor) or ({name: tensor}, tensor)
        codes |= found
    assert len(codes) > len(worth)
    save_file(codes, quantised / "model.safetensors", {"format": "pt"})
    save_file(worth, plain / "model.safetensors", {"format": "pt"})
    file = quantised / "config.json"
    text = json.loads(file.read_text())
    rope = text["rope_parameters"]  # released checkpoints have it under the names of before, which mlx-lm reads
    scaling = None if rope["rope_type"] == "default" else rope
    before = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    file.write_text(json.dumps(text | before | {"quantization_config": described}))

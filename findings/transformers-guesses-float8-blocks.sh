#!/usr/bin/env bash
# transformers 5.24.0: weights in float8 with a scale for each block of 128 x 128 (DeepSeek-V3's format) are dequantised
# with other blocks where a dimension is not a multiple of 128. Expected: weight_block_size of the config, [128, 128],
# with smaller blocks at the edges, as DeepSeek-V3 has them.
#
# The block is taken to be the dimension divided by the number of scales. 960 rows (SmolLM2-360M's width) have 8 scales,
# so blocks of 120 are used: from row 120 on, many rows get a wrong scale, without a word. 576 rows (kv_a_proj_with_mqa
# of DeepSeek-V3 itself) have 5 scales, and loading fails. On a machine without a GPU this is the default.
# Seen, with the numbers 1 to 8 as scales of the rows: row 120 is multiplied by 2, and row 127 too, row 840 by 8;
# "Weight shape (576, 576) not divisible by scale grid (5, 5)".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - 2> "$folder/stderr" <<'PY'
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FLOAT8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def read(width: int) -> torch.Tensor:
    """q_proj of a model of this width, of which each weight is 1, times the number of its block's row."""
    sizes = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": width // 64, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, head_dim=64, **sizes))
    folder, blocks = Path(str(width)), -(-width // 128)
    model.config.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": FLOAT8}))
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors[name] = torch.ones_like(tensor)
        if "_proj" in name:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            scales = torch.arange(1.0, blocks + 1)[:, None].repeat(1, blocks)
            tensors[name.replace("weight", "weight_scale_inv")] = scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return LlamaForCausalLM.from_pretrained(folder).model.layers[0].self_attn.q_proj.weight


scales = read(960)[:, 0].int()
for row in (0, 119, 120, 127, 128, 839, 840, 959):
    print(f"row {row}: times {scales[row]}, of block {row // 128 + 1}")
assert scales.tolist() == [row // 120 + 1 for row in range(960)], "the blocks are others now"
assert read(1024)[:, 0].int().tolist() == [row // 128 + 1 for row in range(1024)]
try:
    read(576)
    raise SystemExit("576 rows are read now")
except RuntimeError:
    said = Path("stderr").read_text()  # where this program is started with it
    lines = {line.strip() for line in said.splitlines() if "not divisible by scale grid" in line}
    print(*sorted(lines, key=len)[:1])
    assert any("(576, 576) not divisible by scale grid (5, 5)" in line for line in lines)
PY

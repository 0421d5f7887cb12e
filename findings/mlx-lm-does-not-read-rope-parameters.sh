#!/usr/bin/env bash
# transformers 5.24.0 with mlx-lm 0.32.2: a Llama, Mistral or Qwen2 that save_pretrained wrote is computed by mlx-lm
# with another rotary embedding, without a word. Expected: the same answers, or an error, as for a key that it needs.
#
# transformers 5 writes "rope_parameters" in config.json, with rope_theta and scaling inside; mlx-lm's classes of these
# models read the top-level "rope_theta" and "rope_scaling" of transformers 4, and have defaults for them. Checkpoints
# that were published earlier have the old keys: only what was saved again (fine-tuned, say) is hit. Qwen3 is read well.
# Seen, largest difference of log-probabilities: llama with theta 10000 (the default there) and Qwen3 with 1e7: 1e-5 or
# less; llama with 500000 (Llama 3's): 3.5; with linear scaling by 8: 4; likewise the others; with the old keys added:
# 1e-5 or less.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 mlx-lm==0.32.2 'mlx[cpu]==0.32.4'
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - 2> "$folder/stderr" <<'PY'
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

IDS = [5, 77, 13, 200, 9, 42, 7] * 4
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
folder = Path("model")


def difference(kind: str, rope: dict[str, Any], old_keys: bool = False) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, rope_parameters=dict(rope))).eval()
    with torch.no_grad():
        for one in model.parameters():
            if one.ndim > 1:
                one.normal_(std=0.15)
        ours = model(torch.tensor([IDS])).logits[0].log_softmax(-1).numpy()
    model.save_pretrained(folder)
    if old_keys:
        config = folder / "config.json"
        added = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
        config.write_text(json.dumps(json.loads(config.read_text()) | added))
    theirs, _ = load_model(folder)
    theirs.set_dtype(mx.float32)
    logits = theirs(mx.array([IDS]))[0]
    most = float(np.abs(np.array(logits - mx.logsumexp(logits, -1, keepdims=True)) - ours).max())
    print(f"{kind} {rope}{' and the old keys' if old_keys else ''}: {most:.2g}")
    return most


THETA = {"rope_type": "default", "rope_theta": 500000.0}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
assert difference("llama", THETA | {"rope_theta": 10000.0}) < 1e-4
assert difference("llama", THETA, old_keys=True) < 1e-4
assert difference("qwen3", THETA | {"rope_theta": 1e7}) < 1e-4
QWEN = THETA | {"rope_theta": 10000.0}  # 1e6 is the default there
for kind, rope in (("llama", THETA), ("llama", LINEAR), ("mistral", THETA), ("qwen2", QWEN)):
    assert difference(kind, rope) > 1, "mlx-lm reads it now"
PY

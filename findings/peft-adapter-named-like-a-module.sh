#!/usr/bin/env bash
# peft 0.21.2: save_pretrained(selected_adapters=["math"]) writes the tensors of another adapter too, or leaves out a
# part of "math", without a word, when the other adapter's name is a part of the model's own names.
#
# get_peft_model_state_dict removes a tensor of an unwanted adapter by ".NAME." in its name. Where each name has that
# part ("model"), nothing is left, and the unfiltered set is written; where some have it ("self_attn"), those are gone.
# Seen: with "model" 16 tensors in place of 8; with "self_attn" 4 of 8. With a name of its own ("policy"): 8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PY'
from pathlib import Path

from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
)
SEEN = {"policy": 8, "model": 16, "self_attn": 4}


def written(other: str) -> int:
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(LlamaForCausalLM(CONFIG), lora, adapter_name="math")
    model.add_adapter(other, lora)
    model.save_pretrained(other, selected_adapters=["math"])
    with safe_open(Path(other) / "math" / "adapter_model.safetensors", "pt") as file:
        return len(list(file.keys()))


found = {other: written(other) for other in SEEN}
print("tensors of adapter 'math' that are written beside an adapter called:", found)
assert found == SEEN, "peft behaves otherwise now"
PY

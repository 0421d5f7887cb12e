#!/usr/bin/env bash
# transformers 5.24.0 with peft 0.21.2, each the newest release at the end of November 2026:
# model.add_adapter(LoraConfig(...)) always raises ValueError, as it wants peft >= 0.22.0, which is not released. pip
# installs both together without a conflict. peft's own get_peft_model works on the same model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/env/bin/pip" check > /dev/null
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PY'
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
)
lora = LoraConfig(r=2, target_modules=["q_proj"])
try:
    LlamaForCausalLM(CONFIG).add_adapter(lora)
    raise SystemExit("add_adapter works now")
except ValueError as error:
    print("add_adapter:", error)
    assert ">= 0.22.0" in str(error), "it wants another release now"
get_peft_model(LlamaForCausalLM(CONFIG), lora)
print("get_peft_model: works")
PY

"""Start the released vLLM, in this process, with a small quantised model, and let its
worker join a channel; print the error of that, as an object of JSON.

    python tests/engines/programs/quantised_engine.py ARCHITECTURE METHOD FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

import torch
from vllm import LLM

from replicas.errors import UsageError
from tests.engines.programs.architectures import ARCHITECTURES, make

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
METHODS = {
    "float8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "MXFP4": {"quant_method": "mxfp4"},
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**INT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**INT8, "strategy": "token", "dynamic": True},
            }
        },
    },
}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 128}
"""Whole blocks of 128."""


def main(architecture: str, method: str, folder: str) -> dict[str, str]:
    kind, config, _ = ARCHITECTURES[architecture]
    model = make(kind, {**config, **WIDE}, 0, torch.bfloat16)
    model.save_pretrained(folder)
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": METHODS[method]}))
    given: Any = {"weight_transfer_config": {"backend": "replicas"}, "load_format": "dummy"}
    try:
        llm = LLM(folder, enforce_eager=True, max_model_len=128, skip_tokenizer_init=True, **given)
        executor: Any = llm.llm_engine.model_executor
        engine = executor.driver_worker.worker.weight_transfer_engine
        engine.init_transfer_engine(engine.init_info_cls("policy", 2))
    except (ValueError, NotImplementedError, UsageError) as error:
        return {"kind": type(error).__name__, "text": str(error)}
    return {}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)

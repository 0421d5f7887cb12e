"""A version of a tied trainer in the released vLLM, in this process: in a model whose
output layer is tied, too, or has a weight of its own.

    python tests/engines/programs/tied_engine.py KIND FOLDER

It prints how far the engine's log-probabilities are from those of transformers' model,
with the model of its folder and with the version, as an object of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig
from vllm import LLM, SamplingParams

from replicas.testing import FakeRun

IDS = [5, 77, 13, 200, 9, 42, 7]
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
KINDS = {
    "ignores the head": (LlamaConfig, True),
    "refuses the head": (Gemma2Config, True),
    "has a head": (LlamaConfig, False),
}
"""Class of the configuration, and whether the engine's model is tied."""


def model(kind: type[Any], seed: int, *, tied: bool) -> Any:
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(kind(**SIZES, tie_word_embeddings=tied), dtype=torch.float32)
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(torch.randn_like(value) * 0.2 if value.ndim > 1 else 1 + 0.1 * torch.randn_like(value))
    return made.to(torch.bfloat16).eval()


def error(engine: LLM, of: Any) -> float:
    """Of log-probabilities, on average, against this model of transformers'."""
    with torch.no_grad():
        all_of = of(torch.tensor([IDS])).logits[0].float().log_softmax(-1)
    true = all_of[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
    (answer,) = engine.generate({"prompt_token_ids": IDS}, wanted, use_tqdm=False)
    rows: Any = answer.prompt_logprobs
    served = torch.tensor([row[token].logprob for row, token in zip(rows[1:], IDS[1:], strict=True)])
    return float((served - true).abs().mean())


def main(kind: str, folder: str) -> dict[str, float]:
    config, tied = KINDS[kind]
    old, new = model(config, 0, tied=tied), model(config, 1, tied=True)
    old.save_pretrained(folder)
    given: Any = {"weight_transfer_config": {"backend": "replicas"}}
    llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128, **given)
    executor: Any = llm.llm_engine.model_executor
    worker: Any = executor.driver_worker.worker.weight_transfer_engine
    found = {"from disk": error(llm, old), "another model": error(llm, new)}
    with FakeRun() as run:
        worker._channel = run.join("rollout")  # without a follower as its rank 0
        run.join("trainer").publish(new).wait(60)  # both names of the head
        worker.start_weight_update()
        worker.receive_weights(worker.update_info_cls(1))
        worker.finish_weight_update()
        found["loaded"] = error(llm, new)
        worker.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)

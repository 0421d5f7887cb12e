"""``trl_trainer.py async|grpo MODEL STEPS URL``: TRL's trainers with replicas' weight
sync, on a CPU.

It writes the digest of the model at the beginning and after each step to
``expected.jsonl``, and the trainer's log history to ``history.json``.

What TRL needs a GPU for is stood in for, and nothing else: the peak of the device's
FLOPs (a metric), and FlashAttention.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen2_5_chat_template

from replicas.integrations.trl import WeightTransfer, server_mode
from replicas.sources import hf
from tests.engines.programs.digests import digest

INFLIGHT = 32
"""Most requests at once of the rollouts of ``async``."""
OPTIONS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "num_generations": 2,
    "max_completion_length": 8,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids)) for ids in completion_ids]


class Recorder(TrainerCallback):
    """The model's digest before and after each step; placed ahead of TRL's own
    callbacks, which sync."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        row = {"step": state.global_step, "digest": digest(hf(model)), "at": time.time()}
        with Path("expected.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    on_step_end = on_train_begin


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor,
    *_: Any, softmax_scale: float, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention's function of this name, causal, for segments of other lengths."""
    ends = zip(starts_q.tolist()[1:], starts_k.tolist()[1:], strict=True)
    found, at, of = [], 0, 0
    for end_q, end_k in ends:
        mask = torch.ones(end_q - at, end_k - of, dtype=torch.bool).tril((end_k - of) - (end_q - at))
        q, k, v = (one.transpose(0, 1)[None] for one in (query[at:end_q], key[of:end_k], value[of:end_k]))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
        at, of = end_q, end_k
    return torch.cat(found)


def prompts(count: int) -> Dataset:
    words = ["red", "blue", "green", "large", "small"]
    rows = [[{"role": "user", "content": f"Say {words[i % 5]} and {i}."}] for i in range(count)]
    return Dataset.from_dict({"prompt": rows})


def made(kind: str, model: str, steps: int, url: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen2_5_chat_template  # one that TRL has a training template for
    common: dict[str, Any] = {
        "model": model, "reward_funcs": reward, "train_dataset": prompts(64), "processing_class": tokenizer,
    }  # fmt: skip
    options = {**OPTIONS, "max_steps": steps, "vllm_server_base_url": url}
    if kind == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        arguments: Any = GRPOConfig(
            use_vllm=True,
            vllm_mode="server",
            vllm_server_timeout=120,
            vllm_importance_sampling_correction=False,  # by the whole completion, whose tokens are random
            model_init_kwargs={"dtype": "bfloat16"},
            **options,
        )
        with server_mode(wait="loaded") as figures:
            return GRPOTrainer(args=arguments, callbacks=[Recorder(), figures], **common)
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
    # By default 1,600 requests would be in flight: as many threads of each look-alike.
    arguments = AsyncGRPOConfig(
        dtype="bfloat16", token_budget=256, max_staleness=100, max_inflight_tasks=INFLIGHT, **options
    )
    transfer = WeightTransfer(wait="committed")
    return AsyncGRPOTrainer(args=arguments, callbacks=[Recorder()], weight_transfer=transfer, **common)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = made(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    trainer.train()
    Path("history.json").write_text(json.dumps(trainer.state.log_history))

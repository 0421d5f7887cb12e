"""The trainer of `make demo-llm`: TRL's GRPOTrainer teaches a small model to add.

    python llm_train.py MODEL URL STEPS SEED RECORDS

Completions come from the vLLM servers behind ``URL``, and each step's weights go to
them over the channel ``policy``. The lines that a user adds to a TRL program are the
import and the ``with``.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from replicas.integrations.trl import server_mode

PROMPT = "<|im_start|>user\n{a} + {b} = ?<|im_end|>\n<|im_start|>assistant\n{a} + {b} ="
LARGEST = 20
GENERATIONS = 4
PROMPTS_PER_STEP = 8


def problems(count: int, seed: int) -> Dataset:
    """Return sums of two numbers, as prompts to complete."""
    draw = random.Random(seed)
    pairs = [(draw.randint(1, LARGEST), draw.randint(1, LARGEST)) for _ in range(count)]
    return Dataset.from_list([{"prompt": PROMPT.format(a=a, b=b), "answer": a + b} for a, b in pairs])


def reward(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """Return 1 for a completion that begins with the right number, else 0."""
    found = (re.match(r"\s*(\d+)", text) for text in completions)
    return [float(match is not None and int(match[1]) == right) for match, right in zip(found, answer, strict=True)]


class Records(TrainerCallback):  # type: ignore[misc]  # a class of transformers
    """Appends TRL's log of each step to a file, for the view."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, "at": time.time(), **logs}) + "\n")


def main(folder: str, url: str, steps: int, seed: int, records: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arguments = GRPOConfig(
        output_dir="out",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        max_steps=steps,
        seed=seed,
        per_device_train_batch_size=GENERATIONS * PROMPTS_PER_STEP,
        num_generations=GENERATIONS,
        max_completion_length=4,
        learning_rate=2e-5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        use_cpu=True,
        bf16=False,  # a CPU without AVX-512 computes 30 times as slowly in it; the servers compute in float32, too
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    with server_mode(first=model) as figures:  # replicas: the servers take each step's weights
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=reward,
            train_dataset=problems(PROMPTS_PER_STEP * steps, seed),
            args=arguments,
            callbacks=[figures, Records(records)],
        )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
